"""Processes that are killed, stopped, or hang, alone and together; signals to one and to all."""

import os
import random
import re
import signal
import time

import pytest

from tests.faults.runs import finish, losses, start, state, steps_lost, wait_for_step
from tests.test_main_pretrain import assert_same_state, children_of

SAVE = ("--save_steps", 10)


@pytest.fixture(scope="session")
def undisturbed(photos, tmp_path_factory):
    """The folder of a run of two processes without any fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(photos, folder, *SAVE)
    return folder


def assert_as(undisturbed, output_dir):
    """All weights, moments and logged losses, to the last bit; each step once."""
    assert_same_state(state(output_dir), state(undisturbed))
    assert losses(output_dir) == losses(undisturbed) and len(losses(output_dir)) == 60


@pytest.mark.fault("F14", "SIGKILL of one process of two", "torchrun starts both again; at most the save interval is lost; exact")
def test_a_killed_process(photos, tmp_path, undisturbed, repeats, record_property):
    lost = []
    for k in range(repeats):
        step = random.Random(k).randrange(2, 58)
        out = finish(photos, tmp_path / str(k), *SAVE, fault=("kill", step, k % 2, tmp_path / f"mark{k}"), restarts=3)
        assert_as(undisturbed, tmp_path / str(k))
        lost += steps_lost((tmp_path / str(k) / "log.txt").read_text())
        assert "resuming" in out or step < 10
    assert max(lost, default=0) <= 10
    record_property("measured", f"steps lost {lost}")


@pytest.mark.fault("F16", "both processes exit at once", "torchrun starts both again")
def test_both_processes_exit(photos, tmp_path, undisturbed, repeats, record_property):
    for k in range(repeats):
        finish(photos, tmp_path / str(k), *SAVE, fault=("exit", 33, "all", tmp_path / f"mark{k}"), restarts=3)
        assert_as(undisturbed, tmp_path / str(k))
    record_property("measured", f"{repeats} of {repeats} came back")


@pytest.mark.fault("F18", "one process hangs in the forward pass", "found within --dist_timeout + 5 s, named, started again, exact")
def test_a_process_that_hangs(photos, tmp_path, undisturbed, record_property):
    began = time.monotonic()
    options = dict(fault=("hang", 25, 1, tmp_path / "mark"), restarts=3)
    out = finish(photos, tmp_path / "out", *SAVE, "--dist_timeout", 5, **options)
    assert re.search(r"furthest behind is process 1 on \S+, in the forward pass, step 26: there it hangs; exit code 75", out), out
    assert re.search(r'File ".*faulty.py", line \d+ in faulty_losses', out)  # its stack
    assert_as(undisturbed, tmp_path / "out")
    record_property("measured", f"{time.monotonic() - began:.0f} s in all, with a time-out of 5 s")


@pytest.mark.fault("F19", "one process is stopped (SIGSTOP)", "as for one that hangs")
def test_a_process_that_is_stopped(photos, tmp_path, undisturbed, record_property):
    began = time.monotonic()
    options = dict(fault=("stop", 25, 1, tmp_path / "mark"), restarts=3)
    out = finish(photos, tmp_path / "out", *SAVE, "--dist_timeout", 5, **options)
    assert re.search(r"no sign of life comes from process 1 on \S+; exit code 75", out), out
    assert_as(undisturbed, tmp_path / "out")
    record_property("measured", f"{time.monotonic() - began:.0f} s in all (30 of them torchrun's patience with its SIGTERM)")
