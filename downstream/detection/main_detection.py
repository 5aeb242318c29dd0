r"""Trains Mask R-CNN on a pre-trained ViT (ViTDet), for COCO or any data set in COCO's format.

    torchrun --nproc_per_node 8 downstream/detection/main_detection.py --recipe coco_mask_rcnn_vit_base \
        --data_path COCO --finetune output/prmim50_base --output_dir output/coco
    python downstream/detection/main_detection.py --recipe short --finetune ... # for one GPU
    python downstream/detection/main_detection.py --eval --resume output/coco --data_path COCO

If the objects have no segmentations, the model is Faster R-CNN. The same command again resumes the run at the step of
its newest good checkpoint.
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
from downstream.common import StepDecay, schedule_by_iterations
from downstream.detection.data import CocoImages, LargeScaleJitter, PadAndStack
from downstream.detection.engine_detection import evaluate, train_one_epoch
from downstream.detection.masks import coco_masks
from downstream.detection.models import build_detector
from downstream.detection.pictures import draw_sample
from downstream.recipes import DETECTION_RECIPES, MASK_RCNN_DEFAULTS
from encoders.load import load_encoder, read_first
from encoders.trained import load
from util.data.datasets import AddressedDataset, StepBatchSampler
from util.data.images import Reading, check_classes, check_splits
from util.data.transforms import Normalize
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
from util.run.train.logging import open_log, summary_rows
from util.run.train.loop import TrainLoop
from util.run.train.saving import CheckpointSaver
from util.run.train.training import end_check, train
from util.run.train.wrap import wrap_model
from util.text import count_of
from util.urls import local_path

PROGRAM = "main_detection.py"
PICTURE = "detections.png"
# Settings that describe a trained model. Evaluation takes them from the checkpoint.
MODEL_FLAGS = ("model", "input_size", "patch_size", "in_chans", "window_size", "decoder_channels")
SPLITS = {split: (f"annotations/instances_{split}2017.json", f"{split}2017") for split in ("train", "val")}


PATH_FLAGS = [
    # data may move: names and labels of the images are compared
    Flag(
        "data_path",
        local_path,
        "data",
        "folder to which the next four paths are relative",
        everyday=True,
        changes="nothing",
        per_process=True,
    ),
]
for _split, (_json, _images) in SPLITS.items():
    PATH_FLAGS += [
        Flag(
            f"{_split}_json",
            str,
            _json,
            f"annotations of the {_split} images",
            everyday=True,
            changes="nothing",
            metavar="FILE",
        ),
        Flag(
            f"{_split}_images",
            str,
            _images,
            f"folder of the {_split} images",
            everyday=True,
            changes="nothing",
            metavar="DIR",
        ),
    ]

FLAGS = {  # {title in the help: flags of detection}
    "data": PATH_FLAGS,
    "augmentation": (
        Flag(
            "scale_range",
            float,
            help="range of the random factor of large-scale jitter",
            everyday=True,
            nargs=2,
            metavar=("LOW", "HIGH"),
        ),
    ),
    "model": (
        Flag(
            "input_size",
            int,
            help="side of a training crop, and longer side in evaluation, in pixels",
            everyday=True,
            at_least=1,
        ),
        Flag("window_size", int, help="side of an attention window in patches", at_least=1),
        Flag("decoder_channels", int, help="width of the pyramid and the heads", at_least=1),
        Flag(
            "masks",
            bool,
            help="train and evaluate a mask head (default: if the objects have segmentations)",
            everyday=True,
        ),
    ),
    "optimisation": (
        Flag("num_rois", int, help="boxes of an image that are sampled for the losses of the heads", at_least=1),
        Flag(
            "lr_drops",
            float,
            help="shares of --num_iters after which the rate is divided by 10",
            nargs="*",
            at_most=1,
            above=0,
        ),
    ),
}


def get_args_parser() -> Parser:
    """Returns the parser of all flags."""
    defaults = dict(output_dir="output/detection", save_every=50_000, **MASK_RCNN_DEFAULTS)
    parser = common.make_parser(PROGRAM, __doc__, FLAGS, defaults)
    # Boxes are sampled, and losses are averaged, for the micro-batch of a process. The number of processes and
    # --accum_iter may change: a step is the mean over all micro-batches.
    parser.changes["batch_size"] = "results"
    parser.changes["categories"] = "nothing"  # they follow from the data, which are compared by themselves
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Returns (parser, flags)."""
    parser = get_args_parser()
    return parser, parser.parse_args(argv, recipes=DETECTION_RECIPES)


def check_flags(args: argparse.Namespace, plan: Plan) -> None:
    """ValueError if a flag of detection, or a pair of them, is out of range, or if a library is missing."""
    common.check_shared_flags(args, "detection")
    if args.max_bad_fraction:
        raise ValueError("--max_bad_fraction is not for detection, where an image has its own boxes: leave it out")
    coco_masks()


# ------------------------------------------------------------------------------------------------------------- data


def open_split(args: argparse.Namespace, split: str) -> CocoImages:
    """Opens a split on all ranks. ValueError on all ranks if a file cannot be used."""
    root = Path(args.data_path)
    open_images = partial(
        CocoImages,
        root / getattr(args, f"{split}_json"),
        root / getattr(args, f"{split}_images"),
        training=split == "train",
        reading=Reading.from_settings(vars(args)),
    )
    return common.open_and_check(args, split, open_images)


