"""Visualize a pre-trained model: its reconstructions, their errors, and the features of a ViT's encoder.

    python scripts/visualize.py output/photos --images data/photos/val --out reconstruction.png

The first argument is a checkpoint, or the folder of a run (its newest intact checkpoint is used). The errors are means
over the masked tokens of centre crops, separately for retained and thrown tokens. They are errors of pixels in [0, 1],
or of the framework's other targets. With norm_pix_loss the pictures and the errors use the mean and the variance of the
true patch, as in MAE.

Pictures show a single channel as grey, and the first three of others. Pixels of 16 bits and floats are scaled, here and
in the errors, so that the mean -+ 2 standard deviations are 0 and 1. Features are colours: the first three principal
components of the patch tokens of all images in the picture.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frameworks.hooks.reconstruction import crops, measure, reconstruction_picture
from frameworks.registry import load_run
from frameworks.views import predicts_pixels
from util import pictures
from util.atomic import prepare_file
from util.data.folders import refuse_inside_data
from util.data.images import Reading, evenly_spaced
from util.data.open import find_images
from util.data.statistics import normalizer
from util.flag import Flag
from util.run.cli import Parser
from util.run.exits import run_program, user_errors
from util.run.files import record
from util.run.start.flags import all_valid_flag
from util.text import printable


def show_run(args: argparse.Namespace) -> None:
    """Draws the reconstructions of a run, and prints their errors."""
    moved = {}
    if args.teacher:
        moved["teacher"] = args.teacher
    model, settings = load_run(args.run, moved)
    if args.all_valid:
        settings = record.without_marks(settings)
    dataset = settings["dataset"]
    data_path = settings["data_path"]
    image_column = settings.get("image_column")
    if args.images:
        dataset = "folder"
        data_path = args.images
        image_column = None
    refuse_inside_data("--out", args.out, dataset, data_path)
    reading = Reading.from_settings({"in_chans": 3, **settings, "loader": "fast"})
    images = find_images(dataset, data_path, "val", reading=reading, image_column=image_column)
    images.check()
    measured = evenly_spaced(len(images), args.max_images)
    errors_by_name = measure(model, settings, images, measured)
    lines = []
    for name, errors in errors_by_name.items():
        for kind, error in errors.items():
            if not math.isfinite(error):
                raise FloatingPointError(f"the reconstructions of {args.run!r} are not finite")
            line = f"{kind} tokens of {len(measured)} images: {name} {error:.5f}"
            if predicts_pixels(model):
                line += f", PSNR {-10 * math.log10(error):.2f} dB"
            lines.append(line)
    drawn = evenly_spaced(len(images), args.rows)
    ((imgs, ids_shuffle),) = crops(model, settings, images, drawn, batch_size=len(drawn))
    normalize = normalizer(settings, images.pixel_format)
    pictures.save(reconstruction_picture(model, normalize, imgs, ids_shuffle), args.out)
    where = f"reconstructions of {len(drawn)} images of {images.root}: {args.out}"
    print(printable("\n".join([*images.notes, where, *lines])))


FLAGS = (
    Flag("run", help="a checkpoint, or the folder of a run", positional=True),
    Flag(
        "images",
        help="class folders or a flat folder; without it, val/ of the run's data, or train/ if val/ is missing",
    ),
    Flag("out", Path, help="write the reconstructions to this picture (default: a new reconstruction.png)"),
    Flag("rows", int, 8, "number of images to draw, evenly spaced", at_least=1),
    Flag("max_images", int, 1000, "most images to measure, evenly spaced", at_least=1),
    all_valid_flag(),
    Flag("teacher", help="the teacher of a TEC model, if it has moved since the run"),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("visualize.py", __doc__, *FLAGS)
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = Path("reconstruction.png")
        if args.out.exists():
            parser.error(f"{str(args.out)!r} exists already: give --out")
    with user_errors(parser):
        pictures.check_suffix(args.out)
        prepare_file("--out", args.out)
        show_run(args)


if __name__ == "__main__":
    run_program(main, "visualize.py")
