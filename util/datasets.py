"""Images by address: `dataset[(epoch, index)]`, and the sampler that hands the addresses out."""

import copy
import os
from pathlib import Path

import torch

from util import packed
from util.addressed import SHUFFLE, addressed_uniform
from util.bad_images import shared_flags
from util.images import CifarImages, FolderImages, ImageError, INaturalistImages
from util.signals import ignore_in_worker, let_children_die_quietly
from util.tars import find_tars, open_tars

DOWNLOADED = ("cifar10", "cifar100")  # by name, where they are not there yet
MOST_SKIPPED = 100  # bad images in a row, after which there is something else wrong
MOST_DEATHS = 10  # of workers, from start to start
INATURALIST = {"inat18": 2018, "inat19": 2019}
DATASETS = ("folder", *DOWNLOADED, *INATURALIST)


def open_images(dataset, data_path, split="train", labelled=False, max_bad_fraction=0.0):
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


def open_folder(data_path, split, labelled):
    """Images of ROOT/<split>/ or of ROOT: packed, in tars, or files."""
    for folder in [Path(data_path) / split] + [Path(data_path)] * (not labelled):
        if (folder / packed.INDEX).is_file():
            return packed.PackedImages(folder, labelled=labelled)
        if (folder / packed.SHARD.format(0)).is_file():
            raise ValueError(f"{str(folder)!r} holds shards without {packed.INDEX}: pack_dataset.py has not finished; run it again")
    tars = find_tars(data_path, split, labelled)
    return open_tars(tars, split, labelled) if tars else FolderImages(data_path, split, labelled)


class AddressedDataset(torch.utils.data.Dataset):
    """`dataset[(epoch, index)] -> (img uint8 [3, H, W], label, (epoch, index))`.

    `transform(img uint8 [3, H, W], epoch, index) -> uint8 [3, h, w]` draws what it needs from the address. With `replace` an
    image that cannot be read is marked in `bad`, and the next one that can be gives its pixels and label.
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


def batches(dataset, sampler, collator, num_workers, pin_memory, say=print):
    """An iterator over the batches of all of `sampler`'s addresses.

    If a worker dies (the kernel kills what takes too much memory), new ones go on with the same batch, and `say` tells.
    RuntimeError if that does not help. Batches follow from their addresses, so they are the ones that would have come.
    """
    taken = deaths = 0
    while True:
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sampler[taken:],
            collate_fn=collator,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=4 if num_workers else None,
            worker_init_fn=ignore_in_worker,
        )
        try:
            stream = iter(loader)
            let_children_die_quietly()
            for batch in stream:
                taken += 1
                yield batch
            return
        except (RuntimeError, OSError) as error:
            # What a worker raised comes with its traceback and would be raised again; only its death is worth another try.
            if num_workers == 0 or "in DataLoader worker process" in str(error) or deaths == MOST_DEATHS:
                raise
            deaths += 1
            say(f"warning: a worker was lost before batch {taken + 1} ({str(error).splitlines()[0]}); new ones go on from there")
            stream = loader = None  # the other workers go


def available_cores():
    """The cores this process may use, which on a cluster, and in a container, are fewer than the node has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such limit, or "max"
        return cores
