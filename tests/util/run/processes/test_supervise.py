"""Signals that stop a run, and the watchdog that ends a process that hangs."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.two_processes import run_in_two_processes
from tests.until import wait_until
from util.run.processes import supervise
from util.run.processes.supervise import SIGNALS, StopSignal, Watchdog

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_to_stop_and_the_end_restores_the_handlers(number):
    before = {n: signal.getsignal(n) for n in SIGNALS}
    with StopSignal(torch.device("cpu")) as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # SLURM's second one
        assert stop.agreed()
        assert stop.name == signal.Signals(number).name
    assert {n: signal.getsignal(n) for n in SIGNALS} == before


def test_a_finished_run_is_neither_killed_nor_requeued_by_a_batch_system():
    """submitit's handler of USR2 requeues the job; the default action of USR1 kills the process."""
    requeued = []
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    signal.signal(signal.SIGUSR2, lambda number, frame: requeued.append(number))
    try:
        with StopSignal(torch.device("cpu")) as stop:
            stop.finish()
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not requeued
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_further_signals_change_nothing_and_the_first_is_told_at_once(capfd):
    """Also while the process prints, so past Python's own buffers. Only Ctrl-C is answered each time."""
    with StopSignal(torch.device("cpu")) as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert stop.name == "SIGTERM"
    told = capfd.readouterr().err
    assert told.count("SIGTERM: stopping after this step or batch") == 2
    assert told.count("\n") == 2


def test_a_signal_ends_the_loading_of_a_batch_whatever_its_libraries_catch():
    """Else they would take the image that is being read for a damaged one, which is replaced and reported."""

    def load():
        yield "whole"
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception:
            yield "without an image"

    with StopSignal(torch.device("cpu")) as stop:
        ahead = supervise.BatchesAhead(load(), stop)
        ahead.load()
        assert list(ahead) == ["whole"]


PROGRAM = """
import multiprocessing
import time
from util.data.loader import Loader

def child(file):
    time.sleep(1)
    open(file, "w").close()

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=child, args=({file!r},)).start()
    batches = Loader(range(1000), [[i] for i in range(1000)], list, num_workers=2, for_gpu=False)
    print(next(batches), flush=True)
    raise SystemExit(2)
"""


def test_an_error_while_workers_load_ends_the_program_and_no_other_child(tmp_path):
    """The loader still exists at exit, so its workers are left to multiprocessing, whose TERM they ignore."""
    program = PROGRAM.format(file=str(tmp_path / "lived"))
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "[0]\n", "")
    assert (tmp_path / "lived").exists()  # the user's own child process was not killed


HUP = """
import os
import signal
import torch
from util.run.processes.supervise import StopSignal

with StopSignal(torch.device("cpu")) as stop:
    os.kill(os.getpid(), signal.SIGHUP)
    print(stop.agreed(), stop.name)
"""


@pytest.mark.parametrize(("prefix", "said"), [([], "True SIGHUP\n"), (["nohup"], "False None\n")])
def test_a_closed_terminal_stops_a_run_unless_nohup_says_otherwise(prefix, said):
    command = [*prefix, sys.executable, "-c", HUP]
    options = dict(
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )
    ended = subprocess.run(command, **options)
    assert ended.stdout == said, ended.stderr


def _stops(rank):
    with StopSignal(torch.device("cpu")) as stop:
        for step in range(50):
            if rank == 1 and step == 7:
                os.kill(os.getpid(), signal.SIGUSR2)
            if stop.agreed():
                break
        stop.wait()
    dist.barrier()
    return {"steps": step + 1, "name": stop.name}


def test_a_signal_to_one_process_stops_all_after_the_same_step():
    first, second = run_in_two_processes(_stops)
    assert first == {"steps": 9, "name": None}  # received in the eighth step, known to all ranks one step later
    assert second == {"steps": 9, "name": "SIGUSR2"}


@pytest.mark.gpu
def test_on_a_gpu_the_host_waits_for_the_flags_of_the_step_before(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with StopSignal(torch.device("cuda", 0)) as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert not stop.agreed()
        assert stop.agreed()  # a step later
        stop.wait()
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- watchdog


@pytest.fixture
def codes(monkeypatch):
    """The exit codes with which the watchdog would have ended this process."""
    codes = []
    monkeypatch.setattr(supervise, "os", SimpleNamespace(**vars(os) | {"_exit": codes.append}))
    # It would really end the process if the watchdog's thread did not run for a second.
    monkeypatch.replace_in(supervise, "faulthandler.dump_traceback_later", lambda *_, **__: None)
    return codes


def test_the_watchdog_ends_a_process_without_progress(codes, monkeypatch):
    """Stacks and reason are one write: several processes that wait for one write to the same pipe."""
    reasons, stderr = [], []
    monkeypatch.setattr(supervise, "print", lambda text, **_: stderr.append(text), raising=False)
    with Watchdog(timeout=0.1, first_timeout=0.2, record=reasons.append) as watchdog:
        watchdog.heartbeat("step 3", 0.2)
        wait_until(lambda: codes)
    assert set(codes) == {75}
    assert re.search(r"process 0 on \S+ made no progress for 0.2 s: step 3; exit code 75", stderr[0])
    assert "test_the_watchdog_ends_a_process_without_progress" in stderr[0]  # the stack
    assert reasons[0].endswith("made no progress for 0.2 s: step 3")


def test_a_disk_that_hangs_does_not_keep_the_watchdog_from_ending_the_process(codes, monkeypatch):
    let_go = threading.Event()
    monkeypatch.setattr(supervise, "WRITE_SECONDS", 0.1)
    with Watchdog(timeout=0.1, first_timeout=0.2, record=lambda reason: let_go.wait()) as watchdog:
        watchdog.heartbeat("step 3", 0.2)
        wait_until(lambda: codes)
    let_go.set()


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_watchdog_waits_for_heartbeats_and_for_what_may_compile(codes, monkeypatch, has_begun):
    looks = []

    def look():
        looks.append(time.monotonic())
        return looks[-1]

    monkeypatch.replace_in(supervise, "time.monotonic", look)
    with Watchdog(timeout=1, first_timeout=3600) as watchdog:
        if has_begun:
            watchdog.heartbeat("step 1", watchdog.first_timeout)
        wait_until(lambda: len(looks) > 20)
    assert not codes


def test_the_first_steps_and_saves_have_more_time():
    watchdog = Watchdog(timeout=600, first_timeout=supervise.first_timeout(600, compiles=True))
    assert watchdog.limit == watchdog.first_timeout == 3600
    watchdog.heartbeat("waiting for a checkpoint to be written", supervise.SETUP_TIMEOUT)
    assert watchdog.limit == 1800
    watchdog.heartbeat("step 4")
    assert watchdog.limit == 600
    assert supervise.first_timeout(600, compiles=False) == 600


def test_the_set_up_of_several_processes_has_half_an_hour_for_each_phase(monkeypatch):
    watchdog = Watchdog(timeout=600, first_timeout=3600)
    watchdog.set_up("images")
    assert watchdog.since is None  # a single process is not watched
    monkeypatch.setattr(supervise, "dist", SimpleNamespace(is_initialized=lambda: True))
    watchdog.set_up("images")
    assert watchdog.limit == 1800
    assert watchdog.since is not None
