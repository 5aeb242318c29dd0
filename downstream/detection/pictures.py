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
WHITE = (255, 255, 255)


class ShownImage(NamedTuple):
    """A row of a picture."""

    img: np.ndarray  # uint8 [H, W, 3]
    truth: Sequence[DetectedObject]
    detections: Sequence[DetectedObject]


class Plate(NamedTuple):
    """A rectangle with a name on it, in pixels of a panel."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Plate") -> bool:
        """Whether the two have a common area."""
        overlaps_x = self.left < other.right and other.left < self.right
        overlaps_y = self.top < other.bottom and other.top < self.bottom
        return overlaps_x and overlaps_y


def draw_pictures(shown: Sequence[ShownImage], names: Sequence[str]) -> np.ndarray:
    """Draws a row of truth and detections for each image. Returns uint8 [H, W, 3]."""
    rows = []
    for img, truth, detections in shown:
        likely = [detected for detected in detections if detected.score is not None and detected.score >= MIN_SCORE]
        rows.append([draw_objects(img, truth, names), draw_objects(img, likely, names)])
    return table(rows, ["truth", f"detections with a score of at least {MIN_SCORE}"])


def draw_objects(img: np.ndarray, objects: Sequence[DetectedObject], names: Sequence[str]) -> np.ndarray:
    """Draws outlines of boxes and masks on uint8 [H, W, 3], names and scores beside them. Returns a panel."""
    scale = PANEL / max(img.shape[:2])
    colors = default_colors(len(names))
    picture = Image.fromarray(panel(img, PANEL))
    draw = ImageDraw.Draw(picture)
    for box, label, _, mask in objects:
        color = tuple(colors[label - 1].tolist())
        draw.rectangle([value * scale for value in box], outline=color, width=2)
        if mask is not None:
            draw_outline(picture, mask, color)
    plates: list[Plate] = []
    for box, label, score, _ in objects:
        text = names[label - 1]
        if score is not None:
            text += f" {score:.2f}"
        width = ImageFont.load_default(size=FONT_SIZE).getlength(text) + 6
        plate = place_plate([value * scale for value in box], width, plates)
        draw_plate(draw, plate, text, colors[label - 1].tolist())
        plates.append(plate)
    return np.asarray(picture)


def draw_outline(picture: Image.Image, mask: np.ndarray, color: tuple[int, ...]) -> None:
    """Draws the pixels around a mask, bool [H, W] of the whole image, on a panel."""
    outside = np.where(mask, 0, 255).astype(np.uint8)
    outside = panel(outside[:, :, None].repeat(3, axis=2), PANEL)[:, :, 0]
    is_outside = Image.fromarray(outside)
    outline = ImageChops.subtract(is_outside.filter(ImageFilter.MaxFilter(5)), is_outside)
    picture.paste(color, mask=outline)


def place_plate(box: Sequence[float], width: float, others: Sequence[Plate]) -> Plate:
    """Returns a plate above a box; below or in it if the picture ends there or one of `others` is there."""
    left = max(0.0, min(box[0], PANEL - width))
    tops = (box[1] - PLATE_HEIGHT, box[3], box[1], box[3] - PLATE_HEIGHT)
    plates = [Plate(left, top, left + width, top + PLATE_HEIGHT) for top in tops]
    for plate in plates:
        is_inside = plate.top >= 0 and plate.bottom <= PANEL
        if is_inside and not any(plate.overlaps(other) for other in others):
            return plate
    return plates[2]


def draw_plate(draw: ImageDraw.ImageDraw, plate: Plate, text: str, color: Sequence[int]) -> None:
    """Writes `text` on a plate of this colour, in black or white."""
    draw.rectangle(plate, fill=tuple(color))
    is_light = np.dot(color, (0.299, 0.587, 0.114)) > 140
    place = (plate.left + 3, plate.top + PLATE_HEIGHT / 2)
    draw.text(place, text, BLACK if is_light else WHITE, ImageFont.load_default(size=FONT_SIZE), anchor="lm")
