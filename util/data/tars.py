"""Images in tars, read in place: the choice of the tars of a split, and an index for random access.

An index says where each image lies, so that one `pread` reads it. `scripts/pack_dataset.py` writes an index beside its
shards. For other tars it is made when they are opened for the first time. It is a safetensors file, which is mapped
into memory and shared by all workers.
"""

import hashlib
import json
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from util.atomic import replaced_file
from util.data.folders import find_folder, list_folder, refuse_archive
from util.data.images import EncodedImages, ImageError, retry_io
from util.data.splits import choose_split, group_by_split, readable_splits, split_of_tar, stand_in_notes
from util.data.tar_scan import Rows, describe_tars, repair_command, repair_hint, scan_tars, unread_labels
from util.text import count_of, shorten

INDEX = "prmim-index.safetensors"  # beside the shards of pack_dataset.py
COLUMNS = ("tar", "label", "offset", "size", "name")
RULE = 5  # version of the rules for splits, labels and images; an index made by other rules is made again
MOST_OPEN = max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # tars that a process keeps open


@dataclass
class Choice:
    """The tars to read for a split. by_folders: folders inside them must tell the splits apart."""

    tars: list[Path]
    by_folders: bool = False
    notes: list[str] = field(default_factory=list)


def find_tars(data_path: str | Path, split: str, labelled: bool = False) -> list[Path]:
    """Returns the tars of a split; an empty list if image files are to be read."""
    return choose_tars(data_path, split, labelled).tars


def choose_tars(data_path: str | Path, split: str, labelled: bool = False) -> Choice:
    """Chooses the tars of a split, sorted: those in ROOT/<split>/, or those in ROOT with the split in their names.

    Class folders and image files come before tars, unless a tar's name contains the split. If no name contains a split,
    or if `data_path` is a tar itself, all are read. Folders inside must then separate the splits of `labelled` images.
    """
    path = Path(data_path)
    refuse_archive(path)
    if path.is_file() and path.suffix == ".tar":
        return Choice([path], by_folders=labelled and split_of_tar(path.name) not in readable_splits(split))
    if not path.is_dir():
        return Choice([])
    listing = list_folder(path)
    by_name = group_by_split(listing.tars, split_of_tar)
    chosen = choose_split({*by_name, *group_by_split(listing.folders)}, split, fall_back=not labelled)
    if chosen is not None:
        folder = find_folder(listing, chosen)
        if folder is None:
            notes = stand_in_notes(shorten(by_name[chosen]), chosen, split)
            return Choice([path / name for name in by_name[chosen]], notes=notes)
        inside = list_folder(path / folder)
        tars = [] if inside.folders or inside.images else inside.tars
        return Choice([inside.path / tar for tar in tars], notes=stand_in_notes(f"{folder}/", chosen, split))
    if listing.folders or listing.images:
        return Choice([])
    if by_name:
        others = [name for name in listing.tars if split_of_tar(name) is None]
        found = "; ".join(f"{name}: {shorten(tars)}" for name, tars in {**by_name, "no split": others}.items() if tars)
        what = f"--data_path {str(path)!r} holds no tar with {split} in its name (names with {found})"
        raise ValueError(f"{what}: rename the tars to read, to {split}-0.tar for example")
    return Choice([path / name for name in listing.tars], by_folders=labelled)


def write_index(path: Path, rows: Rows, content: Mapping[str, Any]) -> None:
    """Writes an index atomically. content: what `scan_tars` returns, and "tars": [{"name", "size"}]."""
    names, text = rows["name"], json.dumps(content)
    rows = {**rows, "name": names.view(np.uint8).reshape(len(names), -1)}
    digest = np.frombuffer(_digest(text, rows), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path, durable=True) as temporary:
        temporary.write_bytes(save({**rows, "sha256": digest}, {"content": text}))


def _digest(text: str, rows: Rows) -> bytes:
    digest = hashlib.sha256(text.encode())
    for name in COLUMNS:
        digest.update(rows[name].data)
    return digest.digest()


