"""The flags that the training mains share: definitions, checks, and the values that follow from them."""

import argparse
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from util import collectives
from util.attention import CHOICES
from util.cores import cores_per_process
from util.data.folders import DEFAULT_PATH
from util.data.invalid_pixels import nodata_value
from util.data.open import DATASETS
from util.lr_sched import SCHEDULES, Schedule
from util.run.cli import Change, FlagContainer, FlagGroup, Parser, describe_warmup
from util.run.distributed import PRECISIONS, Process, gpu_memory, precision
from util.text import count_of

MAX_DEFAULT = 512  # images of a micro-batch; not measured: more should make a GPU no faster
# Steps of a schedule that is compiled by default. The first step takes up to 90 s more, each later one of ViT-B 25 ms
# less (H100, 512 images).
MIN_COMPILED_STEPS = 5000
MAX_WORKERS = 32


def add_optimisation_flags(group: FlagGroup) -> None:
    """Adds batch split, epochs, learning rate and its schedule, weight decay, seed."""
    add_batch_flags(group)
    add_epoch_flags(group)
    add_update_flags(group)


def add_batch_flags(group: FlagGroup) -> None:
    """Adds the split of the total batch over processes and micro-batches."""
    flag = group.add_argument
    flag(
        "--batch_size",
        everyday=True,
        changes="split",
        type=int,
        at_least=1,
        help="images per process and micro-batch (default: 64; with --total_batch_size the largest that divides a "
        "process's share, up to 64, or 512 for a linear probe; in pre-training on GPUs up to 512 of those that fit)",
    )
    flag(
        "--accum_iter",
        everyday=True,
        changes="split",
        type=int,
        at_least=1,
        help="micro-batches per step (default: 1, or what --total_batch_size needs)",
    )
    flag(
        "--total_batch_size",
        everyday=True,
        type=int,
        at_least=1,
        help="images per step over all processes; --accum_iter follows from it",
    )


def add_epoch_flags(group: FlagGroup) -> None:
    """Adds the length of a schedule in epochs, and its learning rate."""
    flag = group.add_argument
    flag("--epochs", everyday=True, type=int, default=100, at_least=1, help="length of the schedule")
    flag(
        "--warmup_epochs",
        everyday=True,
        type=float,
        help="epochs of linear warm-up; if not given, that of the recipe or of the defaults, and in a schedule that is "
        "shorter than theirs at most a tenth, or their share if that is more: 40 of 800 epochs become 4 of 40",
    )
    flag("--blr", everyday=True, type=float, at_least=0, help="base learning rate: lr = blr * total batch size / 256")
    flag("--lr", everyday=True, type=float, at_least=0, help="absolute learning rate, instead of --blr")
    flag("--min_lr", type=float, at_least=0, help="learning rate at the end of the schedule")
    flag("--warmup_lr", type=float, default=0.0, at_least=0, help="learning rate at the start of the warm-up")
    flag(
        "--lr_schedule",
        default="mae",
        choices=SCHEDULES,
        help="schedule of the framework's release: see util/lr_sched.py",
    )
    flag(
        "--lr_steps",
        type=float,
        nargs="*",
        default=(),
        help="for simmim_steps: epochs after which the rate falls tenfold",
    )


def add_update_flags(group: FlagGroup) -> None:
    """Adds clipping, weight decay and seed."""
    flag = group.add_argument
    flag("--clip_grad", type=float, above=0, help="bound on the norm of the gradient (default: no bound)")
    flag(
        "--weight_decay",
        everyday=True,
        type=float,
        default=0.05,
        at_least=0,
        help="weight decay of matrices; biases and norms have none",
    )
    flag(
        "--seed",
        everyday=True,
        type=int,
        default=0,
        at_least=0,
        help="seed of initial weights, shuffling, augmentation and masks",
    )


