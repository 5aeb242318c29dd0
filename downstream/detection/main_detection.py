"""Trains Mask R-CNN on a pre-trained ViT (ViTDet), for COCO or any data set in COCO's format.

    torchrun --nproc_per_node 8 downstream/detection/main_detection.py --recipe coco_mask_rcnn_vit_base \
        --data_path COCO --finetune output/prmim50_base --output_dir output/coco
    python downstream/detection/main_detection.py --recipe short --finetune ... # for one GPU
    python downstream/detection/main_detection.py --eval --resume output/coco --data_path COCO

If the objects have no segmentations, the model is Faster R-CNN. The same command again resumes the run at the step of
its newest good checkpoint.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from downstream.common import (
    RECIPE_FILE,
    add_iteration_flags,
    check_shared_flags,
    schedule_by_iterations,
)
from downstream.detection.data import CocoImages, LargeScaleJitter, PadAndStack
from downstream.detection.engine_detection import detect_all, draw_pictures, score_detections, train_iterations
from downstream.detection.masks import coco_masks
from downstream.detection.models import SIZES, Detector, build_detector
from downstream.detection.released import detectron2_names, infer_settings, is_detectron2, read_released
from downstream.recipes import DETECTION_RECIPES, MASK_RCNN_DEFAULTS
from encoders.load import Weights, fit, load_encoder, read
from util import collectives
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalize
from util.run.cli import Parser, flags_given, parse_with_recipe, run_program
from util.run.distributed import precision
from util.run.evaluation import Evaluation, Evaluator, Session, session_of_eval
from util.run.flags import (
    Plan,
    RunSchedule,
    add_batch_flags,
    add_loading_flags,
    add_run_flags,
    add_update_flags,
    check_least,
    check_same,
    num_workers,
)
from util.run.run import Run
from util.text import count_of, shorten

PROGRAM = "main_detection.py"
PICTURE = "detections.png"
# Settings that describe a trained model. Evaluation takes them from the checkpoint.
MODEL_FLAGS = ("model", "input_size", "patch_size", "pretrain_size", "window_size", "decoder_channels")
# Flags that a resumed run may change, beside those of the machine. `epochs` and `categories` follow from the data,
# which are compared by themselves.
FREE_FLAGS = frozenset(("finetune", "eval", "eval_every", "num_pictures", "epochs", "categories"))
FREE_FLAGS |= {f"{split}_{name}" for split in ("train", "val") for name in ("json", "images")}
# Boxes are sampled, and losses are averaged, for the micro-batch of a process. The number of processes and --accum_iter
# may change: a step is the mean over all micro-batches.
FIXED_FLAGS = frozenset(("batch_size",))
SPLITS = {"train": ("annotations/instances_train2017.json", "train2017")}
SPLITS["val"] = ("annotations/instances_val2017.json", "val2017")


def get_args_parser() -> Parser:
    """Returns the parser of all flags."""
    parser = Parser(PROGRAM, description=__doc__)
    flag, boolean = parser.add_argument, argparse.BooleanOptionalAction
    flag("--recipe", metavar="NAME", help="set defaults from downstream/recipes.py, or `list` them; explicit flags win")
    flag("--eval", action=boolean, default=False, help="only evaluate the model at --resume on the validation images")

    model = parser.add_argument_group("model").add_argument
    model("--model", default="vit_base_patch16", choices=SIZES, help="size of the encoder")
    model("--finetune", help="pre-trained encoder: a checkpoint or a run's folder (default: train from scratch)")
    model("--input_size", type=int, help="side of a training crop, and longer side in evaluation, in pixels")
    help_text = "side of the images of pre-training (default: the model's); other position tables are resized to it"
    model("--pretrain_size", type=int, help=help_text)
    model("--patch_size", type=int, help="patch side in pixels (default: the model's)")
    model("--window_size", type=int, help="side of an attention window in patches")
    model("--decoder_channels", type=int, help="width of pyramid and heads")
    help_text = "train and evaluate a mask head (default: if the objects have segmentations)"
    model("--masks", action=boolean, default=None, help=help_text)
    model("--drop_path", type=float, help="drop path rate of the last block; it grows linearly from 0")

    group = parser.add_argument_group("optimisation")
    add_batch_flags(group)
    add_iteration_flags(group)
    optimisation = group.add_argument
    optimisation("--num_rois", type=int, help="boxes of an image that are sampled for the losses of the heads")
    optimisation(
        "--lr_drops", type=float, nargs="*", help="shares of --num_iters after which the rate is divided by 10"
    )
    help_text = "factor on the learning rate from each layer to the one before"
    optimisation("--layer_decay", type=float, help=help_text)
    add_update_flags(group)

    group = parser.add_argument_group("data")
    data = group.add_argument
    data("--data_path", default="data", help="folder to which the next four paths are relative")
    for split, (json_path, images) in SPLITS.items():
        data(f"--{split}_json", default=json_path, metavar="FILE", help=f"annotations of the {split} images")
        data(f"--{split}_images", default=images, metavar="DIR", help=f"folder of the {split} images")
    text = "range of the random factor of large-scale jitter"
    data("--scale_range", type=float, nargs=2, metavar=("LOW", "HIGH"), help=text)
    add_loading_flags(group)

    evaluation = parser.add_argument_group("evaluation").add_argument
    evaluation("--eval_every", type=int, help="iterations between evaluations; the last one is always evaluated")
    evaluation("--num_pictures", type=int, default=4, help="validation images in the picture of each evaluation")

    add_run_flags(parser.add_argument_group("run"), unit="iterations")
    # The last line is for the parts that all mains share: every image must be readable, by torch's kernels.
    parser.set_defaults(output_dir="output/detection", **MASK_RCNN_DEFAULTS, save_every=50_000, save_steps=2000)
    parser.set_defaults(max_bad_fraction=0.0, dataset="folder", loader="fast", min_lr=0.0)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Returns (parser, flags)."""
    parser = get_args_parser()
    return parser, parse_with_recipe(parser, DETECTION_RECIPES, argv, RECIPE_FILE)


