"""Images in tars, read in place: WebDataset shards, and the shards of `scripts/pack_dataset.py`.

The label of an image is the number in the `.cls` member beside it. Without such members, images have no labels. Hidden
members, links, devices, sparse files and names that lead out of the tar are not read.

An index says where each image lies, so that one `pread` reads it. pack_dataset.py writes an index beside its shards.
For other tars it is made when they are opened for the first time. It is a safetensors file, which is mapped into memory
and shared by all workers.
"""

import hashlib
import json
import os
import resource
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from util.atomic import replaced_file
from util.data.folders import is_hidden, is_image, split_of
from util.data.images import AS_RGB, FILE_ERRORS, EncodedImages, ImageError, Reading, retry_io
from util.text import count_of, shorten

INDEX = "prmim-index.safetensors"  # beside the shards of pack_dataset.py
INDEX_VERSION = 7  # an index that was made by other rules is made again
COLUMNS = ("tar", "label", "offset", "size", "name")
CHECKSUM = "crc32"  # a further column, which older indexes and those of scans do not have
MANIFEST = "__prmim__"  # first member of a packed shard, a JSON object; WebDataset skips names of this form
MAX_CLASSES = 1_000_000
MAX_OPEN = max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # tars that a process keeps open

Manifest = dict[str, Any]
Rows = dict[str, np.ndarray]  # tar int32, label, offset and size int64, name bytes, perhaps crc32 uint32; each [n]


# -------------------------------------------------------------------------------------------------------------- scan


@dataclass(frozen=True)
class TarScan:
    """The images in a tar. rows: of an index of this tar alone, in its order. splits: that folders are named."""

    rows: Rows
    is_labelled: bool
    splits: set[str]
    num_ignored: int


def refuse_storage_error(error: Exception) -> None:
    """Raises the error again if the storage has failed, which may pass: then the file is not to blame."""
    if isinstance(error, OSError) and error.errno is not None and error.errno not in FILE_ERRORS:
        raise error


def scan_tar(path: Path) -> TarScan:
    """Finds the images in a tar by its headers. Nothing is extracted. ValueError names a tar that cannot be read."""
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            return scan_members(tar, file, path.stat().st_size)
    except (tarfile.TarError, OSError, ValueError) as error:
        refuse_storage_error(error)
        raise ValueError(f"{str(path)!r} cannot be read as a tar: {error}") from error


def checksums(path: Path, rows: Rows) -> np.ndarray:
    """Returns the CRC-32 of the images of a tar, uint32 [n], whose bytes it reads."""
    numbers: list[int] = []
    with open(path, "rb") as file:
        for offset, size in zip(rows["offset"].tolist(), rows["size"].tolist(), strict=True):
            file.seek(offset)
            numbers.append(zlib.crc32(file.read(size)))
    return np.array(numbers, np.uint32)


def scan_members(tar: tarfile.TarFile, file: BinaryIO, num_bytes: int) -> TarScan:
    """Scans an open tar of `num_bytes`. file: the same, for reads at any position."""
    names: list[str] = []
    offsets: list[int] = []
    sizes: list[int] = []
    num_ignored = 0
    numbers: dict[str, int] = {}  # of each sample, the number of its class
    folders: set[PurePosixPath] = set()
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # tarfile would keep all headers in memory
        if member.size < 0 or member.offset_data + member.size > num_bytes:
            raise tarfile.TarError(f"{member.name!r} does not lie inside it")
        if member.isdir():
            continue
        name = PurePosixPath(member.name)
        if leads_out(name) or not member.isreg() or member.issparse() or any(map(is_hidden, name.parts)):
            num_ignored += 1
        elif name.suffix == ".cls":
            numbers[sample_key(str(name))] = class_number(file, member)
        elif is_image(name.name):
            names.append(str(name))
            offsets.append(member.offset_data)
            sizes.append(member.size)
            folders.add(name.parent)
    # A tar that was cut between two members, or appended to another, looks complete to tarfile.
    tail = os.pread(file.fileno(), 1 << 16, tar.offset)
    if len(tail) < tarfile.BLOCKSIZE or tail.strip(tarfile.NUL):
        raise tarfile.TarError("it has no end mark, or more behind it: it was cut short, or made of several tars")
    labels = [0] * len(names)
    if numbers:
        labels = image_labels(names, numbers)
    rows: Rows = {
        "tar": np.zeros(len(names), np.int32),
        "label": np.array(labels, np.int64),
        "offset": np.array(offsets, np.int64),
        "size": np.array(sizes, np.int64),
        "name": encoded_names(names),
    }
    parts = {part for folder in folders for part in folder.parts}
    splits = {split for split in map(split_of, parts) if split}
    return TarScan(rows, bool(numbers), splits, num_ignored)


