import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.two_processes import run_in_two_processes
from tests.until import wait_until
from util.run import supervise
from util.run.supervise import SIGNALS, StopSignal, Watchdog

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_the_flag_and_the_end_restores_the_handlers(number):
    before = {n: signal.getsignal(n) for n in SIGNALS}
    with StopSignal(torch.device("cpu")) as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), number)
        assert stop.agreed() and stop.name == signal.Signals(number).name
        os.kill(os.getpid(), number)  # SLURM's second one
        assert stop.agreed()
    assert {n: signal.getsignal(n) for n in SIGNALS} == before


def test_a_finished_run_is_neither_killed_nor_requeued_by_a_batch_system(monkeypatch):
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
        assert all(signal.getsignal(n) == signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_late_second_signal_has_its_default_action(monkeypatch):
    """`os.kill` is replaced, because the default action would end the tests."""
    taken = []
    monkeypatch.replace_in(supervise, "os.kill", lambda pid, number: taken.append((pid, number)))
    with StopSignal(torch.device("cpu")) as stop:
        stop._handle(signal.SIGTERM, None)
        stop._handle(signal.SIGTERM, None)
        assert not taken
        stop.since -= 2 * supervise.PATIENCE
        stop._handle(signal.SIGTERM, None)
        assert taken == [(os.getpid(), signal.SIGTERM)] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


PROGRAM = """
import multiprocessing, time
from util.data.datasets import batches

def child(file):
    time.sleep(2)
    open(file, "w").close()

if __name__ == "__main__":
    own = multiprocessing.get_context("fork").Process(target=child, args=({file!r},), daemon={daemon})
    own.start()
    stream = batches(range(1000), [[i] for i in range(1000)], list, num_workers=2, pin_memory=False)
    print(next(stream), flush=True)
    raise SystemExit(2)
"""


def test_an_error_while_workers_load_ends_the_program_and_no_other_child(tmp_path):
    """The iterator still exists at exit, so its workers are left to multiprocessing, whose TERM they ignore."""
    program = PROGRAM.format(file=str(tmp_path / "lived"), daemon=False)
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "[0]\n", "")
    assert (tmp_path / "lived").exists()  # the user's own child process was not killed


HUP = """
import os, signal
import torch
from util.run.supervise import StopSignal

stop = StopSignal(torch.device("cpu"))
os.kill(os.getpid(), signal.SIGHUP)
print(stop.agreed(), stop.name)
"""


@pytest.mark.parametrize(("prefix", "said"), [([], "True SIGHUP\n"), (["nohup"], "False None\n")])
def test_a_closed_terminal_stops_a_run_unless_nohup_says_otherwise(prefix, said):
    ended = subprocess.run(
        [*prefix, sys.executable, "-c", HUP],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert ended.stdout == said, ended.stderr


@pytest.fixture
def codes(monkeypatch):
    """The exit codes with which the watchdog would have ended this process."""
    codes = []
    monkeypatch.setattr(supervise, "os", SimpleNamespace(_exit=codes.append))
    # It would really end the process if the watchdog's thread did not run for a second.
    monkeypatch.replace_in(supervise, "faulthandler.dump_traceback_later", lambda *_, **__: None)
    return codes


def test_what_may_compile_has_more_time():
    watchdog = Watchdog(timeout=600, first=3600)
    assert watchdog.limit == 3600
    watchdog.end_first_steps()
    assert watchdog.limit == 600
    for expected in (3600, 600):
        with watchdog.first_time("evaluation"):
            assert watchdog.limit == expected
        assert watchdog.limit == 600
    with watchdog.first_time("picture"):
        assert watchdog.limit == 3600


@pytest.mark.parametrize(("first", "ends"), [(0.2, True), (3600, False)])
def test_the_watchdog_ends_a_process_without_progress(codes, capfd, first, ends):
    with Watchdog(timeout=0.1, first=first) as watchdog:
        watchdog.heartbeat(2, supervise.BETWEEN)
        if ends:
            wait_until(lambda: codes)
        else:
            time.sleep(0.5)  # the thread looks every 20 ms
    assert set(codes) == ({75} if ends else set())
    assert ("process 0 made no progress for 0.2 s: it is between two steps, step 3" in capfd.readouterr().err) == ends


@pytest.mark.parametrize(
    ("dist_timeout", "compiles", "expected"), [(600, True, 3600), (600, False, 600), (1e4, True, 1e4)]
)
def test_an_hour_is_enough_to_compile(dist_timeout, compiles, expected):
    assert supervise.first_timeout(dist_timeout, compiles) == expected


def _stops(rank):
    with StopSignal(torch.device("cpu")) as stop:
        for step in range(50):
            time.sleep(0.1 * rank)  # so that the ranks are at different steps
            if rank == 1 and step == 7:
                os.kill(os.getpid(), signal.SIGUSR2)
            if stop.agreed():
                break
        stop.settle()
    steps = step + 1
    dist.barrier()
    return {"steps": steps, "name": stop.name}


def test_a_signal_to_one_process_stops_all_after_the_same_step():
    first, second = run_in_two_processes(_stops)
    assert first["steps"] == second["steps"] == 9  # received in the eighth step, known to all ranks one step later
    assert (first["name"], second["name"]) == (None, "SIGUSR2")


@pytest.mark.gpu
def test_on_a_gpu_the_flags_are_reduced_on_a_separate_stream(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with StopSignal(torch.device("cuda", 0)) as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert [stop.agreed(), stop.agreed()] == [False, True]  # a step later
        stop.settle()
    dist.destroy_process_group()
