"""What users do to runs: resume from elsewhere, change flags, branch, interrupt, move folders, fill disks."""

import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import main_pretrain
from tests.conftest import write_photo
from tests.runs import assert_same_state, finish, pretrain, reports, state
from tests.two_processes import run_in_two_processes
from tests.warm import Python
from util.run import exits
from util.run.files.checkpoint import list_checkpoints, newest_checkpoint, read_sidecar, step_of
from util.run.processes import distributed
from util.run.start import begin

ROOT = Path(__file__).resolve().parents[2]
MICRO = ("--model", "mae_vit_micro_patch4", "--picture_every", 0)


def steps_in(folder):
    return [step_of(path) for path in list_checkpoints(folder)]


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_run_that_began_elsewhere_goes_on_where_it_was(photos, tmp_path, capsys):
    pretrain(photos, tmp_path / "first", *MICRO, "--max_steps", 3)
    flags = ("--resume", tmp_path / "first", *MICRO)  # a folder: its newest good checkpoint
    expected = pretrain(photos, tmp_path / "whole", *flags)
    origin = read_sidecar(tmp_path / "whole" / "checkpoint-6.pth").run.origin
    assert origin.started_from == str(tmp_path / "first" / "checkpoint-3.pth")
    pretrain(photos, tmp_path / "parts", *flags, "--max_steps", 5)
    shutil.rmtree(tmp_path / "first")
    capsys.readouterr()
    content = pretrain(photos, tmp_path / "parts", *flags)
    out = capsys.readouterr().out
    assert "checkpoint-5.pth at step 5" in out
    assert "is not used" not in out
    assert_same_state(content, expected)
    assert [r["step"] for r in reports(tmp_path / "parts")] == [4, 5, 6]
    assert content["meta"]["origin"]["started_from"] == str(tmp_path / "first" / "checkpoint-3.pth")


@pytest.mark.parametrize("resume", ["checkpoint-1.pth", "none"])
def test_an_older_checkpoint_of_the_same_folder_is_no_way_back(photos, tmp_path, capsys, resume):
    out = tmp_path / "out"
    flags = (*MICRO, "--epochs", 3, "--save_every", 1, "--save_steps", 1, "--max_steps")
    pretrain(photos, out, *flags, 7)
    assert steps_in(out) == [3, 6, 7]
    before = {path: path.read_bytes() for path in list_checkpoints(out)}
    log = reports(out)
    target = resume if resume == "none" else out / "checkpoint-3.pth"
    pretrain(photos, out, *flags, 8, "--resume", target)
    text = capsys.readouterr().out
    assert f"warning: --resume {target} is not used" in text
    assert "checkpoint-7.pth at step 7" in text
    assert steps_in(out) == [3, 6, 7, 8]
    for path, content in before.items():
        assert path.read_bytes() == content
    assert reports(out)[:-1] == log


def test_a_branch_in_a_folder_of_its_own(photos, tmp_path):
    trunk = tmp_path / "a"
    expected = pretrain(photos, trunk, *MICRO, "--save_every", 1)
    before = files_in(trunk)
    content = pretrain(photos, tmp_path / "b", *MICRO, "--save_every", 1, "--resume", trunk / "checkpoint-3.pth")
    assert_same_state(content, expected)
    assert files_in(trunk) == before
    assert [report["step"] for report in reports(tmp_path / "b")] == [4, 5, 6]


def test_what_was_just_saved_is_never_pruned(photos, tmp_path, capsys):
    out = tmp_path / "out"
    pretrain(photos, out, *MICRO, "--epochs", 4, "--save_every", 1000)
    for path in list_checkpoints(out):
        path.write_bytes(path.read_bytes()[:-50])
    pretrain(photos, tmp_path / "elsewhere", *MICRO, "--epochs", 4, "--max_steps", 2)
    for path in (tmp_path / "elsewhere").glob("checkpoint-2.*"):
        shutil.copy(path, out)  # the only good one
    pretrain(photos, out, *MICRO, "--epochs", 4, "--save_every", 1000, "--save_steps", 1, "--max_steps", 4)
    assert newest_checkpoint(out)[0].name == "checkpoint-4.pth"
    pretrain(photos, out, *MICRO, "--epochs", 4, "--save_every", 1000, "--max_steps", 5)
    assert "checkpoint-4.pth at step 4" in capsys.readouterr().out


def test_what_is_kept_stays_kept(photos, tmp_path):
    out = tmp_path / "out"
    pretrain(photos, out, *MICRO, "--epochs", 10, "--save_every", 2, "--max_steps", 15)
    assert steps_in(out) == [6, 12, 15]
    pretrain(photos, out, *MICRO, "--epochs", 10, "--save_every", 5)
    assert steps_in(out) == [6, 12, 27, 30]  # 15 was none of those to keep


def _different(rank, photos, folder):
    flags = {
        "--lr": (1e-3, 2e-3),
        "--batch_size": (4, 8),
        "--epochs": (2, 3),
        "--throw_ratio": (0.5, 0.25),
        "--seed": (0, 1),
    }
    argv = pretrain.command(photos, folder)
    for name, values in flags.items():
        argv += [name, str(values[rank])]
    return _error_of(argv)


def _other_data(rank, photos, folder):
    root = Path(folder) / f"data{rank}"
    shutil.copytree(photos, root)
    if rank == 1:
        (root / "train" / "cat" / "0.jpg").unlink()
    return _error_of(pretrain.command(root, Path(folder) / "out", "--batch_size", 4))


def _no_data(rank, photos, folder):
    data = photos if rank == 0 else Path(folder) / "nowhere"
    return _error_of(pretrain.command(data, Path(folder) / "out", "--batch_size", 4))


