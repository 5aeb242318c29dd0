"""Profile the training step of recipes side by side: compute, memory and time, with the paper's figures.

    python scripts/profile_pretrain.py mae_vit_base_100ep prmim50_vit_base_100ep --batch_size 8
    python scripts/profile_pretrain.py --table ablation --batch_size 256 --csv cost.csv --markdown cost.md
    python scripts/profile_pretrain.py cifar10_mae cifar10 --data_path data/cifar10 --batch_size 128
    python scripts/profile_pretrain.py --table ablation --against reference --plot cost.svg
    python scripts/profile_pretrain.py mae_vit_base_800ep --predict H200 --gpus 8  # needs no GPU

parameters   trained parameters, in 10^6
GMAC         multiply-adds of the forward pass of one image, counted by torch, without TEC's frozen teacher
saved MB     memory that autograd saves for the backward pass of one image, in 10^6 bytes. Every storage counts once.
             Measured as the difference between batches of 4 and 2, so weights do not count
peak MB      peak memory of the tensors of the first timed step, without those of the other recipes. CUDA only
ms a step    median over the rounds. Each round times every recipe once, in rotating order
x reference  speed relative to MAE's step as the reference computes it (scripts/parts/reference_mae.py), with --against

A step is a training step of main_pretrain.py: bytes to floats, forward, backward, gradient norm, AdamW, running sums
for the log. Its batch stays on the device, so data loading is not measured. Ratios are relative to the recipe of the
same model that throws nothing, or to the first recipe if that one is missing. The paper's figure follows a slash.
The files are written anew after every recipe and every round, so a run that is cut leaves the rounds so far.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_pretrain import train_one_epoch
from main_pretrain import build_model, get_args_parser
from recipes import RECIPES
from scripts.parts import predict
from scripts.parts.paper_tables import published_costs
from scripts.parts.reference_mae import SIZES, ReferenceMAE
from util import costs
from util.attention import KERNELS, prefer
from util.data.datasets import open_images
from util.data.transforms import Normalize
from util.plots import pyplot
from util.run.cli import Parser, check_recipe, parse_with_recipe, prepare_file, run_program, user_errors
from util.run.distributed import PRECISIONS, precision
from util.run.logging import RunLog
from util.run.loop import TrainLoop
from util.tables import markdown_table, write_csv

Settings = dict[str, Any]
Row = dict[str, Any]


def _base(*arms: str) -> list[str]:
    return [f"{arm}_vit_base_100ep" for arm in ("mae", *arms)]


TABLES = {
    "ablation": _base("plain25", "prmim25", "plain50", "prmim50", "plain65", "prmim65"),
    "large": [f"{arm}_vit_large_100ep" for arm in ("mae", "plain50", "prmim50")],
    "kernels": _base("kernel3", "kernel5", "prmim50", "kernel9", "kernel11"),
    "frameworks": [f"mff_{arm}vit_base_800ep" for arm in ("", "plain50_", "prmim50_")]
    + [f"simmim_{arm}vit_base_100ep" for arm in ("", "plain30_", "prmim30_", "prmim50_")],
    "targets": [f"localmim_{arm}vit_base_100ep" for arm in ("", "plain65_", "prmim65_")]
    + [f"tec_{arm}vit_base_300ep" for arm in ("", "plain50_", "prmim50_")],
    "swin": [f"greenmim_{arm}swin_{size}_100ep" for size in ("base", "large") for arm in ("", "plain50_", "prmim50_")],
    "designs": _base("prmim50", "avgpool", "transformer", "convnext"),
}
REFERENCE = "reference"
COSTS = ("gmac", "saved_mb", "peak_mb", "ms")
MEASURES = {"gmac": "flops", "saved_mb": "memory", "peak_mb": "memory", "ms": "time"}  # of the paper's tables
COLUMNS = ["recipe", "model", "throw_ratio", "parameters", *COSTS, "images_per_second"]
COLUMNS += [*(f"{cost}_ratio" for cost in COSTS), "times_reference"]
COLUMNS += [f"paper_{measure}_ratio" for measure in ("flops", "memory", "time")]
COLUMNS += ["batch_size", "rounds", "device", "precision", "torch", "attention", "compile"]

NEVER = 2**62  # steps: no report falls into a measurement


class Step:
    """The training step of one recipe, as main_pretrain.py runs it, on one batch."""

    def __init__(self, settings: Settings, args: argparse.Namespace, device: torch.device, images: Any) -> None:
        self.device, self.compile = device, args.compile
        with device:  # draws the weights there
            self.model = build_model(settings).to(device).train()
        self.normalize = Normalize().to(device)
        resolved = precision(args.precision, device)
        self.precision, self.autocast = resolved.name, resolved.autocast
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.loop = TrainLoop(
            parameters=[p for p in self.model.parameters() if p.requires_grad],
            optimizer=self.optimizer,
            precision=resolved,
            normalize=self.normalize,
            learning_rate=lambda step, lr_scale: 1e-4,
            log=RunLog("", 0, 0, enabled=False),
            images_per_step=args.batch_size,
            steps_per_epoch=NEVER,
            last_step=NEVER,
            print_freq=NEVER,
        )
        imgs, orders = costs.make_batch(self.model, settings, args.batch_size, images)
        self.imgs, self.orders = imgs.to(device), [order.to(device) for order in orders]

    def __call__(self) -> None:
        """Run one training step on the batch."""
        self.train(self.imgs, *self.orders)

    def forward(self, imgs: torch.Tensor, *orders: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        with self.autocast():
            return sum(self.model(self.normalize(imgs), *orders).values())

    def train(self, imgs: torch.Tensor, *orders: torch.Tensor) -> None:
        """Run one training step on a batch."""
        labels = orders[0]  # no model reads labels
        train_one_epoch(self.model, iter([(imgs, labels, *orders)]), range(1), self.loop)

    def repeated(self, n: int) -> tuple[torch.Tensor, ...]:
        """A batch of `n` copies of the first image and its token order."""
        ids_shuffle, *groupings = self.orders
        return self.imgs[:1].repeat(n, 1, 1, 1), ids_shuffle[:1].repeat(n, 1), *groupings

    def warm_up(self) -> None:
        """Compile if asked, and run two steps: they create the optimizer's state and choose kernels."""
        if self.compile:
            self.model.compile(fullgraph=True, dynamic=False)
        self()
        self()

    def saved_mb(self) -> float:
        """MB that autograd saves per image. Call it before `warm_up`, so the model is eager."""
        two, four = (costs.saved_bytes(partial(self.forward, *self.repeated(n))) for n in (2, 4))
        return (four - two) / 2e6


