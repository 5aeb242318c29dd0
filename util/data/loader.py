"""The loader of batches: workers make them ahead, each in memory of its own, and torch pins them for a GPU.

A worker that dies and a failing storage end the process with exit code 75. The same command goes on.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from util import collectives
from util.data.datasets import Address
from util.data.workers import begin_beside_gpu, ignore_in_worker, kill_at_exit

PREFETCHED_BYTES = 2**32  # in batches that wait for one process
MAX_AHEAD = 4  # batches per worker


class Loader:
    """Iterator over batches that workers make ahead. Workers start with the first batch; `close` ends them.

    A batch depends on its addresses alone, so it is the same for any number of workers.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset,
        addresses: Iterable[Sequence[Address]],
        collate: Callable[[Sequence[Any]], Any],
        *,
        num_workers: int,
        for_gpu: bool,
        batch_bytes: int = 0,
    ) -> None:
        """addresses: of each batch. for_gpu: batches lie in pinned memory, and workers have a low priority.

        batch_bytes: size of the images of one batch; 0 if unknown.
        """
        self.num_workers = num_workers
        self.stream: Iterator[Any] | None = None
        ahead = None
        context = None
        if num_workers > 0:
            ahead = batches_ahead(batch_bytes, num_workers)
            context = "fork"  # workers share the names and labels of all images, and start without importing torch
            collate = partial(collate_to_share, collate)
        self.source = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=addresses,
            collate_fn=collate,
            num_workers=num_workers,
            multiprocessing_context=context,
            pin_memory=for_gpu,
            prefetch_factor=ahead,
            worker_init_fn=begin_beside_gpu if for_gpu else ignore_in_worker,
        )

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Any:
        """Returns the next batch. OSError if the storage or a worker fails."""
        if self.stream is None:
            self.stream = self._start()
        try:
            return next(self.stream)
        except PermissionError:  # the user's error
            raise
        except (RuntimeError, OSError, EOFError) as error:  # of a lost worker: the type depends on torch's version
            reason = self._find_reason(error)
            if reason is None:
                raise
            raise OSError(reason) from error

    def close(self) -> None:
        """Ends the workers. It is not to be iterated any more."""
        self.stream = iter(())  # torch's iterator ends its workers when it is freed

    def _start(self) -> Iterator[Any]:
        """Starts the workers. They are killed at exit, if they still live then. OSError if one cannot start."""
        if self.num_workers == 0:
            return iter(self.source)
        others = set(multiprocessing.active_children())
        collectives.wait_for_threads()
        stream = None
        try:
            stream = iter(self.source)
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"a DataLoader worker cannot start ({error}): it needs a process, open files and semaphores in "
                "/dev/shm; give fewer --num_workers, or free these"
            ) from error
        finally:
            workers = set(multiprocessing.active_children()) - others
            kill_at_exit(workers)
            if stream is None:  # a signal may have interrupted it, too
                for worker in workers:  # they ignore TERM
                    worker.kill()
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


def collate_to_share(collate: Callable[[Sequence[Any]], Any], samples: Sequence[Any]) -> Any:
    """Makes a batch in a worker, and moves its tensors to memory that the trainer can map.

    Otherwise a thread of the worker would move them to /dev/shm, which may be small. If it found no space there, the
    batch would be lost, and the trainer would wait for it without end.
    """
    return share(collate(samples))


def share(part: Any) -> Any:
    """Returns a batch, or a part of one, with copies of its tensors in shared memory."""
    if torch.is_tensor(part):
        return shared_copy(part)
    if isinstance(part, tuple | list):
        parts = [share(element) for element in part]
        return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
    return part


def shared_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy that other processes can map. On Linux it takes no space in /dev/shm."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0 or not hasattr(os, "memfd_create"):  # macOS
        return tensor.share_memory_()
    with os.fdopen(os.memfd_create("batch"), "wb") as file:
        file.truncate(size)
        storage = torch.UntypedStorage._new_shared_fd_cpu(file.fileno(), size).copy_(storage)
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
