"""What a training step costs: recipes side by side in one run, the paper's figures beside.

    python scripts/profile_pretrain.py mae_vit_base_100ep prmim50_vit_base_100ep --batch_size 8
    python scripts/profile_pretrain.py --table ablation --batch_size 256 --csv cost.csv --markdown cost.md
    python scripts/profile_pretrain.py cifar10_mae cifar10 --data_path data/cifar10 --batch_size 128
    python scripts/profile_pretrain.py --table ablation --against reference --plot cost.svg --trace traces

GMAC            multiply-adds of one image's forward pass, as torch's counter sees them; a frozen teacher's (TEC) apart, as the
                paper leaves it out: its ratio stands in a column of its own, student and teacher together
saved MB        what the forward pass of one image keeps for the backward pass, in 10^6 bytes: each storage once; counted
                as the difference between batches of four and of two, in which weights, their casts and tables cancel
moved MB        what the operations of one image's whole step read and write, matrix products, attention and convolutions
                apart; counted likewise, in eager mode. A compiler fuses operations, and moves less
peak MB         most device memory that a step's tensors take, in 10^6 bytes: weights, moments, gradients, activations and
                what kernels work in; each recipe has the device for itself then (CUDA alone)
ms a step       median over the rounds; each round times every recipe once, in rotating order
train GFLOP     of an image's whole step: six operations a multiply-add (forward and backward; torch's own count of the backward
                pass takes a depth-wise convolution for a dense one), and two of a teacher's
conv ms         forward and backward of the spatial aggregation alone, eager, with the gathers around it
roofline        the time of an eager step that does all its matrix products as fast as a large one and all else at the speed of a
                large copy (both measured), in turn and without a gap; as a share of the time it takes
MFU             these operations a second, by what this device does in a large matrix product, measured
x reference     how many times as fast as MAE's step by the reference's maths (models_reference_mae.py), with --against

A step is the engine's: bytes become floats, forward, backward, the gradient's norm, AdamW, sums for the log; on one batch that
stays on the device (random, or the first crops of `--data_path`), so loading is not in it. Ratios are to the recipe of the
same model that throws nothing, if it is among them, else to the first; behind the stroke stands the paper's figure.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_pretrain import PretrainEngine
from main_pretrain import build_model, get_args_parser
from models_reference_mae import SIZES, ReferenceMAE
from prmim import SpatialAggregation
from recipes import RECIPES
from util.attention import KERNELS, prefer
from util.costs import (
    Traffic,
    a_batch,
    copied_gb_per_s,
    counted,
    device_name,
    forward_gmac,
    matmul_tflops,
    median_seconds,
    saved_bytes,
    time_in_turn,
    wait,
)
from util.data.datasets import open_images
from util.data.transforms import Normalize
from util.plots import pyplot
from util.run.cli import Parser, parse_with_recipe, run_program, user_errors, why_not_writable
from util.run.train_engine import PRECISIONS, precision
from util.tables import write_csv


def _base(*arms):
    return [f"{arm}_vit_base_100ep" for arm in ("mae", *arms)]


TABLES = {
    "ablation": _base("plain25", "prmim25", "plain50", "prmim50", "plain65", "prmim65"),
    "large": [f"{arm}_vit_large_100ep" for arm in ("mae", "plain50", "prmim50")],
    # Costs do not depend on the number of epochs, so the shortest schedule stands for all.
    "schedules": _base("plain50", "prmim50") + [f"{arm}_vit_large_100ep" for arm in ("mae", "plain50", "prmim50")],
    "kernels": _base("kernel3", "kernel5", "prmim50", "kernel9", "kernel11"),
    "frameworks": ["mff_vit_base_800ep", "mff_plain50_vit_base_800ep", "mff_prmim50_vit_base_800ep", "simmim_vit_base_100ep"]
    + ["simmim_plain30_vit_base_100ep", "simmim_prmim30_vit_base_100ep", "simmim_prmim50_vit_base_100ep"],
    "targets": ["localmim_vit_base_100ep", "localmim_plain65_vit_base_100ep", "localmim_prmim65_vit_base_100ep"]
    + ["tec_vit_base_300ep", "tec_plain50_vit_base_300ep", "tec_prmim50_vit_base_300ep"],
    "swin": [f"greenmim_{arm}swin_{size}_100ep" for size in ("base", "large") for arm in ("", "plain50_", "prmim50_")],
    "designs": _base("prmim50", "avgpool", "transformer", "convnext"),
}
REFERENCE = "reference"
# Tables "Ablation studies", "Training schedules" and "Compatibility" of the paper, relative to throwing nothing; the
# aggregations of its other tables have no figures of their own.
PAPER = {  # (model, throw_ratio): (FLOPs, memory, time)
    ("mae_vit_base_patch16", 0.25): (0.85, 0.81, 0.83),
    ("mae_vit_base_patch16", 0.5): (0.72, 0.64, 0.75),
    ("mae_vit_base_patch16", 0.65): (0.64, 0.55, 0.65),
    ("mae_vit_large_patch16", 0.5): (0.87, 0.82, None),
    ("mff_vit_base_patch16", 0.5): (0.73, 0.64, None),
    ("simmim_vit_base_patch16", 0.3): (0.50, 0.61, None),
    ("localmim_vit_base_patch16", 0.65): (0.91, 0.84, None),
    ("tec_vit_base_patch16", 0.5): (0.82, 0.81, None),
}
COSTS = ("gmac", "gmac_with_teacher", "saved_mb", "moved_mb", "peak_mb", "ms", "images_per_second")
COLUMNS = ["recipe", "model", "throw_ratio", *COSTS, *(f"{cost}_ratio" for cost in COSTS)]
COLUMNS += ["gflop_train", "moved_mb_fixed", "operations", "roofline_ms", "conv_ms", "mfu", "matmul_tflops", "copied_gb_per_s"]
COLUMNS += ["times_reference", "saved_of_reference"]
COLUMNS += ["paper_flops_ratio", "paper_memory_ratio", "paper_time_ratio", "batch_size", "rounds", "device", "precision", "torch"]
COLUMNS += ["attention", "compile"]


class Step:
    """One recipe's training step, the engine's own, ready to be measured."""

    def __init__(self, settings, args, device, images):
        self.device, self.compile = device, args.compile
        self.model = build_model(settings).to(device).train()
        self.precision, autocast, scaler = precision(args.precision, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.engine = PretrainEngine(
            model=self.model,
            optimizer=self.optimizer,
            scaler=scaler,
            autocast=autocast,
            normalize=Normalize().to(device),
            learning_rate=lambda step, lr_scale: 1e-4,
            accum_iter=1,
            images_per_step=args.batch_size,
            steps_per_epoch=1,
            last_step=1,
            log=None,  # nothing is reported
        )
        imgs, orders = a_batch(self.model, settings, args.batch_size, images)
        self.imgs, self.orders = imgs.to(device), [order.to(device) for order in orders]

    def forward(self, imgs, *orders):
        with self.engine.autocast():
            return sum(self.engine.losses_of((imgs, None, *orders), 0, 0).values())

    def train(self, imgs, *orders):
        self.engine.train_step(iter([(imgs, None, *orders)]), 0)

    def images(self, n):
        """`n` times the first image, with its token order."""
        ids_shuffle, *plans = self.orders
        return self.imgs[:1].repeat(n, 1, 1, 1), ids_shuffle[:1].repeat(n, 1), *plans

    def __call__(self):
        """-> seconds of one step."""
        wait(self.device)
        start = time.perf_counter()
        self.train(self.imgs, *self.orders)
        wait(self.device)
        return time.perf_counter() - start

    def warm_up(self):
        """Two steps before any is measured: with them the moments exist and kernels are chosen, or compiled."""
        if self.compile:
            self.model.compile(fullgraph=True, dynamic=False)
        self()
        self()

    def saved_mb(self):
        """MB an image; before the warm-up, so eager whatever is timed."""
        two, four = (saved_bytes(lambda n=n: self.forward(*self.images(n))) for n in (2, 4))
        return (four - two) / 2e6

    def traffic(self):
        """-> (MB that an image's operations move, MB that a step's do beside, how many they are); eager, too."""
        self.train(*self.images(2))  # the first step makes the moments
        counts = []
        for n in (2, 4):
            with Traffic() as count:
                self.train(*self.images(n))
            counts.append(count)
        two, four = (count.moved / 1e6 for count in counts)
        return (four - two) / 2, 2 * two - four, counts[0].operations

    def conv_seconds(self, rounds):
        """Median seconds of all spatial aggregations alone, forward and backward; None where there are none."""
        calls = []
        modules = [module for module in self.model.modules() if isinstance(module, SpatialAggregation)]
        handles = [m.register_forward_pre_hook(lambda module, inputs: calls.append((module, inputs))) for m in modules]
        with torch.no_grad():
            self.forward(self.imgs, *self.orders)
        for handle in handles:
            handle.remove()
        if not calls:
            return None
        calls = [(module, x.detach().requires_grad_(), rest) for module, (x, *rest) in calls]

        def once():
            for module, x, rest in calls:
                with self.engine.autocast():
                    out = module(x, *rest)
                out.backward(out.detach())

        seconds = median_seconds(once, self.device, rounds)
        self.optimizer.zero_grad(set_to_none=True)
        return seconds

    def trace(self, folder, name):
        """Leaves the profiler's trace of one step in `folder`, for a browser's chrome://tracing, and its table as text."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        with torch.profiler.profile(activities=activities) as profiler:
            self()
        profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
        order = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        (folder / f"{name}.txt").write_text(profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90))

    def peak_mb(self):
        """MB of a step; None on the CPU."""
        if self.device.type != "cuda":
            return None
        self.warm_up()
        torch.cuda.reset_peak_memory_stats()
        self()
        return torch.cuda.max_memory_allocated() / 1e6


