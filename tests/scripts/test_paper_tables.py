import re
from fnmatch import fnmatchcase

import pytest

import models_mae_pr as mae
from downstream.recipes import DOWNSTREAM_RECIPES
from downstream.robustness.main_robustness import BENCHMARKS
from frameworks import models_greenmim_pr as greenmim
from frameworks import models_localmim_pr as localmim
from frameworks import models_mff_pr as mff
from frameworks import models_simmim_pr as simmim
from frameworks import models_tec_pr as tec
from recipes import FINETUNE_RECIPES, RECIPES
from scripts.paper_tables import TABLES
from scripts.profile_pretrain import PAPER
from scripts.table_runs import DOWNSTREAM
from tests.scripts.programs import ROOT

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
    deep* attention* cell* avgpool_thrown_* amt_mae_*
"""


def test_every_recipe_of_a_row_exists_and_every_row_without_one_gives_a_reason():
    for name, row in ROWS:
        assert (row.pretrain in RECIPES) if row.pretrain else row.reason, (name, row.label)
        known = {*FINETUNE_RECIPES, *(recipe for recipes in DOWNSTREAM_RECIPES.values() for recipe in recipes)}
        assert set(row.finetune.values()) <= known, (name, row.label)
        assert bool(row.finetune) == bool(row.pretrain) and not (row.pretrain and row.reason)
        now = [word for word in row.reason.split() if word in RECIPES]
        assert not now, f"{name}, {row.label}: fill in the recipes, {now} exists now"


def test_every_recipe_of_the_paper_is_in_a_table():
    used = {row.pretrain for _, row in ROWS} | {recipe for _, row in ROWS for recipe in row.finetune.values()}
    recipes = {name for name, recipe in RECIPES.items() if recipe["model"] in PAPER_MODELS} | FINETUNE_RECIPES.keys()
    listed = {recipe for recipe in recipes if any(fnmatchcase(recipe, p) for p in NOT_IN_THE_PAPER.split())}
    assert sorted(recipes - used - listed) == []
    assert not used & listed


@pytest.mark.parametrize(("name", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else value.label)
def test_rows_say_what_their_recipes_do(name, row):
    table = TABLES[name]
    assert set(table.columns.values()) <= MEASURES
    assert len(row.published) == len(table.columns)
    assert all(re.fullmatch(r"-|fail|\d+(\.\d+)?(e-\d)?", number) for number in row.published)
    filled = {title for title, m in table.columns.items() if m in ("top1", *DOWNSTREAM, *BENCHMARKS)}
    assert set(row.finetune) == (filled if row.pretrain else set())
    if row.pretrain:
        recipe = RECIPES[row.pretrain]
        assert (recipe["epochs"], round(100 * recipe["throw_ratio"])) == (row.epochs, row.throw_ratio)
        assert recipe["progressive"] if "PR-MIM" in row.label else True
        plain = row.label.split(",")[0].removesuffix(" †") in ("MAE", "SimMIM", "LocalMIM", "MFF", "TEC", "GreenMIM")
        assert not recipe.get("progressive") if plain and row.throw_ratio else True


def test_a_recipe_has_one_number_in_all_tables():
    """As far as it is fine-tuned by one recipe: tables repeat rows."""
    found = {}
    for name, row in ROWS:
        for title, number in zip(TABLES[name].columns, row.published, strict=True):
            if title in row.finetune and number != "-":
                measure = TABLES[name].columns[title]
                found.setdefault((row.pretrain, row.finetune[title], measure), set()).add(number)
    assert len(found) > 80 and [key for key, numbers in found.items() if len(numbers) > 1] == []


def test_comments_of_the_recipes_print_the_same_top_1():
    lines = re.findall(r'^    "(\w+)": .*# (\d\d\.\d)\b', (ROOT / "recipes.py").read_text(), re.MULTILINE)
    printed = {row.pretrain: row.published[0] for name, row in ROWS if next(iter(TABLES[name].columns)) == "Top-1"}
    common = {recipe: number for recipe, number in lines if recipe in printed}
    assert len(common) > 50 and common == {recipe: printed[recipe] for recipe in common}


def test_costs_are_those_that_the_profile_prints():
    compared = set()
    for name, row in ROWS:
        costs = dict(zip(TABLES[name].columns.values(), row.published, strict=True))
        if "flops" in costs and row.throw_ratio:
            paper = PAPER[RECIPES[row.pretrain]["model"], row.throw_ratio / 100]
            assert [float(costs[key]) for key in ("flops", "memory", "time") if key in costs] == [
                value for value, key in zip(paper, ("flops", "memory", "time"), strict=True) if key in costs
            ]
            compared.add((RECIPES[row.pretrain]["model"], row.throw_ratio / 100))
    assert compared == set(PAPER)
