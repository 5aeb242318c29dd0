"""Folders of images: the folder of a split, the entries that are ignored, the files that are read.

Names, labels and order are those of torchvision's ImageFolder. Beside its extensions, `.npy` is one of an image.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from util.data.splits import (
    choose_split,
    group_by_split,
    only_name,
    split_of,
    split_of_tar,
    stand_in_notes,
)
from util.text import count_of, shorten

TORCHVISION_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
ARRAY = ".npy"
IMG_EXTENSIONS = (*TORCHVISION_EXTENSIONS, ARRAY)
SYSTEM_FOLDERS = ("__MACOSX", "@eaDir")  # made by macOS and by Synology
ARCHIVES = (".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".tar.zst", ".tzst", ".zip")
HIDDEN, LOOP = "hidden path", "looping link"  # kinds of ignored paths
PACKING = ".packing"  # unfinished shards of pack_dataset.py
HUGGING_FACE = ("dataset_dict.json", "state.json", "*.parquet", "*.arrow", "*/*.parquet", "*/*.arrow")
DEFAULT_PATH = "data"  # of --data_path
LAYOUT = (
    "expected are images in class folders (ROOT/train/<class>/*.jpg or ROOT/<class>/*.jpg), images directly in ROOT, "
    f"or tars; extensions {', '.join(IMG_EXTENSIONS)}"
)

Ignored = defaultdict[str, list[str]]  # {kind: paths that a search for images has ignored}


def is_hidden(name: str) -> bool:
    """Whether files and folders of this name are ignored."""
    return (name.startswith(".") and name not in (".", "..")) or name in SYSTEM_FOLDERS


def is_image(name: str) -> bool:
    return name.lower().endswith(IMG_EXTENSIONS)


def drop_attached_arrays(images: Sequence[str]) -> list[str]:
    """Returns the names of images without `.npy` files beside an image of the same stem: they are no images."""
    stems = {os.path.splitext(name)[0] for name in images if name.lower().endswith(TORCHVISION_EXTENSIONS)}
    return [name for name in images if not name.lower().endswith(ARRAY) or os.path.splitext(name)[0] not in stems]


@dataclass
class Listing:
    """The names in a folder by kind, sorted. `hidden` lists hidden folders and images. Other files are in no list."""

    path: Path
    folders: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    tars: list[str] = field(default_factory=list)
    archives: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)


def list_folder(path: Path) -> Listing:
    listing = Listing(path)
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name, is_folder = entry.name, os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()
            if is_hidden(name):
                if is_folder or is_image(name):
                    listing.hidden.append(name)
            elif is_folder:
                listing.folders.append(name)
            elif is_image(name):
                listing.images.append(name)
            elif name.endswith(".tar"):
                listing.tars.append(name)
            elif name.lower().endswith(ARCHIVES):
                listing.archives.append(name)
    listing.images = drop_attached_arrays(listing.images)
    return listing


def ignored_notes(ignored: Ignored) -> list[str]:
    """Returns one sentence for each kind of paths."""
    kinds = [(kind, paths) for kind, paths in sorted(ignored.items()) if paths]
    return [f"ignored: {count_of(len(paths), kind)} ({shorten(paths)})" for kind, paths in kinds]


def walk(root: Path, folder: str, ignored: Ignored) -> Iterator[tuple[str, list[str]]]:
    """Yields (folder, its images), relative to ROOT, for ROOT/`folder` and all folders below it, in any order.

    Follows symbolic links, except those to a folder that the search is already in: they would never end.
    """
    # Each entry: folder, the real path of its parent, the real parents of all links on the way.
    stack: list[tuple[str, str, tuple[str, ...]]] = [(folder, os.path.realpath(root), ())]
    while stack:
        name, parent, trail = stack.pop()
        real = os.path.join(parent, os.path.basename(name))
        if os.path.islink(real):
            real, trail = os.path.realpath(real), (*trail, parent)
            if any(os.path.commonpath([real, place]) == real for place in trail):
                ignored[LOOP].append(name)
                continue
        try:
            listing = list_folder(root / name)
        except PermissionError:
            ignored["unreadable folder"].append(name)
            continue
        yield name, listing.images
        ignored[HIDDEN] += [os.path.join(name, hidden) for hidden in listing.hidden]
        stack += [(os.path.join(name, below), real, trail) for below in listing.folders]


def holds_images(root: Path, folder: str) -> bool:
    """Whether ROOT/`folder` holds an image at any depth."""
    return any(images for _, images in walk(root, folder, defaultdict(list)))


def find_folder(listing: Listing, split: str) -> str | None:
    """Returns the folder of `split`; ValueError if there are two. Two links to one folder count as one."""
    names = group_by_split(listing.folders).get(split, [])
    distinct = {os.path.realpath(listing.path / name): name for name in reversed(names)}
    where = f"--data_path {str(listing.path)!r}"
    return only_name(sorted(distinct.values()), split, where) if distinct else None


def find_split(listing: Listing, split: str, fall_back: bool = False) -> tuple[str | None, list[str]]:
    """Returns (the folder to read if `split` is asked for, or None; notes)."""
    chosen = choose_split(group_by_split(listing.folders), split, fall_back)
    if chosen is None:
        return None, []
    folder = find_folder(listing, chosen)
    return folder, stand_in_notes(f"{folder}/", chosen, split)


def find_root(data_path: str | Path, split: str, labelled: bool = False) -> tuple[Path, list[str]]:
    """Returns (the folder to read, notes): the folder of the split in `data_path`, or `data_path` itself.

    An empty `split` chooses `data_path` itself. ValueError if the folder is missing, or if the choice is ambiguous.
    """
    root, what = Path(data_path), f"--data_path {str(data_path)!r}"
    refuse_archive(root)
    if not root.is_dir():
        reader = "; --dataset hf reads folders of such files" if root.suffix in (".parquet", ".arrow") else ""
        raise ValueError(f"{what} is not a folder{reader}; {LAYOUT}")
    if not split:
        return root, []
    listing = list_folder(root)
    found, (folder, notes) = group_by_split(listing.folders), find_split(listing, split, fall_back=not labelled)
    if folder is None and labelled:
        missing = f"{split}/{_unreadable_data_in(listing)}"
        raise ValueError(f"{what} has no folder {missing}; expected is {root / split}/<class>/*.jpg")
    if folder is None and found:
        names = [name for names in found.values() for name in names]
        paths = " or ".join(repr(str(root / name)) for name in names)
        names_found = " and ".join(f"{name}/" for name in names)
        raise ValueError(f"{what} holds {names_found}, but no {split}/. Give {paths} itself to train on it")
    if folder is None:
        refuse_split_words(what, listing)
        return root, []
    if len(found) == 1:
        refuse_possible_class(what, listing, folder)
    if listing.images:
        images = f"{count_of(len(listing.images), 'image')} beside {folder}/ ({shorten(listing.images)})"
        notes.append(f"ignored: {images}")
    return root / folder, notes


def _unreadable_data_in(listing: Listing) -> str:
    """Returns what to do about data that cannot be read, for the message that a folder lacks images."""
    if listing.archives:
        return f" but compressed archives ({shorten(listing.archives)}): unpack them"
    if (listing.path / PACKING).exists():
        return " but unfinished shards: run the same pack_dataset.py command again"
    if stored := next((path.name for name in HUGGING_FACE for path in listing.path.glob(name)), None):
        return f" but files of Hugging Face datasets ({stored}), which --dataset hf reads"
    return ""


def refuse_possible_class(what: str, listing: Listing, folder: str) -> None:
    """ValueError if the only folder of a split lies beside other folders with images: it may be a class."""
    others = [name for name in listing.folders if split_of(name) is None]
    filled = [f"{name}/" for name in others if holds_images(listing.path, name)]
    if filled:
        advice = f"Give {str(listing.path / folder)!r}, or move all classes into a folder {split_of(folder)}/"
        raise ValueError(f"{what}: {folder}/ may be a split or a class, beside images in {shorten(filled)}. {advice}")


def refuse_split_words(what: str, listing: Listing) -> None:
    """ValueError if the folders with images have names of several splits, such as train2017/ and val_images/."""
    worded = {name: split for name in listing.folders if (split := split_of_tar(name))}
    if len(set(worded.values())) < 2:
        return
    if not any(holds_images(listing.path, name) for name in listing.folders if name not in worded):
        found = f"{shorten([f'{name}/' for name in worded])}, whose names contain more than one split"
        raise ValueError(f"{what} holds {found}: give one of them itself, or rename them to train/ and val/")


def refuse_archive(path: Path) -> None:
    if path.name.lower().endswith(ARCHIVES) and path.is_file():
        unpack = "unzip -d FOLDER" if path.suffix.lower() == ".zip" else "tar -C FOLDER -xf"
        advice = f"unpack it (mkdir FOLDER && {unpack} {path.name}) and give FOLDER"
        raise ValueError(f"--data_path {str(path)!r} is a compressed archive, which cannot be read in place: {advice}")


def refuse_inside_data(flag: str, path: str | Path, data_path: str | Path) -> None:
    """ValueError if the `path` that `flag` gives lies between images, where it would become data."""
    root, place = Path(data_path).resolve(), Path(path).resolve()
    if not place.is_relative_to(root) or not root.is_dir():
        return
    listing = list_folder(root)
    if any(split_of_tar(name) for name in listing.tars):
        return  # only tars whose names say a split are read
    folders = [(root / name).resolve() for name in listing.folders if split_of(name)] or [root]
    inside = [folder for folder in folders if place.is_relative_to(folder)]
    if inside:
        raise ValueError(f"{flag} {str(path)!r} lies inside the image folder {str(inside[0])!r}: choose another place")


def find_samples(root: Path, labelled: bool = False) -> tuple[list[str], list[tuple[str, int]], list[str]]:
    """Returns (classes, [(path relative to ROOT, label)], notes) of ROOT's class folders, or of images directly in it.

    ValueError if ROOT holds both or no images, if a class is empty, or, with `labelled`, if there are no classes.
    """
    listing, what = list_folder(root), f"--data_path {str(root)!r}"
    ignored: Ignored = defaultdict(list, {HIDDEN: [*listing.hidden]})
    folders: dict[str, list[str]] = {}
    for name in listing.folders:
        found = sorted(walk(root, name, ignored))  # in the order of torchvision's make_dataset
        folders[name] = [os.path.join(folder, image) for folder, images in found for image in images]
    filled = [name for name in folders if folders[name]]
    empty = [name for name in folders if not folders[name] and name not in ignored[LOOP]]
    if filled and listing.images:
        direct = f"{count_of(len(listing.images), 'image')} directly ({shorten(listing.images)})"
        raise ValueError(f"{what} holds {direct} beside folders of images ({shorten(filled)}): move one of them away")
    if filled and empty:
        advice = f"remove the folders, or put images into them ({', '.join(IMG_EXTENSIONS)})"
        raise ValueError(f"in {what}: no valid file for the classes {shorten(empty, 10)}; {advice}")
    if filled:
        samples = [(path, label) for label, name in enumerate(filled) for path in folders[name]]
        return filled, samples, ignored_notes(ignored)
    if not listing.images:
        raise ValueError(f"{what} holds no image{_unreadable_data_in(listing)}; {LAYOUT}")
    if labelled:
        what = f"{str(root)!r} holds no class folders"
        raise ValueError(f"{what}, so there are no labels; expected is {root}/<class>/*.jpg")
    notes = ignored_notes(ignored)
    if empty:
        notes.append(f"ignored: {count_of(len(empty), 'folder')} without images ({shorten(empty)})")
    return [], [(name, 0) for name in listing.images], notes
