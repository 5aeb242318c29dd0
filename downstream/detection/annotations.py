"""COCO-style JSON files, and the mistakes in them that training would not notice."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from util.data.images import retry_io


def read_coco(path: Path) -> dict[str, Any]:
    """Returns the content of a COCO-style JSON file.

    ValueError if it has another format or contradicts itself, or if its boxes cannot be [x, y, width, height] in
    pixels.
    """
    try:
        content = json.loads(retry_io(path.read_bytes))
        problem = find_problem(content)
    except (KeyError, TypeError, ValueError) as error:
        problem = f"not in COCO's format: {error!r}"
    if problem:
        raise ValueError(f"{str(path)!r}: {problem}")
    return content


def find_problem(content: Mapping[str, Any]) -> str:
    """Returns what is wrong with the entries of a COCO file, or ""."""
    size_of = {image["id"]: (image["width"], image["height"]) for image in content["images"]}
    if len(size_of) < len(content["images"]):
        return "several images have the same id"
    category_ids = {category["id"] for category in content["categories"]}
    annotations = content["annotations"]
    for annotation in annotations:
        image_id = annotation["image_id"]
        category_id = annotation["category_id"]
        if image_id not in size_of or category_id not in category_ids:
            return f"an annotation belongs to image {image_id} and category {category_id}: the file lacks one of them"
    boxes = np.array([annotation["bbox"] for annotation in annotations], np.float64).reshape(-1, 4)
    sizes = np.array([size_of[annotation["image_id"]] for annotation in annotations]).reshape(-1, 2)
    is_tiny = (boxes[:, 2:] < 2).all(axis=1)
    if 2 * is_tiny.sum() > len(boxes):
        return "most boxes are smaller than 2 pixels: a bbox is [x, y, width, height] in pixels, not fractions"
    ends = boxes[:, :2] + boxes[:, 2:]
    is_beyond = (ends > sizes + 1).any(axis=1)
    if 2 * is_beyond.sum() > len(boxes):
        return "most boxes reach beyond their image: a bbox is [x, y, width, height], not two corners"
    return ""
