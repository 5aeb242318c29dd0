"""Trains a segmentation model on a pre-trained encoder: UPerNet, or a linear layer on the frozen encoder.

    torchrun --nproc_per_node 8 downstream/segmentation/main_segmentation.py --recipe ade20k_upernet_vit_base \
        --data_path ADEChallengeData2016 --finetune output/prmim50_base --output_dir output/ade20k
    python downstream/segmentation/main_segmentation.py --recipe ade20k_linear_vit_base --finetune ... # a first look
    python downstream/segmentation/main_segmentation.py --eval --resume output/ade20k --data_path ADEChallengeData2016

The same command again resumes the run at the step of its newest good checkpoint.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.optim import param_groups_layer_decay

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from downstream.common import (
    RECIPE_FILE,
    add_iteration_flags,
    check_shared_flags,
    schedule_by_iterations,
)
from downstream.recipes import LINEAR_DEFAULTS, SEGMENTATION_RECIPES, UPERNET_DEFAULTS
from downstream.segmentation.data import (
    NO_CLASS,
    LabelValues,
    ResizeForEvaluation,
    SegmentationAugment,
    SegmentationImages,
    stack_pairs,
)
from downstream.segmentation.engine_segmentation import (
    draw_predictions,
    evaluate_segmentation,
    read_classes,
    train_iterations,
)
from downstream.segmentation.models import (
    HEADS,
    Segmenter,
    build_segmenter,
)
from downstream.segmentation.trained import check_data_flags, load_segmenter
from downstream.segmentation.vit_backbone import SIZES
from encoders.load import load_encoder
from util import collectives
from util.data.images import ImageError
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalize
from util.run.cli import Parser, flags_given, parse_with_recipe, run_program
from util.run.distributed import precision
from util.run.evaluation import Evaluation, Evaluator, Session, session_of_eval
from util.run.flags import (
    Plan,
    add_batch_flags,
    add_loading_flags,
    add_run_flags,
    add_update_flags,
    check_least,
    num_workers,
)
from util.run.run import Run
from util.text import count_of

PROGRAM = "main_segmentation.py"
PICTURE = "predictions.png"
SCALARS = ("miou", "macc", "aacc", "num_images")  # of an evaluation
# Flags that a resumed run may change, beside those of the machine; `epochs` follows from data and --num_iters.
FREE_FLAGS = frozenset(("finetune", "eval", "eval_every", "num_pictures", "class_names", "epochs"))
# BatchNorm sees a micro-batch of all processes. With the same total batch, that size is the same if this flag is.
FIXED_FLAGS = frozenset(("accum_iter",))


def get_args_parser() -> Parser:
    """Returns the parser of all flags."""
    parser = Parser(PROGRAM, description=__doc__)
    flag, boolean = parser.add_argument, argparse.BooleanOptionalAction
    flag("--recipe", metavar="NAME", help="set defaults from downstream/recipes.py, or `list` them; explicit flags win")
    flag("--eval", action=boolean, default=False, help="only evaluate the model at --resume on the validation split")

    model = parser.add_argument_group("model").add_argument
    model("--head", default="upernet", choices=HEADS, help="linear: one layer on the frozen encoder")
    model("--model", default="vit_base_patch16", choices=SIZES, help="size of the encoder")
    model("--finetune", help="pre-trained encoder: a checkpoint or a run's folder (default: train from scratch)")
    model("--input_size", type=int, help="side of a crop and of a window in pixels")
    model("--patch_size", type=int, help="patch side in pixels (default: the model's)")
    model("--in_chans", type=int, default=3, help="channels of the images")
    model("--decoder_channels", type=int, default=768, help="width of UPerNet's head")
    model("--drop_path", type=float, help="drop path rate of the last block; it grows linearly from 0")

    group = parser.add_argument_group("optimisation")
    add_batch_flags(group)
    add_iteration_flags(group)
    group.add_argument("--min_lr", type=float, help="learning rate at the end of the schedule")
    group.add_argument(
        "--layer_decay", type=float, help="factor on the learning rate from each layer to the one before"
    )
    help_text = "divide the loss by the number of labelled pixels; off, as in mmsegmentation: of all pixels"
    group.add_argument("--mean_over_valid", action=boolean, default=False, help=help_text)
    add_update_flags(group)

    group = parser.add_argument_group("data")
    data = group.add_argument
    help_text = "folder with images/ and annotations/, each with training/ and validation/"
    data("--data_path", default="data", help=help_text)
    data("--num_classes", type=int, help="number of classes in the label files")
    data("--ignore_index", type=int, default=255, help="value of pixels without a class in the label files")
    help_text = "the value 0 marks pixels without a class, and the classes begin at 1, as in ADE20K"
    data("--reduce_zero_label", action=boolean, default=False, help=help_text)
    help_text = "text file with a line `name` or `R G B name` for each class (default with --eval: the checkpoint's)"
    data("--class_names", metavar="FILE", help=help_text)
    data("--mean", type=float, nargs="+", help="pixel mean in [0, 1] of each channel (default: ImageNet's, or .5)")
    data("--std", type=float, nargs="+", help="pixel deviation of each channel (default: ImageNet's, or .25)")
    add_loading_flags(group)

    group = parser.add_argument_group("augmentation")
    augmentation = group.add_argument
    text = "longest and shortest side to which an image is scaled"
    augmentation("--image_scale", type=int, nargs=2, metavar=("LONG", "SHORT"), help=text)
    augmentation("--ratio_range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="random factor on --image_scale")
    augmentation("--cat_max_ratio", type=float, help="largest share of one class in a crop, if 10 tries find one")
    augmentation("--photometric", action=boolean, default=True, help="distort the colours")

    evaluation = parser.add_argument_group("evaluation").add_argument
    evaluation("--eval_every", type=int, help="iterations between evaluations; the last one is always evaluated")
    evaluation("--stride", type=int, help="pixels from one window to the next")
    evaluation("--num_pictures", type=int, default=4, help="images in predictions.png (--eval: with --output_dir)")

    add_run_flags(parser.add_argument_group("run"), unit="iterations")
    # By default every image must be readable. Shared code reads `dataset` and `loader`, which are no flags here.
    parser.set_defaults(output_dir="output/segmentation", **UPERNET_DEFAULTS, save_every=40_000, save_steps=2000)
    parser.set_defaults(max_bad_fraction=0.0, dataset="folder", loader="fast")
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Returns (parser, flags). The linear head has other defaults; a recipe and explicit flags win over both."""
    parser = get_args_parser()
    args = parse_with_recipe(parser, SEGMENTATION_RECIPES, argv, RECIPE_FILE)
    if args.recipe and SEGMENTATION_RECIPES[args.recipe]["head"] != args.head:
        fitting = ", ".join(name for name, recipe in SEGMENTATION_RECIPES.items() if recipe["head"] == args.head)
        parser.error(
            f"recipe {args.recipe!r} does not go with --head {args.head}, which has recipes of its own: {fitting}"
        )
    if args.head == "linear":
        given = flags_given(parser, argv)
        unused = [f"--{name}" for name in ("decoder_channels", "layer_decay", "drop_path") if name in given]
        if unused and not args.eval:
            parser.error(f"--head linear has no use for {', '.join(unused)}: the encoder is frozen; leave it out")
        parser.set_defaults(**LINEAR_DEFAULTS)
        args = parse_with_recipe(parser, SEGMENTATION_RECIPES, argv, RECIPE_FILE)
    is_rgb = args.in_chans == 3
    if not args.eval:  # which takes the checkpoint's
        args.mean = args.mean or (IMAGENET_MEAN if is_rgb else (0.5,) * args.in_chans)
        args.std = args.std or (IMAGENET_STD if is_rgb else (0.25,) * args.in_chans)
    return parser, args