def _error_of(argv):
    rank = dist.get_rank()
    begin.init_process = lambda *_, **__: distributed.Process(torch.device("cpu"), rank, 2, 2)  # of this child
    messages = []

    def refuse(parser, error, *_):
        messages.append(str(error))
        sys.exit(2)

    exits.refuse = refuse
    begin.shut_down = lambda: None
    main_pretrain.train_one_epoch = lambda *_: sys.exit(0)
    with pytest.raises(SystemExit):
        main_pretrain.main(argv)
    return messages[0]


def _errors(rank, photos, folder):
    return [case(rank, photos, folder) for case in (_different, _other_data, _no_data)]


def test_processes_that_differ_do_not_train(photos, tmp_path):
    flags, data, missing = zip(*run_in_two_processes(_errors, photos, tmp_path), strict=True)
    for flag in ("--lr", "--batch_size", "--seed", "--throw_ratio", "--epochs"):
        assert flag in flags[0]
    assert flags[0] == flags[1]
    assert "24 on rank 0 and 23 on rank 1" in data[0]
    assert data[0] == data[1]
    assert missing[0] == f"rank 1 failed: {missing[1]}"


CHAIN = """
import os, signal, sys
sys.path.insert(0, {root!r})
import main_pretrain
from util.run.train.loop import TrainLoop
from util.run.exits import run_program
step = TrainLoop.set_rates
def stopping(loop, number):
    if number == 2:
        os.kill(os.getpid(), getattr(signal, {name!r}))
    return step(loop, number)
TrainLoop.set_rates = stopping
sys.argv[1:] = {argv!r}
run_program(main_pretrain.main, "main_pretrain.py")
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", -signal.SIGINT)])
def test_a_chain_of_commands_ends_with_the_one_that_was_stopped(photos, tmp_path, name, code):
    program = tmp_path / "program.py"
    program.write_text(CHAIN.format(root=str(ROOT), name=name, argv=pretrain.command(photos, tmp_path / "out", *MICRO)))
    process = Python(program)
    out, _ = process.communicate(timeout=900)
    assert f"stopped by {name} after step 3 of 6" in out
    assert "Traceback" not in out, out
    assert process.returncode == code  # a shell does not run what follows `&&`, and after SIGINT ends itself
    assert newest_checkpoint(tmp_path / "out")[0].name == "checkpoint-3.pth"


@pytest.mark.long
def test_torchrun_starts_a_stopped_run_again(photos, tmp_path):
    finish(photos, tmp_path / "whole", "--save_steps", 10)
    fault = ("signal", 5, "0", tmp_path / "mark")
    out = finish(photos, tmp_path / "out", "--save_steps", 10, fault=fault, restarts=1)
    assert "stopped by" in out
    assert "resuming" in out
    assert_same_state(state(tmp_path / "out"), state(tmp_path / "whole"))


def test_the_output_does_not_become_data(tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    for i in range(8):
        write_photo(tmp_path / "photos" / f"{i}.jpg", seed=i)
    message = pretrain.refused(capsys, tmp_path / "photos", tmp_path / "photos" / "out")
    assert "lies inside the image folder" in message
    assert not (tmp_path / "photos" / "out").exists()


def test_the_last_step_is_always_reported(photos, tmp_path, capsys):
    pretrain(photos, tmp_path / "whole", *MICRO, "--print_freq", 4)
    pretrain(photos, tmp_path / "parts", *MICRO, "--print_freq", 4, "--max_steps", 2)
    out = capsys.readouterr().out
    assert "for 2 of 6 steps on 24 images" in out
    assert "step 2/2: loss" in out
    (report,) = reports(tmp_path / "parts")
    assert report["step"] == 2
    assert report["interim"]
    pretrain(photos, tmp_path / "parts", *MICRO, "--print_freq", 4)
    assert losses_of_reports(tmp_path / "parts") == losses_of_reports(tmp_path / "whole")


def losses_of_reports(folder):
    return {report["step"]: report["loss"] for report in reports(folder)}


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        ("--lr inf", 2, "--lr"),
        ("--lr 1e-4 --min_lr 1e-3", 2, "--min_lr"),
        ("--lr_schedule simmim_steps", 2, "--lr_steps"),
        ("--lr_steps 7", 2, "--lr_steps"),
        ("--lr_schedule wsd", 2, "--decay_epochs"),
        ("--lr_schedule wsd --epochs 2 --decay_epochs 2", 2, "--warmup_epochs"),
        ("--resume {run}/log.jsonl", 4, "log.jsonl"),
    ],
)
def test_user_errors(photos, pretrained, tmp_path, capsys, flags, code, named):
    words = [word.format(run=pretrained) for word in flags.split()]
    assert named in pretrain.refused(capsys, photos, tmp_path / "out", *words, code=code)


def test_a_log_that_cannot_be_written(photos, tmp_path, before_step, capsys):
    expected = pretrain(photos, tmp_path / "whole", "--picture_every", 0)
    no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill_disk():
        log = tmp_path / "out" / "log.txt"
        with open(log, "a") as file:
            file.write("x" * 10_000)  # so that TensorBoard's file is no longer
        size = log.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    try:
        before_step(4, fill_disk)
        message = pretrain.refused(capsys, photos, tmp_path / "out", "--picture_every", 0, code=75)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert "File too large" in message
    assert "start the same command again" in message
    assert_same_state(pretrain(photos, tmp_path / "out"), expected)
    assert [r["step"] for r in reports(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]


def test_a_moved_folder_goes_on(photos, tmp_path):
    expected = pretrain(photos, tmp_path / "whole", *MICRO)
    pretrain(photos, tmp_path / "a", *MICRO, "--max_steps", 4)
    (tmp_path / "a").rename(tmp_path / "b")
    assert_same_state(pretrain(photos, tmp_path / "b", *MICRO), expected)
