# ruff: noqa: E402
"""CPU time of one DataLoader worker and of the trainer for an image, in microseconds, of any commit's code.

    python docs/studies/benchmark_loading.py CHECKOUT PACKED REPEATS

PACKED is a folder that scripts/pack_dataset.py of the same checkout has written.
"""

import inspect
import multiprocessing
import os
import sys
import time
from contextlib import closing
from pathlib import Path

checkout, data, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.path.insert(0, checkout)

from prmim import MaskCollator, TokenCounts, TokenOrderSampler
from util.data.datasets import AddressedDataset, StepBatchSampler
from util.data.loader import Loader
from util.data.open import open_images
from util.data.transforms import RandomResizedCropFlip

SIZE = 224
BATCH_SIZE = 64
WARM = 8  # batches
NUM_BATCHES = 40


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process, of all its threads."""
    nanoseconds = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        nanoseconds += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def seconds_at_rest(pid: int) -> float:
    """Returns the CPU time of a worker, when it has made all batches that it may make ahead."""
    before = -1.0
    while before < cpu_seconds(pid):
        before = cpu_seconds(pid)
        time.sleep(0.3)
    return before


def options(function: object, **wanted: object) -> dict[str, object]:
    """Returns those of the keywords that a commit's function takes."""
    return {name: value for name, value in wanted.items() if name in inspect.signature(function).parameters}


images = open_images("folder", data)
dataset = AddressedDataset(images, RandomResizedCropFlip(SIZE, seed=0))
collate = MaskCollator(TokenOrderSampler(14, TokenCounts.from_ratios(196, 0.75, 0.5)), seed=0)
groups = options(StepBatchSampler, repeats=repeats, epochs=range(10**6))
sampler = StepBatchSampler(len(images), BATCH_SIZE, 1, 0, 1, 0, 0, 10**6, **groups)
slots = options(Loader.__init__, batch_bytes=3 * SIZE**2 * BATCH_SIZE, lifetime=3)
with closing(Loader(dataset, sampler, collate, num_workers=1, for_gpu=False, **slots)) as batches:
    for _ in range(WARM):
        next(batches)
    (worker,) = multiprocessing.active_children()
    before = seconds_at_rest(worker.pid)
    own = 0.0
    for _ in range(NUM_BATCHES):
        begin = time.process_time()
        next(batches)
        own += time.process_time() - begin
    after = seconds_at_rest(worker.pid)
num_images = BATCH_SIZE * NUM_BATCHES / 1e6
print(f"{(after - before) / num_images:.1f},{own / num_images:.1f}")
