"""Images inside large files: shards of `scripts/pack_dataset.py`, or tars as they are. Read in place, never extracted.

An index says where each image lies: `index.npy`, one record an image, and `index.json`, written last, with the shards' sizes,
the classes and the hash of the former. Any image can be had at any time by one `pread`, so packed data has the addressed
randomness and the exact resume of a folder, and its order.
"""

import hashlib
import json
import os
import re
import tarfile
from pathlib import Path, PurePosixPath

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

INDEX = "index.json"
_FIELDS = [("offset", "<i8"), ("length", "<i8"), ("shard", "<i4"), ("label", "<i4")]


class IndexError_(ValueError):
    """An index or its shards are not what they should be; the message is for the user."""


def records(rows):
    """[(offset, length, shard, label, name)] -> a structured array; names are bytes."""
    width = max([1, *(len(row[4]) for row in rows)])
    return np.array([tuple(row) for row in rows], [*_FIELDS, ("name", f"S{width}")])


def write_index(folder, rows, shards, classes, **facts):
    """Writes `folder`/index.npy and then, in one rename, index.json.

    rows: records; shards: [{"name": path relative to the shards' root, "size": bytes, ...}]; facts: JSON-able.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path, write in (
        (folder / "index.npy", lambda file: np.save(file, rows)),
        (folder / INDEX, lambda file: file.write(json.dumps(content, indent=1).encode())),
    ):
        if path.name == INDEX:
            digest = hashlib.sha256((folder / "index.npy").read_bytes()).hexdigest()
            content = {"num_images": len(rows), "classes": classes, "index_sha256": digest, "shards": shards, **facts}
        temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
