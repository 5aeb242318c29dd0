"""The loader of batches, and the memory in which they wait.

A worker that dies and a failing storage end the process with exit code 75. The same command goes on.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from util import collectives
from util.data.datasets import Address, AddressedDataset, Sample, StepBatchSampler
from util.data.slots import Batches, Slots
from util.data.workers import begin_beside_gpu, ignore_in_worker, kill_at_exit

PREFETCHED_BYTES = 2**32  # in batches that wait for one process
MAX_AHEAD = 4  # batches per worker


class LoaderError(OSError):
    """The storage or a worker of this process has failed, while all images may be good."""


class Loader:
    """Iterator over batches that workers make ahead. Workers start with the first batch; `close` ends them.

    A batch depends on its addresses alone, so it is the same for any number of workers.
    """

    def __init__(
        self,
        dataset: AddressedDataset,
        addresses: StepBatchSampler | list[list[Address]],
        collate: Callable[[Sequence[Sample]], Any],
        *,
        num_workers: int,
        for_gpu: bool,
        batch_bytes: int = 0,
        lifetime: int | None = None,
    ) -> None:
        """addresses: of each batch. for_gpu: batches lie in pinned memory, and workers have a low priority.

        batch_bytes: size of the images of one batch; 0 if unknown. lifetime: the images of a batch last until this many
        more batches are asked for, because workers use their memory again, which is faster; None: they stay.
        """
        self.num_workers = num_workers
        self.stream: Iterator[Any] | None = None
        self.slots: Slots | None = None
        ahead = None
        context = None
        if num_workers > 0:
            ahead = batches_ahead(batch_bytes, num_workers)
            context = "fork"  # workers share the names and labels of all images, and start without importing torch
            if lifetime is not None:
                self.slots = Slots(ahead * num_workers, lifetime, batch_bytes, for_gpu)
        self.source = torch.utils.data.DataLoader(
            Batches(dataset, collate, self.slots),
            batch_size=None,
            sampler=enumerate(addresses),
            collate_fn=lambda batch: batch,
            num_workers=num_workers,
            multiprocessing_context=context,
            pin_memory=for_gpu,
            prefetch_factor=ahead,
            worker_init_fn=begin_beside_gpu if for_gpu else ignore_in_worker,
        )

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Any:
        """Returns the next batch. LoaderError if the storage or a worker fails."""
        if self.stream is None:
            self.stream = self._start()
        if self.slots is not None:
            self.slots.wait_for_gpu()
        try:
            batch = next(self.stream)
        except PermissionError:  # the user's error
            raise
        except (RuntimeError, OSError, EOFError) as error:  # of a lost worker: the type depends on torch's version
            reason = self._find_reason(error)
            if reason is None:
                raise
            raise LoaderError(reason) from error
        if self.slots is not None:
            batch = self.slots.find(batch)
        return batch

    def close(self) -> None:
        """Ends the workers. It is not to be iterated any more."""
        self.stream = iter(())  # torch's iterator ends its workers when it is freed
        if self.slots is not None:
            self.slots.unpin()

    def _start(self) -> Iterator[Any]:
        """Starts the workers. They are killed at exit, if they still live then."""
        if self.num_workers == 0:
            return iter(self.source)
        others = set(multiprocessing.active_children())
        collectives.wait_for_threads()
        stream = iter(self.source)
        kill_at_exit(set(multiprocessing.active_children()) - others)
        if self.slots is not None:
            self.slots.pin()
        return stream

    def _find_reason(self, error: Exception) -> str | None:
        """Returns what has failed: a worker or the storage. None for an error of the code."""
        text = str(error)
        # An exception that was raised inside a worker has the worker's traceback in its text.
        if "in pin memory thread" in text:  # it is the first to meet an error of the GPU
            return None
        comes_from_dataset = self.num_workers == 0 or "in DataLoader worker process" in text
        if not comes_from_dataset:
            first_line = text.partition("\n")[0] or type(error).__name__
            return f"a DataLoader worker was lost ({first_line}); if memory was full, give fewer --num_workers"
        if isinstance(error, OSError):
            return text
        return None


def batches_ahead(batch_bytes: int, num_workers: int) -> int:
    """Returns how many batches each worker prepares ahead: 1 to MAX_AHEAD, together about PREFETCHED_BYTES at most.

    batch_bytes: of one batch; 0 if unknown.
    """
    if batch_bytes == 0:
        return MAX_AHEAD
    affordable = PREFETCHED_BYTES // (batch_bytes * num_workers)
    return max(1, min(MAX_AHEAD, affordable))
