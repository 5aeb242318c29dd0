"""Run every recipe with a tiny model on synthetic photographs, through the mains themselves.

    python tools/run_recipes.py                                   # all recipes
    python tools/run_recipes.py --recipes finetune_vit_base --output_dir /tmp/recipes --csv recipes.csv
    python tools/run_recipes.py --images 96 --total_batch_size 32 # a quick check

Only the model's sizes and the number of images are scaled down. A recipe keeps its total batch size, schedule, losses,
augmentation, regularisation, optimizer and evaluation. Each run is stopped once in the middle of an epoch, and the same
command resumes it. The checks: no exception, the recipe's own settings, finite losses, one report per step, the step of
the resume, and the evaluations.
"""

import argparse
import io
import json
import math
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import main_finetune
import main_pretrain
import models_mae_pr
from encoders.models_swin import SwinEncoder
from frameworks import models_amt_pr, models_greenmim_pr, models_tec_pr
from frameworks.models_greenmim_pr import GreenMIMSwin
from recipes import FINETUNE_RECIPES, RECIPES
from util.data.datasets import DOWNLOADED, INATURALIST, available_cores
from util.run.checkpoint import newest_checkpoint
from util.run.cli import Parser, check_least, prepare_file, run_program, user_errors
from util.run.folder import read_reports
from util.tables import write_csv

# Width and height. In an image of 1:5 few boxes of the random crop fit, so the crop uses its fallback.
SHAPES = ((48, 40), (60, 20), (64, 64), (100, 20), (40, 56), (20, 100), (33, 47), (150, 120))
CLASSES, VAL_IMAGES = 10, 40
DECODER = dict(decoder_embed_dim=32, decoder_depth=1, decoder_num_heads=2)
TEACHER = "mae_vit_micro_patch4"  # a teacher must have a known size
IMAGES = 5000  # of a run, at least
COLUMNS = ["recipe", "program", "model", "total_batch_size", "accum_iter", "images", "steps", "stopped_after"]
COLUMNS += ["seconds", "first_loss", "last_loss", "top1", "problem"]


def get_args_parser() -> Parser:
    parser = Parser("run_recipes.py", description=__doc__)
    flag = parser.add_argument
    flag("--recipes", nargs="+", metavar="NAME", help="recipes to run (default: all of recipes.py)")
    flag("--output_dir", type=Path, help="an empty folder for data, logs and checkpoints (default: a temporary one)")
    flag("--images", type=int, default=IMAGES, help="least number of images to train on")
    flag("--total_batch_size", type=int, help="replaces the recipe's own")
    flag("--jobs", type=int, default=available_cores(), help="recipes at once, one core each")
    flag("--csv", type=Path, help="write the table to this file")
    return parser