def check_flags(args: argparse.Namespace, plan: Plan) -> None:
    """ValueError if a flag of segmentation, or a pair of them, is out of range, or a BatchNorm would see one value."""
    check_data_flags(vars(args))
    check_shared_flags(args, "segmentation")
    if not 0 < args.ratio_range[0] <= args.ratio_range[1]:
        raise ValueError(f"--ratio_range must be two factors 0 < low <= high, got {args.ratio_range}")
    if not 0 < args.cat_max_ratio <= 1:
        raise ValueError(f"--cat_max_ratio must lie in (0, 1], got {args.cat_max_ratio}")
    if args.head == "linear" and args.finetune is None and args.resume in ("auto", "none"):
        raise ValueError("--head linear needs --finetune: the encoder is frozen, so it must be pre-trained")
    if plan.batch_size * collectives.rank_and_world_size()[1] == 1 and args.head == "upernet":
        raise ValueError("UPerNet's BatchNorm needs more than one image per micro-batch, got --batch_size 1")


def make_augmentation(args: argparse.Namespace, img_size: tuple[int, int]) -> SegmentationAugment:
    """Returns the random scaling, crop, flip and colours of training images."""
    fill = [round(255 * value) for value in args.mean]
    scale = args.image_scale, args.ratio_range, args.cat_max_ratio, args.photometric
    return SegmentationAugment(img_size, args.seed, fill, *scale)


