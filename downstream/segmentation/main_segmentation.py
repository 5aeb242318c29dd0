r"""Trains a segmentation model on a pre-trained encoder: UPerNet, or a linear layer on the frozen encoder.

    torchrun --nproc_per_node 8 downstream/segmentation/main_segmentation.py --recipe ade20k_upernet_vit_base \
        --data_path ADEChallengeData2016 --finetune output/prmim50_base --output_dir output/ade20k
    python downstream/segmentation/main_segmentation.py --recipe ade20k_linear_vit_base --finetune ... # a first look
    python downstream/segmentation/main_segmentation.py --eval --resume output/ade20k --data_path ADEChallengeData2016

The same command again resumes the run at the step of its newest good checkpoint.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from downstream import common
from downstream.common import SIZES, LinearDecay, schedule_by_iterations
from downstream.recipes import LINEAR_DEFAULTS, SEGMENTATION_RECIPES, UPERNET_DEFAULTS
from downstream.segmentation.data import LabelValues, SegmentationAugment, SegmentationImages, stack_pairs
from downstream.segmentation.engine_segmentation import (
    WINDOW_WEIGHTS,
    SlidingWindows,
    classes_of,
    draw_labels,
    evaluate,
    read_classes,
    train_one_epoch,
)
from downstream.segmentation.models import HEADS, Segmenter, build_segmenter
from encoders.load import load_encoder, read_first
from encoders.trained import load
from util import collectives
from util.collectives import print_on_rank0
from util.data.datasets import AddressedDataset, StepBatchSampler
from util.data.images import Reading, check_splits
from util.data.pixel_format import PixelFormat
from util.data.transforms import Normalize, Size
from util.evaluate.evaluator import Evaluator
from util.evaluate.results import folder_of_eval
from util.flag import Flag
from util.run.cli import Parser
from util.run.exits import run_program, user_errors
from util.run.processes.distributed import Process
from util.run.start.begin import begin
from util.run.start.plan import Plan
from util.run.start.run import Run
from util.run.start.statistics import choose_statistics
from util.run.train.bad_images import BadImages
from util.run.train.logging import open_log, summary_rows
from util.run.train.loop import TrainLoop
from util.run.train.saving import CheckpointSaver
from util.run.train.training import BetweenSteps, end_check, train
from util.run.train.wrap import wrap_model
from util.text import count_of
from util.urls import local_path

PROGRAM = "main_segmentation.py"
PICTURE = "predictions.png"
WIDEST_DECODER = 768  # by default: mmsegmentation's for a ViT-B
# Flags that describe a trained model and its data. Evaluation takes them from the checkpoint.
MODEL_FLAGS = ("head", "model", "input_size", "patch_size", "in_chans", "decoder_channels", "num_classes")
DATA_FLAGS = ("ignore_index", "reduce_zero_label", "label_values", "image_scale", "stride", "window_weights")

FLAGS = {  # {title in the help: flags of segmentation}
    "data": (
        # data may move: names and labels of the images are compared
        Flag(
            "data_path",
            local_path,
            "data",
            "folder with images/ and annotations/, each with training/ and validation/",
            everyday=True,
            changes="nothing",
            per_process=True,
        ),
        Flag("num_classes", int, help="number of classes in the label files", everyday=True, at_least=1, at_most=255),
        Flag("ignore_index", int, 255, "value of pixels without a class in the label files", everyday=True),
        Flag(
            "reduce_zero_label",
            bool,
            False,
            "the value 0 marks pixels without a class, and the classes begin at 1, as in ADE20K",
            everyday=True,
        ),
        Flag(
            "label_values",
            int,
            help="values of classes 0, 1, ... in the label files, such as 0 255, also if --ignore_index is one of them",
            everyday=True,
            nargs="+",
            metavar="VALUE",
        ),
        Flag(
            "class_names",
            help="text file with a line `name` or `R G B name` for each class (default with --eval: the checkpoint's)",
            everyday=True,
            changes="nothing",
            metavar="FILE",
        ),
    ),
    "augmentation": (
        Flag(
            "image_scale",
            int,
            help="longest and shortest side to which an image is scaled",
            everyday=True,
            nargs=2,
            metavar=("LONG", "SHORT"),
        ),
        Flag("ratio_range", float, help="random factor on --image_scale", nargs=2, metavar=("LOW", "HIGH")),
        Flag(
            "cat_max_ratio",
            float,
            help="largest share of one class in a crop, if 10 tries find one; 1: any",
            at_most=1,
            above=0,
        ),
        Flag("photometric", bool, help="distort the colours"),
    ),
    "model": (
        Flag("head", help="linear: one layer on the frozen encoder", everyday=True, choices=HEADS),
        Flag("input_size", int, help="side of a crop and of a window in pixels", everyday=True, at_least=1),
        Flag(
            "decoder_channels",
            int,
            help=f"width of UPerNet and its heads (default: the encoder's, at most {WIDEST_DECODER})",
            at_least=1,
        ),
    ),
    "optimisation": (
        Flag(
            "mean_over_valid",
            bool,
            help="divide the loss by the number of labelled pixels; off, as in mmsegmentation: of all pixels",
        ),
    ),
    "evaluation": (
        Flag("stride", int, help="pixels from one window to the next", everyday=True, at_least=1),
        Flag(
            "window_weights",
            str,
            "equal",
            "gaussian: logits count less towards the borders of a window",
            choices=WINDOW_WEIGHTS,
        ),
    ),
}


def get_args_parser() -> Parser:
    """Returns the parser of all flags."""
    defaults = dict(output_dir="output/segmentation", save_every=40_000, **UPERNET_DEFAULTS)
    parser = common.make_parser(PROGRAM, __doc__, FLAGS, defaults)
    # BatchNorm sees a micro-batch of all processes. With the same total batch, that size is the same if this flag is.
    parser.changes["accum_iter"] = "results"
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Returns (parser, flags). The linear head has other defaults; a recipe and explicit flags win over both."""
    parser = get_args_parser()
    parser.read(argv, SEGMENTATION_RECIPES)
    head = parser.values["head"]
    if parser.recipe and parser.recipe["head"] != head:
        parser.error(f"recipe {parser.given['recipe']!r} does not go with --head {head}, which has recipes of its own")
    if head == "linear":
        unused = [f"--{name}" for name in ("decoder_channels", "layer_decay", "drop_path") if name in parser.given]
        if unused and not parser.values["eval"]:
            parser.error(f"--head linear has no use for {', '.join(unused)}: the encoder is frozen; leave it out")
        parser.set_defaults(**LINEAR_DEFAULTS)
    args = parser.resolve()
    if args.num_classes is None and args.label_values:
        args.num_classes = len(args.label_values)
    if args.decoder_channels is None:
        args.decoder_channels = min(WIDEST_DECODER, SIZES[args.model]["embed_dim"])
    return parser, args


