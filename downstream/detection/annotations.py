"""COCO-style JSON files. Every entry is checked when a file is read, so that none of them ends a run hours later."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from downstream.detection.masks import coco_masks
from util.data.images import FILE_ERRORS, retry_io
from util.data.transforms import Size

FORMAT = "a JSON file in COCO's format"
LISTS = ("images", "annotations", "categories")
ENTRY_KEYS = {
    "images": ("id", "file_name", "height", "width"),
    "annotations": ("image_id", "category_id", "bbox"),
    "categories": ("id",),
}


def read_coco(path: Path) -> dict[str, Any]:
    """Returns the content of a COCO-style JSON file.

    ValueError, with the id of the first bad entry, if it is missing, has another format or contradicts itself.
    """
    content = read_json(path)
    try:
        check_format(content)
        check_entries(content)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not {FORMAT}: {error}") from error
    return content


def read_json(path: Path) -> Any:
    """Reads a JSON file; ValueError if it is missing or unreadable."""
    try:
        return json.loads(retry_io(path.read_bytes))
    except FileNotFoundError as error:
        raise ValueError(f"{str(path)!r} does not exist; expected is {FORMAT}") from error
    except OSError as error:
        if error.errno not in FILE_ERRORS:
            raise
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}); expected is {FORMAT}") from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not {FORMAT}: {error}") from error


def check_format(content: Any) -> None:
    """ValueError unless it is an object with the three LISTS, whose entries have their keys."""
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__} instead of an object with {', '.join(LISTS)}")
    if "annotations" not in content and "images" in content:
        raise ValueError("it has no annotations: a file of test images cannot be used")
    for name in LISTS:
        entries = content.get(name)
        if not isinstance(entries, list):
            raise ValueError(f"it has no list {name!r}")
        for position, entry in enumerate(entries):
            for key in ENTRY_KEYS[name]:
                if not isinstance(entry, dict) or key not in entry:
                    raise ValueError(f"entry {position} of its {name} has no {key}: {entry!r}")


def check_entries(content: Mapping[str, Any]) -> None:
    """ValueError if an entry is bad, is there twice, or refers to what does not exist."""
    refuse_duplicates(content["images"], "images", "id")
    refuse_duplicates(content["images"], "images", "file_name")
    refuse_duplicates(content["categories"], "categories", "id")
    sizes = {}
    for image in content["images"]:
        sides = (image["height"], image["width"])
        if not all(type(side) is int and side > 0 for side in sides):
            raise ValueError(f"image {image['id']!r}: height and width {sides} are no integers from 1 on")
        sizes[image["id"]] = sides
    category_ids = {category["id"] for category in content["categories"]}
    for position, annotation in enumerate(content["annotations"]):
        try:
            check_annotation(annotation, sizes, category_ids)
        except ValueError as error:
            raise ValueError(f"annotation {annotation.get('id', f'at position {position}')}: {error}") from error


def refuse_duplicates(entries: Sequence[Mapping[str, Any]], name: str, key: str) -> None:
    """ValueError if two entries have the same value of `key`, an id is no integer, or a name no text."""
    seen = set()
    for entry in entries:
        value = entry[key]
        if key == "id" and type(value) is not int:
            raise ValueError(f"the id {value!r} in its {name} is no integer")
        if key == "file_name" and not isinstance(value, str):
            raise ValueError(f"the file_name {value!r} in its {name} is no text")
        if value in seen:
            raise ValueError(f"it has several {name} with the {key} {value!r}")
        seen.add(value)


def check_annotation(annotation: Mapping[str, Any], sizes: Mapping[int, Size], category_ids: set[int]) -> None:
    """ValueError if an entry of `annotations` is bad. sizes: (height, width) by the ids of images."""
    image_id = annotation["image_id"]
    category_id = annotation["category_id"]
    if type(image_id) is not int or image_id not in sizes:
        raise ValueError(f"no image has the id {image_id!r}")
    if type(category_id) is not int or category_id not in category_ids:
        raise ValueError(f"no category has the id {category_id!r}")
    box = annotation["bbox"]
    if not are_numbers(box) or len(box) != 4:
        raise ValueError(f"bbox {box} is not [x, y, width, height] in pixels")
    if annotation.get("segmentation"):
        check_segmentation(annotation["segmentation"], sizes[image_id])


def check_segmentation(segmentation: Any, size: Size) -> None:
    """ValueError unless it is a list of polygons or a run-length code for an image of this (height, width)."""
    if isinstance(segmentation, dict):
        counts = segmentation.get("counts")
        if segmentation.get("size") != list(size):
            raise ValueError(f"its code has the (height, width) {segmentation.get('size')}, its image {list(size)}")
        if isinstance(counts, str):
            check_code(segmentation)
            return
        if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("the counts of its code are no integers from 0 on")
        if sum(counts) != size[0] * size[1]:
            raise ValueError(f"the counts of its code do not add up to {size[0]} x {size[1]} pixels")
        return
    if not isinstance(segmentation, list):
        raise ValueError("its segmentation is neither a list of polygons nor a run-length code")
    for polygon in segmentation:
        if not are_numbers(polygon) or len(polygon) < 6 or len(polygon) % 2:
            raise ValueError("a polygon must be the numbers [x, y, x, y, ...] of 3 points or more")


def check_code(code: Mapping[str, Any]) -> None:
    """ValueError if a compressed run-length code is malformed, or longer than its image. No pixel is written."""
    try:
        coco_masks().area(code)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"its code cannot be decoded: {error}") from error


def are_numbers(values: Any) -> bool:
    """Whether it is a list of finite numbers that is not empty."""
    if not isinstance(values, list) or not values:
        return False
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)