def encoded_names(names: Sequence[str]) -> np.ndarray:
    """Returns names as the column of an index, bytes [n]."""
    return np.array([os.fsencode(name) for name in names], bytes)


def leads_out(name: PurePosixPath) -> bool:
    return name.is_absolute() or ".." in name.parts


def sample_key(name: str) -> str:
    """Returns what the members of one WebDataset sample share: the path up to the first dot of its last part."""
    folder, slash, file_name = name.rpartition("/")
    return folder + slash + file_name.partition(".")[0]


def class_number(file: BinaryIO, member: tarfile.TarInfo) -> int:
    """Returns the class number in a `.cls` member."""
    text = os.pread(file.fileno(), min(member.size, 20), member.offset_data).strip()
    if not text.isdigit() or member.size > 20 or int(text) >= MAX_CLASSES:
        raise ValueError(f"{member.name!r} holds {text.decode(errors='replace')!r}, which is not the number of a class")
    return int(text)


def image_labels(names: Sequence[str], numbers: Mapping[str, int]) -> list[int]:
    """Returns the labels of images. ValueError unless each has a `.cls` member of its own."""
    name_of: dict[str, str] = {}
    labels: list[int] = []
    for name in names:
        key = sample_key(name)
        if key not in numbers:
            raise ValueError(f"{name!r} has no .cls beside it, but other images have")
        if key in name_of:
            raise ValueError(f"{name_of[key]!r} and {name!r} are in one sample: pack one image for each .cls")
        name_of[key] = name
        labels.append(numbers[key])
    return labels


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Returns the rows of an index of several tars, from those of each."""
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    rows["tar"] = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part["tar"]) for part in parts])
    return rows


def scan_tars(tars: Sequence[Path]) -> tuple[Rows, dict[str, Any]]:
    """Returns (rows, content) for an index of tars. ValueError if they cannot be read, or not together.

    content: "classes", "notes", and "quality" and "shorter_side", which only packed shards have.
    """
    for path in tars:
        if read_manifest(path) is not None:
            missing = f"{str(path)!r} is a shard of pack_dataset.py, but {INDEX} is not beside it"
            raise ValueError(f"{missing}: copy it, too, or run the same pack_dataset.py command again")
    scans = [scan_tar(path) for path in tars]
    source = f"the tars of {str(tars[0].parent)!r}"
    splits = set().union(*(scan.splits for scan in scans))
    if len(splits) > 1:
        names = "/ and ".join(sorted(splits))
        raise ValueError(f"inside {source} are {names}/: unpack them")
    filled = [scan for scan in scans if len(scan.rows["tar"])]
    if not filled:
        raise ValueError(f"no image is in {source}")
    classes: list[str] = []
    if any(scan.is_labelled for scan in filled):
        num_classes = max(int(scan.rows["label"].max()) for scan in filled) + 1
        classes = [str(number) for number in range(num_classes)]
        for scan in filled:
            if not scan.is_labelled:
                name = os.fsdecode(scan.rows["name"][0])
                raise ValueError(f"some of {source} have .cls members, but {name!r} has none beside it")
    notes: list[str] = []
    num_ignored = sum(scan.num_ignored for scan in scans)
    if num_ignored:
        kinds = "hidden files, links, devices, sparse files, or names that lead out of the tar"
        notes.append(f"ignored: {count_of(num_ignored, 'member')} of the tars: {kinds}")
    return join_rows([scan.rows for scan in scans]), {"classes": classes, "notes": notes, "quality": None}


def read_manifest(path: Path) -> Manifest | None:
    """Returns what pack_dataset.py has written at the start of a shard; None for any other or a damaged file."""
    with suppress(tarfile.TarError, OSError, ValueError), tarfile.open(path, mode="r:") as tar:
        member = tar.next()
        if member is not None and member.name == MANIFEST:
            file = tar.extractfile(member)
            assert file is not None
            return json.load(file)
    return None


# ------------------------------------------------------------------------------------------------------------- index


def write_index(path: Path, rows: Rows, content: Mapping[str, Any]) -> None:
    """Writes an index atomically. content: what `scan_tars` returns, and "tars": [{"name", "size"}]."""
    names = rows["name"]
    letters = names.view(np.uint8).reshape(len(names), -1)
    rows = {**rows, "name": letters}
    text = json.dumps(content)
    digest = np.frombuffer(index_digest(text, rows), np.uint8)
    tensors = {**rows, "sha256": digest}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path, durable=True) as temporary:
        temporary.write_bytes(save(tensors, {"content": text}))


def index_digest(text: str, rows: Rows) -> bytes:
    digest = hashlib.sha256(text.encode())
    for name in (*COLUMNS, CHECKSUM):
        if name in rows:
            digest.update(rows[name].data)
    return digest.digest()


class Index(NamedTuple):
    """Where images lie in tars. rows: arrays that may be mapped from a file. content: see `write_index`."""

    rows: Rows
    content: dict[str, Any]


def read_index(path: Path) -> Index:
    """Returns an index, which is mapped into memory. ValueError if it is damaged or leads out of a tar or folder."""
    try:
        with safe_open(path, "pt") as file:  # maps the file; numpy's arrays would be copies
            tensors = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
            return checked_index(file.metadata()["content"], tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        refuse_storage_error(error)
        raise invalid_index(str(path), error) from error


def parse_index(data: bytes, place: str) -> Index:
    """Returns the index that a file holds. ValueError, which names its `place`, if it is damaged or leads out."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return checked_index(header["__metadata__"]["content"], load(data))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise invalid_index(place, error) from error