def add_data_flags(group: FlagGroup) -> None:
    """Adds data source, decoding, random crop, workers."""
    flag = group.add_argument
    flag(
        "--dataset",
        everyday=True,
        default="folder",
        choices=DATASETS,
        help="kind of data; folder: image folders or tar shards; hf: Hugging Face datasets",
    )
    flag(
        "--data_path",
        everyday=True,
        changes="nothing",  # data may move: names and labels of the images are compared
        per_process=True,
        default=DEFAULT_PATH,
        help="root of the data; CIFAR is downloaded to it if it is not there; for hf also a name on the Hub",
    )
    flag("--image_column", changes="nothing", help="only for hf: column of the images (default: the only one)")
    flag(
        "--label_column",
        changes="nothing",
        help="only for hf: column of the classes (default: label, or the only ClassLabel)",
    )
    flag(
        "--loader",
        default="fast",
        choices=("fast", "reference"),
        help="reference: decode and resize by Pillow, as torchvision",
    )
    flag("--crop_scale", type=float, nargs=2, help="smallest and largest area of the random crop")
    add_hflip_flag(group)
    flag(
        "--vflip",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="turn half of the training images upside down at random: for images without an up, as of microscopes",
    )
    add_loading_flags(group)


def add_hflip_flag(group: FlagGroup) -> None:
    """Adds whether training images are mirrored."""
    group.add_argument(
        "--hflip",
        everyday=True,
        action=argparse.BooleanOptionalAction,
        default=True,
        help="mirror half of the training images at random",
    )


def add_pixel_flags(group: FlagGroup) -> None:
    """Adds channels of the images, and the statistics that normalise them."""
    flag = group.add_argument
    flag("--in_chans", everyday=True, type=int, default=3, at_least=1, help="channels of the images; 3: RGB")
    flag(
        "--mean",
        everyday=True,
        type=float,
        nargs="+",
        help="mean of each channel; a fraction of the full range, or in the unit of floats (default: those of the "
        "checkpoint that the run starts from, ImageNet's for 8-bit RGB, or the data's)",
    )
    flag(
        "--std",
        everyday=True,
        type=float,
        nargs="+",
        help="deviation of each channel, in the unit of --mean (default: as --mean)",
    )


def add_invalid_flags(group: FlagGroup) -> None:
    """Adds what marks invalid pixels, see `util.data.invalid_pixels`."""
    flag = group.add_argument
    flag(
        "--nodata",
        type=nodata_value,
        metavar="VALUE",
        help="value of invalid pixels of a band, or nan; they count neither in mean and deviation nor in the loss "
        "(write --nodata=-1e30 for a negative number with an exponent; default: all pixels are valid)",
    )
    flag(
        "--mask_band",
        type=int,
        help="band of the files, from 0 or -1 for the last, that is 0 at invalid pixels and no channel of --in_chans",
    )
    flag(
        "--bands",
        type=int,
        nargs="+",
        action="append",
        help="channels, from 0, that files with as many bands hold; the others are invalid; may be repeated",
    )


def add_all_valid_flag(group: FlagContainer, purpose: str = "") -> None:
    """Adds what overrides the marks of invalid pixels of a trained model. purpose: what it is for, in the help text."""
    group.add_argument(
        "--all_valid",
        changes="nothing",
        action="store_true",
        help=f"{purpose}nothing marks invalid pixels in these images, whatever did in those of the model's training",
    )


def add_eval_split_flag(group: FlagContainer, purpose: str = "") -> None:
    """Adds the images on which a trained model is evaluated. purpose: what it is for, in the help text."""
    group.add_argument(
        "--eval_split",
        everyday=True,
        changes="nothing",
        default="val",
        choices=("val", "test"),
        help=f"{purpose}the images that are evaluated; val is test where there is no val",
    )


def add_loading_flags(group: FlagGroup) -> None:
    """Adds unreadable images and workers."""
    flag = group.add_argument
    flag(
        "--max_bad_fraction",
        changes="nothing",
        type=float,
        default=0.01,
        help="share of training images that may be unreadable; each is replaced by another image",
    )
    flag(
        "--num_workers",
        everyday=True,
        changes="nothing",
        per_process=True,
        type=int,
        at_least=0,
        help="DataLoader workers per process (default: the process's share of the CPU cores minus one, from 1 to 32)",
    )


