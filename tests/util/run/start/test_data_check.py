"""`--check_data` of the four programs that train: what it reports, that it names traps, and that it writes nothing."""

import json
import shutil
import subprocess
import sys
import unicodedata
from argparse import Namespace
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from tests.conftest import write_photo
from tests.downstream.dense import detect, segment, write_shapes, write_stripes
from tests.runs import ROOT, Program, finetune, pretrain, refused
from tests.warm import run_by_torchrun
from util import findings
from util.run.start import folder as folder_module

PROGRAMS = {"pretrain": pretrain, "finetune": finetune, "segment": segment, "detect": detect}


@pytest.fixture
def check(capsys, tmp_path):
    """Returns a function that checks a program's command. It returns (the report, its JSON)."""

    def run_check(program, data_path, *flags, what="basic", would_start=True, output_dir=tmp_path / "out"):
        json_path = tmp_path / "report.json"
        had_folder = output_dir.exists()
        capsys.readouterr()
        words = program.command(data_path, output_dir, *flags, "--check_data", what, "--check_json", json_path)
        code = 0
        try:
            assert program.module.main(words) is None
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        assert code == (0 if would_start else 2), out + err
        assert "Traceback" not in err
        assert output_dir.exists() == had_folder
        report = json.loads(json_path.read_text())
        assert bool(report["errors"]) != would_start
        assert all(error in out for error in report["errors"])
        return out, report

    return run_check


@pytest.fixture(scope="module")
def data(labelled, tmp_path_factory):
    """{name of a program: a sound data set}"""
    root = tmp_path_factory.mktemp("data")
    pairs = write_stripes(root / "pairs")
    shapes = write_shapes(root / "shapes")
    return {"pretrain": labelled, "finetune": labelled, "segment": pairs, "detect": shapes}


def full_disk(monkeypatch, free=1000):
    monkeypatch.replace_in(folder_module, "shutil.disk_usage", lambda path: Namespace(free=free))


# ------------------------------------------------------------------------------------------------------------ report


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_report_says_what_is_read_and_with_what_the_run_would_start(name, data, check):
    out, report = check(PROGRAMS[name], data[name])
    split = report["splits"]["train"]
    folder = {"segment": "images/training", "detect": "train2017"}.get(name, "train")
    files = [path for path in (data[name] / folder).rglob("*") if path.is_file()]
    assert split["images"] == len(files)
    assert split["read"][str(data[name] / folder)] == Counter(path.suffix for path in files)
    assert split["not_read"] == []
    sizes = [Image.open(path).size for path in files]
    for axis, side in enumerate(("widths", "heights")):
        sides = [size[axis] for size in sizes]
        assert (split[side]["lowest"], split[side]["highest"]) == (min(sides), max(sides))
    assert split["formats"] == {"3 channels of uint8": len(files)}
    pixels = np.concatenate([np.array(Image.open(path).convert("RGB")).reshape(-1, 3) for path in files]) / 255
    np.testing.assert_allclose(split["pixels"]["mean"], pixels.mean(axis=0))
    np.testing.assert_allclose(split["pixels"]["std"], pixels.std(axis=0))
    assert report["run"]["checkpoint_bytes"] > 0
    assert ("val" in report["splits"]) == (name != "pretrain")
    assert "no errors: the run would start" in out


def test_classes_label_values_and_objects_are_counted(data, check):
    _, report = check(finetune, data["finetune"])
    assert report["splits"]["val"]["classes"] == {"cat": 4, "dog": 3}

    _, report = check(segment, data["segment"])
    files = (data["segment"] / "annotations" / "validation").rglob("*.png")
    values = np.concatenate([np.array(Image.open(path)).ravel() for path in files])
    reported = report["splits"]["val"]["label_values"]
    assert {int(value): entry["share"] for value, entry in reported.items()} == pytest.approx(
        {int(value): float((values == value).mean()) for value in np.unique(values)}
    )
    assert [entry["meaning"] for entry in reported.values()] == ["class 0", "class 1", "class 2", "ignored"]

    _, report = check(detect, data["detect"])
    content = json.loads((data["detect"] / "annotations" / "instances_train2017.json").read_text())
    names = {category["id"]: category["name"] for category in content["categories"]}
    split = report["splits"]["train"]
    assert split["categories"] == Counter(names[entry["category_id"]] for entry in content["annotations"])
    assert split["objects"] == split["masks"] == len(content["annotations"])


