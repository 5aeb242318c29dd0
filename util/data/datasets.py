"""The data set `dataset[(epoch, index)]`, and the sampler of its addresses."""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from util.addressed import SHUFFLE, addressed_uniform
from util.data.images import ImageError, Images, find_storage_error

MAX_SKIPPED = 100  # bad images in a row; more mean that something else is wrong

Address = tuple[int, int]  # (epoch, index of the image)
Sample = tuple[Any, ...]  # image [C, H, W], label, address; a subclass may append more


class AddressedDataset(torch.utils.data.Dataset):
    """`dataset[(epoch, index)]` returns (img [C, H, W], label, (epoch, index)).

    Images have the type of their source: uint8, uint16 or float32. Those that may have invalid pixels are float32, and
    NaN marks them.

    transform: `transform(img [C, H, W], epoch, index)` returns [C, h, w] of the same type. Its random numbers are
    functions of the address. One that takes care of NaN by itself has the attribute `respects_invalid`. replace: an
    image that cannot be read is marked in `bad` (uint8 [n], shared with the workers), and the next readable one takes
    its place, with its own label.
    """

    def __init__(self, images: Images, transform: Any, replace: bool = False) -> None:
        self.images = images
        self.transform = transform
        self.bad: torch.Tensor | None = None
        if replace:
            self.bad = torch.frombuffer(mmap.mmap(-1, len(images)), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, address: Address) -> Sample:
        return self.__getitems__([address])[0]

    def __getitems__(self, addresses: Sequence[Address]) -> list[Sample]:
        """Returns the samples of a batch. Those of one image that follow each other share its reading and decoding."""
        groups = [(index, list(group)) for index, group in groupby(addresses, key=itemgetter(1))]
        self.images.prepare([index for index, _ in groups])  # images behind a URL are read together
        samples = []
        for index, group in groups:
            loaded = self._load(index)
            samples += [self._view(*loaded, address) for address in group]
        return samples

    def _view(self, index_read: int, pixels: np.ndarray, label: int, address: Address) -> Sample:
        """Returns the sample at an address, of the image that was read for it."""
        epoch, index = address
        img = torch.from_numpy(pixels).permute(2, 0, 1)  # a view; the transform copies what it crops
        if self.images.pixel_format.has_invalid and not getattr(self.transform, "respects_invalid", False):
            from util.data.invalid_pixels import transform_valid

            view = transform_valid(self.transform, img, epoch, index)
        else:
            view = self.transform(img, epoch, index)
        return view, label, address

    def _load(self, index: int) -> tuple[int, np.ndarray, int]:
        """Returns (index, image, label) of the image `index`, or of the next readable one, if that may replace it.

        Raises the ImageError of `index` if there is none, or OSError if no image can be opened any more.
        """
        candidates: Iterable[int] = [index]
        if self.bad is not None:
            candidates = range(index, index + MAX_SKIPPED)
        errors: list[ImageError] = []
        for candidate in candidates:
            i = candidate % len(self.images)
            try:
                pixels, label = self.images.load_sample(i)
                return i, pixels, label
            except ImageError as error:
                errors.append(error)
            if self.bad is not None:
                self.bad[i] = 1
        raise find_storage_error(self.images) or errors[0]


@dataclass
class StepBatchSampler:
    """The addresses of this process's micro-batches, from one optimizer step to another, across epochs.

    The order of an epoch is a permutation that depends on (seed, epoch). It is cut into `num_samples // total_batch`
    steps; the remaining images are left out of that epoch. Within a step, micro-batch a of process r takes the next
    `batch_size` samples, so that any split of the same total over processes and accumulation sees the same samples in
    the same step.
    """

    num_samples: int
    batch_size: int
    accum_iter: int
    rank: int
    world_size: int
    seed: int

    def __post_init__(self) -> None:
        self.total_batch = self.batch_size * self.accum_iter * self.world_size
        self.steps_per_epoch = steps_per_epoch(self.num_samples, self.total_batch)

    def batches(self, steps: range) -> Iterator[list[Address]]:
        """Yields the addresses of each micro-batch of these steps. To resume, they start later."""
        for step in steps:
            epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
            if step == steps.start or step_in_epoch == 0:
                order = permutation(self.seed, epoch, self.num_samples)
            for micro in range(self.accum_iter):
                place_in_step = (micro * self.world_size + self.rank) * self.batch_size
                first = step_in_epoch * self.total_batch + place_in_step
                yield [(epoch, index) for index in order[first : first + self.batch_size].tolist()]


def permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    """Returns the order of an epoch's images, int64 [length]: a function of (seed, epoch)."""
    numbers = addressed_uniform(SHUFFLE, seed, epoch, [0], length)[0]
    order = numbers.argsort()  # training waits for it, and a stable sort takes four times as long
    ranked = numbers[order]
    if (ranked[1:] == ranked[:-1]).any():  # equal numbers stay in the order of their indices
        order = numbers.argsort(kind="stable")
    return order


def steps_per_epoch(num_samples: int, total_batch: int) -> int:
    """Returns the number of whole batches in an epoch; ValueError if there is none."""
    if num_samples < total_batch:
        images = f"the data set has {num_samples} images"
        raise ValueError(f"{images}, fewer than one total batch of {total_batch}: give a smaller --total_batch_size")
    return num_samples // total_batch


def stack(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collates samples without a mask. Returns (imgs [B, C, H, W], labels int64 [B])."""
    imgs, labels, _ = zip(*samples, strict=True)
    return torch.stack(imgs), torch.tensor(labels)