@dataclass(frozen=True)
class Job:
    """The run of one recipe. `program` is the module of its main."""

    program: str
    recipe: str
    images: int = IMAGES
    total_batch_size: int | None = None

    @property
    def main(self) -> ModuleType:
        return {"main_pretrain": main_pretrain, "main_finetune": main_finetune}[self.program]

    def settings(self) -> dict:
        return vars(self.main.parse_args(["--recipe", self.recipe])[1])

    def steps(self) -> tuple[int, int, int]:
        """Returns (steps, steps before the stop, images in the data set). An epoch has at least two steps."""
        settings = self.settings()
        total = self.total_batch_size or settings["total_batch_size"]
        steps = max(3, math.ceil(self.images / total))  # the learning rate of the first step may be 0
        per_epoch = max(2, math.ceil(steps / settings["epochs"]))
        stop = (steps // 2) | 1
        if stop % per_epoch == 0:
            stop += 1
        return steps, stop, per_epoch * total


def find_jobs(args: argparse.Namespace) -> list[Job]:
    """Returns the jobs that the flags ask for. ValueError for unknown recipes and impossible numbers."""
    programs = dict.fromkeys(RECIPES, "main_pretrain") | dict.fromkeys(FINETUNE_RECIPES, "main_finetune")
    names = dict.fromkeys(args.recipes or programs)
    if unknown := [name for name in names if name not in programs]:
        raise ValueError(f"--recipes names {', '.join(unknown)}, which recipes.py does not have")
    check_least(args, 1, "images total_batch_size jobs")
    return [Job(programs[name], name, args.images, args.total_batch_size) for name in names]


# -------------------------------------------------------------------------------------------------- small models


def scale_of(main: ModuleType, settings: dict) -> dict:
    """Arguments that make the model of a recipe tiny.

    A ViT keeps 12 blocks, because recipes and frameworks name some of them. A Swin keeps its windows. GreenMIM's Swin
    also keeps its stages and grids, because the groups of windows depend on them.
    """
    model = full_size(main, settings["model"])
    if isinstance(model, GreenMIMSwin):
        sizes = dict(img_size=model.token_grid[0], patch_size=1, embed_dim=4, num_heads=(1,) * len(model.depths))
        return sizes | dict(depths=(2, 2, 1, 1)[: len(model.depths)]) | DECODER
    if isinstance(model, SwinEncoder):
        window = model.layers[0].window
        sizes = dict(img_size=4 * window, patch_size=2, embed_dim=8, depths=(2, 2), num_heads=(1, 2))
        return sizes | dict(window_size=window)
    depth = min(12, len(model.blocks))
    side = 64 if settings.get("mask_unit") == 4 else 48  # so that a square is visible
    return dict(img_size=side, patch_size=8, embed_dim=32, num_heads=2, depth=depth) | decoder_scale(model)


@cache
def full_size(main: ModuleType, name: str) -> torch.nn.Module:
    """Returns a model of `main.MODELS` in its full size, on the meta device."""
    with torch.device("meta"):
        return main.MODELS[name]()


def own_sizes(settings: dict, scale: dict) -> dict:
    """Returns the values of `scale` for the sizes that a recipe with a deep decoder sets itself, as {flag: value}."""
    if settings.get("decoder_depth") is None:
        return {}
    sizes = {flag: scale[flag] for flag in ("patch_size", "decoder_depth", "decoder_num_heads")}
    sizes["input_size"] = [scale["img_size"]] * 2
    return {flag: value for flag, value in sizes.items() if settings.get(flag) is not None}


def decoder_scale(model: torch.nn.Module) -> dict:
    return DECODER if any("decoder" in name for name, _ in model.named_modules()) else {}


@contextmanager
def scaled(main: ModuleType, name: str, scale: dict) -> Iterator[None]:
    """Within the context, `main` builds the model `name` with these sizes."""
    with patch.dict(main.MODELS, {name: partial(main.MODELS[name], **scale)}):
        yield


def encoder_of(settings: dict) -> str:
    """Returns the pre-training model whose encoder a fine-tuning recipe needs, by the names of recipe and model."""
    name, family = settings["model"], "swin" if settings["model"].startswith("swin") else "vit"
    framework = {"relative": "simmim", "swin": "greenmim"}.get(name.split("_")[0], "mae")
    others = [module.__name__.split("_")[1] for module in main_pretrain.FRAMEWORKS if module is not models_mae_pr]
    framework = next((other for other in others if other in settings["recipe"].split("_")), framework)
    if name.startswith("absolute"):
        framework = "amt_simmim"
    return next(model for model in main_pretrain.MODELS if model.startswith(f"{framework}_{family}_base"))


class Workshop:
    """The folder of all runs. It makes data sets, the teacher and encoders when they are first needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.photos = write_photos(root / "photos")

    def data(self, count: int) -> Path:
        """Returns a set of `count` training images, links to few photographs, as class folders and as iNaturalist."""
        root = self.root / f"data-{count}"
        for split, number in (("train", count), ("val", VAL_IMAGES)):
            if not (root / split).exists():
                link_photos(self.photos, root, split, number)
        return root

    def teacher(self) -> Path:
        """Returns a micro MAE after one step. Its patch size is that of the students."""
        return self.pretrained("teacher", TEACHER, {}, ["--patch_size", 8])

    def encoder(self, settings: dict) -> Path:
        """Returns a pre-trained encoder with the sizes of the recipe's scaled classifier."""
        pretrained = encoder_of(settings)
        scale = scale_of(main_finetune, settings) | decoder_scale(full_size(main_pretrain, pretrained))
        flags = ["--teacher", self.teacher()] if pretrained in models_tec_pr.__all__ else []
        if pretrained in models_amt_pr.__all__:
            flags = ["--sampling", "attention", "--attention_start", 0, "--attention_every", 1, "--epochs", 2]
        sizes = [str(scale[name]) for name in ("depth", "window_size") if name in scale]
        return self.pretrained("-".join(["encoder", pretrained, *sizes]), pretrained, scale, flags)

    def pretrained(self, name: str, model: str, scale: dict, flags: list) -> Path:
        """Returns the folder of a pre-training run with one step of 32 images."""
        folder = self.root / name
        if not newest_checkpoint(folder)[0]:
            folder.mkdir(exist_ok=True)
            argv = ["--model", model, "--total_batch_size", 32, "--epochs", 1, "--warmup_epochs", 0]
            argv += ["--throw_ratio", 0, *flags, *machine_flags(self.data(32), folder)]
            with quiet(folder / "console.txt"), scaled(main_pretrain, model, scale):
                call(main_pretrain, [str(flag) for flag in argv])
        return folder


def write_photos(folder: Path) -> list[Path]:
    """Writes smooth random pictures of several shapes, some of them grey, some as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, paths = np.random.default_rng(0), []
    for i in range(6 * len(SHAPES)):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        picture = coarse.resize(SHAPES[i % len(SHAPES)], Image.Resampling.BICUBIC)
        paths.append(folder / f"{i}.{'png' if i % 7 == 0 else 'jpg'}")
        picture.convert("L" if i % 11 == 0 else "RGB").save(paths[-1])
    return paths


def link_photos(photos: list[Path], root: Path, split: str, count: int) -> None:
    """Links `count` photographs into ROOT/<split>/<class>/, and writes iNaturalist's ROOT/<split><year>.json."""
    names = []
    for label in range(CLASSES):
        (root / split / f"class{label}").mkdir(parents=True)
    for i in range(count):
        photo = photos[i % len(photos)]
        names.append(f"{split}/class{i % CLASSES}/{i:06d}{photo.suffix}")
        os.link(photo, root / names[-1])
    content = {
        "categories": [{"id": label, "name": f"class{label}"} for label in range(CLASSES)],
        "images": [{"id": i, "file_name": name} for i, name in enumerate(names)],
        "annotations": [{"image_id": i, "category_id": i % CLASSES} for i in range(count)],
    }
    for year in INATURALIST.values():
        (root / f"{split}{year}.json").write_text(json.dumps(content))


def machine_flags(data: Path, folder: Path) -> list:
    """Returns the flags of all runs: on the CPU, without workers, a report after each step."""
    flags = ["--data_path", data, "--output_dir", folder]
    return [*flags, "--device", "cpu", "--num_workers", 0, "--print_freq", 1]


@contextmanager
def quiet(path: Path) -> Iterator[None]:
    """Appends everything that is printed within the context to the file `path`."""
    with open(path, "a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        yield


def command(job: Job, workshop: Workshop, folder: Path) -> list[str]:
    """Returns the command line of a job in `folder`. Makes its data, teacher and encoder."""
    settings, (_, _, count) = job.settings(), job.steps()
    argv = ["--recipe", job.recipe, *machine_flags(workshop.data(count), folder)]
    if job.total_batch_size:  # keep the peak learning rate: the recipe's warm-up and minimum are relative to it
        peak = settings["blr"] * settings["total_batch_size"] / 256
        argv += ["--total_batch_size", job.total_batch_size, "--lr", peak]
    for flag, value in own_sizes(settings, scale_of(job.main, settings)).items():
        argv += [f"--{flag}", *(value if isinstance(value, list) else [value])]
    if settings["dataset"] in DOWNLOADED:
        argv += ["--dataset", "folder"]
    if job.main is main_finetune:
        argv += ["--finetune", workshop.encoder(settings)]
    elif settings["model"] in models_tec_pr.__all__:
        argv += ["--teacher", workshop.teacher()]
    elif settings["model"] in models_greenmim_pr.__all__:
        total = job.total_batch_size or settings["total_batch_size"]
        argv += ["--batch_size", math.gcd(32, total)]  # a micro-batch shares one visible set: small ones give more sets
    return [str(flag) for flag in argv]


def run(job: Job, argv: list[str], folder: Path) -> dict:
    """Runs a job up to a step, resume it, and check its output. Returns a row of the table."""
    torch.set_num_threads(1)
    settings, (steps, stop, _) = job.settings(), job.steps()
    console, started, problems = folder.with_suffix(".txt"), time.perf_counter(), []
    try:
        scale = scale_of(job.main, settings)
        with quiet(console), scaled(job.main, settings["model"], scale):
            call(job.main, [*argv, "--max_steps", str(stop)])
            before = (folder / "log.jsonl").read_text()
            call(job.main, [*argv, "--max_steps", str(steps)])
        problems += check_run(job, folder, before)
    except Exception as error:  # the other recipes still run
        problems.append(f"{type(error).__name__}: {error}")
        with quiet(console):
            traceback.print_exc()
    row = describe(job, folder) | {"seconds": time.perf_counter() - started}
    return row | {"problem": "; ".join(problems)}


def call(main: ModuleType, argv: list[str]) -> None:
    """Calls the main. RuntimeError with its message if it would end the program with another exit code than 0."""
    with io.StringIO() as message:
        try:
            with redirect_stderr(message):
                main.main(argv)
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"exit code {stop.code}: {message.getvalue().strip()}") from stop
        finally:
            print(message.getvalue(), file=sys.stderr)


def check_run(job: Job, folder: Path, before: str) -> list[str]:
    """Checks a finished run, and return what is wrong. `before` is its log.jsonl at the stop."""
    (steps, stop, count), problems = job.steps(), []
    settings, reports = json.loads((folder / "settings.json").read_text()), read_reports(folder / "log.jsonl")
    losses = [(report["step"], report["loss"]) for report in reports if "loss" in report]
    bad = [step for step, loss in losses if loss is None or not math.isfinite(loss)]
    if bad:
        problems.append(f"losses that are not finite, first at step {bad[0]}")
    if any(report.get("skipped_steps") for report in reports):
        problems.append("steps were skipped, since their gradients were not finite")
    if [step for step, _ in losses] != list(range(1, steps + 1)):
        problems.append(f"steps 1 to {steps} should be reported once each, found {[step for step, _ in losses]}")
    if not (folder / "log.jsonl").read_text().startswith(before) or f'"step": {stop}, ' not in before.splitlines()[-1]:
        problems.append(f"the reports up to the stop after step {stop} are not what they were")
    resumed = re.findall(r"resuming .* at step (\d+)", (folder / "log.txt").read_text())
    if resumed != [str(stop)]:
        problems.append(f"one resume at step {stop} was expected, found {resumed}")
    newest, _ = newest_checkpoint(folder)
    if newest is None or newest.stem != f"checkpoint-{steps}":
        problems.append(f"the newest checkpoint should be of step {steps}, found {newest}")
    if job.main is main_finetune:
        per_epoch = count // settings["total_batch_size"]
        ends = list(range(per_epoch, steps + 1, per_epoch))
        evaluated = [report["step"] for report in reports if "val_top1" in report]
        if evaluated != ends or not ends:
            problems.append(f"evaluations after steps {ends} were expected, found {evaluated}")
    return problems + check_settings(job, settings)


def check_settings(job: Job, resolved: dict) -> list[str]:
    """Compares the run's settings with the recipe's, except those that `command` replaces."""
    wanted = json.loads(json.dumps((RECIPES | FINETUNE_RECIPES)[job.recipe] | {"batch_size": resolved["batch_size"]}))
    if wanted.get("dataset") in DOWNLOADED:
        del wanted["dataset"]
    if job.total_batch_size:
        wanted["total_batch_size"] = job.total_batch_size
    wanted |= own_sizes(wanted, scale_of(job.main, job.settings()))
    if isinstance(wanted.get("input_size"), list):
        wanted["input_size"] = (2 * wanted["input_size"])[:2]  # one number is height and width
    return [f"{name} was {resolved[name]}, not {value}" for name, value in wanted.items() if resolved[name] != value]


def describe(job: Job, folder: Path) -> dict:
    """Returns the columns of the table that come from settings.json and log.jsonl."""
    steps, stop, _ = job.steps()
    path, reports = folder / "settings.json", read_reports(folder / "log.jsonl")
    settings = json.loads(path.read_text()) if path.exists() else job.settings()
    losses = [report["loss"] for report in reports if "loss" in report]
    top1 = [report["val_top1"] for report in reports if "val_top1" in report]
    row = {name: settings[name] for name in ("model", "total_batch_size", "accum_iter")}
    return row | {
        "recipe": job.recipe,
        "program": job.program,
        "images": len(losses) * settings["total_batch_size"],
        "steps": steps,
        "stopped_after": stop,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "top1": top1[-1] if top1 else None,
    }


def run_all(jobs: list[Job], root: Path, processes: int) -> Iterator[dict]:
    workshop, work = Workshop(root), []
    for job in jobs:
        folder = root / job.recipe
        try:
            work.append((job, command(job, workshop, folder), folder))
        except Exception as error:  # the other recipes still run
            failure = {"seconds": 0.0, "problem": f"its preparation failed: {error}"}
            yield describe(job, folder) | failure
    if processes == 1:
        yield from (run(*parts) for parts in work)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, *parts) for parts in work]):
            yield future.result()


