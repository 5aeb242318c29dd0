"""Reads files behind a URL by a library, whose calls get a deadline and are tried again.

A call runs in a thread of its own, because the time limits of libraries are those of single packets, or none. A call
that takes too long is left behind there.
"""

import errno
import importlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Protocol

from util.data.images import FILE_ERRORS
from util.data.workers import time_of_signal

STORES = {"http": "http_store", "https": "http_store", "hf": "http_store"}  # of other protocols: object_store
MAX_READS = 32  # of a process, at once
TIMEOUT = 12  # seconds without a byte
SLOWEST = 100_000  # bytes per second, after the first TIMEOUT seconds
WAITS = (0.3, 1.0, 3.0, 3.0, 3.0)  # seconds between tries
LAST_TRY = 15.0  # seconds after which no other try begins
GRACE = 4.0  # seconds that a call may take after a signal


class Store(Protocol):
    """Files below a URL. It may be pickled and forked: each process opens connections of its own."""

    url: str  # without login and query

    def read(self, name: str, offset: int, size: int, file_size: int | None = None) -> bytes:
        """Returns `size` bytes of a file that should have `file_size`. One try, without a deadline.

        FileNotFoundError or PermissionError if the server says so; another OSError for any other or no answer.
        """

    def sizes(self, folder: str) -> dict[str, int] | None:
        """Returns the bytes of the files in a folder, by one listing; None if there is no listing. Errors as `read`."""


def open_store(url: str) -> Store:
    """Returns the files below a URL. Nothing is read. ValueError if a package is missing."""
    scheme = url.partition("://")[0]
    try:
        module = importlib.import_module(f"util.data.{STORES.get(scheme, 'object_store')}")
        return module.open_store(url)
    except ImportError as error:
        raise ValueError(f"--data_path {url!r} needs a package: pip install {error.name}") from error


def joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)


class Call:
    """A call of a library in a thread, which lasts at most `seconds`, and GRACE if a signal ends the process.

    place: what is read, for messages.
    """

    def __init__(self, place: str, work: Callable[[], Any], seconds: float) -> None:
        self.place = place
        self.end = time.monotonic() + seconds
        self.end_after_signal = time.monotonic() + GRACE
        self.future: Future[Any] = Future()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.future.set_result(work())
        except Exception as error:
            self.future.set_exception(error)

    def result(self) -> Any:
        """Waits for the call, and returns or raises what it does. OSError if it takes too long."""
        while not wait([self.future], timeout=0.25).done:
            if time.monotonic() > min(self.end, max(self.end_after_signal, time_of_signal() + GRACE)):
                raise OSError(errno.ETIMEDOUT, f"{self.place}: the server is silent or too slow")
        return self.future.result()


def retry(place: str, work: Callable[[], Any], seconds: float, begun: Call | None = None) -> Any:
    """Calls `work`, at most `seconds` long, and again while the storage fails, but not after a signal.

    place: what is read, for messages. begun: the first try, if it runs already. FileNotFoundError and PermissionError
    are raised at once.
    """
    end = time.monotonic() + LAST_TRY
    call = begun or Call(place, work, seconds)
    for pause in WAITS:
        try:
            return call.result()
        except OSError as error:
            if error.errno in FILE_ERRORS or time.monotonic() + pause > end or is_ending():
                raise
            time.sleep(pause)
            if is_ending():
                raise
        call = Call(place, work, seconds)
    return call.result()


def is_ending() -> bool:
    """Whether a signal ends this process, or the trainer of this worker."""
    return time_of_signal() < math.inf
