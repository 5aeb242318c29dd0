"""An index over tars of images, made once: WebDataset shards, a tar a class, or ImageNet's tar of tars.

Nothing is extracted: headers are walked, and images are later read where they lie (`util.data.packed`). A label is, in this
order: the number in the `.cls` beside the image; the name of the inner tar, or of the tar where that is a WordNet id;
the first folder below what all images' folders have in common. If the folders inside say train, val or test, one split
is read. Hidden members are ignored. So are links, devices, sparse files, and names that lead out of the tar.
"""

import hashlib
import os
import re
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from torchvision.datasets.folder import IMG_EXTENSIONS

from util.data import packed
from util.data.folders import (
    Listing,
    counted,
    find_folder,
    is_hidden,
    is_image,
    list_folder,
    readable_splits,
    refuse_archive,
    refuse_two_names,
    shorten,
    split_of,
    split_of_tar,
    stand_in_notes,
)

RULE = 2  # which members are read, and for which split; an index that was made by another rule is made again
SPECIAL = "links, devices, sparse files, or names that lead out of the tar"
_MOST_CLASSES = 1_000_000

Found = tuple[int, str | int | None, int, int, PurePosixPath]  # an image: tar, label, offset, size, name


class Choice(NamedTuple):
    """The tars to read for a split. With `by_folders` the split must be told by the folders inside them."""

    tars: list[Path]
    by_folders: bool = False
    notes: Sequence[str] = ()


def find_tars(data_path: str | Path, split: str, labelled: bool = False) -> list[Path]:
    """The tars that `choose_tars` chooses; none where packed images or files are to be read."""
    return choose_tars(data_path, split, labelled).tars


def choose_tars(data_path: str | Path, split: str, labelled: bool = False) -> Choice:
    """The tars of a split, sorted: those in ROOT/<split>/, or those in ROOT whose names say the split.

    Class folders and image files come before tars, unless a tar's name says the split. Where no name says one, or
    `data_path` is a tar itself, they are all read; for `labelled` images, folders inside must then separate the splits.
    """
    path = Path(data_path)
    refuse_archive(path)
    if path.is_file() and path.suffix == ".tar":
        return Choice([path], by_folders=labelled and split_of_tar(path.name) not in readable_splits(split))
    if not path.is_dir():
        return Choice([])
    listing, by_name = list_folder(path), {}
    for tar in _tars_of(listing):
        by_name.setdefault(split_of_tar(tar.name), []).append(tar)
    for name in readable_splits(split, fall_back=not labelled):
        if (folder := find_folder(listing, name)) is not None:
            inside = list_folder(path / folder)
            tars = [] if inside.folders or inside.images else _tars_of(inside)
            return Choice(tars, notes=stand_in_notes(f"{folder}/", name, split))
        if tars := by_name.get(name):
            return Choice(tars, notes=stand_in_notes(shorten([tar.name for tar in tars]), name, split))
    if listing.folders or listing.images:
        return Choice([])
    if by_name.keys() - {None}:
        raise ValueError(_no_tars_of(path, split, labelled, by_name))
    return Choice(by_name.get(None, []), by_folders=labelled)


def _tars_of(listing: Listing) -> list[Path]:
    return [tar for name in listing.tars if (tar := listing.path / name).is_file()]


def _no_tars_of(path: Path, split: str, labelled: bool, by_name: dict[str | None, list[Path]]) -> str:
    """The message for a folder whose tars' names say other splits than the wanted one."""
    others = {name: shorten([tar.name for tar in tars]) for name, tars in by_name.items()}
    found = "; ".join(f"{'no split' if name is None else name}: {tars}" for name, tars in others.items())
    way_out = "" if labelled else ", or give the path of one tar to read it alone"
    what = f"--data_path {str(path)!r} holds no tar whose name says {split} (names that say {found})"
    return f"{what}. Rename the tars to read, to {split}-0.tar for example{way_out}"


def open_tars(
    tars: Sequence[Path],
    split: str = "train",
    labelled: bool = False,
    by_folders: bool = False,
) -> packed.PackedImages:
    """The images of these tars, whose index is made if it is not there, damaged or out of date.

    It lies beside the tars, or where nothing can be written there in the user's cache; ValueError if nowhere, or, with
    `by_folders`, if no folders inside separate the splits.
    """
    root = tars[0].parent
    stats = [(tar.name, tar.stat()) for tar in tars]
    stamp = {"rule": RULE, "tars": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]}
    name = "index-" + _digest([split, *(tar.name for tar in tars)])
    folders = [root / ".prmim" / name, _cache() / _digest(root.resolve()) / name]
    folder = next((folder for folder in folders if _is_current(folder, stamp)), None)
    if folder is None:
        folder = _write_index(folders, tars, split, stamp)
    images = packed.PackedImages(folder, root)
    inside = images.content["split_inside"]
    if labelled and (by_folders or inside) and inside not in readable_splits(split):
        raise ValueError(_not_separated(tars, split, inside))
    if labelled and not images.classes:
        raise ValueError(f"the images of {_name(tars)} have no labels: add a .cls for each, or use class folders")
    return images


