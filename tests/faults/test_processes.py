"""Processes that are killed, stopped, or hang, alone and together; signals to one and to all."""

import os
import re
import signal
from contextlib import suppress

import pytest

from tests.conftest import write_photo
from tests.faults.faulty import IN_SAVE
from tests.runs import (
    assert_same_state,
    children_of,
    command,
    finish,
    is_alive,
    losses,
    reports,
    start,
    state,
    steps_lost,
    wait_for_step,
)
from tests.until import wait_until
from tests.warm import Python, reserve_port
from util.run.files.json_files import read_json

STEPS = 20
SAVE = ("--save_steps", 5, "--input_size", 16, "--epochs", 2)
HOLD = ("hold", 15, "all", "-")  # a fault: the run waits before step 16 until a signal comes
LOST = 10  # at most, because the write of a save is complete before the next one begins


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """80 images: 10 steps an epoch, so that what is lost depends on --save_steps."""
    folder = tmp_path_factory.mktemp("photos")
    for i in range(80):
        write_photo(folder / f"{i:03}.jpg", size=(32, 32), seed=i)
    return folder


@pytest.fixture(scope="session")
def undisturbed(photos, tmp_path_factory):
    """The folder of a run of two processes without any fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(photos, folder, *SAVE)
    return folder


@pytest.fixture(scope="session")
def alone(photos, tmp_path_factory):
    """The folder of a run of one process without any fault."""
    folder = tmp_path_factory.mktemp("alone")
    finish(photos, folder, *SAVE, processes=1)
    return folder


def assert_as(undisturbed, output_dir):
    """All weights, moments and logged losses, to the last bit; each step once."""
    assert_same_state(state(output_dir), state(undisturbed))
    assert losses(output_dir) == losses(undisturbed)
    assert len(losses(output_dir)) == STEPS


def lost_in(output_dir):
    """The steps that each further start has run again."""
    return steps_lost((output_dir / "log.txt").read_text())


def test_a_killed_process(photos, tmp_path, undisturbed):
    finish(photos, tmp_path / "out", *SAVE, fault=("kill", 12, 0, tmp_path / "mark"), restarts=3)
    assert_as(undisturbed, tmp_path / "out")
    (lost,) = lost_in(tmp_path / "out")
    assert lost <= LOST


def test_a_killed_process_of_two_nodes(photos, tmp_path, undisturbed, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    endpoint = f"127.0.0.1:{reserve_port()}"
    options = ["--nnodes", 2, "--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "a"]
    torchrun = dict(fault=("kill", 12, 1, tmp_path / "mark"), processes=1, restarts=3, options=options)
    nodes = [start(photos, tmp_path / "out", *SAVE, **torchrun) for _ in range(2)]
    try:
        for node in nodes:
            out, _ = node.communicate(timeout=900)
            assert node.returncode == 0, out
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    assert_as(undisturbed, tmp_path / "out")
    (lost,) = lost_in(tmp_path / "out")
    assert lost <= LOST


def test_a_process_that_waits_for_the_others(photos, tmp_path):
    port = str(reserve_port())
    environment = dict(
        RANK="0",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )
    process = Python(*command(photos, tmp_path, processes=1), env=environment)
    waiting = f"process 0 is waiting for all 2 processes at 127.0.0.1:{port}"
    wait_until(lambda: waiting in process.text() or process.poll() is not None)
    assert process.poll() is None, process.text()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_torchrun_does_not_repeat_a_final_error(photos, tmp_path):
    out = finish(photos / "nowhere", tmp_path, restarts=3, code=1)
    assert out.count("exit code 2; torchrun is stopped") == 1, out
    assert out.count("error: ") <= 2, out


def test_a_process_that_hangs(photos, tmp_path, undisturbed):
    options = dict(fault=("hang", 12, 1, tmp_path / "mark"), restarts=3)
    out = finish(photos, tmp_path / "out", *SAVE, **options)
    assert re.search(r"process 1 on \S+ made no progress for 600 s: step 13; exit", out), out
    assert re.search(r"error: process 1 on \S+ made no", (tmp_path / "out" / "log.txt").read_text())
    assert re.search(r'File ".*faulty.py", line \d+ in seed', out)  # its stack
    assert_as(undisturbed, tmp_path / "out")


def test_a_mount_that_hangs_in_the_set_up(photos, tmp_path, undisturbed):
    fault = ("hang-mount", 0, 1, tmp_path / "mark")
    out = finish(photos, tmp_path / "out", *SAVE, fault=fault, restarts=1)
    assert re.search(r"process 1 on \S+ made no progress for 1800 s: setting up: images; exit code 75", out), out
    assert re.search(r'File ".*faulty.py", line \d+ in identify_folder', out)  # its stack
    assert_as(undisturbed, tmp_path / "out")


def test_a_slow_compilation_is_no_hang(photos, tmp_path, undisturbed):
    """The first forward pass seems to take 50 minutes. A later one that hangs is found as ever."""
    out = finish(photos, tmp_path / "out", *SAVE, "--compile", fault=("slow-compile", 0, "all", "-"))
    assert "the first step compiles the model" in out
    assert_as(undisturbed, tmp_path / "out")


@pytest.mark.long
def test_a_process_that_is_stopped(photos, tmp_path, undisturbed):
    options = dict(fault=("stop", 12, 1, tmp_path / "mark"), restarts=3)
    out = finish(photos, tmp_path / "out", *SAVE, "--dist_timeout", 10, **options)
    assert re.search(r"process 0 on \S+ made no progress for 10 s: step 13", out), out
    assert_as(undisturbed, tmp_path / "out")


def test_an_output_folder_that_is_not_shared(photos, tmp_path):
    out = finish(photos, "out", "--max_steps", 1, fault=("own-folder", 0, "all", tmp_path / "disk"), code=1)
    assert "--output_dir 'out' is not the same folder for all processes" in out
    assert not list(tmp_path.glob("disk.*/out/*checkpoint*"))


def test_a_signal_to_torchrun(photos, tmp_path, undisturbed):
    process = start(photos, tmp_path / "out", *SAVE, fault=HOLD)
    wait_for_step(tmp_path / "out", 7, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=900)
    finish(photos, tmp_path / "out", *SAVE)
    assert_as(undisturbed, tmp_path / "out")
    assert lost_in(tmp_path / "out") == [0]


def test_a_signal_to_torchrun_in_an_evaluation(photos, tmp_path, undisturbed):
    """Nothing else would save this step. Of the images, one process has five batches, the other has four."""
    flags = (*SAVE, "--save_steps", 0, "--knn_every", 1, "--knn_train", 33)
    process = start(photos, tmp_path / "out", *flags, fault=("hold-work", 10, "all", "-"))
    wait_until(lambda: process.text().count("in the work") == 2 or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=900)
    assert out.count("SIGTERM: stopping after this step or batch") == 2  # the moment it comes
    assert "stopped by SIGTERM after step 10 of 20" in out
    assert [path.name for path in (tmp_path / "out").glob("*.pth")] == ["checkpoint-10.pth"]
    finish(photos, tmp_path / "out", *flags)
    assert_same_state(state(tmp_path / "out"), state(undisturbed))
    evaluated = [report["step"] for report in reports(tmp_path / "out") if "rankme" in report]
    assert evaluated == [0, 10, 20]


def test_a_killed_torchrun(photos, tmp_path, undisturbed):
    """Its processes are programs of their own, as ever. Forks, as in other tests, would get SIGINT by torch."""
    words = command(photos, tmp_path / "out", *SAVE, fault=HOLD)
    for option in ("--run-path", "--start-method", "fork"):
        words.remove(option)
    process = Python(*words, env={"OMP_NUM_THREADS": "1"})
    wait_for_step(tmp_path / "out", 7, process)
    trainers = children_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=900)
    try:
        wait_until(lambda: not any(is_alive(trainer) for trainer in trainers))
    finally:
        for trainer in trainers:
            with suppress(ProcessLookupError):
                os.kill(trainer, signal.SIGKILL)
    assert "stopped by SIGTERM after step" in (tmp_path / "out" / "log.txt").read_text()
    finish(photos, tmp_path / "out", *SAVE)
    assert_as(undisturbed, tmp_path / "out")
    assert lost_in(tmp_path / "out") == [0]


@pytest.mark.parametrize(
    "name", ["SIGTERM", *(pytest.param(f"SIG{n}", marks=pytest.mark.long) for n in ("INT", "USR1", "USR2"))]
)
def test_a_signal_to_everyone(photos, tmp_path, undisturbed, name):
    process = start(photos, tmp_path, *SAVE, "--num_workers", 1, fault=HOLD)
    wait_for_step(tmp_path, 5, process)
    trainers = children_of(process.pid)
    family = trainers + [child for trainer in trainers for child in children_of(trainer)]
    assert len(family) >= 4
    for pid in family:
        with suppress(ProcessLookupError):  # the first ones have stopped the run already
            os.kill(pid, getattr(signal, name))
    out, _ = process.communicate(timeout=900)
    assert process.returncode != 0
    assert f"stopped by {name}" in out
    assert "killed" not in out
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in family))
    finish(photos, tmp_path, *SAVE)
    assert_as(undisturbed, tmp_path)
    assert lost_in(tmp_path) == [0]


@pytest.mark.parametrize("fault", ["", "repeats", *(pytest.param(name, marks=pytest.mark.long) for name in IN_SAVE)])
def test_everything_is_killed(photos, tmp_path, alone, fault):
    """In one process, which is enough for a save; with a fault, at the save of step 10, or in a group of two epochs."""
    folder = tmp_path / "out"
    flags = SAVE
    whole = alone
    if fault == "repeats":
        flags = (*SAVE, "--repeat_aug", 2, "--num_workers", 2)
        whole = tmp_path / "whole"
        finish(photos, whole, *flags, processes=1)
    if fault in IN_SAVE:
        finish(photos, folder, *flags, fault=(fault, 9, 0, tmp_path / "mark"), processes=1, code=-9)
    else:
        process = start(photos, folder, *flags, processes=1, fault=HOLD)
        wait_for_step(folder, 12, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    finish(photos, folder, *flags, processes=1)
    assert_as(whole, folder)
    (lost,) = lost_in(folder)
    assert lost <= LOST
    if fault in IN_SAVE:
        resumed_at = 10 if fault == "kill-after-json" else 5  # without its .json a checkpoint is not used
        assert f"at step {resumed_at}" in (folder / "log.txt").read_text()
    assert not list(folder.glob(".checkpoint*"))


def test_killed_in_the_first_save(photos, tmp_path, alone):
    finish(photos, tmp_path / "out", *SAVE, fault=("kill-after-rename", 4, 0, tmp_path / "mark"), processes=1, code=-9)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint*")] == ["checkpoint-5.pth"]
    out = finish(photos, tmp_path / "out", *SAVE, processes=1)
    assert "checkpoint-5.pth: its .json is missing" in out
    assert "warning: the run starts from step 0" in out
    assert (tmp_path / "out/earlier-1/checkpoint-5.pth").exists()
    assert_as(alone, tmp_path / "out")


def test_the_process_that_failed_first_says_why(photos, tmp_path):
    """The other one fails, too, because its connection is closed."""
    finish(photos, tmp_path, *SAVE, fault=("raise", 7, 1, "-"), code=1)
    content = read_json(tmp_path / "run.json")
    assert (content["state"], content["why"]) == ("failed", "rank 1: RuntimeError: a fault")
    log = (tmp_path / "log.txt").read_text()
    assert log.index("error: rank 1: RuntimeError: a fault") < log.index("error: rank 0: ")


@pytest.mark.long
def test_a_crash_loop_ends(photos, tmp_path):
    out = finish(photos, tmp_path, *SAVE, fault=("raise", 7, "all", "-"), restarts=2, code=1)
    assert out.count("resuming") == 2
    assert state(tmp_path)["meta"]["step"] == 5


def test_a_killed_worker(photos, tmp_path, alone):
    """Early enough: up to eight batches may be ready when it dies."""
    flags = (*SAVE, "--num_workers", 2)
    out = finish(photos, tmp_path, *flags, fault=("kill-worker", 6, 0, tmp_path / "mark"), processes=1, code=75)
    assert "a DataLoader worker was lost" in out
    assert "start the same command again" in out
    finish(photos, tmp_path, *flags, processes=1)
    assert lost_in(tmp_path) == [0]
    assert_as(alone, tmp_path)


def test_a_killed_worker_of_two_processes(photos, tmp_path, undisturbed):
    """The other process waits for the one that ends: no rank hangs."""
    flags = (*SAVE, "--num_workers", 1)
    out = finish(photos, tmp_path, *flags, fault=("kill-worker", 6, 1, tmp_path / "mark"), restarts=1)
    assert "a DataLoader worker was lost" in out
    assert_as(undisturbed, tmp_path)
    assert lost_in(tmp_path) == [0]


def test_a_worker_that_hangs(photos, tmp_path, alone):
    fault = ("hang-worker", 0, 0, tmp_path / "mark")
    flags = (*SAVE, "--num_workers", 1)
    out = finish(photos, tmp_path / "out", *flags, fault=fault, processes=1, code=75)
    assert re.search(r"process 0 on \S+ made no progress for 600 s: step 1; exit code 75", out)
    content = read_json(tmp_path / "out" / "run.json")
    assert content["state"] == "failed"
    assert content["why"].endswith("made no progress for 600 s: step 1")
    finish(photos, tmp_path / "out", *flags, processes=1)
    assert_as(alone, tmp_path / "out")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_signal_while_a_batch_is_waited_for(photos, tmp_path, alone, undisturbed, processes):
    """One worker hangs after so many images that five steps can be made, as if its file system was frozen."""
    flags = (*SAVE, "--save_steps", 0, "--num_workers", 1)
    fault = ("wait-in-worker", 7 * 8 // processes + 1, 0, tmp_path / "mark")
    process = start(photos, tmp_path / "out", *flags, processes=processes, fault=fault)
    wait_for_step(tmp_path / "out", 5, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=900)
    assert process.returncode == (75 if processes == 1 else 1), out
    finish(photos, tmp_path / "out", *flags, processes=processes)
    assert_as(alone if processes == 1 else undisturbed, tmp_path / "out")
    assert lost_in(tmp_path / "out") == [0]


def test_one_nan(photos, tmp_path, undisturbed):
    out = finish(photos, tmp_path, *SAVE, fault=("nan", 15, 1, tmp_path / "mark"))
    assert out.count("1 steps skipped") == 1
    assert "step 16/20: loss not finite" in out
    content = state(tmp_path)
    for moments in content["optimizer"]["state"].values():
        assert moments["step"] == STEPS - 1
    assert_finite(content)
    with pytest.raises(AssertionError):
        assert_same_state(content, state(undisturbed))


def test_nan_for_ever(photos, tmp_path, alone):
    out = finish(photos, tmp_path, *SAVE, "--epochs", 3, fault=("nan-forever", 8, 0, "-"), processes=1, code=3)
    assert "not finite in each of the last 20 steps before step 28" in out
    assert f"The last checkpoint with a finite loss is '{tmp_path / 'checkpoint-5.pth'}'" in out
    assert len(losses(tmp_path)) == 27
    assert state(tmp_path)["meta"]["step"] == 10
    assert_finite(state(tmp_path))


def assert_finite(content):
    for value in content["model"].values():
        assert value.isfinite().all()