class ReferenceStep(Step):
    """MAE's step as the reference takes it, for a model of the same size: with its GradScaler, a norm for each parameter, and
    two waits."""

    def __init__(self, settings, args, device, images):
        self.device, self.compile, self.orders = device, False, []
        self.model = ReferenceMAE(**SIZES[settings["model"]]).to(device).train()
        self.precision, self.autocast, _ = precision(args.precision, device)
        self.scaler = torch.amp.GradScaler(device.type)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.imgs = torch.randn(args.batch_size, 3, 224, 224, device=device)

    def forward(self, imgs):
        with self.autocast():
            return self.model(imgs)

    def images(self, n):
        return (self.imgs[:1].repeat(n, 1, 1, 1),)

    def train(self, imgs):
        loss = self.forward(imgs)
        loss.item()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.stack([p.grad.norm() for p in self.model.parameters() if p.grad is not None]).norm()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def conv_seconds(self, rounds):
        return None


def make_step(settings, *args):
    return (ReferenceStep if settings.get("reference") else Step)(settings, *args)


def measure_memory(settings, args, device, images):
    """-> (saved_mb, traffic, peak_mb) of one recipe that has the device for itself."""
    step = make_step(settings, args, device, images)
    memory = step.saved_mb(), step.traffic(), step.peak_mb()
    del step
    if args.compile:
        torch._dynamo.reset()  # compiled code may hold on to tensors
    gc.collect()
    return memory


