"""What the programs for dense tasks share: flags, schedules that count iterations, splits."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

import models_vit
from encoders.trained import Trained
from util import collectives
from util.data.decode import is_turned
from util.data.images import EncodedImages, evenly_spaced
from util.data.open import refuse_other_data
from util.data.statistics import normalizer
from util.data.transforms import Size
from util.evaluate.results import Evaluation
from util.evaluate.session import Session
from util.run.cli import FlagGroup, Parser
from util.run.files.record import INVALID_SETTINGS, without_marks
from util.run.start.flags import (
    add_all_valid_flag,
    add_batch_flags,
    add_hflip_flag,
    add_invalid_flags,
    add_loading_flags,
    add_pixel_flags,
    add_run_flags,
    add_update_flags,
)
from util.run.start.plan import RunSchedule, check_same
from util.run.start.run import Run
from util.text import count_of

# {name of an encoder: its sizes}
SIZES: dict[str, dict[str, Any]] = {
    name: getattr(models_vit, name).keywords for name in models_vit.__all__ if name.islower()
}
Groups = Mapping[str, FlagGroup]
SomeImages = TypeVar("SomeImages", bound=EncodedImages)


# ------------------------------------------------------------------------------------------------------------- flags


def make_parser(program: str, description: str | None, defaults: Mapping[str, object]) -> tuple[Parser, Groups]:
    """Returns the parser of the flags that all dense tasks have, and its groups, to which a task adds its own."""
    parser = Parser(program, description=description)
    boolean = argparse.BooleanOptionalAction
    parser.add_argument(
        "--recipe",
        everyday=True,
        metavar="NAME",
        changes="nothing",  # by itself: the values that it sets are compared
        help="set defaults from downstream/recipes.py, or `list` them; explicit flags win",
    )
    parser.add_argument(
        "--eval",
        everyday=True,
        changes="nothing",
        action=boolean,
        default=False,
        help="only evaluate the model at --resume on the validation images",
    )
    names = ("data", "augmentation", "model", "optimisation", "evaluation", "run")
    groups = {name: parser.add_argument_group(name) for name in names}

    add_model_flags(groups["model"])
    add_batch_flags(groups["optimisation"])
    add_iteration_flags(groups["optimisation"])
    add_update_flags(groups["optimisation"])

    add_pixel_flags(groups["data"])
    add_invalid_flags(groups["data"])
    add_all_valid_flag(groups["data"], "with --eval: ")
    add_loading_flags(groups["data"])
    add_hflip_flag(groups["augmentation"])
    evaluation = groups["evaluation"].add_argument
    evaluation(
        "--eval_every",
        everyday=True,
        changes="nothing",
        type=int,
        at_least=1,
        help="iterations between evaluations; the last one is always evaluated",
    )
    evaluation(
        "--num_pictures",
        changes="nothing",
        type=int,
        default=4,
        at_least=0,
        help="validation images in the picture of each evaluation",
    )
    add_run_flags(groups["run"], unit="iterations")
    parser.set_changes(epochs="nothing")  # it follows from the data and --num_iters
    # By default every image must be readable. Shared code reads `dataset`, `loader` and `min_lr`.
    parser.set_defaults(max_bad_fraction=0.0, dataset="folder", loader="fast", min_lr=0.0, compile=False)
    parser.set_defaults(**defaults)
    return parser, groups


def add_model_flags(group: FlagGroup) -> None:
    """Adds the encoder and its first weights."""
    model = group.add_argument
    model("--model", everyday=True, default="vit_base_patch16", choices=SIZES, help="size of the encoder")
    model(
        "--finetune",
        everyday=True,
        changes="nothing",  # the path: the identity of the first weights is compared
        help="pre-trained encoder: a checkpoint or a run's folder (default: train from scratch)",
    )
    model("--patch_size", everyday=True, type=int, at_least=1, help="patch side in pixels (default: the model's)")
    model(
        "--drop_path",
        everyday=True,
        type=float,
        at_least=0,
        below=1,
        metavar="RATE",
        help="drop path rate of the last block; it grows linearly from 0",
    )


def add_iteration_flags(group: FlagGroup) -> None:
    """Adds the length of a schedule in iterations, and its learning rate."""
    optimisation = group.add_argument
    optimisation("--num_iters", everyday=True, type=int, at_least=1, help="length of the schedule in optimizer steps")
    optimisation(
        "--warmup_iters",
        everyday=True,
        type=int,
        help="optimizer steps of linear warm-up; if not given, that of the recipe or of the defaults, and in a "
        "schedule that is shorter than theirs at most a tenth, or their share if that is more",
    )
    optimisation(
        "--lr",
        everyday=True,
        type=float,
        at_least=0,
        help="learning rate of the head at the total batch size; it is not scaled",
    )
    optimisation(
        "--layer_decay",
        everyday=True,
        type=float,
        above=0,
        at_most=1,
        help="factor on the learning rate from each layer to the one before",
    )


def check_shared_flags(args: argparse.Namespace, task: str) -> None:
    """ValueError if a flag of all dense tasks, or a pair of them, is out of range. task: for messages."""
    if not 0 <= args.warmup_iters <= args.num_iters:
        raise ValueError(f"--warmup_iters {args.warmup_iters} must lie between 0 and --num_iters {args.num_iters}")
    if args.all_valid:
        raise ValueError("--all_valid is for --eval: training takes all pixels as valid unless a flag marks some")
    if args.compile:
        raise ValueError(f"--compile is not for {task}: leave it out")


# ---------------------------------------------------------------------------------------------------------- schedule


@dataclass(frozen=True)
class LinearDecay:
    """mmsegmentation's schedule: the rate falls linearly from `lr` to 0, times a linear warm-up from 1e-6 to 1.

    `schedule(step, lr_scale)` returns the learning rate of an optimizer step, counted from 0. lr_scale: the factor of a
    parameter group under layer-wise learning-rate decay.
    """

    num_iters: int
    warmup_iters: int
    lr: float

    def __call__(self, step: int, lr_scale: float = 1.0) -> float:
        rate = lr_scale * self.lr * (1 - step / self.num_iters)
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
        num_drops = sum(step >= round(share * self.num_iters) for share in self.drops)
        rate = self.lr * lr_scale * 0.1**num_drops
        if step < self.warmup_iters:
            rate *= 0.001 + 0.999 * step / self.warmup_iters
        return rate


def schedule_by_iterations(run: Run, steps_per_epoch: int, learning_rate: Callable[..., float]) -> RunSchedule:
    """Returns the schedule of a run whose flags count iterations. It notes a very long one."""
    args = run.args
    epochs = args.num_iters / steps_per_epoch
    length = f"{count_of(args.num_iters, 'iteration')}, {epochs:,.1f} epochs of {count_of(steps_per_epoch, 'step')}"
    if epochs > 1000:
        run.note(f"note: each image is seen {epochs:,.0f} times: --num_iters {args.num_iters} is meant for more images")
    return RunSchedule(
        steps_per_epoch=steps_per_epoch,
        num_steps=args.num_iters,
        keep_every=args.save_every,
        learning_rate=learning_rate,
        summary=f"{length}, {args.warmup_iters:g} of warm-up, peak learning rate {run.plan.lr:.4g}",
        pauses=(args.eval_every, args.save_every),
        epochs=epochs,
        unit="iteration",
    )


def summary_rows(
    name: str, model: nn.Module, num_classes: int, images: SomeImages, val_images: SomeImages
) -> dict[str, str]:
    """Returns what is printed about model and data at the start. name: of the model."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    rows = {"model": f"{name}, {trained:.2f} M trainable parameters", "classes": str(num_classes)}
    for split, opened in (("train", images), ("val", val_images)):
        rows[split] = f"{count_of(len(opened), 'image')} in {opened.root}"
    return rows


