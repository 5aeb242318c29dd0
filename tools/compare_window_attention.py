"""Compare three equivalent ways to compute Swin's attention among the visible tokens of a masked image.

    python tools/compare_window_attention.py --model greenmim_swin_base_patch4_window7 --batch_size 8

grouped     whole windows are packed into groups of one size, as in GreenMIM's training
one group   all visible tokens form one group; a mask separates the windows
dense       Swin's windows over the whole grid; invisible tokens are masked as keys, so nothing is saved

The attention of one block per stage (projections included) runs forward and backward, unshifted and shifted. Each round
times every way once, in rotating order; times are medians. Saved MB is what autograd saves per image, measured as the
difference between batches of 4 and 2. The outputs are compared before anything is timed.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from encoders.models_swin import cut_windows, join_windows
from encoders.window_groups import GroupPlanner, WindowGroups, unit_coords
from frameworks import models_greenmim_pr
from frameworks.models_greenmim_pr import GreenMIMSwin
from util.costs import device_name, saved_bytes, time_in_turn
from util.run.cli import Parser, run_program, user_errors
from util.tables import markdown_table

TOLERANCE = 1e-4  # of outputs of unit size, in float32

Costs = dict[str, tuple[float, float]]  # {way: (ms, saved MB per image)}


class Ways:
    """The three ways for the attention of one block. They map visible tokens [B, T, C] to [B, T, C]."""

    def __init__(
        self, block: torch.nn.Module, side: int, unit_grid: tuple[int, int], units: torch.Tensor, plan: torch.Tensor
    ) -> None:
        self.block, self.attention = block, block.attn
        self.coords = unit_coords(units, unit_grid[1], side)
        self.grid = side * unit_grid[0], side * unit_grid[1]
        self.groups = WindowGroups(self.coords, block.window, block.shift, plan)
        self.one = WindowGroups(self.coords, block.window, block.shift)
        self.cells = self.coords[:, 0] * self.grid[1] + self.coords[:, 1]
        hidden = torch.ones(self.grid, device=units.device).flatten().index_fill(0, self.cells, 0.0)
        hidden = hidden.view(1, *self.grid, 1).roll((-block.shift, -block.shift), (1, 2))
        hidden = cut_windows(hidden, block.window)[0, :, :, 0]
        self.mask = -100.0 * hidden.unsqueeze(1).expand(-1, hidden.shape[1], -1)  # [W, L, L]: invisible keys
        if block.attn_mask is not None:
            self.mask = self.mask + block.attn_mask

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention.among_visible(x, self.groups)

    def one_group(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention.among_visible(x, self.one)

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        shift, window = self.block.shift, self.block.window
        grid = x.new_zeros(len(x), self.grid[0] * self.grid[1], x.shape[2]).index_copy(1, self.cells, x)
        grid = grid.unflatten(1, self.grid).roll((-shift, -shift), (1, 2))
        grid = join_windows(self.attention(cut_windows(grid, window), self.mask), window, self.grid)
        return grid.roll((shift, shift), (1, 2)).flatten(1, 2).index_select(1, self.cells)


def measure(
    model: GreenMIMSwin, batch_size: int, rounds: int, device: torch.device
) -> list[tuple[int, int, int, Costs]]:
    """Return a row (stage, visible tokens, shift, costs) for each kind of block whose windows are grouped."""
    _, _, ids_shuffle, *plans = model.collator("furthest", 0)([(torch.zeros(1), 0, (0, 0))])
    units = ids_shuffle[0, : model.counts.num_visible].to(device)
    assert isinstance(model.planner, GroupPlanner)
    plan_of = dict(zip(model.planner.stages, plans, strict=True))
    side, rows = model.stride // model.patch_size, []
    for number, stage in enumerate(model.layers, start=1):
        for shift in stage.shifts:
            if (side, stage.window, shift) in plan_of:
                block = next(block for block in stage.blocks if block.shift == shift)
                ways = Ways(block, side, model.unit_grid, units, plan_of[side, stage.window, shift].to(device))
                rows.append((number, len(ways.coords), shift, compare(ways, batch_size, rounds, device)))
        side //= 2
    return rows


def compare(ways: Ways, batch_size: int, rounds: int, device: torch.device) -> Costs:
    """Time the ways on random tokens; ValueError if their outputs differ."""
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]]
    functions = {"grouped": ways.grouped, "one group": ways.one_group, "dense": ways.dense}
    num_tokens, width = len(ways.coords), ways.attention.proj.in_features
    x = torch.randn(batch_size, num_tokens, width, device=device)
    with torch.no_grad():
        outputs = {name: way(x) for name, way in functions.items()}
    for name, output in outputs.items():
        if not torch.allclose(output, outputs["grouped"], rtol=TOLERANCE, atol=TOLERANCE):
            difference = (output - outputs["grouped"]).abs().max()
            raise ValueError(f"{name} differs from grouped attention by {difference:.1e}, more than {TOLERANCE}")

    def saved_mb(way: Callable[[torch.Tensor], torch.Tensor]) -> float:
        inputs = (torch.randn(n, num_tokens, width, device=device, requires_grad=True) for n in (4, 2))
        four, two = (saved_bytes(partial(way, tokens)) for tokens in inputs)
        return (four - two) / 2e6

    def run(way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        way(x).square().sum().backward()

    steps = [partial(run, way) for way in functions.values()]
    for step in steps:
        step()  # warm-up
    seconds = time_in_turn(steps, device, rounds)
    return {name: (1e3 * s, saved_mb(way)) for (name, way), s in zip(functions.items(), seconds, strict=True)}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    parser = Parser("compare_window_attention.py", description=__doc__)
    models = [name for name in models_greenmim_pr.__all__ if name.islower()]
    parser.add_argument("--model", default="greenmim_swin_base_patch4_window7", choices=models)
    parser.add_argument("--batch_size", type=int, default=8, help="images per call")
    parser.add_argument("--rounds", type=int, default=7, help="number of times that every way is timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    args = parser.parse_args(argv)
    if min(args.batch_size, args.rounds) < 1:
        parser.error(f"--batch_size and --rounds must be at least 1, got {args.batch_size} and {args.rounds}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but there is no CUDA device")
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = getattr(models_greenmim_pr, args.model)().to(device)
    with user_errors(parser):
        measured = measure(model, args.batch_size, args.rounds, device)
    if not measured:
        parser.error(f"{args.model} has no stage with enough visible tokens for groups of windows")
    how = (
        f"{args.model}, batch {args.batch_size}, {device_name(device)}, {args.rounds} rounds, torch {torch.__version__}"
    )
    rows = []
    for stage, tokens, shift, costs in measured:
        full_ms, full_mb = costs["dense"]
        for way, (ms, mb) in costs.items():
            numbers = (f"{ms:.1f}", f"{ms / full_ms:.2f}", f"{mb:.2f}", f"{mb / full_mb:.2f}")
            rows.append([stage, tokens, shift, way, *numbers])
    titles = ["stage", "tokens", "shift", "way", "ms", "ratio", "saved MB an image", "ratio"]
    print(f"{how}\n\n{markdown_table(titles, rows, left=4)}")


if __name__ == "__main__":
    run_program(main, "compare_window_attention.py")