def open_split(settings: Mapping[str, Any], data_path: str, split: str) -> SegmentationImages:
    """Opens a split on all ranks, which share the check of its files. ValueError on all ranks if one of them fails."""
    is_train = split == "train"

    def look() -> SegmentationImages:
        values = LabelValues(settings["num_classes"], settings["ignore_index"], settings["reduce_zero_label"])
        images = SegmentationImages(data_path, split, values, settings["in_chans"])
        images.check(
            settings["max_bad_fraction"] if is_train else 0.0, not is_train, *collectives.rank_and_world_size()
        )
        return images

    images = collectives.run_everywhere(look)
    if not any(collectives.gather_objects(images.has_class)):
        raise ImageError(NO_CLASS.format(split))
    found = {"number of images": len(images), "names": images.fingerprint()}
    collectives.refuse_differences(found, f"{split} data")
    return images


def make_optimizer(model: Segmenter, args: argparse.Namespace, lr: float) -> torch.optim.Optimizer:
    """Returns AdamW with layer-wise learning rates."""
    groups = param_groups_layer_decay(model, args.weight_decay, model.no_weight_decay(), layer_decay=args.layer_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), fused=True)


def describe_scores(scores: Mapping[str, Any]) -> str:
    """Returns the scores of an evaluation in one line."""
    values = f"mIoU {scores['miou']:.2f} %, mAcc {scores['macc']:.2f} %, aAcc {scores['aacc']:.2f} %"
    return f"{values} on {count_of(int(scores['num_images']), 'image')}"


