"""A run's folder: damaged and lost checkpoints, full disks, other settings, other data, another run."""

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from scripts import export
from tests.locks import held_by_another_process
from tests.runs import assert_same_state, finetune, pretrain, refused, reports
from tests.until import wait_until
from tests.warm import Python
from util.run.files import checkpoint
from util.run.files.checkpoint import newest_checkpoint, prune_checkpoints, save_checkpoint
from util.run.files.json_files import read_json, record_failure, write_state

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_without_its_checkpoints_is_set_aside(labelled, tmp_path, capsys):
    out = tmp_path / "out"
    finetune(labelled, out)
    before = {}
    for name in ("log.jsonl", "settings.json", "results.json", "checkpoint-best.pth", "checkpoint-best.json"):
        before[name] = (out / name).read_bytes()
    for path in checkpoint.list_checkpoints(out):
        path.unlink()
        path.with_suffix(".json").unlink()
    (out / ".lock").unlink()
    finetune(labelled, out, "--seed", 1, "--max_steps", 5)
    assert "what was there is in earlier-1" in capsys.readouterr().out
    for name, content in before.items():
        assert (out / "earlier-1" / name).read_bytes() == content
    assert list((out / "earlier-1" / "tensorboard").iterdir())
    # What goes on there is a run like one in an empty folder.
    ours = finetune(labelled, out, "--seed", 1)
    assert_same_state(ours, finetune(labelled, tmp_path / "fresh", "--seed", 1))
    for name in ("last", "best"):
        assert read_json(out / "results.json")[name] == read_json(tmp_path / "fresh" / "results.json")[name]
    assert [path.name for path in out.glob("earlier-*")] == ["earlier-1"]


def test_a_damaged_checkpoint_is_passed_over_aloud(photos, tmp_path, capsys):
    folder = tmp_path / "out"
    expected = pretrain(photos, folder)
    newest = folder / "checkpoint-6.pth"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert_same_state(pretrain(photos, folder), expected)
    out = capsys.readouterr().out
    assert "skipped a checkpoint, checkpoint-6.pth: " in out
    assert "checkpoint-3.pth at step 3" in out
    for path in folder.glob("*.pth"):
        path.write_bytes(b"")
    assert "no checkpoint in" in pretrain.refused(capsys, photos, folder, code=4)


@pytest.fixture
def begun(photos, tmp_path):
    """The folder of a run that has made two of its six steps."""
    pretrain(photos, tmp_path / "out", "--max_steps", 2)
    return tmp_path / "out"


def test_changed_settings_are_refused(photos, begun, capsys):
    message = pretrain.refused(capsys, photos, begun, "--weight_decay", 0.1, "--throw_ratio", 0.25)
    assert "--throw_ratio was 0.5 and now is 0.25; --weight_decay was 0.05 and now is 0.1. Undo that" in message
    split = ("--batch_size", 4, "--accum_iter", 2)
    assert "--batch_size" not in pretrain.refused(capsys, photos, begun, "--seed", 1, *split)
    assert "total batch was 8 and now is 4" in pretrain.refused(capsys, photos, begun, "--batch_size", 4)
    assert len(reports(begun)) == 2  # nothing was touched


def test_changed_settings_take_effect_by_request(photos, begun, capsys):
    content = pretrain(photos, begun, "--weight_decay", 0.1, "--allow_changes")
    out = capsys.readouterr().out
    assert "warning: --weight_decay was 0.05 and now is 0.1" in out
    assert out.count("warning") == 1
    decays = {group["weight_decay"] for group in content["optimizer"]["param_groups"]}
    assert decays == {0.0, 0.1}


def test_the_loss_scale_is_resumed_and_another_precision_does_not_inherit_it(photos, tmp_path):
    half = ("--precision", "fp16", "--max_steps")
    expected = pretrain(photos, tmp_path / "whole", *half, 4)
    pretrain(photos, tmp_path / "out", *half, 2)
    assert_same_state(pretrain(photos, tmp_path / "out", *half, 4), expected)
    for step, precision in enumerate(("bf16", "fp16"), start=5):
        flags = ("--precision", precision, "--max_steps", step, "--allow_changes")
        content = pretrain(photos, tmp_path / "out", *flags)
        assert bool(content["scaler"]) == (precision == "fp16")


