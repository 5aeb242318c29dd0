"""Images inside large files: shards of `scripts/pack_dataset.py`, or tars as they are. Read in place, never extracted.

An index says where each image lies: `index.npy`, a record an image, and `index.json`, written last, with the shards and their
sizes, the classes, and the hash of the records. Any image can be had at any time by one `pread`, so packed data has the
addressed randomness, the exact resume and, if it was packed from one, the order of a folder.
"""

import hashlib
import io
import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
from PIL import Image

from util.decode import PILLOW_ERRORS
from util.images import EncodedImages, ImageError

INDEX = "index.json"
_FIELDS = [("shard", "<i4"), ("label", "<i4"), ("offset", "<i8"), ("length", "<i8"), ("crc32", "<u4")]
_OPEN_SHARDS = 64  # file descriptors that a process holds


def records(rows):
    """[(shard, label, offset, length, crc32, name as bytes)] -> a structured array, which a memory map can read."""
    width = max([1, *(len(row[-1]) for row in rows)])
    return np.array([tuple(row) for row in rows], [*_FIELDS, ("name", f"S{width}")])


def write_index(folder, rows, shards, classes, **facts):
    """Writes `folder`/index.npy and, last, index.json. shards: [{"name": path, "size": bytes, ...}]; facts: JSON-able."""
    buffer = io.BytesIO()
    np.save(buffer, rows)
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    content = {"num_images": len(rows), "classes": classes, "index_sha256": digest, "shards": shards, **facts}
    write_atomically(folder / "index.npy", buffer.getbuffer())
    write_atomically(folder / INDEX, json.dumps(content, indent=1).encode())


def write_atomically(path, data):
    """A file that exists whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_index(folder):
    """-> (content of index.json, records as a read-only memory map); ValueError where they do not belong together."""
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        wanted, shards, classes = content["index_sha256"], content["shards"], content["classes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder / INDEX)!r} is no index of packed images ({type(error).__name__}: {error})") from error
    path = folder / "index.npy"
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
        raise ValueError(f"{str(path)!r} is missing or not what {INDEX} describes; pack the data again, or fetch both files again")
    assert isinstance(shards, list) and isinstance(classes, list), content.keys()
    return content, np.load(path, mmap_mode="r")


class PackedImages(EncodedImages):
    """The images of an index in `folder`, whose shards lie in `root` (default: there, too).

    ValueError where a shard is missing or has another size than when it was indexed, or, with `labelled`, without classes.
    """

    def __init__(self, folder, root=None, labelled=False, check_images=16):
        folder = Path(folder)
        self.root = Path(root or folder)
        self.content, self.records = read_index(folder)
        self.classes, self.labels = self.content["classes"], np.array(self.records["label"], np.int64)
        self.shards, self._files = [self.root / shard["name"] for shard in self.content["shards"]], OrderedDict()
        if labelled and not self.classes:
            raise ValueError(f"the packed images in {str(folder)!r} have no labels")
        if not len(self):
            raise ValueError(f"the index in {str(folder)!r} names no image")
        for shard, path in zip(self.content["shards"], self.shards, strict=True):
            size = path.stat().st_size if path.is_file() else None
            if size != shard["size"]:
                found = "is missing" if size is None else f"has {size} bytes"
                raise ValueError(f"shard {str(path)!r} {found}; {shard['size']} bytes were indexed: fetch or pack it again")
        for i in np.unique(np.linspace(0, len(self) - 1, min(check_images, len(self))).astype(int)):
            try:
                Image.open(io.BytesIO(self.read(i))).close()
            except PILLOW_ERRORS as error:
                raise ImageError(f"{self.path(i)!r} is not a readable image ({error}); see pack_dataset.py --verify") from error

    def path(self, i):
        record = self.records[i]
        return f"{self.shards[record['shard']]}: {os.fsdecode(bytes(record['name']))}"

    def read(self, i):
        shard, _, offset, length, *_ = self.records[i].item()
        try:
            data = os.pread(self._descriptor(shard), length, offset)
        except OSError as error:
            raise ImageError(f"shard {str(self.shards[shard])!r} cannot be read: {error}") from error
        if len(data) != length:
            raise ImageError(f"shard {str(self.shards[shard])!r} has become shorter: it ends before {self.path(i)!r} does")
        return data

    def _descriptor(self, shard):
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

    def __getstate__(self):
        """Of a copy for another process: descriptors are not for sharing, and the records are mapped anew."""
        return self.__dict__ | {"_files": OrderedDict(), "records": np.array(self.records)}
