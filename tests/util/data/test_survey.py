"""`--check_data`: the set-up of a run, a report of its images, and an end before the first step."""

import re

import numpy as np
import pytest
from PIL import Image

from tests.downstream.dense import detect, segment, write_shapes, write_stripes
from tests.runs import ROOT, finetune, pretrain, refused
from tests.warm import run_by_torchrun
from util.data.images import ImageFiles
from util.data.invalid_pixels import InvalidPixels
from util.data.survey import describe_pixels

PROGRAMS = {"pretrain": pretrain, "finetune": finetune, "segment": segment, "detect": detect}


@pytest.fixture(scope="module")
def data(labelled, tmp_path_factory):
    """{name of a program: a sound data set}"""
    root = tmp_path_factory.mktemp("data")
    pairs = write_stripes(root / "pairs")
    shapes = write_shapes(root / "shapes")
    return {"pretrain": labelled, "finetune": labelled, "segment": pairs, "detect": shapes}


def state_of_folder(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_check_reports_each_split_that_the_run_opens(name, data, tmp_path, capsys):
    flags = ["--knn_every", 1] if name == "pretrain" else []
    words = PROGRAMS[name].command(data[name], tmp_path / "a" / "out", *flags, "--check_data")
    assert PROGRAMS[name].module.main(words) is True
    out = capsys.readouterr().out
    assert re.findall(r"^(train|val): \d+ images? in ", out, re.MULTILINE) == ["train", "val"]
    assert "trainable parameters" in out or "M parameters" in out  # as a start prints it
    assert "step 1" not in out
    assert [path.name for path in (tmp_path / "a" / "out").iterdir()] == [".lock"]
    expected = {
        "pretrain": "cat 12 (50.0%), dog 12 (50.0%)",
        "finetune": "cat 4 (57.1%), dog 3 (42.9%)",
        "segment": "0 (class 0)",
        "detect": "px in the median",
    }
    assert expected[name] in out


def test_a_run_that_is_checked_stays_as_it_is_and_ends_with_the_error_of_a_start(photos, tmp_path, capsys):
    folder = tmp_path / "run"
    pretrain(photos, folder, "--max_steps", 3)
    message = pretrain.refused(capsys, photos, folder, "--batch_size", 25, "--check_data")
    assert message == pretrain.refused(capsys, photos, folder, "--batch_size", 25)
    (folder / ".checkpoint-9.pth.tmp-1").touch()  # of a killed process; a start would remove it
    (folder / "checkpoint-3.json").unlink()  # a start would write it
    before = state_of_folder(folder)
    pretrain.module.main(pretrain.command(photos, folder, "--check_data"))
    assert state_of_folder(folder) == before


def test_a_changed_setting_is_found_before_the_run_is_resumed(photos, tmp_path, capsys):
    pretrain(photos, tmp_path, "--max_steps", 3)
    before = state_of_folder(tmp_path)
    assert "--mask_ratio" in pretrain.refused(capsys, photos, tmp_path, "--mask_ratio", 0.8, "--check_data")
    assert state_of_folder(tmp_path) == before


def test_two_processes_report_once(data, tmp_path):
    words = [str(ROOT / detect.path), *detect.command(data["detect"], tmp_path / "out", "--check_data")]
    code, out = run_by_torchrun(*words)
    assert code == 0, out[-3000:]
    assert out.count("px in the median") == 2  # one a split
    assert not (tmp_path / "out").exists()


def test_an_evaluation_has_no_check(capsys, labelled):
    words = ["--eval", "--resume", "x", "--check_data", "--data_path", labelled]
    assert "--check_data" in refused(capsys, finetune.module.main, *words)


def test_values_sizes_and_invalid_shares_are_those_of_the_images(tmp_path):
    pixels = np.random.default_rng(0).integers(1, 900, (3, 6, 5, 2)).astype(np.uint16)
    pixels[0, :2] = 0
    for i, img in enumerate(pixels):
        np.save(tmp_path / f"{i}.npy", img)
    (tmp_path / "3.npy").write_bytes(b"no array")
    samples = [(f"{i}.npy", 0) for i in range(4)]
    images = ImageFiles(tmp_path, samples, [], in_chans=2, invalid=InvalidPixels(nodata=0))
    images.check(max_bad_fraction=0.5)
    lines = describe_pixels(images)
    assert lines[0].startswith("1 of 4 images cannot be decoded")
    assert "6 to 6 px high, 5 to 5 px wide" in lines
    valid = np.where(pixels == 0, np.nan, pixels)
    means = np.nanmean(valid, axis=(0, 1, 2))
    lowest = np.nanmin(valid, axis=(0, 1, 2))
    highest = np.nanmax(valid, axis=(0, 1, 2))
    numbers = [" ".join(f"{value:.4g}" for value in values) for values in (lowest, means, highest)]
    assert "lowest {}, mean {}, highest {}".format(*numbers) in lines
    assert f"{2 / 18:.1%} of all values are invalid" in lines


def test_label_values_that_are_classes_but_occur_nowhere(tmp_path, capsys):
    root = write_stripes(tmp_path / "pairs")
    path = root / "annotations" / "validation" / "0.png"
    Image.fromarray(np.full_like(np.array(Image.open(path)), 77)).save(path)
    assert "77" in segment.refused(capsys, root, tmp_path / "out", "--check_data")
    segment.module.main(segment.command(root, tmp_path / "out", "--num_classes", 78, "--check_data"))
    assert "no pixel has the values 3, 4," in capsys.readouterr().out
