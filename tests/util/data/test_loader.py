"""The batches of a loader, the shared memory they need, and what its user is told when a worker fails."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils.data import default_collate

from prmim import MaskCollator, TokenCounts, TokenOrderSampler
from tests.runs import assert_same_state, pretrain
from util.data import loader
from util.data.bad_images import BadImages
from util.data.datasets import AddressedDataset, StepBatchSampler
from util.data.images import FolderImages
from util.data.loader import Loader, LoaderError, batches_ahead
from util.data.transforms import RandomResizedCropFlip
from util.data.workers import NICENESS

IMAGE = 3 * 224**2
SMALL = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
SMALL_DISK = ["unshare", "-m", "sh", "-c", SMALL, "sh"]


def batches_from(photos, start_step, num_workers):
    dataset = AddressedDataset(FolderImages(photos), RandomResizedCropFlip(32, seed=2))
    sampler = TokenOrderSampler(8, TokenCounts.from_ratios(64, 0.75, 0.5))
    addresses = StepBatchSampler(
        24,
        4,
        1,
        rank=0,
        world_size=1,
        seed=2,
        start_step=start_step,
        end_step=12,
    )
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


def test_lists_of_bad_images_are_gathered_only_if_there_are_new_ones(photos, monkeypatch):
    gathered = []
    monkeypatch.setattr(loader.collectives, "gather_objects", lambda value: gathered.append(value) or [value, [7]])
    flags = torch.zeros(24, dtype=torch.uint8)
    lines = []
    bad_images = BadImages(FolderImages(photos), flags, 0.5, lines.append, before_error=lambda: None)
    for bad in ([], [3], [], [5], []):
        flags[bad] = 1
        bad_images.report(bad_images.count() + 1)  # with that of the other rank
    assert gathered == [[], [3], [3, 5]]
    assert bad_images.known == {3, 5, 7}
    assert len(lines) == 3


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


class Shapes(torch.utils.data.Dataset):
    """Number i: an image, whose shape and type are those of its batch, with the value i."""

    kinds = (((3, 8, 8), torch.uint8), ((3, 4, 4), torch.uint8), ((3, 8, 8), torch.float32), ((1, 2, 8), torch.float32))

    def __getitem__(self, i):
        shape, dtype = self.kinds[i // 4 % 4]
        return torch.full(shape, i % 251, dtype=dtype)


def collate(samples):
    return default_collate(samples), default_collate([sample[0] for sample in samples])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_lie_in_memory_that_is_used_again_and_last_as_long_as_agreed(num_workers):
    """Of several shapes and types, one of them too large for a slot; the last one is smaller."""
    addresses = [list(range(first, min(first + 4, 398))) for first in range(0, 398, 4)]
    options = {"num_workers": num_workers, "for_gpu": False, "batch_bytes": 4 * 3 * 8 * 8}
    batches = Loader(Shapes(), addresses, collate, lifetime=3, **options)
    held = []
    places = set()
    for number, (imgs, others) in enumerate(batches):
        if imgs.untyped_storage().data_ptr() == batches.slots.memory.data_ptr():
            places.add(imgs.data_ptr())
        held.append((number, imgs, others))
        for number, imgs, others in held[-3:]:
            shape, dtype = Shapes.kinds[number % 4]
            assert imgs.dtype == dtype
            assert imgs.shape[1:] == shape
            assert imgs[:, 0, 0, 0].tolist() == [i % 251 for i in addresses[number]]
            assert imgs.flatten(1).eq(imgs[:, :1, 0, 0]).all()
            assert others.equal(imgs[:, 0])
    batches.close()
    assert len(held) == 100
    assert len(held[-1][1]) == 2
    assert len(places) == 4 * num_workers + 3


@pytest.mark.parametrize("accum_iter", [1, 3])
def test_training_has_used_the_images_of_a_batch_before_they_are_written_over(
    photos, tmp_path, monkeypatch, accum_iter
):
    """The slot that the next batch to be begun will lie in is filled with noise before."""
    flags = ("--batch_size", 4, "--accum_iter", accum_iter, "--epochs", 8)
    expected = pretrain(photos, tmp_path / "out", *flags)
    poisoned = []

    class Poisoned(Loader):
        def __next__(self):
            slots = self.slots
            number = len(poisoned) + 4 * self.num_workers
            poisoned.append(number % len(slots.memory))
            slots.memory[poisoned[-1]].random_(generator=torch.Generator().manual_seed(number))
            return super().__next__()

    monkeypatch.setattr("util.run.train.loader.Loader", Poisoned)
    assert_same_state(pretrain(photos, tmp_path / "poisoned", *flags, "--num_workers", 1), expected)
    assert len(poisoned) > 2 * len(set(poisoned))


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


def nest(samples):
    return [(number, (sample, None)) for number, sample in enumerate(samples)]


@pytest.mark.parametrize(
    ("failure", "raised", "message"),
    [
        ({"number": signal.SIGKILL}, LoaderError, "--num_workers"),
        ({"error": OSError(116, "Stale file handle")}, LoaderError, "Stale file handle"),
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


def test_an_error_of_the_gpu_that_the_pinning_thread_meets_is_no_lost_worker():
    def broken():
        yield "batch"
        raise RuntimeError("Caught AcceleratorError in pin memory thread for device 0.\nCUDA error: uncorrectable ECC")

    batches = Loader(Blank(), [[0, 1]] * 3, stack, num_workers=1, for_gpu=False)
    batches.stream = broken()
    assert next(batches) == "batch"
    with pytest.raises(RuntimeError, match="uncorrectable ECC") as error:
        next(batches)
    assert not isinstance(error.value, LoaderError)


def test_batches_need_no_space_in_dev_shm():
    """Batches of 3 MB, stacked or nested. A file system of 64 kB has space for the semaphores."""
    if os.geteuid() != 0 or not shutil.which("unshare") or subprocess.run([*SMALL_DISK, "true"]).returncode:
        pytest.skip("a file system of its own needs root, unshare and mount")
    program = (
        "from tests.util.data.test_loader import Blank, Loader, collate, nest, stack\n"
        "for make_batch in (nest, collate, stack):\n"
        "    batches = Loader(Blank(), [range(6)] * 9, make_batch, num_workers=1, for_gpu=False)\n"
        "    print(sum(1 for _ in batches), flush=True)\n"
    )
    child = subprocess.run([*SMALL_DISK, sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert child.stdout == 3 * "9\n", child.stderr