def paper_figures(settings):
    """(FLOPs, memory, time) that the paper prints for a recipe, or Nones: its figures are of the 7 x 7 depth-wise convolution."""
    if settings.get("reference"):
        return None, None, None
    known = settings["aggregation"] == "dwconv" and settings["kernel_size"] == 7
    return PAPER.get((settings["model"], settings["throw_ratio"]) if known else None, (None, None, None))


def reference_gmac(settings):
    """As `forward_gmac`, of the reference."""
    with torch.device("meta"):
        model = ReferenceMAE(**SIZES[settings["model"]])
        return counted(lambda: model(torch.empty(1, 3, 224, 224), torch.empty(1, model.num_tokens, dtype=torch.long)))


def measure(names, settings, args, device, images):
    """-> one row a recipe, without ratios; the steps."""
    rows = []
    for name, s in zip(names, settings, strict=True):
        saved_mb, (moved_mb, moved_mb_fixed, operations), peak_mb = measure_memory(s, args, device, images)
        gmac, teacher_gmac = (reference_gmac(s), 0.0) if s.get("reference") else forward_gmac(s, build_model)
        rows.append({"recipe": name, "model": s["model"], "throw_ratio": s["throw_ratio"], "gmac": gmac})
        rows[-1] |= {"gmac_with_teacher": gmac + teacher_gmac if teacher_gmac else None}
        rows[-1] |= {"saved_mb": saved_mb, "peak_mb": peak_mb}
        rows[-1] |= {"moved_mb": moved_mb, "moved_mb_fixed": moved_mb_fixed, "operations": operations}
        rows[-1] |= dict(zip(("paper_flops_ratio", "paper_memory_ratio", "paper_time_ratio"), paper_figures(s), strict=True))
    if args.compile:  # one model class is compiled anew for each recipe
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(settings))
    steps = [make_step(s, args, device, images) for s in settings]
    convs = [step.conv_seconds(args.rounds) for step in steps]
    for step in steps:
        step.warm_up()
    ceiling, bandwidth = matmul_tflops(device, PRECISIONS[steps[0].precision] or torch.float32), copied_gb_per_s(device)
    for row, conv, seconds in zip(rows, convs, time_in_turn(steps, args.rounds), strict=True):
        row |= {"ms": 1e3 * seconds, "images_per_second": args.batch_size / seconds, "conv_ms": conv and 1e3 * conv}
        teacher_gmac = (row["gmac_with_teacher"] or row["gmac"]) - row["gmac"]
        row |= {"gflop_train": 6 * row["gmac"] + 2 * teacher_gmac, "matmul_tflops": ceiling, "copied_gb_per_s": bandwidth}
        row["mfu"] = row["gflop_train"] * row["images_per_second"] / 1e3 / ceiling
        if not args.compile:
            row["roofline_ms"] = args.batch_size * row["gflop_train"] / ceiling
            row["roofline_ms"] += (args.batch_size * row["moved_mb"] + row["moved_mb_fixed"]) / bandwidth
        row |= {"batch_size": args.batch_size, "rounds": args.rounds, "precision": steps[0].precision}
        row |= {"device": device_name(device), "torch": torch.__version__, "attention": args.attention, "compile": args.compile}
    return rows, steps


