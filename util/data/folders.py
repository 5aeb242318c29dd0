"""Folders of images: which names say a split, which entries are never read, which files are the images.

Names, labels and order are those of torchvision's ImageFolder.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

# The one rule for folders, for folders inside tars and, word by word, for the names of tars. Lower case.
SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
SYSTEM_FOLDERS = ("__MACOSX", "@eaDir")  # what macOS and Synology leave
ARCHIVES = (".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".tar.zst", ".tzst", ".zip")
LAYOUT = (
    "expected are images in class folders (ROOT/train/<class>/*.jpg or ROOT/<class>/*.jpg) or directly in ROOT, tars, "
    f"or what pack_dataset.py has written; extensions {', '.join(IMG_EXTENSIONS)}"
)


def split_of(folder: str) -> str | None:
    """The split that a folder's name says: train, val or test."""
    return next((split for split, names in SPLIT_NAMES.items() if folder.lower() in names), None)


def split_of_tar(file_name: str) -> str | None:
    """The split that a tar's name says by one of its words. Words of two splits, as in train_val.tar, say none."""
    splits = {split_of(word) for word in re.findall("[a-z]+", file_name.lower())} - {None}
    return splits.pop() if len(splits) == 1 else None


def readable_splits(split: str, fall_back: bool = False) -> tuple[str, ...]:
    """The splits that may be read where `split` is asked for, best first.

    test stands in for val. With `fall_back`, for images that need no labels, train does so, too.
    """
    if split != "val":
        return (split,)
    return ("val", "test", "train") if fall_back else ("val", "test")


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is never read."""
    return (name.startswith(".") and name not in (".", "..")) or name in SYSTEM_FOLDERS


def is_image(name: str) -> bool:
    """Whether a file's name ends as an image's does."""
    return name.lower().endswith(IMG_EXTENSIONS)


def counted(number: int, noun: str) -> str:
    """The number and the noun: 1 image, 2 images."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shorten(names: Sequence[str], most: int = 3) -> str:
    """The first names, separated by commas."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


@dataclass(frozen=True)
class Listing:
    """The entries of a folder by kind, sorted. `hidden` are hidden folders and images; other files are in no list."""

    path: Path
    folders: list[str]
    links: frozenset[str]  # those of the folders that are symbolic links
    images: list[str]
    tars: list[str]
    archives: list[str]
    hidden: list[str]


def list_folder(path: Path) -> Listing:
    """Reads the names in a folder once."""
    kinds: dict[str, list[str]] = {kind: [] for kind in ("folders", "images", "tars", "archives", "hidden")}
    links = set()
    with os.scandir(path) as entries:
        for entry in entries:
            name, is_folder = entry.name, _is_folder(entry)
            if is_hidden(name):
                if is_folder or is_image(name):
                    kinds["hidden"].append(name)
            elif is_folder:
                kinds["folders"].append(name)
                if entry.is_symlink():
                    links.add(name)
            elif is_image(name):
                kinds["images"].append(name)
            elif name.endswith(".tar"):
                kinds["tars"].append(name)
            elif name.lower().endswith(ARCHIVES):
                kinds["archives"].append(name)
    for names in kinds.values():
        names.sort()
    return Listing(path=path, links=frozenset(links), **kinds)


def _is_folder(entry: os.DirEntry) -> bool:
    """As os.walk asks: an entry that cannot be looked at, a link to itself for example, is a file."""
    try:
        return entry.is_dir()
    except OSError:
        return False


@dataclass
class Ignored:
    """What a search for images has left out."""

    hidden: list[str] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """A sentence for each kind."""
        notes = []
        if self.hidden:
            notes.append(f"ignored: {counted(len(self.hidden), 'hidden path')} ({shorten(self.hidden)})")
        if self.loops:
            count = counted(len(self.loops), "link")
            notes.append(f"not followed: {count} back to a parent folder ({shorten(self.loops)})")
        if self.closed:
            notes.append(f"ignored: {counted(len(self.closed), 'unreadable folder')} ({shorten(self.closed)})")
        return notes


def walk(root: Path, folder: str, ignored: Ignored) -> Iterator[tuple[str, list[str]]]:
    """Yields (folder, its images) for the entry `folder` of ROOT and all folders below, relative to ROOT, in any order.

    Links are followed, except back to a folder on the way: that would never end.
    """
    stack = [(folder, (root / folder).is_symlink(), os.path.realpath(root), ())]
    while stack:
        name, is_link, parent, links = stack.pop()  # links: the real folders in which the links on the way lie
        real = os.path.join(parent, os.path.basename(name))
        if is_link:
            real, links = os.path.realpath(root / name), (*links, parent)
            if leads_back(real, links):
                ignored.loops.append(name)
                continue
        try:
            listing = list_folder(root / name)
        except PermissionError:
            ignored.closed.append(name)
            continue
        yield name, listing.images
        ignored.hidden += [os.path.join(name, hidden) for hidden in listing.hidden]
        stack += [(os.path.join(name, below), below in listing.links, real, links) for below in listing.folders]


def leads_back(target: str, trail: Sequence[str]) -> bool:
    """Whether a link's target is one of these real folders, or a parent of one."""
    return any(os.path.commonpath([target, folder]) == target for folder in trail)


