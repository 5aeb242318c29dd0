"""The batches of a loader, the shared memory they need, and what its user is told when a worker fails."""

import os
import shutil
import signal
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from prmim import MaskCollator, TokenCounts, TokenOrderSampler
from util.data.datasets import AddressedDataset, StepBatchSampler
from util.data.images import FolderImages
from util.data.loader import Loader, batches_ahead
from util.data.transforms import RandomResizedCropFlip
from util.data.workers import NICENESS

IMAGE = 3 * 224**2
SMALL = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
SMALL_DISK = ["unshare", "-m", "sh", "-c", SMALL, "sh"]


def batches_from(photos, start_step, num_workers):
    dataset = AddressedDataset(FolderImages(photos), RandomResizedCropFlip(32, seed=2))
    sampler = TokenOrderSampler(8, TokenCounts.from_ratios(64, 0.75, 0.5))
    addresses = StepBatchSampler(24, 4, 1, rank=0, world_size=1, seed=2).batches(range(start_step, 12))
    return list(Loader(dataset, addresses, MaskCollator(sampler, seed=2), num_workers=num_workers, for_gpu=False))


def test_batches_are_the_same_for_any_number_of_workers_and_from_any_start(photos):
    expected = batches_from(photos, 0, num_workers=0)
    assert len(expected) == 12
    assert expected[0][0].shape == (4, 3, 32, 32)
    assert not torch.equal(expected[0][0], expected[6][0])  # the second epoch crops anew
    for start_step, num_workers in ((0, 2), (7, 1)):
        batches = batches_from(photos, start_step, num_workers)
        for batch, batch_expected in zip(batches, expected[start_step:], strict=True):
            for tensor, tensor_expected in zip(batch, batch_expected, strict=True):
                assert torch.equal(tensor, tensor_expected)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (0, 4),  # unknown
        (64, 4),  # 10 MB: 0.6 GB ahead
        (512, 3),  # 77 MB: 3.5 GB ahead
        (1024, 1),
        (9999, 1),
    ],
)
def test_batches_ahead_take_4_gib(images, expected):
    assert batches_ahead(images * IMAGE, num_workers=15) == expected


class Blank(torch.utils.data.Dataset):
    """Images of 0.5 MB, whose worker gets a signal if there is one, or raises an error."""

    def __init__(self, number=None, error=None):
        self.number = number
        self.error = error

    def __getitem__(self, i):
        if self.number is not None:
            os.kill(os.getpid(), self.number)
        if self.error is not None:
            raise self.error
        return torch.zeros(500_000, dtype=torch.uint8)


def stack(samples):
    return (torch.stack(samples),)


class Named(NamedTuple):
    sample: torch.Tensor
    name: str


def nest(samples):
    return [(number, Named(sample, "name")) for number, sample in enumerate(samples)]


@pytest.mark.parametrize(
    ("failure", "raised", "message"),
    [
        ({"number": signal.SIGKILL}, OSError, "--num_workers"),
        ({"error": OSError(116, "Stale file handle")}, OSError, "Stale file handle"),
        ({"error": PermissionError(13, "Permission denied")}, PermissionError, "Permission denied"),
        ({"error": RuntimeError("a bug")}, RuntimeError, "a bug"),
    ],
)
def test_what_fails_in_a_worker_is_told(failure, raised, message):
    batches = Loader(Blank(**failure), [[0, 1]] * 3, stack, num_workers=1, for_gpu=False)
    with pytest.raises(raised, match=message):
        list(batches)


class Niceness(torch.utils.data.Dataset):
    def __getitem__(self, i):
        return torch.tensor(os.getpriority(os.PRIO_PROCESS, 0))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.parametrize(("for_gpu", "niceness"), [(True, NICENESS), (False, 0)])
def test_the_workers_of_a_model_on_a_gpu_leave_the_cores_to_its_trainer(for_gpu, niceness):
    before = os.getpriority(os.PRIO_PROCESS, 0)
    ((found,),) = Loader(Niceness(), [[0, 1]], stack, num_workers=1, for_gpu=for_gpu)
    assert found.tolist() == [min(19, before + niceness)] * 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


PINNING = """
import torch
from tests.util.data.test_loader import Blank, Loader, nest, stack

pinned = []
is_broken = False

def pin(tensor):
    if is_broken:
        raise RuntimeError("CUDA error: uncorrectable ECC")
    pinned.append(tensor.clone())
    return pinned[-1]

torch.Tensor.pin_memory = pin
torch.accelerator.is_available = lambda: True
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.set_device_index = lambda _: None
for number, ((_, first), (_, second)) in enumerate(Loader(Blank(), [[0, 1]] * 9, nest, num_workers=1, for_gpu=True)):
    assert first.sample is pinned[2 * number] and second.sample is pinned[2 * number + 1]
    assert first.sample.equal(torch.zeros(500_000, dtype=torch.uint8)) and first.name == "name"
print(len(pinned))
is_broken = True
try:
    next(Loader(Blank(), [[0, 1]] * 3, stack, num_workers=1, for_gpu=True))
except RuntimeError as error:
    print(type(error).__name__, "uncorrectable ECC" in str(error))
"""


def test_batches_for_a_gpu_are_pinned_by_torch_whose_errors_are_no_lost_worker():
    """In torch's thread, as far as it goes without a GPU."""
    child = subprocess.run([sys.executable, "-c", PINNING], capture_output=True, text=True, timeout=900)
    assert child.stdout == "18\nRuntimeError True\n", child.stderr


def test_batches_need_no_space_in_dev_shm():
    """Batches of 3 MB, stacked or nested. A file system of 64 kB has space for the semaphores."""
    if os.geteuid() != 0 or not shutil.which("unshare") or subprocess.run([*SMALL_DISK, "true"]).returncode:
        pytest.skip("a file system of its own needs root, unshare and mount")
    program = (
        "from tests.util.data.test_loader import Blank, Loader, nest, stack\n"
        "for make_batch in (nest, stack):\n"
        "    batches = Loader(Blank(), [range(6)] * 9, make_batch, num_workers=1, for_gpu=False)\n"
        "    print(sum(1 for _ in batches), flush=True)\n"
    )
    child = subprocess.run([*SMALL_DISK, sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert child.stdout == 2 * "9\n", child.stderr


STARTING = """
import os, resource, sys
from tests.util.data.test_loader import Blank, Loader, stack

class Stopped(Exception):
    pass

def stop():
    yield [0, 1]
    raise Stopped

limit = len(os.listdir("/proc/self/fd")) + 20
batches = Loader(Blank(), stop(), stack, num_workers=12, for_gpu=False)
if sys.argv[1] == "OSError":
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
next(batches)
"""


@pytest.mark.parametrize("error", ["OSError", "Stopped"])
def test_a_loader_whose_workers_cannot_all_start_ends(error):
    """Or whose start is interrupted. The workers that have started ignore TERM, with which torch would end them."""
    child = subprocess.run([sys.executable, "-c", STARTING, error], capture_output=True, text=True, timeout=900)
    assert child.returncode == 1
    assert error in child.stderr.strip().split("\n")[-1]
