"""The training batches of a run: which images each step has, in which order, how they are cropped and collated."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from util.data.datasets import AddressedDataset, StepBatchSampler, steps_per_epoch
from util.data.loader import Loader
from util.data.transforms import PaddedCropFlip, RandomResizedCropFlip, with_vflip
from util.run.processes.distributed import Process
from util.run.start.plan import Plan


class Batches(Iterator[Any], Protocol):
    """The batches of some steps, one after another. Workers start with the first one."""

    def close(self) -> None:
        """Ends the workers."""
        ...


class BatchSource(Protocol):
    """Where a training takes its batches from."""

    def open(self, steps: range) -> Batches:
        """Returns this process's batches of these steps, with all micro-batches."""
        ...


class PhasedBatches:
    """The batches of a run whose loader changes between two steps. It is the run's `BatchSource`, and its `Batches`.

    Workers prepare batches ahead, so each phase opens a loader of its own: see `begin`.
    """

    def __init__(self) -> None:
        self.batches: Batches | None = None  # of the open phase
        self.open_until = 0  # the step after the last one of the open phase

    def open(self, steps: range) -> "PhasedBatches":
        """Returns itself: the batches of each phase follow from `begin`."""
        return self

    def __iter__(self) -> "PhasedBatches":
        return self

    def __next__(self) -> Any:
        assert self.batches is not None
        return next(self.batches)

    def close(self) -> None:
        """Ends the workers of the open phase."""
        if self.batches is not None:
            self.batches.close()

    def begin(self, loader: BatchSource, step: int, end: int, last_step: int) -> None:
        """Opens the phase of the steps from `step` to `end`, of which this start makes those before `last_step`."""
        self.open_until = end
        self.batches = loader.open(range(step, min(end, last_step)))


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

    def open(self, steps: range) -> Loader:
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
        return Loader(
            self.dataset,
            sampler,
            self.collate,
            num_workers=plan.num_workers,
            for_gpu=plan.device == "cuda",
            batch_bytes=self.batch_bytes,
        )


def make_augmentation(args: argparse.Namespace, img_size: Sequence[int]) -> Callable:
    """Returns the random crop and flips of the images of a pre-training."""
    options: dict[str, Any] = {
        "interpolation": args.interpolation,
        "reference": args.loader == "reference",
        "hflip": args.hflip,
    }
    crop: Callable = RandomResizedCropFlip(img_size, args.seed, args.crop_scale, **options)
    if args.crop == "padded":
        crop = PaddedCropFlip(img_size, args.seed, **options)
    return with_vflip(crop, args.vflip, args.seed)
