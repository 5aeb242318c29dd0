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
from main_pretrain import build_model, get_args_parser
from recipes import FINETUNE_RECIPES, RECIPES
from scripts.parts.paper_tables import (
    COUNTED_FLOPS,
    OTHER_EVALUATION,
    OTHER_PRETRAINING,
    TABLES,
    published_costs,
    published_top1,
)
from scripts.parts.table_runs import DOWNSTREAM
from tools import document_tables
from util.costs import forward_gmac
from util.run.cli import parse_with_recipe

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
    deep* pixio_* attention* cell* avgpool_thrown_* amt_mae_*
"""


def test_every_recipe_of_a_row_exists():
    known = {*FINETUNE_RECIPES, *(recipe for recipes in DOWNSTREAM_RECIPES.values() for recipe in recipes)}
    for name, row in ROWS:
        assert row.pretrain in RECIPES and row.finetune and set(row.finetune.values()) <= known, (name, row.label)
    assert OTHER_PRETRAINING.keys() <= RECIPES.keys() and OTHER_EVALUATION.keys() <= known


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
    assert len(row.numbers) == len(table.columns)
    assert all(re.fullmatch(r"-|fail|\d+(\.\d+)?(e-\d)?", number) for number in row.numbers)
    filled = {title for title, m in table.columns.items() if m in ("top1", *DOWNSTREAM, *BENCHMARKS)}
    assert set(row.finetune) == filled
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
        for title, number in zip(TABLES[name].columns, row.numbers, strict=True):
            if title in row.finetune and number != "-":
                measure = TABLES[name].columns[title]
                found.setdefault((row.pretrain, row.finetune[title], measure), set()).add(number)
    assert len(found) > 80 and [key for key, numbers in found.items() if len(numbers) > 1] == []


def test_numbers_of_a_recipe():
    assert published_top1("prmim50_vit_base_800ep") == "83.3" and published_top1("tec_vit_base_800ep") == "85.1"
    assert published_top1("crossmae_prmim50_vit_base_800ep") is None
    assert published_costs("prmim50_vit_base_100ep") == {"flops": 0.72, "memory": 0.64, "time": 0.75}
    assert published_costs("mff_prmim50_vit_base_800ep") == {"flops": 0.73, "memory": 0.64}
    assert published_costs("kernel3_vit_base_100ep") == {} == published_costs("cifar10")


def settings_of(recipe):
    return vars(parse_with_recipe(get_args_parser(), RECIPES, ["--recipe", recipe]))


@pytest.mark.parametrize("name", COUNTED_FLOPS)
def test_counted_costs(name):
    """And those that the paper prints are within .01, but SimMIM's, which need 50 % thrown tokens."""
    recipe = next(recipe for recipe in RECIPES if re.sub(r"_\d+ep$", "", recipe) == name)
    kept = {"norm_pix_loss": False} if name.startswith("amt_vit") else {}
    full = settings_of(recipe) | {"throw_ratio": 0.0}
    full |= {"mask_ratio": {"amt_vit_base": 0.75, "amt_simmim24_vit_base": 0.6}.get(name, full["mask_ratio"])} | kept
    ours, theirs = (forward_gmac(settings, build_model)[0] for settings in (settings_of(recipe), full))
    assert ours / theirs == pytest.approx(COUNTED_FLOPS[name], abs=6e-4)
    printed = published_costs(recipe).get("flops", ours / theirs)
    assert ours / theirs == pytest.approx(printed, abs=0.016) or name == "simmim_prmim30_vit_base"


def test_the_documents_hold_the_published_numbers(capsys):
    assert document_tables.main([]) == 0, capsys.readouterr().out


def test_an_old_document_is_named_and_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.md").write_text("one\n<!-- published t -->\nold\n<!-- end of t -->\ntwo\n")
    monkeypatch.setattr(document_tables, "ROOT", tmp_path)
    monkeypatch.setattr(document_tables, "WRITERS", {"a.md": {"t": lambda: "new"}})
    assert document_tables.main([]) == 1 and document_tables.main(["--write"]) == 0 and document_tables.main([]) == 0
    assert (tmp_path / "a.md").read_text() == "one\n<!-- published t -->\nnew\n<!-- end of t -->\ntwo\n"
    assert capsys.readouterr().out == "a.md: out of date\na.md: written\n"
    (tmp_path / "a.md").write_text("none")
    with pytest.raises(ValueError, match="must hold the markers <!-- published t --> and <!-- end of t --> once"):
        document_tables.main([])
