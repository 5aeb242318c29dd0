"""tools/run_recipes.py: every recipe runs with a tiny model through the mains themselves."""

import csv
import json
from pathlib import Path

import pytest
import torch

import main_finetune
import main_pretrain
from recipes import FINETUNE_RECIPES, RECIPES
from tests.runs import refused
from tools import run_recipes

ALL = [*RECIPES, *FINETUNE_RECIPES]
# A framework with a decoder, one with a teacher, one whose batches share a visible set, one with a loader of its own,
# and each kind of fine-tuning.
KINDS = [
    "prmim50_vit_base_100ep",
    "tec_prmim50_vit_base_300ep",
    "greenmim_prmim50_swin_base_100ep",
    "amt_simmim_vit_base_200ep",
    "finetune_vit_base",
    "partial2_vit_base",
    "linprobe_vit_base",
    "tec_finetune_vit_base_800ep",
    "finetune_cifar10_swin",
]


def settings_of(recipe):
    main = main_finetune
    if recipe in RECIPES:
        main = main_pretrain
    return vars(main.parse_args(["--recipe", recipe])[1])


def test_every_recipe_has_a_small_model():
    models = set()
    for recipe in ALL:
        settings = settings_of(recipe)
        models.add((settings["model"], settings.get("mask_unit")))
    for name, mask_unit in models:
        with torch.device("meta"):
            model = run_recipes.factories_of(name)[name](**run_recipes.scale_of(name, mask_unit))
        assert max(model.img_size) <= 64, name
        assert sum(parameter.numel() for parameter in model.parameters()) < 1e6, name


@pytest.mark.parametrize("recipe", KINDS)
def test_a_recipe_of_each_kind_runs(recipe, tmp_path_factory):
    """Encoders that several recipes need are made once."""
    row = run_recipes.run(recipe, tmp_path_factory.getbasetemp(), num_images=96, total_batch_size=32)
    assert row["problem"] == ""
    assert (row["steps"], row["stopped_after"]) == (3, 1)
    assert (row["top1"] is None) == (recipe in RECIPES)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", ALL)
def test_every_recipe_runs_over_5000_images(recipe, tmp_path):
    row = run_recipes.run(recipe, tmp_path, num_images=5000, total_batch_size=None)
    assert row["problem"] == ""
    assert row["images"] >= 5000
    assert row["stopped_after"] < row["steps"]


def test_the_table_in_docs_has_every_recipe_as_it_is_now():
    """A changed or renamed recipe must run again: `--recipes NAME --csv`, and its row goes into the table."""
    with open(Path(__file__).parents[2] / "docs" / "recipes_run.csv") as file:
        rows = {row["recipe"]: (row["model"], int(row["total_batch_size"])) for row in csv.DictReader(file)}
    assert rows.keys() == set(ALL)
    for recipe, row in rows.items():
        settings = settings_of(recipe)
        assert row == (settings["model"], settings["total_batch_size"])


def test_a_failing_recipe_fails_the_script_and_not_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(RECIPES, "impossible", {**RECIPES["cifar10"], "throw_ratio": 2.0})
    flags = "--recipes impossible cifar10 --images 96 --total_batch_size 32 --csv"
    with pytest.raises(SystemExit) as stop:
        run_recipes.main([*flags.split(), str(tmp_path / "table.csv")])
    assert stop.value.code == 1
    assert "recipes failed: impossible\n" in capsys.readouterr().err
    with open(tmp_path / "table.csv", newline="") as file:
        impossible, cifar10 = csv.DictReader(file)
    assert "exit code 2" in impossible["problem"]
    assert (cifar10["problem"], cifar10["images"]) == ("", "96")


def write_run(folder, steps, resumed=1, loss=1.0):
    lines = [json.dumps({"step": step, "loss": loss}) for step in steps]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "log.txt").write_text(f"resuming checkpoint.pth at step {resumed}\n")
    (folder / "settings.json").write_text('{"accum_iter": 1}')


@pytest.mark.parametrize(
    ("steps", "options", "problem"),
    [
        ([1, 2], {}, "steps 1 to 3 should be reported once each, found .1, 2."),
        ([1, 2, 2, 3], {}, "steps 1 to 3 should be reported once each"),
        ([1, 2, 3], {"resumed": 2}, "one resume at step 1 was expected, found .'2'."),
        ([1, 2, 3], {"loss": None}, "losses are not finite"),
    ],
)
def test_a_run_that_does_not_go_on_where_it_stopped_is_a_problem(tmp_path, steps, options, problem):
    write_run(tmp_path, steps, **options)
    with pytest.raises(ValueError, match=problem):
        run_recipes.check(tmp_path, steps=3, stop=1, is_finetuning=False)


def test_an_unknown_recipe_is_refused(capsys):
    error = refused(capsys, run_recipes.main, "--recipes", "cifar11")
    assert "--recipes names 'cifar11', which recipes.py does not have" in error
