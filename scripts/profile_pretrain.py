"""Measure the cost of pre-training steps side by side: multiply-adds, memory and time.

    python scripts/profile_pretrain.py mae_vit_base_100ep prmim50_vit_base_100ep
    python scripts/profile_pretrain.py mae_vit_base_100ep prmim50_vit_base_100ep --compile --batch_size 512 --csv c.csv

A step is that of main_pretrain.py (bytes to floats, forward, backward, gradient norm, AdamW) on one
batch of random images. After its first steps each recipe is timed once, then all in turn. Columns:

gmac         multiply-adds of the forward pass of one image, in 10^9, without a frozen teacher
saved_mb     MB an image that the forward pass keeps for the backward pass, of the eager model
peak_mb      most MB that the tensors of the step hold at once, on a GPU
ms           median time of a step
..._ratio    the same, relative to the first recipe

`main_pretrain.py --profile STEP` traces operators and kernels of a run's steps.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import main_pretrain
from engine_pretrain import forward_backward, train_one_epoch
from frameworks.registry import build_model
from recipes import RECIPES
from util import costs
from util.attention import CHOICES, prefer
from util.data.transforms import Normalize
from util.run.cli import Parser, prepare_file, run_program, user_errors
from util.run.processes.distributed import PRECISIONS, Process, precision
from util.run.processes.supervise import Watchdog
from util.run.start.plan import RunSchedule
from util.run.train.logging import RunLog
from util.run.train.loop import TrainLoop
from util.run.train.step_graphs import WARM_UP
from util.run.train.wrap import choose_attention, compile_parts
from util.tables import markdown_table, write_csv

Row = dict[str, Any]
COSTS = ("gmac", "saved_mb", "peak_mb", "ms")
TITLES = ["recipe", "throw_ratio", *(title for cost in COSTS for title in (cost, f"{cost}_ratio")), "images_per_second"]
COLUMNS = ["recipe", "model", "throw_ratio", "parameters", *COSTS, "images_per_second"]
COLUMNS += [*(f"{cost}_ratio" for cost in COSTS), "batch_size", "rounds", "device", "precision", "torch"]
COLUMNS += ["attention", "compile", "cuda_graph", "steps"]
NEVER = 2**62  # steps: no report falls into a measurement


class Step:
    """The training step of one recipe, as main_pretrain.py runs it, on one batch."""

    def __init__(self, settings: dict[str, Any], args: argparse.Namespace, device: torch.device) -> None:
        with device:  # draws the weights there
            self.model = build_model(settings, read_files=False).to(device).train()
        self.normalize = Normalize().to(device)
        self.precision = precision(args.precision, device)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        run: Any = argparse.Namespace(  # what a loop reads of a Run
            args=argparse.Namespace(clip_grad=None, seed=0, print_freq=NEVER, max_steps=None),
            plan=argparse.Namespace(precision=args.precision, total_batch_size=args.batch_size, accum_iter=1),
            process=Process(device),
            watchdog=Watchdog(3600, 3600),
        )
        schedule = RunSchedule(NEVER, NEVER, NEVER, lambda step, lr_scale: 1e-4, summary="", pauses=(), epochs=1)
        log = RunLog("", 0, 0, enabled=False)
        self.loop = TrainLoop(run, schedule, self.model, optimizer, self.normalize, log)
        self.compute: Callable[..., None] = forward_backward
        if args.cuda_graph:
            self.compute = self.loop.capture_steps(forward_backward)
        imgs, orders = costs.make_batch(self.model, settings, args.batch_size)
        self.imgs = imgs.to(device)
        self.orders = [order.to(device) for order in orders]

    def __call__(self) -> None:
        """Runs one training step."""
        labels = self.orders[0]  # no model reads labels
        batch = (self.imgs, labels, *self.orders)
        train_one_epoch(self.model, iter([batch]), range(1), self.loop, self.compute)

    def saved_bytes(self, num_images: int) -> int:
        """Bytes that autograd saves for a batch of copies of the first image. The model must not be compiled."""
        ids_shuffle, *others = self.orders
        imgs = self.imgs[:1].repeat(num_images, 1, 1, 1)
        ids_shuffle = ids_shuffle[:1].repeat(num_images, 1)

        def forward() -> torch.Tensor:
            with self.precision.autocast():
                losses = self.model(self.normalize(imgs), ids_shuffle, *others)
                return sum(losses.values())

        return costs.saved_bytes(forward)


def measure(settings: dict[str, Any], args: argparse.Namespace, device: torch.device) -> tuple[Row, Step]:
    """Measures all but the time of one recipe. Returns (its row, its step, which has run)."""
    row: Row = {name: settings[name] for name in ("recipe", "model", "throw_ratio")}
    for name in ("batch_size", "attention", "compile", "cuda_graph", "steps"):
        row[name] = getattr(args, name)
    row["device"] = costs.device_name(device)
    row["torch"] = torch.__version__
    row["gmac"] = costs.forward_gmac(settings, build_model)[0]
    gc.collect()
    held_by_others = 0
    if device.type == "cuda":
        held_by_others = torch.cuda.memory_allocated()
    step = Step(settings, args, device)
    row["precision"] = step.precision.name
    choose_attention(step.model, args.attention, step.precision.name, device, print)
    row["parameters"] = sum(p.numel() for p in step.model.parameters() if p.requires_grad) / 1e6
    row["saved_mb"] = (step.saved_bytes(4) - step.saved_bytes(2)) / 2e6  # without the weights, saved once
    if args.compile:
        compile_parts(step.model)
    for _ in range(WARM_UP - 1):  # makes the optimizer's state, and chooses kernels
        step()
    row["peak_mb"] = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        row["peak_mb"] = (torch.cuda.max_memory_allocated() - held_by_others) / 1e6
    if args.cuda_graph:
        step()  # captures
    return row, step


def add_times(rows: Sequence[Row], times: Sequence[Sequence[float]]) -> None:
    """Adds what follows from the seconds of each row's steps, and the ratios to the first row."""
    for row, seconds in zip(rows, times, strict=True):
        median = statistics.median(seconds)
        row["ms"] = 1e3 * median
        row["images_per_second"] = row["batch_size"] / median
        row["rounds"] = len(seconds)
        for cost in COSTS:
            row[f"{cost}_ratio"] = None
            if row[cost] is not None and rows[0][cost] is not None:
                row[f"{cost}_ratio"] = row[cost] / rows[0][cost]


