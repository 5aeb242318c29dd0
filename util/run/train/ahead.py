"""Batches that are loaded before they are needed, so that all ranks can stop before one of them lacks a batch."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from util.data.images import ImageError
from util.run.processes.supervise import Stopped, StopSignal


class BatchesAhead:
    """Iterator over the next batches of this process, which are loaded so early that a failure stops all ranks in time.

    Ranks know what another one asks for at the second question after it. A rank whose data cannot be loaded, or that
    gets a signal while it waits for a batch, still has the batches up to there: no other rank waits for it in a step.
    """

    def __init__(self, batches: Iterator[Any], num_batches: int, num_ahead: int, stop: StopSignal) -> None:
        """num_batches: to be taken from `batches`. num_ahead: as many as are used between three questions."""
        self.batches = batches
        self.num_left = num_batches  # that are not loaded
        self.num_ahead = num_ahead
        self.stop = stop
        self.loaded: deque[Any] = deque()
        self.load(num_ahead)

    def __iter__(self) -> "BatchesAhead":
        return self

    def __next__(self) -> Any:
        self.load(self.num_ahead + 1)
        if not self.loaded:
            raise StopIteration
        return self.loaded.popleft()

    def load(self, num_batches: int) -> None:
        """Loads until so many batches wait, unless this process asks to stop."""
        stop = self.stop
        try:
            stop.interrupts = True
            while len(self.loaded) < num_batches and self.num_left > 0 and not stop.is_asked:
                self.loaded.append(next(self.batches))
                self.num_left -= 1
        except Stopped:
            pass
        except (ImageError, OSError) as error:
            if stop.name is None:
                stop.error = error
        finally:
            stop.interrupts = False