def check_flags(args: argparse.Namespace, plan: Plan) -> None:
    """ValueError if a flag of detection, or a pair of them, is out of range, or if a library is missing."""
    check_shared_flags(args, "detection")
    check_least(args, 1, "window_size input_size num_rois pretrain_size")
    if not 0 < args.scale_range[0] <= args.scale_range[1]:
        raise ValueError(f"--scale_range must be two factors 0 < low <= high, got {args.scale_range}")
    if not all(0 < share <= 1 for share in args.lr_drops):
        raise ValueError(f"--lr_drops must be shares in (0, 1], got {args.lr_drops}")
    if args.max_bad_fraction:
        raise ValueError("--max_bad_fraction is not for detection, where an image has its own boxes: leave it out")
    coco_masks()


@dataclass(frozen=True)
class StepDecay:
    """detectron2's schedule: linear warm-up from 0.001, then a tenth of the rate after each of `drops`.

    drops: shares of `num_iters`. `schedule(step, lr_scale)` returns the learning rate of an optimizer step, from 0 on.
    """

    num_iters: int
    warmup_iters: int
    lr: float
    drops: tuple[float, ...]

    def __call__(self, step: int, lr_scale: float = 1.0) -> float:
        rate = self.lr * lr_scale * 0.1 ** sum(step >= round(share * self.num_iters) for share in self.drops)
        if step < self.warmup_iters:
            rate *= 0.001 + 0.999 * step / self.warmup_iters
        return rate


# ------------------------------------------------------------------------------------------------------------- data


def open_split(args: argparse.Namespace, split: str, training: bool) -> CocoImages:
    """Opens a split on all ranks, which share the check of its files. ValueError on all ranks if one of them fails."""
    root = Path(args.data_path)

    def look() -> CocoImages:
        json_path, folder = (root / getattr(args, f"{split}_{name}") for name in ("json", "images"))
        images = CocoImages(json_path, folder, training)
        images.check(0.0, not training, *collectives.rank_and_world_size())
        return images

    images = collectives.run_everywhere(look)
    found = {"number of images": len(images), "names and objects": images.fingerprint()}
    collectives.refuse_differences(found, f"{split} data")
    return images


