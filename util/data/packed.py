"""Images inside large files: shards of `scripts/pack_dataset.py`, or tars as they are. Read in place, never extracted.

An index says where each image lies: RECORDS, one an image, and INDEX, written last, with the shards and their sizes,
the classes, and the hash of the records. Any image can be had at any time by one `pread`, so packed data has the
addressed randomness, the exact resume and, if it was packed from one, the order of a folder.
"""

import hashlib
import io
import json
import os
import resource
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from util.data.images import EncodedImages, ImageError, patiently

INDEX, RECORDS, SHARD = "prmim-index.json", "prmim-index.npy", "shard-{:05d}.bin"
_FIELDS = [("shard", "<i4"), ("label", "<i4"), ("offset", "<i8"), ("length", "<i8"), ("crc32", "<u4")]
# Descriptors that a process holds at most.
_OPEN_SHARDS = min(4096, max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


def records(rows: Sequence[tuple]) -> np.ndarray:
    """[(shard, label, offset, length, crc32, name as bytes)] -> a structured array, which a memory map can read."""
    width = max([1, *(len(row[-1]) for row in rows)])
    return np.array([tuple(row) for row in rows], [*_FIELDS, ("name", f"S{width}")])


def write_index(folder: Path, rows: np.ndarray, shards: list[dict], classes: list[str], **facts: object) -> None:
    """Writes the records to `folder` and, last, the index. shards: [{"name", "size", ...}]; facts: JSON-able."""
    buffer = io.BytesIO()
    np.save(buffer, rows)
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    content = {"num_images": len(rows), "classes": classes, "index_sha256": digest, "shards": shards, **facts}
    write_atomically(folder / RECORDS, buffer.getbuffer())
    write_atomically(folder / INDEX, json.dumps(content, indent=1).encode())


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """A file that exists whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_index(folder: Path) -> tuple[dict, np.ndarray]:
    """-> (content of the index, records); ValueError where they do not belong together, or lead out of the shards."""
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        data = (folder / RECORDS).read_bytes()
        if hashlib.sha256(data).hexdigest() != content["index_sha256"]:
            raise ValueError(f"{RECORDS} is not what it describes")
        rows, sizes = np.load(io.BytesIO(data)), np.array([shard["size"] for shard in content["shards"]], np.int64)
        for shard in content["shards"]:
            if Path(shard["name"]).name != shard["name"]:
                raise ValueError(f"shard {shard['name']!r} is no plain file name")
        inside = (rows["shard"] >= 0) & (rows["shard"] < len(sizes)) & (rows["offset"] >= 0) & (rows["length"] >= 0)
        inside &= (rows["label"] >= 0) & (rows["label"] < max(1, len(content["classes"])))
        inside[inside] &= (rows["offset"] + rows["length"])[inside] <= sizes[rows["shard"][inside]]
        if not inside.all():
            raise ValueError(f"record {int(inside.argmin())} lies outside its shard or the classes")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        what = f"{str(folder / INDEX)!r} is no index of packed images ({type(error).__name__}: {error})"
        raise ValueError(f"{what}; pack the data again by the same command, or fetch the files again") from error
    return content, rows


class PackedImages(EncodedImages):
    """The images of an index in `folder`, whose shards lie in `root` (default: there, too).

    ValueError where a shard is missing or has another size than when it was indexed, or, with `labelled`, without
    classes.
    """

    num_checked = 16

    def __init__(self, folder: str | Path, root: str | Path | None = None, labelled: bool = False):
        self.folder, self.root, self._files = Path(folder), Path(root or folder), OrderedDict()
        self.content, self.records = read_index(self.folder)
        self.classes, self.labels = self.content["classes"], self.records["label"].astype(np.int64)
        self.names, self.notes = self.records["name"], [*(self.content.get("notes") or [])]
        self.shards = [self.root / shard["name"] for shard in self.content["shards"]]
        if labelled and not self.classes:
            raise ValueError(f"the packed images in {str(self.folder)!r} have no labels")
        if not len(self):
            raise ValueError(f"the index in {str(self.folder)!r} names no image")
        for shard, path in zip(self.content["shards"], self.shards, strict=True):
            size = path.stat().st_size if path.is_file() else None
            if size != shard["size"]:
                found = "is missing" if size is None else f"has {size} bytes"
                what = f"shard {str(path)!r} {found}; {shard['size']} bytes were indexed"
                raise ValueError(f"{what}: fetch it again, or pack the data again by the same command")

    def fingerprint(self) -> str:
        quality = self.content.get("quality")  # of a second compression, after which pixels are others
        return super().fingerprint() + (f"-q{quality}" if quality else "")

    def path(self, i: int) -> str:
        record = self.records[i]
        return f"{self.shards[record['shard']]}: {os.fsdecode(bytes(record['name']))}"

    def read(self, i: int) -> bytes:
        shard, _, offset, length, *_ = self.records[i].item()
        data = patiently(lambda: os.pread(self._descriptor(shard), length, offset))  # OSError: a shard is many images
        if len(data) != length:
            what = f"shard {str(self.shards[shard])!r} has become shorter"
            raise ImageError(f"{what}: it ends before {self.path(i)!r} does")
        return data

    def _descriptor(self, shard: int) -> int:
        """Of the shard's file; each process opens its own, the least recently used is closed."""
        key = os.getpid(), shard
        if key in self._files:
            self._files.move_to_end(key)
            return self._files[key]
        if len(self._files) >= _OPEN_SHARDS:
            (process, _), descriptor = self._files.popitem(last=False)
            if process == os.getpid():
                os.close(descriptor)
        self._files[key] = os.open(self.shards[shard], os.O_RDONLY)
        return self._files[key]

    def __getstate__(self) -> dict:
        """Of a copy for another process, which reads the index by itself: a million records are not sent around."""
        return {"arguments": (self.folder, self.root), "reference": self.reference}

    def __setstate__(self, state: dict) -> None:
        self.__init__(*state["arguments"])
        self.reference = state["reference"]
