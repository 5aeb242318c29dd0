"""Folders of images: which split a folder or a tar belongs to, what is read for a split, and the classes of a folder.

One rule holds for folders, tars and the splits of Hugging Face data sets. A folder belongs to the split that it is
named after, a tar to the split that is a word of its name. If val is missing, test is read; if labels are not needed,
train is read, too.

Names, labels and order of images are those of torchvision's ImageFolder. Beside its extensions, `.npy` is an image.
"""

import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from util.text import count_of, shorten

SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".npy")
# Endings of images that are not read. Other files beside images, such as .txt, are nothing to speak of.
UNREAD_WEB = (".gif", ".jfif", ".jpe", ".jp2", ".j2k", ".jxl", ".avif", ".heic", ".heif", ".svg")
UNREAD_RAW = (".tga", ".exr", ".hdr", ".npz", ".dcm", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw")
TEXTS = ("README", "LICENSE", "MD5SUMS", "SHA256SUMS")  # files without an ending that are no images
SYSTEM_FOLDERS = ("__MACOSX", "@eaDir")  # made by macOS and by Synology
ARCHIVES = (".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".tar.zst", ".tzst", ".zip")
HUGGING_FACE = (".parquet", ".arrow")
PACKING = ".packing"  # unfinished shards of pack_dataset.py
DEFAULT_PATH = "data"  # of --data_path
LAYOUT = (
    "expected are images in class folders (ROOT/train/<class>/*.jpg or ROOT/<class>/*.jpg), images directly in ROOT, "
    f"or tars; extensions {', '.join(IMG_EXTENSIONS)}"
)


class MissingSplit(ValueError):
    """The data holds no images of the split."""


def is_hidden(name: str) -> bool:
    """Whether files and folders of this name are ignored."""
    if name in SYSTEM_FOLDERS:
        return True
    return name.startswith(".") and name not in (".", "..")


def is_image(name: str) -> bool:
    return name.lower().endswith(IMG_EXTENSIONS)


def count_unread(names: Sequence[str]) -> Counter[str]:
    """Returns how many files there are of each ending of images that are not read, and how many without one ("")."""
    counts: Counter[str] = Counter()
    for name in names:
        ending = os.path.splitext(name)[1].lower()
        has_none = ending == "" and name not in TEXTS
        if has_none or ending in UNREAD_WEB or ending in UNREAD_RAW:
            counts[ending] += 1
    return counts


def count_images(names: Sequence[str]) -> Counter[str]:
    """Returns how many files there are of each ending that images have, whether it is read or not."""
    counts = count_unread(names)
    del counts[""]
    counts.update(os.path.splitext(name)[1].lower() for name in names if is_image(name))
    return counts


def files_of_ending(number: int, ending: str) -> str:
    """Returns a number of files in words. ending: "" if they have none."""
    files = count_of(number, "file")
    if ending == "":
        return f"{files} without an ending"
    return f"{files} ending in {ending}"


def note_unread(counts: Counter[str], where: str = "") -> list[str]:
    """Returns a note that names the most frequent endings of files that are not read. counts: of `count_unread`.

    where: the end of the note.
    """
    if not counts:
        return []
    kinds = []
    for ending in sorted(counts, key=lambda ending: (-counts[ending], ending)):
        kinds.append(files_of_ending(counts[ending], ending))
    return [f"note: not read: {shorten(kinds, 5)}{where}"]


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
    others: list[str] = field(default_factory=list)

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
            if is_folder(entry):
                listing.folders.append(entry.name)
            elif is_image(entry.name):
                listing.images.append(entry.name)
            elif entry.name.endswith(".tar"):
                listing.tars.append(entry.name)
            else:
                listing.others.append(entry.name)
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


def is_folder(entry: os.DirEntry[str]) -> bool:
    if entry.is_symlink():
        return os.path.isdir(entry)  # `is_dir` raises for a link to itself
    return entry.is_dir()


@dataclass(frozen=True)
class SplitFiles:
    """What is read for a split: tars, or if there are none the image files below `root`. notes: for the log."""

    root: Path
    tars: list[Path]
    notes: list[str]

    @classmethod
    def of_folder(cls, listing: Listing, tars: list[Path], notes: list[str]) -> "SplitFiles":
        """Returns what is read in a folder: these tars, or if there are none its images. Notes images beside tars."""
        if tars:
            unread = count_images([*listing.images, *listing.others])
            notes = [*notes, *note_unread(unread, f" beside the tars in {str(listing.path)!r}")]
        return cls(listing.path, tars, notes)


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
        raise ValueError(f"--data_path {str(path)!r} is not a folder{advise(path)}; {LAYOUT}")
    by_split: dict[str | None, list[str]] = defaultdict(list)
    for name in listing.folders:
        by_split[split_of(name)].append(name)
    for name in listing.tars:
        by_split[split_of_tar(name)].append(name)
    no_split = by_split.pop(None, [])
    chosen = choose_split(by_split, split, labelled)
    if chosen is None:
        if labelled:
            expected = listing.path / split
            advice = advise_in(path) or f"; expected are {expected}/<class>/*.jpg, or tars named like {split}-0.tar"
            raise MissingSplit(f"--data_path {str(path)!r} has no folder {split}/{advice}")
        if by_split:
            names_of_splits = [name for names in by_split.values() for name in names]
            advice = f"give {str(path / names_of_splits[0])!r} itself to train on it"
            raise MissingSplit(f"--data_path {str(path)!r} holds {shorten(names_of_splits)}, but no {split}: {advice}")
        return SplitFiles.of_folder(listing, listing.readable_tars(), check_split_words(listing))

    names = by_split[chosen]
    folders = [name for name in names if name in listing.folders]
    if not folders:
        notes = note_stand_in(shorten(names), chosen, split)
        return SplitFiles.of_folder(listing, [listing.path / name for name in names], notes)
    folder = folders[0]
    if len(folders) > 1:
        raise ValueError(f"--data_path {str(path)!r} holds {' and '.join(folders)} for {chosen}: rename all but one")
    classes: list[str] = []
    if len(by_split) == 1:
        classes = [name for name in no_split if name in listing.folders and list_images(path, name, Counter())]
    if classes:
        problem = f"{folder}/ may be a split or a class beside images in {shorten(classes)}"
        advice = f"give {str(path / folder)!r}, or move all classes into a folder {chosen}/"
        raise ValueError(f"--data_path {str(path)!r}: {problem}; {advice}")
    notes = note_stand_in(f"{folder}/", chosen, split)
    others = [name for name in no_split if name in listing.folders]
    if others and not labelled:
        notes.append(f"note: {shorten(others)} in {str(path)!r} is not read: only {folder}/ is")
    split_listing = list_folder(path / folder)
    return SplitFiles.of_folder(split_listing, split_listing.readable_tars(), notes)


def check_split_words(listing: Listing) -> list[str]:
    """Returns a warning if folders have words of two splits in their names, such as train2017/ and val2017/.

    ValueError if all folders have such words.
    """
    by_split: dict[str | None, list[str]] = defaultdict(list)
    for name in listing.folders:
        by_split[split_of_tar(name)].append(name)
    has_others = by_split.pop(None, None) is not None
    if len(by_split) < 2:
        return []
    named = [name for names in by_split.values() for name in names]
    message = f"--data_path {str(listing.path)!r} holds {shorten(sorted(named))}"
    if not has_others:
        raise ValueError(f"{message}: rename them to train and val, or give one")
    return [f"warning: {message}, which are read as classes: if they are splits, give one of them"]


def refuse_splits_below(root: Path, name: str, images: Sequence[str]) -> None:
    """ValueError if the folder `name` of `root` holds folders of two splits. images: below it, relative to `root`."""
    subfolders = dict.fromkeys(image.split(os.sep)[1] for image in images if image.count(os.sep) > 1)
    splits = [subfolder for subfolder in subfolders if split_of(subfolder)]
    if len({split_of(subfolder) for subfolder in splits}) > 1:
        below = shorten([f"{name}/{subfolder}" for subfolder in splits])
        raise ValueError(
            f"--data_path {str(root)!r} holds {below}, which would be mixed: give {str(root / name)!r}, or a folder of "
            "links to the images of one split"
        )


class Samples(NamedTuple):
    """The images of a folder: (path relative to it, label). notes: on files that are not read, for the log."""

    classes: list[str]
    samples: list[tuple[str, int]]
    notes: list[str]


def find_samples(data_path: str | Path, labelled: bool = False) -> Samples:
    """Returns the images in its class folders, or those directly in it.

    ValueError if it holds both or no images, if a class is empty, or, with `labelled`, if there are no classes.
    """
    root = Path(data_path)
    if not root.is_dir():
        raise ValueError(f"--data_path {str(root)!r} is not a folder{advise(root)}; {LAYOUT}")
    listing = list_folder(root)
    unread = count_unread(listing.others)
    if not listing.images:
        del unread[""]  # of no interest beside folders
    images_of: dict[str, list[str]] = {}
    empty: list[str] = []
    for name in listing.folders:
        images = list_images(root, name, unread)
        refuse_splits_below(root, name, images)
        if images:
            images_of[name] = images
        else:
            empty.append(name)
    notes = note_unread(unread)
    also = "".join(f" ({note})" for note in notes)
    if images_of and listing.images:
        problem = f"images directly ({shorten(listing.images)}) beside folders of images ({shorten([*images_of])})"
        raise ValueError(f"--data_path {str(root)!r} holds {problem}: move one of them away")
    if images_of and empty:
        problem = f"no valid file for the classes {shorten(empty, 10)}{also}"
        raise ValueError(f"in --data_path {str(root)!r} is {problem}: remove them, or put images into them")
    if not images_of and not listing.images:
        raise ValueError(f"--data_path {str(root)!r} holds no image{also}{advise_in(root)}; {LAYOUT}")
    if labelled and not images_of:
        raise ValueError(f"{str(root)!r} holds no class folders, so there are no labels; expected is {root}/<class>/*")
    refuse_two_spellings(root, [*images_of])
    samples = [(image, 0) for image in listing.images]
    for label, images in enumerate(images_of.values()):
        samples += [(image, label) for image in images]
    return Samples([*images_of], samples, notes)


def spelling(name: str) -> str:
    """Returns a name in the form of Unicode that names are compared in. Macs write other forms of accents."""
    return unicodedata.normalize("NFC", name)


def refuse_two_spellings(root: Path, names: Sequence[str]) -> None:
    """ValueError if two names of class folders differ in the form of Unicode alone."""
    first: dict[str, str] = {}
    for name in names:
        if spelling(name) in first:
            both = f"{ascii(first[spelling(name)])} and {ascii(name)}"
            raise ValueError(f"--data_path {str(root)!r} holds {both}, two spellings of one class: merge the folders")
        first[spelling(name)] = name


def list_images(root: Path, name: str, unread: Counter[str]) -> list[str]:
    """Returns the images in ROOT/`name` and all folders below it, relative to ROOT, in torchvision's order.

    name: "" for all of ROOT.

    Links are followed, but each folder is read once. So a link that leads back to a parent folder ends.
    unread: counts the files that are not read.
    """
    seen: set[str] = set()
    if name:
        seen.add(os.path.realpath(root))
    found: list[tuple[str, list[str]]] = []
    for path, folders, files in os.walk(os.path.join(root, name), onerror=raise_error, followlinks=True):
        real = os.path.realpath(path)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(folder for folder in folders if not is_hidden(folder))
        images = []
        others = []
        for file in sorted(files):
            if is_hidden(file):
                continue
            if is_image(file):
                images.append(file)
            else:
                others.append(file)
        unread.update(count_unread(others))
        found.append((os.path.relpath(path, root), images))
    found.sort()
    return [os.path.normpath(os.path.join(folder, image)) for folder, images in found for image in images]


def raise_error(error: OSError) -> None:
    """Makes `os.walk` raise: by default it leaves out folders that cannot be read."""
    raise error


# ------------------------------------------------------------------------------------------------------------ advice


def advise(path: Path) -> str:
    """Returns what to do about a file that is not read in place, or ""."""
    name = path.name.lower()
    if name.endswith(ARCHIVES):
        return f": unpack {path.name} and give the folder"
    if name.endswith(HUGGING_FACE):
        return f": {path.name} is a file of Hugging Face datasets, whose folder --dataset hf reads"
    if name == PACKING:
        return ": its shards are unfinished, run the same pack_dataset.py command again"
    return ""


def advise_in(folder: Path) -> str:
    """Returns what to do about the first file in a folder that is not read in place, or ""."""
    for pattern in ("*", "*/*.parquet", "*/*.arrow"):
        for path in sorted(folder.glob(pattern)):
            advice = advise(path)
            if advice:
                return advice
    return ""


def refuse_inside_data(flag: str, path: str | Path, dataset: str, data_path: str | Path) -> None:
    """ValueError if the `path` that `flag` gives lies between images, where it would become data.

    dataset: the value of --dataset. Only "folder" and "hf" read what lies in their folder, whatever its name is.
    """
    if dataset not in ("folder", "hf"):
        return
    root = Path(data_path).resolve()
    place = Path(path).resolve()
    if not root.is_dir() or not place.is_relative_to(root):
        return
    folders: Sequence[Path] = [(root / name).resolve() for name in list_folder(root).folders if split_of(name)]
    for folder in folders or [root]:
        if place.is_relative_to(folder):
            raise ValueError(f"{flag} {str(path)!r} lies inside the image folder {str(folder)!r}: choose another place")
