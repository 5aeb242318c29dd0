import csv
import re
import statistics
import subprocess
from pathlib import Path

import pytest

from scripts import sample_photos
from tests.runs import refused

SCRIPT = Path(sample_photos.__file__).with_name("quickstart.sh")


def call(*arguments):
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=240)


def test_few_labelled_crops_are_a_subset_of_the_unlabelled_ones(tmp_path, monkeypatch):
    pytest.importorskip("skimage")
    monkeypatch.setattr(sample_photos, "PHOTOS", ("coffee.png", "rocket.jpg"))
    sample_photos.main([str(tmp_path / "unlabelled"), "--num_train", "4"])
    sample_photos.main([str(tmp_path / "labelled"), "--num_train", "2", "--num_val", "5"])
    labelled = sorted(tmp_path.glob("labelled/train/*/*.jpg"))
    assert len(labelled) == 2 * 2
    for path in labelled:
        twin = tmp_path / "unlabelled" / path.relative_to(tmp_path / "labelled")
        assert path.read_bytes() == twin.read_bytes()
    assert len(list(tmp_path.glob("labelled/val/*/*.jpg"))) == 2 * 5


def test_sample_photos_names_wrong_flags(tmp_path, capsys):
    message = refused(capsys, sample_photos.main, tmp_path / "photos", "--crop_sides", "0.5", "0.25")
    assert "--crop_sides must be two shares 0 < low <= high <= 1, got [0.5, 0.25]" in message
    assert not list(tmp_path.iterdir())


SMALL = ("--num_train", "2", "--num_val", "1")


@pytest.fixture
def small_photos(tmp_path, monkeypatch):
    """A folder of the flags SMALL."""
    pytest.importorskip("skimage")
    monkeypatch.setattr(sample_photos, "PHOTOS", ("coffee.png",))
    sample_photos.main([str(tmp_path / "photos"), *SMALL])
    return tmp_path / "photos"


@pytest.mark.parametrize("flags", [("--num_train", "1"), ("--bands",)])
def test_photos_of_other_flags_are_not_mixed(small_photos, capsys, flags):
    message = refused(capsys, sample_photos.main, small_photos, *SMALL, *flags)
    assert "holds photographs of other flags" in message


def test_photos_are_not_mixed_with_other_files(tmp_path, capsys):
    pytest.importorskip("skimage")
    (tmp_path / "train").mkdir()
    message = refused(capsys, sample_photos.main, tmp_path, *SMALL)
    assert "is not empty, and this program has not written it" in message


def test_the_same_flags_write_the_same_photos_again(small_photos):
    """As after a stop."""
    before = {path: path.read_bytes() for path in small_photos.rglob("*") if path.is_file()}
    (small_photos / "train" / "coffee" / "001.jpg").unlink()
    sample_photos.main([str(small_photos), *SMALL])
    assert {path: path.read_bytes() for path in small_photos.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("flag", ["--data_p", "--out=x", "--recipe"])
def test_quickstart_refuses_flags_that_it_sets_itself(flag):
    done = call(flag, "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"quickstart.sh: error: the script sets {flag.split('=')[0]} itself")


def test_quickstart_explains_itself():
    done = call("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "bash scripts/quickstart.sh" in done.stdout
    assert "set -" not in done.stdout


def test_the_seed_has_a_middle_gain_of_the_seeds_that_were_run():
    """And docs/study.md says what all of them gave."""
    docs = SCRIPT.parents[1] / "docs"
    with open(docs / "studies" / "quickstart.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    gains = {row["seed"]: float(row["finetuned"]) - float(row["scratch"]) for row in rows}
    in_order = sorted(gains, key=lambda seed: gains[seed])
    middle = in_order[len(in_order) // 2 - 1 : len(in_order) // 2 + 1]
    (seed,) = re.findall(r"^seed=(\d+)$", SCRIPT.read_text(), re.MULTILINE)
    assert seed in middle

    text = " ".join((docs / "study.md").read_text().split())
    finetuned = statistics.mean(float(row["finetuned"]) for row in rows)
    scratch = statistics.mean(float(row["scratch"]) for row in rows)
    half = 2.3646 * statistics.stdev(gains.values()) / len(gains) ** 0.5  # Student's t with 7 degrees of freedom
    assert len(gains) == 8
    assert f"{finetuned:.1f} % top-1 on 1,260 crops with 70 labels, from scratch {scratch:.1f} %" in text
    gain = statistics.mean(gains.values())
    assert f"{gain:.1f} ± {half:.1f} (95 %), from {min(gains.values()):.1f} to {max(gains.values()):.1f}" in text
    assert f"**The script runs seed {seed}**, one of the two middle gains: {gains[seed]:.1f}" in text
