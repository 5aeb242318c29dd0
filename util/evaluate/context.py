"""How a process evaluates a model, and its batches of the images, which the ranks share."""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from util import attention, collectives
from util.data.datasets import AddressedDataset, stack
from util.data.loader import Loader
from util.data.transforms import Normalize, Size
from util.run.processes.distributed import Process, precision
from util.run.processes.supervise import BatchesAhead, StopSignal
from util.run.start.plan import num_workers

if TYPE_CHECKING:
    from util.run.train.loop import TrainLoop

Autocast = Callable[[], AbstractContextManager[Any]]
IMAGES_PER_QUESTION = 8  # at least; where images differ in size, ranks that ask each other more often would wait more


def nothing() -> None:
    """Stands for the question of a program that signals end at once."""


@dataclass(frozen=True)
class EvalContext:
    """How this process evaluates a model, whatever the model and the images are.

    normalize: turns images as stored into normalised float images. It is on the device of the model.
    autocast: context manager for the forward pass.
    stop_if_asked: called equally often on all ranks; it raises an exception on all if a signal asks one to stop. stop:
    what asks, in a training; images that cannot be loaded do so, too.
    """

    normalize: Normalize
    autocast: Autocast
    batch_size: int
    num_workers: int
    stop_if_asked: Callable[[], None] = nothing
    stop: StopSignal | None = None

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.normalize.mean.device

    def one_by_one(self) -> "EvalContext":
        """Returns the same context with one image in a batch."""
        return replace(self, batch_size=1)


def context_of_loop(loop: "TrainLoop") -> EvalContext:
    """Returns the context of the evaluations between the steps of a training."""
    return EvalContext(
        normalize=loop.normalize,
        autocast=loop.autocast,
        batch_size=loop.run.plan.batch_size,
        num_workers=loop.run.plan.num_workers,
        stop_if_asked=loop.stop_if_asked,
        stop=loop.stop,
    )


def context_of_flags(args: argparse.Namespace, process: Process, normalize: Normalize, batch_size: int) -> EvalContext:
    """Returns the context of a program that does not train, on this process's device."""
    attention.prefer(vars(args).get("attention", "auto"), process.device)
    return EvalContext(
        normalize=normalize.to(process.device),
        autocast=precision(args.precision, process.device).autocast,
        batch_size=batch_size,
        num_workers=num_workers(args, process),
    )


def share_of_rank(indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns this rank's share of the images, in their order: rank r of W takes number r, r + W, r + 2 W, ..."""
    rank, world_size = collectives.rank_and_world_size()
    return np.asarray(indices)[rank::world_size]


def evaluation_batches(
    dataset: AddressedDataset,
    indices: Sequence[int] | np.ndarray,
    context: EvalContext,
    collate: Callable[[Sequence[Any]], Any] = stack,
    largest: Size | None = None,
) -> Iterator[Any]:
    """Yields this rank's share of the images in batches on the CPU: (imgs [B, C, H, W] as stored, labels int64 [B]).

    All ranks must iterate to the end. collate: makes a batch of samples. largest: height and width of the largest image
    in a batch (default: the size of the transform's results).
    """
    share = share_of_rank(indices)
    addresses = []
    for first in range(0, len(share), context.batch_size):
        addresses.append([(0, int(i)) for i in share[first : first + context.batch_size]])
    height, width = dataset.transform.size if largest is None else largest
    loaded = Loader(
        dataset,
        addresses,
        collate,
        num_workers=context.num_workers,
        for_gpu=context.device.type == "cuda",
        batch_bytes=dataset.images.pixel_format.pixel_bytes * height * width * context.batch_size,
    )
    rank, world_size = collectives.rank_and_world_size()
    is_shown = rank == 0 and sys.stderr.isatty()
    bar = tqdm(loaded, total=len(addresses), unit="batch", leave=False, disable=not is_shown)
    batches: Iterator[Any] = iter(bar)
    largest_share = math.ceil(len(indices) / world_size)  # of the first rank
    batches_apart = math.ceil(IMAGES_PER_QUESTION / context.batch_size)
    try:
        if context.stop is not None:
            batches = BatchesAhead(batches, context.stop)
            for _ in range(2 * batches_apart):
                batches.load()
            context.stop_if_asked()
        for number in range(math.ceil(largest_share / context.batch_size)):
            if number % batches_apart == 0:
                context.stop_if_asked()
            if number < len(addresses):  # other ranks may have one more
                yield next(batches)
    finally:
        bar.close()
        loaded.close()
