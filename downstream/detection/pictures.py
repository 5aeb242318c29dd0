"""Pictures of annotated and detected objects."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from downstream.detection.data import DetectionSample
from downstream.detection.objects import DetectedObject
from downstream.pictures import default_colors
from util.data.pictures import PANEL, panel
from util.pictures import table

MIN_SCORE = 0.5  # of a detection that is shown


class ShownImage(NamedTuple):
    """A row of a picture."""

    img: np.ndarray  # uint8 [H, W, 3]
    truth: Sequence[DetectedObject]
    detections: Sequence[DetectedObject]


def draw_pictures(shown: Sequence[ShownImage], names: Sequence[str]) -> np.ndarray:
    """Draws a row of truth and detections for each image. Returns uint8 [H, W, 3]."""
    rows = []
    for img, truth, detections in shown:
        likely = [detected for detected in detections if (detected.score or 0) >= MIN_SCORE]
        rows.append([draw_objects(img, truth, names), draw_objects(img, likely, names)])
    return table(rows, ["truth", f"detections with a score of at least {MIN_SCORE}"])


def draw_sample(picture: np.ndarray, sample: DetectionSample, names: Sequence[str]) -> np.ndarray:
    """Draws the objects of a training sample over its picture."""
    masks = list(sample.masks.bool().numpy()) or [None] * len(sample.boxes)
    fields = zip(sample.boxes.tolist(), sample.labels.tolist(), masks, strict=True)
    return draw_objects(picture, [DetectedObject(box, label, None, mask) for box, label, mask in fields], names)


def draw_objects(img: np.ndarray, objects: Sequence[DetectedObject], names: Sequence[str]) -> np.ndarray:
    """Draws boxes, masks, names and scores on uint8 [H, W, 3]. Returns a panel."""
    if not objects:
        return panel(img)
    palette = [tuple(color) for color in default_colors(len(names)).tolist()]
    colors = []
    labels = []
    masks = []
    boxes = []
    for detected in objects:
        label = names[detected.label - 1]
        if detected.score is not None:
            label += f" {detected.score:.2f}"
        labels.append(label)
        colors.append(palette[detected.label - 1])
        boxes.append(detected.box)
        if detected.mask is not None:
            masks.append(torch.from_numpy(detected.mask))
    if len(masks) == len(objects):
        picture = torch.from_numpy(img).permute(2, 0, 1)
        picture = draw_segmentation_masks(picture, torch.stack(masks), alpha=0.4, colors=colors)
        img = picture.permute(1, 2, 0).numpy()
    scale = PANEL / max(img.shape[:2])
    scaled_boxes = scale * torch.tensor(boxes)
    picture = torch.from_numpy(panel(img).copy()).permute(2, 0, 1)
    picture = draw_bounding_boxes(picture, scaled_boxes, labels, colors, width=2, fill_labels=True)
    return picture.permute(1, 2, 0).numpy()