def line(row: dict) -> str:
    values = (row[name] for name in ("first_loss", "last_loss", "top1"))
    numbers = " ".join("      -" if value is None else f"{value:7.3f}" for value in values)
    steps = f"{row['stopped_after']:3}/{row['steps']:<3}"
    outcome = f"  FAILED: {row['problem']}" if row["problem"] else ""
    return f"{row['recipe']:36} {row['images']:6} {steps} {row['seconds']:5.0f}s {numbers}{outcome}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; `argv` replaces the command line. The exit code is 1 if a recipe failed."""
    parser = get_args_parser()
    args = parser.parse_args(argv)
    with user_errors(parser):
        jobs = find_jobs(args)
        prepare_file("--csv", args.csv)
        folder = args.output_dir
        if folder and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"--output_dir {str(folder)!r} is not an empty folder; name a new one")
    print(f"{'recipe':36} images  stop/steps time  first and last loss, top-1", flush=True)
    rows = []
    with nullcontext(args.output_dir) if args.output_dir else tempfile.TemporaryDirectory() as folder:
        for row in run_all(jobs, Path(folder).resolve(), args.jobs):
            rows.append(row)
            print(line(row), flush=True)
    order = {job.recipe: i for i, job in enumerate(jobs)}
    rows.sort(key=lambda row: order[row["recipe"]])
    failed = [row["recipe"] for row in rows if row["problem"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} recipes ran")
    if args.csv:
        write_csv(args.csv, COLUMNS, rows)
    if failed:
        parser.exit(1, f"run_recipes.py: error: recipes failed: {', '.join(failed)}\n")


if __name__ == "__main__":
    run_program(main, "run_recipes.py")