def check_flags(args: argparse.Namespace, plan: Plan) -> None:
    """ValueError if a flag of segmentation, or a pair of them, is out of range, or a BatchNorm would see one value."""
    check_data_flags(args)
    common.check_shared_flags(args, "segmentation")
    if args.head == "linear" and args.finetune is None and args.resume in ("auto", "none"):
        raise ValueError("--head linear needs --finetune: the encoder is frozen, so it must be pre-trained")
    if plan.batch_size * collectives.rank_and_world_size()[1] == 1 and args.head == "upernet":
        raise ValueError("UPerNet's BatchNorm needs more than one image per micro-batch, got --batch_size 1")


def check_data_flags(args: argparse.Namespace) -> None:
    """ValueError if a flag that describes data and evaluation is out of range or missing."""
    if args.num_classes is None:
        raise ValueError("--num_classes is needed: the number of classes in the label files; recipes of ADE20K set it")
    if args.stride > args.input_size:
        raise ValueError(f"--stride {args.stride} must be at most --input_size {args.input_size}: windows leave gaps")
    if not args.image_scale[0] >= args.image_scale[1] >= 1:
        raise ValueError(f"--image_scale must be two sides, the longer one first, got {args.image_scale}")


def open_split(args: argparse.Namespace, split: str) -> SegmentationImages:
    """Opens a split on all ranks, and notes which classes its labels hold. args: also say which pixels are invalid.

    ValueError on all ranks if a file cannot be used, or if no pixel has a class.
    """
    values = LabelValues(args.num_classes, args.ignore_index, args.reduce_zero_label, args.label_values)
    open_images = partial(SegmentationImages, args.data_path, split, values, Reading.from_settings(vars(args)))
    return common.open_and_check(args, split, open_images)


def make_augmentation(
    args: argparse.Namespace, size: Size, pixels: PixelFormat, mean: Sequence[float]
) -> SegmentationAugment:
    """Returns the augmentation of training pairs, which pads images with the `mean` of each channel."""
    fill = mean
    if not pixels.is_float:
        fill = [round(value * pixels.full_range) for value in mean]
    return SegmentationAugment(
        size,
        args.seed,
        fill,
        args.image_scale,
        args.ratio_range,
        args.cat_max_ratio,
        args.photometric and pixels.dtype == "uint8",
        args.hflip,
        pixels.has_invalid,
    )


def make_optimizer(model: Segmenter, args: argparse.Namespace, lr: float) -> torch.optim.Optimizer:
    """Returns AdamW with layer-wise learning rates."""
    from timm.optim import param_groups_layer_decay

    groups = param_groups_layer_decay(model, args.weight_decay, model.no_weight_decay(), layer_decay=args.layer_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), fused=True)


