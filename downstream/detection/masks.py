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


def mask_code(segmentation: Any, height: int, width: int) -> Any:
    """Returns the compressed run-length code of an annotation."""
    mask = coco_masks()
    if isinstance(segmentation, list):
        return mask.merge(mask.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return mask.frPyObjects(segmentation, height, width)
    return segmentation


def decode_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Returns the mask of an annotation, uint8 [height, width]."""
    return coco_masks().decode(mask_code(segmentation, height, width))


def encode_mask(array: np.ndarray) -> dict[str, Any]:
    """Returns the compressed run-length code of a mask, bool [height, width], as COCO's results have it."""
    code = coco_masks().encode(np.asfortranarray(array.astype(np.uint8)))
    counts = code["counts"]
    if isinstance(counts, bytes):
        counts = counts.decode("ascii")
    return {"size": list(code["size"]), "counts": counts}
