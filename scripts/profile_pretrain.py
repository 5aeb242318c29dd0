"""Measure the cost of pre-training steps side by side: multiply-adds, memory and time.

    python scripts/profile_pretrain.py mae_vit_base_100ep prmim50_vit_base_100ep
    python scripts/profile_pretrain.py mae_vit_base_100ep timm transformers --code eager compiled --csv c.csv

A step is that of main_pretrain.py (bytes to floats, forward, backward, gradient norm, AdamW) on one
batch of random images. `timm` and `transformers` put the network of others into it, with the sizes of the
first recipe, which must be of MAE: see scripts/parts/peers.py. Compiled, theirs is one graph. All rows so far
are timed in turn whenever one is added, and then until the last one has --rounds. With --data_path follow
steps of the first row's model on batches that are loaded meanwhile, at R = 2, 1 and 4 (--repeat_aug). Columns:

gmac         multiply-adds of the forward pass of one image, in 10^9, without a frozen teacher
saved_mb     MB an image that the forward pass keeps for the backward pass, of the eager model
peak_mb      most MB that the tensors of the step hold at once, on a GPU
ms           median time of a step; ms_q1, ms_q3: its quartiles
..._ratio    the same, relative to the first recipe

`main_pretrain.py --profile STEP` traces operators and kernels of a run's steps.
"""

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import main_pretrain
from engine_pretrain import forward_backward, train_one_epoch, update
from frameworks.registry import build_model
from recipes import RECIPES
from util import costs
from util.atomic import prepare_file
from util.attention import CHOICES, prefer
from util.code_version import code_version
from util.data.datasets import AddressedDataset, StepBatchSampler
from util.data.loader import Loader
from util.data.open import open_everywhere
from util.data.pretrain_augment import make_augmentation
from util.data.repeats import with_repeats
from util.data.transforms import Normalize
from util.flag import Flag
from util.run.cli import Parser
from util.run.exits import run_program, user_errors
from util.run.processes.distributed import PRECISIONS, Process, precision
from util.run.processes.supervise import Watchdog
from util.run.start.plan import RunSchedule, make_plan
from util.run.train.logging import RunLog
from util.run.train.loop import TrainLoop
from util.run.train.step_graphs import WARM_UP
from util.run.train.wrap import choose_attention, compile_parts
from util.tables import markdown_table, write_csv

Row = dict[str, Any]
COSTS = ("gmac", "saved_mb", "peak_mb", "ms")
TITLES = ["recipe", "code", "throw_ratio", *(title for cost in COSTS for title in (cost, f"{cost}_ratio"))]
TITLES += ["images_per_second"]
COLUMNS = ["recipe", "model", "throw_ratio", "parameters", *COSTS, "images_per_second"]
COLUMNS += [*(f"{cost}_ratio" for cost in COSTS), "batch_size", "rounds", "device", "precision", "torch"]
COLUMNS += ["attention", "code", "cuda_graph", "steps", "ms_q1", "ms_q3", "commit"]
PEERS = ("timm", "transformers")
REPEATS = (2, 1, 4)  # crops of an image that is decoded, the first is wanted most
NEVER = 2**62  # steps: no report falls into a measurement


class Step:
    """The training step of one recipe, as main_pretrain.py runs it, on one batch.

    peer: of PEERS, whose network takes the place of the recipe's; or another word.
    """

    def __init__(
        self, settings: dict[str, Any], args: argparse.Namespace, device: torch.device, peer: str = ""
    ) -> None:
        with device:  # draws the weights there
            model: Any = build_model(settings, read_files=False).to(device)
        imgs, orders = costs.make_batch(model, settings, args.batch_size)
        self.imgs = imgs.to(device)
        self.orders = [order.to(device) for order in orders]
        if peer in PEERS:
            from scripts.parts import peers  # which needs Transformers

            model = peers.PEERS[peer](model).to(device)
        self.model = model.train()
        self.process = Process(device)
        self.normalize = Normalize().to(device)
        self.precision = precision(args.precision, device)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        run: Any = argparse.Namespace(  # what a loop reads of a Run
            args=argparse.Namespace(clip_grad=None, seed=0, print_freq=NEVER, max_steps=None),
            plan=argparse.Namespace(
                precision=args.precision,
                total_batch_size=args.batch_size,
                accum_iter=1,
                num_workers=0,
                device=args.device,
            ),
            process=self.process,
            first_step=0,
            watchdog=Watchdog(3600, 3600),
        )
        schedule = RunSchedule(NEVER, NEVER, NEVER, lambda step, lr_scale: 1e-4, summary="", pauses=(), epochs=1)
        log = RunLog("", 0, 0, enabled=False)
        self.loop = TrainLoop(run, self.model, optimizer, schedule, self.normalize, log, state={})
        self.train_steps: Callable[..., None] = train_one_epoch
        if args.cuda_graph:
            graphs = self.loop.capture_steps(forward_backward, update)
            self.train_steps = partial(train_one_epoch, forward_backward=graphs.forward_backward, update=graphs.update)

    def __call__(self) -> None:
        """Runs one training step."""
        labels = self.orders[0]  # no model reads labels
        self.train(iter([(self.imgs, labels, *self.orders)]), 1)

    def train(self, batches: Iterator[Any], num_steps: int) -> None:
        """Runs training steps on batches of `MaskCollator`."""
        self.train_steps(self.model, batches, range(num_steps), self.loop)

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


