"""How a finished run differs from its recipe and from the data of the paper. For scripts/reproduce_table.py."""

import functools
import importlib
import json
from typing import Any

import torch

import main_finetune
import main_pretrain
import submitit_launch
from downstream.recipes import DOWNSTREAM_RECIPES
from recipes import FINETUNE_RECIPES, RECIPES
from scripts.table_runs import Run
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from util.run import checkpoint
from util.run.flags import MACHINE_FLAGS
from util.run.folder import read_json
from util.run.resume import warn_if_unfinished

RECIPES_OF: dict[str, Any] = {"main_pretrain": RECIPES, "main_finetune": FINETUNE_RECIPES, **DOWNSTREAM_RECIPES}
# Flags that do not change results, beside those of the machine. --finetune names a run, whose state is looked up.
FREE = {"precision", "eval", "eval_every", "finetune", "nb_classes"}
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
    free = MACHINE_FLAGS | FREE | getattr(importlib.import_module(submitit_launch.MAINS[run.main]), "FREE_FLAGS", set())
    names = [name for name in expected if name in recipe or name not in free - {"pretrained"}]
    changed = [name for name in names if settings.get(name, expected[name]) != expected[name]]
    found = [f"{name} {settings[name]} instead of {expected[name]}" for name in changed]
    meta = next(filter(None, map(checkpoint.read_record, reversed(checkpoint.list_checkpoints(run.folder)))), {})
    numbers = NUM_IMAGES.get(run.main, NUM_IMAGES.get(expected.get("dataset", ""), (None, None)))
    for key, number in zip(("num_images", "num_val_images"), numbers, strict=True):
        if number is not None and meta.get(key, number) != number:
            found.append(f"{key} {meta[key]} instead of {number}")
    encoder = read_json(run.folder / "results.json").get("encoder")
    return [f"{run.name}: {text}" for text in found + (warn_if_unfinished(encoder) if encoder else [])]
