"""The few collectives that training, data and evaluations need. Without a process group, one process is all."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from util.text import shorten

T = TypeVar("T")


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums `tensor` over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all processes' tensors, which may differ in length, one process after another."""
    if not dist.is_initialized():
        return tensor
    lengths = gather_objects(len(tensor))
    padded = torch.cat([tensor, tensor.new_zeros(max(lengths) - len(tensor), *tensor.shape[1:])])
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded.contiguous())
    return torch.cat([rows[:length] for rows, length in zip(everyone, lengths, strict=True)])


def broadcast_buffers(model: torch.nn.Module) -> None:
    """Copies rank 0's buffers to all processes, whose running statistics differ during training."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def rank_and_world_size() -> tuple[int, int]:
    """The rank of this process, and the number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


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
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def run_everywhere(function: Callable[[], T]) -> T:
    """Calls `function` on every rank. If it raises ValueError or OSError on one rank, all ranks raise."""
    own: Exception | None = None
    try:
        result = function()
    except (ValueError, OSError) as error:
        own = error
    messages = gather_objects(None if own is None else str(own))
    if own is not None:
        raise own
    for rank, message in enumerate(messages):
        if message is not None:
            raise ValueError(f"rank {rank} failed: {message}")
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
    everyone = gather_objects(values)
    differing = []
    for name in dict.fromkeys(name for values in everyone for name in values):
        ranks: dict[str, list[str]] = {}
        for rank, values in enumerate(everyone):
            ranks.setdefault(str(values.get(name, "absent")), []).append(str(rank))
        if len(ranks) > 1:
            sides = [f"{value} on rank {shorten(who, 4)}" for value, who in ranks.items()]
            differing.append(f"{name} is {' and '.join(sides)}")
    if differing:
        raise ValueError(f"the processes of one run must have the same {what}, but {'; '.join(differing)}")
