"""Visualize a pre-trained model: its reconstructions and their errors, or the sampling patterns.

    python scripts/visualize.py output/photos --images data/photos/val --out reconstruction.png
    python scripts/visualize.py --patterns patterns.png

The first argument is a checkpoint, or the folder of a run (its newest intact checkpoint is used). The errors are means
over the masked tokens of centre crops, separately for retained and thrown tokens. They are errors of pixels in [0, 1],
or of the framework's other targets. With norm_pix_loss the pictures and the errors use the mean and the variance of the
true patch, as in MAE.

Pictures show a single channel as grey, and the first three of others. Pixels of 16 bits and floats are scaled, here and
in the errors, so that the mean -+ 2 standard deviations are 0 and 1.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frameworks.reconstruction import crops, measure, reconstruction_picture
from frameworks.registry import load_run
from prmim import TokenCounts, TokenOrder, TokenOrderSampler, addressed_noise
from util import pictures
from util.data.folders import refuse_inside_data
from util.data.images import evenly_spaced
from util.data.open import open_images
from util.data.statistics import normalizer
from util.run.cli import Parser, prepare_file, run_program, user_errors


def draw_patterns(
    path: str | Path,
    grid: int = 14,
    mask_ratio: float = 0.75,
    throw_ratios: Sequence[float] = (0.25, 0.5, 0.65),
    num_images: int = 3,
) -> None:
    """Draws the paper's figure of sampling patterns: random and furthest sampling of the same masked tokens."""
    noise = addressed_noise(0, 0, np.arange(num_images), grid * grid)
    groups = {}
    for sampling in ("random", "furthest"):
        rows = []
        for throw_ratio in throw_ratios:
            counts = TokenCounts.from_ratios(grid * grid, mask_ratio, throw_ratio)
            order = TokenOrder(torch.from_numpy(TokenOrderSampler(grid, counts, sampling)(noise)), counts)
            states = (order.mask.int() + order.thrown.int()).view(-1, grid, grid).numpy()
            rows.append([pictures.pattern(state) for state in states])
        groups[f"{sampling} sampling"] = rows
    pictures.save(pictures.pattern_table(groups, [f"throw ratio {ratio}" for ratio in throw_ratios]), path)


def show_run(args: argparse.Namespace) -> None:
    model, settings = load_run(args.run, {"teacher": args.teacher} if args.teacher else None)
    channels = settings.get("in_chans", 3)
    source, column = (settings["dataset"], settings["data_path"]), settings.get("image_column")
    if args.images:
        source, column = ("folder", args.images), None
    images = open_images(*source, "val", in_chans=channels, image_column=column)
    for flag, path in (("--out", args.out), ("--patterns", args.patterns)):
        if path:
            refuse_inside_data(flag, path, source[1])
    normalize = normalizer(settings, images.pixel_format)
    drawn, measured = (evenly_spaced(len(images), n) for n in (args.rows, args.max_images))
    found = measure(model, settings, images, measured)
    if not all(math.isfinite(error) for errors in found.values() for error in errors.values()):
        raise FloatingPointError(f"the reconstructions of {args.run!r} are not finite; nothing is written")
    ((imgs, ids_shuffle),) = crops(model, settings, images, drawn, batch_size=len(drawn))
    pictures.save(reconstruction_picture(model, normalize, imgs, ids_shuffle), args.out)
    print(f"reconstructions of {len(drawn)} images of {images.root}: {args.out}")
    predicts_pixels = model.predicts_pixels()
    for name, errors in found.items():
        for kind, error in errors.items():
            psnr = f", PSNR {-10 * math.log10(error):.2f} dB" if predicts_pixels else ""
            print(f"{kind} tokens of {len(measured)} images: {name} {error:.5f}{psnr}")


def get_args_parser() -> Parser:
    parser = Parser("visualize.py", description=__doc__)
    flag = parser.add_argument
    flag("run", nargs="?", help="a checkpoint, or the folder of a run")
    what = "class folders or a flat folder; without it, val/ of the run's data, or train/ if val/ is missing"
    flag("--images", help=what)
    what = "write the reconstructions to this picture (default: a new reconstruction.png)"
    flag("--out", type=Path, help=what)
    flag("--rows", type=int, default=8, at_least=1, help="number of images to draw, evenly spaced")
    flag("--max_images", type=int, default=1000, at_least=1, help="most images to measure, evenly spaced")
    flag("--teacher", help="the teacher of a TEC model, if it has moved since the run")
    flag("--patterns", type=Path, help="write the sampling patterns to this picture")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = get_args_parser()
    args = parser.parse_args(argv)
    if args.run is None and not args.patterns:
        parser.error("give a checkpoint or the folder of a run, or --patterns")
    if args.run and args.out is None:
        args.out = Path("reconstruction.png")
        if args.out.exists():
            parser.error(f"{str(args.out)!r} exists already: give --out")
    with user_errors(parser):
        for flag, path in (("--patterns", args.patterns), ("--out", args.out if args.run else None)):
            if path:
                pictures.check_suffix(path)
                prepare_file(flag, path)
        if args.run:
            show_run(args)
        if args.patterns:
            draw_patterns(args.patterns)
            print(f"sampling patterns: {args.patterns}")


if __name__ == "__main__":
    run_program(main, "visualize.py")