def check_categories(categories: Sequence[Sequence[Any]], images: CocoImages, what: str) -> None:
    """ValueError if the categories of `images` are not `categories`, which are those of `what`."""
    wanted, found = ([(number, name) for number, name in part] for part in (categories, images.categories))
    if wanted != found:
        missing, other = (
            shorten([f"{number} {name}" for number, name in part]) or "none"
            for part in ([c for c in wanted if c not in found], [c for c in found if c not in wanted])
        )
        raise ValueError(
            f"{str(images.json_path)!r} has {len(found)} categories that are not the {len(wanted)} of {what}: "
            f"missing {missing}; not expected {other}"
        )


def choose_masks(masks: bool | None, images: CocoImages) -> bool:
    """Returns whether masks of these images are used. ValueError if objects lack segmentations for it.

    masks: value of --masks; None: use masks if there are any.
    """
    missing = images.num_objects - images.num_masks
    if masks is False or (masks is None and not images.num_masks):
        return False
    if missing:
        raise ValueError(
            f"{missing} of {count_of(images.num_objects, 'object')} of {str(images.json_path)!r} have no segmentation: "
            f"add them, or use boxes alone with --no-masks"
        )
    return True


# -------------------------------------------------------------------------------------------------------- reporting


def describe_scores(scores: Mapping[str, Any]) -> str:
    """Returns the scores of an evaluation in one line."""
    parts = []
    for name in ("box", "mask"):
        values = [scores.get(f"{name}_{key}") for key in ("ap", "ap50", "ap75")]
        if values[0] is not None:
            parts.append(f"AP {name} {values[0]:.2f} % ({values[1]:.2f} at IoU .5, {values[2]:.2f} at .75)")
    return f"{', '.join(parts) or 'no objects'} on {count_of(int(scores['num_images']), 'image')}"