def test_a_run_stays_untouched_and_a_change_that_would_be_refused_is_found(photos, tmp_path, check):
    folder = tmp_path / "run"
    pretrain(photos, folder, "--max_steps", 3)

    def state_of_folder():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state_of_folder()
    out, report = check(pretrain, photos, output_dir=folder)
    assert report["run"]["first_step"] == 3
    assert f"resumes      {folder / 'checkpoint-3.pth'} at step 3" in out
    _, report = check(pretrain, photos, "--mask_ratio", 0.8, output_dir=folder, would_start=False)
    assert "--mask_ratio was 0.75 and now is 0.8" in report["errors"][0]
    assert state_of_folder() == before


def test_a_folder_that_another_process_has_locked(photos, tmp_path, check):
    folder = tmp_path / "run"
    folder.mkdir()
    code = "import fcntl, sys, time; file = open(sys.argv[1], 'a+'); fcntl.lockf(file, fcntl.LOCK_EX); "
    code += "file.write('process 7 on here'); file.flush(); print('locked', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, folder / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        _, report = check(pretrain, photos, output_dir=folder, would_start=False)
    finally:
        holder.communicate("")
    assert "is in use by process 7 on here" in report["errors"][0]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("a file/run", "cannot be written to"),
        ("data/train/cat/run", "lies inside the image folder"),
        ("foreign", "holds log.txt, but no run"),
    ],
)
def test_an_output_folder_that_would_be_refused(photos, tmp_path, check, place, message):
    shutil.copytree(photos, tmp_path / "data")
    (tmp_path / "a file").touch()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "log.txt").touch()
    _, report = check(pretrain, tmp_path / "data", output_dir=tmp_path / place, would_start=False)
    (error,) = report["errors"]
    assert message in error


# ------------------------------------------------------------------------------------------------------------- traps


def test_independent_errors_are_reported_together(tmp_path, monkeypatch, check):
    """A label file with an unknown value in val, an unreadable training image, and no space for a checkpoint."""
    root = write_stripes(tmp_path / "pairs")
    (root / "images" / "training" / "4.jpg").write_bytes(b"no image")
    Image.fromarray(np.full((37, 31), 77, np.uint8)).save(root / "annotations" / "validation" / "2.png")
    full_disk(monkeypatch)
    _, report = check(segment, root, would_start=False)
    image, label, disk = report["errors"]
    assert "4.jpg" in image
    assert "2.png" in label
    assert "it holds the values 77" in label
    assert "0.0 MB free" in disk
    assert report["splits"]["val"]["label_values"]["77"]["meaning"] == "no class"


def test_flags_first_weights_and_both_splits_are_reported_together(labelled, tmp_path, check):
    root = shutil.copytree(labelled, tmp_path / "data")
    (root / "train" / "empty").mkdir()
    write_photo(root / "val" / "1.jpg")
    out, report = check(finetune, root, "--finetune", tmp_path / "gone.pth", would_start=False)
    encoder, train, val = report["errors"]
    assert "gone.pth" in encoder
    assert "no valid file for the classes empty" in train
    assert "images directly (1.jpg) beside folders" in val
    assert f"free for {tmp_path / 'out'}; an error came before what the run needs" in out


def test_a_missing_flag_is_an_error_and_what_follows_from_it_is_none(data, check):
    words = Program(segment.module, segment.flags.replace("--num_classes 3", ""))
    _, report = check(words, data["segment"], would_start=False)
    (error,) = report["errors"]
    assert error.startswith("--num_classes is needed")


def test_pretraining_checks_validation_images_if_it_reads_them(labelled, tmp_path, check):
    root = shutil.copytree(labelled, tmp_path / "data")
    shutil.copytree(root / "val" / "dog", root / "val" / "fox")
    out, report = check(pretrain, root, what="duplicates")
    assert report["splits"].keys() == {"train"}
    assert "not read     val/: of no split that this run reads" in out
    _, report = check(pretrain, root, "--knn_every", 1, would_start=False)
    assert report["splits"].keys() == {"train", "val"}
    assert "has the classes fox, which the training data does not have" in report["errors"][0]


