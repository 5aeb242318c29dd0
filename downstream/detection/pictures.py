"""Pictures of annotated and detected objects."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

from downstream.detection.objects import DetectedObject
from downstream.pictures import default_colors, panel
from util.pictures import table

MIN_SCORE = 0.5  # of a detection that is shown
PANEL = 384  # side of an image in a picture, in pixels
PLATE_HEIGHT = 18
FONT_SIZE = 14
BLACK = (0, 0, 0)


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
        truth_panel = draw_objects(img, truth, names)
        detection_panel = draw_objects(img, likely, names)
        rows.append([truth_panel, detection_panel])
    return table(rows, ["truth", f"detections with a score of at least {MIN_SCORE}"])


def draw_objects(img: np.ndarray, objects: Sequence[DetectedObject], names: Sequence[str]) -> np.ndarray:
    """Draws outlines of boxes and masks on uint8 [H, W, 3], names and scores beside them. Returns a panel."""
    scale = PANEL / max(img.shape[:2])
    colors = default_colors(len(names))
    picture = Image.fromarray(panel(img, PANEL))
    draw = ImageDraw.Draw(picture)
    for box, label, score, mask in objects:
        name = names[label - 1]
        color = tuple(colors[label - 1].tolist())
        corners = [value * scale for value in box]
        draw.rectangle(corners, outline=color, width=2)
        if mask is not None:
            draw_outline(picture, mask, color)
        if score is not None:
            name += f" {score:.2f}"
        left, top, _, _ = corners
        draw_name(draw, left, top, name, color)
    return np.asarray(picture)


def draw_outline(picture: Image.Image, mask: np.ndarray, color: tuple[int, ...]) -> None:
    """Draws the pixels around a mask, bool [H, W] of the whole image, on a panel."""
    outside = np.where(mask, 0, 255).astype(np.uint8)
    fitted = panel(np.stack([outside] * 3, axis=2), PANEL)
    is_outside = Image.fromarray(fitted).getchannel(0)
    grown = is_outside.filter(ImageFilter.MaxFilter(5))
    outline = ImageChops.subtract(grown, is_outside)
    picture.paste(color, mask=outline)


def draw_name(draw: ImageDraw.ImageDraw, left: float, top: float, text: str, color: tuple[int, ...]) -> None:
    """Writes `text` on a plate of this colour above a box, or inside it at the upper edge of the picture."""
    font = ImageFont.load_default(size=FONT_SIZE)
    plate_top = max(0, top - PLATE_HEIGHT)
    place = (left + 3, plate_top)
    plate = draw.textbbox(place, text, font)
    draw.rectangle(plate, fill=color)
    draw.text(place, text, BLACK, font)
