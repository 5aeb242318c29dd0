"""Pictures of annotated and detected objects."""

from collections.abc import Sequence

import numpy as np
import torch
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from downstream.detection.data import Category, DetectionSample
from downstream.detection.objects import DetectedObject
from downstream.pictures import default_colors
from util.data.pictures import PANEL, panel

MIN_SCORE = 0.5  # of a detection that is shown
TITLES = ("truth", f"detections with a score of at least {MIN_SCORE}")  # of the panels of an image


def draw_sample(picture: np.ndarray, sample: DetectionSample, categories: Sequence[Category]) -> np.ndarray:
    """Draws the objects of a training sample over its picture."""
    masks = list(sample.masks.bool().numpy()) or [None] * len(sample.boxes)
    fields = zip(sample.boxes.tolist(), sample.labels.tolist(), masks, strict=True)
    return draw_objects(picture, [DetectedObject(box, label, None, mask) for box, label, mask in fields], categories)


def draw_objects(img: np.ndarray, objects: Sequence[DetectedObject], categories: Sequence[Category]) -> np.ndarray:
    """Draws annotated and likely objects on uint8 [H, W, 3]: boxes, masks, names and scores. Returns a panel."""
    objects = [detected for detected in objects if detected.score is None or detected.score >= MIN_SCORE]
    if not objects:
        return panel(img)
    palette = [tuple(color) for color in default_colors(len(categories)).tolist()]
    colors = [palette[detected.label - 1] for detected in objects]
    labels = []
    for detected in objects:
        _, label = categories[detected.label - 1]
        if detected.score is not None:
            label += f" {detected.score:.2f}"
        labels.append(label)
    masks = [torch.from_numpy(detected.mask) for detected in objects if detected.mask is not None]
    if len(masks) == len(objects):
        picture = torch.from_numpy(img).permute(2, 0, 1)
        picture = draw_segmentation_masks(picture, torch.stack(masks), alpha=0.4, colors=colors)
        img = picture.permute(1, 2, 0).numpy()
    scale = PANEL / max(img.shape[:2])
    scaled_boxes = scale * torch.tensor([detected.box for detected in objects])
    picture = torch.from_numpy(panel(img).copy()).permute(2, 0, 1)
    picture = draw_bounding_boxes(picture, scaled_boxes, labels, colors, width=2, fill_labels=True)
    return picture.permute(1, 2, 0).numpy()