def find_images(root: Path, folder: str, ignored: Ignored) -> list[str]:
    """The images of ROOT/folder at any depth, relative to ROOT, in the order of torchvision's make_dataset."""
    found = sorted(walk(root, folder, ignored))
    return [os.path.join(name, image) for name, images in found for image in images]


def holds_images(root: Path, folder: str) -> bool:
    """Whether ROOT/folder holds an image at any depth."""
    return any(images for _, images in walk(root, folder, Ignored()))


def split_folders(listing: Listing) -> dict[str, list[str]]:
    """{split: the folders whose names say it}."""
    found: dict[str, list[str]] = {}
    for name in listing.folders:
        if split := split_of(name):
            found.setdefault(split, []).append(name)
    return found


def find_folder(listing: Listing, split: str) -> str | None:
    """The folder whose name says `split`; ValueError if there are two. Links to one and the same folder are one."""
    names = split_folders(listing).get(split, [])
    if len({os.path.realpath(listing.path / name) for name in names}) > 1:
        refuse_two_names(f"--data_path {str(listing.path)!r}", split, names)
    return names[0] if names else None


def find_split(listing: Listing, split: str, fall_back: bool = False) -> tuple[str | None, list[str]]:
    """-> (the folder to read where `split` is asked for, or None; notes)."""
    for name in readable_splits(split, fall_back):
        if (folder := find_folder(listing, name)) is not None:
            return folder, stand_in_notes(f"{folder}/", name, split)
    return None, []


def refuse_two_names(where: str, split: str, folders: Sequence[str]) -> None:
    """Raises the ValueError for two folders of one split."""
    names = " and ".join(f"{name}/" for name in folders)
    raise ValueError(f"there is more than one folder of {split} in {where}: {names}. Keep one, and rename the rest")


def stand_in_notes(what: str, chosen: str, split: str) -> list[str]:
    """A note if the split that is read is not the one that was asked for."""
    return [] if chosen == split else [f"{what} stands in for {split}, which is not there"]


def find_root(data_path: str | Path, split: str, labelled: bool = False) -> tuple[Path, list[str]]:
    """-> (folder whose class folders or images are read, notes): the split's folder in `data_path`, or `data_path`.

    An empty `split` is for `data_path` itself. ValueError if the folder is missing, or if it is unclear which is meant.
    """
    root = Path(data_path)
    refuse_archive(root)
    if not root.is_dir():
        raise ValueError(f"--data_path {str(data_path)!r} is not a folder; {LAYOUT}")
    if not split:
        return root, []
    listing, what = list_folder(root), f"--data_path {str(data_path)!r}"
    found, (folder, notes) = split_folders(listing), find_split(listing, split, fall_back=not labelled)
    if folder is None and labelled:
        missing = f"{split}/{_archives_in(listing)}"
        raise ValueError(f"{what} has no folder {missing}; expected is {root / split}/<class>/*.jpg")
    if folder is None and found:
        refuse_other_split(what, root, split, found)
    if folder is None:
        refuse_words_of_splits(what, listing)
        return root, []
    if len(found) == 1:
        refuse_possible_class(what, listing, folder)
    if listing.images:
        images = f"{counted(len(listing.images), 'image')} beside {folder}/ ({shorten(listing.images)})"
        notes = [*notes, f"ignored: {images}"]
    return root / folder, notes


def _archives_in(listing: Listing) -> str:
    """What to do about compressed archives in a folder, for the message that it lacks images."""
    return f" but compressed archives ({shorten(listing.archives)}): unpack them" if listing.archives else ""


