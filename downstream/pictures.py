"""Colours of classes, and panels of one size for the pictures of dense tasks."""

import colorsys

import numpy as np
import torch
from PIL import Image

from util.data.transforms import Normalize
from util.pictures import as_rgb

PANEL = 192  # side of a panel in pixels, if no other is given


def default_colors(num_classes: int) -> np.ndarray:
    """Returns a colour for each class, uint8 [K, 3]: hues a golden angle apart, in three shades."""
    shades = ((0.85, 0.95), (0.5, 0.8), (0.95, 0.6))
    colors = np.zeros((num_classes, 3))
    for k in range(num_classes):
        saturation, value = shades[k % 3]
        colors[k] = colorsys.hsv_to_rgb(0.618034 * k % 1, saturation, value)
    return (colors * 255).round().astype(np.uint8)


def panel(picture: np.ndarray, side: int = PANEL) -> np.ndarray:
    """Fits uint8 [h, w, 3] into a white square of this side, with its aspect ratio kept."""
    height, width = picture.shape[:2]
    scale = side / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    square = Image.new("RGB", (side, side), (255, 255, 255))
    square.paste(Image.fromarray(picture).resize(size, Image.NEAREST))
    return np.asarray(square)


def as_picture(img: torch.Tensor, normalize: Normalize) -> np.ndarray:
    """Returns uint8 [H, W, 3] of a normalised image [C, H, W]: one channel as grey, or else the first three."""
    shown = as_rgb(normalize.undo(img)[None])[0]
    return (shown * 255).round().byte().permute(1, 2, 0).cpu().numpy()
