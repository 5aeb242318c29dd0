"""Attention among the visible tokens of a masked image on Swin: three ways to the same result, side by side.

    python tools/compare_window_attention.py --model greenmim_swin_base_patch4_window7 --batch_size 8

grouped   whole windows packed into groups of one size, as GreenMIM trains
one group all visible tokens together, those of other windows masked
dense     Swin's windows over the whole grid, invisible tokens masked as keys: nothing is saved

Each stage's block of attention (projections included) runs forward and backward, unshifted and shifted; each round times every
way once, in rotating order, and the median counts. Saved MB is what autograd keeps of one image, counted as the difference
between batches of four and of two. Before anything is timed the outputs must agree.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models_greenmim_pr
from models_swin import WindowGroups, cut_windows, join_windows, unit_coords
from util.costs import device_name, saved_bytes, time_in_turn
from util.run.cli import Parser, run_program, user_errors

TOLERANCE = 1e-4  # of outputs of unit size, in float32


class Ways:
    """The ways of one block, on inputs [B, T, C] of visible tokens."""

    def __init__(self, block, side, unit_grid, units, plan):
        self.block, self.attention = block, block.attn
        self.coords = unit_coords(units, unit_grid[1], side)
        self.grid = tuple(side * n for n in unit_grid)
        self.groups = WindowGroups(self.coords, block.window, block.shift, plan)
        self.one = WindowGroups(self.coords, block.window, block.shift)
        self.cells = self.coords[:, 0] * self.grid[1] + self.coords[:, 1]
        hidden = torch.ones(self.grid, device=units.device).flatten().index_fill(0, self.cells, 0.0).view(1, *self.grid, 1)
        hidden = cut_windows(hidden.roll((-block.shift, -block.shift), (1, 2)), block.window)[0, :, :, 0]
        self.mask = -100.0 * hidden.unsqueeze(1).expand(-1, hidden.shape[1], -1)  # [W, L, L]: invisible keys
        if block.attn_mask is not None:
            self.mask = self.mask + block.attn_mask

    def grouped(self, x):
        return self.attention.among_visible(x, self.groups)

    def one_group(self, x):
        return self.attention.among_visible(x, self.one)

    def dense(self, x):
        shift, window = self.block.shift, self.block.window
        grid = x.new_zeros(len(x), self.grid[0] * self.grid[1], x.shape[2]).index_copy(1, self.cells, x)
        grid = grid.unflatten(1, self.grid).roll((-shift, -shift), (1, 2))
        grid = join_windows(self.attention(cut_windows(grid, window), self.mask), window, self.grid)
        return grid.roll((shift, shift), (1, 2)).flatten(1, 2).index_select(1, self.cells)


def measure(model, batch_size, rounds, device):
    """-> rows (stage, tokens, shift, {way: (ms, saved MB)}), of the stages that are grouped."""
    _, _, ids_shuffle, *plans = model.collator("furthest", 0)([(torch.zeros(1), 0, (0, 0))])
    units, rows = ids_shuffle[0, : model.counts.num_visible].to(device), []
    plans = dict(zip(model.planner.stages, plans, strict=True))
    side = model.stride // model.patch_size
    for number, stage in enumerate(model.layers, start=1):
        for shift in stage.shifts:
            if (side, stage.window, shift) in plans:
                block = next(block for block in stage.blocks if block.shift == shift)
                ways = Ways(block, side, model.unit_grid, units, plans[side, stage.window, shift].to(device))
                rows.append((number, len(ways.coords), shift, compare(ways, batch_size, rounds, device)))
        side //= 2
    return rows


def compare(ways, batch_size, rounds, device):
    width = ways.attention.proj.in_features
    names = {"grouped": ways.grouped, "one group": ways.one_group, "dense": ways.dense}
    x = torch.randn(batch_size, len(ways.coords), width, device=device)
    with torch.no_grad():
        outputs = [way(x) for way in names.values()]
    for name, output in zip(names, outputs, strict=True):
        if not torch.allclose(output, outputs[0], rtol=TOLERANCE, atol=TOLERANCE):
            raise ValueError(f"{name} differs from grouped attention by {(output - outputs[0]).abs().max():.1e}")

    def timed(way):
        def step():
            start = time.perf_counter()
            way(x).square().sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        return step

    def saved(way):
        inputs = (torch.randn(n, len(ways.coords), width, device=device, requires_grad=True) for n in (4, 2))
        four, two = (saved_bytes(lambda x=x: way(x)) for x in inputs)
        return (four - two) / 2e6

    steps = [timed(way) for way in names.values()]
    for step in steps:
        step()  # the first call of a way is not its own
    seconds = time_in_turn(steps, rounds)
    return {name: (1e3 * s, saved(way)) for (name, way), s in zip(names.items(), seconds, strict=True)}


def main(argv: Sequence[str] | None = None) -> None:
    """The program; `argv` stands for the command line."""
    parser = Parser("compare_window_attention.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [name for name in models_greenmim_pr.__all__ if name.islower()]
    parser.add_argument("--model", default="greenmim_swin_base_patch4_window7", choices=models)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
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
        rows = measure(model, args.batch_size, args.rounds, device)
    if not rows:
        parser.error(f"no stage of {args.model} has so many visible tokens that windows are grouped")
    print(f"{args.model}, batch {args.batch_size}, {device_name(device)}, {args.rounds} rounds, torch {torch.__version__}\n")
    print("| stage | tokens | shift | way | ms | ratio | saved MB an image | ratio |\n|--:|--:|--:|---|--:|--:|--:|--:|")
    for stage, tokens, shift, ways in rows:
        full = ways["dense"]
        for name, (ms, mb) in ways.items():
            print(f"| {stage} | {tokens} | {shift} | {name} | {ms:.1f} | {ms / full[0]:.2f} | {mb:.2f} | {mb / full[1]:.2f} |")


if __name__ == "__main__":
    run_program(main, "compare_window_attention.py")
