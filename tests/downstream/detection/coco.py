"""Small data sets in COCO's format: bright rectangles and triangles on noise."""

import json

import numpy as np
from PIL import Image

from downstream.detection.data import CocoImages

CATEGORIES = [{"id": 7, "name": "bar"}, {"id": 3, "name": "wedge"}]  # ids in no order, with gaps


def uncompressed(mask):
    """A run-length code as a list of counts: column by column, zeros first."""
    counts, value, run = [], 0, 0
    for pixel in mask.T.ravel():
        if pixel != value:
            counts.append(run)
            value, run = pixel, 0
        run += 1
    return {"size": list(mask.shape), "counts": [*counts, run]}


def make_object(rng, height, width, category, code):
    """Returns (annotation without ids, mask [height, width])."""
    w, h = (int(rng.integers(side // 4, side // 2)) for side in (width, height))
    x, y = int(rng.integers(width - w)), int(rng.integers(height - h))
    mask = np.zeros((height, width), np.uint8)
    below = (np.arange(h) + 0.5)[:, None] / h >= (np.arange(w) + 0.5) / w  # the diagonal
    mask[y : y + h, x : x + w] = 1 if category == 7 else below
    polygon = [x, y, x + w, y, x + w, y + h, x, y + h] if category == 7 else [x, y, x + w, y + h, x, y + h]
    annotation = {"category_id": category, "bbox": [x, y, w, h], "area": int(mask.sum()), "iscrowd": 0}
    return annotation | {"segmentation": uncompressed(mask) if code else [polygon]}, mask


def write_coco(root, split, number, seed=0, size=(40, 56), edit=lambda content: None, masks=True):
    """Writes `number` images with one or two objects each to ROOT/<split>2017 and ROOT/annotations. Returns ROOT."""
    rng = np.random.default_rng(seed)
    (root / f"{split}2017").mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    content = {"images": [], "annotations": [], "categories": [dict(c) for c in CATEGORIES]}
    for i in range(number):
        height, width = size if i % 2 == 0 else size[::-1]
        img = rng.integers(0, 100, (height, width, 3), dtype=np.uint8)
        image = {"id": 100 - i, "file_name": f"{i:03d}.png", "height": height, "width": width}
        for j in range(1 + i % 2):
            category = (7, 3)[(i + j) % 2]
            annotation, mask = make_object(rng, height, width, category, code=(i + j) % 3 == 0)
            img[mask == 1] = (230, 60, 40) if category == 7 else (40, 230, 90)
            if not masks:
                del annotation["segmentation"]
            content["annotations"].append(annotation | {"id": 10 * i + j + 1, "image_id": image["id"]})
        content["images"].append(image)
        Image.fromarray(img).save(root / f"{split}2017" / image["file_name"])
    edit(content)
    (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))
    return root


def open_split(root, split="train", training=True):
    """Opens the images that `write_coco` has written."""
    return CocoImages(root / "annotations" / f"instances_{split}2017.json", root / f"{split}2017", training)