def invalid_index(place: str, error: Exception) -> ValueError:
    reason = f"{type(error).__name__}: {error}"
    return ValueError(f"{place!r} is not a valid index of tars ({reason}): copy or pack it again")


def checked_index(text: str, tensors: Mapping[str, np.ndarray]) -> Index:
    """Returns the index of a file with these tensors. ValueError or KeyError if it is damaged or leads out."""
    rows = {name: tensors[name] for name in (*COLUMNS, CHECKSUM) if name in tensors or name != CHECKSUM}
    if tensors["sha256"].tobytes() != index_digest(text, rows):
        raise ValueError("its content does not match its SHA-256")
    names = rows["name"]
    rows["name"] = names.view(f"S{names.shape[1]}")[:, 0]
    content = json.loads(text)
    check_rows(rows, [tar["size"] for tar in content["tars"]], len(content["classes"]))
    return Index(rows, content)


def check_rows(rows: Rows, tar_sizes: Sequence[int], num_classes: int) -> None:
    """ValueError if a row leads out of its tar, its classes or its folder. An index may come from others."""
    tar = rows["tar"]
    offset = rows["offset"]
    size = rows["size"]
    label = rows["label"]
    names = rows["name"]
    is_known = (tar >= 0) & (tar < len(tar_sizes))
    num_bytes = np.append(tar_sizes, 0)[np.where(is_known, tar, -1)]  # of the tar of each image
    is_inside = (offset >= 0) & (size >= 0) & (size <= num_bytes - offset)
    has_class = (label >= 0) & (label < max(1, num_classes))
    is_absolute = np.char.startswith(names, b"/")
    wrong = np.flatnonzero(~(is_known & is_inside & has_class) | is_absolute).tolist()
    for i in np.flatnonzero(np.char.find(names, b"..") >= 0).tolist():
        if leads_out(PurePosixPath(os.fsdecode(names[i]))):
            wrong.append(i)
    if wrong:
        name = os.fsdecode(names[wrong[0]])
        raise ValueError(f"row {wrong[0]}, {name!r}, leads out of its tar, classes or folder")


