"""Trains a small Mask R-CNN on photographs pasted on photographs, in ten minutes on a CPU, and shows what it finds.

    python downstream/detection/demo.py output/detection_demo

The photographs are those of scikit-image. A scene has a part of one photograph as background, and 1 to 3 discs or
squares cut out of others. An object's class is the photograph it was cut from. Training scenes show the left two thirds
of the photographs, validation scenes the right third, so they never share a pixel.

The result is compared with a baseline without an image: the most frequent boxes and classes of the training scenes,
the same in each image.
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
from downstream.detection.metrics import average_precision
from util.evaluate.results import RESULTS
from util.run.cli import run_program
from util.run.folder import read_json

BACKGROUNDS = ("gravel.png", "grass.png")
OBJECTS = ("ihc.png", "coffee.png", "rocket.jpg")
SIDE = 64  # of a scene, in pixels
LEAST_VISIBLE = 0.5  # share of an object that later ones may not cover


def make_scene(
    backgrounds: Sequence[Image.Image], photos: Sequence[Image.Image], split: str, rng: np.random.Generator
) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """Returns (image uint8 [SIDE, SIDE, 3], objects (class from 1, visible mask bool [SIDE, SIDE]))."""
    img = cut(backgrounds[int(rng.integers(len(backgrounds)))], split == "train", SIDE, rng).copy()
    objects: list[tuple[int, np.ndarray]] = []
    places = np.moveaxis(np.mgrid[:SIDE, :SIDE], 0, -1) + 0.5
    for _ in range(int(rng.integers(1, 4))):
        side, label = int(rng.integers(14, 33)), int(rng.integers(len(photos)))
        top, left = rng.integers(SIDE - side + 1, size=2)
        offset = np.abs(places - (top + side / 2, left + side / 2))
        mask = (np.hypot(*np.moveaxis(offset, -1, 0)) if rng.random() < 0.5 else offset.max(axis=-1)) < side / 2
        rest = [(other & ~mask).sum() for _, other in objects]
        if any(part < LEAST_VISIBLE * other.sum() for part, (_, other) in zip(rest, objects, strict=True)):
            continue
        objects = [(number, other & ~mask) for number, other in objects] + [(label + 1, mask)]
        whole = np.zeros_like(img)
        whole[top : top + side, left : left + side] = cut(photos[label], split == "train", side, rng)
        img[mask] = whole[mask]
    return img, objects


def write_scenes(root: Path, num_train: int = 300, num_val: int = 60) -> None:
    """Writes the data set in COCO's layout. The seed is fixed: the files are always the same."""
    backgrounds, photos = read_photos(BACKGROUNDS), read_photos(OBJECTS)
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate((("train", num_train), ("val", num_val))):
        rng = np.random.default_rng(number)
        (root / f"{split}2017").mkdir(exist_ok=True)
        categories = [{"id": k, "name": Path(name).stem} for k, name in enumerate(OBJECTS, 1)]
        content: dict[str, Any] = {"images": [], "annotations": [], "categories": categories}
        for i in range(1, count + 1):
            img, objects = make_scene(backgrounds, photos, split, rng)
            name = f"{i:03d}.png"
            Image.fromarray(img).save(root / f"{split}2017" / name)
            content["images"].append({"id": i, "file_name": name, "height": SIDE, "width": SIDE})
            for label, mask in objects:
                rows, columns = (np.flatnonzero(mask.any(axis=axis)).tolist() for axis in (1, 0))
                box = [columns[0], rows[0], columns[-1] + 1 - columns[0], rows[-1] + 1 - rows[0]]
                annotation = {"id": len(content["annotations"]) + 1, "image_id": i, "category_id": label, "bbox": box}
                annotation |= {"segmentation": encode_mask(mask), "area": int(mask.sum()), "iscrowd": 0}
                content["annotations"].append(annotation)
        (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))


def baseline(root: Path) -> float:
    """Returns AP box in percent of the 100 most frequent pairs of box and class in training, boxes on a grid of 8."""
    train, val = (json.loads((root / "annotations" / f"instances_{s}2017.json").read_text()) for s in ("train", "val"))
    counts: dict[tuple[int, ...], int] = {}
    for a in train["annotations"]:
        key = (a["category_id"], *(8 * round(value / 8) for value in a["bbox"]))
        counts[key] = counts.get(key, 0) + 1
    frequent = sorted(counts, key=lambda key: (-counts[key], key))[:100]
    found = [
        {"image_id": image["id"], "category_id": key[0], "bbox": list(key[1:]), "score": counts[key] / len(counts)}
        for image in val["images"]
        for key in frequent
    ]
    return average_precision(val, found, "bbox")["ap"] or 0.0


def main(argv: Sequence[str] | None = None) -> bool:
    """Runs the demonstration. Returns False if a signal stopped the training."""
    root = train_demo("detection_demo", __doc__, 1200, write_scenes, main_detection.main, argv)
    if root is None:
        return False
    print(f"  baseline     the most frequent boxes of training: AP box {baseline(root / 'data'):.2f} %")
    last = read_json(root / "run" / RESULTS)["last"]
    print(f"  this run     AP box {last['val_box_ap']:.2f} %, AP mask {last['val_mask_ap']:.2f} %")
    return True


if __name__ == "__main__":
    run_program(main, "demo.py")
