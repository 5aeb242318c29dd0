"""Masks of COCO's annotations: polygons and run-length codes into arrays, and back."""

from typing import Any

import numpy as np


def coco_masks() -> Any:
    """Returns faster-coco-eval's functions of run-length codes. ValueError if it is not installed."""
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise ValueError(
            "faster-coco-eval is not installed: pip install -r downstream/detection/requirements.txt"
        ) from error
    return mask


def decode_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Returns the mask of an annotation, uint8 [height, width]."""
    mask = coco_masks()
    return mask.decode(mask.segmToRle(segmentation, width, height))


def encode_mask(array: np.ndarray) -> dict[str, Any]:
    """Returns the compressed run-length code of a mask, bool [height, width], as COCO's results have it."""
    code = coco_masks().encode(np.asfortranarray(array.astype(np.uint8)))
    return {"size": code["size"], "counts": code["counts"].decode("ascii")}
