"""What the programs for dense tasks share: schedules that count iterations."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from util.run.flags import Plan, RunSchedule, check_least
from util.text import count_of

RECIPE_FILE = "downstream/recipes.py"


def add_iteration_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the length of a schedule in iterations, and its learning rate."""
    flag = group.add_argument
    flag("--num_iters", type=int, help="length of the schedule in optimizer steps")
    help_text = "optimizer steps of linear warm-up; if not given and longer than --num_iters, it is scaled with it"
    flag("--warmup_iters", type=int, help=help_text)
    flag("--lr", type=float, help="learning rate of the head at the total batch size; it is not scaled")


def check_shared_flags(args: argparse.Namespace, task: str) -> None:
    """ValueError if a flag of all downstream programs, or a pair of them, is out of range. task: for messages."""
    check_least(args, 1, "num_iters eval_every decoder_channels patch_size")
    check_least(args, 0, "drop_path num_pictures")
    if not 0 <= args.warmup_iters <= args.num_iters:
        raise ValueError(f"--warmup_iters {args.warmup_iters} must lie between 0 and --num_iters {args.num_iters}")
    if args.drop_path > 1:
        raise ValueError(f"--drop_path must be at most 1, got {args.drop_path}")
    if not 0 < args.layer_decay <= 1:
        raise ValueError(f"--layer_decay must lie in (0, 1], got {args.layer_decay}")
    for name in ("shard", "compile"):
        if getattr(args, name):
            raise ValueError(f"--{name} is not for {task}: leave it out")


@dataclass(frozen=True)
class LinearDecay:
    """mmsegmentation's schedule: the rate falls linearly from `lr` to `min_lr`, times a linear warm-up from 1e-6 to 1.

    `schedule(step, lr_scale)` returns the learning rate of an optimizer step, counted from 0. lr_scale: the factor of a
    parameter group under layer-wise learning-rate decay.
    """

    num_iters: int
    warmup_iters: int
    lr: float
    min_lr: float = 0.0

    def __call__(self, step: int, lr_scale: float = 1.0) -> float:
        rate = self.min_lr + (lr_scale * self.lr - self.min_lr) * (1 - step / self.num_iters)
        if step < self.warmup_iters:
            rate *= 1 - (1 - step / self.warmup_iters) * (1 - 1e-6)
        return rate


def schedule_by_iterations(
    args: argparse.Namespace, plan: Plan, steps_per_epoch: int, learning_rate: Callable[..., float] | None = None
) -> RunSchedule:
    """Returns the schedule of a run whose flags count iterations. learning_rate: default: `LinearDecay`."""
    if learning_rate is None:
        learning_rate = LinearDecay(args.num_iters, args.warmup_iters, plan.lr, args.min_lr)
    summary = f"{count_of(args.num_iters, 'iteration')}, {args.num_iters / steps_per_epoch:.4g} epochs of "
    summary += f"{count_of(steps_per_epoch, 'step')}, {args.warmup_iters} of warm-up, peak learning rate {plan.lr:.4g}"
    pauses, epochs = (args.eval_every, args.save_every), args.num_iters / steps_per_epoch
    return RunSchedule(
        steps_per_epoch, args.num_iters, args.save_every, learning_rate, summary, pauses, epochs, "iteration"
    )
