"""Pictures of reconstructions, drawn with Pillow."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from util.atomic import replaced_file
from util.text import printable
from util.tokens import RETAINED, THROWN

# Paul Tol's high-contrast blue and yellow, which colour-blind readers and grey prints distinguish, too.
COLORS = {RETAINED: (68, 119, 170), THROWN: (221, 170, 51)}
INVALID_COLOR = (187, 85, 102)  # the red of the same palette
_INK = (40, 40, 40)
PAPER = (255, 255, 255)
_GAP = 6  # pixels between the panels of a table


def save(picture: np.ndarray, path: str | os.PathLike[str]) -> None:
    """Writes uint8 [H, W, 3] in the format of the path's suffix. An older file is replaced in one step."""
    with replaced_file(path) as temporary:
        Image.fromarray(picture).save(temporary)


def check_suffix(path: Path) -> None:
    """Raises ValueError if Pillow cannot write a picture with this suffix."""
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"no picture can be written to {str(path)!r}: the name must end in .png, .jpg or the like")


def panel_grid(
    imgs: Tensor,
    states: Tensor,
    panels: dict[str, Tensor],
    invalid: Tensor,
) -> np.ndarray:
    """Draws one row per image: the image, its tokens, its panels. Returns uint8 [H', W', 3].

    If there are four or more images with one or two panels each, a row holds two of them.

    imgs: uint8 [B, C, H, W]. states: int [B, rows, columns] of VISIBLE, RETAINED, THROWN. panels: {title: float
    [B, C, H, W] in [0, 1]}. See `as_rgb` for other channels than 3. invalid: bool [B, C, H, W], which pixels have
    INVALID_COLOR in all columns, if one of the channels that are shown is invalid.
    """
    pixels = _channels_last(imgs)
    painted = []
    for img, grid in zip(pixels, states.cpu().numpy(), strict=True):
        painted.append(paint_tokens(img, grid))
    columns = [pixels, np.stack(painted)]
    for panel in panels.values():
        values = _channels_last(panel.float().nan_to_num()) * 255
        columns.append(values.round().astype(np.uint8))
    is_invalid = _channels_last(invalid).any(axis=-1)
    for column in columns:
        column[is_invalid] = INVALID_COLOR
    scale = max(1, math.ceil(112 / pixels.shape[1]))  # small images are enlarged by whole pixels
    enlarged = []
    for column in columns:
        column = column.repeat(scale, axis=1)
        enlarged.append(column.repeat(scale, axis=2))
    rows = [list(row) for row in zip(*enlarged, strict=True)]
    titles = ["image", "tokens", *panels]
    if len(rows) >= 4 and len(panels) <= 2:
        if len(rows) % 2 == 1:
            blank = np.full_like(rows[0][0], 255)
            rows.append([blank] * len(rows[0]))
        rows = [left + right for left, right in zip(rows[::2], rows[1::2], strict=True)]
        titles = titles * 2
    return table(rows, titles)


def _channels_last(imgs: Tensor) -> np.ndarray:
    """Turns images [B, C, H, W] into an array [B, H, W, 3]."""
    return as_rgb(imgs).cpu().numpy().transpose(0, 2, 3, 1)


def as_rgb(imgs: Tensor) -> Tensor:
    """Returns three channels of images [B, C, H, W]: a single one as grey, or else the first three.

    Of two channels, the missing blue is black.
    """
    if imgs.shape[1] == 1:
        return imgs.expand(-1, 3, -1, -1)
    if imgs.shape[1] == 2:
        blue = torch.zeros_like(imgs[:, :1])
        return torch.cat([imgs, blue], dim=1)
    return imgs[:, :3]


def paint_tokens(img: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Returns uint8 [H, W, 3] with flat colours where the tokens' `state` [rows, columns] is retained or thrown."""
    height, width = img.shape[:2]
    rows, columns = state.shape
    pixel_state = state.repeat(height // rows, axis=0)
    pixel_state = pixel_state.repeat(width // columns, axis=1)
    painted = img.copy()
    for token_state, color in COLORS.items():
        painted[pixel_state == token_state] = color
    return painted


def table(rows: list[list[np.ndarray]], titles: Sequence[str]) -> np.ndarray:
    """Joins rows of uint8 panels [h, w, 3] of one size, with a title over each column. Returns uint8 [H, W, 3]."""
    height, width = rows[0][0].shape[:2]
    head = 20  # for the titles
    step_down = height + _GAP
    step_right = width + _GAP
    size = (_GAP + len(rows[0]) * step_right, head + len(rows) * step_down)
    canvas = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(canvas)
    for j, title in enumerate(titles):
        left = _GAP + j * step_right
        draw.text((left, 2), title, fill=_INK, font=_font())
    for i, row in enumerate(rows):
        top = head + i * step_down
        for j, panel in enumerate(row):
            left = _GAP + j * step_right
            canvas.paste(Image.fromarray(panel), (left, top))
    return np.asarray(canvas)


def write_lines(picture: np.ndarray, lines: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """Writes lines on uint8 [H, W, 3]. lines: {text: its colour}."""
    canvas = Image.fromarray(picture)
    draw = ImageDraw.Draw(canvas)
    for k, (text, color) in enumerate(lines.items()):
        draw.text((4, 2 + 16 * k), printable(text), fill=color, font=_font(), stroke_width=2, stroke_fill=_INK)
    return np.asarray(canvas)


def _font() -> Any:
    return ImageFont.load_default(size=12)


def principal_colors(reference: Tensor, *features: Tensor) -> list[Tensor]:
    """Turns each tensor of features [B, N, C] into colours [B, N, 3] in [0, 1].

    The colours are the components along the three principal axes of `reference` [B, N, C]. Its 1st and 99th percentile
    become 0 and 1. The signs of the axes are arbitrary.
    """
    flat = reference.flatten(0, 1).double()
    mean = flat.mean(dim=0)
    centred = flat - mean
    vectors = torch.linalg.eigh(centred.T @ centred).eigenvectors  # columns, the largest last
    axes = vectors[:, -3:].flip(1)
    low, high = torch.quantile(centred @ axes, flat.new_tensor([0.01, 0.99]), dim=0)
    colors = []
    for x in features:
        components = (x.double() - mean) @ axes
        scaled = (components - low) / (high - low).clamp(min=torch.finfo(torch.double).tiny)
        colors.append(scaled.clamp(0, 1).float())
    return colors
