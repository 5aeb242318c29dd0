"""Images that are broken, vanish, or are not what they seem; workers that die."""

import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from scripts import pack_dataset
from tests.patches import StandIn
from tests.runs import assert_same_state, finish, losses, pretrain, reports_without_times, state
from util.data import decode, images
from util.data.tars import LocalTars
from util.run.files.json_files import read_json


def damage(path):
    path.write_bytes(path.read_bytes()[:-200])  # its header is good


@pytest.fixture
def copied(photos, tmp_path):
    """A copy of the photos that a test may damage, and the folder of its cats."""
    shutil.copytree(photos, tmp_path / "photos")
    return tmp_path / "photos", tmp_path / "photos" / "train" / "cat"


def test_a_broken_image_is_replaced_by_the_next(copied, tmp_path):
    data, cats = copied
    original = (cats / "5.jpg").read_bytes()
    shutil.copy(cats / "6.jpg", cats / "5.jpg")
    expected = pretrain(data, tmp_path / "replaced")
    (cats / "5.jpg").write_bytes(original)
    damage(cats / "5.jpg")
    for workers in (0, 1):
        out = tmp_path / f"{workers} workers"
        assert_same_state(pretrain(data, out, "--num_workers", workers), expected)
        text = (out / "log.txt").read_text()
        assert text.count("cannot be read") == 1
        assert re.search(r"warning: 1 of 24 images .* New: '.*cat/5.jpg' cannot be dec", text)


@pytest.mark.parametrize("processes", [1, 2])
def test_no_step_is_lost_if_too_many_images_are_broken(copied, tmp_path, processes):
    """All steps before are good, and the user only has to raise the flag."""
    data, cats = copied
    damage(cats / "5.jpg")
    (cats / "7.jpg").write_text("no image")
    options = dict(processes=processes)
    finish(data, tmp_path / "whole", "--max_bad_fraction", 0.1, **options)
    out = finish(data, tmp_path / "out", code=2 if processes == 1 else 1, **options)
    assert "2 of 24 images cannot be read, more than --max_bad_fraction 0.01" in out
    assert "5.jpg" in out
    assert "7.jpg" in out
    step = len(losses(tmp_path / "out"))
    assert 0 < step < 9
    assert state(tmp_path / "out")["meta"]["step"] == step
    finish(data, tmp_path / "out", "--max_bad_fraction", 0.1, **options)
    assert_same_state(state(tmp_path / "out"), state(tmp_path / "whole"))
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def vanish(folder, monkeypatch):
    folder.rename(folder.with_name("away"))


def become_text(folder, monkeypatch):
    for path in folder.rglob("*.jpg"):
        path.write_text("no image")


