"""Reconstructions of runs; the photographs to try things on; logs to compare with."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from frameworks.hooks import pictures
from scripts import sample_photos, visualize
from tests import runs
from tests.runs import assert_same_state, refused
from util.run.files.json_files import read_reports

ROOT = Path(__file__).resolve().parents[2]
pretrain = runs.pretrain.also("--epochs 1 --warmup_epochs 0")


def draw(run, out, *flags):
    visualize.main([str(word) for word in (run, "--out", out, *flags)])


def num_colors(path):
    picture = np.asarray(Image.open(path).convert("RGB"))
    return len(np.unique(picture.reshape(-1, 3), axis=0))


# ---------------------------------------------------------------------------------------------------- visualize.py


@pytest.mark.parametrize(
    ("flags", "measured"),
    [
        ([], ["retained", "thrown"]),
        (["--no-progressive"], ["retained"]),
    ],
)
def test_visualize_draws_and_measures(photos, tmp_path, capsys, flags, measured):
    pretrain(photos, tmp_path / "run", *flags)
    capsys.readouterr()
    draw(tmp_path / "run", tmp_path / "r.png", "--rows", 5)
    printed = capsys.readouterr().out
    assert re.findall(r"^\s*(\w+).*masked MSE", printed, re.MULTILINE) == measured
    assert Image.open(tmp_path / "r.png").width > 300
    assert num_colors(tmp_path / "r.png") > 3


def test_a_run_leaves_its_pictures_and_visualize_draws_the_same(photos, tmp_path):
    expected = pretrain(photos, tmp_path / "without", "--picture_every", 0)
    assert not list((tmp_path / "without").glob("*.png"))
    run = tmp_path / "run"
    trained = pretrain(photos, run, "--picture_every", 1)
    assert_same_state(trained, expected)
    before, after = sorted(run.glob("*.png"))
    assert (before.name, after.name) == (pictures.BEFORE, pictures.AFTER)
    draw(run, tmp_path / "r.png", "--images", photos)
    assert np.array_equal(Image.open(after), Image.open(tmp_path / "r.png"))
    assert np.asarray(Image.open(before)).shape == np.asarray(Image.open(after)).shape
    assert not np.array_equal(Image.open(before), Image.open(after))


def test_a_teacher_that_has_moved_is_given_by_its_flag(photos, tmp_path, capsys):
    pretrain(photos, tmp_path / "teacher", "--model", "mae_vit_micro_patch4", "--max_steps", 1)
    pretrain(photos, tmp_path / "other", "--model", "mae_vit_micro_patch4", "--max_steps", 1, "--seed", 1)
    flags = ["--model", "tec_vit_micro_patch4", "--teacher", tmp_path / "teacher", "--max_steps", 1]
    pretrain(photos, tmp_path / "run", *flags)
    (tmp_path / "teacher").rename(tmp_path / "moved")
    out = ("--out", tmp_path / "r.png")
    refused(capsys, visualize.main, tmp_path / "run", *out)
    refused(capsys, visualize.main, tmp_path / "run", *out, "--teacher", tmp_path / "other")
    capsys.readouterr()
    draw(tmp_path / "run", tmp_path / "r.png", "--teacher", tmp_path / "moved")
    assert capsys.readouterr().out.count(": feature error ") == 2


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("{tmp}/weights.pth --out r.png", "weights.pth"),
        ("{tmp}/weights.pth --out {tmp}/p.txt", "p.txt"),
        ("{tmp}/weights.pth", "reconstruction.png"),  # which exists
    ],
)
def test_user_errors(tmp_path, capsys, monkeypatch, flags, named):
    monkeypatch.chdir(tmp_path)
    Path("reconstruction.png").write_text("of yesterday")
    weights = {"w": torch.ones(1)}
    torch.save({"model": weights}, tmp_path / "weights.pth")
    words = [word.format(tmp=tmp_path) for word in flags.split()]
    assert named in refused(capsys, visualize.main, *words)
    assert Path("reconstruction.png").read_text() == "of yesterday"


# ------------------------------------------------------------------------------------------------- sample_photos.py


def test_sample_photos_have_labels_and_disjoint_splits(tmp_path, monkeypatch):
    """The photograph is black in the region of train/ and white in that of val/. No crop mixes both."""
    half = np.zeros((200, 300, 3), np.uint8)
    half[:, 200:] = 255
    Image.fromarray(half).save(tmp_path / "half.png")
    monkeypatch.setattr(sample_photos, "photos_folder", lambda: tmp_path)
    monkeypatch.setattr(sample_photos, "PHOTOS", ("half.png",))
    monkeypatch.setattr(sample_photos, "SIDE", 32)
    sample_photos.write_photos(tmp_path / "out", num_train=20, num_val=5)
    for split, value, count in (("train", 0, 20), ("val", 255, 5)):
        files = list((tmp_path / "out" / split / "half").iterdir())
        assert len(files) == count
        for file in files:
            assert (np.asarray(Image.open(file)) == value).all()


# ------------------------------------------------------------------------------------------------------ docs/runs


def test_the_table_of_references_is_that_of_the_files():
    """Its figures: the loss at the first report, after 100 and after 300 steps."""
    text = (ROOT / "docs/run.md").read_text()
    rows = re.findall(r"^\| `(quickstart_\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    folder = ROOT / "docs" / "runs"
    names = {name for name, *_ in rows}
    assert names <= {path.stem for path in folder.glob("quickstart_*.jsonl")}
    for name, *values in rows:
        losses = {report["step"]: report.get("loss") for report in read_reports(folder / f"{name}.jsonl")}
        assert [f"{losses[step]:.3f}" for step in (10, 100, 300)] == values
