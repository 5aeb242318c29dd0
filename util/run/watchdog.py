"""No process waits for ever: one that gets no further ends itself, and all say which process it was that hung.

A collective waits as long as the slowest process takes. Each process notes how far it is in a store that all of them can
read; one that has not moved for a while looks at everyone's notes, prints where its own threads are, says what the notes show,
and leaves with exit code 75. torchrun, or the job's requeue, then starts all of them anew from the last checkpoint.
"""

import faulthandler
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta

TEMPORARY = 75  # the exit code that says: start me again
# In order; of a step's second micro-batch the numbers go on.
PHASES = ("waiting for data", "in the forward pass", "in the backward pass or waiting for others", "between two steps")
DATA, FORWARD, BACKWARD, BETWEEN = range(len(PHASES))


class Watchdog(threading.Thread):
    """`with` it, this process ends if `reached` is not called for `timeout` seconds, once it was called first.

    store: of all `world_size` processes, or None for one process alone.
    """

    def __init__(self, timeout, rank=0, world_size=1, store=None):
        super().__init__(daemon=True)
        self.timeout, self.rank, self.world_size, self.store = timeout, rank, world_size, store
        self.step, self.phase, self.since = 0, DATA, None
        self.stopped = threading.Event()

    def reached(self, step, phase):
        """This process now is in that phase of optimizer step number `step`. It costs three assignments."""
        self.step, self.phase, self.since = step, phase, time.monotonic()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.join()

    def run(self):
        self._note()  # a process that hangs at once has said where it runs
        pulse, before = min(5.0, self.timeout / 5), time.monotonic()
        while not self.stopped.wait(pulse):
            overslept, before = time.monotonic() - before > 2 * pulse + 1, time.monotonic()
            if self.since is None:
                continue
            if overslept:  # all of this process was stopped for a while, and has lost no time of its own
                self.since = before
            # For code that hangs without giving this thread its turn; that clock needs none.
            faulthandler.dump_traceback_later(5 * self.timeout, exit=True, file=sys.__stderr__)
            self._note()
            if time.monotonic() - self.since > self.timeout:
                self._end(pulse)
        faulthandler.cancel_dump_traceback_later()

    def _note(self, word=None):
        """What the others may read of this process: step, phase, and a time that shows that it is alive at all."""
        if self.store is not None:
            with suppress(RuntimeError):  # where who keeps the store is gone or stopped; that will show
                note = f"{self.step} {self.phase} {word or time.time()} {socket.gethostname()}"
                self.store.set(f"watchdog/{self.rank}", note)

    def _end(self, pulse):
        with tempfile.TemporaryFile("w+") as file:  # to be told in one piece, since others may be speaking
            faulthandler.dump_traceback(file)
            file.seek(0)
            stacks = file.read()
        text = f"{stacks}process {self.rank} got no further for {self.timeout:g} s: {self._verdict(pulse)}; exit code {TEMPORARY}\n"
        sys.__stderr__.write(text)
        sys.__stderr__.flush()
        self._note("left")
        os._exit(TEMPORARY)

    def _verdict(self, pulse):
        """Who hangs: whoever's note does not change, else whoever is furthest behind."""
        own = f"it is {where(self.step, self.phase)}"
        if self.store is None:
            return own
        if self._read(self.rank, pulse) is None:
            return f"{own}, and the store of all processes' notes, with process 0 or with torchrun, does not answer"
        before = [self._read(rank, pulse) for rank in range(self.world_size)]
        for _ in range(3):
            time.sleep(pulse)
            self._note()
        after = [self._read(rank, pulse) for rank in range(self.world_size)]
        silent = [r for r in range(self.world_size) if after[r] is None or (after[r] == before[r] and after[r][2] != "left")]
        if silent:
            names = (f"process {rank}" + (f" on {after[rank][3]}" if after[rank] else "") for rank in silent)
            return f"{own}, and no sign of life comes from {', '.join(names)}"
        last = min(note[:2] for note in after)
        behind = [f"process {rank} on {note[3]}" for rank, note in enumerate(after) if note[:2] == last]
        if len(behind) == self.world_size:
            return f"all are {where(*last)}"
        return f"{own}; furthest behind is {', '.join(behind)}, {where(*last)}"

    def _read(self, rank, pulse):
        """-> (step, phase, time or "left", host) of a process, or None."""
        try:
            self.store.wait([f"watchdog/{rank}"], timedelta(seconds=max(1.0, pulse)))
            step, phase, when, host = self.store.get(f"watchdog/{rank}").decode().split()
        except RuntimeError:
            return None
        return int(step), int(phase), when, host


def where(step, phase):
    return f"{PHASES[phase % len(PHASES)]}, step {step + 1}"
