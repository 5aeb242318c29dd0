"""Pictures of reconstructions and token patterns, drawn with Pillow."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from util.atomic import replaced_file

VISIBLE, RETAINED, THROWN = 0, 1, 2  # states of a token
# Paul Tol's high-contrast blue and yellow, which colour-blind readers and grey prints distinguish, too.
COLORS = {RETAINED: (68, 119, 170), THROWN: (221, 170, 51)}
LEGEND = {
    VISIBLE: "visible",
    RETAINED: "masked, retained: reconstructed by the decoder's blocks",
    THROWN: "masked, thrown: left out of the decoder's blocks",
}
_GAP, _INK, _PAPER, _LINE = 6, (40, 40, 40), (255, 255, 255), (200, 200, 200)
_SWATCH = 12  # side of a token in a pattern and in the legend, in pixels


def save(picture: np.ndarray, path: str | os.PathLike[str]) -> None:
    """Writes uint8 [H, W, 3] in the format of the path's suffix. An older file is replaced in one step."""
    with replaced_file(path) as temporary:
        Image.fromarray(picture).save(temporary)


def check_suffix(path: Path) -> None:
    """Raises ValueError if Pillow cannot write a picture with this suffix."""
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"no picture can be written to {str(path)!r}: the name must end in .png, .jpg or the like")


def panel_grid(imgs: torch.Tensor, states: torch.Tensor, panels: dict[str, torch.Tensor]) -> np.ndarray:
    """Draws one row per image: the image, its tokens, its panels. Returns uint8 [H', W', 3].

    If there are four or more images with one panel each, a row holds two of them.

    imgs: uint8 [B, C, H, W]. states: int [B, rows, columns] of VISIBLE, RETAINED, THROWN. panels: {title: float
    [B, C, H, W] in [0, 1]}. See `as_rgb` for other channels than 3.
    """
    pixels, grids = as_rgb(imgs).cpu().numpy().transpose(0, 2, 3, 1), states.cpu().numpy()
    columns = [list(pixels), [paint_tokens(img, grid) for img, grid in zip(pixels, grids, strict=True)]]
    for panel in panels.values():
        columns.append(list((as_rgb(panel).float().cpu().numpy().transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)))
    scale = max(1, math.ceil(112 / pixels.shape[1]))  # small images are enlarged by whole pixels
    rows = [[panel.repeat(scale, 0).repeat(scale, 1) for panel in row] for row in zip(*columns, strict=True)]
    titles = ["image", "visible, retained, thrown", *panels]
    if len(rows) >= 4 and len(panels) == 1:
        if len(rows) % 2:
            rows.append([np.full_like(panel, 255) for panel in rows[0]])
        rows = [left + right for left, right in zip(rows[::2], rows[1::2], strict=True)]
        titles = titles * 2
    return table(rows, titles)


def as_rgb(imgs: torch.Tensor) -> torch.Tensor:
    """Returns three channels of images [B, C, H, W]: a single one as grey, or else the first three.

    Of two channels, the missing blue is black.
    """
    if imgs.shape[1] == 1:
        return imgs.expand(-1, 3, -1, -1)
    if imgs.shape[1] == 2:
        return torch.cat([imgs, torch.zeros_like(imgs[:, :1])], dim=1)
    return imgs[:, :3]


