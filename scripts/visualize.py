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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from framework import Framework, PixelFramework
from main_pretrain import MODELS, build_model, reconstruction_picture
from prmim import TokenCounts, TokenOrder, TokenOrderSampler, addressed_noise
from util import pictures
from util.data.datasets import AddressedDataset, open_images
from util.data.images import CifarImages, EncodedImages
from util.data.transforms import Normalize, ResizeCenterCrop
from util.run import checkpoint
from util.run.cli import Parser, run_program, user_errors, why_not_writable

Images = EncodedImages | CifarImages
Indices = Sequence[int] | np.ndarray
Errors = dict[str, dict[str, float]]


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint file that `path` means: itself, or the newest intact one of a run's folder.

    ValueError says what to give instead of a folder without checkpoints, or of another file of a run.
    """
    path = Path(path)
    if path.is_dir() and not any(path.glob("checkpoint-*.pth")):
        runs = sorted({str(found.parent) for found in path.glob("*/checkpoint-*.pth")})
        advice = f"its runs are {', '.join(runs[:5])}" if runs else "give the folder of a run, or a checkpoint"
        raise ValueError(f"the folder {str(path)!r} holds no checkpoint: {advice}")
    if path.suffix in (".json", ".jsonl", ".txt") and path.is_file():
        beside = path.with_suffix(".pth")
        advice = f"the checkpoint is {str(beside)!r}" if beside.is_file() else f"give the folder {str(path.parent)!r}"
        raise ValueError(f"{str(path)!r} is a record of a run and holds no weights: {advice}")
    return checkpoint.find_checkpoint_file(path)


def check_pretrained(meta: Any, path: Path) -> None:
    """ValueError where `meta` is not that of a checkpoint of main_pretrain.py."""
    settings = meta.get("settings", {}) if isinstance(meta, dict) else {}
    if "nb_classes" in settings:
        encoder = (meta.get("encoder") or {}).get("path") or settings.get("finetune")
        advice = f"give its encoder, {encoder!r}" if encoder else "give a checkpoint that main_pretrain.py has written"
        raise ValueError(f"{str(path)!r} is a fine-tuned classifier, which reconstructs no images: {advice}")
    if "mask_ratio" not in settings:
        raise ValueError(
            f"{str(path)!r} does not say which model it holds: give a checkpoint that main_pretrain.py has written; "
            "exported and released weights lack its settings"
        )
    if settings["model"] not in MODELS:
        raise ValueError(f"{str(path)!r} holds a {settings['model']!r}, which main_pretrain.py does not know")


def load_run(path: str | Path, teacher: str | None = None) -> tuple[Framework, dict[str, Any]]:
    """-> (model in eval mode, settings) of a checkpoint of main_pretrain, or of the newest in a run's folder.

    teacher: where TEC's teacher lies now; ValueError if it is another one than the run's.
    """
    path = find_checkpoint(path)
    content = checkpoint.read_checkpoint(path)
    check_pretrained(content.get("meta"), path)
    settings = content["meta"]["settings"] | ({"teacher": teacher} if teacher else {})
    model = build_model(settings)
    known = content["meta"].get("teacher")
    if known is not None and known != model.teacher.fingerprint:
        where = settings["teacher"]
        raise ValueError(f"the teacher at {where!r} has other weights than that of the run at {str(path)!r}")
    checkpoint.load_strict(model, content["model"], "the checkpoint's weights")
    return model.eval(), settings


def crops(
    model: Framework, settings: dict[str, Any], images: Images, indices: Indices, batch_size: int = 64
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Centre crops of the images at `indices` with their token orders, in batches (imgs uint8, ids_shuffle)."""
    dataset = AddressedDataset(images, ResizeCenterCrop(model.img_size))
    collator = model.collator(settings["sampling"], settings["seed"])
    for first in range(0, len(indices), batch_size):
        imgs, _, ids_shuffle, *_ = collator([dataset[(0, int(i))] for i in indices[first : first + batch_size]])
        yield imgs, ids_shuffle


