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
    backgrounds: Sequence[Image.Image],
    photos: Sequence[Image.Image],
    is_train: bool,
    rng: np.random.Generator,
) -> tuple[np.ndarray, Objects]:
    """Returns (image uint8 [SIDE, SIDE, 3], objects)."""
    background = backgrounds[int(rng.integers(len(backgrounds)))]
    img = cut(background, is_train, SIDE, rng).copy()
    objects: Objects = []
    for _ in range(rng.integers(1, 4)):
        side = int(rng.integers(14, 33))
        label = int(rng.integers(len(photos)))
        top, left = rng.integers(SIDE - side + 1, size=2)
        is_disc = rng.random() < 0.5
        mask = draw_shape(top, left, side, is_disc)
        if hides_an_object(mask, objects):
            continue
        objects = [(number, other & ~mask) for number, other in objects]
        objects.append((label + 1, mask))
        whole = np.zeros_like(img)
        whole[top : top + side, left : left + side] = cut(photos[label], is_train, side, rng)
        img[mask] = whole[mask]
    return img, objects


def hides_an_object(mask: np.ndarray, objects: Objects) -> bool:
    """Whether less than MIN_VISIBLE of an object would stay visible behind `mask`."""
    for _, other in objects:
        visible = other & ~mask
        if visible.sum() < MIN_VISIBLE * other.sum():
            return True
    return False


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
    top, *_, bottom = np.flatnonzero(mask.any(axis=1)).tolist()
    left, *_, right = np.flatnonzero(mask.any(axis=0)).tolist()
    return {
        "image_id": image_id,
        "category_id": label,
        "bbox": [left, top, right + 1 - left, bottom + 1 - top],
        "segmentation": encode_mask(mask),
        "area": int(mask.sum()),
        "iscrowd": 0,
    }


def write_scenes(root: Path, num_train: int = 300, num_val: int = 60) -> None:
    """Writes the data set in COCO's layout. The seed is fixed: the files are always the same."""
    backgrounds = read_photos(BACKGROUNDS)
    photos = read_photos(OBJECTS)
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    counts = {"train": num_train, "val": num_val}
    for seed, (split, count) in enumerate(counts.items()):
        rng = np.random.default_rng(seed)
        folder = root / f"{split}2017"
        folder.mkdir(exist_ok=True)
        images = []
        annotations: list[dict[str, Any]] = []
        for image_id in range(1, count + 1):
            img, objects = make_scene(backgrounds, photos, split == "train", rng)
            name = f"{image_id:03d}.png"
            Image.fromarray(img).save(folder / name)
            images.append({"id": image_id, "file_name": name, "height": SIDE, "width": SIDE})
            for label, mask in objects:
                annotation = make_annotation(image_id, label, mask)
                annotation["id"] = len(annotations) + 1
                annotations.append(annotation)
        content = {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": label, "name": Path(name).stem} for label, name in enumerate(OBJECTS, 1)],
        }
        json_path = root / "annotations" / f"instances_{split}2017.json"
        json_path.write_text(json.dumps(content))


def main(argv: Sequence[str] | None = None) -> bool:
    """Runs the demonstration. Returns False if a signal stopped the training."""
    return train_demo("detection_demo", __doc__, 1200, write_scenes, main_detection.main, argv)


if __name__ == "__main__":
    run_program(main, "demo.py")
