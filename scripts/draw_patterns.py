"""Draw the paper's figure of sampling patterns: each sampling picks from the same masked tokens (needs matplotlib).

python scripts/draw_patterns.py --out patterns.png
python scripts/draw_patterns.py --sampling furthest running_cell --grid 8 --out patterns.png
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prmim import SAMPLING, TokenCounts, TokenOrder, TokenOrderSampler, addressed_noise
from util.atomic import replaced_file
from util.plots import pyplot
from util.run.cli import Parser, prepare_file, run_program, user_errors

COLORS = {"visible": "white", "retained": "#4a76b8", "thrown": "#f2c14e"}


def draw_states(sampling: str, grid: int, mask_ratio: float, throw_ratio: float) -> np.ndarray:
    """Draws the token order of one image. Returns 0 at visible, 1 at retained, 2 at thrown tokens, [grid, grid]."""
    counts = TokenCounts.from_ratios(grid**2, mask_ratio, throw_ratio)
    noise = addressed_noise(seed=0, epoch=0, indices=[0], num_tokens=grid**2)
    sampler = TokenOrderSampler(grid, counts, sampling)
    order = TokenOrder(sampler(noise), counts)
    states = order.mask.int() + order.thrown.int()
    return states.view(grid, grid).numpy()


def plot(plt: Any, samplings: Sequence[str], throw_ratios: Sequence[float], grid: int, mask_ratio: float) -> Any:
    """Returns a figure with a row of panels for each sampling and a column for each throw ratio."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colors = ListedColormap(list(COLORS.values()))
    num_rows = len(samplings)
    num_columns = len(throw_ratios)
    figure, panels = plt.subplots(
        num_rows,
        num_columns,
        figsize=(2.2 * num_columns, 2.4 * num_rows + 0.4),
        squeeze=False,
        layout="constrained",
    )
    for sampling, row in zip(samplings, panels, strict=True):
        for throw_ratio, panel in zip(throw_ratios, row, strict=True):
            states = draw_states(sampling, grid, mask_ratio, throw_ratio)
            panel.pcolormesh(states, cmap=colors, vmin=0, vmax=2, edgecolor="gray", linewidth=0.4)
            panel.set_title(f"{sampling}, {throw_ratio:g}")
            panel.set(aspect="equal", xticks=[], yticks=[])
            panel.invert_yaxis()
    patches = []
    for name, color in COLORS.items():
        patches.append(Patch(facecolor=color, edgecolor="gray", label=name))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    return figure


def get_args_parser() -> Parser:
    parser = Parser("draw_patterns.py", description=__doc__)
    choices = [name for name in SAMPLING if name != "attention"]  # it needs the attention of a model
    parser.add_argument("--out", type=Path, required=True, help="write to this .svg, .png or .pdf")
    parser.add_argument(
        "--sampling",
        nargs="+",
        choices=choices,
        default=["random", "furthest"],
    )
    parser.add_argument(
        "--throw_ratio",
        nargs="+",
        type=float,
        default=[0.25, 0.5, 0.65],
    )
    parser.add_argument("--grid", type=int, default=14, at_least=1, help="tokens on a side")
    parser.add_argument("--mask_ratio", type=float, default=0.75)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = get_args_parser()
    args = parser.parse_args(argv)
    with user_errors(parser):
        plt = pyplot("patterns")
        prepare_file("--out", args.out, (".svg", ".png", ".pdf"))
        figure = plot(plt, args.sampling, args.throw_ratio, args.grid, args.mask_ratio)
        with replaced_file(args.out) as temporary:
            figure.savefig(temporary, dpi=110)
    print(f"sampling patterns: {args.out}")


if __name__ == "__main__":
    run_program(main, "draw_patterns.py")
