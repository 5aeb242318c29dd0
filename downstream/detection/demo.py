"""Trains a small Mask R-CNN on photographs pasted on photographs, in ten minutes on a CPU, and shows what it finds.

    python downstream/detection/demo.py output/detection_demo

The photographs are those of scikit-image. A scene has a part of one photograph as background, and 1 to 3 discs or
squares cut out of others. An object's class is the photograph it was cut from. Training scenes show the left two thirds
of the photographs, validation scenes the right third, so they never share a pixel.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from downstream.demo import cut, read_photos, train_demo
from downstream.detection import main_detection
from downstream.detection.masks import encode_mask
from util.run.cli import run_program

BACKGROUNDS = ("gravel.png", "grass.png")
OBJECTS = ("ihc.png", "coffee.png", "rocket.jpg")
SIDE = 64  # of a scene, in pixels
MIN_VISIBLE = 0.5  # share of an object that later ones may not cover

Objects = list[tuple[int, np.ndarray]]  # (class from 1, visible mask bool [SIDE, SIDE])


def make_scene(
    backgrounds: Sequence[Image.Image], photos: Sequence[Image.Image], split: str, rng: np.random.Generator
) -> tuple[np.ndarray, Objects]:
    """Returns (image uint8 [SIDE, SIDE, 3], objects)."""
    is_train = split == "train"
    img = cut(backgrounds[int(rng.integers(len(backgrounds)))], is_train, SIDE, rng).copy()
    objects: Objects = []
    for _ in range(int(rng.integers(1, 4))):
        side = int(rng.integers(14, 33))
        label = int(rng.integers(len(photos)))
        top, left = rng.integers(SIDE - side + 1, size=2)
        mask = draw_shape(top, left, side, is_disc=rng.random() < 0.5)
        if not all((other & ~mask).sum() >= MIN_VISIBLE * other.sum() for _, other in objects):
            continue
        objects = [(number, other & ~mask) for number, other in objects]
        objects.append((label + 1, mask))
        whole = np.zeros_like(img)
        whole[top : top + side, left : left + side] = cut(photos[label], is_train, side, rng)
        img[mask] = whole[mask]
    return img, objects


def draw_shape(top: int, left: int, side: int, is_disc: bool) -> np.ndarray:
    """Returns the mask of a disc or a square, bool [SIDE, SIDE]."""
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    down = np.abs(rows - (top + side / 2))
    across = np.abs(columns - (left + side / 2))
    if is_disc:
        return np.hypot(down, across) < side / 2
    return np.maximum(down, across) < side / 2


def make_annotation(image_id: int, label: int, mask: np.ndarray) -> dict[str, Any]:
    """Returns an entry of COCO's annotations, without an id."""
    rows = np.flatnonzero(mask.any(axis=1)).tolist()
    columns = np.flatnonzero(mask.any(axis=0)).tolist()
    return {
        "image_id": image_id,
        "category_id": label,
        "bbox": [columns[0], rows[0], columns[-1] + 1 - columns[0], rows[-1] + 1 - rows[0]],
        "segmentation": encode_mask(mask),
        "area": int(mask.sum()),
        "iscrowd": 0,
    }


def write_scenes(root: Path, num_train: int = 300, num_val: int = 60) -> None:
    """Writes the data set in COCO's layout. The seed is fixed: the files are always the same."""
    backgrounds = read_photos(BACKGROUNDS)
    photos = read_photos(OBJECTS)
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for seed, split, count in ((0, "train", num_train), (1, "val", num_val)):
        rng = np.random.default_rng(seed)
        folder = root / f"{split}2017"
        folder.mkdir(exist_ok=True)
        images = []
        annotations: list[dict[str, Any]] = []
        for image_id in range(1, count + 1):
            img, objects = make_scene(backgrounds, photos, split, rng)
            name = f"{image_id:03d}.png"
            Image.fromarray(img).save(folder / name)
            images.append({"id": image_id, "file_name": name, "height": SIDE, "width": SIDE})
            for label, mask in objects:
                annotations.append({"id": len(annotations) + 1, **make_annotation(image_id, label, mask)})
        categories = [{"id": label, "name": Path(name).stem} for label, name in enumerate(OBJECTS, 1)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))


def main(argv: Sequence[str] | None = None) -> bool:
    """Runs the demonstration. Returns False if a signal stopped the training."""
    return train_demo("detection_demo", __doc__, 1200, write_scenes, main_detection.main, argv)


if __name__ == "__main__":
    run_program(main, "demo.py")
