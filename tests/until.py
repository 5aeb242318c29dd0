"""Waits for what another thread or process does, as long as a busy machine may need for it."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], explain: Callable[[], object] = str, seconds: float = 900) -> None:
    """Returns once `condition()` is true. AssertionError with `explain()` if it still is not after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it never came {explain()}"
        time.sleep(0.1)