def measure(
    name: str, settings: dict[str, Any], code: str, args: argparse.Namespace, device: torch.device
) -> tuple[Row, Step]:
    """Measures all but the time of one row. Returns (the row, its step, which has run).

    name: of the recipe with these settings, or one of PEERS. code: eager or compiled.
    """
    row: Row = {**dict.fromkeys(COLUMNS), "recipe": name, "code": code}
    for key in ("model", "throw_ratio"):
        row[key] = settings[key]
    for key in ("batch_size", "attention", "cuda_graph", "steps"):
        row[key] = getattr(args, key)
    row["commit"] = code_version()
    row["device"] = costs.device_name(device)
    row["torch"] = torch.__version__
    if name not in PEERS:
        row["gmac"] = costs.forward_gmac(settings, build_model)[0]
    gc.collect()
    held_by_others = 0
    if device.type == "cuda":
        held_by_others = torch.cuda.memory_allocated()
    step = Step(settings, args, device, name)
    row["precision"] = step.precision.name
    choose_attention(step.model, args.attention, step.precision.name, device, print)
    row["parameters"] = sum(p.numel() for p in step.model.parameters() if p.requires_grad) / 1e6
    row["saved_mb"] = (step.saved_bytes(4) - step.saved_bytes(2)) / 2e6  # without the weights, saved once
    if code == "compiled" and name in PEERS:
        step.model.compile(dynamic=False)
    elif code == "compiled":
        compile_parts(step.model)
    for _ in range(WARM_UP - 1):  # makes the optimizer's state, and chooses kernels
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        row["peak_mb"] = (torch.cuda.max_memory_allocated() - held_by_others) / 1e6
    if args.cuda_graph:
        step()  # captures
    return row, step


def seconds_from(data_path: str, repeats: int, recipe: str, step: Step, args: argparse.Namespace) -> float:
    """Trains on images with all cores, while no batches wait from before. Returns the seconds of a step."""
    size = str(args.batch_size)
    words = ["--recipe", recipe, "--device", args.device, "--batch_size", size, "--total_batch_size", size]
    _, flags = main_pretrain.parse_args([*words, "--data_path", data_path, "--repeat_aug", str(repeats)])
    dataset = AddressedDataset(open_everywhere(flags, "train"), make_augmentation(flags, step.model.img_size))
    plan = make_plan(flags, step.process)
    sampler = StepBatchSampler(len(dataset), plan.batch_size, 1, 0, 1, flags.seed)
    sampler = with_repeats(sampler, repeats, range(flags.epochs))
    first_steps = args.data_steps // 8  # in which the workers start
    loader = Loader(
        dataset,
        sampler.batches(range(first_steps + args.data_steps)),
        step.model.collator(flags.sampling, flags.seed),
        num_workers=plan.num_workers,
        for_gpu=plan.device == "cuda",
    )
    with closing(loader) as batches:
        step.train(batches, first_steps)
        train = partial(step.train, batches, args.data_steps)
        return seconds_of(train, step.process.device) / args.data_steps


