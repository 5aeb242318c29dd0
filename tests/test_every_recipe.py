"""Every recipe of pre-training and fine-tuning trains, as it is written, but with the smallest model of its kind."""

import re

import pytest

import main_finetune
import main_pretrain
from recipes import FINETUNE_RECIPES, RECIPES
from tests import runs

SMALL = "--patch_size 4 --batch_size 8 --total_batch_size 8 --lr 1e-3 --max_steps 1 --num_workers 0 --device cpu"
SMALL_IMAGES = "--dataset folder --input_size 32"


def smallest(model: str) -> str:
    """Returns, for example, "swin_micro_patch4_window4" for "swin_base_patch4_window7"."""
    model = re.sub(r"_window\d+$", "_window4", model)
    return re.sub(r"_(mini|small|base|large|huge)_patch\d+", "_micro_patch4", model)


def all_recipes() -> list[object]:
    """The first of each model, and as long tests the others."""
    models = set()
    parameters = []
    for name, recipe in {**RECIPES, **FINETUNE_RECIPES}.items():
        model = recipe["model"], recipe.get("trainable_blocks")
        marks = [pytest.mark.long] if model in models else []
        models.add(model)
        parameters.append(pytest.param(name, marks=marks))
    return parameters


@pytest.mark.parametrize("name", all_recipes())
def test_a_recipe_trains(name, labelled, pretrained, tmp_path):
    main = main_finetune
    recipe = FINETUNE_RECIPES.get(name)
    if recipe is None:
        main = main_pretrain
        recipe = RECIPES[name]
    model = smallest(recipe["model"])
    flags = ["--recipe", name, "--model", model, *SMALL_IMAGES.split()]
    if model.startswith("tec_"):
        flags += ["--teacher", pretrained]
    if "trainable_blocks" in recipe:  # of the 4 blocks that the smallest model has
        flags += ["--trainable_blocks", min(recipe["trainable_blocks"], 2), "--finetune", pretrained]
    checkpoint = runs.Program(main, SMALL)(labelled, tmp_path / "run", *flags)
    assert checkpoint["meta"]["step"] == 1
    report = runs.reports(tmp_path / "run")[0]
    assert report["loss"] > 0