def add_run_flags(group: FlagGroup, unit: str = "epochs") -> None:
    """Adds output folder, resuming, device, precision, memory, saving, reports. unit: of --save_every."""
    add_folder_flags(group)
    add_device_flags(group)
    add_saving_flags(group, unit)
    group.add_argument(
        "--print_freq", changes="nothing", type=int, default=20, at_least=1, help="steps between reports"
    )
    group.add_argument(
        "--profile",
        changes="nothing",
        metavar="STEP",
        type=int,
        at_least=0,
        help="trace the three steps after this step of the run (rank 0); until the end, a GPU that runs out of memory "
        "leaves a snapshot",
    )


def add_folder_flags(group: FlagGroup) -> None:
    """Adds output folder and resuming."""
    flag = group.add_argument
    flag(
        "--output_dir",
        everyday=True,
        changes="nothing",
        help="folder of the run: checkpoints, logs, settings; the same command resumes the run in it",
    )
    flag(
        "--resume",
        everyday=True,
        changes="nothing",
        default="auto",
        help="where a new run starts: a checkpoint or a run's folder; not used if --output_dir holds checkpoints",
    )
    flag(
        "--allow_changes",
        changes="nothing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="resume although changed settings or data change the results",
    )


def add_device_flags(group: FlagGroup) -> None:
    """Adds how the model is computed: device, precision, kernels, memory."""
    flag = group.add_argument
    boolean = argparse.BooleanOptionalAction
    flag(
        "--device",
        everyday=True,
        changes="rounding",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto: a GPU if there is one",
    )
    flag(
        "--precision",
        everyday=True,
        default="auto",
        choices=("auto", *PRECISIONS),
        help="auto: bf16 or fp16 on a GPU, fp32 on a CPU",
    )
    flag(
        "--attention",
        changes="rounding",
        default="auto",
        choices=CHOICES,
        help="attention kernel that is tried first; short: for training with at most 256 tokens, auto on an H100",
    )
    flag(
        "--compile",
        everyday=True,
        changes="rounding",
        action=boolean,
        help="compile the training step by torch.compile, block by block (default: on a GPU with a C compiler, for "
        f"schedules of {MIN_COMPILED_STEPS} steps or more)",
    )
    flag(
        "--dist_timeout",
        changes="nothing",
        type=float,
        default=600,
        above=0,
        help="seconds without progress after which a process ends",
    )
    flag(
        "--check_nodes",
        changes="nothing",
        action=boolean,
        default=False,
        help="before the run, time products, copies and transfers of all processes for some seconds; warn of slow ones",
    )
    flag(
        "--recompute",
        everyday=True,
        changes="nothing",
        action=boolean,
        default=False,
        help="recompute blocks in the backward pass: less memory, more time",
    )
    flag(
        "--recompute_pointwise",
        changes="nothing",
        action=boolean,
        default=False,
        help="recompute blocks apart from matrix products and attention: takes less time, saves less memory",
    )
    flag(
        "--shard",
        changes="rounding",  # or results: see `changes_of_flags`
        action=boolean,
        default=False,
        help="shard parameters, gradients and optimizer state (FSDP2)",
    )
    flag(
        "--reshard",
        changes="nothing",
        action=boolean,
        default=True,
        help="with --shard: free gathered parameters until the backward pass (--no-reshard: less communication)",
    )


def add_saving_flags(group: FlagGroup, unit: str) -> None:
    """Adds the end of this start, and how often it saves. unit: of --save_every."""
    flag = group.add_argument
    flag(
        "--max_steps",
        everyday=True,
        changes="nothing",
        type=int,
        at_least=1,
        help="save and end after this step of the run (default: at the end of the schedule)",
    )
    flag(
        "--save_every",
        everyday=True,
        changes="nothing",
        type=int,
        default=20,
        at_least=1,
        help=f"{unit} between checkpoints that are kept; of the others the last two stay",
    )
    flag(
        "--save_minutes",
        changes="nothing",
        type=float,
        default=5.0,
        at_least=0,
        help="minutes between checkpoints, written at a report while training continues; 0: none",
    )
    flag(
        "--save_steps",
        changes="nothing",
        type=int,
        default=0,
        at_least=0,
        help="steps between checkpoints, besides; 0: none",
    )


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
    compile: bool | None = None  # None: not decided yet, see `decide_compilation`


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
    if args.shard and not dist.is_initialized():
        raise ValueError("--shard needs several processes: start with torchrun")
    if args.compile and process.device.type == "cuda":
        collectives.run_everywhere(refuse_without_compiler)
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
    return Plan(batch_size, accum_iter, total, lr, workers, process.device.type, name, args.compile)


