"""Folders of images: which split a folder or a tar belongs to, what is read for a split, and the classes of a folder.

One rule holds for folders, tars and the splits of Hugging Face data sets. A folder belongs to the split that it is
named after, a tar to the split that is a word of its name. If val is missing, test is read; if labels are not needed,
train is read, too.

Names, labels and order of images are those of torchvision's ImageFolder. Beside its extensions, `.npy` is an image.
"""

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from util.text import shorten

SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".npy")
SYSTEM_FOLDERS = ("__MACOSX", "@eaDir")  # made by macOS and by Synology
DEFAULT_PATH = "data"  # of --data_path
LAYOUT = (
    "expected are images in class folders (ROOT/train/<class>/*.jpg or ROOT/<class>/*.jpg), images directly in ROOT, "
    f"or tars; extensions {', '.join(IMG_EXTENSIONS)}"
)
LABELLED_LAYOUT = "expected are labelled images in ROOT/train/<class>/ and ROOT/val/<class>/, or tars of each split"


class MissingSplit(ValueError):
    """The data holds no images of the split."""


def is_hidden(name: str) -> bool:
    """Whether files and folders of this name are ignored."""
    return name.startswith(".") or name in SYSTEM_FOLDERS


def is_image(name: str) -> bool:
    return name.lower().endswith(IMG_EXTENSIONS)


# ------------------------------------------------------------------------------------------------------------ splits


def split_of(name: str) -> str | None:
    """Returns the split that a folder's name stands for: train, val or test."""
    for split, names in SPLIT_NAMES.items():
        if name.lower() in names:
            return split
    return None


def split_of_tar(file_name: str) -> str | None:
    """Returns the split that a word in a tar's name stands for; None if there are two, as in train_val.tar."""
    splits = {split_of(word) for word in re.findall("[a-z]+", file_name.lower())}
    splits.discard(None)
    if len(splits) != 1:
        return None
    return splits.pop()


def choose_split(found: Collection[str | None], split: str, labelled: bool = False) -> str | None:
    """Returns which of the splits that were found is read if `split` is asked for."""
    if split in found:
        return split
    if split == "val" and "test" in found:
        return "test"
    if split == "val" and "train" in found and not labelled:
        return "train"
    return None


def note_stand_in(name: str, chosen: str | None, split: str) -> list[str]:
    """Returns a note if `name` is read although it does not belong to the split that was asked for."""
    if chosen == split:
        return []
    return [f"{name} is read as {split}, because there is no {split}"]


# ----------------------------------------------------------------------------------------------------------- folders


@dataclass
class Listing:
    """The names in a folder by kind, sorted, without hidden ones."""

    path: Path
    folders: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    tars: list[str] = field(default_factory=list)

    def readable_tars(self) -> list[Path]:
        """Returns the tars if there are no other images: folders and image files come before tars."""
        if self.folders or self.images:
            return []
        return [self.path / name for name in self.tars]


def list_folder(path: Path) -> Listing:
    listing = Listing(path)
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if is_hidden(entry.name):
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.is_symlink():
                is_folder = os.path.isdir(entry)  # `is_dir` raises for a link to itself
            if is_folder:
                listing.folders.append(entry.name)
            elif is_image(entry.name):
                listing.images.append(entry.name)
            elif entry.name.endswith(".tar"):
                listing.tars.append(entry.name)
    return listing


def folder_identity(path: Path) -> tuple[int, int] | None:
    """Returns what nodes that share a folder agree on, and copies of it do not: inode and time of the last change.

    None if there is no such folder.
    """
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_ctime_ns


@dataclass(frozen=True)
class SplitFiles:
    """What is read for a split: tars, or if there are none the image files below `root`. notes: for the log."""

    root: Path
    tars: list[Path]
    notes: list[str]


def find_files(data_path: str | Path, split: str = "train", labelled: bool = False) -> SplitFiles:
    """Finds what is read for a split: ROOT/<split>/, the tars of the split in ROOT, or all of ROOT.

    labelled: images of another split, or of all, are refused. MissingSplit if there are none of the split, ValueError
    if `data_path` is neither a folder nor a tar, or if it is unclear which folder is meant.
    """
    path = Path(data_path)
    if path.is_file() and path.suffix == ".tar":
        if not labelled:
            return SplitFiles(path.parent, [path], [])
        listing = Listing(path.parent, tars=[path.name])
    elif path.is_dir():
        listing = list_folder(path)
    else:
        raise ValueError(f"--data_path {str(path)!r} is not a folder; {LAYOUT}")
    by_split: dict[str | None, list[str]] = defaultdict(list)
    for name in listing.folders:
        by_split[split_of(name)].append(name)
    for name in listing.tars:
        by_split[split_of_tar(name)].append(name)
    by_split.pop(None, None)
    chosen = choose_split(by_split, split, labelled)
    if chosen is None:
        if labelled or by_split:
            present = shorten([name for names in by_split.values() for name in names])
            problem = f"has no {split}/, but {present}" if present else f"has no {split}/"
            layout = LABELLED_LAYOUT if labelled else LAYOUT
            raise MissingSplit(f"--data_path {str(path)!r} {problem}; {layout}")
        refuse_split_words(listing)
        return SplitFiles(listing.path, listing.readable_tars(), [])

    names = by_split[chosen]
    folders = [name for name in names if name in listing.folders]
    if not folders:
        notes = note_stand_in(shorten(names), chosen, split)
        return SplitFiles(listing.path, [listing.path / name for name in names], notes)
    folder = folders[0]
    if len(folders) > 1:
        raise ValueError(f"--data_path {str(path)!r} holds {' and '.join(folders)} for {chosen}: rename all but one")
    notes = note_stand_in(f"{folder}/", chosen, split)
    return SplitFiles(path / folder, list_folder(path / folder).readable_tars(), notes)


