"""Reads files behind a URL by a library, whose calls get a deadline and are tried again.

A call runs in a thread of its own, because the time limits of libraries are those of single packets, or none. A call
that takes too long is left behind there.
"""

import errno
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Protocol

from util.data.images import FILE_ERRORS
from util.data.workers import time_of_signal

MAX_READS = 32  # of a process, at once
TIMEOUT = 12  # seconds without a byte
SLOWEST = 100_000  # bytes per second, after the first TIMEOUT seconds
WAITS = (0.3, 1.0, 3.0, 3.0, 3.0)  # seconds between tries
LAST_TRY = 15.0  # seconds after which no other try begins
GRACE = 4.0  # seconds that a call may take after a signal


class Store(Protocol):
    """Files below a URL. It may be pickled and forked: each process opens connections of its own."""

    url: str  # without login and query

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Returns `size` bytes of a file. One try, without a deadline.

        FileNotFoundError or PermissionError if the server says so; another OSError for any other or no answer.
        """


def joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)


class Call:
    """A call of a library, `work`, in a thread. A try lasts at most `seconds`, and GRACE if a signal ends the process.

    place: what is read, for messages.
    """

    def __init__(self, place: str, work: Callable[[], Any], seconds: float) -> None:
        self.place = place
        self.work = work
        self.seconds = seconds
        self._begin()

    def _begin(self) -> None:
        """Begins a try."""
        now = time.monotonic()
        self.end = now + self.seconds
        self.end_after_signal = now + GRACE
        self.future: Future[Any] = Future()
        threading.Thread(target=self._run, args=(self.future,), daemon=True).start()

    def _run(self, future: Future[Any]) -> None:
        try:
            future.set_result(self.work())
        except Exception as error:
            future.set_exception(error)

    def _wait(self) -> Any:
        """Waits for the try, and returns or raises what it does. OSError if it takes too long."""
        while not wait([self.future], timeout=0.25).done:
            if time.monotonic() > min(self.end, max(self.end_after_signal, time_of_signal() + GRACE)):
                raise OSError(errno.ETIMEDOUT, f"{self.place}: the server is silent or too slow")
        return self.future.result()

    def result(self) -> Any:
        """Returns the result. While the storage fails it tries again, but not after a signal.

        FileNotFoundError and PermissionError are raised at once.
        """
        end = time.monotonic() + LAST_TRY
        for pause in WAITS:
            try:
                return self._wait()
            except OSError as error:
                if error.errno in FILE_ERRORS or time.monotonic() + pause > end or is_ending():
                    raise
                time.sleep(pause)
                if is_ending():
                    raise
            self._begin()
        return self._wait()


def is_ending() -> bool:
    """Whether a signal ends this process, or the trainer of this worker."""
    return time_of_signal() < math.inf
