"""Predictions against arithmetic by hand, and against counts of the models."""

import csv
from functools import cache
from pathlib import Path

import pytest

from main_pretrain import get_args_parser
from recipes import RECIPES
from scripts import estimate
from scripts.estimate import DEVICES, count_costs
from tests.gmac import forward_gmac
from tests.runs import refused
from util.run.cli import parse_with_recipe

ROOT = Path(__file__).resolve().parents[2]
H200 = DEVICES["H200"]
with open(ROOT / "docs" / "measured_h100.csv", newline="") as file:
    MEASURED = [row for row in csv.DictReader(file) if row["program"] == "here"]
# Steps that the GPU bounds, by the code of now.
USUAL = [row for row in MEASURED if row["model"] == "vit_base" and row["cuda_graph"] == "False"]
USUAL = [row for row in USUAL if row["code"] == "eager" or row["attention"] == "short"]
CAPTURED = [row for row in MEASURED if row["model"] != "vit_small" and row["cuda_graph"] == "True"]


def settings_of(recipe, *flags):
    return vars(parse_with_recipe(get_args_parser(), RECIPES, ["--recipe", recipe, *flags]))


def predicted(recipe, code="eager", **options):
    settings = settings_of(recipe)
    options = {"gpus": 8, "cores": 14, "batch_size": None, **options}
    return estimate.predict(settings, count_costs(settings), "H200", code=code, **options)


@pytest.mark.parametrize(
    ("recipe", "products", "traffic", "traffic_compiled", "kept"),
    [
        ("mae_vit_base_800ep", 37.9, 34.7, 19.6, 47.5),
        ("prmim50_vit_base_800ep", 27.3, 23.7, 13.4, 33.5),
    ],
)
def test_a_step_of_512_images_by_hand(recipe, products, traffic, traffic_compiled, kept):
    """Milliseconds of products and of traffic, MB an image.

    ViT-B: 12 blocks x 50 tokens x 768 + 8 x 197 x 512 = 1.268 M values; 29.9 TFLOP at 788 TFLOP/s.
    """
    costs = count_costs(settings_of(recipe))
    assert 512 * costs.flops / H200.flops == pytest.approx(products / 1e3, rel=0.01)
    for code, milliseconds in (("eager", traffic), ("compiled", traffic_compiled)):
        seconds = costs.seconds(H200, code) - costs.flops / H200.flops
        assert 512 * seconds == pytest.approx(milliseconds / 1e3, rel=0.01)
    assert costs.kept / 1e6 == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("mae_vit_base_100ep", ""),
        ("plain50_vit_base_100ep", ""),
        ("prmim50_vit_large_100ep", ""),
        ("pixio_prmim50_vit_base", ""),
        ("cifar10", "--model mae_vit_micro_patch4"),
    ],
)
def test_multiply_adds_are_those_of_the_model(recipe, flags):
    settings = settings_of(recipe, *flags.split())
    assert count_costs(settings).multiply_adds / 1e9 == pytest.approx(forward_gmac(settings)[0], rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "peak"),
    [
        ("mae_vit_base_800ep", 27.3),
        ("prmim50_vit_base_800ep", 20.1),
    ],
)
def test_peak_memory_is_that_of_a_step_on_fake_tensors(recipe, peak):
    """GB of the tensors, counted storage by storage at 4b7053c."""
    assert predicted(recipe)["peak_gb"] == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("row", [*USUAL, *CAPTURED], ids=lambda row: "-".join(row.values()))
def test_predictions_are_near_what_an_h100_has_measured(row):
    """Of one GPU with these images in a step, AdamW included."""
    recipe = "prmim50" if float(row["throw_ratio"]) else "mae"
    settings = settings_of(f"{recipe}_{row['model']}_800ep")
    settings["total_batch_size"] = int(row["batch_size"])
    now = estimate.predict(settings, count_costs(settings), "H100", 1, row["code"], 16, int(row["batch_size"]))
    expected = now["expected_ms"]
    if row in CAPTURED:  # the host launches two graphs
        expected = estimate.EXPECTED_SHORT * now["bound_ms"]
    assert expected == pytest.approx(float(row["ms"]), rel=0.09)
    assert now["peak_gb"] == pytest.approx(float(row["peak_gb"]), rel=0.12)


