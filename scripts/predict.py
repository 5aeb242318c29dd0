"""Predict classes, label maps or objects of images, by a finished run of any task.

    python scripts/predict.py output/finetuned data/few/val --output_dir output/predicted
    python scripts/predict.py output/fields scene.tif --keep_size --output_dir output/maps
    python scripts/predict.py output/coco images.txt --output_dir output/objects

RUN is the folder of a run or a checkpoint: of main_finetune.py (or a classifier of MAE, timm or Transformers), of
main_segmentation.py or of main_detection.py. IMAGES is a folder, in which all images are found whatever folders they
are in, a folder of tar shards, a tar, an image, or a text file with a path on each line, relative to the working
folder. Labels are not needed. Images are seen as in the evaluation of the run.

classifier     OUT/predictions.csv: the probability of each class.
segmentation   OUT/labels/NAME.png: palette PNGs in the size of the image, with the values of the training's label
               files; for TIFFs NAME.tif, in tiles, with the geo tags and the names of the classes. TIFFs of any size
               are predicted part by part, if --keep_size is given. OUT/pictures: overlays; stripes have no class.
detection      OUT/detections.json: COCO's results. OUT/images.json: the ids of the images. OUT/pictures.

OUT/predict.json says which model predicted, and what label values and colours mean. The same command again continues
with the images that are missing. An image that cannot be read is named and left out; the exit code is then 1.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from downstream.detection.masks import coco_masks
from downstream.detection.predict_objects import Detections, choose_ids
from downstream.segmentation.engine_segmentation import WINDOW_WEIGHTS
from downstream.segmentation.large_tiffs import LargeTiff
from downstream.segmentation.predict_labels import LabelMaps
from encoders.trained import load, note_on_view
from scripts.parts.predict_classes import Probabilities
from util.code_version import code_version
from util.collectives import print_on_rank0
from util.data.images import EncodedImages, ImageError, Reading
from util.data.pixel_format import Header
from util.data.statistics import normalizer
from util.evaluate.context import context_of_flags
from util.evaluate.predictions import open_unlabelled, write_record
from util.flag import Flag
from util.run.cli import Parser
from util.run.exits import run_program
from util.run.files.record import without_marks
from util.run.processes.distributed import PRECISIONS, Process, precision
from util.run.start.begin import begin
from util.run.start.first_weights import identify_encoder
from util.run.start.flags import all_valid_flag
from util.text import count_of

PROGRAM = "predict.py"


FLAGS = (
    Flag("run", help="folder of a run, or a checkpoint", positional=True, metavar="RUN"),
    Flag("images", help="folder, tars, list of paths, or an image", positional=True, metavar="IMAGES"),
    Flag("output_dir", Path, help="folder of the predictions", metavar="OUT", required=True),
    Flag(
        "keep_size",
        bool,
        help="segmentation: do not scale images into --image_scale of the run, for scenes of which it saw tiles; TIFFs "
        "may then have any size (pip install rasterio); off, images that are more than halved need --no-keep_size",
    ),
    Flag("window_weights", help="segmentation: of main_segmentation.py (default: the run's)", choices=WINDOW_WEIGHTS),
    Flag(
        "image_ids",
        help="detection: COCO-style file whose ids the images get, by file name (default: 1, 2, ...)",
        metavar="FILE.json",
    ),
    Flag("num_pictures", int, 20, "images of a dense task that are shown in a picture", at_least=0),
    all_valid_flag(),
    Flag("batch_size", int, 64, "images of a classifier per batch; dense tasks: one", at_least=1),
    Flag(
        "num_workers",
        int,
        help="processes that read images (default: the number of cores less one, from 1 to 32)",
        at_least=0,
    ),
    Flag("device", str, "auto", "auto: a GPU if there is one", choices=("auto", "cpu", "cuda")),
    Flag("precision", str, "auto", "auto: bf16 or fp16 on a GPU, fp32 on a CPU", choices=("auto", *PRECISIONS)),
)


def open_images(args: argparse.Namespace, settings: Mapping[str, Any]) -> EncodedImages:
    """Opens the images as the run's were read. ValueError if there are none that the model takes."""
    images = open_unlabelled(args.images, Reading.from_settings(settings))

    def read_header(i: int) -> Header:
        try:
            return images.read_header(i)
        except ImageError:
            if not args.keep_size:
                raise
            tiff = LargeTiff(images, i)
            return tiff.pixels, tiff.size

    images.survey(max_bad_fraction=1, read_header=read_header)  # each bad one is named later
    return images


