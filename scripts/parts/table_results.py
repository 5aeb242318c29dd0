"""What the runs of the paper's tables have measured, and how they differ from their recipes and from the paper's data.

For `scripts/reproduce_table.py --collect`.
"""

import functools
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import main_finetune
import main_pretrain
import submitit_launch
from downstream.recipes import DOWNSTREAM_RECIPES
from prmim import SpatialAggregation
from recipes import FINETUNE_RECIPES, RECIPES
from scripts.parts.paper_tables import TABLES, Row, Table
from scripts.parts.table_runs import DOWNSTREAM, Run, describe_state, is_finished, is_test_set, runs_of
from util import costs
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from util.run import checkpoint
from util.run.folder import read_json
from util.run.resume import warn_if_unfinished
from util.tables import markdown_table, read_csv, write_csv

RECIPES_OF: dict[str, Any] = {"main_pretrain": RECIPES, "main_finetune": FINETUNE_RECIPES, **DOWNSTREAM_RECIPES}
# Flags that are not compared with the recipe, although they may change results.
FREE = {"precision", "nb_classes", "batch_size", "accum_iter"}
# What flags mean that are not set, on the data of the paper.
UNSET = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "masks": True, "pretrain_size": 224}
# Training and validation images of the data sets of the paper, by --dataset or by the program that reads them.
NUM_IMAGES = {
    "folder": (1_281_167, 50_000),
    "inat18": (437_513, 24_426),
    "inat19": (265_213, 3030),
    "main_segmentation": (20_210, 2000),
    "main_detection": (None, 5000),  # images without objects are not trained on
}
# Settings that do not change the cost of a step.
SCHEDULE = {"epochs", "warmup_epochs", "blr", "min_lr", "warmup_lr", "lr_schedule", "lr_steps", "sampling"}
FORMATS = {"module_gflops": ".2g", "flops": ".3f", "memory": ".2f", "time": ".2f"}  # others: ".1f"
COST_COLUMNS = {"memory": "peak_mb", "time": "ms"}  # of scripts/profile_pretrain.py
TITLES = ["row", "recipe", "epochs", "throw_ratio"]
COST_TEXT = ("recipe", "model", "device", "precision", "torch", "attention", "compile")

CostFiles = list[list[dict[str, Any]]]  # the rows of each CSV


@functools.cache
def settings_of(main: str, recipe: str) -> dict[str, Any]:
    """Returns all settings of a run with this recipe and no other flags, as its settings.json holds them."""
    module = importlib.import_module(submitit_launch.MAINS[main])
    settings = vars(module.parse_args(["--recipe", recipe])[1])
    with torch.device("meta"):
        if main == "main_pretrain":
            model = main_pretrain.build_model(settings, read_files=False)
            sizes = {**model.own_settings(), "input_size": model.img_size}
        else:
            model = main_finetune.MODELS[settings["model"]]()
            sizes = {"input_size": main_finetune.plain_size(model.img_size)}
    unset = UNSET | sizes | {"patch_size": model.patch_size}
    unset["lr"] = (settings.get("blr") or 0) * settings["total_batch_size"] / 256
    return json.loads(json.dumps({k: unset.get(k) if v is None else v for k, v in settings.items()}))


def find_deviations(run: Run) -> list[str]:
    """Returns a line for each difference between a run and its recipe that changes results.

    That is a setting with another value, another number of images, an incomplete test set, or an encoder whose
    pre-training is unfinished.
    """
    if run.main == "main_robustness":
        summary = read_json(run.folder / "robustness.json").get("summary", {})
        return [f"{run.name}: {result['title']} is incomplete" for result in summary.values() if result["incomplete"]]
    settings = read_json(run.folder / "settings.json")
    if not settings:
        return []
    recipe, expected = RECIPES_OF[run.main][run.recipe], settings_of(run.main, run.recipe)
    changes = importlib.import_module(submitit_launch.MAINS[run.main]).get_args_parser().changes
    changes["pretrained"] = "results"  # a path of the recipe; --finetune names a run, whose state is looked up
    compared = {name for name, change in changes.items() if change == "results"} - FREE
    names = [name for name in expected if name in recipe or name in compared]
    changed = [name for name in names if settings.get(name, expected[name]) != expected[name]]
    found = [f"{name} {settings[name]} instead of {expected[name]}" for name in changed]
    meta = next(filter(None, map(checkpoint.read_record, reversed(checkpoint.list_checkpoints(run.folder)))), {})
    numbers = NUM_IMAGES.get(run.main, NUM_IMAGES.get(expected.get("dataset", ""), (None, None)))
    for key, name, number in zip(("data", "val_data"), ("num_images", "num_val_images"), numbers, strict=True):
        facts = meta.get(key)
        if facts is not None and number is not None and facts["num_images"] != number:
            found.append(f"{name} {facts['num_images']} instead of {number}")
    encoder = read_json(run.folder / "results.json").get("encoder")
    return [f"{run.name}: {text}" for text in found + (warn_if_unfinished(encoder) if encoder else [])]


