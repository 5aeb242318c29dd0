"""Pictures for people: reconstructions and token patterns, drawn with Pillow."""

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

VISIBLE, RETAINED, THROWN = 0, 1, 2
# Paul Tol's high-contrast blue and yellow: told apart by every reader, and in grey.
COLORS = {RETAINED: (68, 119, 170), THROWN: (221, 170, 51)}
_GAP, _INK, _PAPER = 6, (40, 40, 40), (255, 255, 255)


def panel_grid(imgs, states, panels):
    """One row an image: image | its tokens | panels; two images side by side where there are four or more, of one panel each.

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


def paint_tokens(img, state):
    """The visible pixels of uint8 [H, W, 3], and flat colours where `state` [rows, columns] is retained or thrown."""
    cells = np.asarray(state).repeat(img.shape[0] // state.shape[0], 0).repeat(img.shape[1] // state.shape[1], 1)
    painted = img.copy()
    for value, color in COLORS.items():
        painted[cells == value] = color
    return painted


def pattern(state, cell=12):
    """A token grid as squares: visible white, retained blue, thrown yellow. -> uint8 [rows * cell, columns * cell, 3]."""
    picture = paint_tokens(np.full((*(np.array(state.shape) * cell), 3), 255, np.uint8), state)
    picture[::cell], picture[:, ::cell] = 200, 200
    return picture


def table(rows, titles):
    """Lists of equally large uint8 panels [h, w, 3] with a title over each column -> uint8 [H, W, 3]."""
    height, width = rows[0][0].shape[:2]
    font = ImageFont.load_default(size=11)
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


def _fitting(text, width, font):
    return font if font.getlength(text) <= width else ImageFont.load_default(size=max(6, 11 * width / font.getlength(text)))


def principal_colors(reference, *features):
    """Features [B, N, C] -> [B, N, 3] in [0, 1] each: their components along the three main axes of `reference`, stretched
    from its 1st to its 99th percentile."""
    flat = reference.flatten(0, 1).double()
    centred = flat - flat.mean(dim=0)
    axes = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -3:].flip(1)  # [C, 3], the main one first
    low, high = torch.quantile(centred @ axes, flat.new_tensor([0.01, 0.99]), dim=0)
    return [(((x.double() - flat.mean(dim=0)) @ axes - low) / (high - low)).clamp(0, 1).float() for x in features]
