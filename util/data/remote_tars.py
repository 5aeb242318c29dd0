"""Packed shards behind a URL: the images of a batch are read at the same time, each by its range."""

import errno
import json
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from util.data.folders import MissingSplit, choose_split, note_stand_in
from util.data.images import AS_RGB, Reading
from util.data.remote import MAX_READS, SLOWEST, TIMEOUT, Call, Store, joined, retry
from util.data.tars import INDEX, Span, TarImages, invalid_index, objection, parse_index

MAX_BYTES = 2**25  # that are read, or wait to be used, at once
PIECE = 2**23  # bytes of the index that are read at once


class RemoteTars:
    """Tars in a folder of a store. See `TarStorage`."""

    def __init__(self, store: Store, place: str) -> None:
        self.store = store
        self.place = place
        self.root: str | Path = joined(store.url, place)
        self._waiting: deque[Span] = deque()
        self._begun: dict[Span, Call] = {}

    def path(self, tar: str) -> str:
        return joined(str(self.root), tar)

    def sizes(self, tars: Sequence[str]) -> dict[str, int] | None:
        return retry(str(self.root), lambda: self.store.sizes(self.place), TIMEOUT)

    def prepare(self, spans: Sequence[Span]) -> None:
        """Begins to read spans, at most MAX_READS and MAX_BYTES at once. `read` is about to be called in this order."""
        self._begun = {}
        self._waiting = deque(dict.fromkeys(spans))
        self._begin_reads()

    def read(self, span: Span) -> bytes:
        """As of `TarStorage`. What the storage denies in the middle of a run may come back with the next login."""
        data = self._read(span)
        if objection(span, data):  # perhaps on its way
            data = self._read(span)
        return data

    def _read(self, span: Span) -> bytes:
        begun = self._begun.pop(span, None)
        try:
            data = retry(self.path(span.tar), partial(self._ask, span), seconds_for(span), begun)
        except (FileNotFoundError, PermissionError) as error:
            raise OSError(errno.EIO, error.strerror) from error
        self._begin_reads()
        return data

    def _begin_reads(self) -> None:
        while self._waiting and len(self._begun) < MAX_READS:
            span = self._waiting[0]
            num_bytes = sum(other.size for other in self._begun) + span.size
            if self._begun and num_bytes > MAX_BYTES:
                break
            self._waiting.popleft()
            self._begun[span] = Call(self.path(span.tar), partial(self._ask, span), seconds_for(span))

    def _ask(self, span: Span) -> bytes:
        return self.store.read(joined(self.place, span.tar), span.offset, span.size, span.tar_size)


def seconds_for(span: Span) -> float:
    return TIMEOUT + span.size / SLOWEST


# -------------------------------------------------------------------------------------------------------------- open


def find_split(store: Store, split: str, labelled: bool) -> tuple[str, list[str]]:
    """Returns (folder of the shards that are read for a split, notes): URL/train, URL/val, URL/test, or the URL itself.

    labelled: images of another split, or of all, are refused. MissingSplit if there are none of the split. ValueError
    if there are none at all, or if they are denied.
    """
    denied: list[str] = []

    def is_there(folder: str) -> bool:
        try:
            retry(store.url, lambda: store.read(joined(folder, INDEX), 0, 8), TIMEOUT)
        except FileNotFoundError:
            return False
        except PermissionError as error:  # S3 may answer so if a file is missing
            denied.append(str(error.strerror))
            return False
        return True

    found = [name for name in ("train", "val", "test") if is_there(name)]
    chosen = choose_split(found, split, labelled)
    if chosen is not None:
        return chosen, note_stand_in(f"{chosen}/", chosen, split)
    if not found and not labelled and is_there(""):
        return "", []
    if not found and denied:
        raise ValueError(f"--data_path {store.url!r} cannot be read: {denied[0]}")
    expected = f"expected is {split}/{INDEX}, beside the shards that scripts/pack_dataset.py writes"
    if found or labelled:
        raise MissingSplit(f"--data_path {store.url!r} has no packed shards for {split}: {expected}")
    raise ValueError(f"--data_path {store.url!r} has no packed shards: {expected}")


def open_remote_tars(
    store: Store, folder: str, labelled: bool = False, notes: Sequence[str] = (), reading: Reading = AS_RGB
) -> TarImages:
    """Returns the images of packed shards in a folder of a store, whose index is read.

    ValueError if the shards are damaged, or if the images have no labels although they must be `labelled`.
    """
    storage = RemoteTars(store, folder)
    index = parse_index(read_whole_index(storage), storage.path(INDEX))
    images = TarImages(index, storage, notes, reading)
    if labelled and not images.classes:
        raise ValueError(f"the images of {storage.root!r} have no labels: pack class folders")
    return images


def read_whole_index(storage: RemoteTars) -> bytes:
    """Returns the bytes of the index, whose header says how many there are."""
    start = storage.read(Span(INDEX, 0, 8, None, None))
    header_bytes = min(int.from_bytes(start, "little"), 10**8)  # the limit of the format
    header = storage.read(Span(INDEX, 8, header_bytes, None, None))
    try:
        tensors = json.loads(header)
        del tensors["__metadata__"]
        num_bytes = 8 + header_bytes + max(tensor["data_offsets"][1] for tensor in tensors.values())
    except (ValueError, KeyError, TypeError) as error:
        raise invalid_index(storage.path(INDEX), error) from error
    pieces = [
        Span(INDEX, first, min(PIECE, num_bytes - first), num_bytes, None) for first in range(0, num_bytes, PIECE)
    ]
    storage.prepare(pieces)
    return b"".join(storage.read(piece) for piece in pieces)
