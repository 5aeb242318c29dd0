"""The data set `dataset[(epoch, index)]`, the sampler of its addresses, and the loader of its batches."""

import copy
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from util import collectives
from util.addressed import SHUFFLE, addressed_uniform
from util.data.hugging_face import open_hugging_face
from util.data.images import (
    CifarImages,
    FolderImages,
    ImageError,
    Images,
    INaturalistImages,
    find_storage_error,
    refuse_single_class,
    wanted_channels,
)
from util.data.shared_memory import ShareBatch, batches_ahead, check_space, find_lack
from util.data.tars import choose_tars, open_tars
from util.data.workers import ignore_in_worker, settle_threads, take_over_workers

DOWNLOADED = ("cifar10", "cifar100")  # data sets that are downloaded if they are missing
INATURALIST = {"inat18": 2018, "inat19": 2019}
DATASETS = ("folder", *DOWNLOADED, *INATURALIST, "hf")
MOST_SKIPPED = 100  # bad images in a row; more mean that something else is wrong
MOST_WORKERS_LOST = 10  # in one start of a run

Address = tuple[int, int]  # (epoch, index of the image)
# image [C, H, W], label, address; with boxes also (index of the image that was read, its `transforms.CropBox`)
Sample = tuple[Any, ...]


def open_images(
    dataset: str,
    data_path: str | Path,
    split: str = "train",
    labelled: bool = False,
    max_bad_fraction: float = 0.0,
    in_chans: int = 3,
    image_column: str | None = None,
    label_column: str | None = None,
) -> Images:
    """Returns the images of a split.

    dataset: one of DATASETS; "folder" also reads tars. labelled: every image must have a class, of two or more.
    in_chans: channels of the images. image_column, label_column: of "hf". ImageError if, of a sample of the image
    headers, more than `max_bad_fraction` are bad, or if one has other channels. ValueError if the data is missing or
    ambiguous.
    """
    if dataset not in DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}, choose from {', '.join(DATASETS)}")
    if dataset != "hf" and (image_column or label_column):
        raise ValueError(f"--image_column and --label_column are for --dataset hf, not for {dataset}: leave them out")
    images: Images
    if dataset in INATURALIST:
        images = INaturalistImages(data_path, split, INATURALIST[dataset])
    elif dataset in DOWNLOADED:
        if in_chans != 3:
            raise ValueError(f"--dataset {dataset} has images of 3 channels, but {wanted_channels(in_chans)}")
        images = CifarImages(dataset, data_path, split)
    elif dataset == "hf":
        images = open_hugging_face(data_path, split, labelled, image_column, label_column)
    else:
        choice = choose_tars(data_path, split, labelled)
        images = open_tars(choice, split, labelled) if choice.tars else FolderImages(data_path, split, labelled)
    if labelled:
        refuse_single_class(images, split)
    images.in_chans = in_chans
    images.check(max_bad_fraction)
    return images


class AddressedDataset(torch.utils.data.Dataset):
    """`dataset[(epoch, index)]` returns (img [C, H, W], label, (epoch, index)).

    Images have the type of their source: uint8, uint16 or float32.

    transform: `transform(img [C, H, W], epoch, index)` returns [C, h, w] of the same type. Its random numbers are
    functions of the address. replace: an image that cannot be read is marked in `bad` (uint8 [n], shared with the
    workers), and the next readable one takes its place, with its own label.

    with_boxes: append (index, box) to the sample: the image that was read, and what the transform shows of it.
    """

    def __init__(self, images: Images, transform: Any, replace: bool = False, with_boxes: bool = False) -> None:
        self.images, self.transform, self.with_boxes = images, transform, with_boxes
        self.bad = torch.zeros(len(images), dtype=torch.uint8).share_memory_() if replace else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, address: Address) -> Sample:
        epoch, index = address
        found, pixels, label = self._load(index)
        img = torch.from_numpy(pixels).permute(2, 0, 1)  # a view; the transform copies what it crops
        sample = self.transform(img, epoch, index), label, (epoch, index)
        return (*sample, (found, self.transform.crop_box(img.shape[-2:], epoch, index))) if self.with_boxes else sample

    def _load(self, index: int) -> tuple[int, np.ndarray, int]:
        """Returns (index, image, label) of the image `index`, or of the next readable one, if that may replace it.

        Raises the first ImageError if there is none, or OSError if no image can be opened any more.
        """
        first: ImageError | None = None
        for candidate in range(index, index + (1 if self.bad is None else MOST_SKIPPED)):
            i = candidate % len(self)
            try:
                return i, *self.images.load_sample(i)
            except ImageError as error:
                first = first or error
                if self.bad is not None:
                    self.bad[i] = 1
        assert first is not None
        raise find_storage_error(self.images) or first


