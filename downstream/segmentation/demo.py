"""Trains a small UPerNet on mosaics of real photographs, in about two minutes on a CPU, and shows what it has learned.

    python downstream/segmentation/demo.py output/segmentation_demo

The photographs are those of scikit-image. A mosaic has 3 to 5 random points. Each pixel belongs to the nearest one, and
shows a random part of the photograph that was drawn for that point. The class of a pixel is its photograph. Training
mosaics show the left two thirds of the photographs, validation mosaics the right third, so they never share a pixel.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from downstream.demo import cut, read_photos, train_demo
from downstream.segmentation import main_segmentation
from util.run.cli import run_program

PHOTOS = ("brick.png", "grass.png", "gravel.png", "coins.png", "chelsea.png", "coffee.png")
SIDE = 64  # of a mosaic, in pixels


def make_mosaic(
    photos: Sequence[Image.Image],
    is_train: bool,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (image uint8 [SIDE, SIDE, 3], classes uint8 [SIDE, SIDE])."""
    num_cells = rng.integers(3, 6)
    points = rng.uniform(0, SIDE, (num_cells, 2))
    labels = rng.permutation(len(photos))[:num_cells]
    rows, columns = np.mgrid[:SIDE, :SIDE]
    distances = []
    for row, column in points:
        distances.append(np.square(rows - row) + np.square(columns - column))
    cells = np.argmin(distances, axis=0)
    img = np.empty((SIDE, SIDE, 3), np.uint8)
    for cell, label in enumerate(labels):
        part = cut(photos[label], is_train, SIDE, rng)
        inside = cells == cell
        img[inside] = part[inside]
    return img, labels[cells].astype(np.uint8)


def write_mosaics(root: Path, num_train: int = 200, num_val: int = 40) -> None:
    """Writes the data set. The seed is fixed: the files are always the same."""
    photos = read_photos(PHOTOS)
    counts = {"training": num_train, "validation": num_val}
    for seed, (split, count) in enumerate(counts.items()):
        rng = np.random.default_rng(seed)
        image_folder = root / "images" / split
        label_folder = root / "annotations" / split
        image_folder.mkdir(parents=True, exist_ok=True)
        label_folder.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            img, labels = make_mosaic(photos, split == "training", rng)
            name = f"{i:03d}.png"
            Image.fromarray(img).save(image_folder / name)
            Image.fromarray(labels).save(label_folder / name)


def main(argv: Sequence[str] | None = None) -> bool:
    """Runs the demonstration. Returns False if a signal stopped the training."""
    return train_demo("segmentation_demo", __doc__, 400, write_mosaics, main_segmentation.main, argv)


if __name__ == "__main__":
    run_program(main, "demo.py")
