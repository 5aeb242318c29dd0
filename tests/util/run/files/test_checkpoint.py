import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from encoders.load import read
from tests.runs import info_of_run
from util import atomic
from util.run.errors import CheckpointError
from util.run.files import checkpoint
from util.run.files.checkpoint import (
    find_checkpoint_file,
    list_checkpoints,
    list_finished,
    newest_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    read_sidecar,
    save_checkpoint,
)
from util.run.files.record import CheckpointInfo


def save(folder, step, value=0.0, **meta):
    return save_checkpoint(folder, step, {"model": {"w": torch.full((100,), value)}}, meta)


def test_the_hash_is_that_of_the_file_which_is_not_read_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "sha256", lambda path: pytest.fail("the file was read"))
    path = save_checkpoint(tmp_path, 1, {"model": {"w": torch.randn(300, 1000), "b": torch.zeros(0)}}, {})
    record = json.loads(path.with_suffix(".json").read_text())
    content = path.read_bytes()
    assert record["size"] == len(content)
    assert record["sha256"] == hashlib.sha256(content).hexdigest()


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_empty(path):
    path.write_bytes(b"")


def damage_record(path):
    path.with_suffix(".json").unlink()


@pytest.mark.parametrize(
    "damage, reason",
    [
        (damage_truncate, r"\d+ bytes instead of \d+"),
        (damage_flip, "its SHA-256 is not the recorded one"),
        (damage_empty, r"0 bytes instead of \d+"),
        (damage_record, "its .json is missing"),
    ],
)
def test_the_newest_intact_checkpoint_is_found_with_the_reasons_for_skipping_others(tmp_path, damage, reason):
    good = save(tmp_path, 90)
    newest = save(tmp_path, 100)
    assert newest_checkpoint(tmp_path) == (newest, [])  # sorted by number, not by name
    damage(newest)
    path, (skipped,) = newest_checkpoint(tmp_path)
    assert path == good
    assert re.match(f"checkpoint-100.pth: {reason}", skipped)
    damage(good)
    path, skipped = newest_checkpoint(tmp_path)
    assert path is None
    assert len(skipped) == 2


NO_SPACE = OSError(28, "No space left on device")
BAD_POSITION = RuntimeError("unexpected pos 576 vs 534")


def contents_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("step", [2, "best"])
@pytest.mark.parametrize(
    ("module", "function", "error"),
    [
        (checkpoint, "torch.save", NO_SPACE),
        (checkpoint, "torch.save", BAD_POSITION),
        (atomic, "os.replace", NO_SPACE),
        (atomic, "os.fsync", NO_SPACE),
        (checkpoint, "sync", NO_SPACE),  # of the record, after the weights were written
    ],
)
def test_a_failed_write_leaves_older_checkpoints_and_no_partial_file(
    tmp_path, monkeypatch, module, function, error, step
):
    """torch's zip writer raises OSError or RuntimeError on a full disk. The caller gets an OSError in both cases."""
    before = save(tmp_path, 1, 1.0)
    save_checkpoint(tmp_path, "best", {"w": torch.zeros(10)}, {"step": 1})  # replaced by a better one
    files = contents_of(tmp_path)

    def full(*arguments):
        if function == "torch.save":
            arguments[1].write(b"half a checkpoint")
        raise error

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.replace_in(module, function, full)
        save(tmp_path, step, 2.0)
    assert newest_checkpoint(tmp_path) == (before, [])
    assert contents_of(tmp_path) == files


def test_pruning_keeps_the_last_two_and_those_marked_as_kept(tmp_path):
    for name in ("checkpoint-best.pth", "weights.pth"):
        (tmp_path / name).touch()  # files of the user
    for step in range(1, 8):
        save_checkpoint(tmp_path, step, {"model": {}}, {"step": step}, keep=step % 3 == 0)
        prune_checkpoints(tmp_path, [step - 1, step])
    assert {path.stem for path in tmp_path.glob("*.json")} == {"checkpoint-3", "checkpoint-6", "checkpoint-7"}
    kept = {"checkpoint-3", "checkpoint-6", "checkpoint-7", "checkpoint-best", "weights"}
    assert {path.stem for path in tmp_path.glob("*.pth")} == kept


