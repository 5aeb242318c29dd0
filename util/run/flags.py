"""The flags that the training mains share: their definitions, their checks, and what follows from them."""

import argparse
import math

from util.attention import KERNELS
from util.data.datasets import DATASETS, available_cores
from util.lr_sched import SCHEDULES
from util.run.distributed import Process
from util.run.shard import check_group
from util.run.train_engine import PRECISIONS


def add_optimisation_flags(group):
    flag = group.add_argument
    flag("--batch_size", type=int, help="per process and micro-batch (default: 64, or the most below that fits the total)")
    flag("--accum_iter", type=int, help="micro-batches per step (default: 1, or what total_batch_size needs)")
    flag("--total_batch_size", type=int, help="per step over all processes; accumulation is derived from it")
    flag("--epochs", type=int, default=100)
    flag("--warmup_epochs", type=float)
    flag("--blr", type=float, help="base learning rate: lr = blr * total batch / 256")
    flag("--lr", type=float, help="absolute learning rate, instead of --blr")
    flag("--min_lr", type=float)
    flag("--warmup_lr", type=float, default=0.0, help="where the warm-up starts")
    flag("--lr_schedule", default="mae", choices=SCHEDULES, help="the frameworks' releases differ: util/lr_sched.py")
    flag("--lr_steps", type=float, nargs="*", default=(), help="epochs of tenfold drops, with simmim_steps")
    flag("--clip_grad", type=float, help="bounds the norm of the gradient (default: no bound)")
    flag("--weight_decay", type=float, default=0.05, help="not on biases and norms")
    flag("--seed", type=int, default=0)


def add_data_flags(group):
    flag = group.add_argument
    flag("--dataset", default="folder", choices=DATASETS)
    flag("--data_path", default="data", help="the images' folder; for CIFAR where it lies or goes, for iNaturalist with the .json")
    flag("--loader", default="fast", choices=("fast", "reference"), help="reference: Pillow decodes and resizes, as torchvision's")
    flag("--crop_scale", type=float, nargs=2, help="area of the random crop")
    flag("--max_bad_fraction", type=float, default=0.01, help="unreadable training images are replaced up to this share; 0: none")
    flag("--num_workers", type=int, help="per process (default: its share of the cores less one, 16 at most)")


def add_run_flags(group):
    flag, boolean = group.add_argument, argparse.BooleanOptionalAction
    flag("--output_dir")
    flag(
        "--resume",
        default="auto",
        help="where a run begins whose output_dir is empty: a checkpoint, or a run's folder. Checkpoints in output_dir always win",
    )
    flag("--allow_changes", action=boolean, default=False, help="resume though settings or data have changed what comes out")
    flag("--device", default="auto", choices=("auto", "cpu", "cuda"))
    flag("--precision", default="auto", choices=("auto", *PRECISIONS), help="auto: bf16 or fp16 on a GPU, fp32 on the CPU")
    flag("--attention", default="auto", choices=("auto", *KERNELS), help="kernel that is tried first: tools/benchmark_attention.py")
    flag("--compile", action=boolean, default=False, help="torch.compile the model")
    flag("--dist_timeout", type=float, default=600, help="seconds without progress (a step, a save) that end a process")
    flag("--recompute", action=boolean, default=False, help="compute blocks again in the backward pass: less memory, more time")
    flag("--shard", action=boolean, default=False, help="split parameters, gradients and moments over the processes (FSDP2)")
    flag("--max_steps", type=int, help="stop (and save) after this many steps of the run in all")
    flag("--save_every", type=int, default=20, help="epochs whose checkpoints are kept for good; the last two are kept anyway")
    flag("--save_steps", type=int, default=0, help="save every so many steps, too, not only after each epoch")
    flag("--print_freq", type=int, default=20, help="steps between reports")


