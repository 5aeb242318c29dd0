import subprocess
from pathlib import Path

import pytest

from scripts import sample_photos
from tests.runs import refused

SCRIPT = Path(sample_photos.__file__).with_name("quickstart.sh")


def call(*arguments):
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=900)


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


SMALL = ("--num_train", "2", "--num_val", "1")


@pytest.fixture
def small_photos(tmp_path, monkeypatch):
    """A folder of the flags SMALL."""
    pytest.importorskip("skimage")
    monkeypatch.setattr(sample_photos, "PHOTOS", ("coffee.png",))
    sample_photos.main([str(tmp_path / "photos"), *SMALL])
    return tmp_path / "photos"


@pytest.mark.parametrize("flags", [("--num_train", "1"), ("--bands",), ("--crop_sides", "0.5", "0.25")])
def test_wrong_flags_and_photos_of_others_are_refused(small_photos, capsys, flags):
    before = sorted(small_photos.rglob("*"))
    refused(capsys, sample_photos.main, small_photos, *SMALL, *flags)
    refused(capsys, sample_photos.main, small_photos / "train", *SMALL)  # not written by this program
    assert sorted(small_photos.rglob("*")) == before
