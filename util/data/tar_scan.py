"""Finds the images in tars by their headers: where each one lies, its name and its label. Nothing is extracted.

Tars may be WebDataset shards, one tar for each class, ImageNet's tar of tars, or shards of `scripts/pack_dataset.py`.
The label of an image is, in this order: the number in the `.cls` member beside it; the name of the inner tar, or of the
tar if that is a WordNet id; the first folder below the folders that all images share. If folders inside a tar are named
train, val or test, one split is read. Hidden members, links, devices, sparse files and names that lead out of the tar
are ignored.
"""

import json
import os
import re
import shlex
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from util.data.folders import IMG_EXTENSIONS, drop_attached_arrays, is_hidden, is_image
from util.data.splits import choose_split, group_by_split, only_name, split_of, stand_in_notes
from util.text import count_of, shorten

MANIFEST = "__prmim__"  # first member of a packed shard, a JSON object; WebDataset skips names of this form
MANIFEST_KEYS = {"command", "quality", "shard_mb", "classes", "num_shards", "shard", "names", "files"}
NO_LABELS = (".json", ".txt", ".csv")  # members that may hold labels, in a form that is not read
SPECIAL = "links, devices, sparse files, or names that lead out of the tar"
MOST_CLASSES = 1_000_000

Manifest = dict[str, Any]
Rows = dict[str, np.ndarray]  # tar int32, label, offset and size int64, name bytes; each [n]


class MemberError(ValueError):
    """A member of a tar cannot be used, but the tar is not damaged."""


class Found(NamedTuple):
    """An image in a tar. label: the number of its class, the name of its class, or None."""

    tar: int
    label: str | int | None
    offset: int
    size: int
    name: PurePosixPath


def scan_tars(tars: Sequence[Path], split: str = "train") -> tuple[Rows, dict[str, Any]]:
    """Returns (rows, content) for an index of these tars; ValueError names a tar that cannot be read.

    content: "classes", "notes", "split_inside" (the split whose folder inside the tars is read, or None), "unread" (the
    extensions of members that may hold labels) and "packed" ("command" and "quality" of pack_dataset.py, or None).
    """
    found: list[Found] = []
    ignored: Counter[str] = Counter()
    beside: Counter[str] = Counter()
    manifests = [read_manifest(path) for path in tars]
    for number, (path, manifest) in enumerate(zip(tars, manifests, strict=True)):
        try:
            with open(path, "rb") as file:
                label = path.stem if re.fullmatch(r"n\d{8}", path.stem) else None  # a WordNet id
                images = _walk(file, 0, path.stat().st_size, number, label, ignored, beside)
            if manifest:
                names = zip(images, manifest["names"], strict=True)
                images = [image._replace(name=PurePosixPath(name)) for image, name in names]
        except MemberError as error:
            raise ValueError(f"in {str(path)!r}: {error}") from error
        except (tarfile.TarError, OSError, ValueError) as error:
            raise ValueError(f"{str(path)!r} cannot be read as a tar: {error}. {repair_hint(path.parent)}") from error
        found += images
    what, first = describe_tars(tars), manifests[0]
    if any(not _same_data_set(first, manifest) for manifest in manifests):
        raise ValueError(f"{what} are not of a single data set: move the others elsewhere")
    ignored_members = [f"ignored: {count_of(n, 'member')} of the tars: {kind}" for kind, n in sorted(ignored.items())]
    if not found:
        why = "; ".join([*ignored_members, f"extensions {', '.join(IMG_EXTENSIONS)}"])
        raise ValueError(f"no image is in {what}; {why}")
    inside, notes, packed, num_images = None, list[str](), None, len(found)
    if first is None:
        found, inside, notes = _choose_split(found, split, what)
    labels, classes = _labels(found, tars)
    by_number = isinstance(found[0].label, int)
    unread = [] if by_number else sorted(suffix for suffix, number in beside.items() if 2 * number >= num_images)
    if first is None and by_number:
        notes += _gap_notes(labels, classes, shorten([tar.name for tar in tars], 1))
    if first is None and classes and unread:
        notes.append(f"note: the classes are {shorten(classes)}; {unread_labels(unread)}")
    if first is not None:
        classes, packed = first["classes"], {"command": first["command"], "quality": first["quality"]}
        if len(tars) < first["num_shards"]:
            notes.append(f"{len(tars)} of {count_of(first['num_shards'], 'packed shard')} are read")
    notes += ignored_members
    rows: Rows = {
        "tar": np.array([image.tar for image in found], np.int32),
        "label": np.array(labels, np.int64),
        "offset": np.array([image.offset for image in found], np.int64),
        "size": np.array([image.size for image in found], np.int64),
        "name": np.array([os.fsencode(str(image.name)) for image in found]),
    }
    content = {"classes": classes, "notes": notes, "split_inside": inside, "unread": unread, "packed": packed}
    return rows, content


