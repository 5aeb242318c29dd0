"""Images by number: `load(i) -> (uint8 [H, W, 3], label)`, whatever they lie in. `util.datasets` gives them addresses.

Labels are optional here: a folder of images without classes pre-trains as well as ImageNet does.
"""

import errno
import hashlib
import io
import json
import os
import time
from pathlib import Path

import numpy as np
import torchvision
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from util.decode import PILLOW_ERRORS, check_header, decode


class ImageError(ValueError):
    """A file that cannot be read as an image; the message is for the user."""


# Of one file. Any other error is the storage's, which no other image can make up for.
NO_FILE = (errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def patiently(read):
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
    """Images that lie encoded somewhere. A subclass has `labels` [n], `names` [n] in bytes, `classes`, `root`, `path(i)`
    and `read(i) -> bytes`.

    reference: Pillow decodes them all, as torchvision's ImageFolder does.
    """

    reference = False
    num_checked = 1000  # headers that `check` reads

    def __len__(self):
        return len(self.labels)

    def fingerprint(self):
        """SHA-256 of all names and labels, in order: the same for a folder and for what was packed from it."""
        return hashlib.sha256(b"\0".join([*self.names.tolist(), self.labels.tobytes()])).hexdigest()

    def check(self, max_bad_fraction=0.0):
        """Reads the headers of up to `num_checked` evenly spaced images; ImageError if too many are no images.

        One is always let pass, unless the fraction is 0.
        """
        looked_at = np.unique(np.linspace(0, len(self) - 1, min(self.num_checked, len(self))).astype(int))
        problems = [problem for i in looked_at if (problem := self._problem(i))]
        if len(problems) > (max(1, max_bad_fraction * len(looked_at)) if max_bad_fraction else 0):
            count = f"{len(problems)} of the {len(looked_at)} images looked at cannot be read: " * (len(problems) > 1)
            raise ImageError(count + "; ".join(problems[:10]))

    def _problem(self, i):
        try:
            check_header(self.source(i))
        except ImageError as error:
            return str(error)
        except PILLOW_ERRORS as error:
            return f"{self.path(i)!r} is not a readable image ({error}); replace or remove the file"
        return None

    def source(self, i):
        """What Pillow opens."""
        return io.BytesIO(self.read(i))

    def load(self, i):
        """-> (uint8 [H, W, 3], label); ImageError names the file."""
        data = self.read(i)
        try:
            return decode(data, self.reference), int(self.labels[i])
        except PILLOW_ERRORS as error:
            raise ImageError(f"{self.path(i)!r} cannot be decoded: {error}; replace or remove the file") from error


class ImageFiles(EncodedImages):
    """Images by path."""

    def __init__(self, root, samples, classes):
        self.root, self.classes = root, classes
        # Arrays instead of a list of tuples: forked workers then share the memory of a million paths.
        self.names = np.array([os.fsencode(path) for path, _ in samples])
        self.labels = np.array([label for _, label in samples], np.int64)

    def read(self, i):
        try:
            return patiently(Path(self.path(i)).read_bytes)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            raise ImageError(f"{self.path(i)!r} is not a readable image ({error}); replace or remove the file") from error

    def path(self, i):
        return os.path.join(self.root, os.fsdecode(bytes(self.names[i])))

    def source(self, i):
        return self.path(i)  # of which no more than the header is read


class FolderImages(ImageFiles):
    """Images of ROOT/<split>/ or, where that does not exist, of ROOT itself: class folders, or no classes at all.

    Without classes every label is 0. With `labelled`, ROOT/<split>/ with class folders must exist. ValueError names a path
    that is missing, empty, or holds a class without images.
    """

    def __init__(self, data_path, split="train", labelled=False):
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
        super().__init__(root, [(os.path.relpath(path, root), label) for path, label in samples], classes)


class INaturalistImages(ImageFiles):
    """iNaturalist 2018 or 2019: ROOT/<split><year>.json in COCO's style beside the images that it names.

    The label is the rank of the category's id. ValueError where the file contradicts itself: an image without exactly one
    label, a label without its image, an unknown category, a path that leaves ROOT.
    """

    def __init__(self, data_path, split, year):
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
        super().__init__(Path(data_path), samples, [categories[c] for c in sorted(categories)])


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

    def fingerprint(self):
        return self.root

    def check(self, max_bad_fraction=0.0):
        """Nothing to be done: torchvision has compared the hash."""

    def load(self, i):
        img, label = self.images[i]
        return np.array(img), label


_LAYOUT = (
    "expected are images in class folders (ROOT/train/<class>/*.jpg or ROOT/<class>/*.jpg) or directly in ROOT, tars, or "
    "what pack_dataset.py has written; "
    f"extensions {', '.join(IMG_EXTENSIONS)}"
)
