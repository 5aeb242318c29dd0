import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import models_mae_pr as mae
from downstream.recipes import DOWNSTREAM_RECIPES
from downstream.robustness.benchmarks import BENCHMARKS
from frameworks import models_greenmim_pr as greenmim
from frameworks import models_localmim_pr as localmim
from frameworks import models_mff_pr as mff
from frameworks import models_simmim_pr as simmim
from frameworks import models_tec_pr as tec
from main_pretrain import get_args_parser
from recipes import FINETUNE_RECIPES, RECIPES
from scripts.parts.paper_tables import (
    COUNTED_FLOPS,
    OTHER_EVALUATION,
    OTHER_PRETRAINING,
    TABLES,
)
from scripts.parts.table_runs import DOWNSTREAM
from tests.gmac import forward_gmac
from util.run.cli import parse_with_recipe

ROOT = Path(__file__).resolve().parents[2]
ROWS = [(name, row) for name, table in TABLES.items() for row in table.rows]
MEASURES = {"top1", *DOWNSTREAM, "flops", "memory", "time", "module_gflops", "none", *BENCHMARKS}
PAPER_MODELS = {name for module in (mae, mff, simmim, localmim, tec, greenmim) for name in module.__all__}
# Recipes of the paper's models that no table of it names: small runs of this project, releases' own rows, ablations.
NOT_IN_THE_PAPER = """
    *cifar10* quickstart*
    mff_vit_base_300ep localmim_vit_base_1600ep localmim_vit_large_800ep tec_vit_base_800ep tec_mae_*
    simmim_swin_* simmim_prmim50_* greenmim_swin_*_800ep
    finetune_vit_huge linprobe_vit_large linprobe_vit_huge simmim_finetune_swin_* tec_finetune_vit_base_800ep
    localmim_finetune_vit_base_1600ep localmim_finetune_vit_large_800ep
    deep* pixio_* imagenette_* lightly_* attention* cell* avgpool_thrown_* amt_mae_*
"""


def published_top1(pretrain):
    """Returns the ImageNet-1K top-1 of a recipe of pre-training, after its fine-tuning."""
    for table in TABLES.values():
        for row in table.rows:
            if row.pretrain == pretrain and "Top-1" in table.columns:
                return row.numbers[0]
    return OTHER_PRETRAINING.get(pretrain, (None,))[0]


def published_costs(pretrain):
    """Returns {flops, memory, time} of a recipe of pre-training, as far as the paper prints them."""
    for table in TABLES.values():
        for row in table.rows:
            if row.pretrain == pretrain and "flops" in table.columns.values():
                printed = zip(table.columns.values(), row.numbers, strict=True)
                return {measure: float(number) for measure, number in printed if measure != "top1"}
    return {}


def test_every_recipe_of_a_row_exists():
    known = {*FINETUNE_RECIPES}
    for recipes in DOWNSTREAM_RECIPES.values():
        known.update(recipes)
    for name, row in ROWS:
        assert row.pretrain in RECIPES, (name, row.label)
        assert set(row.finetune.values()) <= known, (name, row.label)
    assert OTHER_PRETRAINING.keys() <= RECIPES.keys()
    assert OTHER_EVALUATION.keys() <= known


def test_every_recipe_of_the_paper_is_in_a_table():
    used = set()
    for _, row in ROWS:
        used |= {row.pretrain, *row.finetune.values()}
    recipes = {name for name, recipe in RECIPES.items() if recipe["model"] in PAPER_MODELS}
    for recipe in recipes | FINETUNE_RECIPES.keys():
        is_listed = any(fnmatchcase(recipe, pattern) for pattern in NOT_IN_THE_PAPER.split())
        assert is_listed != (recipe in used), recipe