def add_ratios(rows):
    """Adds to each row its costs relative to the row of the same model that throws nothing, else to the first."""
    for row in rows:
        full = [r for r in rows if (r["model"], r["throw_ratio"]) == (row["model"], 0) and r["recipe"] != REFERENCE]
        for cost in COSTS:
            whole = (full or rows)[0][cost]
            row[f"{cost}_ratio"] = row[cost] / whole if row[cost] and whole else None
    for reference in (row for row in rows if row["recipe"] == REFERENCE):
        for row in rows:
            alike = row["model"] == reference["model"]
            row["times_reference"] = reference["ms"] / row["ms"] if alike else None
            row["saved_of_reference"] = row["saved_mb"] / reference["saved_mb"] if alike else None
    return rows


def markdown(rows):
    """The rows as a table, with a line that says how they were measured."""

    def number(value, digits):
        return "–" if value is None else f"{value:.{digits}f}"

    def ratio(row, cost, paper=None):
        ours, theirs = row[f"{cost}_ratio"], row.get(paper)
        return number(ours, 3) + ("" if theirs is None else f" / {theirs:.2f}")

    def share(value, whole, digits=0):
        return "–" if value is None else f"{value / whole:.{digits}%}"

    first = rows[0]
    taught, against = any(row["gmac_with_teacher"] for row in rows), "times_reference" in first
    header = ["recipe", "ρ_d", "GMAC", "ratio / paper", "train GFLOP", *["with teacher", "ratio"] * taught]
    header += [
        "saved MB",
        "ratio / paper",
        "moved MB",
        "ratio",
        "peak MB",
        "ratio / paper",
        "ms a step",
        "ratio / paper",
        "images/s",
        "ratio",
    ]
    header += ["conv ms", "of the step", "roofline", "MFU"]
    header += ["× reference", "saved / reference's"] * against
    body = [
        [
            *(r["recipe"], r["throw_ratio"], number(r["gmac"], 3), ratio(r, "gmac", "paper_flops_ratio")),
            number(r.get("gflop_train"), 2),
            *[number(r["gmac_with_teacher"], 3), ratio(r, "gmac_with_teacher")] * taught,
            *(number(r["saved_mb"], 1), ratio(r, "saved_mb", "paper_memory_ratio")),
            *(number(r["moved_mb"], 1), ratio(r, "moved_mb")),
            *(number(r["peak_mb"], 0), ratio(r, "peak_mb", "paper_memory_ratio") if r["peak_mb"] else "–"),
            *(number(r["ms"], 1), ratio(r, "ms", "paper_time_ratio")),
            *(number(r["images_per_second"], 1), ratio(r, "images_per_second")),
            *(number(r.get("conv_ms"), 2), share(r.get("conv_ms"), r["ms"], 1)),
            *(share(r.get("roofline_ms"), r["ms"]), share(r.get("mfu"), 1)),
            *[number(r.get("times_reference"), 2), number(r.get("saved_of_reference"), 3)] * against,
        ]
        for r in rows
    ]
    lines = [header, ["---"] + ["--:"] * (len(header) - 1), *body]
    title = f"batch {first['batch_size']}, {first['device']}, {first['precision']}, {first['rounds']} rounds, "
    title += f"torch {first['torch']}" + (", compiled" if first["compile"] else "")
    title += "" if first["attention"] == "auto" else f", attention {first['attention']}"
    if first.get("matmul_tflops"):
        title += f"; a matrix product runs at {first['matmul_tflops']:.3g} TFLOP/s, a copy at {first['copied_gb_per_s']:.3g} GB/s"
    return "\n".join([title, "", *("| " + " | ".join(map(str, line)) + " |" for line in lines)]) + "\n"


