"""Masks of COCO's annotations: polygons and run-length codes into arrays, and back."""

from typing import Any

import numpy as np

INSTALL = "pip install -r downstream/detection/requirements.txt"


def coco_masks() -> Any:
    """Returns faster-coco-eval's functions of run-length codes. ValueError if it is not installed."""
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise ValueError(f"COCO's masks need faster-coco-eval, which is not installed: {INSTALL}") from error
    return mask


def check_segmentation(segmentation: Any) -> str | None:
    """Returns what is wrong with an annotation's polygons, run-length code or compressed code; None if it is right."""
    if isinstance(segmentation, dict):
        right = {"counts", "size"} <= segmentation.keys() and isinstance(segmentation["counts"], (list, str))
        return None if right else "its segmentation is no run-length code of size and counts"
    if not isinstance(segmentation, list) or not all(isinstance(polygon, list) for polygon in segmentation):
        return "its segmentation is neither a list of polygons nor a run-length code"
    if any(len(polygon) < 6 or len(polygon) % 2 for polygon in segmentation):
        return "a polygon needs at least 3 points, as [x, y, x, y, ...]"
    return None


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