def test_binary_masks_of_which_the_foreground_is_ignored(tmp_path, check):
    root = write_stripes(tmp_path / "pairs")
    for path in (root / "annotations").rglob("*.png"):
        labels = np.array(Image.open(path))
        Image.fromarray(np.where(labels == 1, 255, 0).astype(np.uint8)).save(path)
    out, report = check(segment, root, "--num_classes", 2, would_start=False)
    assert len(report["errors"]) == 2  # one a split
    assert "255 (ignored)" in report["errors"][0]
    assert report["splits"]["train"]["absent_values"] == ["1"]
    assert "no pixel has the values 1, which are classes" in out


def test_a_label_file_of_colours_is_named_and_not_counted(tmp_path, check):
    root = write_stripes(tmp_path / "pairs")
    files = sorted((root / "annotations" / "training").rglob("*.png"))
    before = check(segment, root)[1]["splits"]["train"]
    Image.open(files[-1]).convert("RGB").save(files[-1])
    out, report = check(segment, root, would_start=False)
    split = report["splits"]["train"]
    assert split["label_files"] == before["label_files"] - 1 == len(files) - 1
    (problem,) = split["unreadable_labels"]
    assert problem.startswith(f"{str(files[-1])!r} has 3 channels")
    assert "1 label file cannot be read" in out


def test_classes_that_no_label_file_has(tmp_path, check):
    root = write_stripes(tmp_path / "pairs")
    out, report = check(segment, root, "--num_classes", 5)
    assert report["splits"]["train"]["absent_values"] == ["3", "4"]
    assert "no pixel has the values 3, 4, which are classes" in out


def test_a_mark_of_invalid_pixels_that_no_image_has(tmp_path, check):
    rng = np.random.default_rng(0)
    (tmp_path / "bands").mkdir()
    for i in range(8):
        pixels = rng.integers(500, 3000, (24, 24, 5)).astype(np.uint16)
        pixels[:6] = 0  # the mark of these files
        np.save(tmp_path / "bands" / f"{i}.npy", pixels)
    out, report = check(pretrain, tmp_path / "bands", "--in_chans", 5, "--nodata", 65535)
    assert "--nodata 65535 occurs in none of the 8 measured images" in out
    assert report["splits"]["train"]["pixels"]["invalid"] == 0
    assert report["splits"]["train"]["pixels"]["most_frequent"] == {"value": 0, "share": 0.25}
    assert "the most frequent value is 0: 25.0% of all values" in out
    out, report = check(pretrain, tmp_path / "bands", "--in_chans", 5, "--nodata", 0)
    assert report["splits"]["train"]["pixels"]["invalid"] == 0.25
    assert "invalid      25.0% of all values, in 8 of 8 images" in out


def test_files_that_are_not_read_are_counted_by_ending_and_reason(tmp_path, check):
    folder = tmp_path / "mixed"
    folder.mkdir()
    for i in range(3):
        write_photo(folder / f"{i}.jpg", seed=i)
    for i in range(9):
        write_photo(folder / f"{i}.gif")
    for name in ("a.jfif", "scan", "notes.txt", "more.zip", ".hidden.jpg"):
        shutil.copy(folder / "0.jpg", folder / name)
    out, report = check(pretrain, folder, "--batch_size", 3)
    unread = {entry["ending"]: entry for entry in report["splits"]["train"]["not_read"] if entry["reason"] != "hidden"}
    assert {ending: entry["files"] for ending, entry in unread.items()} == {
        ".gif": 9,
        ".jfif": 1,
        "": 1,
        ".txt": 1,
        ".zip": 1,
    }
    assert "not read     9 files ending in .gif: images of this format are not read" in out
    assert unread[".zip"]["reason"] == "archives are not read: unpack them"
    assert unread[".txt"]["reason"] == "no images"


def test_a_file_that_was_cut_short(labelled, tmp_path, check):
    """Its header is sound, so the start does not see it."""
    root = shutil.copytree(labelled, tmp_path / "data")
    path = root / "val" / "cat" / "1.png"
    path.write_bytes(path.read_bytes()[:-300])
    out, report = check(finetune, root)
    (problem,) = report["splits"]["val"]["not_decoded"]
    assert str(path) in problem
    assert "not decoded  1 image of 7" in out


