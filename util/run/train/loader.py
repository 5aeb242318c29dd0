"""The training batches of a run: which images each step has, in which order, how they are cropped and collated."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from util.data.datasets import AddressedDataset, StepBatchSampler, steps_per_epoch
from util.data.loader import Loader
from util.data.transforms import RandomResizedCropFlip, Size, with_vflip
from util.run.processes.distributed import Process
from util.run.start.plan import Plan


@dataclass(frozen=True)
class TrainLoader:
    """The batches of `dataset`, shuffled and split over processes and micro-batches.

    collate: makes a batch of samples, in the worker. img_size: (height, width) of the images of a batch. repeats: crops
    of an image in a step. epochs: those that groups of `repeats` are made of, see `StepBatchSampler`.
    """

    dataset: AddressedDataset
    collate: Callable[[Sequence[Any]], Any]
    img_size: tuple[int, int]
    plan: Plan
    process: Process
    seed: int
    repeats: int = 1
    epochs: range = range(0)

    @property
    def steps_per_epoch(self) -> int:
        """The number of whole batches in an epoch. ValueError if there is none."""
        return steps_per_epoch(len(self.dataset), self.plan.total_batch_size)

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
            self.repeats,
            self.epochs,
        )
        return Loader(
            self.dataset,
            sampler,
            self.collate,
            num_workers=plan.num_workers,
            for_gpu=plan.device == "cuda",
            batch_bytes=self.batch_bytes,
        )


def make_augmentation(args: argparse.Namespace, img_size: Size) -> Callable:
    """Returns the random crop and flips of the images of a pre-training."""
    options: dict[str, Any] = {
        "interpolation": args.interpolation,
        "reference": args.loader == "reference",
        "hflip": args.hflip,
    }
    crop: Callable = RandomResizedCropFlip(img_size, args.seed, args.crop_scale, **options)
    if args.crop == "padded":
        from util.data.padded_crop import PaddedCropFlip

        crop = PaddedCropFlip(img_size, args.seed, **options)
    return with_vflip(crop, args.vflip, args.seed)
