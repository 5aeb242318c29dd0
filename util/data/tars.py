"""Images in tars, read in place: WebDataset shards, and the shards of `scripts/pack_dataset.py`.

The label of an image is the number in the `.cls` member beside it. Without such members, images have no labels. Hidden
members, links, devices, and names that lead upwards are not read. Sparse files are refused.

An index says where each image lies, so that one `pread` reads it. pack_dataset.py writes an index beside its shards.
For other tars it is made when they are opened for the first time. It is a safetensors file, which is mapped into memory
and shared by all workers.
"""

import hashlib
import json
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from util.atomic import replaced_file
from util.data.folders import is_hidden, is_image, split_of
from util.data.images import AS_RGB, FILE_ERRORS, EncodedImages, ImageError, Reading, retry_io
from util.text import count_of, shorten

INDEX = "prmim-index.safetensors"  # beside the shards of pack_dataset.py
INDEX_VERSION = 8  # an index that was made by other rules is made again
COLUMNS = ("tar", "label", "offset", "size", "name")
CHECKSUM = "crc32"  # a further column, which the indexes of scans do not have
MANIFEST = "__prmim__"  # first member of a packed shard, a JSON object; WebDataset skips names of this form
MAX_OPEN = 200  # tars that a process keeps open

Manifest = dict[str, Any]
# Of images: tar int32, label, offset and size int64, name bytes, perhaps crc32 uint32; each [n].
Rows = dict[str, np.ndarray]


# -------------------------------------------------------------------------------------------------------------- scan


def refuse_storage_error(error: Exception) -> None:
    """Raises the error again if the storage has failed, which may pass: then the file is not to blame."""
    if isinstance(error, OSError) and error.errno is not None and error.errno not in FILE_ERRORS:
        raise error


def scan_tar(path: Path) -> Rows:
    """Finds the images in a tar by its headers. Returns the rows of an index of this tar alone, in its order.

    The label of an image without a class is -1. Nothing is extracted. ValueError names a tar that cannot be read.
    """
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            return scan_members(tar, file)
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


def scan_members(tar: tarfile.TarFile, file: BinaryIO) -> Rows:
    """Scans an open tar. file: the same, for reads at any position."""
    names: list[str] = []
    offsets: list[int] = []
    sizes: list[int] = []
    numbers: dict[str, int] = {}  # of each sample, the number of its class
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # tarfile would keep all headers in memory
        name = PurePosixPath(member.name)
        if not member.isreg() or any(map(is_hidden, name.parts)):
            continue
        if name.suffix == ".cls":
            numbers[sample_key(str(name))] = class_number(file, member)
        elif is_image(name.name):
            if member.issparse():
                raise tarfile.TarError(f"{member.name!r} is a sparse file, whose holes are not in the tar")
            names.append(str(name))
            offsets.append(member.offset_data)
            sizes.append(member.size)
    # A tar that was cut between two members, or appended to another, looks complete to tarfile.
    tail = os.pread(file.fileno(), 1 << 16, tar.offset)
    if len(tail) < tarfile.BLOCKSIZE or tail.strip(tarfile.NUL):
        raise tarfile.TarError("it has no end mark, or more behind it: it was cut short, or made of several tars")
    return {
        "tar": np.zeros(len(names), np.int32),
        "label": np.array(image_labels(names, numbers), np.int64),
        "offset": np.array(offsets, np.int64),
        "size": np.array(sizes, np.int64),
        "name": encoded_names(names),
    }


def encoded_names(names: Sequence[str]) -> np.ndarray:
    """Returns names as the column of an index, bytes [n]."""
    return np.array([os.fsencode(name) for name in names], bytes)


def sample_key(name: str) -> str:
    """Returns what the members of one WebDataset sample share: the path up to the first dot of its last part."""
    folder, slash, file_name = name.rpartition("/")
    return folder + slash + file_name.partition(".")[0]