def evaluate_model(
    model: Segmenter,
    images: SegmentationImages,
    settings: Mapping[str, Any],
    classes: tuple[list[str], np.ndarray],
    normalize: Normalize,
    autocast: Callable[[], AbstractContextManager],
    workers: int,
    alive: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluates a model on all ranks. classes: (names, colours uint8 [K, 3])."""
    found, pictures = evaluate_segmentation(
        model,
        images,
        ResizeForEvaluation(settings["image_scale"]),
        normalize,
        autocast,
        settings["num_classes"],
        settings["stride"],
        workers,
        alive,
        settings["num_pictures"],
    )
    is_main = collectives.rank_and_world_size()[0] == 0
    picture = draw_predictions(pictures, classes[1]) if pictures and is_main else None
    return Evaluation({name: found[name] for name in SCALARS}, name_scores(found, classes[0]), picture)


def name_scores(scores: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns {"iou": {class: value}, "acc": {class: value}}. Classes of one name are told apart by their number."""
    unique = [name if names.count(name) == 1 else f"{name} ({k})" for k, name in enumerate(names)]
    return {key: dict(zip(unique, scores[key], strict=True)) for key in ("iou", "acc")}


def summary_rows(args: argparse.Namespace, model: Segmenter, images: Any, val_images: Any) -> dict[str, str]:
    """Returns what is printed about model and data at the start."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    what = "frozen, and a linear layer" if args.head == "linear" else "with UPerNet"
    return {
        "model": f"{args.model} {what}, {trained:.2f} M trainable parameters",
        "classes": str(args.num_classes),
        "data": f"{count_of(len(images), 'image')} in {images.root}",
        "val": f"{count_of(len(val_images), 'image')} in {val_images.root}",
    }


def main(argv: Sequence[str] | None = None) -> bool | dict[str, Any]:
    """Trains to the end of the schedule, or evaluates. Returns False if a signal stopped the run before."""
    parser, args = parse_args(argv)
    if args.eval:
        given = flags_given(parser, argv)
        with session_of_eval(parser, args, given, "this program or of mmsegmentation") as session:
            return evaluate_only(args, given, session)
    with Run.begin(PROGRAM, parser, args, argv, check=check_flags) as run:
        process, classes = run.process, read_classes(args.class_names, args.num_classes)
        images, val_images = (open_split(vars(args), args.data_path, split) for split in ("train", "val"))

        torch.manual_seed(args.seed)  # the same initial weights on every rank
        model = build_segmenter(vars(args))
        run.load_encoder("finetune", partial(load_encoder, model.backbone))
        if process.device.type == "cuda" and process.world_size > 1:
            model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # the same statistics, in fused kernels
        model = model.to(process.device)

        run.open(
            model=model,
            optimizer=make_optimizer(model, args, run.plan.lr),
            images=images,
            val_images=val_images,
            transform=make_augmentation(args, model.img_size),
            collate=stack_pairs,
            statistics=(args.mean, args.std),
            rows=summary_rows(args, model, images, val_images),
            schedule=schedule_by_iterations,
            settings={"patch_size": model.patch_size},
            extra={"class_names": classes[0], "class_colors": classes[1].tolist()},
            free=FREE_FLAGS,
            fixed=FIXED_FLAGS,
            split_changes_draws=True,
        )
        numbers = run.loop.normalize, run.loop.autocast, run.plan.num_workers
        evaluate = partial(evaluate_model, model, val_images, vars(args), classes, *numbers)
        evaluator = Evaluator(run, evaluate, describe_scores, picture_name=PICTURE)
        train = partial(train_iterations, mean_over_valid=args.mean_over_valid)
        return run.train(train, [evaluator], lambda: evaluator.summary(f"{args.head} on {args.model}"))


# ------------------------------------------------------------------------------------------------------- evaluation


def evaluate_only(args: argparse.Namespace, given: set[str], session: Session) -> dict[str, Any]:
    """Evaluates the model at --resume on the validation split and returns the scores."""
    check_least(args, 0, "num_workers num_pictures")
    model, settings, meta = load_segmenter(args.resume, args, given)
    if "class_names" in meta and "class_names" not in given:
        classes = meta["class_names"], np.array(meta["class_colors"], np.uint8)
    else:
        classes = read_classes(args.class_names, settings["num_classes"])
    images = open_split(settings, args.data_path, "val")
    if session.output_dir is None:
        settings["num_pictures"] = 0
    normalize = Normalize(settings["mean"], settings["std"]).to(session.process.device)
    autocast = precision(args.precision, session.process.device).autocast
    model = model.to(session.process.device)
    result = evaluate_model(model, images, settings, classes, normalize, autocast, num_workers(args, session.process))
    origin = {"step": meta.get("step"), "checkpoint": args.resume}
    session.finish(result, describe_scores(result.scores), origin, PICTURE)
    return {**result.scores, **result.details}


if __name__ == "__main__":
    run_program(main, PROGRAM)