def resolve(args: argparse.Namespace, process: Process, default_batch_size: int = 64) -> None:
    """Fills in what follows from other settings: batch split, learning rate, workers. ValueError if it cannot be."""
    check_finite(args)
    check_least(args, 1, "batch_size epochs print_freq save_every accum_iter total_batch_size max_steps")
    check_least(args, 0, "num_workers save_steps picture_every seed weight_decay min_lr blr lr warmup_lr")
    if not 0 < args.dist_timeout <= 1e6:
        raise ValueError(f"--dist_timeout must lie between 0 and a million seconds, got {args.dist_timeout}")
    if not 0 <= args.max_bad_fraction < 1:
        raise ValueError(f"--max_bad_fraction must lie in [0, 1), got {args.max_bad_fraction}")
    if args.clip_grad is not None and args.clip_grad <= 0:
        raise ValueError(f"--clip_grad must be above 0, got {args.clip_grad}")
    if args.lr_schedule == "simmim_steps" and not args.lr_steps:
        raise ValueError("--lr_schedule simmim_steps needs --lr_steps: the epochs after which the rate falls tenfold")
    if args.lr_steps and args.lr_schedule != "simmim_steps":
        raise ValueError(f"--lr_steps {args.lr_steps} needs --lr_schedule simmim_steps, got {args.lr_schedule!r}")
    if args.seed >= 2**63:
        raise ValueError(f"--seed must be below 2^63, got {args.seed}")
    if not 0 <= args.warmup_epochs <= args.epochs:
        raise ValueError(f"--warmup_epochs {args.warmup_epochs} must lie between 0 and --epochs {args.epochs}")
    if not 0 < args.crop_scale[0] <= args.crop_scale[1] <= 1:
        raise ValueError(f"--crop_scale must be two areas 0 < low <= high <= 1, got {args.crop_scale}")
    if args.shard:
        check_group()
    split_batch(args, process.world_size, default_batch_size)
    args.lr = args.blr * args.total_batch_size / 256 if args.lr is None else args.lr
    if args.min_lr > args.lr:
        raise ValueError(f"--min_lr {args.min_lr:g} lies above the peak learning rate, {args.lr:g}: lower it")
    resolve_workers(args, process)


def resolve_workers(args: argparse.Namespace, process: Process) -> None:
    if args.num_workers is None:
        args.num_workers = min(16, max(1, available_cores() // process.local_world_size - 1))  # one core is the trainer's


def check_finite(args: argparse.Namespace) -> None:
    """ValueError if a flag is infinite or not a number."""
    for name, value in vars(args).items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(v, float) and not math.isfinite(v) for v in values):
            raise ValueError(f"--{name} must be finite, got {value}")


def check_least(args: argparse.Namespace, least: float, names: str) -> None:
    """ValueError if one of the flags `names` (where the program has it and it is set) is below `least`."""
    for name in names.split():
        value = getattr(args, name, None)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")


def split_batch(args: argparse.Namespace, world_size: int, default: int = 64) -> None:
    """Sets batch_size, accum_iter and total_batch_size, so that total = batch_size * world_size * accum_iter, or ValueError.

    Without --batch_size a process takes the most that fits the total, up to `default` images.
    """
    total = args.total_batch_size
    if total is None:
        args.batch_size, args.accum_iter = args.batch_size or 64, args.accum_iter or 1
        args.total_batch_size = args.batch_size * args.accum_iter * world_size
        return
    per_process, rest = divmod(total, world_size)
    if rest:
        raise ValueError(f"a total batch of {total} cannot be split over {world_size} processes: change one of them")
    most = args.batch_size or (per_process // args.accum_iter if args.accum_iter else default)
    fitting = max(size for size in range(1, max(1, most) + 1) if per_process % size == 0)
    if args.batch_size not in (None, fitting):
        split = f"--batch_size {args.batch_size} on {world_size} processes"
        raise ValueError(f"a total batch of {total} cannot be split into {split}: try --batch_size {fitting}")
    if args.accum_iter not in (None, per_process // fitting):
        split = f"--batch_size {fitting} on {world_size} processes takes {per_process // fitting}"
        raise ValueError(f"--accum_iter {args.accum_iter}, but a total batch of {total} with {split}")
    args.batch_size, args.accum_iter = fitting, per_process // fitting