def refuse_other_split(what: str, root: Path, split: str, found: Mapping[str, Sequence[str]]) -> None:
    """Raises the ValueError for a folder that holds splits, but not the one asked for."""
    names = [name for names in found.values() for name in names]
    paths = " or ".join(repr(str(root / name)) for name in names)
    raise ValueError(
        f"{what} holds {' and '.join(f'{name}/' for name in names)}, but no {split}/. Give {paths} itself to train on "
        f"it, or put the images to train on below {str(root / split)!r}"
    )


def refuse_possible_class(what: str, listing: Listing, folder: str) -> None:
    """ValueError if folders beside the only split's folder hold images, because `folder` may then be a class."""
    others = [name for name in listing.folders if split_of(name) is None]
    filled = [name for name in others if holds_images(listing.path, name)]
    if filled:
        beside = ", ".join(f"{name}/" for name in filled[:3]) + (", ..." if len(filled) > 3 else "")
        raise ValueError(
            f"{what} holds {folder}/ beside other folders with images ({beside}): {folder}/ may be a split or a class. "
            f"To read {folder}/ alone, give {str(listing.path / folder)!r} itself; to read all of them as classes, "
            f"put them below a folder {split_of(folder)}/"
        )


def refuse_words_of_splits(what: str, listing: Listing) -> None:
    """ValueError if all folders with images have names such as train2017/ and val_images/, of more than one split."""
    worded = {name: split for name in listing.folders if (split := split_of_tar(name))}
    if len(set(worded.values())) < 2:
        return
    others = [name for name in listing.folders if name not in worded]
    if not any(holds_images(listing.path, name) for name in others):
        raise ValueError(
            f"{what} holds {shorten([f'{name}/' for name in worded])}, whose names say more than one split: give one of "
            f"them itself, or rename them to train/ and val/ to have them read as splits"
        )


def refuse_archive(path: Path) -> None:
    """ValueError if the path is a compressed archive."""
    if path.name.lower().endswith(ARCHIVES) and path.is_file():
        unpack = "unzip -d FOLDER" if path.suffix.lower() == ".zip" else "tar -C FOLDER -xf"
        raise ValueError(
            f"--data_path {str(path)!r} is a compressed archive, which cannot be read in place: unpack it "
            f"(mkdir FOLDER && {unpack} {path.name}) and give FOLDER. A .tar that is not compressed is read as it is"
        )


def find_samples(root: Path, labelled: bool = False) -> tuple[list[str], list[tuple[str, int]], list[str]]:
    """-> (classes, [(path relative to ROOT, label)], notes) of class folders in `root`, or of images directly in it.

    ValueError if there are both, no image, a class without images, or, with `labelled`, no classes.
    """
    listing, what = list_folder(root), f"--data_path {str(root)!r}"
    ignored = Ignored(hidden=[*listing.hidden])
    folders = {name: find_images(root, name, ignored) for name in listing.folders}
    folders = {name: images for name, images in folders.items() if name not in ignored.loops}
    filled, empty = [name for name in folders if folders[name]], [name for name in folders if not folders[name]]
    if filled and listing.images:
        raise ValueError(
            f"{what} holds {counted(len(listing.images), 'image')} directly ({shorten(listing.images)}) beside "
            f"{counted(sum(map(len, folders.values())), 'image')} in folders ({shorten(filled)}): "
            f"move those elsewhere that are not to be read"
        )
    if filled and empty:
        raise ValueError(
            f"in {what}: no valid file for the classes {shorten(empty, 10)}; remove these folders, or put images into "
            f"them (extensions {', '.join(IMG_EXTENSIONS)})"
        )
    if filled:
        samples = [(path, label) for label, images in enumerate(folders.values()) for path in images]
        return filled, samples, ignored.notes()
    if not listing.images:
        raise ValueError(f"{what} holds no image{_archives_in(listing)}; {LAYOUT}")
    if labelled:
        what = f"{str(root)!r} holds no class folders"
        raise ValueError(f"{what}, so there are no labels; expected is {root}/<class>/*.jpg")
    notes = ignored.notes()
    if empty:
        notes.append(f"ignored: {counted(len(empty), 'folder')} without images ({shorten(empty)})")
    return [], [(name, 0) for name in listing.images], notes
