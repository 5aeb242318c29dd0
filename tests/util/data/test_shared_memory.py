import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import main_finetune
from tests.runs import evaluation, finetune, pretrain, refused
from util.data import shared_memory
from util.data.datasets import batches
from util.data.shared_memory import batches_ahead, check_space

IMAGE = 3 * 224**2
SMALL_DISK = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$@"', "sh"]


@pytest.fixture
def memory(monkeypatch):
    """memory(free bytes, processes on this node)"""

    def set_to(free, processes=1):
        monkeypatch.setattr(shared_memory, "free_bytes", lambda: free)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))

    return set_to


@pytest.mark.parametrize(
    ("batch_bytes", "num_workers", "expected"),
    [
        (0, 15, 4),  # unknown
        (0, 0, 4),
        (64 * IMAGE, 15, 4),  # 10 MB: 0.6 GB ahead
        (512 * IMAGE, 15, 3),  # 77 MB: 3.5 GB ahead
        (1024 * IMAGE, 15, 1),
        (2**40, 1, 1),
        (1, 1, 4),
    ],
)
def test_batches_ahead_fit_into_four_gibibytes(memory, batch_bytes, num_workers, expected):
    memory(free=1e15)
    ahead = batches_ahead(batch_bytes, num_workers)
    assert ahead == expected and (ahead == 1 or ahead * num_workers * batch_bytes <= 2**32)


@pytest.mark.parametrize(("free", "processes", "expected"), [(64e9, 8, 3), (32e9, 8, 1), (32e9, 4, 3), (16e6, 8, 1)])
def test_batches_ahead_take_half_of_the_shared_memory_at_most(memory, free, processes, expected):
    memory(free, processes)
    assert batches_ahead(512 * IMAGE, 15) == expected


def test_one_batch_of_each_worker_must_fit(memory):
    memory(free=10e9, processes=8)
    check_space(512 * IMAGE, num_workers=15, num_batches=1000)
    check_space(512 * IMAGE, num_workers=0, num_batches=1000)
    memory(free=2e9, processes=8)
    message = (
        r"/dev/shm has 2000.0 MB free, but one batch of each worker takes 9248.4 MB \(8 processes x 15 workers x "
        r"77.1 MB\): give the container more shared memory \(docker run --shm-size=20g\), or --num_workers 3$"
    )
    with pytest.raises(ValueError, match=message):
        check_space(512 * IMAGE, num_workers=15, num_batches=1000)
    check_space(512 * IMAGE, num_workers=3, num_batches=1000)
    check_space(512 * IMAGE, num_workers=15, num_batches=3)  # the other workers have nothing to do


@pytest.mark.fault("F63", "/dev/shm too small for the workers' batches", "refused at the start, with numbers; code 2")
def test_a_run_is_refused_if_its_batches_do_not_fit(photos, tmp_path, capsys, memory):
    memory(free=40_000)
    message = pretrain.refused(capsys, photos, tmp_path / "out", "--num_workers", 2)
    assert "/dev/shm has 0.0 MB free" in message and message.strip().endswith("or --num_workers 1"), message
    assert pretrain(photos, tmp_path / "out", "--num_workers", 0)["meta"]["step"] == 6


def test_evaluations_are_refused_too(labelled, tmp_path, capsys, monkeypatch):
    """In a run whose training batches fit, which goes on later, and by themselves."""
    free = [1e12, 1e12]  # at the start, and for the first batch
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: free.pop() if free else 20_000)
    assert "/dev/shm has 0.0 MB free" in finetune.refused(capsys, labelled, tmp_path, "--num_workers", 1)
    assert finetune(labelled, tmp_path)["meta"]["step"] == 6
    message = refused(capsys, main_finetune.main, *evaluation(tmp_path, labelled, "--num_workers", 1))
    assert "/dev/shm has 0.0 MB free" in message and message.strip().endswith("or --num_workers 0")


class Blank(torch.utils.data.Dataset):
    """Images of 0.5 MB. With `kills`, the worker dies of SIGBUS."""

    def __init__(self, kills=False):
        self.kills = kills

    def __getitem__(self, i):
        if self.kills:
            os.kill(os.getpid(), signal.SIGBUS)
        return torch.zeros(500_000, dtype=torch.uint8)


def stack(samples):
    return (torch.stack(samples),)


LACK = r"a DataLoader worker found no shared memory: /dev/shm holds \d+ MB, \d+ MB of them free now; give the container"


def test_a_worker_killed_by_sigbus_is_not_started_again():
    lost = []
    with pytest.raises(OSError, match=LACK):
        list(batches(Blank(kills=True), [[0, 1]] * 3, stack, 1, pin_memory=False, log=lost.append))
    assert not lost


@pytest.mark.fault("F63b", "/dev/shm fills up during a run", "an I/O error that says so: saved, 75")
def test_a_full_shared_memory_is_an_error_and_no_hang():
    """Six images make a batch of 3 MB instead of 0.5, for which a real file system of 2 MB has no space."""
    if os.geteuid() != 0 or not shutil.which("unshare") or subprocess.run([*SMALL_DISK, "true"]).returncode:
        pytest.skip("a file system of its own needs root, unshare and mount")
    program = (
        "from tests.util.data.test_shared_memory import Blank, batches, stack\n"
        "for number in (1, 6):\n"
        "    stream = batches(Blank(), [range(number)] * 9, stack, 1, pin_memory=False, batch_bytes=500_000)\n"
        "    print(sum(1 for _ in stream), flush=True)\n"
    )
    child = subprocess.run([*SMALL_DISK, sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert child.stdout == "9\n" and child.returncode == 1
    assert "OSError: a DataLoader worker found no shared memory: /dev/shm holds 2 MB" in child.stderr


def test_without_a_file_system_for_it_there_is_no_limit(monkeypatch):
    monkeypatch.setattr(shared_memory, "os", SimpleNamespace(path=SimpleNamespace(isdir=lambda path: False)))
    assert shared_memory.free_bytes() == float("inf")
