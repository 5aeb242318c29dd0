"""Run every recipe at a tiny scale, through the mains: small models, synthetic photographs, one stop and one resume.

    python tools/run_recipes.py                                    # all recipes
    python tools/run_recipes.py --recipes finetune_vit_base --csv new.csv
    python tools/run_recipes.py --images 96 --total_batch_size 32  # a quick check

Only the model's sizes and the number of images are scaled down. A recipe keeps its total batch size, schedule, losses,
augmentation, regularisation, optimizer and evaluation. The checks: no exception, finite losses, one report per step,
the step of the resume, and an evaluation of the fine-tuned.
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import main_finetune
import main_pretrain
from encoders import classifiers
from frameworks import registry
from recipes import FINETUNE_RECIPES, RECIPES
from util.run.cli import Parser, prepare_file, run_program, user_errors
from util.run.files.reports import read_reports
from util.run.files.search import newest_checkpoint
from util.tables import write_csv

# Width and height. In an image of 1:5 few boxes of the random crop fit, so the crop uses its fallback.
SHAPES = ((48, 40), (60, 20), (64, 64), (20, 100), (150, 120))
NUM_CLASSES = 10
DECODER = dict(decoder_embed_dim=32, decoder_depth=1, decoder_num_heads=2)
# First word of a classifier's name -> the recipe whose encoder it is fine-tuned from.
ENCODERS = {
    "vit": "mae_vit_base_100ep",
    "relative": "simmim_vit_base_100ep",
    "absolute": "amt_simmim_vit_base_200ep",
    "swin": "simmim_swin_base_100ep",
}
TEC_ENCODER = "tec_mae_vit_base_100ep"  # has the MLP on the class token that --cls_token_mlp trains
COLUMNS = ["recipe", "program", "model", "total_batch_size", "accum_iter", "images", "steps", "stopped_after"]
COLUMNS += ["seconds", "first_loss", "last_loss", "top1", "problem"]


def factories_of(name: str) -> dict[str, Any]:
    """The models of the program that has the model `name`."""
    if name in registry.MODELS:
        return registry.MODELS
    return classifiers.MODELS


def scale_of(name: str, mask_unit: int | None = None) -> dict[str, Any]:
    """Arguments that make a model tiny.

    A ViT has up to 12 blocks, because recipes and frameworks name some of them. A Swin keeps its windows. GreenMIM's
    Swin also keeps its stages and grids, because the groups of windows depend on them.
    """
    full = factories_of(name)[name].keywords
    sizes: dict[str, Any] = {}
    if name.startswith("greenmim_"):
        num_stages = len(full["depths"])
        sizes["img_size"] = full.get("img_size", 224) // 4
        sizes["patch_size"] = 1
        sizes["embed_dim"] = 4
        sizes["depths"] = (2, 2, 1, 1)[:num_stages]
        sizes["num_heads"] = (1,) * num_stages
    elif "swin" in name:
        sizes["img_size"] = 4 * full["window_size"]
        sizes["window_size"] = full["window_size"]
        sizes["patch_size"] = 2
        sizes["embed_dim"] = 8
        sizes["depths"] = (2, 2)
        sizes["num_heads"] = (1, 2)
    else:
        sizes["img_size"] = 48
        if mask_unit == 4:
            sizes["img_size"] = 64  # so that a square is visible
        sizes["patch_size"] = 8
        sizes["embed_dim"] = 32
        sizes["num_heads"] = 2
        sizes["depth"] = min(12, full["depth"])
        if "simmim" in name and name in registry.MODELS:
            sizes["mask_unit"] = 2  # tokens, as with patches of 16 px
    if name in registry.MODELS and "simmim" not in name:
        sizes |= DECODER
    return sizes


@contextmanager
def scaled(name: str, sizes: dict[str, Any]) -> Iterator[None]:
    """Within the context, the model `name` has these sizes."""
    models = factories_of(name)
    with patch.dict(models, {name: partial(models[name], **sizes)}):
        yield


def write_images(root: Path, count: int) -> Path:
    """Makes ROOT/data-<count>/{train,val} unless it is there: links to few smooth random pictures, in class folders."""
    folder = root / f"data-{count}"
    if folder.exists():
        return folder
    rng = np.random.default_rng(0)
    pictures = []
    for i in range(6 * len(SHAPES)):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        picture = coarse.resize(SHAPES[i % len(SHAPES)], Image.Resampling.BICUBIC)
        pictures.append(root / f"{i}.jpg")
        picture.save(pictures[-1])
    for split, num_images in (("train", count), ("val", 4 * NUM_CLASSES)):
        for i in range(num_images):
            path = folder / split / f"class{i % NUM_CLASSES}" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(pictures[i % len(pictures)], path)
    return folder


def call(main: ModuleType, images: Path, folder: Path, *flags: object) -> None:
    """Calls a main, whose output goes to FOLDER.txt."""
    argv = ["--data_path", images, "--output_dir", folder, "--device", "cpu", "--num_workers", 0, "--print_freq", 1]
    with open(folder.with_suffix(".txt"), "a") as console, redirect_stdout(console), redirect_stderr(console):
        try:
            main.main([str(word) for word in (*argv, *flags)])
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"exit code {stop.code}, see {console.name}") from stop
        except Exception:
            traceback.print_exc()
            raise


def pretrain_one_step(root: Path, recipe: str, sizes: dict[str, Any], *flags: object) -> Path:
    """Returns the folder of a small model after one step of its recipe, which is made when it is first needed."""
    folder = root / f"one_step-{recipe}-{'-'.join(str(size) for size in sizes.values())}".replace(" ", "")
    newest, _ = newest_checkpoint(folder)
    if newest is None:
        flags = ("--recipe", recipe, "--dataset", "folder", "--total_batch_size", 32, "--lr", 1e-3, *flags)
        with scaled(str(RECIPES[recipe]["model"]), sizes):
            call(main_pretrain, write_images(root, 32), folder, *flags, "--max_steps", 1)
    return folder


def flags_of(main: ModuleType, settings: dict[str, Any], sizes: dict[str, Any], root: Path) -> list[object]:
    """Flags of a recipe's run beside --recipe: sizes that the recipe sets itself, and the files that it needs."""
    flags: list[object] = ["--dataset", "folder"]
    small = {**sizes, "input_size": sizes["img_size"]}
    for flag in ("input_size", "patch_size", *DECODER):
        if settings.get(flag) is not None and flag in small:
            flags += [f"--{flag}", small[flag]]
    name = settings["model"]
    if main is main_finetune:
        recipe = ENCODERS[name.split("_")[0]]
        if settings["cls_token_mlp"]:
            recipe = TEC_ENCODER
        encoder = str(RECIPES[recipe]["model"])
        encoder_flags = teacher_flags(encoder, root)
        flags += ["--finetune", pretrain_one_step(root, recipe, scale_of(encoder) | sizes, *encoder_flags)]
    else:
        flags += teacher_flags(name, root)
    return flags


