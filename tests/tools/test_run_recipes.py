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
KINDS = ["prmim50_vit_base_100ep", "tec_prmim50_vit_base_300ep", "greenmim_prmim50_swin_base_100ep"]
KINDS += ["amt_simmim_vit_base_200ep", "finetune_vit_base", "partial2_vit_base", "linprobe_vit_base"]
KINDS += ["finetune_cifar10_swin"]


def settings_of(recipe):
    main = main_pretrain if recipe in RECIPES else main_finetune
    return main, vars(main.parse_args(["--recipe", recipe])[1])


def quick(recipes, folder):
    flags = ["--images", "96", "--total_batch_size", "32", "--output_dir", str(folder / "out")]
    run_recipes.main(["--recipes", *recipes, *flags, "--csv", str(folder / "table.csv")])


def test_every_recipe_has_a_small_model():
    models = set()
    for recipe in ALL:
        _, settings = settings_of(recipe)
        models.add((settings["model"], settings.get("mask_unit")))
    for name, mask_unit in models:
        with torch.device("meta"):
            model = run_recipes.factories_of(name)[name](**run_recipes.scale_of(name, mask_unit))
        assert max(model.img_size) <= 64 and sum(p.numel() for p in model.parameters()) < 1e6, name


@pytest.mark.parametrize("recipe", KINDS)
def test_a_recipe_of_each_kind_runs(recipe, tmp_path_factory):
    row = run_recipes.run(recipe, tmp_path_factory.getbasetemp(), num_images=96, total_batch_size=32)
    assert row["problem"] == ""
    assert (row["steps"], row["stopped_after"], row["top1"] is None) == (3, 1, recipe in RECIPES)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.fault(
    "U2",
    "every recipe, scaled down, over 5,000 images with a stop in the middle",
    "no exception, finite losses, goes on at the very step",
)
@pytest.mark.parametrize("recipe", ALL)
def test_every_recipe_runs_over_5000_images(recipe, tmp_path):
    row = run_recipes.run(recipe, tmp_path, num_images=5000, total_batch_size=None)
    assert row["problem"] == "" and row["images"] >= 5000 and row["stopped_after"] < row["steps"]


def test_the_table_in_docs_has_every_recipe_as_it_is_now():
    """A changed or renamed recipe must run again: `--recipes NAME --csv`, and its row goes into the table."""
    with open(Path(__file__).parents[2] / "docs" / "recipes_run.csv") as file:
        rows = [(row["recipe"], row["model"], int(row["total_batch_size"])) for row in csv.DictReader(file)]
    settings = [settings_of(recipe)[1] for recipe in ALL]
    assert sorted(rows) == sorted((s["recipe"], s["model"], s["total_batch_size"]) for s in settings)


def test_a_failing_recipe_fails_the_script_and_not_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(RECIPES, "wild", {**RECIPES["cifar10"], "blr": 1e30, "warmup_epochs": 0})
    monkeypatch.setitem(RECIPES, "impossible", {**RECIPES["cifar10"], "throw_ratio": 2.0})
    with pytest.raises(SystemExit) as stop:
        quick(["wild", "impossible", "cifar10"], tmp_path)
    assert stop.value.code == 1 and "recipes failed: wild, impossible\n" in capsys.readouterr().err
    with open(tmp_path / "table.csv", newline="") as file:
        wild, impossible, cifar10 = csv.DictReader(file)
    assert "not finite" in wild["problem"] or "exit code 3" in wild["problem"]
    assert "exit code 2" in impossible["problem"] and cifar10["problem"] == "" and cifar10["images"] == "96"


@pytest.mark.parametrize(
    ("steps", "resumed", "problem"),
    [
        ([1, 2, 3], "1", ""),
        ([1, 2], "1", "steps 1 to 3 should be reported once each, found [1, 2]"),
        ([1, 2, 2, 3], "1", "steps 1 to 3 should be reported once each"),
        ([1, 2, 3], "2", "one resume at step 1 was expected, found ['2']"),
    ],
)
def test_a_run_that_does_not_go_on_where_it_stopped_is_a_problem(steps, resumed, problem, tmp_path):
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps))
    (tmp_path / "log.txt").write_text(f"resuming checkpoint.pth at step {resumed}\n")
    (tmp_path / "settings.json").write_text('{"accum_iter": 1}')
    try:
        run_recipes.check(tmp_path, steps=3, stop=1, is_finetuning=False)
    except ValueError as error:
        assert problem and problem in str(error)
    else:
        assert not problem


def test_an_unknown_recipe_is_refused(capsys):
    error = refused(capsys, run_recipes.main, "--recipes", "cifar11")
    assert "--recipes names 'cifar11', which recipes.py does not have" in error
