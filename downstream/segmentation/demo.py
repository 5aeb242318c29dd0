"""Trains a small UPerNet on mosaics of real photographs, in about two minutes on a CPU, and shows what it has learned.

    python downstream/segmentation/demo.py output/segmentation_demo

The photographs are those of scikit-image. A mosaic has 3 to 5 random points. Each pixel belongs to the nearest one, and
shows a random part of the photograph that was drawn for that point. The class of a pixel is its photograph. Training
mosaics show the left two thirds of the photographs, validation mosaics the right third, so they never share a pixel.

The result is compared with two baselines: the most frequent class of the training labels everywhere, and, for each
pixel, the class whose mean colour in training is nearest.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from downstream.demo import cut, read_photos, train_demo
from downstream.segmentation import main_segmentation
from downstream.segmentation.data import LabelValues, SegmentationImages
from downstream.segmentation.metrics import count_pixels, segmentation_scores
from util.evaluate.results import RESULTS
from util.run.cli import run_program
from util.run.folder import read_json

PHOTOS = ("brick.png", "grass.png", "gravel.png", "coins.png", "chelsea.png", "coffee.png")
SIDE = 64  # of a mosaic, in pixels


def make_mosaic(photos: Sequence[Image.Image], split: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns (image uint8 [SIDE, SIDE, 3], classes uint8 [SIDE, SIDE])."""
    num_cells = int(rng.integers(3, 6))
    points, chosen = rng.uniform(0, SIDE, (num_cells, 2)), rng.permutation(len(photos))[:num_cells]
    grid = np.moveaxis(np.mgrid[:SIDE, :SIDE], 0, -1)
    cells = np.square(grid[:, :, None] - points).sum(axis=-1).argmin(axis=-1)
    img = np.empty((SIDE, SIDE, 3), np.uint8)
    for cell, label in enumerate(chosen):
        img[cells == cell] = cut(photos[label], split == "training", SIDE, rng)[cells == cell]
    return img, chosen[cells].astype(np.uint8)


def write_mosaics(root: Path, num_train: int = 200, num_val: int = 40) -> None:
    """Writes the data set and the names of its classes. The seed is fixed: the files are always the same."""
    photos = read_photos(PHOTOS)
    for number, (split, count) in enumerate((("training", num_train), ("validation", num_val))):
        rng = np.random.default_rng(number)
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            img, labels = make_mosaic(photos, split, rng)
            Image.fromarray(img).save(root / "images" / split / f"{i:03d}.png")
            Image.fromarray(labels).save(root / "annotations" / split / f"{i:03d}.png")
    (root / "classes.txt").write_text("".join(f"{Path(name).stem}\n" for name in PHOTOS))


def baselines(root: Path) -> dict[str, dict[str, Any]]:
    """Returns the scores of both baselines on the validation mosaics."""
    values = LabelValues(len(PHOTOS))
    train, val = (
        np.stack([images.load_sample(i)[0] for i in range(len(images))])
        for images in (SegmentationImages(root, split, values) for split in ("train", "val"))
    )
    frequent = np.bincount(train[..., 3].ravel()).argmax(axis=0)
    means = np.stack([train[train[..., 3] == k][:, :3].mean(axis=0) for k in range(len(PHOTOS))])
    nearest = np.square(val[..., None, :3].astype(np.float32) - means).sum(axis=-1).argmin(axis=-1)
    found = {"most frequent class": np.full_like(nearest, frequent), "nearest mean colour": nearest}
    truth = torch.from_numpy(val[..., 3])
    return {
        name: segmentation_scores(count_pixels(torch.from_numpy(predicted), truth, len(PHOTOS)))
        for name, predicted in found.items()
    }


def main(argv: Sequence[str] | None = None) -> bool:
    """Runs the demonstration. Returns False if a signal stopped the training."""

    def train(flags: Sequence[str]) -> object:
        names = Path(flags[flags.index("--data_path") + 1]) / "classes.txt"
        return main_segmentation.main([*flags, "--class_names", str(names)])

    root = train_demo("segmentation_demo", __doc__, 400, write_mosaics, train, argv)
    if root is None:
        return False
    for name, scores in baselines(root / "data").items():
        print(f"  baseline     {name}: mIoU {scores['miou']:.2f} %")
    print(f"  this run     mIoU {read_json(root / 'run' / RESULTS)['last']['val_miou']:.2f} %")
    return True


if __name__ == "__main__":
    run_program(main, "demo.py")