def seconds_of(work: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Times `calls` calls of `work` between two host-device syncs, as in training, and returns the seconds of one."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_round(steps: Sequence[Callable[[], object]], device: torch.device, first: int, calls: int = 1) -> list[float]:
    """Times `calls` calls of every step, and returns the seconds of one in the order of `steps`.

    Another step is `first` in each round, because the memory that one step leaves behind can slow down the next one.
    """
    seconds = [0.0] * len(steps)
    for j in range(len(steps)):
        k = (first + j) % len(steps)
        seconds[k] = seconds_of(steps[k], device, calls)
    return seconds


def add_times(rows: Sequence[Row], times: Sequence[Sequence[float]]) -> None:
    """Adds what follows from the seconds of each row's steps, and the ratios to the first row."""
    for row, seconds in zip(rows, times, strict=True):
        q1, median, q3 = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
        row |= {"ms_q1": 1e3 * q1, "ms": 1e3 * median, "ms_q3": 1e3 * q3}
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
        cells = []
        for title in titles:
            cell = row[title]
            if cell is None:  # the multiply-adds of a peer
                cell = ""
            elif isinstance(cell, float):
                cell = f"{cell:.4g}"
            cells.append(cell)
        lines.append(cells)
    return markdown_table(titles, lines)


FLAGS = (
    Flag(
        "recipes",
        help="names from recipes.py; after one of MAE also timm, transformers",
        positional=True,
        nargs="+",
        metavar="RECIPE",
    ),
    Flag("batch_size", int, 8, "images per step", at_least=1),
    Flag("rounds", int, 7, "number of times that every step is timed, at least", at_least=1),
    Flag("steps", int, 1, "steps that are timed together, without a wait between them", at_least=1),
    Flag("device", str, "cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")),
    Flag("precision", str, "auto", "auto: bf16 or fp16 on a GPU, else fp32", choices=("auto", *PRECISIONS)),
    Flag("attention", str, "auto", "preferred kernel", choices=CHOICES),
    Flag("code", str, ["eager"], "how the steps that are timed run", choices=("eager", "compiled"), nargs="+"),
    Flag("cuda_graph", bool, False, "launch the steps that are timed as CUDA graphs"),
    Flag("data_path", str, [], "also train the first row's model from these folders of images", nargs="*"),
    Flag("data_steps", int, 400, "steps that are timed for each --data_path", at_least=8),
    Flag("csv", Path, help="write unrounded numbers to this file, after each recipe and round"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; `argv` replaces the command line."""
    parser = Parser("profile_pretrain.py", __doc__, *FLAGS)
    args = parser.parse_args(argv)
    parser.check_choice("recipe", args.recipes[0], RECIPES)
    for name in args.recipes:
        parser.check_choice("recipe", name, [*RECIPES, *PEERS])
    with user_errors(parser):
        if args.device != "cuda" and args.cuda_graph:
            raise ValueError("--cuda_graph needs a GPU")
        prepare_file("--csv", args.csv)
    device = torch.device(args.device)
    prefer(args.attention, device)
    torch.backends.cudnn.benchmark = True  # as in main_pretrain.py
    rows: list[Row] = []
    steps: list[Step] = []
    times: list[list[float]] = []

    def time_rows() -> None:
        for seconds, one in zip(times, time_round(steps, device, len(times[0]), args.steps), strict=True):
            seconds.append(one)
        write_rows()

    def write_rows() -> None:
        add_times(rows, times)
        if args.csv is not None:
            write_csv(args.csv, COLUMNS, rows)

    for code, name in itertools.product(args.code, args.recipes):
        begin = time.perf_counter()
        words = ["--recipe", name]
        if name in PEERS:
            words = ["--recipe", args.recipes[0], "--throw_ratio", "0"]
        _, flags = main_pretrain.parse_args(words)
        row, step = measure(name, vars(flags), code, args, device)
        print(f"{name}, {code}: first steps after {time.perf_counter() - begin:.0f} s", flush=True)
        rows.append(row)
        steps.append(step)
        times.append([])
        time_rows()  # if the next row takes too long, those so far are measured
    for _ in range(args.rounds - 1):
        time_rows()
    for repeats, data_path in itertools.product(REPEATS, args.data_path):
        seconds = seconds_from(data_path, repeats, args.recipes[0], steps[0], args)
        recipe = f"{args.recipes[0]}, R = {repeats}, from {data_path}"
        rows.append({**rows[0], "recipe": recipe, "steps": args.data_steps})
        times.append([seconds])
        write_rows()
        print(f"{recipe}: {1e3 * seconds:.1f} ms", flush=True)
    print(f"\n{markdown(rows)}")


if __name__ == "__main__":
    run_program(main, "profile_pretrain.py")
