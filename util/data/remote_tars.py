"""Packed shards behind a URL, and their copies on local disk.

A cache holds a folder for each data set: its index and, with --data_cache, whole shards. A data set is known by the
header of its index, which names the SHA-256 of each shard. Who opens a shard marks it as used. The shards that a run
has used stay while it lasts. Readers keep their open files, and read remotely what is no longer there.
"""

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from util import collectives
from util.atomic import replaced_file
from util.data.folders import MissingSplit, choose_split, note_stand_in
from util.data.images import Images, retry_io
from util.data.remote import PIECE, WAITS, ReadAhead, Store, WrongAnswer, joined, read
from util.data.tars import INDEX, LocalTars, Span, TarImages, objection, read_index, user_cache
from util.data.workers import begin_beside_gpu, kill_at_exit
from util.text import count_of

BEGIN = time.time()
MAX_INDEX = 2**36  # bytes


@dataclass(frozen=True)
class DataCache:
    """A folder of copies alone, and the gigabytes that shards may take in it. 0: no shards, only indexes."""

    root: Path
    gigabytes: float

    @contextmanager
    def lock(self, suffix: str) -> Iterator[None]:
        """Waits for the other processes of this node that write files of this suffix: indexes, or shards, which take
        long. What killed ones have left is removed.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / f".lock{suffix}", "a") as file:
            with suppress(OSError):  # of a file system without locks, where two may copy the same
                fcntl.flock(file, fcntl.LOCK_EX)
                for leftover in self.root.glob(f"*/.*.tmp-*{suffix}"):
                    leftover.unlink()
            yield

    def make_space(self, num_bytes: int) -> bool:
        """Whether a shard of this size may come, after removing what was used longest ago, before this process began.

        Only within `lock(".tar")`.
        """
        stats = {path: path.stat() for path in self.root.glob("*/*.tar")}
        by_use = sorted(stats, key=lambda path: stats[path].st_mtime)
        old = [path for path in by_use if stats[path].st_mtime < BEGIN]
        excess = sum(stat.st_size for stat in stats.values()) + num_bytes - self.gigabytes * 1e9
        if excess > sum(stats[path].st_size for path in old):
            return False
        while excess > 0:
            path = old.pop(0)
            path.unlink()
            excess -= stats[path].st_size
        return True


class RemoteTars(LocalTars):
    """Tars in a folder of a store, or those that are in the local folder `copies`."""

    def __init__(self, store: Store, place: str, copies: Path) -> None:
        super().__init__(copies)
        self.store = store
        self.place = place
        self.root = joined(store.url, place)
        self._doubtful: set[str] = set()  # tars of which the last read has failed for good

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteTars, (self.store, self.place, self.folder)

    def path(self, tar: str) -> str:
        return joined(str(self.root), tar)

    def sizes(self, tars: Sequence[str]) -> dict[str, int] | None:
        return retry_io(lambda: self.store.sizes(self.place), WAITS, sum(WAITS))

    def is_slow(self, tar: str) -> bool:
        return not (self.folder / tar).exists()

    def read(self, span: Span) -> bytes:
        with suppress(OSError):
            data = self._read_at(span)
            if not objection(span, data):
                return data
        waits: Sequence[float] = WAITS
        if span.tar in self._doubtful:  # it may have been replaced, with thousands of images
            waits = ()
        try:
            data = retry_io(lambda: self._read_remote(span), waits, sum(WAITS))
        except (WrongAnswer, PermissionError):
            self._check_storage()
            self._doubtful.add(span.tar)
            data = self._read_last(span)
        self._doubtful.discard(span.tar)
        return data

    def _read_last(self, span: Span) -> bytes:
        """Reads from a storage that works, but may have failed until now. WrongAnswer if it refuses this tar alone."""
        try:
            return self._read_remote(span)
        except PermissionError as error:
            raise WrongAnswer(errno.EACCES, error.strerror) from error

    def _read_remote(self, span: Span) -> bytes:
        data = self.store.read(joined(self.place, span.tar), span.offset, span.size, span.tar_size)
        problem = objection(span, data)
        if problem:
            raise WrongAnswer(errno.EIO, problem)
        return data

    def _check_storage(self) -> None:
        """OSError, which may pass, unless the storage gives the first bytes of the index. A login may have expired."""
        try:
            read(self.store, joined(self.place, INDEX), 0, 8)
        except (WrongAnswer, PermissionError) as error:
            raise OSError(errno.EIO, error.strerror) from error


# -------------------------------------------------------------------------------------------------------------- open


def find_split(store: Store, split: str, labelled: bool) -> tuple[str, list[str]]:
    """Returns (folder of the shards that are read for a split, notes): URL/train, URL/val, URL/test, or the URL itself.

    labelled: images of another split, or of all, are refused. MissingSplit if there are none of the split. ValueError
    if there are none at all, or if the server does not serve ranges of files.
    """
    denied: list[PermissionError] = []

    def is_there(folder: str) -> bool:
        try:
            read(store, joined(folder, INDEX), 0, 8)
        except PermissionError as error:  # S3 may answer so if a file is missing
            denied.append(error)
            return False
        except WrongAnswer as error:
            if error.errno != errno.ENOENT:
                raise ValueError(f"--data_path {store.url!r} cannot be read: {error.strerror}") from error
            return False
        return True

    found = [name for name in ("train", "val", "test") if is_there(name)]
    chosen = choose_split(found, split, labelled)
    if chosen is not None:
        return chosen, note_stand_in(f"{chosen}/", chosen, split)
    if not found and not labelled and is_there(""):
        return "", []
    if not found and denied:
        raise denied[0]
    expected = f"expected is {split}/{INDEX}, beside the shards that scripts/pack_dataset.py writes"
    if found or labelled:
        raise MissingSplit(f"--data_path {store.url!r} has no packed shards for {split}: {expected}")
    raise ValueError(f"--data_path {store.url!r} has no packed shards: {expected}")


def open_remote_tars(
    store: Store, folder: str, labelled: bool, notes: Sequence[str], cache: DataCache | None, **reading: Any
) -> TarImages:
    """Returns the images of packed shards in a folder of a store. The index is copied to the cache, or the user's.

    ValueError if the shards are damaged, or if the images have no labels although they must be `labelled`.
    """
    if cache is None:
        cache = DataCache(user_cache() / "remote", 0)
    index = copy_index(store, folder, cache)
    storage = RemoteTars(store, folder, index.parent)
    images = TarImages(index, storage, notes, **reading)
    if labelled and not images.classes:
        raise ValueError(f"the images of {storage.root!r} have no labels: pack class folders")
    if cache.gigabytes:
        copied = [tar for tar in images.tars if not storage.is_slow(tar)]
        for tar in copied:
            with suppress(OSError):
                os.utime(storage.folder / tar)  # it is used
        images.notes.append(f"{len(copied)} of {count_of(len(images.tars), 'shard')} are in --data_cache {cache.root}")
    return images


def copy_index(store: Store, folder: str, cache: DataCache) -> Path:
    """Returns a copy of the index, which is kept until the remote one changes. ValueError if that is none."""
    name = joined(folder, INDEX)
    header_bytes = int.from_bytes(read(store, name, 0, 8), "little")
    try:
        header = read(store, name, 8, min(header_bytes, 10**8))  # the limit of the format
        tensors = json.loads(header)
        del tensors["__metadata__"]
        num_bytes = 8 + header_bytes + int(max(tensor["data_offsets"][1] for tensor in tensors.values()))
        if num_bytes > MAX_INDEX:
            raise ValueError(f"it would have {num_bytes} bytes")
    except (WrongAnswer, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{joined(store.url, name)!r} is not a valid index: copy or pack it again") from error
    index = cache.root / hashlib.sha256(header).hexdigest()[:16] / INDEX
    with suppress(ValueError):  # missing or damaged
        read_index(index)
        return index
    with cache.lock(index.suffix):
        with suppress(ValueError):  # another process may have copied it meanwhile
            read_index(index)
            return index
        index.parent.mkdir(exist_ok=True)
        copy_file(store, name, num_bytes, index)
    return index


def copy_file(store: Store, name: str, num_bytes: int, target: Path, sha256: str | None = None) -> None:
    """Copies a file, whose place it takes when it is whole. ValueError if it has another SHA-256."""
    pieces = {first: min(PIECE, num_bytes - first) for first in range(0, num_bytes, PIECE)}
    digest = hashlib.sha256()
    with (
        ReadAhead(lambda first: read(store, name, first, pieces[first], num_bytes), pieces) as ahead,
        replaced_file(target, durable=True) as temporary,
        open(temporary, "wb") as file,
    ):
        for first in pieces:
            piece = ahead.take(first)
            digest.update(piece)
            file.write(piece)
        if sha256 is not None and digest.hexdigest() != sha256:
            raise ValueError("it is not what was packed: its SHA-256 differs")


# -------------------------------------------------------------------------------------------------------------- copy


def begin_copying(images: Images, cache: DataCache | None) -> None:
    """Begins to copy the shards of these images into the cache, in a process of its own, once per node."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if cache is None or not is_first or not isinstance(images, TarImages):
        return
    collectives.settle_threads()
    arguments = (images.storage, images.content["tars"], cache)
    process = multiprocessing.Process(target=copy_shards, args=arguments, daemon=True)
    process.start()
    kill_at_exit({process})


def copy_shards(storage: RemoteTars, tars: Sequence[dict[str, Any]], cache: DataCache) -> None:
    """Copies and verifies the shards that are not in the cache, one by one, until no more fit or one fails."""
    begin_beside_gpu(0)
    for tar in tars:
        name = Path(tar["name"]).name
        target = storage.folder / name
        try:
            with cache.lock(".tar"):
                if target.exists():
                    continue
                if not cache.make_space(tar["size"]):
                    full = f"--data_cache_gb {cache.gigabytes:g} has no space"
                    print(f"note: {full} for {storage.path(name)} and others", file=sys.stderr, flush=True)
                    return
                copy_file(storage.store, joined(storage.place, name), tar["size"], target, tar["sha256"])
        except (OSError, ValueError) as error:
            print(f"warning: --data_cache lacks {storage.path(name)} and others: {error}", file=sys.stderr, flush=True)
            return