def decide_compilation(plan: Plan, stored: bool | None, num_steps: int) -> bool:
    """Whether a run compiles: as its flag says, else as an earlier start did, else if its length pays for it on a GPU.

    stored: what the checkpoint to resume says; compiled code draws other random numbers. num_steps: of the schedule.
    The ranks, which must all call it, decide alike.
    """
    if plan.compile is not None:
        return plan.compile
    is_wanted = stored
    if stored is None:
        is_wanted = num_steps >= MIN_COMPILED_STEPS
    if not is_wanted or plan.device != "cuda":
        return False
    return not any(collectives.gather_objects(missing_for_compiler()))


def refuse_without_compiler() -> None:
    """ValueError if a GPU's code cannot be compiled here."""
    missing = missing_for_compiler()
    if missing:
        raise ValueError(f"--compile needs {' and '.join(missing)} on a GPU, or leave out --compile")


def missing_for_compiler() -> list[str]:
    """Returns what Triton, which compiles for GPUs, does not find: a C compiler, Python's header."""
    missing = []
    if not ("CC" in os.environ or shutil.which("gcc") or shutil.which("clang")):
        missing.append("a C compiler (install gcc, or set CC)")
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's, which Triton replaces, too
        scheme = "posix_prefix"
    if not os.path.isfile(os.path.join(sysconfig.get_path("include", scheme), "Python.h")):
        missing.append("Python.h (install python3-dev, or use the Python of uv or conda)")
    return missing


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
    unit: str = "epoch"  # of --eval_every, or "iteration"


def schedule_by_epochs(parser: Parser, args: argparse.Namespace, plan: Plan, steps_per_epoch: int) -> RunSchedule:
    """Returns the schedule of a run whose flags count epochs."""
    learning_rate = Schedule(
        args.lr_schedule,
        steps_per_epoch,
        args.epochs,
        args.warmup_epochs,
        lr=plan.lr,
        min_lr=args.min_lr,
        warmup_lr=args.warmup_lr,
        lr_steps=tuple(args.lr_steps),
    )
    length = f"{count_of(args.epochs, 'epoch')} of {count_of(steps_per_epoch, 'step')}"
    return RunSchedule(
        steps_per_epoch=steps_per_epoch,
        num_steps=args.epochs * steps_per_epoch,
        keep_every=args.save_every * steps_per_epoch,
        learning_rate=learning_rate,
        summary=f"{length}, {describe_warmup(parser, args, 'warmup_epochs')}, peak learning rate {plan.lr:.4g}",
        pauses=(steps_per_epoch,),
        epochs=args.epochs,
    )


def changes_of_flags(parser: Parser, plan: Plan) -> dict[str, Change]:
    """Returns what each flag changes in a run, by name."""
    changes = parser.changes
    if plan.precision == "bf16" and plan.device == "cuda":
        changes["shard"] = "results"  # on GPUs sharded blocks also round their norms to bfloat16
    return changes


def check_flags(args: argparse.Namespace) -> None:
    """ValueError if flags do not go together. The parser has checked the range of each number."""
    if not 0 <= args.max_bad_fraction < 1:
        raise ValueError(f"--max_bad_fraction must lie in [0, 1), got {args.max_bad_fraction}")
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
    if not 0 <= args.warmup_epochs <= args.epochs:
        raise ValueError(f"--warmup_epochs {args.warmup_epochs} must lie between 0 and --epochs {args.epochs}")


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