# ------------------------------------------------------------------------------------------------------------ images


class Span(NamedTuple):
    """Where the bytes of an image lie in a tar of `tar_size` bytes. checksum: CRC-32 of them, if the index has it."""

    tar: str
    offset: int
    size: int
    tar_size: int | None
    checksum: int | None


def objection(span: Span, data: bytes) -> str:
    """Returns what is wrong with the bytes of a span, or ""."""
    if len(data) != span.size:
        return f"{span.tar} was cut short"
    if span.checksum is not None and zlib.crc32(data) != span.checksum:  # 16 us for an image of 110 kB
        return f"bytes in {span.tar} have changed since it was packed"
    return ""


class TarStorage(Protocol):
    """Where tars lie."""

    root: str | Path

    def path(self, tar: str) -> str:
        """Returns where a tar lies, for messages."""

    def sizes(self, tars: Sequence[str]) -> dict[str, int] | None:
        """Returns the bytes of each tar that is there; None if only reads can tell."""

    def prepare(self, spans: Sequence[Span]) -> None:
        """Announces that `read` is about to be called for these spans, in this order."""

    def read(self, span: Span) -> bytes:
        """Returns the bytes of a span, fewer if the tar ends before. Tries again for some time if that fails.

        OSError if the storage fails.
        """


class LocalTars:
    """Tars in a folder. Forked workers may share those that are open, because `pread` has no position in the file."""

    def __init__(self, folder: Path) -> None:
        self.root: str | Path = folder
        self.folder = folder
        self._open = lru_cache(MAX_OPEN)(self._open_tar)  # closes what has left it

    def path(self, tar: str) -> str:
        return str(self.folder / tar)

    def sizes(self, tars: Sequence[str]) -> dict[str, int] | None:
        found: dict[str, int] = {}
        for tar in tars:
            path = self.folder / tar
            if path.is_file():
                found[tar] = path.stat().st_size
        return found

    def prepare(self, spans: Sequence[Span]) -> None:
        """Does nothing: the kernel reads ahead."""

    def read(self, span: Span) -> bytes:
        return retry_io(lambda: self._read_at(span))

    def _read_at(self, span: Span) -> bytes:
        """Reads from a tar. After an error it is opened again, because an open file of NFS may be stale."""
        try:
            return os.pread(self._open(span.tar).fileno(), span.size, span.offset)
        except OSError:
            self._open.cache_clear()
            raise

    def _open_tar(self, tar: str) -> BinaryIO:
        return open(self.folder / tar, "rb", buffering=0)