def test_pruning_keeps_checkpoints_of_later_steps(tmp_path):
    for step in range(1, 5):
        save_checkpoint(tmp_path, step, {"model": {}}, {"step": step})
    prune_checkpoints(tmp_path, [2])
    assert {path.stem for path in tmp_path.glob("*.pth")} == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}


@pytest.mark.parametrize("calls", [0, 1])
def test_a_kill_while_pruning_leaves_no_checkpoint_without_a_record(tmp_path, monkeypatch, calls):
    for step in range(1, 4):
        save_checkpoint(tmp_path, step, {}, {"step": step})
    deleted = []

    class KilledPath(type(Path())):
        def unlink(self, **options):
            if len(deleted) == calls:
                raise KeyboardInterrupt
            deleted.append(self)
            super().unlink(**options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "Path", KilledPath)
        prune_checkpoints(tmp_path, [2, 3])
    assert list_finished(tmp_path) == list_checkpoints(tmp_path)
    prune_checkpoints(tmp_path, [2, 3])
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2.pth", "checkpoint-3.pth"]


def test_pruning_never_deletes_a_checkpoint_without_a_record(tmp_path):
    for step in range(1, 5):
        save_checkpoint(tmp_path, step, {}, {"step": step})
    (tmp_path / "checkpoint-2.json").unlink()  # copied by the user, or killed between file and record
    prune_checkpoints(tmp_path, [3, 4])
    assert {path.stem for path in tmp_path.glob("*.pth")} == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}


@pytest.mark.parametrize(
    ("suffix", "is_zip"),
    [
        (".pth", True),
        (".pth", False),
        (".safetensors", False),
    ],
)
def test_a_file_that_ends_too_early_is_a_damaged_checkpoint(tmp_path, suffix, is_zip):
    """Wherever it ends: none of the errors of torch and safetensors passes for one of the storage."""
    weights = {"w": torch.zeros(100)}
    path = tmp_path / f"a{suffix}"
    if suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=is_zip)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 23):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cannot be read as a checkpoint of tensors"):
            read(path)


def test_the_folder_of_a_run_stands_for_its_newest_checkpoint(tmp_path):
    older = save(tmp_path, 1)
    save(tmp_path, "best")  # never the newest, since it has no step
    newest = save(tmp_path, 2)
    (tmp_path / "model.safetensors").touch()
    assert find_checkpoint_file(tmp_path) == newest
    assert find_checkpoint_file(str(newest)) == newest
    assert find_checkpoint_file(newest.with_suffix(".json")) == newest
    damage_flip(newest)
    assert find_checkpoint_file(tmp_path) == older
    damage_flip(older)
    with pytest.raises(ValueError, match="holds no intact checkpoint: checkpoint-2.pth: its SHA-256"):
        find_checkpoint_file(tmp_path)


def test_a_folder_without_a_run_may_hold_exported_weights(tmp_path):
    with pytest.raises(ValueError, match="holds no intact checkpoint"):
        find_checkpoint_file(tmp_path)
    (tmp_path / "model.safetensors").touch()  # of scripts/export.py
    assert find_checkpoint_file(tmp_path) == tmp_path / "model.safetensors"


@pytest.mark.parametrize("meta", ["{}", "epoch 3", "[1]", 3, {"epoch": 3}])
def test_files_of_other_projects_say_nothing(tmp_path, meta):
    torch.save({"model": {"w": torch.zeros(1)}, "meta": meta}, tmp_path / "other.pth")
    assert read_checkpoint(tmp_path / "other.pth").info == CheckpointInfo()


@pytest.mark.parametrize(
    "info",
    [
        CheckpointInfo(),
        info_of_run(),
        info_of_run(val={"top1": 50.0}),
    ],
)
def test_what_a_checkpoint_says_survives_json(tmp_path, info):
    path = save_checkpoint(tmp_path, 1, {"model": {"w": torch.zeros(1)}}, info.to_json())
    assert read_checkpoint(path).info == read_sidecar(path) == info


@pytest.mark.parametrize("flag", ["step", "data", "settings", "origin"])
def test_a_flag_that_names_a_file_cannot_overwrite_what_a_checkpoint_says(flag):
    """A framework chooses the names of its flags."""
    found = info_of_run(files={flag: "fingerprint"}).to_json()
    assert found == info_of_run().to_json() | {"files": {flag: "fingerprint"}}
