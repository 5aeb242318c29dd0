"""Images by address: `dataset[(epoch, index)]`, and the sampler that hands the addresses out."""

import copy
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from util.addressed import SHUFFLE, addressed_uniform
from util.data import packed
from util.data.bad_images import shared_flags
from util.data.folders import find_split, list_folder
from util.data.images import CifarImages, EncodedImages, FolderImages, ImageError, INaturalistImages
from util.data.tars import choose_tars, open_tars
from util.run.signals import ignore_in_worker, let_children_die_quietly

DOWNLOADED = ("cifar10", "cifar100")  # by name, where they are not there yet
MOST_SKIPPED = 100  # bad images in a row, after which there is something else wrong
MOST_AHEAD = 2**30  # bytes of the batches that wait for one process
MOST_DEATHS = 10  # of workers, from start to start
INATURALIST = {"inat18": 2018, "inat19": 2019}
DATASETS = ("folder", *DOWNLOADED, *INATURALIST)


def open_images(
    dataset: str, data_path: str | Path, split: str = "train", labelled: bool = False, max_bad_fraction: float = 0.0
) -> EncodedImages | CifarImages:
    """`dataset`: one of DATASETS; `labelled`: every image must have a class. -> images with `load(i)` and `classes`.

    A "folder" may also hold packed images or tars. ImageError if a sample of the headers has more bad ones than the
    fraction.
    """
    if dataset not in DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}, choose from {', '.join(DATASETS)}")
    if dataset == "folder":
        images = open_folder(data_path, split, labelled)
    elif dataset in INATURALIST:
        images = INaturalistImages(data_path, split, INATURALIST[dataset])
    else:
        images = CifarImages(dataset, data_path, split)
    images.check(max_bad_fraction)
    return images


def open_folder(data_path: str | Path, split: str, labelled: bool) -> EncodedImages:
    """Images of ROOT's folder for the split, or of ROOT: packed, in tars, or files."""
    root = Path(data_path)
    folder, notes = find_split(list_folder(root), split, fall_back=not labelled) if root.is_dir() else (None, [])
    places = [] if folder is None else [(root / folder, notes)]
    if not labelled:
        places.append((root, []))
    for place, remarks in places:
        if (place / packed.INDEX).is_file():
            images = packed.PackedImages(place, labelled=labelled)
            images.notes += remarks
            return images
        if (place / packed.SHARD.format(0)).is_file():
            what = f"{str(place)!r} holds shards without {packed.INDEX}"
            raise ValueError(f"{what}: pack_dataset.py has not finished; run it again")
    choice = choose_tars(data_path, split, labelled)
    if not choice.tars:
        return FolderImages(data_path, split, labelled)
    images = open_tars(choice.tars, split, labelled, choice.by_folders)
    images.notes += choice.notes
    return images


class AddressedDataset(torch.utils.data.Dataset):
    """`dataset[(epoch, index)] -> (img uint8 [3, H, W], label, (epoch, index))`.

    `transform(img uint8 [3, H, W], epoch, index) -> uint8 [3, h, w]` draws what it needs from the address. With
    `replace` an image that cannot be read is marked in `bad`, and the next one that can be gives its pixels and label.
    """

    def __init__(self, images, transform, replace=False):
        self.images, self.transform = images, transform
        self.bad = shared_flags(len(images)) if replace else None

    def __len__(self):
        return len(self.images)

    def __getitem__(self, address):
        epoch, index = address
        img, label = self._load(index)
        img = torch.from_numpy(img).permute(2, 0, 1)  # a view: the crop will copy, once
        return self.transform(img, epoch, index), label, (epoch, index)

    def _load(self, index):
        for skipped in range(MOST_SKIPPED if self.bad is not None else 0):
            i = (index + skipped) % len(self)
            try:
                return self.images.load(i)
            except ImageError:
                self.bad[i] = 1
        return self.images.load(index)


