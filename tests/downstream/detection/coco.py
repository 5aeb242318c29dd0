"""Small data sets in COCO's format: bright rectangles and triangles on noise."""

import json

import numpy as np
from PIL import Image

from downstream.detection.data import CocoImages
from util.data.images import Reading

BAR = 7
WEDGE = 3
CATEGORIES = [{"id": BAR, "name": "bar"}, {"id": WEDGE, "name": "wedge"}]  # ids in no order, with gaps
COLORS = {BAR: (230, 60, 40), WEDGE: (40, 230, 90)}


def uncompressed(mask):
    """A run-length code as a list of counts: column by column, zeros first."""
    counts = [0]
    value = 0
    for pixel in mask.T.ravel():
        if pixel != value:
            counts.append(0)
            value = pixel
        counts[-1] += 1
    return {"size": list(mask.shape), "counts": counts}


def make_object(rng, height, width, category, as_code):
    """Returns (annotation without ids, mask [height, width])."""
    w = int(rng.integers(width // 4, width // 2))
    h = int(rng.integers(height // 4, height // 2))
    x = int(rng.integers(width - w))
    y = int(rng.integers(height - h))
    mask = np.zeros((height, width), np.uint8)
    if category == BAR:
        mask[y : y + h, x : x + w] = 1
        polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
    else:  # below the diagonal
        rows = (np.arange(h) + 0.5)[:, None] / h
        columns = (np.arange(w) + 0.5) / w
        mask[y : y + h, x : x + w] = rows >= columns
        polygon = [x, y, x + w, y + h, x, y + h]
    annotation = {
        "category_id": category,
        "bbox": [x, y, w, h],
        "area": int(mask.sum()),
        "iscrowd": 0,
        "segmentation": [polygon],
    }
    if as_code:
        annotation["segmentation"] = uncompressed(mask)
    return annotation, mask


def write_coco(
    root,
    split,
    number,
    seed=0,
    size=(40, 56),
    edit=lambda content: None,
    masks=True,
):
    """Writes `number` images with one or two objects each to ROOT/<split>2017 and ROOT/annotations. Returns ROOT."""
    rng = np.random.default_rng(seed)
    (root / f"{split}2017").mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    images = []
    annotations = []
    for i in range(number):
        height, width = size
        if i % 2 == 1:
            width, height = size
        image_id = 100 - i
        name = f"{i:03d}.png"
        images.append({"id": image_id, "file_name": name, "height": height, "width": width})
        img = rng.integers(0, 100, (height, width, 3), dtype=np.uint8)
        for j in range(1 + i % 2):
            category = (BAR, WEDGE)[(i + j) % 2]
            annotation, mask = make_object(rng, height, width, category, as_code=(i + j) % 3 == 0)
            img[mask == 1] = COLORS[category]
            if not masks:
                del annotation["segmentation"]
            annotations.append({**annotation, "id": 10 * i + j + 1, "image_id": image_id})
        Image.fromarray(img).save(root / f"{split}2017" / name)
    content = {"images": images, "annotations": annotations, "categories": [dict(c) for c in CATEGORIES]}
    edit(content)
    (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))
    return root


def open_split(root, split="train", training=True, in_chans=3):
    """Opens the images that `write_coco` has written."""
    json_path = root / "annotations" / f"instances_{split}2017.json"
    return CocoImages(json_path, root / f"{split}2017", training, Reading(in_chans))