def paint_tokens(img: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Returns uint8 [H, W, 3] with flat colours where the tokens' `state` [rows, columns] is retained or thrown."""
    cells = state.repeat(img.shape[0] // state.shape[0], 0).repeat(img.shape[1] // state.shape[1], 1)
    painted = img.copy()
    for value, color in COLORS.items():
        painted[cells == value] = color
    return painted


def pattern(state: np.ndarray, cell: int = _SWATCH) -> np.ndarray:
    """Draws a grid of tokens [rows, columns] as squares: visible white, retained blue, thrown yellow.

    Returns uint8 [rows * cell + 1, columns * cell + 1, 3], with lines between the squares.
    """
    rows, columns = np.array(state.shape) * cell
    picture = np.full((rows + 1, columns + 1, 3), _LINE, np.uint8)
    picture[:rows, :columns] = paint_tokens(np.full((rows, columns, 3), 255, np.uint8), state)
    picture[::cell], picture[:, ::cell] = _LINE, _LINE
    return picture


def pattern_table(groups: dict[str, list[list[np.ndarray]]], row_titles: Sequence[str]) -> np.ndarray:
    """Draws groups of token patterns side by side, with a title over each group and before each row, and a legend.

    groups: {title: rows of panels from `pattern`, all of one size}. Returns uint8 [H, W, 3].
    """
    tables = [_tile(rows) for rows in groups.values()]
    height, width, _ = tables[0].shape
    head, left, gap, foot = 36, 22 + int(max(map(_font(13).getlength, row_titles))), 30, 44
    row_height = height / len(row_titles)
    widest = max(len(tables) * (width + gap) - gap, int(_legend_places()[-1]))
    size = (left + widest + 12, head + height + foot)
    canvas = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(canvas)
    for i, title in enumerate(row_titles):
        draw.text((left - 10, head + (i + 0.5) * row_height), title, _INK, _font(13), anchor="rm")
    for i, (title, picture) in enumerate(zip(groups, tables, strict=True)):
        x = left + i * (width + gap)
        draw.text((x + width / 2, head / 2), title, _INK, _font(15), anchor="mm")
        canvas.paste(Image.fromarray(picture), (x, head))
    draw_legend(draw, left, size[1] - foot // 2)
    return np.asarray(canvas)


def draw_legend(draw: ImageDraw.ImageDraw, x: float, y: float) -> None:
    """Draws the meaning of the tokens' colours in one line that begins at `x` and is centred at the height `y`."""
    half = _SWATCH // 2
    for (state, text), place in zip(LEGEND.items(), _legend_places(), strict=False):
        box = (x + place, y - half, x + place + _SWATCH, y + half)
        draw.rectangle(box, fill=COLORS.get(state, _PAPER), outline=COLORS.get(state, (150, 150, 150)))
        draw.text((x + place + _SWATCH + 7, y), text, _INK, _font(13), anchor="lm")


def _legend_places() -> list[float]:
    """Returns where each entry of the legend begins and where the last one ends, in pixels."""
    places = [0.0]
    for text in LEGEND.values():
        places.append(places[-1] + _SWATCH + 7 + _font(13).getlength(text) + 32)
    return [*places[:-1], places[-1] - 32]


def _tile(rows: list[list[np.ndarray]]) -> np.ndarray:
    """Joins panels of one size with gaps of 10 pixels between them."""
    padded = [np.pad(np.stack(row), ((0, 0), (0, 10), (0, 10), (0, 0)), constant_values=255) for row in rows]
    return np.concatenate([np.concatenate(row, axis=1) for row in padded])[:-10, :-10]


def table(rows: list[list[np.ndarray]], titles: Sequence[str]) -> np.ndarray:
    """Joins rows of uint8 panels [h, w, 3] of one size, with a title over each column. Returns uint8 [H, W, 3]."""
    height, width = rows[0][0].shape[:2]
    head = 20
    size = (len(rows[0]) * (width + _GAP) + _GAP, head + len(rows) * (height + _GAP))
    canvas = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(canvas)
    for j, title in enumerate(titles):
        draw.text((_GAP + j * (width + _GAP), 4), title, fill=_INK, font=_font_that_fits(title, width))
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            canvas.paste(Image.fromarray(panel), (_GAP + j * (width + _GAP), head + i * (height + _GAP)))
    return np.asarray(canvas)


def _font(size: float) -> Any:
    return ImageFont.load_default(size=size)


def _font_that_fits(text: str, width: int) -> Any:
    """Returns the font of size 11, or a smaller one with which `text` is no wider than `width` pixels."""
    font = _font(11)
    length = font.getlength(text)
    return font if length <= width else _font(max(6, 11 * width / length))


def principal_colors(reference: torch.Tensor, *features: torch.Tensor) -> list[torch.Tensor]:
    """Turns each tensor of features [B, N, C] into colours [B, N, 3] in [0, 1].

    The colours are the components along the three principal axes of `reference` [B, N, C]. Its 1st and 99th percentile
    become 0 and 1.
    """
    flat = reference.flatten(0, 1).double()
    centred = flat - flat.mean(dim=0)
    axes = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -3:].flip(1)  # [C, 3], the largest first
    low, high = torch.quantile(centred @ axes, flat.new_tensor([0.01, 0.99]), dim=0)
    return [(((x.double() - flat.mean(dim=0)) @ axes - low) / (high - low)).clamp(0, 1).float() for x in features]