class StepBatchSampler:
    """The addresses of this process's micro-batches, from one optimizer step to another, across epochs.

    An epoch is the permutation of (seed, epoch), cut into `len(dataset) // total_batch` steps; the rest waits for
    another epoch. Within a step, micro-batch a of process r takes the next `batch_size` samples: any split of the same
    total over processes and accumulation sees the same samples in the same step. Starting at `start_step` is all that
    resuming takes, and one iterator over the whole run keeps the workers busy across epochs.
    """

    def __init__(self, num_samples, batch_size, accum_iter, rank, world_size, seed, start_step, end_step):
        self.total_batch = batch_size * accum_iter * world_size
        self.steps_per_epoch = steps_per_epoch(num_samples, self.total_batch)
        self.num_samples, self.batch_size, self.accum_iter = num_samples, batch_size, accum_iter
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.start_step, self.end_step, self.start_micro = start_step, end_step, 0

    def __len__(self):
        return max(0, self.end_step - self.start_step) * self.accum_iter - self.start_micro

    def __getitem__(self, part):
        """`sampler[n:]`: without its first n batches, at no cost."""
        rest = copy.copy(self)
        steps, rest.start_micro = divmod(self.start_micro + part.start, self.accum_iter)
        rest.start_step += steps
        return rest

    def __iter__(self):
        epoch_of_order = None
        for step in range(self.start_step, self.end_step):
            epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
            if epoch != epoch_of_order:
                order, epoch_of_order = permutation(self.seed, epoch, self.num_samples), epoch
            for micro in range(self.start_micro if step == self.start_step else 0, self.accum_iter):
                first = step_in_epoch * self.total_batch + (micro * self.world_size + self.rank) * self.batch_size
                yield [(epoch, index) for index in order[first : first + self.batch_size].tolist()]


def permutation(seed, epoch, length):
    """The order of an epoch's images, int64 [length]; a function of (seed, epoch)."""
    return addressed_uniform(SHUFFLE, seed, epoch, [0], length)[0].argsort(kind="stable")


def steps_per_epoch(num_samples, total_batch):
    if num_samples < total_batch:
        raise ValueError(
            f"the data set has {num_samples} images, fewer than one total batch of {total_batch}; "
            f"lower --batch_size, --accum_iter or --total_batch_size"
        )
    return num_samples // total_batch


def every_image_once(num_samples, batch_size, rank=0, world_size=1):
    """This process's batches of addresses for an evaluation: together the processes see each image exactly once."""
    own = range(rank, num_samples, world_size)
    return [[(0, i) for i in own[first : first + batch_size]] for first in range(0, len(own), batch_size)]


def stack(samples):
    """Collates `AddressedDataset`'s samples: -> (imgs uint8 [B, 3, H, W], labels int64 [B])."""
    imgs, labels, _ = zip(*samples, strict=True)
    return torch.stack(imgs), torch.tensor(labels)


def prefetch_factor(batch_bytes: int, num_workers: int) -> int:
    """Batches that each worker prepares ahead: together about `MOST_AHEAD` bytes at most, but from 1 to 4.

    Batches that wait lie in shared memory, once for each worker of each process. 0 bytes: unknown, so 4.
    """
    if not batch_bytes or not num_workers:
        return 4
    return max(1, min(4, MOST_AHEAD // (batch_bytes * num_workers)))


def batches(
    dataset: AddressedDataset,
    sampler: StepBatchSampler | list,
    collator: Callable,
    num_workers: int,
    pin_memory: bool,
    say: Callable[[str], None] = print,
    *,
    batch_bytes: int = 0,
) -> Iterator[tuple]:
    """An iterator over the batches of all of `sampler`'s addresses.

    If a worker dies (the kernel kills what takes too much memory), new ones go on with the same batch, and `say` tells.
    RuntimeError if that does not help. Batches follow from their addresses, so they are the ones that would have come.
    `batch_bytes`: of one batch, from which `prefetch_factor` follows.
    """
    taken = deaths = 0
    while True:
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sampler[taken:],
            collate_fn=collator,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor(batch_bytes, num_workers) if num_workers else None,
            worker_init_fn=ignore_in_worker,
        )
        try:
            others = set(multiprocessing.active_children())
            stream = iter(loader)
            let_children_die_quietly(set(multiprocessing.active_children()) - others)
            for batch in stream:
                taken += 1
                yield batch
            return
        except (RuntimeError, OSError) as error:
            # What a worker raised has its traceback in the text and would be raised again. Only its death is retried.
            if num_workers == 0 or "in DataLoader worker process" in str(error) or deaths == MOST_DEATHS:
                raise
            deaths += 1
            lost = f"a worker was lost before batch {taken + 1} ({str(error).splitlines()[0]})"
            say(f"warning: {lost}; new ones go on from there")
            stream = loader = None  # the other workers go


def available_cores():
    """The cores this process may use, which on a cluster, and in a container, are fewer than the node has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such limit, or "max"
        return cores