class ReferenceStep(Step):
    """MAE's step as the reference runs it: with a GradScaler, one norm per parameter, and two host-device syncs."""

    def __init__(self, settings: Settings, args: argparse.Namespace, device: torch.device, images: Any) -> None:
        self.device, self.compile, self.orders = device, False, []
        with device:
            self.model = ReferenceMAE(**SIZES[settings["model"]]).to(device).train()
        self.precision, self.autocast, _ = precision(args.precision, device)
        self.scaler = torch.amp.GradScaler(device.type)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.imgs = torch.randn(args.batch_size, 3, 224, 224, device=device)

    def forward(self, imgs: torch.Tensor, *orders: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            return self.model(imgs)

    def repeated(self, n: int) -> tuple[torch.Tensor, ...]:
        return (self.imgs[:1].repeat(n, 1, 1, 1),)

    def train(self, imgs: torch.Tensor, *orders: torch.Tensor) -> None:
        loss = self.forward(imgs)
        loss.item()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.stack([p.grad.norm() for p in self.model.parameters() if p.grad is not None]).norm()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def make_step(settings: Settings, args: argparse.Namespace, device: torch.device, images: Any) -> Step:
    """Build the step of a recipe, or of the reference."""
    step_class = ReferenceStep if settings["recipe"] == REFERENCE else Step
    return step_class(settings, args, device, images)


def count_gmac(settings: Settings) -> float:
    """Count the multiply-adds, in 10^9, of the forward pass of one image."""
    if settings["recipe"] != REFERENCE:
        return costs.forward_gmac(settings, build_model)[0]
    with torch.device("meta"):
        model = ReferenceMAE(**SIZES[settings["model"]])
        imgs, ids_shuffle = torch.empty(1, 3, 224, 224), torch.empty(1, model.num_tokens, dtype=torch.long)
        return costs.count_gmac(lambda: model(imgs, ids_shuffle))


def allocated(device: torch.device, peak: bool = False) -> float:
    """MB of all tensors on a GPU: now, or the most since torch.cuda.reset_peak_memory_stats()."""
    if device.type != "cuda":
        return 0.0
    return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 1e6


def measure_first(settings: Settings, args: argparse.Namespace, device: torch.device, images: Any) -> tuple[Row, Step]:
    """Measure one recipe, up to its first timed step. Returns (its row, its step)."""
    row: Row = {name: settings[name] for name in ("recipe", "model", "throw_ratio")} | {"gmac": count_gmac(settings)}
    gc.collect()
    others = allocated(device)
    step = make_step(settings, args, device, images)
    row["parameters"] = sum(p.numel() for p in step.model.parameters() if p.requires_grad) / 1e6
    row["saved_mb"] = step.saved_mb()
    step.warm_up()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row["seconds"] = [costs.seconds_of(step, device)]
    row["peak_mb"] = allocated(device, peak=True) - others if device.type == "cuda" else None
    row |= {name: getattr(args, name) for name in ("batch_size", "attention", "compile")}
    return row | {"precision": step.precision, "device": costs.device_name(device), "torch": torch.__version__}, step


def measure(
    settings: Sequence[Settings], args: argparse.Namespace, device: torch.device, images: Any
) -> Iterator[list[Row]]:
    """Measure all recipes. Yields the rows so far, after each recipe and after each round."""
    if args.compile:  # a model class is compiled again for each recipe
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(settings))
    rows: list[Row] = []
    steps: list[Step] = []
    for s in settings:
        row, step = measure_first(s, args, device, images)
        rows, steps = [*rows, row], [*steps, step]
        yield add_ratios(add_medians(rows))
    for i in range(1, args.rounds):
        for row, seconds in zip(rows, costs.time_round(steps, device, i), strict=True):
            row["seconds"].append(seconds)
        yield add_ratios(add_medians(rows))