class TarImages(EncodedImages):
    """The images of an index, whose tars lie in `storage`.

    ValueError if a tar is missing or has another size than when it was indexed.
    """

    num_checked = 16

    def __init__(
        self,
        index: Index,
        storage: TarStorage,
        notes: Sequence[str] = (),
        reading: Reading = AS_RGB,
    ) -> None:
        self.rows, self.content = index
        self.storage = storage
        self.tars = [Path(tar["name"]).name for tar in self.content["tars"]]
        self.tar_sizes: list[int] = [tar["size"] for tar in self.content["tars"]]
        sizes = storage.sizes(self.tars)
        for tar, tar_size in zip(self.tars, self.tar_sizes, strict=True):
            if sizes is None or sizes.get(tar) == tar_size:
                continue
            problem = "is missing"
            if tar in sizes:
                problem = f"has {sizes[tar]} bytes"
            raise ValueError(f"{storage.path(tar)!r} {problem}; {tar_size} bytes were indexed: copy or pack it again")
        super().__init__(
            storage.root,
            self.rows["name"],
            self.rows["label"],
            self.content["classes"],
            [*self.content["notes"], *notes],
            reading,
        )

    def fingerprint(self) -> str:
        name = super().fingerprint()
        if self.content["quality"]:  # other pixels under the same names
            name += f"-q{self.content['quality']}"
        if self.content.get("shorter_side"):
            name += f"-s{self.content['shorter_side']}"
        return name

    def path(self, i: int) -> str:
        return f"{self.storage.path(self.span(i).tar)}: {os.fsdecode(bytes(self.names[i]))}"

    def span(self, i: int) -> Span:
        """Returns where image i lies."""
        number = int(self.rows["tar"][i])
        offset = int(self.rows["offset"][i])
        size = int(self.rows["size"][i])
        checksum: int | None = None
        if CHECKSUM in self.rows:
            checksum = int(self.rows[CHECKSUM][i])
        return Span(self.tars[number], offset, size, self.tar_sizes[number], checksum)

    def prepare(self, indices: Sequence[int]) -> None:
        self.storage.prepare([self.span(i) for i in indices])

    def read(self, i: int) -> bytes:
        span = self.span(i)
        data = self.storage.read(span)
        problem = objection(span, data)
        if problem:
            raise ImageError(f"{self.path(i)!r} cannot be read: {problem}; copy or pack it again")
        return data


def open_tars(
    tars: Sequence[Path],
    labelled: bool = False,
    notes: Sequence[str] = (),
    reading: Reading = AS_RGB,
) -> TarImages:
    """Returns the images of tars in one folder, through the index of pack_dataset.py or else through one of a scan.

    ValueError if the tars are damaged, or if the images have no labels although they must be `labelled`.
    """
    root = tars[0].parent
    packed = root / INDEX
    index = read_index(packed) if packed.exists() else find_index(root, tars)
    images = TarImages(index, LocalTars(root), notes, reading)
    indexed = set(images.tars)
    given = {tar.name for tar in tars}
    if indexed != given:
        others = shorten(sorted(indexed ^ given))
        raise ValueError(f"{str(root)!r} is read as a whole by its {INDEX}: give the folder without {others}")
    if labelled and not images.classes:
        raise ValueError(f"images of {str(root)!r} have no labels: put a .cls beside each")
    return images


def find_index(root: Path, tars: Sequence[Path]) -> Index:
    """Returns the index of the tars: beside them, or in the user's cache if that cannot be written.

    The index is made if it is missing, damaged or out of date.
    """
    entries: list[dict[str, Any]] = []
    stamp: list[Any] = [INDEX_VERSION]
    for tar in tars:
        stat = tar.stat()
        entries.append({"name": tar.name, "size": stat.st_size})
        stamp.append([tar.name, stat.st_size, stat.st_mtime_ns])
    name = f"index-{short_hash([tar.name for tar in tars])}.safetensors"
    places = [root / ".prmim" / name, user_cache() / short_hash(root.resolve()) / name]
    for place in places:
        with suppress(ValueError):  # missing or damaged
            index = read_index(place)
            if index.content.get("stamp") == stamp:
                return index
    print(f"indexing {count_of(len(tars), 'tar')} in {root}, once", flush=True)
    rows, content = scan_tars(tars)
    problems: list[str] = []
    for place in places:
        try:
            write_index(place, rows, {**content, "tars": entries, "stamp": stamp})
            return read_index(place)
        except OSError as error:
            problems.append(str(error))
    raise ValueError(f"the index of {str(root)!r} cannot be written: {'; '.join(problems)}")


def user_cache() -> Path:
    """Returns the folder of indexes that cannot be written beside their tars."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "prmim"


def short_hash(content: object) -> str:
    return hashlib.sha256(str(content).encode()).hexdigest()[:12]
