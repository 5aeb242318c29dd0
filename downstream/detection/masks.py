"""Masks of COCO's annotations: polygons and run-length codes into arrays, and back."""

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


def find_mask_problem(segmentation: Any, size: Size) -> str | None:
    """Returns what is wrong with an annotation's polygons or run-length code, or None.

    size: (height, width) of its image. The text of a compressed code is not looked into.
    """
    if isinstance(segmentation, dict):
        counts = segmentation.get("counts")
        if "size" not in segmentation or not isinstance(counts, (list, str)):
            return "its segmentation is no run-length code of size and counts"
        if segmentation["size"] != list(size) or any(type(side) is not int for side in segmentation["size"]):
            return f"its code has the (height, width) {segmentation['size']}, but its image has {list(size)}"
        if isinstance(counts, str):
            return None
        if any(type(run) is not int or run < 0 for run in counts):
            return "its code holds counts that are no integers from 0 on"
        if sum(counts) != size[0] * size[1]:
            return f"the counts of its code add up to {sum(counts)} pixels, but its image has {size[0]} x {size[1]}"
        return None
    if not isinstance(segmentation, list) or not all(isinstance(polygon, list) for polygon in segmentation):
        return "its segmentation is neither a list of polygons nor a run-length code"
    if any(len(polygon) < 6 or len(polygon) % 2 for polygon in segmentation):
        return "a polygon needs at least 3 points, as [x, y, x, y, ...]"
    most = FARTHEST * max(size)
    if not all(are_numbers(polygon, most) for polygon in segmentation):
        return f"a polygon has coordinates that are no numbers between {-most} and {most}"
    return None


def mask_code(segmentation: Any, height: int, width: int) -> Any:
    """Returns the compressed run-length code of an annotation."""
    mask = coco_masks()
    if isinstance(segmentation, list):
        return mask.merge(mask.frPyObjects(segmentation, height, width))
    return mask.frPyObjects(segmentation, height, width) if isinstance(segmentation["counts"], list) else segmentation


def decode_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Returns the mask of an annotation, uint8 [height, width]."""
    return coco_masks().decode(mask_code(segmentation, height, width))


def encode_mask(array: np.ndarray) -> dict[str, Any]:
    """Returns the compressed run-length code of a mask, bool [height, width], as COCO's results have it."""
    code = coco_masks().encode(np.asfortranarray(array.astype(np.uint8)))
    counts = code["counts"]
    return {"size": list(code["size"]), "counts": counts.decode("ascii") if isinstance(counts, bytes) else counts}