@torch.no_grad()
def measure(model: Framework, settings: dict[str, Any], images: Images, indices: Indices) -> Errors:
    """-> {name of the error: {"retained" | "thrown": its mean}}; of thrown tokens only where they are predicted."""
    normalize, totals = Normalize(), {}
    for imgs, ids_shuffle in crops(model, settings, images, indices):
        imgs, order = normalize(imgs), TokenOrder(ids_shuffle, model.counts)
        _, predicted = model.reconstruct(imgs, ids_shuffle)
        for name, error in model.token_errors(imgs, ids_shuffle, normalize.undo).items():
            for kind, tokens in (("retained", order.mask & ~order.thrown), ("thrown", order.thrown & predicted)):
                total, count = totals.setdefault(name, {}).get(kind, (0.0, 0))
                totals[name][kind] = total + error[tokens].sum().item(), count + int(tokens.sum())
    means = {}
    for name, sums in totals.items():
        means[name] = {kind: total / count for kind, (total, count) in sums.items() if count}
    return means


def draw_patterns(
    path: str | Path,
    grid: int = 14,
    mask_ratio: float = 0.75,
    throw_ratios: Sequence[float] = (0.25, 0.5, 0.65),
    num_images: int = 3,
) -> None:
    """The paper's figure of sampling patterns: random against furthest, the same visible tokens in each column."""
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


def get_args_parser() -> Parser:
    """The flags of this script."""
    parser = Parser("visualize.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("run", nargs="?", help="a checkpoint or a run's folder")
    flag("--images", help="class folders or a flat folder (default: the run's data; val/ where there is one)")
    flag("--out", type=Path, default=Path("reconstruction.png"), help="the picture (default: reconstruction.png)")
    flag("--rows", type=int, default=8, help="images to draw, evenly spaced (default: 8)")
    flag("--max_images", type=int, default=1000, help="images to measure, evenly spaced (default: 1000)")
    flag("--teacher", help="TEC's, if it is no longer where it was")
    flag("--patterns", type=Path, help="draw the sampling patterns to this picture")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The program; `argv` stands for the command line."""
    parser = get_args_parser()
    args = parser.parse_args(argv)
    if args.run is None and not args.patterns:
        parser.error("give a checkpoint or a run's folder, or --patterns")
    if min(args.rows, args.max_images) < 1:
        parser.error(f"--rows and --max_images must be at least 1, got {args.rows} and {args.max_images}")
    with user_errors(parser):
        check_pictures(args)
        if args.patterns:
            draw_patterns(args.patterns)
            print(f"sampling patterns: {args.patterns}")
        if args.run:
            look(args)


def check_pictures(args: argparse.Namespace) -> None:
    """ValueError where a picture that is asked for cannot be written."""
    for name, path in (("--patterns", args.patterns), ("--out", args.out if args.run else None)):
        if path is not None:
            pictures.check_suffix(path)
            if reason := why_not_writable(path):
                raise ValueError(f"{name} {str(path)!r} cannot be written: {reason}")


def look(args: argparse.Namespace) -> None:
    """Draws and measures the run's reconstructions."""
    model, settings = load_run(args.run, args.teacher)
    images = open_images("folder" if args.images else settings["dataset"], args.images or settings["data_path"], "val")
    drawn, measured = (evenly_spaced(len(images), n) for n in (args.rows, args.max_images))
    (imgs, ids_shuffle), *_ = crops(model, settings, images, drawn, batch_size=len(drawn))
    pictures.save(reconstruction_picture(model, Normalize(), imgs, ids_shuffle), args.out)
    print(f"reconstructions of {len(drawn)} images of {images.root}: {args.out}")  # train/ where there is no val/
    for name, errors in measure(model, settings, images, measured).items():
        for kind, error in errors.items():
            decibel = f", PSNR {-10 * math.log10(error):.2f} dB" if isinstance(model, PixelFramework) else ""
            print(f"{kind} tokens of {len(measured)} images: {name} {error:.5f}{decibel}")


def evenly_spaced(length: int, most: int) -> np.ndarray:
    """At most `most` of the indices below `length`."""
    return np.unique(np.linspace(0, length - 1, min(most, length)).astype(int))


if __name__ == "__main__":
    run_program(main, "visualize.py")