def markdown(rows: Sequence[Row]) -> str:
    """Returns a table of the costs, without those that were not measured."""
    titles = [title for title in TITLES if rows[0][title] is not None]
    lines = []
    for row in rows:
        cells = [row[title] for title in titles]
        lines.append([f"{cell:.4g}" if isinstance(cell, float) else cell for cell in cells])
    return markdown_table(titles, lines)


def write_rows(rows: Sequence[Row], times: Sequence[Sequence[float]], path: Path | None) -> None:
    """Adds the times so far to the rows, and writes the CSV file if there is a path."""
    add_times(rows, times)
    if path is not None:
        write_csv(path, COLUMNS, rows)


def get_parser() -> Parser:
    parser = Parser("profile_pretrain.py", description=__doc__)
    flag = parser.add_argument
    flag("recipes", nargs="+", metavar="RECIPE", help="names from recipes.py")
    flag("--batch_size", type=int, default=8, at_least=1, help="images per step")
    flag("--rounds", type=int, default=7, at_least=1, help="number of times that every step is timed")
    flag("--steps", type=int, default=1, at_least=1, help="steps that are timed together, without a wait between them")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    flag("--precision", default="auto", choices=("auto", *PRECISIONS), help="auto: bf16 or fp16 on a GPU, else fp32")
    flag("--attention", default="auto", choices=CHOICES, help="preferred kernel")
    flag("--compile", action=argparse.BooleanOptionalAction, default=False, help="compile the steps that are timed")
    flag(
        "--cuda_graph",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="launch the steps that are timed as CUDA graphs",
    )
    flag("--csv", type=Path, help="write unrounded numbers to this file, after each recipe and round")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; `argv` replaces the command line."""
    parser = get_parser()
    args = parser.parse_args(argv)
    for name in args.recipes:
        parser.check_choice("recipe", name, RECIPES)
    with user_errors(parser):
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda, but there is no CUDA device")
        if args.device != "cuda" and args.cuda_graph:
            raise ValueError("--cuda_graph needs a GPU")
        prepare_file("--csv", args.csv)
    device = torch.device(args.device)
    prefer(args.attention, device)
    torch.backends.cudnn.benchmark = True  # as in main_pretrain.py
    rows: list[Row] = []
    steps: list[Step] = []
    times: list[list[float]] = []
    try:
        for name in args.recipes:
            print(f"{name}: counts and first steps", flush=True)
            _, flags = main_pretrain.parse_args(["--recipe", name])
            row, step = measure(vars(flags), args, device)
            rows.append(row)
            steps.append(step)
            times.append([costs.seconds_of(step, device, args.steps)])
            write_rows(rows, times, args.csv)  # if the next recipe takes too long, this one has a row
        for i in range(args.rounds - 1):
            for seconds, time in zip(times, costs.time_round(steps, device, i, args.steps), strict=True):
                seconds.append(time)
            write_rows(rows, times, args.csv)
    except torch.cuda.OutOfMemoryError:
        parser.error(
            f"the GPU has too little memory for --batch_size {args.batch_size} and {len(args.recipes)} recipes, which "
            "are timed side by side: give fewer of either"
        )
    print(f"\n{markdown(rows)}")


if __name__ == "__main__":
    run_program(main, "profile_pretrain.py")