def class_number(file: BinaryIO, member: tarfile.TarInfo) -> int:
    """Returns the class number in a `.cls` member."""
    text = os.pread(file.fileno(), member.size, member.offset_data).strip()
    if not text.isdigit() or len(text) > 6:
        raise ValueError(f"{member.name!r} holds {text.decode(errors='replace')!r}, which is not the number of a class")
    return int(text)


def image_labels(names: Sequence[str], numbers: Mapping[str, int]) -> list[int]:
    """Returns the labels of images, -1 of those without a `.cls` member. ValueError if two images share one."""
    name_of: dict[str, str] = {}
    labels: list[int] = []
    for name in names:
        key = sample_key(name)
        if key in numbers and key in name_of:
            raise ValueError(f"{name_of[key]!r} and {name!r} are in one sample: pack one image for each .cls")
        name_of[key] = name
        labels.append(numbers.get(key, -1))
    return labels


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Returns the rows of an index of several tars, from those of each."""
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    rows["tar"] = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part["tar"]) for part in parts])
    return rows


def scan_tars(tars: Sequence[Path]) -> tuple[Rows, list[str]]:
    """Returns (rows, classes) for an index of tars. ValueError if they cannot be read, or not together."""
    for path in tars:
        if read_manifest(path) is not None:
            missing = f"{str(path)!r} is a shard of pack_dataset.py, but {INDEX} is not beside it"
            raise ValueError(f"{missing}: copy it, too, or run the same pack_dataset.py command again")
    rows = join_rows([scan_tar(path) for path in tars])
    source = f"the tars of {str(tars[0].parent)!r}"
    names = [os.fsdecode(name) for name in rows["name"].tolist()]
    if not names:
        raise ValueError(f"no image is in {source}")
    folders = {folder for name in names for folder in PurePosixPath(name).parts[:-1]}
    splits = {split_of(folder) for folder in folders} - {None}
    if len(splits) > 1:
        listed = "/ and ".join(sorted(map(str, splits)))
        raise ValueError(f"inside {source} are {listed}/: unpack them")
    unlabelled = np.flatnonzero(rows["label"] < 0)
    if len(unlabelled) == len(names):
        rows["label"] = np.zeros(len(names), np.int64)
        return rows, []
    if len(unlabelled):
        raise ValueError(f"some of {source} have .cls members, but {names[unlabelled[0]]!r} has none beside it")
    num_classes = int(rows["label"].max()) + 1
    return rows, [str(number) for number in range(num_classes)]


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
    """Writes an index atomically.

    content: "classes", "tars": [{"name", "size"}], and "encoding" of images that are encoded again.
    """
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
    """Returns an index, which is mapped into memory. ValueError if it is damaged."""
    with valid_index(str(path)), safe_open(path, "pt") as file:  # maps the file; numpy's arrays would be copies
        tensors = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
        return checked_index(file.metadata()["content"], tensors)


@contextmanager
def valid_index(place: str) -> Iterator[None]:
    """ValueError if the index in `place`, which is read within the context, is damaged."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        refuse_storage_error(error)
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{place!r} is not a valid index of tars ({reason}): copy or pack it again") from error


def checked_index(text: str, tensors: Mapping[str, np.ndarray]) -> Index:
    """Returns the index of a file with these tensors. To be called within `valid_index`."""
    rows = {name: tensors[name] for name in (*COLUMNS, CHECKSUM) if name in tensors or name != CHECKSUM}
    if tensors["sha256"].tobytes() != index_digest(text, rows):
        raise ValueError("its content does not match its SHA-256")
    names = rows["name"]
    rows["name"] = names.view(f"S{names.shape[1]}")[:, 0]
    return Index(rows, json.loads(text))


# ------------------------------------------------------------------------------------------------------------ images


class Span(NamedTuple):
    """Where the bytes of an image lie in a tar."""

    tar: str
    offset: int
    size: int


class Storage(Protocol):
    """Where tars lie: in a folder, or behind a URL."""

    root: str | Path

    def prepare(self, spans: Sequence[Span]) -> None:
        """Announces that `read` is about to be called for these spans, in this order."""

    def read(self, span: Span) -> bytes:
        """Returns the bytes of a span, fewer if the tar ends before. OSError if the storage fails for some time."""


