"""Where does the price of throwing come from? Variants of PR-MIM, beside the registered study and not part of it.

    python tools/throwing_exploration.py --data_path CIFAR10 --csv docs/study_exploration.csv --output_dir output/more

A run is that of tools/length_study.py at four passes. Only what the variant changes is replaced, in this process.
"""

# mypy: ignore-errors

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import prmim
from models_mae_pr import MaskedAutoencoderViT
from prmim import MaskCollator, SpatialAggregation, TokenCounts, TokenOrder
from tools import length_study
from tools.length_study import Run, append_row, read_rows
from util.run.cli import Parser

PASSES = 4
STEPS = PASSES * 1562  # optimizer steps of a run
VARIANTS = (
    "weight.5",  # the loss of a thrown token counts half as much as that of a retained one
    "weight.25",
    "weight.1",
    "detached",  # the loss of thrown tokens trains the aggregation and the head, not the blocks and the encoder
    "variance",  # the masked tokens whose pixels vary most are retained
    "then_plain",  # PR-MIM for the first half of the schedule, then plain partial reconstruction
    "then_mae",  # PR-MIM for the first half of the schedule, then MAE
)
BASELINES = ("mae", "plain50", "prmim50")


def weigh_thrown(weight: float) -> None:
    """Let a thrown token count `weight` times as much as a retained one in the mean of the loss."""

    def forward(model: MaskedAutoencoderViT, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> dict[str, torch.Tensor]:
        order = TokenOrder(ids_shuffle, model.counts)
        pred = model.decoder(model.forward_encoder(model.patchify(imgs), order), order)
        losses = model.error(pred, imgs, order).square().mean(dim=(0, 2))  # [num_masked], the retained ones first
        weights = torch.ones_like(losses)
        weights[model.counts.num_retained :] = weight
        return {"pixel": (weights * losses).sum() / weights.sum()}

    MaskedAutoencoderViT.forward = forward


def detach_aggregation() -> None:
    """Stop the gradient between the aggregation and the blocks."""

    def forward(self: SpatialAggregation, x: torch.Tensor, order: TokenOrder, grid_size: tuple) -> torch.Tensor:
        grid = order.restore(x.detach()).unflatten(1, grid_size)
        grid = self.operator(grid).flatten(1, 2)
        return torch.cat([x, order.take(grid, order.ids_thrown)], dim=1)

    SpatialAggregation.forward = forward


def retain_by_variance() -> None:
    """Retain the masked tokens with the largest variance of their pixels, computed by the collator."""

    def pick(coords: np.ndarray, num_retained: int, weights: np.ndarray, noise: np.ndarray) -> np.ndarray:
        return np.argsort(-weights, axis=1, kind="stable")[:, :num_retained]

    def collate(collator: MaskCollator, samples: Sequence[tuple]) -> tuple[torch.Tensor, ...]:
        rows, columns = collator.sampler.grid_size
        images = torch.stack([torch.as_tensor(sample[0]) for sample in samples]).float()
        batch, channels, height, width = images.shape
        cells = images.view(batch, channels, rows, height // rows, columns, width // columns)
        variances = cells.permute(0, 2, 4, 1, 3, 5).flatten(3).var(dim=3).flatten(1)  # [B, N], over the pixels
        collator.token_weights = lambda: variances.numpy()
        return original(collator, samples)

    original = MaskCollator.__call__
    MaskCollator.__call__ = collate
    prmim.SAMPLING["furthest"] = pick


def change_after_half(retains_all: bool) -> None:
    """After half of the schedule, leave thrown tokens unsupervised, or throw none."""
    progressive = MaskedAutoencoderViT.forward
    num_calls = 0

    def forward(model: MaskedAutoencoderViT, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal num_calls
        num_calls += model.training
        if num_calls <= STEPS // 2:
            return progressive(model, imgs, ids_shuffle)
        counts = model.counts
        if retains_all:
            counts = TokenCounts(counts.num_visible, counts.num_masked, 0)
        order = TokenOrder(ids_shuffle, counts)
        decoded = model.decoder.decode(model.forward_encoder(model.patchify(imgs), order), order)
        pred = model.decoder.predict(decoded[:, counts.num_visible :])
        # The parameters of the aggregation get a gradient of zero.
        unused = sum(0 * parameter.sum() for parameter in model.decoder.aggregation.parameters())
        return {"pixel": model.error(pred, imgs, order).square().mean() + unused}

    MaskedAutoencoderViT.forward = forward


def apply(variant: str) -> None:
    """Replace what the variant changes."""
    if variant.startswith("weight"):
        weigh_thrown(float(variant.removeprefix("weight")))
    elif variant == "detached":
        detach_aggregation()
    elif variant == "variance":
        retain_by_variance()
    elif variant.startswith("then_"):
        change_after_half(retains_all=variant == "then_mae")


def start(run: Run, args: argparse.Namespace) -> length_study.Row | None:
    """Do a run in a process of its own. Returns None if it has failed."""
    folder = Path(args.output_dir).resolve() / run.name
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--data_path", str(Path(args.data_path).resolve()), "--csv", args.csv]
    command += ["--output_dir", str(folder), "--one", run.arm, "--seeds", str(run.seed)]
    with open(folder / "log.txt", "w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        print(f"{run.name} has failed with exit code {code}: {folder / 'log.txt'}", flush=True)
        return None
    return length_study.Row(**json.loads((folder / "row.json").read_text()))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    parser = Parser("throwing_exploration.py", description=__doc__)
    parser.add_argument("--data_path", required=True, help="folder with train/ and val/")
    parser.add_argument("--csv", required=True, help="file of the rows; the runs in it are not repeated")
    parser.add_argument("--output_dir", required=True, help="folder of the runs")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS + BASELINES, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[900, 901])
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, each with one thread")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the variant that this process runs
    args = parser.parse_args(argv)
    for variant in VARIANTS:
        length_study.ARMS[variant] = length_study.ARMS["prmim50"]
        length_study.RATES[variant] = length_study.RATES["prmim50"]
    if args.one:
        apply(args.one)
        run = Run(args.one, PASSES, args.seeds[0], length_study.RATES[args.one])
        row = length_study.work(run, ["frozen", "finetuned"], Path(args.data_path), Path(args.output_dir))
        if row is None:
            sys.exit(75)
        (Path(args.output_dir) / "row.json").write_text(json.dumps(vars(row)))
        return
    done = set(read_rows(Path(args.csv)))
    runs = []
    for seed in args.seeds:
        for variant in args.variants:
            run = Run(variant, PASSES, seed, length_study.RATES[variant])
            if run not in done:
                runs.append(run)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(start, run, args) for run in runs]
        for future in as_completed(futures):
            row = future.result()
            if row is not None:
                append_row(Path(args.csv), row)
                print(row, flush=True)


if __name__ == "__main__":
    main()