def evaluate_model(
    model: Detector,
    images: CocoImages,
    masks: bool,
    normalize: Normalize,
    autocast: Callable[[], AbstractContextManager],
    workers: int,
    num_pictures: int,
    alive: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluates a model on all ranks. masks: score masks, too. Scores without objects are left out."""
    results, pictures = detect_all(model, images, normalize, autocast, workers, alive, num_pictures)
    scores = {**score_detections(images, results, masks), "num_images": len(images)}
    picture = None
    if pictures and collectives.rank_and_world_size()[0] == 0:
        picture = draw_pictures(pictures, [name for _, name in images.categories])
    return Evaluation({name: value for name, value in scores.items() if value is not None}, {}, picture)


def summary_rows(args: argparse.Namespace, model: Detector, masks: bool, *data: CocoImages) -> dict[str, str]:
    """Returns what is printed about model and data at the start."""
    million = sum(p.numel() for p in model.parameters()) / 1e6
    rows = {
        "model": f"{'Mask' if masks else 'Faster'} R-CNN on {args.model}, {million:.2f} M parameters",
        "classes": str(len(data[0].categories)),
    }
    for split, images in zip(SPLITS, data, strict=True):
        notes = "".join(f"; {note}" for note in images.notes)
        objects = count_of(images.num_objects, "object")
        rows[split] = f"{count_of(len(images), 'image')} with {objects} in {images.json_path}{notes}"
    return rows


def main(argv: Sequence[str] | None = None) -> bool | dict[str, Any]:
    """Trains to the end of the schedule, or evaluates. Returns False if a signal stopped the run before."""
    parser, args = parse_args(argv)
    if args.eval:
        given = flags_given(parser, argv)
        with session_of_eval(parser, args, given, "this program or of detectron2") as session:
            return evaluate_only(args, given, session)
    with Run.begin(PROGRAM, parser, args, argv, check=check_flags) as run:
        images, val_images = open_split(args, "train", True), open_split(args, "val", False)
        check_categories(images.categories, val_images, str(images.json_path))
        masks = choose_masks(args.masks, images)
        val_masks = masks and choose_masks(None, val_images)
        chosen: dict[str, Any] = {"masks": masks, "categories": [list(category) for category in images.categories]}
        if not run.is_new:
            check_categories(run.meta["settings"]["categories"], images, f"the run in {str(run.output_dir)!r}")

        torch.manual_seed(args.seed)  # the same initial weights on every rank
        model = build_detector(vars(args) | chosen)
        run.load_encoder("finetune", partial(load_encoder, model.backbone))
        model = model.to(run.process.device)
        groups = model.param_groups(args.weight_decay, args.layer_decay)
        pretrain_size = model.backbone.grid_size[0] * model.patch_size

        run.open(
            model=model,
            optimizer=torch.optim.AdamW(groups, lr=run.plan.lr, betas=(0.9, 0.999), fused=True),
            images=images,
            val_images=val_images,
            transform=LargeScaleJitter(images, args.input_size, args.seed, args.scale_range, masks),
            collate=PadAndStack(args.input_size),
            statistics=(IMAGENET_MEAN, IMAGENET_STD),
            rows=summary_rows(args, model, masks, images, val_images),
            schedule=schedule_by_drops,
            settings={**chosen, "patch_size": model.patch_size, "pretrain_size": pretrain_size},
            free=FREE_FLAGS,
            fixed=FIXED_FLAGS,
        )
        numbers = run.loop.normalize, run.loop.autocast, run.plan.num_workers
        evaluate = partial(evaluate_model, model, val_images, val_masks, *numbers, args.num_pictures)
        evaluator = Evaluator(run, evaluate, describe_scores, picture_name=PICTURE)
        return run.train(train_iterations, [evaluator], lambda: evaluator.summary(f"a detector on {args.model}"))


def schedule_by_drops(args: argparse.Namespace, plan: Plan, steps_per_epoch: int) -> RunSchedule:
    """Returns the schedule of a run, with detectron2's learning rates."""
    decay = StepDecay(args.num_iters, args.warmup_iters, plan.lr, tuple(args.lr_drops))
    return schedule_by_iterations(args, plan, steps_per_epoch, decay)


# ------------------------------------------------------------------------------------------------------- evaluation


def load_detector(
    path: str | Path, args: argparse.Namespace, given: set[str], images: CocoImages
) -> tuple[Detector, int | None]:
    """Loads a trained model: ours, or a released ViTDet of detectron2, which has COCO's categories.

    given: names of the flags that were set explicitly. Returns (model in eval mode, step of our run). ValueError if the
    model has other categories than `images`.
    """
    weights = Weights(path, read_released(Path(path))) if str(path).endswith(".pkl") else read(path)
    path, stored = weights.path, weights.settings
    if is_detectron2(weights.raw):
        weights = Weights(path, detectron2_names(weights.raw))
        stored = infer_settings(weights.raw, repr(str(path)))
        number = stored.pop("num_classes")
        if number != len(images.categories):
            raise ValueError(
                f"{str(path)!r} detects {number} categories, but {str(images.json_path)!r} has {len(images.categories)}"
            )
        stored["categories"] = images.categories
    if "categories" not in stored:
        raise ValueError(f"{str(path)!r} holds no detector of this program or of detectron2's ViTDet")
    check_same(args, stored, given.intersection(MODEL_FLAGS), f"the model at {str(path)!r}")
    check_categories(stored["categories"], images, f"the model at {str(path)!r}")
    model = build_detector({**stored, "drop_path": 0.0})
    fit(model, weights, "all")
    return model.eval(), weights.meta.get("step")


def evaluate_only(args: argparse.Namespace, given: set[str], session: Session) -> dict[str, Any]:
    """Evaluates the model at --resume on the validation images and returns the scores."""
    check_least(args, 0, "num_workers num_pictures")
    coco_masks()
    images = open_split(args, "val", False)
    model, step = load_detector(args.resume, args, given, images)
    model = model.to(session.process.device)
    normalize = Normalize(IMAGENET_MEAN, IMAGENET_STD).to(session.process.device)
    autocast = precision(args.precision, session.process.device).autocast
    if args.masks and not model.roi_heads.has_mask():
        raise ValueError(f"--masks, but the model at {args.resume!r} has no mask head: leave it out")
    masks = model.roi_heads.has_mask() and choose_masks(args.masks, images)
    num_pictures = 0 if session.output_dir is None else args.num_pictures
    result = evaluate_model(model, images, masks, normalize, autocast, num_workers(args, session.process), num_pictures)
    session.finish(result, describe_scores(result.scores), {"step": step, "checkpoint": args.resume}, PICTURE)
    return result.scores


if __name__ == "__main__":
    run_program(main, PROGRAM)