class LocalTars:
    """Tars in a folder. Forked workers may share those that are open, because `pread` has no position in the file."""

    def __init__(self, folder: Path) -> None:
        self.root: str | Path = folder
        self._open = lru_cache(MAX_OPEN)(self._open_tar)  # closes what has left it

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
        return open(os.path.join(self.root, tar), "rb", buffering=0)


class TarImages(EncodedImages):
    """The images of an index, whose tars lie in `storage`. ValueError if they must be `labelled` and are not."""

    num_checked = 16

    def __init__(
        self,
        index: Index,
        storage: Storage,
        labelled: bool = False,
        notes: Sequence[str] = (),
        reading: Reading = AS_RGB,
    ) -> None:
        self.rows, self.content = index
        self.lie_in_files = isinstance(storage, LocalTars)
        self.storage = storage
        self.tars = [Path(tar["name"]).name for tar in self.content["tars"]]
        classes = self.content["classes"]
        super().__init__(storage.root, self.rows["name"], self.rows["label"], classes, notes, reading)
        if labelled and not classes:
            raise ValueError(
                f"images of {str(self.root)!r} have no labels: put a .cls beside each, or pack class folders"
            )

    def fingerprint(self) -> str:
        return super().fingerprint() + self.content.get("encoding", "")  # other pixels under the same names

    def path(self, i: int) -> str:
        return f"{self.root}/{self.span(i).tar}: {os.fsdecode(bytes(self.names[i]))}"

    def span(self, i: int) -> Span:
        tar = self.tars[int(self.rows["tar"][i])]
        return Span(tar, int(self.rows["offset"][i]), int(self.rows["size"][i]))

    def prepare(self, indices: Sequence[int]) -> None:
        self.storage.prepare([self.span(i) for i in indices])

    def read(self, i: int) -> bytes:
        span = self.span(i)
        data = self.storage.read(span)
        problem = ""
        if len(data) != span.size:
            problem = "the tar was cut short"
        elif CHECKSUM in self.rows and zlib.crc32(data) != self.rows[CHECKSUM][i]:  # 16 us for an image of 110 kB
            problem = "its bytes have changed since it was packed"
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

    ValueError if the tars are damaged, or have other sizes than when they were packed, or if the images have no labels
    although they must be `labelled`.
    """
    root = tars[0].parent
    packed = root / INDEX
    index = read_index(packed) if packed.exists() else find_index(root, tars)
    images = TarImages(index, LocalTars(root), labelled, notes, reading)
    others = {tar.name for tar in tars}.symmetric_difference(images.tars)
    if others:
        raise ValueError(
            f"{str(root)!r} is read as a whole by its {INDEX}: give the folder with all of its tars, and without "
            f"others ({shorten(sorted(others))})"
        )
    for tar, indexed in zip(images.tars, index.content["tars"], strict=True):
        num_bytes = (root / tar).stat().st_size
        if num_bytes != indexed["size"]:
            problem = f"has {num_bytes} bytes; {indexed['size']} were indexed"
            raise ValueError(f"{str(root / tar)!r} {problem}: copy or pack it again")
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
    beside = root / ".prmim" / name
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    in_cache = user_cache / "prmim" / short_hash(root.resolve()) / name
    for place in (beside, in_cache):
        with suppress(ValueError):  # missing or damaged
            index = read_index(place)
            if index.content.get("stamp") == stamp:
                return index
    print(f"indexing {count_of(len(tars), 'tar')} in {root}, once", flush=True)
    rows, classes = scan_tars(tars)
    content = {"classes": classes, "tars": entries, "stamp": stamp}
    try:
        write_index(beside, rows, content)
        return read_index(beside)
    except OSError:  # it is read-only
        write_index(in_cache, rows, content)
        return read_index(in_cache)


def short_hash(content: object) -> str:
    return hashlib.sha256(str(content).encode()).hexdigest()[:12]
