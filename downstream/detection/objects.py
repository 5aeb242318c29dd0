"""The objects of an image, as a model detects them or as they are annotated."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from downstream.detection.data import Category, CocoImages
from downstream.detection.masks import decode_mask, encode_mask
from util.data.transforms import Size


class DetectedObject(NamedTuple):
    """An object of an image."""

    box: list[float]  # (x1, y1, x2, y2) in pixels of the image
    label: int  # from 1
    score: float | None  # None: annotated
    mask: np.ndarray | None  # bool [H, W] of the image


def paste_masks(masks: Tensor, boxes: Tensor, size: Size) -> np.ndarray:
    """Returns masks [n, s, s] of probabilities inside their boxes [n, 4] as masks of the image, bool [n, *size].

    Pixels take the bilinear value at their centre, and are set from 0.5 on, as in detectron2.
    """
    height, width = size
    rows = torch.arange(height, device=boxes.device) + 0.5
    columns = torch.arange(width, device=boxes.device) + 0.5
    pasted = np.zeros((len(masks), height, width), bool)
    for number, (x1, y1, x2, y2) in enumerate(boxes):
        x = (columns - x1) / (x2 - x1) * 2 - 1
        y = (rows - y1) / (y2 - y1) * 2 - 1
        places = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=2)  # [height, width, 2]
        values = F.grid_sample(masks[None, None, number], places[None], align_corners=False)
        pasted[number] = (values[0, 0] >= 0.5).cpu().numpy()
    return pasted


def detections_in_image(detections: Mapping[str, Tensor], resized: Size, size: Size) -> list[DetectedObject]:
    """Returns a model's detections in an image that was resized from `size` to `resized`, in its own pixels."""
    scale_y = size[0] / resized[0]
    scale_x = size[1] / resized[1]
    boxes = detections["boxes"]
    boxes = boxes * torch.tensor([scale_x, scale_y] * 2, device=boxes.device)
    masks: Iterable[np.ndarray | None] = [None] * len(boxes)
    if "masks" in detections:
        masks = paste_masks(detections["masks"], boxes, size)
    labels = detections["labels"].tolist()
    scores = detections["scores"].tolist()
    fields = zip(boxes.tolist(), labels, scores, masks, strict=True)
    return [DetectedObject(box, label, score, mask) for box, label, score, mask in fields]


def annotated_objects(images: CocoImages, index: int) -> list[DetectedObject]:
    """Returns the annotated objects of an image."""
    height, width = images.sizes[index].tolist()
    objects = []
    for annotation in images.annotations(index):
        mask = None
        if annotation.segmentation:
            mask = decode_mask(annotation.segmentation, height, width).astype(bool)
        objects.append(DetectedObject(annotation.box, annotation.label, None, mask))
    return objects


def coco_results(
    objects: Sequence[DetectedObject], image_id: int, categories: Sequence[Category]
) -> list[dict[str, Any]]:
    """Returns the detections of an image in COCO's format of results."""
    results = []
    for detected in objects:
        x1, y1, x2, y2 = detected.box
        category_id, _ = categories[detected.label - 1]
        result: dict[str, Any] = {
            "image_id": image_id,
            "category_id": category_id,
            "score": detected.score,
            "bbox": [x1, y1, x2 - x1, y2 - y1],
        }
        if detected.mask is not None:
            result["segmentation"] = encode_mask(detected.mask)
        results.append(result)
    return results