def _is_current(folder: Path, stamp: dict) -> bool:
    """Whether the index in `folder` can be used, and was made of these tars by the rule of today."""
    try:
        return packed.read_index(folder)[0].get("stamp") == stamp
    except ValueError:
        return False


def _write_index(folders: Sequence[Path], tars: Sequence[Path], split: str, stamp: dict) -> Path:
    """Indexes the tars into the first of the folders that can be written; ValueError if none can."""
    root = tars[0].parent
    print(f"indexing {counted(len(tars), 'tar')} in {root}, once", flush=True)
    rows, classes, facts = index_tars(tars, split)
    shards, problems = [{"name": tar.name, "size": tar.stat().st_size} for tar in tars], []
    for folder in folders:
        try:
            packed.write_index(folder, packed.records(rows), shards, classes, stamp=stamp, **facts)
        except OSError as error:
            problems.append(str(error))
        else:
            return folder
    raise ValueError(f"the index of {str(root)!r} cannot be written: {'; '.join(problems)}")


def _not_separated(tars: Sequence[Path], split: str, inside: str | None) -> str:
    """The message for tars in which labelled images of one split are to be found, and are not told from others."""
    found = f"only {inside}/" if inside else "no such folders"
    return (
        f"labelled images of {split} are needed, but nothing tells them from others: inside {_name(tars)} are {found}. "
        "--data_path must be a tar with train/ and val/ inside, or a folder with tars whose names say train and val "
        "(train-0.tar, val-0.tar) or that lie in train/ and val/"
    )


def _name(tars: Sequence[Path]) -> str:
    return repr(str(tars[0])) if len(tars) == 1 else f"the tars in {str(tars[0].parent)!r}"


def _digest(content: object) -> str:
    return hashlib.sha256(str(content).encode()).hexdigest()[:12]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prmim"


def index_tars(tars: Sequence[Path], split: str = "train") -> tuple[list[tuple], list[str], dict]:
    """-> (rows for `packed.records`, classes, facts for the index); ValueError names a tar that cannot be read.

    facts: {"split_inside": the split whose folder inside is read, or None, "notes": sentences on what is ignored}.
    """
    found, ignored = [], Counter()
    for shard, path in enumerate(tars):
        label = path.stem if _is_wordnet_id(path.stem) else None
        try:
            with open(path, "rb") as file:
                images = _walk(file, 0, path.stat().st_size, label, ignored)
        except (tarfile.TarError, OSError, ValueError) as error:
            what = f"{str(path)!r} cannot be read as a tar: {error}"
            raise ValueError(f"{what}. Fetch it again, if it is damaged; a compressed one must be unpacked") from error
        found += [(shard, *image) for image in images]
    if not found:
        raise ValueError(f"no image is in {_name(tars)}; extensions {', '.join(IMG_EXTENSIONS)}")
    found, inside, notes = _of_split(found, split, _name(tars))
    notes += [f"ignored: {counted(number, 'member')} of the tars: {kind}" for kind, number in sorted(ignored.items())]
    labels = _folder_labels(found)
    if len({type(label) for label in labels}) > 1:
        kinds = {type(label): (shard, name) for label, (shard, _, _, _, name) in zip(labels, found, strict=True)}
        examples = ", ".join(f"{str(name)!r} in {tars[shard].name}" for shard, name in kinds.values())
        raise ValueError(f"the images are not labelled alike (a .cls each, a folder or tar each, or none): {examples}")
    if isinstance(labels[0], int):
        names = range(max(labels) + 1)
    else:
        names = sorted({label for label in labels if label is not None})
    rank = {label: k for k, label in enumerate(names)} | {None: 0}
    rows = [
        (shard, rank[label], offset, size, 0, os.fsencode(str(name)))
        for label, (shard, _, offset, size, name) in zip(labels, found, strict=True)
    ]
    return rows, [str(name) for name in names], {"split_inside": inside, "notes": notes}


