"""COCO-style JSON files. All entries are checked when a file is read, so that none of them ends a run hours later."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from downstream.detection.masks import FARTHEST, are_numbers, find_mask_problem
from util.data.images import FILE_ERRORS, retry_io
from util.data.transforms import Size
from util.text import count_of, shorten

FORMAT = "a JSON file in COCO's format"
LISTS = ("images", "annotations", "categories")
REQUIRED = ("image_id", "category_id", "bbox")  # of an annotation


def read_coco(path: Path) -> dict[str, Any]:
    """Returns the content of a COCO-style JSON file.

    ValueError, with the ids of some bad entries, if it is missing, has another format or contradicts itself.
    """
    content = read_lists(path)
    refuse_bad(path, "image", content["images"], find_image_problem)
    refuse_bad(path, "category", content["categories"], find_id_problem)
    for name, key in (("images", "id"), ("images", "file_name"), ("categories", "id")):
        values = [value for value, number in Counter(entry[key] for entry in content[name]).items() if number > 1]
        if values:
            raise ValueError(f"{str(path)!r} has several {name} with the {key} {shorten([repr(v) for v in values])}")
    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    known = {category["id"] for category in content["categories"]}
    refuse_bad(path, "annotation", content["annotations"], lambda a: find_annotation_problem(a, sizes, known))
    return content


def read_lists(path: Path) -> dict[str, Any]:
    """Reads a JSON object that holds the three LISTS. ValueError if it is missing or holds something else."""
    try:
        content = json.loads(retry_io(path.read_bytes))
    except FileNotFoundError as error:
        raise ValueError(f"{str(path)!r} does not exist; expected is {FORMAT}") from error
    except OSError as error:
        if error.errno not in FILE_ERRORS:
            raise
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}); expected is {FORMAT}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not {FORMAT}: {error}") from error
    problem = None
    if not isinstance(content, dict):
        problem = f"it holds a {type(content).__name__} instead of an object with {', '.join(LISTS)}"
    elif "annotations" not in content and "images" in content:
        problem = "it has no annotations: a file of test images cannot be used"
    elif missing := [name for name in LISTS if not isinstance(content.get(name), list)]:
        problem = f"it has no list {', '.join(map(repr, missing))}"
    if problem:
        raise ValueError(f"{str(path)!r} is not {FORMAT}: {problem}")
    return content


def refuse_bad(
    path: Path, kind: str, entries: Sequence[Any], find_problem: Callable[[Mapping[str, Any]], str | None]
) -> None:
    """ValueError if `find_problem` names a problem of some entries. One without an id is named by its position."""
    bad = []
    for position, entry in enumerate(entries):
        is_object = isinstance(entry, dict)
        if problem := find_problem(entry) if is_object else f"it is {entry!r} instead of an object":
            name = repr(entry["id"]) if is_object and "id" in entry else f"at position {position} of its list"
            bad.append(f"{kind} {name}: {problem}")
    if bad:
        raise ValueError(f"{str(path)!r} has {count_of(len(bad), f'bad {kind}')}: {shorten(bad)}")


def find_id_problem(entry: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with the id of an image or of a category, or None."""
    if type(entry.get("id")) is int:
        return None
    name = "file_name" if "file_name" in entry else "name"
    return f"its id {entry.get('id')!r} is no integer ({name} {entry.get(name)!r})"


def find_image_problem(image: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with an entry of `images`, or None."""
    name = image.get("file_name")
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        return f"its file_name {name!r} is no path inside the folder of the images"
    sides = [image.get("height"), image.get("width")]
    if not all(type(side) is int and side > 0 for side in sides):
        return f"its height and width are {sides} instead of integers from 1 on"
    return find_id_problem(image)


def find_annotation_problem(
    annotation: Mapping[str, Any], sizes: Mapping[int, Size], category_ids: set[int]
) -> str | None:
    """Returns what is wrong with an entry of `annotations`, or None. sizes: (height, width) by the ids of images."""
    missing = [name for name in REQUIRED if name not in annotation]
    if missing:
        return f"it has no {', '.join(missing)}"
    image_id, category_id, box = (annotation[name] for name in REQUIRED)
    if type(image_id) is not int or image_id not in sizes:
        return f"no image has the id {image_id!r}"
    if type(category_id) is not int or category_id not in category_ids:
        return f"no category has the id {category_id!r}"
    if not are_numbers(box, FARTHEST * max(sizes[image_id])) or len(box) != 4:
        return f"bbox {box} is not [x, y, width, height] in pixels"
    area, crowd, code = annotation.get("area"), annotation.get("iscrowd", 0), annotation.get("segmentation")
    if area is not None and not are_numbers([area], most=2.0**63):
        return f"its area {area!r} is no number of pixels"
    if crowd not in (0, 1):
        return f"its iscrowd {crowd!r} is neither 0 nor 1"
    return find_mask_problem(code, sizes[image_id]) if code else None
