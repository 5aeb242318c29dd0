"""The values that follow from the flags, the processes and the machine, and the schedule."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from util import collectives
from util.host import cores_per_process
from util.lr_sched import Schedule
from util.run.processes.distributed import Process, gpu_memory, precision
from util.text import count_of

MAX_DEFAULT = 512  # images of a micro-batch; not measured: more should make a GPU no faster
MAX_WORKERS = 32


@dataclass(frozen=True)
class Plan:
    """The values that follow from the flags, the world size and the machine."""

    batch_size: int  # per process and micro-batch
    accum_iter: int  # micro-batches per step
    total_batch_size: int  # per step over all processes
    lr: float  # peak learning rate
    num_workers: int  # per process
    device: str  # "cpu" or "cuda"
    precision: str  # a key of PRECISIONS


def make_plan(
    args: argparse.Namespace,
    process: Process,
    default_batch_size: int = 64,
    fitting_batch: Callable[[int, str], int] | None = None,
) -> Plan:
    """Checks the flags and computes what follows from them. ValueError if they cannot work together.

    default_batch_size: largest micro-batch, if only the total is given. fitting_batch: returns how many images
    fit a GPU, by its bytes and the precision; on GPUs up to MAX_DEFAULT of these are the largest. For all ranks.
    """
    check_flags(args)
    name = precision(args.precision, process.device).name
    collectives.refuse_differences({"--precision": name}, "precision of the GPUs")
    most = default_batch_size
    memory = least_memory(process)
    if memory and fitting_batch is not None and args.batch_size is None:
        most = max(1, min(MAX_DEFAULT, fitting_batch(memory, name)))
    batch_size, accum_iter, total = split_batch(
        args.batch_size, args.accum_iter, args.total_batch_size, process.world_size, most
    )
    lr = args.blr * total / 256 if args.lr is None else args.lr
    if args.min_lr > lr:
        raise ValueError(f"--min_lr {args.min_lr:g} lies above the peak learning rate, {lr:g}: lower it")
    workers = num_workers(args, process)
    return Plan(batch_size, accum_iter, total, lr, workers, process.device.type, name)


def least_memory(process: Process) -> int:
    """Returns the memory of the smallest of all processes' GPUs, since all take the same batch; 0 on CPUs."""
    return min(collectives.gather_objects(gpu_memory(process.device)))


@dataclass(frozen=True)
class RunSchedule:
    """The length of a run in optimizer steps, and what depends on the step."""

    steps_per_epoch: int
    num_steps: int  # of the whole schedule
    keep_every: int  # steps between checkpoints that are kept for good
    learning_rate: Callable[..., float]  # (step, lr_scale) -> rate of that step, counted from 0
    summary: str  # one line for the log
    pauses: tuple[int, ...]  # at the multiples of these steps something may be due
    epochs: float  # length of the schedule, recorded with the run
    decay_step: int | None = None  # of wsd: here the decay begins, and a longer run can start
    unit: str = "epoch"  # of --eval_every, or "iteration"

    def last_step(self, max_steps: int | None) -> int:
        """Returns the step after which a start ends."""
        return self.num_steps if max_steps is None else min(self.num_steps, max_steps)


def schedule_by_epochs(args: argparse.Namespace, plan: Plan, steps_per_epoch: int) -> RunSchedule:
    """Returns the schedule of a run whose flags count epochs."""
    learning_rate = learning_rates({**vars(args), "lr": plan.lr}, steps_per_epoch)
    length = f"{count_of(args.epochs, 'epoch')} of {count_of(steps_per_epoch, 'step')}"
    decay_step: int | None = None
    if args.decay_epochs:
        decay_step = (args.epochs - args.decay_epochs) * steps_per_epoch
    return RunSchedule(
        steps_per_epoch=steps_per_epoch,
        num_steps=args.epochs * steps_per_epoch,
        keep_every=args.save_every * steps_per_epoch,
        learning_rate=learning_rate,
        summary=f"{length}, {args.warmup_epochs:g} of warm-up, peak learning rate {plan.lr:.4g}",
        pauses=(steps_per_epoch,),
        epochs=args.epochs,
        decay_step=decay_step,
    )