def lose_tars(folder, monkeypatch):
    def stale(*_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(LocalTars, "_read_at", stale)
    monkeypatch.replace_in(images, "time.sleep", lambda seconds: None)


GONE = "the images in '.*' cannot be opened any more; start the same command again"


@pytest.mark.parametrize(
    ("lose", "flags", "code", "message"),
    [
        (vanish, "", 75, GONE),
        (vanish, "--num_workers 1 --epochs 6", 75, GONE),
        (vanish, "--max_bad_fraction 0 --accum_iter 2 --batch_size 4", 75, GONE),
        (become_text, "", 2, "jpg' cannot be decoded"),
        (lose_tars, "", 75, "Stale file handle; start the same command again"),
    ],
)
def test_no_step_is_lost_if_the_data_is_gone(
    photos, tmp_path, monkeypatch, before_step, capsys, lose, flags, code, message
):
    data = tmp_path / "data"
    flags = ["--epochs", 4, *flags.split()]
    if lose is lose_tars:
        pack_dataset.main([str(photos), str(data)])
    else:
        shutil.copytree(photos, data)
    shutil.copytree(data, tmp_path / "copy")
    expected = pretrain(data, tmp_path / "whole", *flags)

    before_step(4, lambda: lose(data, monkeypatch))
    assert re.search(message, pretrain.refused(capsys, data, tmp_path / "out", *flags, code=code))
    step = state(tmp_path / "out")["meta"]["step"]
    assert 4 <= step < expected["meta"]["step"]
    assert step == len(losses(tmp_path / "out"))
    monkeypatch.undo()
    shutil.rmtree(data, ignore_errors=True)
    (tmp_path / "copy").rename(data)
    assert_same_state(pretrain(data, tmp_path / "out", *flags), expected)


@pytest.mark.parametrize(
    ("rank", "number", "flags", "step"),
    [
        (1, 8, "--total_batch_size 2", 7),
        (0, 11, "--total_batch_size 4 --accum_iter 2", 5),
        (1, 13, "--batch_size 4", 3),  # the first image of the second epoch
        (0, 1, "--batch_size 4", 0),  # the first one of all
        (1, 16 + 20 + 2, "--batch_size 4 --knn_every 1", 3),  # in the second evaluation
    ],
)
def test_no_step_is_lost_if_the_storage_of_one_of_two_processes_fails(labelled, tmp_path, rank, number, flags, step):
    """At its image number `number`, before which the run can make `step` steps."""
    flags = ["--epochs", 2, "--save_steps", 0, *flags.split()]
    finish(labelled, tmp_path / "whole", *flags)
    out = tmp_path / "out"
    said = finish(labelled, out, *flags, fault=("fail-load", number, rank, tmp_path / "mark"), code=1)
    assert "start the same command again" in said
    content = read_json(out / "run.json")
    assert (content["state"], content["step"]) == ("failed", step)
    assert re.match(rf"rank {rank}: .*Input/output error", content["why"])
    assert "exitcode  : 75" in said
    assert [path.name for path in out.glob("*.pth")] == [f"checkpoint-{step}.pth"] * (step > 0)
    finish(labelled, out, *flags)
    assert_same_state(state(out), state(tmp_path / "whole"))
    assert reports_without_times(out) == reports_without_times(tmp_path / "whole")


def test_a_broken_image_may_be_made_to_stop_the_run(copied, tmp_path, capsys):
    data, cats = copied
    damage(cats / "5.jpg")
    message = pretrain.refused(capsys, data, tmp_path / "out", "--num_workers", 1, "--max_bad_fraction", 0)
    assert "5.jpg' cannot be decoded" in message
    assert message.count("\n") == 1


def test_odd_images(copied, tmp_path):
    data, cats = copied
    for name, size in {"0.jpg": (1, 1), "1.jpg": (1, 5000), "2.jpg": (5000, 1)}.items():
        Image.new("RGB", size, (200, 100, 50)).save(cats / name)
    palette = Image.open(cats / "3.jpg").quantize(16)
    palette.info["transparency"] = 3
    palette.save(cats / "3.png")
    frames = [Image.new("P", (30, 30), i) for i in range(3)]
    frames[0].save(cats / "4.webp", save_all=True, append_images=frames[1:])
    rotated = Image.Exif()
    rotated[0x0112] = 6
    Image.open(cats / "5.jpg").save(cats / "6.jpg", exif=rotated)
    assert pretrain(data, tmp_path / "out", "--max_bad_fraction", 0)["meta"]["step"] == 6


HOSTILE = "\x1b]0;owned\x07\udcff"  # would set the title of a terminal; its last byte is no text


def test_names_of_folders_do_not_reach_the_terminal_as_they_are(copied, tmp_path, capsys):
    data, cats = copied
    (data / "train" / HOSTILE).mkdir()
    message = pretrain.refused(capsys, data, tmp_path / "out")
    assert r": \x1b]0;owned\x07\udcff" in message
    (cats / "0.jpg").rename(data / "train" / HOSTILE / "0.jpg")
    (cats / "1.jpg").rename(data / "train" / "1.jpg")
    pretrain(data, tmp_path / "out", "--max_steps", 1)
    note = r"folders of images (\x1b]0;owned\x07\udcff, cat"
    assert note in (tmp_path / "out" / "log.txt").read_text()
    out = capsys.readouterr().out
    assert note in out
    assert "\x1b]" not in out


def test_decompression_bombs(copied, tmp_path, monkeypatch, recwarn):
    data, cats = copied
    Image.new("1", (13000, 13000)).save(cats / "0.jpg", "PNG")
    Image.new("1", (20000, 20000)).save(cats / "1.jpg", "PNG")
    unfolded = []

    def open_image(*args, **options):
        img = Image.open(*args, **options)
        load = img.load

        def note_and_load():
            unfolded.append(img.size)
            return load()

        img.load = note_and_load
        return img

    monkeypatch.replace_in(decode, "Image.open", open_image)
    pretrain(data, tmp_path / "out", "--max_bad_fraction", 0.1)
    text = (tmp_path / "out" / "log.txt").read_text()
    assert "2 of 24 images cannot be read" in text
    assert "13000 x 13000 pixels are more than" in text
    assert not unfolded
    assert Image.DecompressionBombWarning not in [warning.category for warning in recwarn]


@pytest.fixture
def failing_storage(monkeypatch):
    """Reads of 5.jpg fail `failing_storage["reads"]` times more; the pauses between are left out."""
    left = {"reads": 0}

    def read(path):
        if path.name == "5.jpg" and left["reads"] > 0:
            left["reads"] -= 1
            raise OSError(5, "Input/output error")
        return path.read_bytes()

    monkeypatch.replace_in(images, "time.sleep", lambda seconds: None)
    monkeypatch.setattr(images, "Path", lambda path: StandIn(Path(path), read_bytes=lambda: read(Path(path))))
    return left


def test_storage_that_fails(photos, tmp_path, failing_storage, capsys):
    expected = pretrain(photos, tmp_path / "whole")
    failing_storage["reads"] = 2
    assert_same_state(pretrain(photos, tmp_path / "out"), expected)
    failing_storage["reads"] = 1000
    message = pretrain.refused(capsys, photos, tmp_path / "lost", code=75)
    assert "Input/output error" in message


def test_files_that_vanish(copied, tmp_path, before_step):
    data, cats = copied

    def remove_two():
        (cats / "5.jpg").unlink()
        (cats / "7.jpg").unlink()

    before_step(1, remove_two)
    pretrain(data, tmp_path / "out", "--max_bad_fraction", 0.1, "--epochs", 3)
    assert "2 of 24 images cannot be read" in (tmp_path / "out" / "log.txt").read_text()