def test_rows_of_both_kinds_are_compared():
    assert len(USUAL) == len(CAPTURED) == 4


def test_a_step_is_no_shorter_than_its_launches():
    """Of ViT-L's 32 blocks, at 256 images: PR-MIM is no faster than the host."""
    settings = {**settings_of("prmim50_vit_large_800ep"), "total_batch_size": 128}
    row = estimate.predict(settings, count_costs(settings), "H100", 1, "compiled", 16, 128)
    assert row["expected_ms"] == row["host_ms"] == pytest.approx(32 * 3.3)


def test_what_loads_images_may_be_slower_than_the_gpus():
    row = predicted("prmim50_vit_base_800ep", "compiled")
    assert 1.45 * row["bound_ms"] == pytest.approx(60, abs=1)
    assert row["expected_ms"] == row["host_ms"] == pytest.approx(66, abs=1)
    epochs = 800 * 1_281_167
    assert row["days"] == pytest.approx(epochs / row["images_per_second"] / 86400)
    assert row["days_jpeg"] == pytest.approx(epochs / (8 * 14 * 0.75 * 559) / 86400)
    assert 0.22 < row["days_jpeg"] < 0.26
    assert row["limit_jpeg"] == "loader"
    many = predicted("prmim50_vit_base_800ep", "compiled", cores=20)
    assert many["days_q90"] == many["days"]
    assert many["limit_q90"] == "GPU"


def test_the_total_batch_is_split():
    one = predicted("mae_vit_base_800ep", gpus=1)
    eight = predicted("mae_vit_base_800ep", gpus=8)
    assert (one["batch_size"], one["accum_iter"]) == (512, 8)
    assert (eight["batch_size"], eight["accum_iter"]) == (512, 1)
    assert one["bound_ms"] == pytest.approx(8 * eight["bound_ms"], rel=0.02)
    assert one["largest_batch_size"] > 2000


def test_the_program_writes_its_rows(tmp_path, capsys):
    path = tmp_path / "predicted.csv"
    flags = "--model mae_vit_huge_patch14 --gpu H200 L40S --csv"
    estimate.main(["mae_vit_large_800ep", *flags.split(), str(path)])
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} == {"mae_vit_huge_patch14"}
    assert [(row["device"], row["code"]) for row in rows] == [
        ("H200", "eager"),
        ("H200", "compiled"),
        ("L40S", "eager"),
        ("L40S", "compiled"),
    ]
    out = capsys.readouterr().out
    assert out.startswith("*Predicted*, not measured")
    assert out.count("| mae_vit_large_800ep") == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("greenmim_swin_base_100ep", "estimate.py knows the layers of MAE alone"),
        ("convnext_vit_base_100ep", "estimate.py knows --aggregation dwconv alone"),
        ("mae_vit_base_100ep --gpus 3", "cannot be split over 3 processes"),
    ],
)
def test_what_cannot_be_predicted_is_refused(flags, message, capsys):
    assert message in refused(capsys, estimate.main, *flags.split())


def test_the_table_in_docs_is_that_of_the_script():
    with open(ROOT / "docs" / "predicted_gpu.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24
    text = " ".join((ROOT / "docs" / "costs.md").read_text().split())
    days = {}
    for row in rows:
        settings = settings_of(row["recipe"], "--model", row["model"])
        costs = costs_of(row["recipe"], row["model"])
        now = estimate.predict(settings, costs, row["device"], int(row["gpus"]), row["code"], cores=14, batch_size=None)
        assert {name: str(value) for name, value in now.items()} == row
        if row["device"] == "H200" and row["code"] == "compiled":
            days[row["model"], settings["throw_ratio"]] = now
    base, base_half = days["mae_vit_base_patch16", 0], days["mae_vit_base_patch16", 0.5]
    large, large_half = days["mae_vit_large_patch16", 0], days["mae_vit_large_patch16", 0.5]
    assert f"{base['days']:.2f} days at ρ_d 0 and {base_half['days']:.2f} at .5 (ViT-B)" in text
    assert f"{large['days']:.2f} and {large_half['days']:.2f} (ViT-L)" in text
    assert f"ViT-B takes {base['days_jpeg']:.2f} days either way" in text
    assert base["limit_jpeg"] == base_half["limit_jpeg"] == "loader"


@cache
def costs_of(recipe, model):
    return count_costs(settings_of(recipe, "--model", model))