def check_categories(categories: Sequence[Sequence[Any]], images: CocoImages, owner: str) -> None:
    """ValueError if the categories of `images` are not `categories`, which are those of `owner`."""
    wanted = [f"{number} {name}" for number, name in categories]
    present = [f"{number} {name}" for number, name in images.categories]
    check_classes(wanted, present, owner, repr(str(images.json_path)))


def choose_masks(masks: bool | None, images: CocoImages) -> bool:
    """Returns whether masks of these images are used. ValueError if objects lack segmentations for it.

    masks: value of --masks; None: use masks if there are any.
    """
    missing = images.num_objects - images.num_masks
    if masks is None:
        masks = images.num_masks > 0
    if masks and missing:
        raise ValueError(
            f"{missing} of {images.num_objects} objects of {str(images.json_path)!r} have no segmentation: "
            f"add them, or use boxes alone with --no-masks"
        )
    return masks


# -------------------------------------------------------------------------------------------------------- reporting


def describe_scores(scores: Mapping[str, Any]) -> str:
    """Returns the scores of an evaluation in one line."""
    parts = []
    for name in ("box", "mask"):
        if f"{name}_ap" in scores:
            ap = f"AP {name} {scores[f'{name}_ap']:.2f} %"
            parts.append(f"{ap} ({scores[f'{name}_ap50']:.2f} at IoU .5, {scores[f'{name}_ap75']:.2f} at .75)")
    return f"{', '.join(parts)} on {count_of(int(scores['num_images']), 'image')}"


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
            images = open_split(args, "train")
            val_images = open_split(args, "val")
            check_categories(images.categories, val_images, str(images.json_path))
            check_splits(images, val_images)
            masks = choose_masks(args.masks, images)
            val_masks = masks and choose_masks(None, val_images)
            chosen: dict[str, Any] = {"masks": masks, "categories": [list(category) for category in images.categories]}
            if run.resumed is not None:
                check_categories(run.resumed.settings["categories"], images, f"the run in {str(run.output_dir)!r}")
            run.note(*images.notes, *val_images.notes)
            statistics = choose_statistics(run, images, first.pixels, first.rgb_bands)

            torch.manual_seed(args.seed)  # the same initial weights on every rank
            model = build_detector({**vars(args), **chosen, **first.settings})
            load_weights = partial(load_encoder, model.backbone, rgb_bands=first.rgb_bands)
            run.load_first_weights(first.weights, load_weights, note_without="no --finetune: training from scratch")
            model = model.to(run.process.device)
            groups = model.param_groups(args.weight_decay, args.layer_decay)
            optimizer = torch.optim.AdamW(groups, lr=run.plan.lr, betas=(0.9, 0.999), fused=True)

            augmentation = LargeScaleJitter(images, args.input_size, args.seed, args.scale_range, masks, args.hflip)
            dataset = AddressedDataset(images, augmentation)
            sampler = StepBatchSampler(
                len(dataset),
                run.plan.batch_size,
                run.plan.accum_iter,
                run.process.rank,
                run.process.world_size,
                args.seed,
            )
            open_loader = partial(run.open_loader, dataset, sampler, PadAndStack(args.input_size), model.img_size)

            rate = StepDecay(args.num_iters, args.warmup_iters, run.plan.lr, args.lr_drops)
            schedule = schedule_by_iterations(run, sampler.steps_per_epoch, rate)
            settings = {**chosen, "patch_size": model.patch_size, **first.settings}
            info = run.describe(images, optimizer, schedule, statistics, settings, val_images=val_images)
            state = run.restore(model, optimizer, info)
            kind = "Mask" if masks else "Faster"
            name = f"{kind} R-CNN on {args.model}"
            model_in_ddp = wrap_model(model, run)
            rows = summary_rows(name, model, len(images.categories), images, val_images)
            log = open_log(run, schedule, info, rows)
            normalize = Normalize(*statistics, images.pixel_format).to(run.process.device)
            loop = TrainLoop(run, model_in_ddp, optimizer, schedule, normalize, log, state)
            if args.check_data:
                return end_check(loop, dataset, partial(draw_sample, categories=images.categories))

            saver = CheckpointSaver(loop, info)
            evaluate_val = partial(evaluate, model, val_images, val_masks, args.num_pictures)
            evaluator = Evaluator(loop, saver, evaluate_val, describe_scores, picture_name=PICTURE)
            summary = partial(evaluator.summary, name, len(images))
        return train(loop, train_one_epoch, open_loader, saver, [evaluator], summary)


def evaluate_only(
    args: argparse.Namespace, given: set[str], process: Process, output_dir: Path | None
) -> dict[str, Any]:
    """Evaluates the model at --resume on the validation images. given: names of explicit flags."""
    coco_masks()
    trained = load(args.resume, "detection")
    settings = trained.settings
    args = common.args_of_model(trained, args, given, MODEL_FLAGS)
    if args.masks and not settings["masks"]:
        raise ValueError(f"--masks, but the model at {args.resume!r} has no mask head: leave it out")
    images = open_split(args, "val")
    check_categories(settings["categories"], images, f"the model at {args.resume!r}")
    masks = settings["masks"] and choose_masks(args.masks, images)
    evaluate_val = partial(evaluate, images=images, masks=masks)
    return common.evaluate_trained(trained, args, process, output_dir, images, evaluate_val, describe_scores, PICTURE)


if __name__ == "__main__":
    run_program(main, PROGRAM)