@pytest.mark.parametrize(("name", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else value.label)
def test_rows_say_what_their_recipes_do(name, row):
    recipe = RECIPES[row.pretrain]
    assert recipe["epochs"] == row.epochs
    assert round(100 * recipe["throw_ratio"]) == row.throw_ratio
    if "PR-MIM" in row.label:
        assert recipe["progressive"]
    framework = row.label.split(",")[0].removesuffix(" †")
    if framework in ("MAE", "SimMIM", "LocalMIM", "MFF", "TEC", "GreenMIM") and row.throw_ratio:
        assert not recipe.get("progressive")


@pytest.mark.parametrize("name", TABLES)
def test_columns_are_measures_and_have_a_number_in_each_row(name):
    table = TABLES[name]
    assert set(table.columns.values()) <= MEASURES
    evaluated = {title for title, measure in table.columns.items() if measure in ("top1", *DOWNSTREAM, *BENCHMARKS)}
    for row in table.rows:
        assert set(row.finetune) == evaluated
        assert len(row.numbers) == len(table.columns)
        for number in row.numbers:
            assert re.fullmatch(r"-|fail|\d+(\.\d+)?(e-\d)?", number)


def test_a_recipe_has_one_number_in_all_tables():
    """As far as it is fine-tuned by one recipe: tables repeat rows."""
    numbers = {}
    for name, row in ROWS:
        for (title, measure), number in zip(TABLES[name].columns.items(), row.numbers, strict=True):
            if title in row.finetune and number != "-":
                key = (row.pretrain, row.finetune[title], measure)
                assert numbers.setdefault(key, number) == number, key
    assert len(numbers) > 80


def settings_of(recipe):
    return vars(parse_with_recipe(get_args_parser(), RECIPES, ["--recipe", recipe]))


MASK_RATIOS_OF_BASELINES = {"amt_vit_base": 0.75, "amt_simmim24_vit_base": 0.6}


@pytest.mark.parametrize("name", COUNTED_FLOPS)
def test_counted_costs(name):
    """And those that the paper prints are within .01, but SimMIM's, which need 50 % thrown tokens."""
    recipe = next(recipe for recipe in RECIPES if re.sub(r"_\d+ep$", "", recipe) == name)
    settings = settings_of(recipe)
    full = {**settings, "throw_ratio": 0.0}
    full["mask_ratio"] = MASK_RATIOS_OF_BASELINES.get(name, settings["mask_ratio"])
    ratio = forward_gmac(settings)[0] / forward_gmac(full)[0]
    assert ratio == pytest.approx(COUNTED_FLOPS[name], abs=6e-4)
    if name != "simmim_prmim30_vit_base":
        assert ratio == pytest.approx(published_costs(recipe).get("flops", ratio), abs=0.016)


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
    counted = re.sub(r"_\d+ep$", "", recipe).replace("progressive", "prmim").replace("furthest", "plain")
    published = published_costs(recipe).get("flops")
    return ["–" if published is None else f"{published:.2f}"[1:], f"{COUNTED_FLOPS[counted]:.3f}"[1:]]


def test_the_main_result_is_as_published():
    rows = table_of("README.md", "main result")
    for (_, *cells), arm in zip(rows, ("mae", "plain50", "prmim50"), strict=True):
        top1 = [published_top1(f"{arm}_vit_base_{epochs}ep") for epochs in (100, 300, 800)]
        assert cells == costs_of(f"{arm}_vit_base_100ep") + top1


def test_the_tables_of_pre_training_are_as_published():
    for name, *cells in table_of("docs/pretrain.md", "ablation"):
        recipes = [name]
        if "…" in name:
            recipes = [name.replace("…", percent) for percent in ("25", "50", "65")]
        assert cells == [" / ".join(published_top1(recipe) for recipe in recipes)], name
    text = " ".join((ROOT / "docs/pretrain.md").read_text().split())
    costs = {}
    for arm in ("plain", "furthest", "progressive", "prmim"):
        of_arm = [costs_of(f"{arm}{percent}_vit_base_100ep") for percent in ("25", "50", "65")]
        costs[arm] = [" / ".join(column) for column in zip(*of_arm, strict=True)]
    published, counted = costs["plain"]
    assert costs["furthest"] == [published, counted]
    assert costs["progressive"] == costs["prmim"] == [published, costs["prmim"][1]]
    assert f"FLOPs: {counted}, with progressive reconstruction {costs['prmim'][1]} (published {published})." in text
    for recipe, *cells in table_of("docs/pretrain.md", "frameworks"):
        published, counted = costs_of(recipe)
        cost = counted if published == "–" else f"{counted} ({published})"
        assert cells == [*(published_top1(arm) or "–" for arm in arms_of(recipe)), cost], recipe
    methods = {row.pretrain: row for row in TABLES["methods"].rows}
    for label, recipe, *cells in table_of("docs/pretrain.md", "methods"):
        assert [label, *cells] == [methods[recipe].label, methods[recipe].numbers[0], costs_of(recipe)[1]]


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("docs/finetune.md", "evaluations"),
        ("docs/dense.md", "ADE20K"),
        ("docs/dense.md", "COCO"),
    ],
)
def test_the_tables_of_evaluation_are_as_published(page, name):
    """A line holds the numbers of one of the paper's tables: those of the recipes that the line names."""
    for _, recipes, *cells in table_of(page, name):
        evaluation = set(recipes.replace("`", "").split(", "))
        pretraining = arms_of("mff_prmim50_vit_base_800ep" if "mff_" in recipes else "prmim50_vit_base_800ep")
        for recipe, cell in zip(pretraining, cells, strict=True):
            rows = [row for _, row in ROWS if row.pretrain == recipe and set(row.finetune.values()) == evaluation]
            assert cell in [" / ".join(row.numbers[: len(row.finetune)]) for row in rows]


def test_the_table_of_fine_tuning_has_every_recipe():
    named = ", ".join(names.replace("`", "") for _, names in table_of("docs/finetune.md", "recipes"))
    assert sorted(named.split(", ")) == sorted(FINETUNE_RECIPES)


def test_numbers_of_others_are_on_the_pages():
    text = (ROOT / "docs/dense.md").read_text()
    for recipe, (numbers, source) in OTHER_EVALUATION.items():
        if recipe.startswith(("ade20k", "coco")):
            line = f"- `{recipe}`: {source}"
            if numbers != "-":
                line += f": {numbers}"
            assert line in text
