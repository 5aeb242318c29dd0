"""Images that are broken, vanish, or are not what they seem; workers that die."""

import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from scripts import pack_dataset
from tests.patches import StandIn
from tests.runs import assert_same_state, finish, losses, pretrain, state
from util.data import decode, images
from util.data.tars import TarImages
from util.run.checkpoint import newest_checkpoint
from util.run.loop import TrainLoop


@pytest.fixture
def data(photos, tmp_path):
    """A copy of the photos, to be damaged."""
    return shutil.copytree(photos, tmp_path / "photos")


@pytest.fixture
def cats(data):
    return data / "train" / "cat"


def damage(path):
    path.write_bytes(path.read_bytes()[:-200])  # its header is good


def log_of(output_dir):
    return (output_dir / "log.txt").read_text()


@pytest.mark.fault("F24", "a truncated JPEG", "the next image in its place, named once; exact")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_replaced_by_the_next(data, cats, tmp_path, workers):
    whole = (cats / "5.jpg").read_bytes()
    shutil.copy(cats / "6.jpg", cats / "5.jpg")
    expected = pretrain(data, tmp_path / "replaced")
    (cats / "5.jpg").write_bytes(whole)
    damage(cats / "5.jpg")
    assert_same_state(pretrain(data, tmp_path / "out", "--num_workers", workers), expected)
    text = log_of(tmp_path / "out")
    assert text.count("cannot be read") == 1
    assert re.search(r"warning: 1 of 24 images .* New: '.*cat/5.jpg' cannot be dec", text)


@pytest.mark.fault("F28", "more broken images than --max_bad_fraction", "exit code 2 with their names")
@pytest.mark.parametrize("workers", [0, 1])
def test_two_broken_images_of_24_are_too_many(data, cats, tmp_path, capsys, workers):
    damage(cats / "5.jpg")
    (cats / "7.jpg").write_text("no image")
    flags = ("--num_workers", workers, "--save_steps", 1)
    message = pretrain.refused(capsys, data, tmp_path / "two", *flags)
    assert "2 of 24 images cannot be read, more than --max_bad" in message
    assert "5.jpg" in message and "7.jpg" in message
    assert pretrain(data, tmp_path / "two", *flags, "--max_bad_fraction", 0.1)["meta"]["step"] == 6
    message = pretrain.refused(capsys, data, tmp_path / "none", *flags, "--max_bad_fraction", 0)
    assert "7.jpg' is not a readable image" in message


@pytest.mark.parametrize(("processes", "code"), [(1, 2), (2, 1)])
def test_no_step_is_lost_if_too_many_images_are_broken(data, cats, tmp_path, processes, code):
    """All steps before are good, and the user only has to raise the flag."""
    damage(cats / "5.jpg")
    damage(cats / "7.jpg")
    raised = ("--max_bad_fraction", 0.1)
    finish(data, tmp_path / "whole", *raised, processes=processes)
    out = finish(data, tmp_path / "out", processes=processes, code=code)
    assert "2 of 24 images cannot be read, more than --max_bad_fraction 0.01" in out
    step = len(losses(tmp_path / "out"))
    assert 0 < step < 9 and state(tmp_path / "out")["meta"]["step"] == step
    out = finish(data, tmp_path / "out", *raised, processes=processes)
    assert f"checkpoint-{step}.pth at step {step}" in out
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

    monkeypatch.setattr(TarImages, "_read_at", stale)
    monkeypatch.replace_in(images, "time.sleep", lambda seconds: None)


GONE = "the images in '.*' cannot be opened any more; the same command goes on"


@pytest.mark.fault("F57", "the storage of the data is gone in the middle of an epoch", "saved; 0 lost; 75; exact")
@pytest.mark.fault("F57b", "all images of the data become unreadable", "saved; 0 lost; exit code 2")
@pytest.mark.parametrize(
    ("lose", "flags", "code", "message"),
    [
        (vanish, "", 75, GONE),  # found by a report
        (vanish, "--print_freq 20", 75, GONE),  # found by a batch
        (vanish, "--print_freq 20 --num_workers 1 --epochs 6", 75, GONE),
        (vanish, "--max_bad_fraction 0 --accum_iter 2 --batch_size 4", 75, GONE),
        (become_text, "", 2, "24 of 24 images cannot be read, more than --max_bad_fraction 0.01"),
        (become_text, "--print_freq 20", 2, "jpg' cannot be decoded"),
        (lose_tars, "", 75, "Stale file handle; the same command goes on"),
    ],
)
def test_no_step_is_lost_if_the_data_is_gone(
    data, tmp_path, monkeypatch, before_step, capsys, lose, flags, code, message
):
    flags = flags.split()
    if lose is lose_tars:
        pack_dataset.main([str(data), str(tmp_path / "tars")])
        data = tmp_path / "tars"
    shutil.copytree(data, tmp_path / "copy")
    expected = pretrain(data, tmp_path / "whole", *flags)

    before_step(3, lambda: lose(data, monkeypatch))
    assert re.search(message, pretrain.refused(capsys, data, tmp_path / "out", *flags, code=code))
    assert 4 <= state(tmp_path / "out")["meta"]["step"] < expected["meta"]["step"]
    monkeypatch.undo()
    shutil.rmtree(data, ignore_errors=True)
    (tmp_path / "copy").rename(data)
    assert_same_state(pretrain(data, tmp_path / "out", *flags), expected)


