"""From flags to the objects of a run: the wrapped model, the training loop, the summary at the start."""

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from util import attention
from util.data.bad_images import TooManyBadImages
from util.data.open import OpenBatches, data_hint, training_batches
from util.data.transforms import Normalize
from util.recompute import recompute_blocks
from util.run import shard
from util.run.distributed import Process
from util.run.flags import Plan, RunSchedule
from util.run.logging import RunLog
from util.run.loop import TrainLoop
from util.run.precision import PRECISIONS, precision
from util.run.resume import RunRecord
from util.run.run_folder import write_json
from util.run.saving import CheckpointSaver
from util.run.start import Start
from util.run.watchdog import Watchdog
from util.text import count_of


def build_device(args: argparse.Namespace, process: Process) -> torch.device:
    """Returns the device to build the model on. With --shard the whole model never lies on a GPU."""
    return torch.device("cpu") if args.shard else process.device


def wrap_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, plan: Plan, process: Process
) -> nn.Module:
    """Applies --attention, --recompute, --compile and --shard, then wraps the model in DDP if there are several ranks.

    Returns the module to call. Parameters of `optimizer` are replaced by their shards.
    """
    attention.prefer(args.attention)
    if args.recompute:
        recompute_blocks(model)
    if args.shard:
        shard.shard(model, optimizer, process.device, PRECISIONS[plan.precision], args.compile)
        return model
    if args.compile:
        model.compile(fullgraph=True, dynamic=False)
    if process.world_size == 1:
        return model
    # Buffers are not broadcast with every step, but before evaluation. Newer torch has renamed the flag.
    known = inspect.signature(DistributedDataParallel).parameters
    flag = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    # With accumulation some backward passes do not all-reduce, which a static graph does not allow.
    static = plan.accum_iter == 1
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=static, **{flag: False})


@dataclass
class RunParts:
    """What a training loop works with."""

    model: nn.Module  # wrapped: the module to call
    loop: TrainLoop
    batches: Generator[Any, None, None]  # of all remaining steps; no worker runs before the first one is taken
    open_batches: OpenBatches  # opens another stream of batches
    saver: CheckpointSaver
    watchdog: Watchdog


def assemble(
    args: argparse.Namespace,
    plan: Plan,
    start: Start,
    record: RunRecord,
    schedule: RunSchedule,
    content: dict[str, Any] | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    normalize: Normalize,
    images: Any,
    transform: Callable,
    collator: Callable,
) -> RunParts:
    """Opens the log, wraps the model, and makes loop, batches and saver. content: the restored checkpoint, if any."""
    process, epoch_steps = start.process, schedule.steps_per_epoch
    first_step = content["meta"]["step"] if content else 0
    last_step = min(schedule.num_steps, args.max_steps or sys.maxsize)
    log = RunLog(start.output_dir, first_step, last_step, process.is_main, epoch_steps)
    wrapped = wrap_model(model, optimizer, args, plan, process)
    watchdog = Watchdog(args.dist_timeout, process.rank, process.world_size, process.store)
    loop = TrainLoop(
        parameters=[p for p in wrapped.parameters() if p.requires_grad],
        optimizer=optimizer,
        precision=precision(plan.precision, process.device),
        normalize=normalize,
        learning_rate=schedule.learning_rate,
        log=log,
        images_per_step=plan.total_batch_size,
        steps_per_epoch=epoch_steps,
        last_step=last_step,
        accum_iter=plan.accum_iter,
        clip_grad=args.clip_grad,
        seed=args.seed,
        print_freq=args.print_freq,
        data_hint=data_hint(plan, process, images),
        watchdog=watchdog,
    )
    loop.load_state(content, first_step)
    open_batches, report = training_batches(args, plan, process, images, transform, log, model.img_size, loop.fail)
    batches = open_batches(range(first_step, last_step), collator)
    saver = CheckpointSaver(start.output_dir, record, model, loop, args.shard, schedule, first_step, start.lock)
    loop.on_report = partial(report_bad_images, report, saver)
    return RunParts(wrapped, loop, batches, open_batches, saver, watchdog)


def report_bad_images(report: Callable[[], None], saver: CheckpointSaver) -> None:
    """Calls `report`. Saves the current step before its error ends the run on all ranks: all steps are good."""
    try:
        report()
    except (TooManyBadImages, OSError):
        saver.save(required=False)
        raise


def announce(
    args: argparse.Namespace,
    plan: Plan,
    start: Start,
    schedule: RunSchedule,
    log: RunLog,
    settings: Mapping[str, Any],
    rows: Mapping[str, str],
) -> None:
    """Prints the summary `rows` of a run, what follows from the flags, and all remarks. Writes settings.json."""
    process = start.process
    if process.is_main:
        write_json(start.output_dir / "settings.json", settings)
    batch = f"{plan.batch_size} x {count_of(process.world_size, 'process')} x {plan.accum_iter} accumulated"
    common = {
        "batch": f"{plan.total_batch_size} = {batch}",
        "schedule": schedule.summary,
        "device": f"{count_of(process.world_size, 'process')} on {plan.device} in {plan.precision}",
        "code": str(start.origin["code"]),
        "command": f"{start.origin['command']} on {', '.join(start.origin['hosts'])}",
        "output": str(start.output_dir),
    }
    log.start_summary({**rows, **common})
    log.write_to_file(json.dumps(settings))
    gpus = torch.cuda.device_count() if plan.device == "cuda" else 0
    if gpus > 1 and process.world_size == 1:
        start.remarks.append(f"note: 1 of {gpus} GPUs is used; torchrun --nproc_per_node uses more")
    if args.compile:
        start.remarks.append("note: the first step compiles the model, which takes minutes; nothing is reported before")
    for remark in start.remarks:
        log.info(remark)
