"""What the programs for dense tasks share: flags, schedules that count iterations, splits."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import models_vit
from encoders.kinds import choose_traits
from encoders.trained import Trained
from util.data.images import EncodedImages
from util.data.open import open_once
from util.data.statistics import normalizer
from util.data.transforms import Size
from util.evaluate.context import context_of_flags
from util.evaluate.results import Evaluation, finish_evaluation
from util.flag import Flag
from util.run.cli import Parser
from util.run.files.record import INVALID_SETTINGS, without_marks
from util.run.processes.distributed import Process
from util.run.start.flags import (
    BATCH_FLAGS,
    DROP_PATH_FLAG,
    FINETUNE_FLAG,
    HFLIP_FLAG,
    INVALID_FLAGS,
    LOADING_FLAGS,
    PATCH_SIZE_FLAG,
    PIXEL_FLAGS,
    RECIPE_FLAG,
    UPDATE_FLAGS,
    all_valid_flag,
    run_flags,
)
from util.run.start.plan import RunSchedule, check_same
from util.run.start.run import Run
from util.text import count_of

# {name of an encoder: its sizes}
SIZES: dict[str, dict[str, Any]] = {
    name: getattr(models_vit, name).keywords for name in models_vit.__all__ if name.islower()
}
SomeImages = TypeVar("SomeImages", bound=EncodedImages)


def encoder_options(settings: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Returns the arguments of the encoder that `settings` (vars(args), or a checkpoint's) describe.

    ValueError if it has traits that no dense task starts from. task: for messages.
    """
    options: dict[str, Any] = dict(SIZES[settings["model"]])
    options["img_size"] = settings["input_size"]
    options["in_chans"] = settings["in_chans"]
    options["drop_path_rate"] = settings["drop_path"]
    if settings["patch_size"] is not None:
        options["patch_size"] = settings["patch_size"]
    return options | choose_traits(settings, ("num_cls_tokens", "registers", "layer_scale"), task)


# ------------------------------------------------------------------------------------------------------------- flags


TASK_FLAGS = (
    RECIPE_FLAG,
    Flag(
        "eval",
        bool,
        False,
        "only evaluate the model at --resume on the validation images",
        everyday=True,
        changes="nothing",
    ),
)

MODEL_FLAGS = (
    Flag("model", str, "vit_base_patch16", "size of the encoder", everyday=True, choices=SIZES),
    FINETUNE_FLAG,
    PATCH_SIZE_FLAG,
    DROP_PATH_FLAG,
)

OPTIMISATION_FLAGS = (
    *BATCH_FLAGS,
    Flag("num_iters", int, help="length of the schedule in optimizer steps", everyday=True, at_least=1),
    Flag(
        "warmup_iters",
        int,
        help="optimizer steps of linear warm-up; if not given, that of the recipe or of the defaults, and in a "
        "schedule that is shorter than theirs at most a tenth, or their share if that is more",
        everyday=True,
    ),
    Flag(
        "lr",
        float,
        help="learning rate of the head at the total batch size; it is not scaled",
        everyday=True,
        at_least=0,
    ),
    Flag(
        "layer_decay",
        float,
        help="factor on the learning rate from each layer to the one before",
        everyday=True,
        at_most=1,
        above=0,
    ),
    *UPDATE_FLAGS,
)

EVALUATION_FLAGS = (
    Flag(
        "eval_every",
        int,
        help="iterations between evaluations; the last one is always evaluated",
        everyday=True,
        changes="nothing",
        at_least=1,
    ),
    Flag("num_pictures", int, 4, "validation images in the picture of each evaluation", changes="nothing", at_least=0),
)

FLAGS = {  # {title in the help: flags of all dense tasks}
    "": TASK_FLAGS,
    "data": (*PIXEL_FLAGS, *INVALID_FLAGS, all_valid_flag("with --eval: "), *LOADING_FLAGS),
    "augmentation": (HFLIP_FLAG,),
    "model": MODEL_FLAGS,
    "optimisation": OPTIMISATION_FLAGS,
    "evaluation": EVALUATION_FLAGS,
    "run": run_flags(unit="iterations"),
}


def make_parser(
    program: str, description: str | None, flags: Mapping[str, Sequence[Flag]], defaults: Mapping[str, object]
) -> Parser:
    """Returns the parser of a dense task. flags: {title in the help: those of the task}, beside those of all tasks."""
    parser = Parser(program, description)
    for title, shared in FLAGS.items():
        parser.add_flags(title, *shared, *flags.get(title, ()))
    parser.changes["epochs"] = "nothing"  # it follows from the data and --num_iters
    # By default every image must be readable. Shared code reads `dataset`, `loader` and `min_lr`.
    parser.set_defaults(max_bad_fraction=0.0, dataset="folder", loader="fast", min_lr=0.0)
    parser.set_defaults(**defaults)
    return parser


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
    """Returns the schedule of a run whose flags count iterations."""
    args = run.args
    epochs = args.num_iters / steps_per_epoch
    length = f"{count_of(args.num_iters, 'iteration')}, {epochs:,.1f} epochs of {count_of(steps_per_epoch, 'step')}"
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
    process: Process,
    folder: Path | None,
    images: EncodedImages,
    evaluate: Callable[..., Evaluation],
    describe: Callable[[Mapping[str, Any]], str],
    picture: str,
) -> dict[str, Any]:
    """Evaluates a trained model, and writes the result to the folder, if there is one. Returns the scores.

    args: of `args_of_model`. evaluate: `evaluate(model, num_pictures=, context=)`.
    """
    info = trained.weights.info
    pixels = {**info.pixel_settings, "mean": args.mean, "std": args.std}
    context = context_of_flags(args, process, normalizer(pixels, images.pixel_format), batch_size=1)
    model = trained.model.to(context.device)
    result = evaluate(model, num_pictures=0 if folder is None else args.num_pictures, context=context)
    finish_evaluation(result, describe(result.scores), folder, args.resume, info.step, picture)
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

    images = open_once(open_here, split, args.data_path)
    if args.check_data:
        from util.data import survey

        survey.report_split(split, images)
    return images


def scaled_size(size: Size, longest: float, shortest: float = float("inf")) -> Size:
    """Returns an image's size after it is scaled, with its aspect ratio kept, until a side has its bound."""
    factor = min(longest / max(size), shortest / min(size))
    return max(1, int(size[0] * factor + 0.5)), max(1, int(size[1] * factor + 0.5))
