"""Colours of classes."""

import numpy as np
from PIL import ImageColor


def default_colors(num_classes: int) -> np.ndarray:
    """Returns a colour for each class, uint8 [K, 3]: hues a golden angle apart, in three shades."""
    shades = ("85%,95%", "50%,80%", "95%,60%")  # saturation and value
    colors = [ImageColor.getrgb(f"hsv({222.492 * k % 360:.3f},{shades[k % 3]})") for k in range(num_classes)]
    return np.array(colors, np.uint8).reshape(-1, 3)