def describe_tars(tars: Sequence[Path]) -> str:
    """Returns a name for the tars, for messages."""
    return repr(str(tars[0])) if len(tars) == 1 else f"the tars in {str(tars[0].parent)!r}"


def read_manifest(path: Path) -> Manifest | None:
    """Returns what pack_dataset.py has written at the start of a shard; None for any other or a damaged file."""
    try:
        with tarfile.open(path, mode="r:") as tar:
            member = tar.next()
            file = tar.extractfile(member) if member and member.name == MANIFEST else None
            content = json.loads(file.read()) if file else {}
            return content if content.keys() >= MANIFEST_KEYS else None
    except (tarfile.TarError, OSError, ValueError, AttributeError):
        return None


def _same_data_set(a: Manifest | None, b: Manifest | None) -> bool:
    """Whether two tars may be read together: shards of one packed data set, or two tars that are no such shards."""
    if a is None or b is None:
        return a is b
    return all(a[key] == b[key] for key in ("quality", "shard_mb", "classes", "num_shards"))


def repair_hint(folder: Path) -> str:
    """Returns what to do about damaged tars in `folder`: the command that packed them, by the manifest of any shard."""
    manifests = (read_manifest(path) for path in sorted(folder.glob("*.tar")))
    packed = next((manifest for manifest in manifests if manifest), None)
    if packed is None:
        return "If it is damaged, copy or download it again"
    return f"To repair it, run: {repair_command(packed['command'], folder)}"


def repair_command(command: str, folder: Path) -> str:
    """Returns the command that has packed the shards in `folder`. They may have been moved, so it names that folder."""
    program, script, source, destination, *flags = shlex.split(command)
    folder = folder.resolve()
    is_split = folder.name in ("train", "val") and folder.name != Path(destination).name
    return shlex.join([program, script, source, str(folder.parent if is_split else folder), *flags])


def _choose_split(found: list[Found], split: str, what: str) -> tuple[list[Found], str | None, list[str]]:
    """Returns (the images of `split`, the split whose folder they lie in, notes).

    Returns all images and None if no folder is named after a split. ValueError if the folders are named after other
    splits only, or if two folders are named after this one.
    """
    folders = [image.name.parent.parts for image in found]
    common, marks = _num_common(folders), _split_folders(folders)
    by_split = group_by_split(sorted({mark for mark in marks if mark}))
    if not by_split:
        return found, None, []
    chosen = choose_split(by_split, split, fall_back=True)
    if chosen is None:
        names = " and ".join(f"{name}/" for names in by_split.values() for name in names)
        raise ValueError(f"inside {what} is {names}, but no {split}/: unpack it, and give the folder to read")
    folder = only_name(by_split[chosen], chosen, what)
    unmarked = [parts for parts, mark in zip(folders, marks, strict=True) if mark is None]
    beside = sorted({f"{parts[common]}/" for parts in unmarked if len(parts) > common})
    if len(by_split) == 1 and beside:
        return found, None, [f"{folder}/ in the tar is read as a class, because {shorten(beside)} lies beside it"]
    notes = stand_in_notes(f"{folder}/ in the tar", chosen, split)
    if unmarked:
        notes.append(f"ignored: {count_of(len(unmarked), 'image')} of the tars beside {folder}/")
    return [image for image, mark in zip(found, marks, strict=True) if mark == folder], chosen, notes


def _split_folders(folders: Sequence[tuple[str, ...]]) -> list[str | None]:
    """Returns, for each image, the folder that names its split, or None.

    That is the first such folder below the folders that all images share. If some images have none, only the first
    level below counts. If no image has one, the deepest such folder that all images share counts.
    """
    common = _num_common(folders)
    marks = [next(filter(split_of, parts[common:]), None) for parts in folders]
    if None in marks:
        marks = [next(filter(split_of, parts[common : common + 1]), None) for parts in folders]
    if not any(marks):
        marks = [next(filter(split_of, reversed(folders[0][:common])), None)] * len(folders)
    return marks


def _num_common(folders: Sequence[tuple[str, ...]]) -> int:
    """Returns how many leading folders all of these paths share."""
    return len(os.path.commonprefix([*folders]))


