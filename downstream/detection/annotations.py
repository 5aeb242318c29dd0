"""COCO-style JSON files, and the mistakes in them that training would not notice."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from util.data.images import retry_io
from util.text import count_of, shorten

UNIQUE = (("images", "id"), ("images", "file_name"), ("categories", "id"))


def read_coco(path: Path) -> dict[str, Any]:
    """Returns the content of a COCO-style JSON file.

    ValueError if it is missing, has another format or contradicts itself, or if its boxes cannot be [x, y, width,
    height] in pixels.
    """
    content = read_json(path)
    missing = [name for name in ("images", "annotations", "categories") if name not in content]
    if missing:
        raise ValueError(f"{str(path)!r} is no file in COCO's format with objects: it has no {', '.join(missing)}")
    try:
        problem = find_problem(content)
    except KeyError as error:
        problem = f"an entry has no {error}"
    if problem:
        raise ValueError(f"{str(path)!r}: {problem}")
    return content


def read_json(path: Path) -> Any:
    """Reads a JSON file; ValueError if it is missing or has another format."""
    try:
        return json.loads(retry_io(path.read_bytes))
    except FileNotFoundError as error:
        raise ValueError(f"{str(path)!r} does not exist") from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON file: {error}") from error


def find_problem(content: Mapping[str, Any]) -> str:
    """Returns what is wrong with the entries of a COCO file, or ""."""
    for name, key in UNIQUE:
        numbers = Counter(entry[key] for entry in content[name])
        repeated = [repr(value) for value, number in numbers.items() if number > 1]
        if repeated:
            return f"several {name} have the {key} {shorten(repeated)}"
    image_ids = {image["id"] for image in content["images"]}
    category_ids = {category["id"] for category in content["categories"]}
    for annotation in content["annotations"]:
        if annotation["image_id"] not in image_ids or annotation["category_id"] not in category_ids:
            return f"an annotation belongs to no image or category of the file: {without_mask(annotation)}"
        segmentation = annotation.get("segmentation")
        if isinstance(segmentation, list) and any(len(polygon) < 6 for polygon in segmentation):
            return f"a polygon has fewer than 3 points: {without_mask(annotation)}"  # COCO reads 2 as a box
    boxes = boxes_of(content)
    if len(boxes) and np.median(boxes[:, 2:].max(axis=1)) < 2:
        return "most boxes are smaller than 2 pixels: a bbox is [x, y, width, height] in pixels, not fractions"
    num_beyond = count_beyond(content)
    if 2 * num_beyond > len(boxes):
        share = f"{num_beyond} of {count_of(len(boxes), 'box')}"
        return f"{share} reach beyond their image: a bbox is [x, y, width, height], not two corners"
    return ""


def without_mask(annotation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is short in an annotation."""
    return {key: value for key, value in annotation.items() if key != "segmentation"}


def boxes_of(content: Mapping[str, Any]) -> np.ndarray:
    """Returns the boxes of all annotations, float [n, 4]."""
    boxes = [annotation["bbox"] for annotation in content["annotations"]]
    return np.array(boxes, np.float64).reshape(-1, 4)


def count_beyond(content: Mapping[str, Any]) -> int:
    """Returns how many boxes reach beyond their image by more than a pixel."""
    size_of = {image["id"]: (image["width"], image["height"]) for image in content["images"]}
    sizes = np.array([size_of[annotation["image_id"]] for annotation in content["annotations"]]).reshape(-1, 2)
    boxes = boxes_of(content)
    starts = boxes[:, :2]
    ends = starts + boxes[:, 2:]
    is_beyond = (starts < -1) | (ends > sizes + 1)
    return int(is_beyond.any(axis=1).sum())