def test_changed_data_is_refused_or_by_request_accepted(photos, tmp_path, capsys):
    data = tmp_path / "photos"
    shutil.copytree(photos, data)
    pretrain(data, tmp_path / "out", "--max_steps", 2)
    cats = data / "train" / "cat"
    (cats / "0.jpg").rename(cats / "x.jpg")  # as many as before, in another order
    message = pretrain.refused(capsys, data, tmp_path / "out")
    assert re.search(r"the data had 24 images \(.*\) and now has 24", message)
    (cats / "x.jpg").unlink()
    assert "and now has 23 images" in pretrain.refused(capsys, data, tmp_path / "out")
    pretrain(data, tmp_path / "out", "--allow_changes")
    assert "warning: the data had 24 images" in capsys.readouterr().out


def test_a_folder_takes_one_run_at_a_time(photos, tmp_path, capsys):
    output_dir = tmp_path / "out"
    with held_by_another_process(output_dir) as message:
        assert message in pretrain.refused(capsys, photos, output_dir)
    pretrain(photos, output_dir, "--max_steps", 1)  # a lock goes with its process


@pytest.mark.parametrize("flags", [(), ("--knn_every", 1)])
def test_a_start_that_fails_keeps_the_next_from_nothing(photos, tmp_path, capsys, flags):
    """Before the log is opened, and after it."""
    data = tmp_path / "data"
    if flags:
        shutil.copytree(photos, data)
        shutil.copytree(photos / "train" / "cat", data / "val" / "lion")
    pretrain.refused(capsys, data, tmp_path / "out", *flags)
    pretrain(photos, tmp_path / "out", "--max_steps", 1)
    before = sorted((tmp_path / "out").rglob("*"))
    pretrain.refused(capsys, data, tmp_path / "out", "--allow_changes", *flags)  # of a run that is there
    assert [path for path in before if not path.exists()] == []


WAITING = """
import sys, time
from pathlib import Path

sys.path.insert(0, {root!r})
import main_pretrain
from util.run.exits import run_program

def wait(*_, **__):
    Path({mark!r}).touch()
    time.sleep(600)

main_pretrain.open_everywhere = wait
run_program(lambda: main_pretrain.main(sys.argv[1:]), "main_pretrain.py")
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_a_start_as_any_program(photos, tmp_path, name):
    mark = tmp_path / "mark"
    script = tmp_path / "waiting.py"
    script.write_text(WAITING.format(root=str(ROOT), mark=str(mark)))
    process = Python(script, *pretrain.command(photos, tmp_path / "new" / "deep"))
    wait_until(lambda: mark.exists() or process.poll() is not None, process.text)
    assert (tmp_path / "new" / "deep" / ".lock").exists()
    process.send_signal(getattr(signal, name))
    out, _ = process.communicate(timeout=900)
    assert process.returncode == -getattr(signal, name), out
    assert "Traceback" not in out
    assert [path.name for path in (tmp_path / "new" / "deep").iterdir()] == [".lock"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 28 MB, where root may make one: room for three checkpoints of a micro model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=28m", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no file system of one's own without root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(path):
    with open(path, "wb", buffering=0) as file:
        for size in (65536, 1):
            with pytest.raises(OSError):
                while True:
                    file.write(bytes(size))


def test_why_a_run_has_failed_is_written_to_a_full_disk(small_disk):
    record_failure(small_disk, "before the run has begun")
    assert list(small_disk.iterdir()) == []
    write_state(small_disk, "running", program="main_pretrain.py")
    fill(small_disk / "ballast")
    record_failure(small_disk, "No space left on device", step=7)
    record_failure(small_disk, "a closed connection", step=7)
    content = read_json(small_disk / "run.json")
    assert (content["state"], content["why"], content["step"]) == ("failed", "No space left on device", 7)
    assert content["program"] == "main_pretrain.py"


def test_a_full_disk(photos, tmp_path, small_disk, capsys, before_step):
    """The disk is filled after the first epoch's checkpoint, apart from room for logs. The last save is required."""
    output_dir = small_disk / "out"
    flags = ("--model", "mae_vit_micro_patch4", "--epochs", 3, "--picture_every", 0)
    expected = pretrain(photos, tmp_path / "whole", *flags)
    pretrain(photos, output_dir, *flags, "--max_steps", 3)
    ballast = small_disk / "ballast"

    def leave_room_for_logs():
        fill(ballast)
        with open(ballast, "r+b") as file:
            file.truncate(ballast.stat().st_size - 600_000)

    before_step(4, leave_room_for_logs)
    with pytest.raises(SystemExit) as stop:
        pretrain(photos, output_dir, *flags)
    captured = capsys.readouterr()
    assert "warning: checkpoint-6.pth could not be written ([Errno 28]" in captured.out
    assert stop.value.code == 75
    assert "checkpoint-9.pth" in captured.err
    assert "start the same command again" in captured.err
    assert "MB free, but" in pretrain.refused(capsys, photos, output_dir, *flags, code=75)
    left = [path.name for path in output_dir.glob("*checkpoint*")]
    assert sorted(left) == ["checkpoint-3.json", "checkpoint-3.pth"]
    ballast.unlink()
    assert_same_state(pretrain(photos, output_dir, *flags), expected)


