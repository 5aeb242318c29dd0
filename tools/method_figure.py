"""Draws the method in one picture: which tokens the encoder, the decoder and the convolution see.

    python tools/method_figure.py docs/figures/method.png

The tokens are real: `prmim.TokenOrderSampler` draws the visible, retained and thrown tokens of a photograph that
scikit-image ships, at the ratios of the paper's main setting.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prmim import TokenCounts, TokenOrderSampler, addressed_noise
from util import pictures
from util.atomic import replaced_file
from util.plots import pyplot
from util.run.cli import Parser, prepare_file, run_program, user_errors

SIDE, PATCH = 224, 16
GRID = SIDE // PATCH
COUNTS = TokenCounts.from_ratios(GRID * GRID, mask_ratio=0.75, throw_ratio=0.5)
PHOTO, BOX = "coffee.png", (160, 0, 560, 400)  # a file of skimage.data and the square that is cut out of it
WIDTH, HEIGHT, DPI = 900, 232, 200  # points of the drawing; the file has WIDTH * DPI / 100 pixels
CELL = 9  # points a side of a token
PANEL = CELL * GRID
TOP = 42  # of the grids
BLUE, YELLOW = (pictures.COLORS[state] for state in (pictures.RETAINED, pictures.THROWN))
WHITE, GREY = (255, 255, 255), (205, 208, 212)
INK, LIGHT = "#202428", "#eef0f3"


def read_photo() -> np.ndarray:
    """Returns the photograph, uint8 [SIDE, SIDE, 3]. Raises ValueError if scikit-image is not installed."""
    try:
        from skimage.data import data_dir
    except ImportError as error:
        raise ValueError("the photograph needs scikit-image: pip install -r requirements-quickstart.txt") from error
    photo = Image.open(Path(data_dir) / PHOTO).convert("RGB").crop(BOX)
    return np.asarray(photo.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def draw_tokens() -> tuple[np.ndarray, np.ndarray]:
    """Draws one token order. Returns (ids_shuffle [N], state [GRID, GRID] of VISIBLE, RETAINED, THROWN)."""
    noise = addressed_noise(0, 0, np.arange(1), COUNTS.num_tokens)
    ids_shuffle = TokenOrderSampler(GRID, COUNTS)(noise)[0]
    state = np.empty(COUNTS.num_tokens, int)
    state[ids_shuffle[: COUNTS.num_visible]] = pictures.VISIBLE
    state[ids_shuffle[COUNTS.num_visible : COUNTS.num_kept]] = pictures.RETAINED
    state[ids_shuffle[COUNTS.num_kept :]] = pictures.THROWN
    return ids_shuffle, state.reshape(GRID, GRID)


def colored(state: np.ndarray, colors: dict[int, tuple[int, int, int]]) -> np.ndarray:
    """Turns states [rows, columns] into one pixel a token, uint8 [rows, columns, 3]."""
    picture = np.empty((*state.shape, 3), np.uint8)
    for value, color in colors.items():
        picture[state == value] = color
    return picture


def central_thrown_token(state: np.ndarray) -> tuple[int, int]:
    """Returns (row, column) of the thrown token that is nearest to the centre of the grid."""
    thrown = np.argwhere(state == pictures.THROWN)
    row, column = thrown[np.abs(thrown - (GRID - 1) / 2).max(axis=1).argmin()]
    return int(row), int(column)


class Sheet:
    """An empty drawing of WIDTH x HEIGHT points, the origin at the top left. Raises ValueError without matplotlib."""

    def __init__(self) -> None:
        self.plt = pyplot("prmim-method")
        self.figure = self.plt.figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=DPI, facecolor="white")
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        self.axes.axis("off")

    def image(self, picture: np.ndarray, x: float, y: float, width: float, height: float) -> None:
        """Places uint8 [h, w, 3] at (x, y) in a frame."""
        self.axes.imshow(picture, extent=(x, x + width, y + height, y), interpolation="nearest", zorder=2)
        self.frame(x, y, width, height, "#b4b9c0", 0.6)

    def tokens(self, picture: np.ndarray, x: float, y: float, rows: int, columns: int) -> None:
        """Places uint8 [h, w, 3] at (x, y) as a grid of `rows` x `columns` tokens with lines between them."""
        width, height = columns * CELL, rows * CELL
        self.image(picture, x, y, width, height)
        style = dict(color="white", linewidth=0.5, zorder=3)
        self.axes.hlines([y + i * CELL for i in range(1, rows)], x, x + width, **style)
        self.axes.vlines([x + i * CELL for i in range(1, columns)], y, y + height, **style)

    def frame(self, x: float, y: float, width: float, height: float, color: str, linewidth: float) -> None:
        """Draws the outline of a rectangle over everything else."""
        box = self.plt.Rectangle((x, y), width, height, fill=False, color=color, linewidth=linewidth, zorder=5)
        self.axes.add_patch(box)

    def network(self, x: float, y: float, width: float, height: float, title: str) -> None:
        """Draws a part of the model as a filled box with a title inside, at its top."""
        box = self.plt.Rectangle((x, y), width, height, facecolor=LIGHT, edgecolor="#9aa1ab", linewidth=0.8, zorder=1)
        self.axes.add_patch(box)
        self.text(x + width / 2, y + 14, title, weight="bold")

    def text(self, x: float, y: float, text: str, size: float = 7.2, weight: str = "normal") -> None:
        """Writes lines centred at (x, y); `size` is in typographic points, of which one is 1/72 inch."""
        self.axes.text(x, y, text, size=size, weight=weight, color=INK, ha="center", va="baseline", linespacing=1.25)

    def arrow(self, left: float, right: float, y: float) -> None:
        """Draws an arrow to the right."""
        style = dict(arrowstyle="-|>", color=INK, linewidth=1.0, mutation_scale=8, shrinkA=0, shrinkB=0)
        self.axes.annotate("", (right, y), (left, y), arrowprops=style)

    def save(self, path: Path) -> None:
        """Writes the file; an older one is replaced in one step."""
        metadata = {"Date": None} if path.suffix == ".svg" else None
        with replaced_file(path) as temporary:
            self.figure.savefig(temporary, metadata=metadata)
        self.plt.close(self.figure)


def draw(path: Path) -> None:
    """Draws the figure to `path`."""
    photo, (ids_shuffle, state) = read_photo(), draw_tokens()
    sheet, middle, below = Sheet(), TOP + PANEL / 2, TOP + PANEL + 29
    image, tokens, encoder, decoder, retained, thrown = 10, 162, 314, 433, 552, 764
    box = 7 * CELL + 26  # a network around a mosaic of seven tokens a row

    sheet.image(photo, image, TOP, PANEL, PANEL)
    sheet.text(image + PANEL / 2, TOP - 10, "image", weight="bold")
    sheet.text(image + PANEL / 2, below, f"{SIDE} × {SIDE} pixels,\n{COUNTS.num_tokens} tokens")

    sheet.tokens(pictures.paint_tokens(photo, state), tokens, TOP, GRID, GRID)
    sheet.text(tokens + PANEL / 2, TOP - 10, "token order", weight="bold")
    sheet.text(
        tokens + PANEL / 2,
        below,
        f"{COUNTS.num_visible} visible, {COUNTS.num_retained} retained,\n{COUNTS.num_thrown} thrown",
    )

    sheet.network(encoder, middle - 47, box, 94, "encoder")
    patches = photo.reshape(GRID, PATCH, GRID, PATCH, 3).swapaxes(1, 2).reshape(-1, PATCH, PATCH, 3)
    mosaic = patches[ids_shuffle[: COUNTS.num_visible]].reshape(7, 7, PATCH, PATCH, 3)
    sheet.tokens(mosaic.swapaxes(1, 2).reshape(7 * PATCH, 7 * PATCH, 3), encoder + 13, middle - 25, 7, 7)
    sheet.text(encoder + box / 2, below, f"visible tokens:\n{COUNTS.num_visible} of {COUNTS.num_tokens}")

    sheet.network(decoder, TOP - 24, box, PANEL + 30, "decoder")
    kept = np.repeat(np.array([[pictures.VISIBLE], [pictures.RETAINED]]), 7, axis=0).repeat(7, axis=1)
    sheet.tokens(colored(kept, {0: GREY, 1: BLUE}), decoder + 13, TOP, GRID, 7)
    sheet.text(decoder + box / 2, below, f"visible + retained:\n{COUNTS.num_kept} of {COUNTS.num_tokens}")

    row, column = central_thrown_token(state)
    colors = {pictures.VISIBLE: GREY, pictures.RETAINED: BLUE, pictures.THROWN: WHITE}
    sheet.tokens(colored(state, colors), retained, TOP, GRID, GRID)
    sheet.text(retained + PANEL / 2, TOP - 10, "decoded tokens", weight="bold")
    sheet.text(retained + PANEL / 2, below, "retained tokens reconstructed,\nthrown tokens are zero")

    sheet.tokens(colored(state, colors | {pictures.THROWN: YELLOW}), thrown, TOP, GRID, GRID)
    sheet.text(thrown + PANEL / 2, TOP - 10, "all masked tokens", weight="bold")
    sheet.text(thrown + PANEL / 2, below, f"supervised:\n{COUNTS.num_masked} of {COUNTS.num_tokens}")

    window = retained + (column - 3) * CELL, TOP + (row - 3) * CELL
    token = thrown + column * CELL, TOP + row * CELL
    sheet.frame(*window, 7 * CELL, 7 * CELL, INK, 1.3)
    sheet.frame(*token, CELL, CELL, INK, 1.3)
    for inside in (0, 1):
        ends = window[1] + inside * 7 * CELL, token[1] + inside * CELL
        sheet.axes.plot((window[0] + 7 * CELL, token[0]), ends, color=INK, linewidth=0.7, zorder=4)
    sheet.text((retained + PANEL + thrown) / 2, TOP + 20, "7 × 7\ndepth-wise\nconvolution", weight="bold")

    edges = (image + PANEL, tokens), (tokens + PANEL, encoder), (encoder + box, decoder), (decoder + box, retained)
    for left, right in edges:
        sheet.arrow(left + 3, right - 3, middle)
    draw_legend(sheet, HEIGHT - 13)
    sheet.save(path)


def draw_legend(sheet: Sheet, y: float) -> None:
    """Says what the colours mean, in one line."""
    entries = (GREY, "visible", 90), (BLUE, "masked, retained: by the decoder's blocks", 290)
    x = 112.0
    for color, text, width in (*entries, (YELLOW, "masked, thrown: by the convolution alone", 290)):
        swatch = sheet.plt.Rectangle(
            (x, y - 5), 10, 10, facecolor=np.array(color) / 255, edgecolor="#b4b9c0", linewidth=0.6
        )
        sheet.axes.add_patch(swatch)
        sheet.axes.text(x + 16, y, text, size=7.2, color=INK, ha="left", va="center")
        x += width


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; `argv` replaces the command line."""
    parser = Parser("method_figure.py", description=__doc__)
    parser.add_argument("out", type=Path, help="the picture to write: .png or .svg")
    args = parser.parse_args(argv)
    if args.out.suffix not in (".png", ".svg"):
        parser.error(f"the picture must be a .png or .svg, got {str(args.out)!r}")
    if reason := prepare_file(args.out):
        parser.error(f"{str(args.out)!r} cannot be written: {reason}")
    with user_errors(parser):
        draw(args.out)
    print(f"the method: {args.out}")


if __name__ == "__main__":
    run_program(main, "method_figure.py")
