"""Ends a process that hangs, and names the process that all others wait for.

A collective waits for its slowest process without end. Therefore each process writes its position to a shared store. A
process without progress for `timeout` seconds reads the positions, prints its stacks and who is behind, and exits with
code 75. torchrun or SLURM's requeue then restarts the run from its last checkpoint.
"""

import faulthandler
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

TEMPORARY = 75  # exit code: the same command may succeed later (EX_TEMPFAIL)
NOTICE = 10.0  # seconds after which a process says whom it waits for
# In the order of a step. The second micro-batch of a step continues with 4, 5, ...
PHASES = ("waiting for data", "in the forward pass", "in the backward pass or waiting for others", "between two steps")
DATA, FORWARD, BACKWARD, BETWEEN = range(len(PHASES))


class Watchdog(threading.Thread):
    """Context manager: ends this process if `reached` is not called for `timeout` seconds after its first call.

    store: shared by all `world_size` processes; None for a single process.
    """

    def __init__(self, timeout: float, rank: int = 0, world_size: int = 1, store: dist.Store | None = None) -> None:
        super().__init__(daemon=True)
        self.timeout, self.rank, self.world_size, self.store = timeout, rank, world_size, store
        self.step, self.phase = 0, DATA
        self.since: float | None = None
        self.stopped = threading.Event()

    def reached(self, step: int, phase: int) -> None:
        """Tells that this process entered a phase of an optimizer step. Cheap: three assignments."""
        self.step, self.phase, self.since = step, phase, time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.join()

    def run(self) -> None:
        """Watches in this thread until the context ends."""
        self._write_note()
        pulse, before = min(5.0, self.timeout / 5), time.monotonic()
        while not self.stopped.wait(pulse):
            suspended, before = time.monotonic() - before > 2 * pulse + 1, time.monotonic()
            if self.since is None:
                continue
            if suspended:  # the whole process was, so its timer restarts
                self.since = before
            # Native code that holds the GIL stops this thread, but not faulthandler's timer.
            faulthandler.dump_traceback_later(5 * self.timeout, exit=True, file=2)
            self._write_note()
            if time.monotonic() - self.since > self.timeout:
                self._end_process(pulse)
        faulthandler.cancel_dump_traceback_later()

    def _write_note(self, heartbeat: str | None = None) -> None:
        """Publishes step, phase, heartbeat (default: the time) and host of this process."""
        if self.store is not None:
            with suppress(RuntimeError):  # the process that keeps the store is gone or stopped
                note = f"{self.step} {self.phase} {heartbeat or time.time()} {socket.gethostname()}"
                self.store.set(f"watchdog/{self.rank}", note)

    def _end_process(self, pulse: float) -> None:
        stacks = _all_stacks()
        reason = f"process {self.rank} made no progress for {self.timeout:g} s: {self._find_cause(pulse)}"
        _print_error(f"{stacks}{reason}; exit code {TEMPORARY}")
        self._write_note("left")
        os._exit(TEMPORARY)

    def _find_cause(self, pulse: float) -> str:
        """Names the processes whose heartbeat has stopped, else those that are furthest behind."""
        own = f"it is {_describe(self.step, self.phase)}"
        if self.store is None:
            return own
        if self._read_note(self.rank, pulse) is None:
            return f"{own}, and the store of all processes' notes, with process 0 or with torchrun, does not answer"
        before = [self._read_note(rank, pulse) for rank in range(self.world_size)]
        for _ in range(3):
            time.sleep(pulse)
            self._write_note()
        silent, notes = [], []
        for rank in range(self.world_size):
            note = self._read_note(rank, pulse)
            if note is None:
                silent.append(f"process {rank}")
            elif note == before[rank] and note[2] != "left":
                silent.append(f"process {rank} on {note[3]}")
            else:
                notes.append(note)
        if silent:
            return f"{own}, and there is no heartbeat from {', '.join(silent)}"
        last = min(note[:2] for note in notes)
        behind = [f"process {rank} on {note[3]}" for rank, note in enumerate(notes) if note[:2] == last]
        if len(behind) == self.world_size:
            return f"all are {_describe(*last)}"
        return f"{own}; furthest behind is {', '.join(behind)}, {_describe(*last)}"

    def _read_note(self, rank: int, pulse: float) -> tuple[int, int, str, str] | None:
        """Returns (step, phase, heartbeat, host) of a process, or None if the store does not have it."""
        assert self.store is not None
        try:
            self.store.wait([f"watchdog/{rank}"], timedelta(seconds=max(1.0, pulse)))
            step, phase, heartbeat, host = self.store.get(f"watchdog/{rank}").decode().split()
        except RuntimeError:
            return None
        return int(step), int(phase), heartbeat, host


@contextmanager
def bounded_wait(what: str, timeout: float, with_notice: bool = True) -> Iterator[None]:
    """Ends this process with exit code 75, and prints all stacks, if the context lasts longer than `timeout` seconds.

    what: what this process waits for, printed after `NOTICE` seconds unless `with_notice` is False.
    """
    done = threading.Event()

    def watch() -> None:
        first = min(NOTICE, timeout)
        if done.wait(first):
            return
        if with_notice:
            _print_error(what)
        if not done.wait(timeout - first):
            _print_error(f"{_all_stacks()}{what}; given up after {timeout:g} s, exit code {TEMPORARY}")
            os._exit(TEMPORARY)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _all_stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


def _print_error(text: str) -> None:
    """Writes to stderr in one call, since other processes write there, too."""
    print(f"{text}\n", end="", file=sys.__stderr__, flush=True)


def _describe(step: int, phase: int) -> str:
    return f"{PHASES[phase % len(PHASES)]}, step {step + 1}"