def test_a_read_only_folder(photos, small_disk, capsys):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert "cannot be written to" in pretrain.refused(capsys, photos, small_disk / "out")


def test_a_signal_after_a_failed_save(photos, tmp_path, monkeypatch, before_step):
    save = checkpoint.save_checkpoint
    failures = []
    is_training_on = threading.Event()

    def full_once(output_dir, step, *args):
        if step == 3 and not failures:
            assert is_training_on.wait(900)
            os.kill(os.getpid(), signal.SIGTERM)
            failures.append(step)
            raise OSError(28, "No space left on device")
        return save(output_dir, step, *args)

    monkeypatch.setattr(checkpoint, "save_checkpoint", full_once)

    def wait_for_failure():
        is_training_on.set()
        wait_until(lambda: failures)

    before_step(3, wait_for_failure)
    assert pretrain(photos, tmp_path / "out")["meta"]["step"] == 4  # it stops after the next step
    assert failures == [3]


class Payload:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def test_code_in_a_checkpoint(photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Payload(), "optimizer": {}, "meta": "{}"}, "evil.pth")
    for folder in ("train", "val"):
        shutil.copytree(photos / "train", tmp_path / "data" / folder)
    errors = [
        pretrain.refused(capsys, photos, "out", "--resume", "evil.pth", code=4),
        finetune.refused(capsys, "data", "out2", "--finetune", "evil.pth", code=4),
        refused(capsys, export.main, "evil.pth", "--out", "out.safetensors", code=4),
    ]
    for error in errors:
        assert "cannot be read as a checkpoint of tensors" in error
    assert not Path("pwned").exists()


def save_for_ever(folder):
    """A 24 MB checkpoint after the other, as a run saves them."""
    state = {"weights": torch.zeros(6_000_000)}
    for step in itertools.count(1):
        state["weights"].fill_(step)
        save_checkpoint(folder, step, state, {"epoch": step})
        prune_checkpoints(folder, [step - 1, step])


@pytest.mark.long
def test_kills_while_saving(tmp_path):
    random.seed(0)
    for k in range(40):
        folder = tmp_path / str(k)
        folder.mkdir()
        child = os.fork()
        if not child:
            save_for_ever(folder)
        wait_until(lambda folder=folder: list(folder.glob("*.json")))
        time.sleep(random.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        path, _ = newest_checkpoint(folder)
        weights = torch.load(path, weights_only=True)["weights"]
        assert len(weights.unique()) == 1
        assert path.name == f"checkpoint-{int(weights[0])}.pth"
        shutil.rmtree(folder)