@pytest.mark.fault("F58", "the data vanishes under two processes", "both save and end; exact when it is back")
def test_no_step_is_lost_if_two_processes_lose_the_data(data, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTY_DATA", str(data))
    finish(data, tmp_path / "whole", "--print_freq", 20)
    out = finish(data, tmp_path / "out", "--print_freq", 20, fault=("lose-data", 3, 1, tmp_path / "mark"), code=1)
    assert "stopped and saved after step 5 of 9, because an error ends the run" in out
    assert "cannot be opened any more; the same command goes on from the newest checkpoint" in out
    data.with_name(f"{data.name}.away").rename(data)
    assert "checkpoint-5.pth at step 5" in finish(data, tmp_path / "out", "--print_freq", 20)
    assert_same_state(state(tmp_path / "out"), state(tmp_path / "whole"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_may_be_made_to_stop_the_run(data, cats, tmp_path, capsys, workers):
    pretrain(data, tmp_path / "out", "--max_steps", 3)
    damage(cats / "5.jpg")
    flags = ("--num_workers", workers, "--max_bad_fraction", 0)
    message = pretrain.refused(capsys, data, tmp_path / "out", *flags)
    assert "5.jpg' cannot be decoded" in message and message.count("\n") == 1
    assert newest_checkpoint(tmp_path / "out")[0].name == "checkpoint-3.pth"


@pytest.mark.fault("F27", "1 x 1, 1 x 5000, palette with alpha, animated, rotated by EXIF", "all are read")
def test_odd_images(data, cats, tmp_path):
    for name, size in (("0.jpg", (1, 1)), ("1.jpg", (1, 5000)), ("2.jpg", (5000, 1))):
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


@pytest.mark.fault("F26", "PNGs of 169 and 400 megapixels, of a few kilobytes", "refused by their header, not unfolded")
def test_decompression_bombs(data, cats, tmp_path, monkeypatch, recwarn):
    for name, side in (("0.jpg", 13000), ("1.jpg", 20000)):
        Image.new("1", (side, side)).save(cats / name, "PNG")
    unfolded = []

    def open_image(*args, **options):
        img = Image.open(*args, **options)
        load = img.load

        def note():
            unfolded.append(img.size)
            return load()

        img.load = note
        return img

    monkeypatch.replace_in(decode, "Image.open", open_image)
    pretrain(data, tmp_path / "out", "--max_bad_fraction", 0.1)
    text = log_of(tmp_path / "out")
    assert "2 of 24 images cannot be read" in text and "13000 x 13000 pixels are more than" in text
    assert max(map(max, unfolded), default=0) < 13000
    for warning in recwarn:
        assert warning.category is not Image.DecompressionBombWarning


@pytest.mark.fault(
    "F25b",
    "storage that fails (EIO) for a second, and for good",
    "tried again, exact; then exit code 75, no image replaced",
)
@pytest.mark.parametrize("is_lost", [False, True])
def test_storage_that_fails(photos, tmp_path, monkeypatch, capsys, is_lost):
    expected = pretrain(photos, tmp_path / "whole")
    failures = []

    def read_bytes(path):
        if path.name == "5.jpg" and (is_lost or len(failures) < 2):
            failures.append(path)
            raise OSError(5, "Input/output error")
        return path.read_bytes()

    monkeypatch.replace_in(images, "time.sleep", lambda seconds: None)
    monkeypatch.setattr(images, "Path", lambda path: StandIn(Path(path), read_bytes=lambda: read_bytes(Path(path))))
    if is_lost:
        message = pretrain.refused(capsys, photos, tmp_path / "out", code=75)
        assert "Input/output error; the same command goes on" in message
    else:
        assert_same_state(pretrain(photos, tmp_path / "out"), expected)
        assert len(failures) == 2


@pytest.mark.fault("F25", "files that vanish while the run reads them", "as for broken ones")
def test_files_that_vanish(data, cats, tmp_path, monkeypatch):
    begin_step = TrainLoop.begin_step

    def after_the_first(loop, number):
        if number == 1:
            (cats / "5.jpg").unlink()
            (data / "train" / "dog" / "7.jpg").unlink()
        begin_step(loop, number)

    monkeypatch.setattr(TrainLoop, "begin_step", after_the_first)
    pretrain(data, tmp_path / "out", "--max_bad_fraction", 0.1, "--epochs", 3)
    assert "2 of 24 images cannot be read" in log_of(tmp_path / "out")