def learning_rates(settings: Mapping[str, Any], steps_per_epoch: int) -> Schedule:
    """Returns the learning rates of a run with these settings, of which `lr` is the peak."""
    return Schedule(
        settings["lr_schedule"],
        steps_per_epoch,
        settings["epochs"],
        settings["warmup_epochs"],
        lr=settings["lr"],
        min_lr=settings["min_lr"],
        warmup_lr=settings["warmup_lr"],
        lr_steps=tuple(settings["lr_steps"]),
        decay_epochs=settings["decay_epochs"],
    )


def check_flags(args: argparse.Namespace) -> None:
    """ValueError if flags do not go together. The parser has checked the range of each number."""
    if "crop_scale" in args and not 0 < args.crop_scale[0] <= args.crop_scale[1] <= 1:
        raise ValueError(f"--crop_scale must be two areas 0 < low <= high <= 1, got {args.crop_scale}")
    for name in ("image_column", "label_column"):
        if getattr(args, name, None) is not None and args.dataset != "hf":
            raise ValueError(f"--{name} has no effect, because --dataset {args.dataset} has no columns: leave it out")
    if "epochs" not in args:
        return
    if bool(args.lr_steps) != (args.lr_schedule == "simmim_steps"):
        pair = f"{args.lr_schedule!r} and {args.lr_steps}"
        raise ValueError(f"--lr_schedule simmim_steps and --lr_steps need each other, got {pair}")
    if bool(args.decay_epochs) != (args.lr_schedule == "wsd"):
        pair = f"{args.lr_schedule!r} and {args.decay_epochs}"
        raise ValueError(f"--lr_schedule wsd and --decay_epochs need each other, got {pair}")
    if not 0 <= args.warmup_epochs <= args.epochs - args.decay_epochs:
        raise ValueError(
            f"--warmup_epochs {args.warmup_epochs} must lie between 0 and --epochs {args.epochs}, less --decay_epochs "
            f"{args.decay_epochs}"
        )


def check_repeats(args: argparse.Namespace, batch_size: int) -> None:
    """ValueError unless the crops of an image lie in one micro-batch."""
    if batch_size % args.repeat_aug:
        raise ValueError(f"--repeat_aug {args.repeat_aug} must divide the micro-batch, --batch_size {batch_size}")


def num_workers(args: argparse.Namespace, process: Process) -> int:
    """Returns --num_workers, or this process's share of the cores less one, which is the trainer's."""
    if args.num_workers is not None:
        return args.num_workers
    return min(MAX_WORKERS, max(1, cores_per_process(process.local_world_size) - 1))


def check_same(args: argparse.Namespace, stored: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    """ValueError if one of the flags `names` has another value than `stored`, the settings of the trained `what`."""
    for name in sorted(names):
        if name in stored and getattr(args, name) != stored[name]:
            raise ValueError(f"--{name} {getattr(args, name)}, but {what} has {stored[name]}: leave it out")


def split_batch(
    batch_size: int | None, accum_iter: int | None, total: int | None, world_size: int, default: int = 64
) -> tuple[int, int, int]:
    """Returns (batch_size, accum_iter, total) with total = batch_size * world_size * accum_iter, or raises ValueError.

    Without `batch_size`, a process takes the largest micro-batch that divides its share of the total, up to `default`.
    """
    if total is None:
        batch_size = batch_size or 64
        accum_iter = accum_iter or 1
        return batch_size, accum_iter, batch_size * accum_iter * world_size
    per_process, rest = divmod(total, world_size)
    processes = count_of(world_size, "process")
    if rest:
        raise ValueError(f"a total batch of {total} cannot be split over {processes}: change one of them")
    most = batch_size or (per_process // accum_iter if accum_iter else default)
    fitting = max(size for size in range(1, max(1, most) + 1) if per_process % size == 0)
    if batch_size not in (None, fitting):
        split = f"--batch_size {batch_size} on {processes}"
        raise ValueError(f"a total batch of {total} cannot be split into {split}: try --batch_size {fitting}")
    if accum_iter not in (None, per_process // fitting):
        split = f"--batch_size {fitting} on {processes} takes {per_process // fitting}"
        raise ValueError(f"--accum_iter {accum_iter}, but a total batch of {total} with {split}")
    return fitting, per_process // fitting, total