def describe_scores(scores: Mapping[str, Any]) -> str:
    """Returns the scores of an evaluation in one line."""
    values = f"mIoU {scores['miou']:.2f} %, mAcc {scores['macc']:.2f} %, aAcc {scores['aacc']:.2f} %"
    return f"{values} on {count_of(int(scores['num_images']), 'image')}"


def main(argv: Sequence[str] | None = None) -> bool | dict[str, Any]:
    """Trains to the end of the schedule, or evaluates. Returns False if a signal stopped the run before."""
    parser, args = parse_args(argv)
    if args.eval:
        folder = folder_of_eval(parser, args, "this program")
        with begin(PROGRAM, parser, args, folder) as (process, output_dir):
            return evaluate_only(args, set(parser.given), process, output_dir)
    with Run.begin(PROGRAM, parser, args, argv, check=check_flags, encoder_flag="finetune") as run:
        with user_errors(parser):  # an error of the user ends the program in one sentence
            first = read_first(run)
            classes = read_classes(args.class_names, args.num_classes)
            images = open_split(args, "train")
            val_images = open_split(args, "val")
            check_splits(images, val_images)
            run.note(*images.notes, *val_images.notes)
            statistics = choose_statistics(run, images, first.pixels, first.rgb_bands)

            torch.backends.cudnn.benchmark = True  # shapes are static
            torch.manual_seed(args.seed)  # the same initial weights on every rank
            model = build_segmenter({**vars(args), **first.settings})
            load_weights = partial(load_encoder, model.backbone, rgb_bands=first.rgb_bands)
            run.load_first_weights(first.weights, load_weights, note_without="no --finetune: training from scratch")
            if run.process.device.type == "cuda" and run.process.world_size > 1:
                model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # the same statistics, in fused kernels
            model = model.to(run.process.device)
            optimizer = make_optimizer(model, args, run.plan.lr)

            augmentation = make_augmentation(args, model.img_size, images.pixel_format, statistics[0])
            if args.photometric and not augmentation.photometric:
                run.note(f"note: --photometric is not applied, because the images have {images.pixel_format}")
            dataset = AddressedDataset(images, augmentation, replace=args.max_bad_fraction > 0)
            sampler = StepBatchSampler(
                len(dataset),
                run.plan.batch_size,
                run.plan.accum_iter,
                run.process.rank,
                run.process.world_size,
                args.seed,
            )
            open_loader = partial(run.open_loader, dataset, sampler, stack_pairs, model.img_size)

            rate = LinearDecay(args.num_iters, args.warmup_iters, run.plan.lr)
            schedule = schedule_by_iterations(run, sampler.steps_per_epoch, rate)
            settings = {"patch_size": model.patch_size, **first.settings}
            info = run.describe(
                images,
                optimizer,
                schedule,
                statistics,
                settings,
                val_images=val_images,
                classes=classes.names,
                class_colors=classes.colors.tolist(),
            )
            state = run.restore(model, optimizer, info)
            name = f"{args.head} on {args.model}"
            model_in_ddp = wrap_model(model, run)
            log = open_log(run, schedule, info, summary_rows(name, model, args.num_classes, images, val_images))
            normalize = Normalize(*statistics, images.pixel_format).to(run.process.device)
            loop = TrainLoop(run, model_in_ddp, optimizer, schedule, normalize, log, state, bad_images=dataset.bad)
            if args.check_data:
                return end_check(loop, dataset, partial(draw_labels, classes=classes))

            saver = CheckpointSaver(loop, info)
            windows = SlidingWindows(args.image_scale, args.stride, args.window_weights)
            evaluate_val = partial(evaluate, model, val_images, classes, windows, args.num_pictures)
            evaluator = Evaluator(loop, saver, evaluate_val, describe_scores, picture_name=PICTURE)
            between: list[BetweenSteps] = [BadImages(loop, saver, dataset), evaluator]
            train_steps = partial(train_one_epoch, mean_over_valid=args.mean_over_valid)
            summary = partial(evaluator.summary, name, len(images))
        return train(loop, train_steps, open_loader, saver, between, summary)


def evaluate_only(
    args: argparse.Namespace, given: set[str], process: Process, output_dir: Path | None
) -> dict[str, Any]:
    """Evaluates the model at --resume on the validation split. given: names of explicit flags."""
    trained = load(args.resume, "segmentation")
    args = common.args_of_model(trained, args, given, MODEL_FLAGS, DATA_FLAGS)
    check_data_flags(args)
    classes = classes_of(trained.weights.info)
    if args.class_names is not None:
        classes = read_classes(args.class_names, args.num_classes)
    images = open_split(args, "val")
    print_on_rank0(*images.notes)
    windows = SlidingWindows(args.image_scale, args.stride, args.window_weights)
    evaluate_val = partial(evaluate, images=images, classes=classes, windows=windows)
    return common.evaluate_trained(trained, args, process, output_dir, images, evaluate_val, describe_scores, PICTURE)


if __name__ == "__main__":
    run_program(main, PROGRAM)
