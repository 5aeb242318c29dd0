import re
import statistics
import subprocess
from pathlib import Path

import pytest

from recipes import RECIPES
from scripts import sample_photos
from tests.runs import refused

SCRIPT = Path(sample_photos.__file__).with_name("quickstart.sh")


def call(*arguments):
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=240)


def test_few_labelled_crops_are_a_subset_of_the_unlabelled_ones(tmp_path, monkeypatch):
    pytest.importorskip("skimage")
    monkeypatch.setattr(sample_photos, "PHOTOS", ("coffee.png", "rocket.jpg"))
    for folder, flags in (("unlabelled", ["--num_train", "4"]), ("labelled", ["--num_train", "2", "--num_val", "5"])):
        sample_photos.main([str(tmp_path / folder), "--crop_sides", "0.25", "0.5", *flags])
    labelled = sorted(path.relative_to(tmp_path / "labelled") for path in tmp_path.glob("labelled/train/*/*.jpg"))
    assert [str(path) for path in labelled] == [f"train/{c}/00{i}.jpg" for c in ("coffee", "rocket") for i in range(2)]
    for path in labelled:
        assert (tmp_path / "labelled" / path).read_bytes() == (tmp_path / "unlabelled" / path).read_bytes()
    assert len(list(tmp_path.glob("labelled/val/*/*.jpg"))) == 2 * 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_val", "0"], "--num_val must be at least 1, got 0"),
        (["--crop_sides", "0.5", "0.25"], "--crop_sides must be two shares 0 < low <= high <= 1, got [0.5, 0.25]"),
    ],
)
def test_sample_photos_names_wrong_flags(tmp_path, capsys, flags, message):
    assert message in refused(capsys, sample_photos.main, tmp_path / "photos", *flags) and not list(tmp_path.iterdir())


def test_one_epoch_of_the_quickstart_can_be_asked_for():
    """`quickstart.sh --epochs 1` passes its flag to a recipe whose warm-up must fit into one epoch."""
    assert RECIPES["quickstart"]["warmup_epochs"] <= 1


@pytest.mark.fault("U83", "sample_photos.py into a folder with other images", "refused; the same flags write again")
def test_sample_photos_are_not_mixed_with_others(tmp_path, monkeypatch, capsys):
    pytest.importorskip("skimage")
    monkeypatch.setattr(sample_photos, "PHOTOS", ("coffee.png",))
    (tmp_path / "mine" / "train").mkdir(parents=True)
    flags = ["--num_train", "2", "--num_val", "1"]
    sample_photos.main([str(tmp_path / "photos"), *flags])
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "photos" / "train" / "coffee" / "001.jpg").unlink()  # as if it had been stopped
    for folder, more, message in (
        ("mine", [], "is not empty, and this program has not written it"),
        ("photos", ["--num_train", "1"], 'holds photographs of other flags, {"side": 96, "num_train": 2'),
        ("photos", ["--bands"], "holds photographs of other flags"),
    ):
        assert message in refused(capsys, sample_photos.main, tmp_path / folder, *flags, *more)
    sample_photos.main([str(tmp_path / "photos"), *flags])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == written


@pytest.mark.parametrize("flag", ["--data_path", "--output_dir=x", "--recipe"])
def test_quickstart_refuses_flags_that_it_sets_itself(flag):
    done = call(flag, "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"quickstart.sh: error: the script sets {flag.split('=')[0]} itself")


def test_quickstart_explains_itself():
    done = call("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "bash scripts/quickstart.sh" in done.stdout and "set -" not in done.stdout


def test_the_seed_is_the_one_with_the_median_gain_of_the_table():
    """As docs/study.md says."""
    text = (SCRIPT.parents[1] / "docs" / "study.md").read_text()
    (cells,) = re.findall(r"^\| difference \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    gains = [float(cell) for cell in cells]
    typical = gains.index(statistics.median(gains))
    assert re.findall(r"^seed=(\d+)$", SCRIPT.read_text(), re.MULTILINE) == [str(typical)]
    assert f"**The script runs seed {typical}, whose gain is the median of the three.**" in text
