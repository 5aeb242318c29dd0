"""Pictures for people: reconstructions and token patterns, drawn with Pillow."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from util.run.cli import replaced_file

VISIBLE, RETAINED, THROWN = 0, 1, 2
# Paul Tol's high-contrast blue and yellow: told apart by every reader, and in grey.
COLORS = {RETAINED: (68, 119, 170), THROWN: (221, 170, 51)}
LEGEND = {
    VISIBLE: "visible",
    RETAINED: "masked, retained: reconstructed by the decoder's blocks",
    THROWN: "masked, thrown: left out of the decoder's blocks",
}
_GAP, _INK, _PAPER, _LINE = 6, (40, 40, 40), (255, 255, 255), (200, 200, 200)
_SWATCH = 12  # pixels a side of a token in a legend, as in a pattern


def save(picture: np.ndarray, path: str | os.PathLike[str]) -> None:
    """Writes uint8 [H, W, 3] in the format of the path's suffix; an older file is replaced in one step."""
    with replaced_file(path) as temporary:
        Image.fromarray(picture).save(temporary)


def check_suffix(path: Path) -> None:
    """ValueError where Pillow writes no pictures of this suffix."""
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"no picture can be written to {str(path)!r}: the name must end in .png, .jpg or the like")


def panel_grid(imgs: torch.Tensor, states: torch.Tensor, panels: dict[str, torch.Tensor]) -> np.ndarray:
    """One row an image: image | its tokens | panels. Four or more images of one panel each stand in pairs.

    imgs: uint8 [B, 3, H, W]; states: int [B, rows, columns] of VISIBLE, RETAINED, THROWN; panels: {title: float
    [B, 3, H, W] in [0, 1]}. -> uint8 array [H', W', 3].
    """
    imgs, states = imgs.cpu().numpy().transpose(0, 2, 3, 1), np.asarray(states.cpu())
    columns = [imgs, [paint_tokens(img, state) for img, state in zip(imgs, states, strict=True)]]
    columns += [(p.float().cpu().numpy().transpose(0, 2, 3, 1) * 255).round().astype(np.uint8) for p in panels.values()]
    scale = max(1, -(-112 // imgs.shape[1]))  # small images are enlarged, pixel by pixel
    rows = [[panel.repeat(scale, 0).repeat(scale, 1) for panel in row] for row in zip(*columns, strict=True)]
    abreast = 2 if len(rows) >= 4 and len(panels) == 1 else 1
    titles = ["image", "visible, retained, thrown", *panels] * abreast
    rows += [[np.full_like(panel, 255) for panel in rows[0]]] * (-len(rows) % abreast)
    return table([sum(rows[i : i + abreast], []) for i in range(0, len(rows), abreast)], titles)


def paint_tokens(img: np.ndarray, state: np.ndarray) -> np.ndarray:
    """The visible pixels of uint8 [H, W, 3], and flat colours where `state` [rows, columns] is retained or thrown."""
    cells = np.asarray(state).repeat(img.shape[0] // state.shape[0], 0).repeat(img.shape[1] // state.shape[1], 1)
    painted = img.copy()
    for value, color in COLORS.items():
        painted[cells == value] = color
    return painted


def pattern(state: np.ndarray, cell: int = _SWATCH) -> np.ndarray:
    """A grid of tokens [rows, columns] as squares with lines between them: visible white, retained blue, thrown yellow.

    -> uint8 [rows * cell + 1, columns * cell + 1, 3].
    """
    rows, columns = np.array(state.shape) * cell
    picture = np.full((rows + 1, columns + 1, 3), _LINE, np.uint8)
    picture[:rows, :columns] = paint_tokens(np.full((rows, columns, 3), 255, np.uint8), state)
    picture[::cell], picture[:, ::cell] = _LINE, _LINE
    return picture


def pattern_table(groups: dict[str, list[list[np.ndarray]]], row_titles: Sequence[str]) -> np.ndarray:
    """Groups of token patterns side by side, with a title over each group and before each row, and a legend below.

    groups: {title: rows of equally large panels from `pattern`}. -> uint8 [H, W, 3].
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
    """What the colours of tokens mean, in one line from `x` on, centred at the height `y`."""
    half = _SWATCH // 2
    for (state, text), place in zip(LEGEND.items(), _legend_places(), strict=False):
        box = (x + place, y - half, x + place + _SWATCH, y + half)
        draw.rectangle(box, fill=COLORS.get(state, _PAPER), outline=COLORS.get(state, (150, 150, 150)))
        draw.text((x + place + _SWATCH + 7, y), text, _INK, _font(13), anchor="lm")


def _legend_places() -> list[float]:
    """Where the entries of the legend begin, in pixels, and where the last one ends."""
    places = [0.0]
    for text in LEGEND.values():
        places.append(places[-1] + _SWATCH + 7 + _font(13).getlength(text) + 32)
    return [*places[:-1], places[-1] - 32]


def _tile(rows: list[list[np.ndarray]]) -> np.ndarray:
    """Equally large panels with a gap of 10 pixels between them."""
    padded = [np.pad(np.stack(row), ((0, 0), (0, 10), (0, 10), (0, 0)), constant_values=255) for row in rows]
    return np.concatenate([np.concatenate(row, axis=1) for row in padded])[:-10, :-10]


def table(rows: list[list[np.ndarray]], titles: Sequence[str]) -> np.ndarray:
    """Lists of equally large uint8 panels [h, w, 3] with a title over each column -> uint8 [H, W, 3]."""
    height, width = rows[0][0].shape[:2]
    font = _font(11)
    head = 20
    size = (len(rows[0]) * (width + _GAP) + _GAP, head + len(rows) * (height + _GAP))
    canvas = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(canvas)
    for j, title in enumerate(titles):
        draw.text((_GAP + j * (width + _GAP), 4), title, fill=_INK, font=_fitting(title, width, font))
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            canvas.paste(Image.fromarray(panel), (_GAP + j * (width + _GAP), head + i * (height + _GAP)))
    return np.asarray(canvas)


def _font(size: float) -> Any:
    return ImageFont.load_default(size=size)


def _fitting(text: str, width: int, font: Any) -> Any:
    """The font, or a smaller one with which `text` is no wider than `width`."""
    length = font.getlength(text)
    return font if length <= width else _font(max(6, 11 * width / length))


def principal_colors(reference: torch.Tensor, *features: torch.Tensor) -> list[torch.Tensor]:
    """Features [B, N, C] -> [B, N, 3] in [0, 1] each: their components along the three main axes of `reference`.

    They are stretched from its 1st to its 99th percentile.
    """
    flat = reference.flatten(0, 1).double()
    centred = flat - flat.mean(dim=0)
    axes = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -3:].flip(1)  # [C, 3], the main one first
    low, high = torch.quantile(centred @ axes, flat.new_tensor([0.01, 0.99]), dim=0)
    return [(((x.double() - flat.mean(dim=0)) @ axes - low) / (high - low)).clamp(0, 1).float() for x in features]
