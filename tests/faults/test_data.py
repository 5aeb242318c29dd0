"""Images that are broken, vanish, or are not what they seem; workers that die."""

import re
import shutil

import pytest

from tests.test_main_pretrain import assert_same_state, fails, run
from util.checkpoint import newest_checkpoint


def damage(path):
    path.write_bytes(path.read_bytes()[:-200])  # its header is good


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_replaced_by_the_next_and_two_of_24_are_too_many(photos, tmp_path, capsys, workers):
    cats, flags = tmp_path / "photos" / "train" / "cat", ("--num_workers", workers)
    shutil.copytree(photos, tmp_path / "photos")
    original = (cats / "5.jpg").read_bytes()
    shutil.copy(cats / "6.jpg", cats / "5.jpg")
    expected = run(tmp_path / "photos", tmp_path / "replaced")
    (cats / "5.jpg").write_bytes(original)
    damage(cats / "5.jpg")
    assert_same_state(run(tmp_path / "photos", tmp_path / "out", *flags), expected)
    text = (tmp_path / "out" / "log.txt").read_text()
    assert text.count("cannot be read") == 1 and re.search(r"warning: 1 of 24 images .* New: '\S*cat/5.jpg' cannot be dec", text)

    (cats / "7.jpg").write_text("no image")
    capsys.readouterr()
    flags = (*flags, "--save_steps", 1)
    message = fails(capsys, tmp_path / "photos", tmp_path / "two", *flags)
    assert "2 of the 24 images looked at" not in message and "2 of 24 images cannot be read, more than --max_bad" in message
    assert "5.jpg" in message and "7.jpg" in message
    assert run(tmp_path / "photos", tmp_path / "two", *flags, "--max_bad_fraction", 0.1)["meta"]["step"] == 6
    message = fails(capsys, tmp_path / "photos", tmp_path / "none", *flags, "--max_bad_fraction", 0)
    assert "7.jpg' is not a readable image" in message


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_may_be_made_to_stop_the_run(photos, tmp_path, capsys, workers):
    shutil.copytree(photos, tmp_path / "photos")
    run(tmp_path / "photos", tmp_path / "out", "--max_steps", 3)
    damage(tmp_path / "photos" / "train" / "cat" / "5.jpg")
    message = fails(capsys, tmp_path / "photos", tmp_path / "out", "--num_workers", workers, "--max_bad_fraction", 0)
    assert "5.jpg' cannot be decoded" in message and message.count("\n") == 1
    assert newest_checkpoint(tmp_path / "out")[0].name == "checkpoint-3.pth"