class StepBatchSampler:
    """The addresses of this process's micro-batches, from one optimizer step to another, across epochs.

    The order of an epoch is a permutation that depends on (seed, epoch). It is cut into `num_samples // total_batch`
    steps; the remaining images are left out of that epoch. Within a step, micro-batch a of process r takes the next
    `batch_size` samples, so that any split of the same total over processes and accumulation sees the same samples in
    the same step. To resume, start at `start_step`. One iterator covers the whole run: workers stay busy across epochs.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        accum_iter: int,
        rank: int,
        world_size: int,
        seed: int,
        start_step: int,
        end_step: int,
    ) -> None:
        self.total_batch = batch_size * accum_iter * world_size
        self.steps_per_epoch = steps_per_epoch(num_samples, self.total_batch)
        self.num_samples, self.batch_size, self.accum_iter = num_samples, batch_size, accum_iter
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.start_step, self.end_step, self.start_micro = start_step, end_step, 0

    def __len__(self) -> int:
        return max(0, self.end_step - self.start_step) * self.accum_iter - self.start_micro

    def __getitem__(self, part: slice) -> "StepBatchSampler":
        """Returns `sampler[n:]`: the sampler without its first n batches, in constant time."""
        rest = copy.copy(self)
        steps, rest.start_micro = divmod(self.start_micro + part.start, self.accum_iter)
        rest.start_step += steps
        return rest

    def __iter__(self) -> Iterator[list[Address]]:
        epoch_of_order, order = -1, np.empty(0, np.int64)
        for step in range(self.start_step, self.end_step):
            epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
            if epoch != epoch_of_order:
                order, epoch_of_order = permutation(self.seed, epoch, self.num_samples), epoch
            for micro in range(self.start_micro if step == self.start_step else 0, self.accum_iter):
                first = step_in_epoch * self.total_batch + (micro * self.world_size + self.rank) * self.batch_size
                yield [(epoch, index) for index in order[first : first + self.batch_size].tolist()]


def permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    """Returns the order of an epoch's images, int64 [length]: a function of (seed, epoch)."""
    return addressed_uniform(SHUFFLE, seed, epoch, [0], length)[0].argsort(kind="stable")


def steps_per_epoch(num_samples: int, total_batch: int, world_size: int = 1) -> int:
    """Returns the number of whole batches in an epoch; ValueError if there is none."""
    if num_samples < total_batch:
        size = world_size  # becomes the largest batch of which an epoch has at least four
        while 8 * size <= num_samples:
            size *= 2
        raise ValueError(
            f"the data set has {num_samples} images, fewer than one total batch of {total_batch}: give "
            f"--total_batch_size {size} --batch_size {min(64, size // world_size)}, for example"
        )
    return num_samples // total_batch


def stack(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collates samples without a mask. Returns (imgs [B, C, H, W], labels int64 [B])."""
    imgs, labels, _ = zip(*samples, strict=True)
    return torch.utils.data.default_collate(imgs), torch.tensor(labels)  # in a worker straight into shared memory


def batches(
    dataset: AddressedDataset,
    sampler: StepBatchSampler | list[list[Address]],
    collator: Callable[[Sequence[Sample]], Any],
    num_workers: int,
    pin_memory: bool,
    log: Callable[[str], None] = print,
    *,
    batch_bytes: int = 0,
) -> Generator[Any, None, None]:
    """Returns the batches of all of `sampler`'s addresses. All ranks must call it. Workers start with the first batch.

    batch_bytes: size of one batch; 0 if unknown. TooLittleMemory on all ranks if those of the workers do not fit into
    shared memory. If it is full later, OSError says so.

    If a worker dies (the kernel kills processes that use too much memory), new workers continue with the same batch and
    `log` gets a warning. The batches are the same, because they depend on their addresses alone. After
    MOST_WORKERS_LOST deaths the error is raised.
    """
    collectives.run_everywhere(lambda: check_space(batch_bytes, num_workers, len(sampler)))

    def load() -> Generator[Any, None, None]:
        taken = lost = 0
        while True:
            others = set(multiprocessing.active_children())
            loader = torch.utils.data.DataLoader(
                dataset,
                batch_sampler=sampler[taken:],
                collate_fn=ShareBatch(collator),
                num_workers=num_workers,
                pin_memory=pin_memory,
                prefetch_factor=batches_ahead(batch_bytes, num_workers) if num_workers else None,
                worker_init_fn=ignore_in_worker,
            )
            workers: set[BaseProcess] = set()
            try:
                if num_workers:
                    settle_threads()
                stream = iter(loader)
                workers = set(multiprocessing.active_children()) - others
                take_over_workers(workers)
                for batch in stream:
                    taken += 1
                    yield batch
                return
            except (RuntimeError, OSError, EOFError) as error:  # the type depends on torch's version
                if lack := find_lack(error, workers):
                    raise lack from error
                # An exception inside a worker has its traceback in the text. It would come again, so it is raised.
                if num_workers == 0 or "in DataLoader worker process" in str(error) or lost == MOST_WORKERS_LOST:
                    raise
                lost += 1
                reason = str(error).partition("\n")[0] or type(error).__name__
                log(f"warning: a worker was lost before batch {taken + 1} ({reason}); new ones continue from there")
                stream = loader = None  # ends the remaining workers

    return load()


def look_ahead(
    stream: Generator[Any, None, None], number: int, on_failure: Callable[[Exception], object]
) -> Generator[Any, None, None]:
    """Yields the batches of `stream`, of which it reads `number` ahead.

    If the stream fails to read its images, `on_failure` gets the error at once, so that the run can end while there are
    batches. The error is raised after the last of them.
    """
    ahead: deque[Any] = deque()
    failure: Exception | None = None
    with closing(stream):
        try:
            for batch in stream:
                ahead.append(batch)
                if len(ahead) > number:
                    yield ahead.popleft()
        except (OSError, ImageError) as error:
            failure = error
            on_failure(error)
    yield from ahead
    if failure is not None:
        raise failure


def available_cores() -> int:
    """Returns how many cores this process may use: its CPU affinity and its cgroup may allow fewer than all."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # there is no limit: the file is missing, or the quota is "max"
        return cores


def cores_per_process(local_world_size: int) -> int:
    """Returns this process's share of the cores, at least 1. local_world_size: processes on this node.

    The tasks of srun may be bound to cores of their own. Each then sees only its --cpus-per-task, and does not share
    them.
    """
    cores, allotted = available_cores(), os.environ.get("SLURM_CPUS_PER_TASK", "")
    own = int(allotted) if allotted.isdecimal() and "TORCHELASTIC_RUN_ID" not in os.environ else 1
    return min(cores, max(cores // local_world_size, own))