def plot(plt, rows, path):
    """Cost against throw ratio, relative to throwing nothing: ours as a line for each model, the paper's as crosses."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True)
    rows = sorted((r for r in rows if r["recipe"] != REFERENCE), key=lambda r: r["throw_ratio"])
    models = list(dict.fromkeys(r["model"] for r in rows))
    for ax, (cost, title) in zip(axes, (("gmac", "FLOPs"), ("saved_mb", "memory"), ("ms", "time")), strict=True):
        for model in models:
            for plain in (False, True):
                line = [r for r in rows if r["model"] == model and (("plain" in r["recipe"]) == plain or r["throw_ratio"] == 0)]
                if all(r["throw_ratio"] == 0 for r in line):
                    continue
                label = ("plain" if plain else "PR-MIM") + (f", {model.rpartition('_patch')[0]}" if len(models) > 1 else "")
                ax.plot([r["throw_ratio"] for r in line], [r[f"{cost}_ratio"] for r in line], "o-", ms=4, label=label)
        figure_of = f"paper_{title.lower()}_ratio"
        known = [r for r in rows if r[figure_of] and "plain" not in r["recipe"]]
        ax.plot([r["throw_ratio"] for r in known], [r[figure_of] for r in known], "kx", label="paper")
        ax.set(title=title, xlabel="throw ratio", ylim=(0, 1.05))
    axes[0].set_ylabel("relative to throwing nothing")
    axes[-1].legend(frameon=False, fontsize="small" if len(models) > 1 else None)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def parse_args(argv=None):
    parser = Parser("profile_pretrain.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("recipes", nargs="*", help="names from recipes.py")
    flag("--table", choices=TABLES, help="the recipes of a table of the paper; ViT-L's part of 'schedules' is 'large'")
    flag("--batch_size", type=int, default=8)
    flag("--rounds", type=int, default=7)
    flag("--data_path", help="real images; random ones without it")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    flag("--precision", default="auto", choices=("auto", *PRECISIONS))
    flag("--attention", default="auto", choices=("auto", *KERNELS), help="kernel that is tried first; not by the reference")
    flag("--compile", action=argparse.BooleanOptionalAction, default=False, help="torch.compile the timed steps")
    flag("--against", choices=(REFERENCE,), help="time MAE's step by the reference's maths beside (MAE recipes at 224 px)")
    flag("--trace", type=Path, metavar="FOLDER", help="leave a profiler trace of a step of each recipe there")
    flag("--plot", type=Path, help="cost against throw ratio, the paper's beside ours, as .svg or .png")
    flag("--csv", type=Path, help="the numbers, unrounded")
    flag("--markdown", type=Path, help="what is printed")
    args = parser.parse_args(argv)
    if bool(args.recipes) == bool(args.table):
        parser.error("give names of recipes, or --table")
    args.recipes = args.recipes or TABLES[args.table]
    if min(args.batch_size, args.rounds) < 1:
        parser.error(f"--batch_size and --rounds must be at least 1, got {args.batch_size} and {args.rounds}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but there is no CUDA device")
    for path in filter(None, (args.csv, args.markdown, args.plot)):
        reason = why_not_writable(path)
        if reason:
            parser.error(f"{str(path)!r} cannot be written: {reason}")
    if args.plot and args.plot.suffix not in (".svg", ".png"):
        parser.error(f"--plot makes .svg or .png, got {str(args.plot)!r}")
    if args.trace:
        try:
            args.trace.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--trace {str(args.trace)!r} cannot be a folder: {error.strerror}")
    return parser, args


def main(argv: Sequence[str] | None = None) -> None:
    """The program; `argv` stands for the command line."""
    parser, args = parse_args(argv)
    device = torch.device(args.device)
    settings = [vars(parse_with_recipe(get_args_parser(), RECIPES, ["--recipe", name])) for name in args.recipes]
    names = list(args.recipes)
    if args.against:
        if settings[0]["model"] not in SIZES:
            parser.error(f"--against {REFERENCE} knows {', '.join(SIZES)}, but the first recipe is of {settings[0]['model']}")
        names, settings = [REFERENCE, *names], [{"reference": True, "model": settings[0]["model"], "throw_ratio": 0.0}, *settings]
    prefer(args.attention)
    try:
        with user_errors(parser):
            plt = pyplot("prmim-cost") if args.plot else None
            images = open_images("folder", args.data_path) if args.data_path else None
            rows, steps = measure(names, settings, args, device, images)
    except torch.cuda.OutOfMemoryError:
        parser.error(
            f"the device's memory is too small for {len(args.recipes)} recipes (all are resident while they are timed) and a "
            f"batch of {args.batch_size}; give a smaller --batch_size, or fewer recipes"
        )
    add_ratios(rows)
    print(markdown(rows), end="")
    if args.csv:
        write_csv(args.csv, COLUMNS, rows)
    if args.markdown:
        args.markdown.write_text(markdown(rows), encoding="utf-8")
    if args.plot:
        plot(plt, rows, args.plot)
    if args.trace:
        for name, step in zip(names, steps, strict=True):
            step.trace(args.trace, name)


if __name__ == "__main__":
    run_program(main, "profile_pretrain.py")