def add_medians(rows: list[Row]) -> list[Row]:
    """Add what follows from the times so far."""
    for row in rows:
        seconds = statistics.median(row["seconds"])
        row |= {"ms": 1e3 * seconds, "images_per_second": row["batch_size"] / seconds, "rounds": len(row["seconds"])}
    return rows


def add_ratios(rows: list[Row]) -> list[Row]:
    """Add the costs relative to the row of the same model that throws nothing, or to the first row; and the paper's."""
    ours = [row for row in rows if row["recipe"] != REFERENCE]
    reference = next((row for row in rows if row["recipe"] == REFERENCE), None)
    for row in rows:
        full = next((r for r in ours if r["model"] == row["model"] and r["throw_ratio"] == 0), rows[0])
        for cost in COSTS:
            row[f"{cost}_ratio"] = row[cost] / full[cost] if row[cost] and full[cost] else None
        printed = published_costs(row["recipe"]) if row["throw_ratio"] else {}
        row |= {f"paper_{measure}_ratio": ratio for measure, ratio in printed.items()}
        if reference is not None and row["model"] == reference["model"]:
            row["times_reference"] = reference["ms"] / row["ms"]
    return rows


def number(value: float | None, digits: int) -> str:
    """The number with so many digits; a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def cost_cells(row: Row, cost: str, digits: int) -> tuple[str, str]:
    """The cells of one cost: its value, and its ratio with the paper's ratio behind a slash."""
    ratio, printed = number(row[f"{cost}_ratio"], 3), row.get(f"paper_{MEASURES[cost]}_ratio")
    if row[cost] is not None and printed is not None:
        ratio += f" / {printed:.2f}"
    return number(row[cost], digits), ratio


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, below a line that says how they were measured."""
    first, has_reference = rows[0], any("times_reference" in row for row in rows)
    titles = ["recipe", "ρ_d", "parameters", "GMAC", "ratio / paper", "saved MB", "ratio / paper"]
    titles += ["peak MB", "ratio / paper", "ms a step", "ratio / paper", "images/s"]
    if has_reference:
        titles.append("× reference")
    lines = []
    for row in rows:
        cells = [row["recipe"], row["throw_ratio"], number(row["parameters"], 1), *cost_cells(row, "gmac", 3)]
        cells += [*cost_cells(row, "saved_mb", 1), *cost_cells(row, "peak_mb", 0), *cost_cells(row, "ms", 1)]
        cells.append(number(row["images_per_second"], 1))
        if has_reference:
            cells.append(number(row.get("times_reference"), 2))
        lines.append(cells)
    how = f"batch {first['batch_size']}, {first['device']}, {first['precision']}, {first['rounds']} rounds, "
    how += f"torch {first['torch']}"
    if first["compile"]:
        how += ", compiled"
    if first["attention"] != "auto":
        how += f", attention {first['attention']}"
    return f"{how}\n\n{markdown_table(titles, lines)}\n"


def plot(plt: Any, rows: Sequence[Row], path: Path) -> None:
    """Plot the ratios against the throw ratio: one line per model and method, the paper's figures as crosses."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True)
    rows = sorted((row for row in rows if row["recipe"] != REFERENCE), key=lambda row: row["throw_ratio"])
    models = list(dict.fromkeys(row["model"] for row in rows))
    for ax, (cost, title) in zip(axes, (("gmac", "FLOPs"), ("saved_mb", "memory"), ("ms", "time")), strict=True):
        for model in models:
            own = [row for row in rows if row["model"] == model]
            for label, is_plain in (("PR-MIM", False), ("plain", True)):
                line = [row for row in own if row["throw_ratio"] == 0 or ("plain" in row["recipe"]) == is_plain]
                if not any(row["throw_ratio"] for row in line):
                    continue
                if len(models) > 1:
                    label += f", {model.rpartition('_patch')[0]}"
                xs, ys = [row["throw_ratio"] for row in line], [row[f"{cost}_ratio"] for row in line]
                ax.plot(xs, ys, "o-", ms=4, label=label)
        printed = f"paper_{title.lower()}_ratio"
        known = [row for row in rows if row.get(printed) and "plain" not in row["recipe"]]
        ax.plot([row["throw_ratio"] for row in known], [row[printed] for row in known], "kx", label="paper")
        ax.set(title=title, xlabel="throw ratio", ylim=(0, 1.05))
    axes[0].set_ylabel("relative to throwing nothing")
    axes[-1].legend(frameon=False, fontsize="small" if len(models) > 1 else None)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def make_parser() -> Parser:
    """The flags of this script."""
    parser = Parser("profile_pretrain.py", description=__doc__)
    group = parser.add_argument_group("what is profiled").add_argument
    group("recipes", nargs="*", help="names from recipes.py")
    group("--table", choices=TABLES, help="all recipes of a table of the paper")
    group("--against", choices=(REFERENCE,), help="also time MAE's step as the reference computes it, at 224 px")
    group("--data_path", help="take the batch from these images instead of random bytes")
    group("--model", help="another model for the recipes")
    group("--batch_size", type=int, help="images per step, or micro-batch of --predict (default: 8, or what fits)")
    group = parser.add_argument_group("how").add_argument
    group("--rounds", type=int, default=7, help="number of times that every step is timed")
    group("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    group("--precision", default="auto", choices=("auto", *PRECISIONS), help="auto: bf16 or fp16 on a GPU, else fp32")
    group("--attention", default="auto", choices=("auto", *KERNELS), help="preferred kernel, not for the reference")
    group("--compile", action=argparse.BooleanOptionalAction, default=False, help="compile the steps that are timed")
    group = parser.add_argument_group("prediction").add_argument
    group("--predict", nargs="+", choices=predict.DEVICES, help="measure nothing: predict memory, time and days")
    group("--gpus", type=int, default=1, help="number of GPUs of --predict")
    group = parser.add_argument_group("output").add_argument
    group("--markdown", type=Path, help="write the printed table to this file")
    group("--csv", type=Path, help="write unrounded numbers to this file")
    group("--plot", type=Path, help="plot costs against the throw ratio to this .svg or .png")
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Parse and check the flags."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if bool(args.recipes) == bool(args.table):
        parser.error("give names of recipes, or --table")
    for name in args.recipes:
        check_recipe(parser, name, RECIPES)
    args.recipes = args.recipes or TABLES[args.table]
    if args.batch_size is None and not args.predict:
        args.batch_size = 8
    if min(1 if args.batch_size is None else args.batch_size, args.rounds, args.gpus) < 1:
        found = f"{args.batch_size}, {args.rounds} and {args.gpus}"
        parser.error(f"--batch_size, --rounds and --gpus must be at least 1, got {found}")
    if args.predict and (args.against or args.plot):
        parser.error("--predict goes without --against and --plot")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but there is no CUDA device")
    with user_errors(parser):
        prepare_file("--csv", args.csv)
        prepare_file("--markdown", args.markdown)
        prepare_file("--plot", args.plot, (".svg", ".png"))
    return parser, args


def write_files(args: argparse.Namespace, columns: Sequence[str], rows: Sequence[Row], table: str) -> None:
    """Write the rows so far to the files that were asked for."""
    if args.csv:
        write_csv(args.csv, columns, rows)
    if args.markdown:
        args.markdown.write_text(table, encoding="utf-8")


def predict_rows(settings: Sequence[Settings], args: argparse.Namespace) -> None:
    """Print and write predictions as they come."""
    rows: list[Row] = []
    for row in predict.predict_all(partial(build_model, read_files=False), settings, args):
        rows.append(row)
        table = predict.markdown(rows)
        print(table if len(rows) == 1 else table.splitlines()[-1], end="" if len(rows) == 1 else "\n", flush=True)
        write_files(args, predict.COLUMNS, rows, table)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    parser, args = parse_args(argv)
    device = torch.device(args.device)
    more = ["--model", args.model] if args.model else []
    settings = [vars(parse_with_recipe(get_args_parser(), RECIPES, ["--recipe", n, *more])) for n in args.recipes]
    if args.predict:
        with user_errors(parser):
            predict_rows(settings, args)
        return
    if args.against:
        model = settings[0]["model"]
        if model not in SIZES:
            parser.error(f"--against {REFERENCE} is for {', '.join(SIZES)}, but the first recipe is for {model}")
        settings.insert(0, {"recipe": REFERENCE, "model": model, "throw_ratio": 0.0})
    prefer(args.attention)
    rows: list[Row] = []
    try:
        with user_errors(parser):
            plt = pyplot("prmim-cost") if args.plot else None
            images = open_images("folder", args.data_path) if args.data_path else None
            for rows in measure(settings, args, device, images):
                if rows[-1]["rounds"] == 1:
                    print(
                        f"{rows[-1]['recipe']}: {rows[-1]['ms']:.1f} ms in the first of {args.rounds} rounds",
                        flush=True,
                    )
                write_files(args, COLUMNS, rows, markdown(rows))
    except torch.cuda.OutOfMemoryError:
        parser.error(
            f"the GPU has too little memory for a batch of {args.batch_size} and {len(args.recipes)} recipes, which "
            "are timed side by side; give a smaller --batch_size, or fewer recipes"
        )
    print(f"\n{markdown(rows)}", end="")
    if args.plot:
        plot(plt, rows, args.plot)


if __name__ == "__main__":
    run_program(main, "profile_pretrain.py")