def refuse_other_tasks(args: argparse.Namespace, task: str) -> None:
    """ValueError if a flag is given that belongs to another task than that of the run."""
    for name, owner in (("keep_size", "segmentation"), ("window_weights", "segmentation"), ("image_ids", "detection")):
        if getattr(args, name) and task != owner:
            raise ValueError(f"--{name} is for {owner}, and {args.run!r} is a model of {task}: leave it out")


def make_predictor(args: argparse.Namespace, process: Process) -> Detections | LabelMaps | Probabilities:
    """Returns what predicts the images that the flags name, by the model of the run. It writes the record."""
    trained = load(args.run)
    weights = identify_encoder(Path(trained.weights.path))
    task = trained.task
    if task == "encoder":
        raise ValueError(f"RUN {args.run!r} holds an encoder without a head: fine-tune it first")
    refuse_other_tasks(args, task)
    settings = trained.settings
    if args.all_valid:
        settings = without_marks(settings)
    images = open_images(args, settings)
    context = context_of_flags(args, process, normalizer(settings, images.pixel_format), args.batch_size)
    print_on_rank0(f"{task} by {weights.path}: {count_of(len(images), 'image')} in {images.root}", *images.notes)
    chosen = {
        "model": weights.sha256,
        "images": str(Path(args.images).resolve()),
        "root": str(Path(images.root).resolve()),  # names of outputs depend on it; that of a list may change
        "keep_size": bool(args.keep_size),
        "window_weights": args.window_weights,
        "all_valid": args.all_valid,
        "precision": precision(args.precision, context.device).name,
    }
    facts: dict[str, Any] = {"task": task, "checkpoint": weights.path, "code": code_version()}
    predictor: Detections | LabelMaps | Probabilities
    if task == "detection":
        coco_masks()  # refuses to go on without the library
        ids = choose_ids(images, args.image_ids)
        predictor = Detections(trained, images, args.output_dir, context, ids, args.num_pictures)
    elif task == "segmentation":
        predictor = LabelMaps(
            trained, images, args.output_dir, context, bool(args.keep_size), args.num_pictures, args.window_weights
        )
        if args.keep_size is None:
            predictor.refuse_shrinking()
        facts |= predictor.facts()
    else:
        print_on_rank0(*note_on_view(settings, args.run))
        predictor = Probabilities(trained, images, args.output_dir, context)
    write_record(args.output_dir, chosen, facts)
    return predictor


def main(argv: Sequence[str] | None = None) -> None:
    """Predicts the images that are missing. The exit code is 1 if some cannot be read."""
    parser = Parser(PROGRAM, __doc__, *FLAGS)
    args = parser.parse_args(argv)
    if args.output_dir.resolve().is_relative_to(Path(args.images).resolve()):  # where the next start would find them
        parser.error(f"--output_dir {str(args.output_dir)!r} lies inside the images: choose another place")
    with begin(PROGRAM, parser, args, args.output_dir) as (process, _):
        if process.world_size > 1:
            raise ValueError("it runs in one process: start one for each part of the images, with its own --output_dir")
        predictor = make_predictor(args, process)
        predictor.write_missing()
        num_images = len(predictor.images)
        num_missing = len(predictor.missing())
        print_on_rank0(f"predicted {num_images - num_missing} of {count_of(num_images, 'image')}: {args.output_dir}")
    if num_missing:
        parser.exit(1, f"{PROGRAM}: error: {count_of(num_missing, 'image')} cannot be read\n")


if __name__ == "__main__":
    run_program(main, PROGRAM)
