"""What the programs for dense tasks share: flags, schedules that count iterations, splits."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import models_vit
from util import collectives
from util.data.transforms import Size
from util.run.cli import Parser
from util.run.flags import (
    Plan,
    RunSchedule,
    add_batch_flags,
    add_loading_flags,
    add_pixel_flags,
    add_run_flags,
    add_update_flags,
    check_least,
)
from util.text import count_of

# {name of an encoder: its sizes}
SIZES: dict[str, dict[str, Any]] = {
    name: getattr(models_vit, name).keywords for name in models_vit.__all__ if name.islower()
}
# Flags that a resumed run may change, beside those of the machine; `epochs` follows from data and --num_iters.
FREE_FLAGS = frozenset(("finetune", "eval", "eval_every", "num_pictures", "epochs"))
Groups = Mapping[str, argparse._ArgumentGroup]


# ------------------------------------------------------------------------------------------------------------- flags


def make_parser(program: str, description: str | None, defaults: Mapping[str, object]) -> tuple[Parser, Groups]:
    """Returns the parser of the flags that all dense tasks have, and its groups, to which a task adds its own."""
    parser, boolean = Parser(program, description=description), argparse.BooleanOptionalAction
    flag = parser.add_argument
    flag("--recipe", metavar="NAME", help="set defaults from downstream/recipes.py, or `list` them; explicit flags win")
    flag("--eval", action=boolean, default=False, help="only evaluate the model at --resume on the validation images")
    names = ("model", "optimisation", "data", "augmentation", "evaluation", "run")
    groups = {name: parser.add_argument_group(name) for name in names}

    model = groups["model"].add_argument
    model("--model", default="vit_base_patch16", choices=SIZES, help="size of the encoder")
    model("--finetune", help="pre-trained encoder: a checkpoint or a run's folder (default: train from scratch)")
    model("--patch_size", type=int, help="patch side in pixels (default: the model's)")
    model("--decoder_channels", type=int, help="width of the decoder and its heads")
    model("--drop_path", type=float, help="drop path rate of the last block; it grows linearly from 0")

    add_batch_flags(groups["optimisation"])
    optimisation = groups["optimisation"].add_argument
    optimisation("--num_iters", type=int, help="length of the schedule in optimizer steps")
    help_text = "optimizer steps of linear warm-up; if not given and longer than --num_iters, it is scaled with it"
    optimisation("--warmup_iters", type=int, help=help_text)
    optimisation("--lr", type=float, help="learning rate of the head at the total batch size; it is not scaled")
    help_text = "factor on the learning rate from each layer to the one before"
    optimisation("--layer_decay", type=float, help=help_text)
    add_update_flags(groups["optimisation"])

    add_pixel_flags(groups["data"])
    add_loading_flags(groups["data"])
    evaluation = groups["evaluation"].add_argument
    evaluation("--eval_every", type=int, help="iterations between evaluations; the last one is always evaluated")
    evaluation("--num_pictures", type=int, default=4, help="validation images in the picture of each evaluation")
    add_run_flags(groups["run"], unit="iterations")
    # By default every image must be readable. Shared code reads `dataset`, `loader` and `min_lr`.
    parser.set_defaults(max_bad_fraction=0.0, dataset="folder", loader="fast", min_lr=0.0)
    parser.set_defaults(**defaults)
    return parser, groups


def check_shared_flags(args: argparse.Namespace, task: str) -> None:
    """ValueError if a flag of all dense tasks, or a pair of them, is out of range. task: for messages."""
    check_least(args, 1, "num_iters eval_every decoder_channels patch_size input_size")
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


def check_range(args: argparse.Namespace, name: str) -> None:
    """ValueError unless the flag holds two positive factors, the smaller one first."""
    low, high = getattr(args, name)
    if not 0 < low <= high:
        raise ValueError(f"--{name} must be two factors 0 < low <= high, got {[low, high]}")


# ---------------------------------------------------------------------------------------------------------- schedule


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


@dataclass(frozen=True)
class StepDecay:
    """detectron2's schedule: linear warm-up from 0.001, then a tenth of the rate after each of `drops`.

    drops: shares of `num_iters`. It is called as `LinearDecay`.
    """

    num_iters: int
    warmup_iters: int
    lr: float
    drops: Sequence[float]

    def __call__(self, step: int, lr_scale: float = 1.0) -> float:
        rate = self.lr * lr_scale * 0.1 ** sum(step >= round(share * self.num_iters) for share in self.drops)
        if step < self.warmup_iters:
            rate *= 0.001 + 0.999 * step / self.warmup_iters
        return rate


def schedule_by_iterations(
    args: argparse.Namespace, plan: Plan, steps_per_epoch: int, learning_rate: Callable[..., float]
) -> RunSchedule:
    """Returns the schedule of a run whose flags count iterations."""
    epochs = args.num_iters / steps_per_epoch
    summary = f"{count_of(args.num_iters, 'iteration')}, {epochs:.4g} epochs of "
    summary += f"{count_of(steps_per_epoch, 'step')}, {args.warmup_iters} of warm-up, peak learning rate {plan.lr:.4g}"
    pauses = (args.eval_every, args.save_every)
    return RunSchedule(
        steps_per_epoch, args.num_iters, args.save_every, learning_rate, summary, pauses, epochs, "iteration"
    )


# -------------------------------------------------------------------------------------------------------------- data

Images = TypeVar("Images")


def open_everywhere(open_split: Callable[[], Images], split: str, max_bad_fraction: float = 0.0) -> Images:
    """Opens a split on all ranks, which share the check of its files. ValueError on all ranks if one of them fails.

    Of a validation split, all files are checked, and none may be bad. max_bad_fraction: of the training images.
    """

    def open_and_check() -> Any:
        images: Any = open_split()
        images.check(max_bad_fraction if is_train else 0.0, not is_train, *collectives.rank_and_world_size())
        return images

    is_train = split == "train"
    images = collectives.run_everywhere(open_and_check)
    found = {"number of images": len(images), "names and labels": images.fingerprint()}
    found["channels and depth"] = str(images.pixel_format)
    collectives.refuse_differences(found, f"{split} data")
    return images


def scaled_size(size: Size, longest: float, shortest: float = float("inf")) -> Size:
    """Returns an image's size after it is scaled, with its aspect ratio kept, until a side has its bound."""
    factor = min(longest / max(size), shortest / min(size))
    return max(1, int(size[0] * factor + 0.5)), max(1, int(size[1] * factor + 0.5))
