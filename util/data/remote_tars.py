"""Packed shards behind a URL: the images of a batch are read at the same time, each by its range."""

import errno
import json
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from safetensors.numpy import load

from util.data.folders import MissingSplit, choose_split, note_stand_in
from util.data.images import AS_RGB, Reading
from util.data.remote import MAX_READS, SLOWEST, TIMEOUT, Call, Store, joined
from util.data.tars import INDEX, Index, Span, TarImages, checked_index, valid_index

PIECE = 2**23  # bytes of the index that are read at once


class RemoteTars:
    """Tars in a folder of a store."""

    def __init__(self, store: Store, place: str) -> None:
        self.store = store
        self.place = place
        self.root: str | Path = joined(store.url, place)
        self._waiting: deque[Span] = deque()
        self._begun: dict[Span, Call] = {}

    def prepare(self, spans: Sequence[Span]) -> None:
        """Begins to read spans, at most MAX_READS at once. `read` is about to be called in this order."""
        self._begun = {}
        self._waiting = deque(dict.fromkeys(spans))
        self._begin_reads()

    def read(self, span: Span) -> bytes:
        """See `Storage`. What the storage denies in the middle of a run may come back with the next login."""
        call = self._begun.pop(span, None) or self._begin(span)
        try:
            data = call.result()
        except (FileNotFoundError, PermissionError) as error:
            raise OSError(errno.EIO, error.strerror) from error
        self._begin_reads()
        return data

    def _begin_reads(self) -> None:
        while self._waiting and len(self._begun) < MAX_READS:
            span = self._waiting.popleft()
            self._begun[span] = self._begin(span)

    def _begin(self, span: Span) -> Call:
        work = partial(self.store.read, joined(self.place, span.tar), span.offset, span.size)
        return Call(joined(str(self.root), span.tar), work, TIMEOUT + span.size / SLOWEST)


# -------------------------------------------------------------------------------------------------------------- open


def open_store(url: str) -> Store:
    """Returns the files below a URL. Nothing is read. ValueError if a package is missing."""
    try:
        if url.startswith(("http://", "https://", "hf://")):
            from util.data.http_store import open_http_store

            return open_http_store(url)
        from util.data.object_store import ObjectStore

        return ObjectStore(url)
    except ImportError as error:
        raise ValueError(f"--data_path {url!r} needs a package: pip install {error.name}") from error


def find_split(store: Store, split: str, labelled: bool) -> tuple[str, list[str]]:
    """Returns (folder of the shards that are read for a split, notes): URL/train, URL/val, URL/test, or the URL itself.

    labelled: images of another split, or of all, are refused. MissingSplit if there are none of the split. ValueError
    if there are none at all, or if they are denied.
    """
    denied: list[str] = []

    def is_there(folder: str) -> bool:
        try:
            Call(store.url, lambda: store.read(joined(folder, INDEX), 0, 8), TIMEOUT).result()
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


def open_remote_tars(url: str, split: str = "train", labelled: bool = False, reading: Reading = AS_RGB) -> TarImages:
    """Returns the images of a split in packed shards behind a URL.

    ValueError if there are none, if their index is damaged, or if the images have no labels although they must be
    `labelled`.
    """
    store = open_store(url)
    folder, notes = find_split(store, split, labelled)
    storage = RemoteTars(store, folder)
    return TarImages(read_remote_index(storage), storage, labelled, notes, reading)


def read_remote_index(storage: RemoteTars) -> Index:
    """Returns the index, whose header says how many bytes there are. ValueError if it is damaged."""
    with valid_index(joined(str(storage.root), INDEX)):
        header_bytes = int.from_bytes(storage.read(Span(INDEX, 0, 8)), "little")
        tensors = json.loads(storage.read(Span(INDEX, 8, header_bytes)))
        content = tensors.pop("__metadata__")["content"]
        num_bytes = 8 + header_bytes + max(tensor["data_offsets"][1] for tensor in tensors.values())
        pieces = [Span(INDEX, first, min(PIECE, num_bytes - first)) for first in range(0, num_bytes, PIECE)]
        storage.prepare(pieces)
        data = b"".join(storage.read(piece) for piece in pieces)
        return checked_index(content, load(data))
