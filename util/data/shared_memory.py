"""Shared memory, where the batches of DataLoader workers wait for the trainer. In containers it is often small."""

import os
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from util.text import count_of

FOLDER = "/dev/shm"
PREFETCHED_BYTES = 2**32  # in batches that wait for one process
MOST_AHEAD = 4  # batches per worker
GIVE_MORE = "give the container more shared memory (docker run --shm-size={}g)"


class TooLittleMemory(ValueError):
    """Shared memory has no space for the batches of the workers. The message says what to change."""


class ShareBatch:
    """A collator that moves the tensors of a batch into shared memory, if it runs in a worker.

    Otherwise a thread of the worker would move them. If it then found no space, the batch would be lost, and the
    trainer would wait for it without end.
    """

    def __init__(self, collator: Callable[[Sequence[Any]], Any]) -> None:
        self.collator = collator

    def __call__(self, samples: Sequence[Any]) -> Any:
        batch = self.collator(samples)
        if torch.utils.data.get_worker_info() is not None:
            for part in batch:
                if torch.is_tensor(part):
                    part.share_memory_()
        return batch


def free_bytes() -> float:
    """Returns the free space of /dev/shm; infinity where there is none, as on macOS."""
    return shutil.disk_usage(FOLDER).free if os.path.isdir(FOLDER) else float("inf")


def processes_on_node() -> int:
    """Returns how many processes of the run share this node's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def batches_ahead(batch_bytes: int, num_workers: int) -> int:
    """Returns how many batches each worker prepares ahead: 1 to MOST_AHEAD.

    Together they take about PREFETCHED_BYTES at most, and this process's share of half the free shared memory. The
    other half is for an evaluation. batch_bytes: of one batch; 0 if unknown.
    """
    if not batch_bytes or not num_workers:
        return MOST_AHEAD
    budget = min(PREFETCHED_BYTES, free_bytes() / processes_on_node() / 2)
    return max(1, min(MOST_AHEAD, int(budget / (batch_bytes * num_workers))))


def check_space(batch_bytes: int, num_workers: int, num_batches: int) -> None:
    """TooLittleMemory if one batch of each worker of all processes on this node does not fit into shared memory."""
    processes, free = processes_on_node(), free_bytes()
    needed = processes * min(num_workers, num_batches) * batch_bytes
    if needed > free:
        fitting = int(free / (processes * batch_bytes))
        raise TooLittleMemory(
            f"{FOLDER} has {free / 1e6:.1f} MB free, but one batch of each worker takes {needed / 1e6:.1f} MB "
            f"({count_of(processes, 'process')} x {count_of(num_workers, 'worker')} x {batch_bytes / 1e6:.1f} MB): "
            f"{GIVE_MORE.format(2 + int(2 * needed / 1e9))}, or --num_workers {fitting}"
        )


def find_lack(error: Exception, workers: Iterable[BaseProcess]) -> OSError | None:
    """Returns an error that says so if these workers have failed with `error` because shared memory is full.

    torch reserves the memory of a tensor, or the kernel kills the worker by SIGBUS.
    """
    is_full = "shared memory(shm)" in str(error) or any(worker.exitcode == -signal.SIGBUS for worker in workers)
    if not is_full or not os.path.isdir(FOLDER):
        return None
    total, _, free = (value / 1e6 for value in shutil.disk_usage(FOLDER))
    return OSError(
        f"a DataLoader worker found no shared memory: {FOLDER} holds {total:.0f} MB, {free:.0f} MB of them free now; "
        f"{GIVE_MORE.format(max(2, int(4 * total / 1e3)))}, or fewer --num_workers"
    )