def _of_split(found: list[Found], split: str, what: str) -> tuple[list[Found], str | None, list[str]]:
    """-> (the images of `split`, the split whose folder they lie in, notes). All images, None where no folder says one.

    ValueError where the folders say other splits alone, or two folders the same.
    """
    folders = [image[-1].parent.parts for image in found]
    common, marks = _common(folders), _split_folders(folders)
    by_split = {}
    for mark in sorted(set(marks) - {None}):
        by_split.setdefault(split_of(mark), []).append(mark)
    beside = {parts[common] for parts, mark in zip(folders, marks, strict=True) if mark is None and parts[common:]}
    chosen = next((name for name in readable_splits(split, fall_back=True) if name in by_split), None)
    if not by_split:
        return found, None, []
    if chosen is None:
        names = " and ".join(f"{name}/" for names in by_split.values() for name in names)
        raise ValueError(f"inside {what} is {names}, but no {split}/: unpack it, and give the folder to read")
    if len(by_split[chosen]) > 1:
        refuse_two_names(what, chosen, by_split[chosen])
    folder = by_split[chosen][0]
    if len(by_split) == 1 and beside:  # train is a class, too
        others = ", ".join(f"{name}/" for name in sorted(beside)[:3])
        return found, None, [f"{folder}/ in the tar is read as a class, because {others} lies beside it"]
    notes, number = stand_in_notes(f"{folder}/ in the tar", chosen, split), marks.count(None)
    if number:
        notes.append(f"ignored: {counted(number, 'image')} of the tars beside {folder}/")
    return [image for image, mark in zip(found, marks, strict=True) if mark == folder], chosen, notes


def _split_folders(folders: Sequence[tuple[str, ...]]) -> list[str | None]:
    """Of each image the folder that says its split, or None.

    That is the first one below the folders that all images share. Where it is missing for some images, only the first
    level counts, and the shared folders where it is missing for all.
    """
    common = _common(folders)
    marks = [next(filter(split_of, parts[common:]), None) for parts in folders]
    if None in marks:
        marks = [next(filter(split_of, parts[common : common + 1]), None) for parts in folders]
    if not any(marks):
        marks = [next(filter(split_of, reversed(folders[0][:common])), None)] * len(folders)
    return marks


def _common(folders: Sequence[tuple[str, ...]]) -> int:
    """How many leading parts all of these paths share."""
    return len(os.path.commonprefix([*folders]))


def _folder_labels(found: Sequence[Found]) -> list[str | int | None]:
    """Labels of the images. Where they have none, the first folder below those that all such images share."""
    bare = [name.parent.parts for _, label, _, _, name in found if label is None]
    common = _common(bare) if bare else 0
    if bare and len(set(bare)) == 1:  # all in one folder, which then is the class
        common = max(0, common - 1)
    by_folder = [next(iter(name.parent.parts[common:]), None) for *_, name in found]
    return [folder if label is None else label for (_, label, *_), folder in zip(found, by_folder, strict=True)]


def _walk(file: BinaryIO, base: int, end: int, label: str | None, ignored: Counter, inner: bool = False) -> list[tuple]:
    """-> [(label or None, offset, size, path)] of the images in the tar from byte `base` to `end`.

    label: of images that have no number. ignored: counts the members that are left out, by kind.
    """
    images, numbers, nested, position = [], {}, [], base - 1
    if end <= base:
        raise tarfile.TarError("it is empty")
    file.seek(base)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # or each of a million headers would stay
            if member.size < 0 or member.offset <= position or member.offset_data + member.size > end:
                raise tarfile.TarError(f"{member.name!r} does not lie inside it")
            name, position = PurePosixPath(member.name), member.offset
            if member.isdir():
                continue
            if any(map(is_hidden, name.parts)):
                if is_image(name.name):
                    ignored["hidden names"] += 1
            elif not member.isreg() or member.issparse() or name.is_absolute() or ".." in name.parts:
                ignored[SPECIAL] += 1
            elif name.suffix == ".tar" and not inner:
                first = member.offset_data
                nested += _walk(file, first, first + member.size, name.stem, ignored, inner=True)
            elif name.suffix == ".cls":
                numbers[_key(name)] = _number(file, member)
            elif is_image(name.name):
                images.append((name, member.offset_data, member.size))
        # tarfile takes a file that was cut short for one that ends there, and stops where a second one was appended.
        tail = os.pread(file.fileno(), min(end - tar.offset, 1 << 16), tar.offset)
        if len(tail) < tarfile.BLOCKSIZE or tail.strip(tarfile.NUL):
            raise tarfile.TarError("it has no end mark, or more behind it: it was cut short, or made of several")
    if numbers:  # of a WebDataset sample, `x.jpg` is the image, and `x.mask.png` something else
        images = [image for image in images if image[0].name.count(".") == 1]
    return [(numbers.get(_key(name), label), *place, name) for name, *place in images] + nested


def _number(file: BinaryIO, member: tarfile.TarInfo) -> int:
    """The number of a class that a `.cls` holds."""
    text = os.pread(file.fileno(), min(member.size, 20), member.offset_data).strip()
    if not text.isdigit() or member.size > 20 or int(text) >= _MOST_CLASSES:
        raise tarfile.TarError(f"{member.name!r} holds {text!r}, which is not the number of a class")
    return int(text)


def _key(name: PurePosixPath) -> PurePosixPath:
    """What the files of one WebDataset sample have in common: the path up to the first dot of its last part."""
    return name.with_name(name.name.split(".")[0])


def _is_wordnet_id(stem: str) -> bool:
    return re.fullmatch(r"n\d{8}", stem) is not None
