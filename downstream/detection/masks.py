"""Masks of COCO's annotations: polygons and run-length codes into arrays, and back."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from util.data.transforms import Size

FARTHEST = 100  # sides of an image; farther coordinates are errors, and would take gigabytes to draw
INSTALL = "pip install -r downstream/detection/requirements.txt"


def coco_masks() -> Any:
    """Returns faster-coco-eval's functions of run-length codes. ValueError if it is not installed."""
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise ValueError(f"COCO's masks need faster-coco-eval, which is not installed: {INSTALL}") from error
    return mask


def are_numbers(values: Any, most: float) -> bool:
    """Whether it is a list of numbers, each between -most and most."""
    return isinstance(values, list) and all(type(v) in (int, float) and -most <= v <= most for v in values)


def check_segmentation(segmentation: Any, size: Size) -> str | None:
    """Returns what is wrong with an annotation's polygons, run-length code or compressed code; None if it is right.

    size: (height, width) of its image.
    """
    if isinstance(segmentation, dict):
        return check_code(segmentation, size)
    if not isinstance(segmentation, list) or not all(isinstance(polygon, list) for polygon in segmentation):
        return "its segmentation is neither a list of polygons nor a run-length code"
    if any(len(polygon) < 6 or len(polygon) % 2 for polygon in segmentation):
        return "a polygon needs at least 3 points, as [x, y, x, y, ...]"
    most = FARTHEST * max(size)
    if not all(are_numbers(polygon, most) for polygon in segmentation):
        return f"a polygon has coordinates that are no numbers between {-most} and {most}"
    return None


def check_code(code: Mapping[str, Any], size: Size) -> str | None:
    """Returns what is wrong with a run-length code of an image of `size`, (height, width); None if it is right."""
    counts = code.get("counts")
    if "size" not in code or not isinstance(counts, (list, str)):
        return "its segmentation is no run-length code of size and counts"
    if code["size"] != list(size) or any(type(side) is not int for side in code["size"]):
        return f"its code has the (height, width) {code['size']}, but its image has {list(size)}"
    runs = decompress(counts) if isinstance(counts, str) else counts
    if runs is None or any(type(run) is not int or run < 0 for run in runs):
        return "its code holds counts that are no integers from 0 on, or its text is damaged"
    if sum(runs) != size[0] * size[1]:
        return f"the counts of its code add up to {sum(runs)} pixels, but its image has {size[0]} x {size[1]}"
    return None


def decompress(text: str) -> list[int] | None:
    """Returns the counts of COCO's compressed code, or None if the text is damaged.

    A character holds 5 bits of a count, the lowest first, and whether more follow. From the fourth on, a count is the
    difference to the count two before.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - ord("0")
        if not 0 <= bits < 64:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            if bits & 16:
                value -= 1 << shift  # a negative difference
            counts.append(value + counts[-2] if len(counts) > 2 else value)
            value = shift = 0
    return counts if shift == 0 else None


def mask_code(segmentation: Any, height: int, width: int) -> Any:
    """Returns the compressed run-length code of an annotation. ValueError if the annotation has another size."""
    mask = coco_masks()
    if isinstance(segmentation, list):
        return mask.merge(mask.frPyObjects(segmentation, height, width))
    if list(segmentation["size"]) != [height, width]:
        raise ValueError(f"its code has the (height, width) {segmentation['size']} instead of {[height, width]}")
    return mask.frPyObjects(segmentation, height, width) if isinstance(segmentation["counts"], list) else segmentation


def decode_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Returns the mask of an annotation, uint8 [height, width]. ValueError if its code has another size."""
    return coco_masks().decode(mask_code(segmentation, height, width))


def encode_mask(array: np.ndarray) -> dict[str, Any]:
    """Returns the compressed run-length code of a mask, bool [height, width], as COCO's results have it."""
    code = coco_masks().encode(np.asfortranarray(array.astype(np.uint8)))
    counts = code["counts"]
    return {"size": list(code["size"]), "counts": counts.decode("ascii") if isinstance(counts, bytes) else counts}