def teacher_flags(model: str, root: Path) -> list[object]:
    """Returns --teacher with a small MAE, if the model learns from a teacher."""
    if all(flag.name != "teacher" for flag in registry.CLASS_OF[model].flags):
        return []
    flags = ["--model", "mae_vit_micro_patch4", "--patch_size", 8]  # a teacher must have a known size
    return ["--teacher", pretrain_one_step(root, "cifar10_mae", {}, *flags)]


def run(recipe: str, root: Path, num_images: int, total_batch_size: int | None) -> dict[str, Any]:
    """Runs a recipe up to a step, resumes it, and checks its log. Returns a row of the table."""
    main: ModuleType = main_pretrain
    if recipe not in RECIPES:
        main = main_finetune
    settings = vars(main.parse_args(["--recipe", recipe])[1])
    total = total_batch_size or settings["total_batch_size"]
    steps = max(3, math.ceil(num_images / total))  # the learning rate of the first step may be 0
    epoch_steps = max(2, math.ceil(steps / settings["epochs"]))
    stop = (steps // 2) | 1
    if stop % epoch_steps == 0:
        stop += 1  # in the middle of an epoch
    row = {
        "recipe": recipe,
        "program": main.__name__,
        "model": settings["model"],
        "total_batch_size": total,
        "steps": steps,
        "images": steps * total,
        "stopped_after": stop,
        "problem": "",
    }
    started = time.perf_counter()
    folder = root / recipe
    try:
        sizes = scale_of(settings["model"], settings.get("mask_unit"))
        flags = ["--recipe", recipe, *flags_of(main, settings, sizes, root)]
        if total_batch_size is not None:  # keep the peak learning rate: warm-up and minimum are relative to it
            flags += ["--total_batch_size", total, "--lr", settings["blr"] * settings["total_batch_size"] / 256]
        if "greenmim" in settings["model"]:
            flags += ["--batch_size", math.gcd(32, total)]  # a micro-batch shares one visible set
        images = write_images(root, epoch_steps * total)
        with scaled(settings["model"], sizes):
            call(main, images, folder, *flags, "--max_steps", stop)
            call(main, images, folder, *flags, "--max_steps", steps)
        row |= check(folder, steps, stop, main is main_finetune)
    except Exception as error:  # the other recipes still run
        row["problem"] = f"{type(error).__name__}: {error}"
    return row | {"seconds": time.perf_counter() - started}


def check(folder: Path, steps: int, stop: int, is_finetuning: bool) -> dict[str, Any]:
    """Returns what the log of a finished run says. ValueError if it is not as it should be."""
    reported = []
    losses = []
    top1 = None
    for report in read_reports(folder / "log.jsonl"):
        if report.get("skipped_steps"):
            raise ValueError(f"gradients are not finite at step {report['step']}")
        if "loss" in report:
            reported.append(report["step"])
            losses.append(report["loss"])
        top1 = report.get("val_top1", top1)
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        raise ValueError(f"losses are not finite: {losses}")
    if reported != list(range(1, steps + 1)):
        raise ValueError(f"steps 1 to {steps} should be reported once each, found {reported}")
    resumed = re.findall(r"resuming .* at step (\d+)", (folder / "log.txt").read_text())
    if resumed != [str(stop)]:
        raise ValueError(f"one resume at step {stop} was expected, found {resumed}")
    if is_finetuning and top1 is None:
        raise ValueError("there was no evaluation")
    accum_iter = json.loads((folder / "settings.json").read_text())["accum_iter"]
    return {"accum_iter": accum_iter, "first_loss": losses[0], "last_loss": losses[-1], "top1": top1}


def parse_args(argv: Sequence[str] | None) -> tuple[Parser, argparse.Namespace]:
    parser = Parser("run_recipes.py", description=__doc__)
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="recipes to run (default: all of recipes.py)")
    parser.add_argument("--output_dir", type=Path, help="a new folder for data and runs (default: a temporary one)")
    parser.add_argument("--images", type=int, default=5000, at_least=1, help="least number of images to train on")
    parser.add_argument("--total_batch_size", type=int, at_least=1, help="replaces the recipe's own")
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    args = parser.parse_args(argv)
    known = [*RECIPES, *FINETUNE_RECIPES]
    args.recipes = args.recipes or known
    with user_errors(parser):
        for name in args.recipes:
            if name not in known:
                raise ValueError(f"--recipes names {name!r}, which recipes.py does not have")
        prepare_file("--csv", args.csv)
        if args.output_dir is not None:
            args.output_dir.mkdir(parents=True)
    return parser, args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; `argv` replaces the command line. The exit code is 1 if a recipe failed."""
    parser, args = parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for recipe in args.recipes:
            rows.append(run(recipe, args.output_dir or Path(temporary), args.images, args.total_batch_size))
            print(f"{recipe:36} {rows[-1]['seconds']:5.0f} s  {rows[-1]['problem'] or 'ran'}", flush=True)
            if args.csv:
                write_csv(args.csv, COLUMNS, rows)
    failed = [row["recipe"] for row in rows if row["problem"]]
    if failed:
        parser.exit(1, f"run_recipes.py: error: recipes failed: {', '.join(failed)}\n")


if __name__ == "__main__":
    run_program(main, "run_recipes.py")