def _labels(found: Sequence[Found], tars: Sequence[Path]) -> tuple[list[int], list[str]]:
    """Returns (the labels, the classes); ValueError if the images are not labelled in the same way."""
    bare = [image.name.parent.parts for image in found if image.label is None]
    common = _num_common(bare)
    if len(set(bare)) == 1:  # a single folder is the class
        common = max(0, common - 1)
    names = [
        next(iter(image.name.parent.parts[common:]), None) if image.label is None else image.label for image in found
    ]
    kinds = {type(name): image for name, image in zip(names, found, strict=True)}
    if len(kinds) > 1:
        examples = ", ".join(f"{str(image.name)!r} in {tars[image.tar].name}" for image in kinds.values())
        raise ValueError(f"the images are not labelled alike (by a .cls, a class folder, a class tar): {examples}")
    numbers = [name for name in names if isinstance(name, int)]
    if numbers:
        return numbers, [str(number) for number in range(max(numbers) + 1)]
    classes = sorted({name for name in names if isinstance(name, str)})
    rank = {name: number for number, name in enumerate(classes)}
    return [rank.get(str(name), 0) for name in names], classes


def _gap_notes(labels: Sequence[int], classes: Sequence[str], what: str) -> list[str]:
    """Returns a note if no image has some of the numbers in the `.cls` members of the tars."""
    gaps = [str(number) for number in sorted({*range(len(classes))} - {*labels})]
    if not gaps:
        return []
    largest = f"the largest number in the .cls of {what} is {len(classes) - 1}"
    return [f"note: {largest}, so there are {len(classes)} classes; {len(gaps)} have no image: {shorten(gaps)}"]


def unread_labels(unread: Sequence[str]) -> str:
    """Returns that labels are not read from members with these extensions."""
    return f"labels come from .cls or from folders, not from {' or '.join(unread)} beside the images"


def _walk(
    file: BinaryIO,
    base: int,
    end: int,
    tar_number: int,
    label: str | None,
    ignored: Counter[str],
    beside: Counter[str],
    inner: bool = False,
) -> list[Found]:
    """Returns the images in the tar from byte `base` to byte `end` of a file.

    label: of the images that have no number. ignored: counts the members that are left out, by kind. beside: counts
    members that may hold labels, by their extension.
    """
    images: list[Found] = []
    nested: list[Found] = []
    numbers: dict[PurePosixPath, int] = {}
    position = base - 1
    if end <= base:
        raise tarfile.TarError("it is empty")
    file.seek(base)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # tarfile would keep all headers in memory
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
                nested += _walk(file, first, first + member.size, tar_number, name.stem, ignored, beside, inner=True)
            elif name.suffix == ".cls":
                numbers[_key(name)] = _class_number(file, member)
            elif is_image(name.name):
                images.append(Found(tar_number, label, member.offset_data, member.size, name))
            elif name.suffix in NO_LABELS:
                beside[name.suffix] += 1
        # A tar that was cut between two members, or appended to another, looks complete to tarfile.
        tail = os.pread(file.fileno(), min(end - tar.offset, 1 << 16), tar.offset)
        if len(tail) < tarfile.BLOCKSIZE or tail.strip(tarfile.NUL):
            raise tarfile.TarError("it has no end mark, or more behind it: it was cut short, or made of several tars")
    kept = {*drop_attached_arrays([str(image.name) for image in images])}
    images = [image for image in images if str(image.name) in kept]
    if numbers:
        images = _one_image_each(images, ignored)
    return [image._replace(label=numbers.get(_key(image.name), label)) for image in images] + nested


def _one_image_each(images: Sequence[Found], ignored: Counter[str]) -> list[Found]:
    """Returns the image of each WebDataset sample: `x.jpg` before `x.mask.png`, or the only one, `x.image.jpg`."""
    plain = {_key(image.name) for image in images if image.name.name.count(".") == 1}
    others = Counter(_key(image.name) for image in images if _key(image.name) not in plain)
    if several := sum(number for number in others.values() if number > 1):
        ignored["images of samples with more than one, none of them named like x.jpg"] += several
    return [image for image in images if image.name.name.count(".") == 1 or others[_key(image.name)] == 1]


def _class_number(file: BinaryIO, member: tarfile.TarInfo) -> int:
    """Returns the class number in a `.cls` member."""
    text = os.pread(file.fileno(), min(member.size, 20), member.offset_data).strip()
    if not text.isdigit() or member.size > 20 or int(text) >= MOST_CLASSES:
        what = f"{member.name!r} holds {text.decode(errors='replace')!r}, which is not the number of a class"
        raise MemberError(f"{what}: write 0, 1, ... into .cls, or remove it and use class folders")
    return int(text)


def _key(name: PurePosixPath) -> PurePosixPath:
    """Returns what the members of one WebDataset sample share: the path up to the first dot of its last part."""
    return name.with_name(name.name.split(".")[0])
