"""Colours of classes, and panels of one size for the pictures of dense tasks."""

import colorsys

import numpy as np
import torch
from PIL import Image

from util.data.transforms import Normalize
from util.pictures import INVALID_COLOR, as_rgb

PANEL = 192  # side of a panel in pixels, if no other is given


def default_colors(num_classes: int) -> np.ndarray:
    """Returns a colour for each class, uint8 [K, 3]: hues a golden angle apart, in three shades."""
    shades = (  # saturation and value
        (0.85, 0.95),
        (0.5, 0.8),
        (0.95, 0.6),
    )
    colors = np.zeros((num_classes, 3))
    for k in range(num_classes):
        hue = 0.618034 * k % 1
        saturation, value = shades[k % 3]
        colors[k] = colorsys.hsv_to_rgb(hue, saturation, value)
    return (colors * 255).round().astype(np.uint8)


def panel(picture: np.ndarray, side: int = PANEL) -> np.ndarray:
    """Fits uint8 [h, w, 3] into a white square of this side, with its aspect ratio kept."""
    height, width = picture.shape[:2]
    scale = side / max(height, width)
    new_height = max(1, round(height * scale))
    new_width = max(1, round(width * scale))
    resized = Image.fromarray(picture).resize((new_width, new_height), Image.NEAREST)
    square = Image.new("RGB", (side, side), "white")
    square.paste(resized)
    return np.asarray(square)


def as_picture(img: torch.Tensor, normalize: Normalize, invalid: torch.Tensor | None = None) -> np.ndarray:
    """Returns uint8 [H, W, 3] of a normalised image [C, H, W]: one channel as grey, or else the first three.

    invalid: bool [C, H, W]; pixels with an invalid channel among those that are shown have INVALID_COLOR.
    """
    imgs = normalize.undo(img).unsqueeze(0)
    shown = as_rgb(imgs)[0] * 255
    picture = shown.round().byte().permute(1, 2, 0).cpu().numpy()
    if invalid is not None:
        is_invalid = as_rgb(invalid.unsqueeze(0))[0].any(dim=0)
        picture[is_invalid.cpu().numpy()] = INVALID_COLOR
    return picture
