"""Colours of classes, and panels of one size for the pictures of dense tasks."""

import numpy as np
import torch
from PIL import Image, ImageColor, ImageOps

from util.data.transforms import Normalize
from util.pictures import INVALID_COLOR, as_rgb

PANEL = 192  # side of a panel in pixels, if no other is given


def default_colors(num_classes: int) -> np.ndarray:
    """Returns a colour for each class, uint8 [K, 3]: hues a golden angle apart, in three shades."""
    shades = ("85%,95%", "50%,80%", "95%,60%")  # saturation and value
    colors = [ImageColor.getrgb(f"hsv({222.492 * k % 360:.3f},{shades[k % 3]})") for k in range(num_classes)]
    return np.array(colors, np.uint8).reshape(-1, 3)


def panel(picture: np.ndarray, side: int = PANEL) -> np.ndarray:
    """Fits uint8 [h, w, 3] into a white square of this side, with its aspect ratio kept."""
    square = ImageOps.pad(
        Image.fromarray(picture), (side, side), Image.Resampling.NEAREST, color="white", centering=(0, 0)
    )
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
