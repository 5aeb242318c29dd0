"""Images by number: `load(i) -> (uint8 [H, W, 3], label)`, whatever they lie in. `util.data.datasets` gives them addresses.

Labels are optional here: a folder of images without classes pre-trains as well as ImageNet does.
"""

import errno
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torchvision

from util.data import folders
from util.data.decode import PILLOW_ERRORS, check_header, decode

Result = TypeVar("Result")
Samples = Sequence[tuple[str, int]]  # (path, label)


class ImageError(ValueError):
    """A file that cannot be read as an image; the message is for the user."""


# Of one file. Any other error is the storage's, which no other image can make up for.
NO_FILE = (errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def patiently(read: Callable[[], Result]) -> Result:
    """`read()`, tried again for a while where the storage fails."""
    for seconds in (0.1, 1.0, 10.0):
        try:
            return read()
        except OSError as error:
            if error.errno in NO_FILE:
                raise
            time.sleep(seconds)
    return read()


class EncodedImages:
    """Images that lie encoded somewhere. A subclass has `labels` [n], `names` [n] in bytes, `classes`, `root`, `notes`,
    `path(i)` and `read(i) -> bytes`.

    reference: Pillow decodes them all, as torchvision's ImageFolder does.
    notes: short sentences on what is ignored or stands in for something else.
    """

    reference = False
    num_checked = 1000  # headers that `check` reads
    labels: np.ndarray
    names: np.ndarray
    classes: list[str]
    root: str | Path
    notes: list[str]

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, i: int) -> str:
        """Where image i lies, for messages."""
        raise NotImplementedError

    def read(self, i: int) -> bytes:
        """The bytes of image i; ImageError if there is none."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """SHA-256 of all names and labels, in order: the same for a folder and for what was packed from it."""
        return hashlib.sha256(b"\0".join([*self.names.tolist(), self.labels.tobytes()])).hexdigest()

    def check(self, max_bad_fraction: float = 0.0) -> None:
        """Reads the headers of up to `num_checked` evenly spaced images; ImageError if too many are no images.

        One is always let pass, unless the fraction is 0.
        """
        looked_at = np.unique(np.linspace(0, len(self) - 1, min(self.num_checked, len(self))).astype(int))
        problems = [problem for i in looked_at if (problem := self._problem(i))]
        if len(problems) > (max(1, max_bad_fraction * len(looked_at)) if max_bad_fraction else 0):
            count = f"{len(problems)} of the {len(looked_at)} images looked at cannot be read: " if problems[1:] else ""
            raise ImageError(count + "; ".join(problems[:10]))

    def _problem(self, i: int) -> str | None:
        try:
            check_header(self.source(i))
        except ImageError as error:
            return str(error)
        except PILLOW_ERRORS as error:
            return f"{self.path(i)!r} is not a readable image ({error}); replace or remove the file"
        return None

    def source(self, i: int) -> str | io.BytesIO:
        """What Pillow opens."""
        return io.BytesIO(self.read(i))

    def load(self, i: int) -> tuple[np.ndarray, int]:
        """-> (uint8 [H, W, 3], label); ImageError names the file."""
        data = self.read(i)
        try:
            return decode(data, self.reference), int(self.labels[i])
        except PILLOW_ERRORS as error:
            raise ImageError(f"{self.path(i)!r} cannot be decoded: {error}; replace or remove the file") from error


class ImageFiles(EncodedImages):
    """Images by path: `samples` are (path relative to `root`, label)."""

    def __init__(self, root: str | Path, samples: Samples, classes: list[str], notes: Sequence[str] = ()):
        self.root, self.classes, self.notes = root, classes, [*notes]
        # Arrays instead of a list of tuples: forked workers then share the memory of a million paths.
        self.names = np.array([os.fsencode(path) for path, _ in samples])
        self.labels = np.array([label for _, label in samples], np.int64)

    def read(self, i: int) -> bytes:
        try:
            return patiently(Path(self.path(i)).read_bytes)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            what = f"{self.path(i)!r} is not a readable image ({error})"
            raise ImageError(f"{what}; replace or remove the file") from error

    def path(self, i: int) -> str:
        return os.path.join(self.root, os.fsdecode(bytes(self.names[i])))

    def source(self, i: int) -> str:
        return self.path(i)  # of which no more than the header is read


class FolderImages(ImageFiles):
    """Images of ROOT/train/ or ROOT/val/, by `split`, or of ROOT itself: class folders, or no classes at all.

    Without classes every label is 0. With `labelled`, the split's folder with class folders must exist. `root` is the
    folder that is read, `notes` says what was ignored. ValueError where the folder is missing, empty or ambiguous, or
    holds a class without images.
    """

    def __init__(self, data_path: str | Path, split: str = "train", labelled: bool = False):
        root, notes = folders.find_root(data_path, split, labelled)
        classes, samples, ignored = folders.find_samples(root, labelled)
        super().__init__(root, samples, classes, notes + ignored)


class INaturalistImages(ImageFiles):
    """iNaturalist 2018 or 2019: ROOT/<split><year>.json in COCO's style beside the images that it names.

    The label is the rank of the category's id. ValueError where the file contradicts itself: an image without exactly
    one label, a label without its image, an unknown category, a path that leaves ROOT.
    """

    def __init__(self, data_path: str | Path, split: str, year: int):
        path = Path(data_path) / f"{split}{year}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            categories = {c["id"]: c.get("name", str(c["id"])) for c in content["categories"]}
            names = {image["id"]: image["file_name"] for image in content["images"]}
            pairs = [(a["image_id"], a["category_id"]) for a in content["annotations"]]
        except FileNotFoundError as error:
            what = f"{str(path)!r} does not exist"
            raise ValueError(f"{what}; --data_path must hold iNaturalist's {path.name}") from error
        except (ValueError, KeyError, TypeError) as error:
            what = f"{str(path)!r} is not a label file of iNaturalist"
            raise ValueError(f"{what} ({type(error).__name__}: {error})") from error
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
        super().__init__(Path(data_path), samples, [categories[c] for c in sorted(categories)])


class CifarImages:
    """CIFAR-10 or -100 by name, from `data_path`; downloaded into it where it is absent. `load(i)` as above."""

    def __init__(self, name: str, data_path: str | Path, split: str = "train"):
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
        self.classes, self.root, self.notes = self.images.classes, f"{name}'s {split} split", []

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> str:
        """The name: the data is the same for everyone."""
        return self.root

    def check(self, max_bad_fraction: float = 0.0) -> None:
        """Nothing to be done: torchvision has compared the hash."""

    def load(self, i: int) -> tuple[np.ndarray, int]:
        """-> (uint8 [H, W, 3], label)."""
        img, label = self.images[i]
        return np.array(img), label