class TarImages(EncodedImages):
    """The images of an index, whose tars lie in `root`.

    ValueError if the index is damaged, or if a tar is missing or has another size than when it was indexed.
    """

    num_checked = 16

    def __init__(self, index: Path, root: Path) -> None:
        try:
            with safe_open(index, "pt") as file:  # maps the file; numpy's arrays would be copies
                text, digest = file.metadata()["content"], file.get_tensor("sha256").numpy().tobytes()
                self.rows = {name: file.get_tensor(name).numpy() for name in COLUMNS}
            if digest != _digest(text, self.rows):
                raise ValueError("its content does not match its SHA-256")
            self.content = json.loads(text)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            what = f"{str(index)!r} is not a valid index of tars ({type(error).__name__}: {error})"
            raise ValueError(f"{what}. {repair_hint(root)}") from error
        names, self.packed = self.rows["name"], self.content["packed"]
        self.names, self.labels = names.view(f"S{names.shape[1]}")[:, 0], self.rows["label"]
        self.index, self.root, self._files = index, root, dict[int, BinaryIO]()
        self.classes, self.notes = self.content["classes"], [*self.content["notes"]]
        unread = self.content.get("unread")
        self.label_hint = f"; {unread_labels(unread)}" if unread else ""
        self.tars = [root / Path(tar["name"]).name for tar in self.content["tars"]]
        for tar, path in zip(self.content["tars"], self.tars, strict=True):
            size = path.stat().st_size if path.is_file() else None
            if size != tar["size"]:
                found = "is missing" if size is None else f"has {size} bytes"
                hint = f". To repair it, run: {repair_command(self.packed['command'], root)}" if self.packed else ""
                raise ValueError(f"{str(path)!r} {found}; {tar['size']} bytes were indexed{hint}")

    def fingerprint(self) -> str:
        if self.packed and self.packed["quality"]:  # other pixels under the same names
            return f"{super().fingerprint()}-q{self.packed['quality']}"
        return super().fingerprint()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process maps the index by itself."""
        state = {name: getattr(self, name) for name in ("reference", "notes", "in_chans", "pixel_format")}
        return TarImages, (self.index, self.root), state

    def path(self, i: int) -> str:
        return f"{self.tars[self.rows['tar'][i]]}: {os.fsdecode(bytes(self.names[i]))}"

    def read(self, i: int) -> bytes:
        tar, offset, size = (int(self.rows[name][i]) for name in ("tar", "offset", "size"))
        data = retry_io(lambda: self._read_at(tar, size, offset))
        if len(data) != size:
            raise ImageError(f"{str(self.tars[tar])!r} was cut short: it ends before {self.path(i)!r} does")
        return data

    def _read_at(self, tar: int, size: int, offset: int) -> bytes:
        """Reads from a tar. After an error it is opened again, because an open file of NFS may be stale."""
        try:
            return os.pread(self._file(tar).fileno(), size, offset)
        except OSError:
            if tar in self._files:
                with suppress(OSError):
                    self._files.pop(tar).close()
            raise

    def _file(self, tar: int) -> BinaryIO:
        """Returns an open tar. Forked workers may share it, because `pread` has no position in the file."""
        if tar not in self._files:
            if len(self._files) >= MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[tar] = open(self.tars[tar], "rb", buffering=0)
        return self._files[tar]


def open_tars(choice: Choice, split: str = "train", labelled: bool = False) -> TarImages:
    """Returns the images of the chosen tars, through the index of pack_dataset.py or else through one made by a scan.

    ValueError if the tars are damaged, or if the images are not `labelled`, or not separated into splits, as asked.
    """
    root, what = choice.tars[0].parent, describe_tars(choice.tars)
    packed = TarImages(root / INDEX, root) if (root / INDEX).exists() else None
    if packed is not None and (extra := sorted({*choice.tars} - {*packed.tars})):
        names = shorten([tar.name for tar in extra])
        raise ValueError(f"{str(root)!r} holds tars that are not in its {INDEX}: {names}. Move them away")
    if packed is not None and len(packed.tars) == len(choice.tars):
        images = packed
    else:
        images = _open_scanned(root, choice, split)
    images.notes += choice.notes
    inside = images.content["split_inside"]
    if labelled and (choice.by_folders or inside) and inside not in readable_splits(split):
        found = f"only {inside}/" if inside else "no such folders"
        layouts = "a tar with train/ and val/ inside, a folder with train-0.tar, val-0.tar, or tars in train/ and val/"
        raise ValueError(f"labelled images of {split} are needed, but inside {what} are {found}. Give {layouts}")
    if labelled and not images.classes:
        raise ValueError(f"images of {what} have no labels: add a .cls for each, or class folders{images.label_hint}")
    return images


def _open_scanned(root: Path, choice: Choice, split: str) -> TarImages:
    """Returns the images of tars through an index beside them, or in the user's cache if that cannot be written.

    The index is made if it is missing, damaged or out of date.
    """
    stats = [(tar.name, tar.stat()) for tar in choice.tars]
    stamp = {"rule": RULE, "tars": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]}
    name = f"index-{_short_hash(split, *(name for name, _ in stats))}.safetensors"
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prmim"
    places = [root / ".prmim" / name, cache / _short_hash(root.resolve()) / name]
    for place in filter(Path.exists, places):
        with suppress(ValueError):  # a damaged index
            images = TarImages(place, root)
            if images.content.get("stamp") == stamp:
                return images
    print(f"indexing {count_of(len(choice.tars), 'tar')} in {root}, once", flush=True)
    rows, content = scan_tars(choice.tars, split)
    content |= {"tars": [{"name": name, "size": stat.st_size} for name, stat in stats], "stamp": stamp}
    problems = []
    for place in places:
        try:
            write_index(place, rows, content)
            return TarImages(place, root)
        except OSError as error:
            problems.append(str(error))
    raise ValueError(f"the index of {str(root)!r} cannot be written: {'; '.join(problems)}")


def _short_hash(*content: object) -> str:
    return hashlib.sha256(str(content).encode()).hexdigest()[:12]
