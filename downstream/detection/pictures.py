"""Pictures of annotated and detected objects."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from downstream.detection.objects import DetectedObject
from downstream.pictures import default_colors, panel
from util.pictures import table

MIN_SCORE = 0.5  # of a detection that is shown
PANEL = 384  # side of an image in a picture, in pixels


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


def draw_objects(img: np.ndarray, objects: Sequence[DetectedObject], names: Sequence[str]) -> np.ndarray:
    """Draws boxes, masks, names and scores on uint8 [H, W, 3]. Returns a panel."""
    fitted = panel(img, PANEL)
    if not objects:
        return fitted
    palette = [tuple(color) for color in default_colors(len(names)).tolist()]
    colors = [palette[detected.label - 1] for detected in objects]
    labels = []
    for detected in objects:
        label = names[detected.label - 1]
        if detected.score is not None:
            label += f" {detected.score:.2f}"
        labels.append(label)
    picture = torch.from_numpy(fitted.copy()).permute(2, 0, 1)
    masks = [fit_mask(detected.mask) for detected in objects if detected.mask is not None]
    if len(masks) == len(objects):
        picture = draw_segmentation_masks(picture, torch.stack(masks), alpha=0.4, colors=colors)
    scale = PANEL / max(img.shape[:2])
    boxes = torch.tensor([detected.box for detected in objects]) * scale
    picture = draw_bounding_boxes(picture, boxes, labels, colors, width=2, fill_labels=True)
    return picture.permute(1, 2, 0).numpy()


def fit_mask(mask: np.ndarray) -> torch.Tensor:
    """Fits a mask, bool [H, W], into a panel, as `panel` does an image."""
    outside = np.where(mask, 0, 255).astype(np.uint8)
    fitted = panel(np.stack([outside] * 3, axis=2), PANEL)
    return torch.from_numpy(fitted[:, :, 0] == 0)