@functools.cache
def forward_gmac(recipe: str) -> float:
    """Returns the forward multiply-adds of one image, in 10^9, without a frozen teacher."""
    same = next(name for name in RECIPES if same_cost(name, recipe))  # many recipes share a count, which takes a second
    if same != recipe:
        return forward_gmac(same)
    settings = settings_of("main_pretrain", recipe) | {"sampling": "furthest"}
    return costs.forward_gmac(settings, main_pretrain.build_model)[0]


def aggregation_gmac(recipe: str) -> float:
    """Returns the forward multiply-adds of the spatial aggregation for one image, in 10^9."""
    settings, calls = settings_of("main_pretrain", recipe), []
    with torch.device("meta"):
        model = main_pretrain.build_model(settings)
        imgs = torch.empty(1, 3, *model.img_size)
    for module in model.modules():
        if isinstance(module, SpatialAggregation):
            module.register_forward_pre_hook(lambda module, inputs: calls.append((module, inputs)))
    model(imgs, *[order.to("meta") for order in costs.make_batch(model, settings, 1)[1]])
    return sum(costs.count_gmac(functools.partial(module.forward, *inputs)) for module, inputs in calls)


def find_baseline(table: Table, row: Row) -> str | None:
    """Returns the recipe of the same model that throws nothing, from the same table."""
    model = RECIPES[row.pretrain]["model"]
    recipes = [other.pretrain for other in table.rows if other.throw_ratio == 0]
    return next((recipe for recipe in recipes if RECIPES[recipe]["model"] == model), None)


def same_cost(name: str, other: str) -> bool:
    """Whether a step of two recipes costs the same: they differ at most in their schedule."""
    parts = [{k: v for k, v in RECIPES.get(recipe, {}).items() if k not in SCHEDULE} for recipe in (name, other)]
    return bool(parts[0]) and parts[0] == parts[1]


def read_costs(paths: Sequence[str]) -> CostFiles:
    """Returns the rows of each CSV of scripts/profile_pretrain.py."""
    return [read_csv(path, ("recipe", *COST_COLUMNS.values()), COST_TEXT) for path in paths]


def cost_ratio(files: CostFiles, recipe: str, baseline: str, column: str) -> float | None:
    """Returns the cost of `recipe` relative to `baseline`, from the first file with both."""
    names = (recipe, baseline)
    for rows in files:
        found = {
            name: [row[column] for row in rows if row[column] and same_cost(row["recipe"], name)] for name in names
        }
        if all(found.values()):
            return found[recipe][0] / found[baseline][0]
    return None


def measured(table: Table, row: Row, column: str, run: Run | None, files: CostFiles) -> float | None:
    """Returns the measured number of a column, or None. files: of `read_costs`."""
    measure, baseline = table.columns[column], find_baseline(table, row)
    if run is not None and measure in ("top1", *DOWNSTREAM):
        return read_json(run.folder / "results.json")["last"][f"val_{measure}"] if is_finished(run) else None
    if run is not None:
        result = read_json(run.folder / "robustness.json").get("summary", {}).get(measure, {})
        return result.get("mce", result.get("top1"))
    if measure == "module_gflops":
        return aggregation_gmac(row.pretrain)
    if baseline is None:
        return None
    if measure == "flops":
        return forward_gmac(row.pretrain) / forward_gmac(baseline)
    return cost_ratio(files, row.pretrain, baseline, COST_COLUMNS[measure])


def collect(name: str, rows: Sequence[Row], root: Path, files: CostFiles) -> str:
    """Writes ROOT/<table>.csv and ROOT/<table>.md, and returns the latter's text."""
    table = TABLES[name]
    print(f"{name}: {len(rows)} rows", file=sys.stderr, flush=True)
    sets = [measure for measure in table.columns.values() if is_test_set(measure)]
    titles = [*TITLES, *(title for column in table.columns for title in (column, f"{column} measured")), "state"]
    lines, records, notes = [], [], [table.note] if table.note else []
    for row in rows:
        runs = runs_of(table, row, root, sets)
        first = [row.label, row.pretrain, row.epochs, row.throw_ratio]
        state = describe_state(list(runs.values()))
        numbers: list[Any] = []
        cells: list[str] = []
        for (column, measure), printed in zip(table.columns.items(), row.numbers, strict=True):
            value, published = measured(table, row, column, runs.get(column), files), printed.removeprefix("-")
            numbers += [published, value]
            cells += [published, "" if value is None else format(value, FORMATS.get(measure, ".1f"))]
        records.append(dict(zip(titles, [*first, *numbers, state], strict=True)))
        lines.append([*first, *cells, state])
        notes += [note for run in runs.values() for link in run.chain for note in find_deviations(link)]
    root.mkdir(parents=True, exist_ok=True)
    write_csv(root / f"{name}.csv", titles, records)
    text = f"## {table.title}\n\n{markdown_table(titles, lines, left=2)}\n"
    if notes:
        text += "\n" + "".join(f"- {note}\n" for note in dict.fromkeys(notes))
    (root / f"{name}.md").write_text(text, encoding="utf-8")
    return text
