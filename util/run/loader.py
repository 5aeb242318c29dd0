"""The training batches of a run: which images each step has, in which order, and how they are collated."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from util.data.datasets import AddressedDataset, StepBatchSampler, batches, look_ahead, steps_per_epoch
from util.run.distributed import Process
from util.run.flags import Plan
from util.run.logging import print_line
from util.run.loop import TrainLoop


class Batches(Iterator[Any], Protocol):
    """The batches of some steps, one after another. Workers start with the first one."""

    def close(self) -> None:
        """Ends the workers."""
        ...


class BatchSource(Protocol):
    """Where a training takes its batches from."""

    def open(self, steps: range, loop: TrainLoop) -> Batches:
        """Returns this process's batches of these steps, with all micro-batches."""
        ...


@dataclass(frozen=True)
class TrainLoader:
    """The batches of `dataset`, shuffled and split over processes and micro-batches.

    collate: makes a batch of samples, in the worker. img_size: (height, width) of the images of a batch.
    """

    dataset: AddressedDataset
    collate: Callable[[Sequence[Any]], Any]
    img_size: tuple[int, int]
    plan: Plan
    process: Process
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The number of whole batches in an epoch. ValueError if there is none."""
        return steps_per_epoch(len(self.dataset), self.plan.total_batch_size, self.process.world_size)

    @property
    def batch_bytes(self) -> int:
        """The size of the images of one batch of this process."""
        height, width = self.img_size
        return self.dataset.images.pixel_format.pixel_bytes * height * width * self.plan.batch_size

    def open(self, steps: range, loop: TrainLoop) -> Batches:
        """Returns this process's batches of these steps. All ranks must call it."""
        plan = self.plan
        sampler = StepBatchSampler(
            len(self.dataset),
            plan.batch_size,
            plan.accum_iter,
            self.process.rank,
            self.process.world_size,
            self.seed,
            steps.start,
            steps.stop,
        )

        def log(message: str) -> None:
            if self.process.is_main:
                loop.log.info(message)
            else:
                print_line(f"rank {self.process.rank}: {message}", sys.stderr)

        stream = batches(
            self.dataset,
            sampler,
            self.collate,
            plan.num_workers,
            plan.device == "cuda",
            log,
            batch_bytes=self.batch_bytes,
        )
        # All ranks stop together before a stream that fails: one step later, or two if they have to agree.
        return look_ahead(stream, plan.accum_iter * min(2, self.process.world_size), loop.fail)