def refuse_split_words(listing: Listing) -> None:
    """ValueError if all folders have words of splits in their names, such as train2017/ and val2017/."""
    splits = {split_of_tar(name) for name in listing.folders}
    if len(splits) > 1 and None not in splits:
        names = shorten(listing.folders)
        raise ValueError(f"--data_path {str(listing.path)!r} holds {names}: rename them to train and val, or give one")


class Samples(NamedTuple):
    """The images of a folder: (path relative to it, label). notes: for the log."""

    classes: list[str]
    samples: list[tuple[str, int]]
    notes: list[str]


def find_samples(data_path: str | Path, labelled: bool = False) -> Samples:
    """Returns the images in its class folders, or those directly in it. If it holds both, no image has a class.

    ValueError if it holds no images, if a class is empty, or, with `labelled`, if not all images have classes.
    """
    root = Path(data_path)
    place = f"--data_path {str(root)!r}"
    if not root.is_dir():
        raise ValueError(f"{place} is not a folder; {LAYOUT}")
    listing = list_folder(root)
    images_of = {name: list_images(root, name) for name in listing.folders}
    with_images = [name for name, images in images_of.items() if images]
    empty = [name for name, images in images_of.items() if not images]
    if not with_images and not listing.images:
        raise ValueError(f"{place} holds no image; {LAYOUT}")
    if with_images and listing.images:
        named = f"{place} holds images ({shorten(listing.images)}) beside folders of images ({shorten(with_images)})"
        if labelled:
            raise ValueError(f"{named}: move one of them away")
        samples = [(image, 0) for image in [*listing.images, *chain.from_iterable(images_of.values())]]
        return Samples([], samples, [f"note: {named}, so no image has a class"])
    if with_images and empty:
        raise ValueError(f"{place} has classes without an image: {shorten(empty, 10)}")
    if labelled and not with_images:
        raise ValueError(f"{place} holds no class folders, so there are no labels; expected is {root}/<class>/*")
    samples = [(image, 0) for image in listing.images]
    for label, name in enumerate(with_images):
        samples += [(image, label) for image in images_of[name]]
    return Samples(with_images, samples, [])


def spelling(name: str) -> str:
    """Returns a name in the form of Unicode that names are compared in. Macs write other forms of accents."""
    return unicodedata.normalize("NFC", name)


def list_images(root: Path, name: str) -> list[str]:
    """Returns the images in ROOT/`name` and all folders below it, relative to ROOT, in torchvision's order.

    name: "" for all of ROOT.

    Links are followed, but each folder is read once. So a link that leads back to a parent folder ends.
    """
    seen: set[str] = set()
    if name:
        seen.add(os.path.realpath(root))
    images_of: dict[str, list[str]] = {}  # of each folder, relative to the root
    for path, folders, files in os.walk(os.path.join(root, name), onerror=raise_error, followlinks=True):
        real = os.path.realpath(path)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(folder for folder in folders if not is_hidden(folder))
        images = [file for file in sorted(files) if is_image(file) and not is_hidden(file)]
        images_of[os.path.relpath(path, root)] = images
    paths: list[str] = []
    for folder in sorted(images_of):
        for image in images_of[folder]:
            paths.append(os.path.normpath(os.path.join(folder, image)))
    return paths


def raise_error(error: OSError) -> None:
    """Makes `os.walk` raise: by default it leaves out folders that cannot be read."""
    raise error


def refuse_inside_data(flag: str, path: str | Path, dataset: str, data_path: str | Path) -> None:
    """ValueError if the `path` that `flag` gives lies between images, where it would become data.

    dataset: the value of --dataset. Only "folder" and "hf" read what lies in their folder, whatever its name is.
    """
    root = Path(data_path).resolve()
    place = Path(path).resolve()
    if dataset not in ("folder", "hf") or not root.is_dir() or not place.is_relative_to(root):
        return
    folders = [(root / name).resolve() for name in list_folder(root).folders if split_of(name)]
    for folder in folders or [root]:
        if place.is_relative_to(folder):
            raise ValueError(f"{flag} {str(path)!r} lies inside the image folder {str(folder)!r}: choose another place")
