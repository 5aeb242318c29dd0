"""Looks at a pre-trained model: its reconstructions and errors, or the sampling patterns.

    python scripts/visualize.py output/photos --images data/photos/val --out reconstruction.png
    python scripts/visualize.py --patterns patterns.png

The first argument is a checkpoint or a run's folder (its newest good checkpoint). The errors are over the masked tokens
of centre crops, retained and thrown ones apart: of pixels in [0, 1], or of what else the framework predicts. With
norm_pix_loss pictures and errors take each patch's mean and contrast from the true patch, as MAE's do.
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from framework import PixelFramework
from main_pretrain import build_model, reconstruction_picture
from prmim import TokenCounts, TokenOrder, TokenOrderSampler, addressed_noise
from util import checkpoint, pictures
from util.cli import Parser
from util.datasets import AddressedDataset, open_images
from util.transforms import Normalize, ResizeCenterCrop


def load_run(path, teacher=None):
    """-> (model in eval mode, settings) of a checkpoint of main_pretrain, or of the newest in a run's folder.

    teacher: where TEC's teacher lies now; ValueError if it is another one than the run's.
    """
    path = checkpoint.find_checkpoint_file(path)
    content = checkpoint.read_checkpoint(path)
    if not isinstance(content.get("meta"), dict) or "mask_ratio" not in content["meta"].get("settings", {}):
        raise ValueError(f"{str(path)!r} is not a checkpoint of main_pretrain.py: it does not say which model it holds")
    settings = content["meta"]["settings"] | ({"teacher": teacher} if teacher else {})
    model = build_model(settings)
    known = content["meta"].get("teacher")
    if known is not None and known != model.teacher.fingerprint:
        raise ValueError(f"the teacher at {settings['teacher']!r} has other weights than that of the run at {str(path)!r}")
    checkpoint.load_strict(model, content["model"], "the checkpoint's weights")
    return model.eval(), settings


def crops(model, settings, images, indices, batch_size=64):
    """Centre crops of the images at `indices` with their token orders, in batches (imgs uint8, ids_shuffle)."""
    dataset = AddressedDataset(images, ResizeCenterCrop(model.img_size))
    collator = model.collator(settings["sampling"], settings["seed"])
    for first in range(0, len(indices), batch_size):
        imgs, _, ids_shuffle, *_ = collator([dataset[(0, int(i))] for i in indices[first : first + batch_size]])
        yield imgs, ids_shuffle


@torch.no_grad()
def measure(model, settings, images, indices):
    """-> {name of the error: {"retained" | "thrown": its mean}}; plain models predict, and so measure, no thrown tokens."""
    normalize, totals = Normalize(), {}
    for imgs, ids_shuffle in crops(model, settings, images, indices):
        imgs, order = normalize(imgs), TokenOrder(ids_shuffle, model.counts)
        _, predicted = model.reconstruct(imgs, ids_shuffle)
        for name, error in model.token_errors(imgs, ids_shuffle, normalize.undo).items():
            for kind, tokens in (("retained", order.mask & ~order.thrown), ("thrown", order.thrown & predicted)):
                total, count = totals.setdefault(name, {}).get(kind, (0.0, 0))
                totals[name][kind] = total + error[tokens].sum().item(), count + int(tokens.sum())
    return {name: {kind: total / count for kind, (total, count) in sums.items() if count} for name, sums in totals.items()}


def draw_patterns(path, grid=14, mask_ratio=0.75, throw_ratios=(0.25, 0.5, 0.65), num_images=3):
    """The paper's figure of sampling patterns: random against furthest, the same visible tokens in each column."""
    noise = addressed_noise(0, 0, np.arange(num_images), grid * grid)
    rows = []
    for throw_ratio in throw_ratios:
        counts = TokenCounts.from_ratios(grid * grid, mask_ratio, throw_ratio)
        row = []
        for sampling in ("random", "furthest"):
            order = TokenOrder(torch.from_numpy(TokenOrderSampler(grid, counts, sampling)(noise)), counts)
            states = (order.mask.int() + order.thrown.int()).view(-1, grid, grid).numpy()
            row += [pictures.pattern(state) for state in states]
        rows.append(row)
    blank = [""] * (num_images - 1)
    Image.fromarray(pictures.table(rows, ["random", *blank, "furthest", *blank])).save(path)


def main(argv=None):
    parser = Parser("visualize.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="a checkpoint or a run's folder")
    parser.add_argument("--images", help="class folders or a flat folder (default: the run's data; val/ where there is one)")
    parser.add_argument("--out", default="reconstruction.png")
    parser.add_argument("--rows", type=int, default=8, help="images to draw, evenly spaced")
    parser.add_argument("--max_images", type=int, default=1000, help="images to measure, evenly spaced")
    parser.add_argument("--teacher", help="TEC's, if it is no longer where it was")
    parser.add_argument("--patterns", help="draw the sampling patterns to this PNG")
    args = parser.parse_args(argv)
    if args.run is None and not args.patterns:
        parser.error("give a checkpoint or a run's folder, or --patterns")
    if min(args.rows, args.max_images) < 1:
        parser.error(f"--rows and --max_images must be at least 1, got {args.rows} and {args.max_images}")
    try:
        if args.patterns:
            draw_patterns(args.patterns)
            print(f"sampling patterns: {args.patterns}")
        if args.run:
            look(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def look(args):
    """Draws and measures the run's reconstructions."""
    model, settings = load_run(args.run, args.teacher)
    images = open_images("folder" if args.images else settings["dataset"], args.images or settings["data_path"], "val")
    drawn, measured = (evenly_spaced(len(images), n) for n in (args.rows, args.max_images))
    (imgs, ids_shuffle), *_ = crops(model, settings, images, drawn, batch_size=len(drawn))
    Image.fromarray(reconstruction_picture(model, Normalize(), imgs, ids_shuffle)).save(args.out)
    print(f"reconstructions of {len(drawn)} images of {images.root}: {args.out}")  # train/ where there is no val/
    for name, errors in measure(model, settings, images, measured).items():
        for kind, error in errors.items():
            decibel = f", PSNR {-10 * math.log10(error):.2f} dB" if isinstance(model, PixelFramework) else ""
            print(f"{kind} tokens of {len(measured)} images: {name} {error:.5f}{decibel}")


def evenly_spaced(length, most):
    return np.unique(np.linspace(0, length - 1, min(most, length)).astype(int))


if __name__ == "__main__":
    main()