# -------------------------------------------------------------------------------------------------------------- data


def args_of_model(
    trained: Trained,
    args: argparse.Namespace,
    given: set[str],
    model_flags: Sequence[str],
    data_flags: Sequence[str] = (),
) -> argparse.Namespace:
    """Returns the flags of an evaluation, with the settings of the trained model in place of those that are not given.

    given: names of explicit flags. ValueError if one of `model_flags` contradicts the model; those of `data_flags`,
    --mean, --std and the marks of invalid pixels win over it.
    """
    check_same(args, trained.settings, given.intersection(model_flags), f"the model at {str(trained.weights.path)!r}")
    settings = dict(trained.settings)
    if args.all_valid:
        settings = without_marks(settings)
    merged = argparse.Namespace(**vars(args))
    for name in (*model_flags, *data_flags, "mean", "std", *INVALID_SETTINGS):
        if name not in given:
            setattr(merged, name, settings.get(name))
    return merged


def evaluate_trained(
    trained: Trained,
    args: argparse.Namespace,
    session: Session,
    images: EncodedImages,
    evaluate: Callable[..., Evaluation],
    describe: Callable[[Mapping[str, Any]], str],
    picture: str,
) -> dict[str, Any]:
    """Evaluates a trained model in a session, which writes the result. Returns the scores.

    args: of `args_of_model`. evaluate: `evaluate(model, num_pictures=, context=)`.
    """
    info = trained.weights.info
    pixels = {**info.pixel_settings, "mean": args.mean, "std": args.std}
    context = session.make_context(args, normalizer(pixels, images.pixel_format), batch_size=1)
    model = trained.model.to(context.device)
    result = evaluate(model, num_pictures=session.num_pictures(args), context=context)
    session.finish(result, describe(result.scores), args.resume, info.step, picture)
    return {**result.scores, **result.details}


def open_and_check(args: argparse.Namespace, split: str, open_split: Callable[[], SomeImages]) -> SomeImages:
    """Opens and checks a split on all ranks. ValueError on all ranks if one of them fails.

    Of a validation split, no image may be bad.
    """
    max_bad_fraction = 0.0
    if split == "train":
        max_bad_fraction = args.max_bad_fraction

    def open_here() -> SomeImages:
        images = open_split()
        images.check(max_bad_fraction)
        return images

    images = collectives.run_everywhere(open_here)
    looked_at = evenly_spaced(len(images), 1000).tolist()
    num_turned = sum(is_turned(images.path(i)) for i in looked_at)
    if num_turned:
        turned = f"{num_turned} of {count_of(len(looked_at), 'image')} have an EXIF orientation, which is ignored"
        images.notes.append(f"note: {turned}: boxes and labels must fit the stored pixels")
    refuse_other_data(images, split)
    if args.check_data:
        from util.data import survey

        survey.report_split(split, images)
    return images


def scaled_size(size: Size, longest: float, shortest: float = float("inf")) -> Size:
    """Returns an image's size after it is scaled, with its aspect ratio kept, until a side has its bound."""
    factor = min(longest / max(size), shortest / min(size))
    return max(1, int(size[0] * factor + 0.5)), max(1, int(size[1] * factor + 0.5))
