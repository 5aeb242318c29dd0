"""Images by address: `dataset[(epoch, index)]`, and the sampler that hands the addresses out.

Labels are optional here: a folder of images without classes pre-trains as well as ImageNet does.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from util.addressed import SHUFFLE, addressed_uniform

DOWNLOADED = ("cifar10", "cifar100")  # by name, where they are not there yet
INATURALIST = {"inat18": 2018, "inat19": 2019}
DATASETS = ("folder", *DOWNLOADED, *INATURALIST)

# What Pillow raises for files that are broken, are no images, or would unfold to gigabytes.
_PILLOW_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class ImageError(ValueError):
    """A file that cannot be read as an image; the message is for the user."""


class ImageFiles:
    """Images by path: `load(i) -> (PIL image, label)`, `path(i)`, `classes`, `root`.

    All headers are read up to `check_files`, evenly spaced ones beyond; ValueError names a file that is not an image.
    """

    def __init__(self, root, samples, classes, check_files=1000):
        self.root, self.classes = root, classes
        # Arrays instead of a list of tuples: forked workers then share the memory of a million paths.
        self.paths = np.array([os.fsencode(path) for path, _ in samples])
        self.labels = np.array([label for _, label in samples], np.int64)
        for i in np.unique(np.linspace(0, len(self) - 1, min(check_files, len(self))).astype(int)):
            self._open(i).close()

    def __len__(self):
        return len(self.paths)

    def load(self, i):
        with self._open(i) as img:
            try:
                return img.convert("RGB"), int(self.labels[i])
            except _PILLOW_ERRORS as error:
                raise ImageError(f"{self.path(i)!r} cannot be decoded: {error}; replace or remove the file") from error

    def path(self, i):
        return os.path.join(self.root, os.fsdecode(bytes(self.paths[i])))

    def _open(self, i):
        try:
            return Image.open(self.path(i))
        except _PILLOW_ERRORS as error:
            raise ImageError(f"{self.path(i)!r} is not a readable image ({error}); replace or remove the file") from error


class FolderImages(ImageFiles):
    """Images of ROOT/<split>/ or, where that does not exist, of ROOT itself: class folders, or no classes at all.

    Without classes every label is 0. With `labelled`, ROOT/<split>/ with class folders must exist. ValueError names a path
    that is missing, empty, or holds a class without images.
    """

    def __init__(self, data_path, split="train", labelled=False, check_files=1000):
        root = Path(data_path)
        if not root.is_dir():
            raise ValueError(f"--data_path {str(data_path)!r} is not a folder; {_LAYOUT}")
        if labelled and not (root / split).is_dir():
            raise ValueError(f"--data_path {str(data_path)!r} has no folder {split}/; expected is {root / split}/<class>/*.jpg")
        root = root / split if (root / split).is_dir() else root
        classes = []
        if any(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(root)):
            classes = [name for name in find_classes(root)[0] if not name.startswith(".")]
            try:
                samples = make_dataset(root, {name: i for i, name in enumerate(classes)}, extensions=IMG_EXTENSIONS)
            except FileNotFoundError as error:  # torchvision names the classes and the extensions
                raise ValueError(f"in --data_path {str(root)!r}: {error}") from error
        elif labelled:
            raise ValueError(f"{str(root)!r} holds no class folders, so there are no labels; expected is {root}/<class>/*.jpg")
        else:
            samples = [(str(root / e.name), 0) for e in os.scandir(root) if e.name.lower().endswith(IMG_EXTENSIONS)]
            samples.sort()
        if not samples:
            raise ValueError(f"--data_path {str(root)!r} holds no image; {_LAYOUT}")
        super().__init__(root, [(os.path.relpath(path, root), label) for path, label in samples], classes, check_files)


class INaturalistImages(ImageFiles):
    """iNaturalist 2018 or 2019: ROOT/<split><year>.json in COCO's style beside the images that it names.

    The label is the rank of the category's id. ValueError where the file contradicts itself: an image without exactly one
    label, a label without its image, an unknown category, a path that leaves ROOT.
    """

    def __init__(self, data_path, split, year, check_files=1000):
        path = Path(data_path) / f"{split}{year}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            categories = {c["id"]: c.get("name", str(c["id"])) for c in content["categories"]}
            names = {image["id"]: image["file_name"] for image in content["images"]}
            pairs = [(a["image_id"], a["category_id"]) for a in content["annotations"]]
        except FileNotFoundError as error:
            raise ValueError(f"{str(path)!r} does not exist; --data_path must hold iNaturalist's {path.name}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} is not a label file of iNaturalist ({type(error).__name__}: {error})") from error
        label_of = {category: label for label, category in enumerate(sorted(categories))}
        labels = dict(pairs)
        unlabelled, imageless = sorted(names.keys() - labels.keys()), sorted(labels.keys() - names.keys())
        problems = {
            "images without a label": [names[i] for i in unlabelled],
            "labels without an image": imageless,
            "labels beyond one an image": [None] * (len(pairs) - len(labels)),
            "labels of unknown categories": sorted({c for c in labels.values() if c not in label_of}),
            "paths outside the folder": [n for n in names.values() if os.path.isabs(n) or ".." in Path(n).parts],
            "images named twice": [None] * (len(content["images"]) - len(set(names.values()))),
        }
        found = [f"{len(items)} {what} ({items[0]})" for what, items in problems.items() if items]
        if found or not names:
            raise ValueError(f"{str(path)!r} disagrees with itself: {'; '.join(found) or 'it names no image'}")
        samples = [(name, label_of[labels[i]]) for i, name in sorted(names.items())]
        super().__init__(Path(data_path), samples, [categories[c] for c in sorted(categories)], check_files)


class CifarImages:
    """CIFAR-10 or -100 by name, from `data_path`; downloaded into it where it is absent. `load(i)` as above."""

    def __init__(self, name, data_path, split="train"):
        make = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}[name]
        try:
            self.images = make(data_path, train=split == "train", download=False)
        except RuntimeError:
            try:
                self.images = make(data_path, train=split == "train", download=True)
            except (OSError, RuntimeError) as error:
                raise ValueError(
                    f"{name} is not in --data_path {str(data_path)!r} and cannot be downloaded ({error}); "
                    f"put torchvision's {make.base_folder} there, or choose another --data_path"
                ) from error
        self.classes, self.root = self.images.classes, f"{name}'s {split} split"

    def __len__(self):
        return len(self.images)

    def load(self, i):
        return self.images[i]


def open_images(dataset, data_path, split="train", labelled=False):
    """`dataset`: one of DATASETS; `labelled`: every image must have a class. -> images with `load(i)` and `classes`."""
    if dataset not in DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}, choose from {', '.join(DATASETS)}")
    if dataset == "folder":
        return FolderImages(data_path, split, labelled)
    if dataset in INATURALIST:
        return INaturalistImages(data_path, split, INATURALIST[dataset])
    return CifarImages(dataset, data_path, split)


class AddressedDataset(torch.utils.data.Dataset):
    """`dataset[(epoch, index)] -> (img uint8 [3, H, W], label, (epoch, index))`.

    `transform(img uint8 [3, H, W], epoch, index) -> uint8 [3, h, w]` draws what it needs from the address.
    """

    def __init__(self, images, transform):
        self.images, self.transform = images, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, address):
        epoch, index = address
        img, label = self.images.load(index)
        img = torch.from_numpy(np.array(img)).permute(2, 0, 1)  # a view: the crop will copy, once
        return self.transform(img, epoch, index), label, (epoch, index)


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
        self.start_step, self.end_step = start_step, end_step

    def __len__(self):
        return max(0, self.end_step - self.start_step) * self.accum_iter

    def __iter__(self):
        epoch_of_order = None
        for step in range(self.start_step, self.end_step):
            epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
            if epoch != epoch_of_order:
                order, epoch_of_order = permutation(self.seed, epoch, self.num_samples), epoch
            for micro in range(self.accum_iter):
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


def batches(dataset, sampler, collator, num_workers, pin_memory):
    """The DataLoader's iterator over all of `sampler`'s batches of addresses."""
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collator,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=4 if num_workers else None,
    )
    return iter(loader)


def available_cores():
    """The cores this process may use, which on a cluster are fewer than the node has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


_LAYOUT = (
    "expected are images in class folders (ROOT/train/<class>/*.jpg or ROOT/<class>/*.jpg) or directly in ROOT; "
    f"extensions {', '.join(IMG_EXTENSIONS)}"
)