def test_class_folders_in_two_forms_of_unicode(labelled, tmp_path, check):
    root = shutil.copytree(labelled, tmp_path / "data")
    composed = unicodedata.normalize("NFC", "chouette effrayée")
    decomposed = unicodedata.normalize("NFD", composed)
    for name in (composed, decomposed):
        shutil.copytree(root / "train" / "cat", root / "train" / name)
    out, report = check(finetune, root, would_start=False)
    assert "two spellings of one class" in report["errors"][0]
    assert ascii(composed) in out
    assert ascii(decomposed) in out


def test_images_far_smaller_than_the_model_s(tmp_path, check):
    (tmp_path / "small").mkdir()
    for i in range(8):
        write_photo(tmp_path / "small" / f"{i}.png", size=(8, 8), seed=i)
    out, _ = check(pretrain, tmp_path / "small")
    assert "the shorter side of a typical image has 8 pixels, and its crops are enlarged to" in out


def test_a_disk_that_holds_no_checkpoint(labelled, monkeypatch, check):
    full_disk(monkeypatch)
    out, report = check(finetune, labelled, would_start=False)
    assert report["errors"][0].startswith("the disk of --output_dir")
    assert report["run"]["free_bytes"] == 1000
    assert "disk         0.0 MB free" in out


def test_copies_across_splits(labelled, tmp_path, check):
    root = shutil.copytree(labelled, tmp_path / "data")
    shutil.copy(root / "train" / "cat" / "3.jpg", root / "val" / "dog" / "other name.jpg")
    shutil.copy(root / "train" / "cat" / "3.jpg", root / "train" / "cat" / "again.jpg")
    out, report = check(finetune, root, what="duplicates")
    copies = report["copies"]
    assert copies["within train"] == [f"{root}/train/cat/again.jpg = {root}/train/cat/3.jpg"]
    assert copies["val in train"] == [f"{root}/val/dog/other name.jpg = {root}/train/cat/3.jpg"]
    assert copies["within val"][0] == f"{root}/val/dog/0.png = {root}/val/cat/0.png"  # of the fixture
    assert report["copies_with_other_class"] == 1 + len(copies["within val"])
    assert "1 image val in train" in out
    _, report = check(finetune, root)
    assert "copies" not in report  # files are read only on request


# --------------------------------------------------------------------------------------------------------- processes


def test_two_processes_report_once_and_leave_with_the_same_verdict(tmp_path, data):
    words = [str(ROOT / detect.path), *detect.command(data["detect"], tmp_path / "out", "--check_data")]
    code, out = run_by_torchrun(*words)
    assert code == 0, out[-3000:]
    assert out.count("no errors: the run would start") == 1
    root = write_stripes(tmp_path / "pairs")
    for number in (3, 4):  # one for each rank
        (root / "images" / "training" / f"{number}.jpg").write_bytes(b"no image")
    code, out = run_by_torchrun(str(ROOT / segment.path), *segment.command(root, tmp_path / "out", "--check_data"))
    assert code != 0
    assert out.count("the run would be refused: ") == 1
    assert "3.jpg" in out
    assert "4.jpg" in out
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------------- flags


def test_flags_without_a_training_are_refused(capsys, labelled, tmp_path):
    message = finetune.refused(capsys, labelled, tmp_path / "out", "--check_json", tmp_path / "a.json")
    assert "--check_json is for --check_data" in message
    words = ["--eval", "--resume", "x", "--check_data", "--data_path", labelled]
    assert "leave out --eval" in refused(capsys, finetune.module.main, *words)


def test_a_run_still_ends_with_its_first_error():
    with pytest.raises(ValueError, match="first"), findings.collected():
        raise ValueError("first")
    made = []
    with pytest.raises(ValueError, match="0"):
        findings.collect_all(lambda: int("a 0"), lambda: made.append(1))
    assert not made
    with findings.collecting() as found:
        with findings.collected():
            raise ValueError("first")
        findings.collect_all(lambda: int("a 0"), lambda: made.append(1))
    assert len(found.errors) == 2
    assert made
    assert not findings.is_checking()
