"""The few collectives that training, data and evaluations need. Without a process group, one process is all."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from util.text import printable, shorten

T = TypeVar("T")


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums `tensor` over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather_tensors(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensors of all processes, which have one shape, stacked by rank."""
    if not dist.is_initialized():
        return tensor[None]
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)


def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all processes' tensors, which may differ in length, one process after another."""
    if not dist.is_initialized():
        return tensor
    lengths = gather_objects(len(tensor))
    padding = tensor.new_zeros(max(lengths) - len(tensor), *tensor.shape[1:])
    gathered = gather_tensors(torch.cat([tensor, padding]).contiguous())
    return torch.cat([rows[:length] for rows, length in zip(gathered, lengths, strict=True)])


def broadcast_buffers(model: torch.nn.Module) -> None:
    """Copies rank 0's buffers to all processes, whose running statistics differ during training."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def rank_and_world_size() -> tuple[int, int]:
    """The rank of this process, and the number of processes."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def wait_for_threads() -> None:
    """Lets the threads of gloo or NCCL release the tensors of finished collectives.

    They need the GIL for it, and sleeping hands it over. It is needed before the process ends, where gloo may abort
    otherwise (pytorch#179291), and before a fork: until Python 3.12 a new process hangs if another thread was entering
    the interpreter (cpython#112275).
    """
    if dist.is_initialized():
        time.sleep(0.25)  # NCCL's thread looks for finished collectives every 0.1 s


def print_on_rank0(*lines: str) -> None:
    """Prints lines on rank 0, with escapes for what would command a terminal."""
    rank, _ = rank_and_world_size()
    if rank == 0:
        for line in lines:
            print(printable(line), flush=True)


def run_on_rank0(function: Callable[[], T]) -> T:
    """Calls `function` on rank 0 and returns its result on every rank. All ranks raise its ValueError or OSError."""
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [None, None]  # result, error
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except (ValueError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    result, raised = outcome
    if raised is not None:
        raise raised
    return result


def run_everywhere(function: Callable[[], T]) -> T:
    """Calls `function` on every rank. If it raises ValueError or OSError on one rank, all ranks raise.

    If the storage of a rank has failed, the others raise OSError, too: a later start may succeed.
    """
    error: Exception | None = None
    try:
        result = function()
    except (ValueError, OSError) as raised:
        error = raised
    failures = gather_objects(error)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if isinstance(failure, (ValueError, PermissionError)):
            raise ValueError(f"rank {rank} failed: {failure}")
        if failure is not None:
            raise OSError(f"rank {rank} failed: {failure}")
    return result


def gather_objects(value: T) -> list[T]:
    """The `value` of each process, by rank, on every process."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def refuse_differences(values: Mapping[str, object], what: str) -> None:
    """Raises ValueError on every rank if `values` differ between ranks. The message names each difference."""
    values_of_ranks = gather_objects(values)
    differences = []
    for name in values_of_ranks[0]:
        ranks_of_value: dict[str, list[str]] = {}
        for rank, values_of_rank in enumerate(values_of_ranks):
            value = str(values_of_rank.get(name, "absent"))
            ranks_of_value.setdefault(value, []).append(str(rank))
        if len(ranks_of_value) > 1:
            sides = [f"{value} on rank {shorten(ranks, 4)}" for value, ranks in ranks_of_value.items()]
            differences.append(f"{name} is {' and '.join(sides)}")
    if differences:
        raise ValueError(f"the processes of one run must have the same {what}, but {'; '.join(differences)}")
