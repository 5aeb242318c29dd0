"""docs/published.csv, the one table of published numbers: its recipes exist, and the documents print its numbers."""

import re
from pathlib import Path

import pytest

from downstream.recipes import DOWNSTREAM_RECIPES
from recipes import FINETUNE_RECIPES, RECIPES
from scripts.reproduce_table import NOT_OF_THE_PAPER, read_published
from tests.gmac import forward_gmac
from tests.test_recipes import settings_of

ROOT = Path(__file__).resolve().parents[1]
ALL = read_published()
PAPER = [row for row in ALL if row["table"] not in NOT_OF_THE_PAPER]
COUNTED = {row["pretrain"]: row["published"] for row in ALL if row["table"] == "counted here"}


# Recipes of the paper's models that no table of it names: small runs of this project, releases' own rows, ablations.
def published(pretrain, measure="top1", column="Top-1"):
    """Returns the number of a recipe of pre-training as printed; None without."""
    for row in ALL:
        if (row["pretrain"], row["measure"], row["column"]) == (pretrain, measure, column):
            return row["published"]
    return None


def without_epochs(recipe):
    return re.sub(r"_\d+ep$", "", recipe)


def test_the_recipes_of_rows_exist_and_are_as_printed():
    evaluations = {*FINETUNE_RECIPES}.union(*DOWNSTREAM_RECIPES.values())
    for row in ALL:
        assert row["evaluate"] in evaluations or row["evaluate"] == ""
        if row["table"] == "other pre-training":
            assert row["pretrain"] in RECIPES
    for row in PAPER:
        recipe = RECIPES[row["pretrain"]]
        assert str(recipe["epochs"]) == row["epochs"]
        assert str(round(100 * recipe["throw_ratio"])) == row["throw_ratio"]
        assert re.fullmatch(r"-|fail|\d+(\.\d+)?(e-\d)?", row["published"])
        if "PR-MIM" in row["row"]:
            assert recipe["progressive"]


MASK_RATIOS_OF_BASELINES = {"amt_vit_base": 0.75, "amt_simmim24_vit_base": 0.6}


@pytest.mark.parametrize("name", COUNTED)
def test_counted_costs(name):
    """And those that the paper prints are within .016, but SimMIM's, which need 50 % thrown tokens."""
    recipe = next(recipe for recipe in RECIPES if without_epochs(recipe) == name)
    settings = settings_of(recipe)
    full = {**settings, "throw_ratio": 0.0}
    full["mask_ratio"] = MASK_RATIOS_OF_BASELINES.get(name, settings["mask_ratio"])
    ratio = forward_gmac(settings)[0] / forward_gmac(full)[0]
    assert ratio == pytest.approx(float(COUNTED[name]), abs=6e-4)
    printed = published(recipe, "flops", "FLOPs")
    if printed is not None and name != "simmim_prmim30_vit_base":
        assert ratio == pytest.approx(float(printed), abs=0.016)


# ------------------------------------------------------------------------------------------ tables of the documents


def table_of(page, name):
    """The rows of the table between the marks of a document, without its head: lists of cells."""
    text = (ROOT / page).read_text()
    (table,) = re.findall(rf"<!-- published {name} -->\n(.*?)<!-- end of {name} -->", text, re.DOTALL)
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[2:]]


def arms_of(recipe):
    """The recipes without throwing, of plain reconstruction, and of PR-MIM."""
    baseline = "mae_"
    if "_prmim" in recipe:
        baseline = ""
    return re.sub(r"prmim\d+_", baseline, recipe), recipe.replace("prmim", "plain"), recipe


def costs_of(recipe):
    """The cells of a recipe's FLOPs: published, counted. How tokens are sampled costs nothing."""
    if recipe.startswith("mae_"):
        return ["1", "1"]
    counted = without_epochs(recipe).replace("progressive", "prmim").replace("furthest", "plain")
    printed = published(recipe, "flops", "FLOPs")
    return ["–" if printed is None else printed.removeprefix("0"), COUNTED[counted].removeprefix("0")]


def test_the_main_result_is_as_published():
    rows = table_of("README.md", "main result")
    for (_, *cells), arm in zip(rows, ("mae", "plain50", "prmim50"), strict=True):
        top1 = [published(f"{arm}_vit_base_{epochs}ep") for epochs in (100, 300, 800)]
        assert cells == costs_of(f"{arm}_vit_base_100ep") + top1


def test_the_tables_of_pre_training_are_as_published():
    for name, *cells in table_of("docs/pretrain.md", "ablation"):
        recipes = [name]
        if "…" in name:
            recipes = [name.replace("…", percent) for percent in ("25", "50", "65")]
        assert cells == [" / ".join(published(recipe) for recipe in recipes)], name
    for recipe, *cells in table_of("docs/pretrain.md", "frameworks"):
        printed, counted = costs_of(recipe)
        cost = counted if printed == "–" else f"{counted} ({printed})"
        assert cells == [*(published(arm) or "–" for arm in arms_of(recipe)), cost], recipe
