"""What ends a run from outside: signals, and a watchdog that ends a process that hangs.

Signals ask a run to stop: it finishes the step, saves a checkpoint, and ends. The same command resumes it.

SLURM sends TERM before it cancels or preempts a job, and the signal of `--signal` before the time limit. A terminal
sends INT, and HUP when it is closed. The handlers only set a flag. All ranks must stop after the same step, so they
all-reduce the flag every step, asynchronously, and read the result one step later.

The watchdog names the process that all others wait for. A collective waits for its slowest process without end.
Therefore each process writes its position to a shared store. A process without progress for `timeout` seconds reads the
positions, prints its stacks and who is behind, and exits with code 75. torchrun or SLURM's requeue then restarts the
run from its last checkpoint. While the model compiles, it allows an hour.
"""

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from util.data.workers import SIGNALS
from util.run.cli import TEMPORARY

PATIENCE = 5.0  # seconds; a later second signal ends the process at once (SLURM sends TERM twice within 0.1 s)


class StopSignal:
    """Context manager that handles signals. Every rank calls `agreed` once per step, and then `settle` or `finish`.

    On a GPU the all-reduce has its own stream, and the host waits for the one of the previous step only, so the device
    always has work queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.name: str | None = None  # of the signal that this process received
        self.error: Exception | None = None  # that would end this process one step later
        self.since = 0.0
        self.pending: tuple[Callable[[], object], torch.Tensor] | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and dist.is_initialized() else None
        self.previous: dict[signal.Signals, Any] = {}  # handlers
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # nohup starts programs with HUP ignored, which stays so.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self.previous[number] = signal.signal(number, self._handle)

    def __enter__(self) -> "StopSignal":
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the previous handlers."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self.since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self.since > PATIENCE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def fail(self, error: Exception) -> None:
        """Stops all ranks, as a signal does, before `error` would end this one."""
        self.error = error

    @property
    def is_asked(self) -> bool:
        """Whether this process has a reason to stop."""
        return self.name is not None or self.error is not None

    def agreed(self) -> bool:
        """Whether to stop after this step. All ranks get the same answer, one step after the first one's signal."""
        if not dist.is_initialized():
            return self.is_asked
        stop = self.settle()
        self.pending = self._start_all_reduce(float(self.is_asked))
        return stop

    def _start_all_reduce(self, flag: float) -> tuple[Callable[[], object], torch.Tensor]:
        """Returns a function that waits for the all-reduce, and the CPU tensor that then holds the sum of all flags."""
        if self.stream is None:
            flags = torch.full((1,), flag)
            return dist.all_reduce(flags, async_op=True).wait, flags
        with torch.cuda.stream(self.stream):
            flags = torch.full((1,), flag, device=self.stream.device)
            dist.all_reduce(flags)
            result = torch.empty(1, pin_memory=True).copy_(flags, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event.synchronize, result

    def settle(self) -> bool:
        """Waits for the last all-reduce and returns whether any rank has a reason to stop. To be called at the end."""
        if self.pending is None:
            return False
        wait, flags = self.pending
        self.pending = None
        wait()
        return bool(flags.item())

    def finish(self) -> None:
        """Settles at the end of a finished run. From the end of the context on, USR1 and USR2 are ignored.

        A batch system may send these while the process ends. They would kill it, or make submitit requeue the job.
        """
        self.settle()
        for number in {signal.SIGUSR1, signal.SIGUSR2} & self.previous.keys():
            self.previous[number] = signal.SIG_IGN


# ------------------------------------------------------------------------------------------------------------- watchdog

NOTICE = 10.0  # seconds after which a process says whom it waits for
# In the order of a step. The second micro-batch of a step continues with 4, 5, ...
PHASES = ("waiting for data", "in the forward pass", "in the backward pass or waiting for others", "between two steps")
DATA, FORWARD, BACKWARD, BETWEEN = range(len(PHASES))
COMPILE_TIMEOUT = 3600.0  # seconds; a large model takes tens of minutes where no cache has it


def first_timeout(dist_timeout: float, compiles: bool) -> float:
    """Returns the time-out of what may have to compile: the first steps, the first evaluation."""
    return max(dist_timeout, COMPILE_TIMEOUT) if compiles else dist_timeout


class Watchdog(threading.Thread):
    """Context manager: ends this process if `heartbeat` is not called for `limit` seconds after its first call.

    `limit` is `first` until `end_first_steps`, and in `first_time`; else it is `timeout`. store: shared by all
    `world_size` processes; None for a single process.
    """

    def __init__(
        self, timeout: float, first: float, rank: int = 0, world_size: int = 1, store: dist.Store | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.timeout, self.first, self.limit = timeout, first, first
        self.rank, self.world_size, self.store = rank, world_size, store
        self.known: set[object] = set()
        self.step, self.phase = 0, DATA
        self.since: float | None = None
        self.stopped = threading.Event()

    def heartbeat(self, step: int, phase: int) -> None:
        """Tells that this process entered a phase of an optimizer step. Cheap: three assignments."""
        self.step, self.phase, self.since = step, phase, time.monotonic()

    def end_first_steps(self) -> None:
        """Tells that all processes have made a whole step."""
        self.limit = self.timeout

    @contextmanager
    def first_time(self, work: object) -> Iterator[None]:
        """Context of `work` between steps, such as an evaluation. It has more time when it is done for the first time.

        All processes must have ended it when the context ends.
        """
        before = self.limit
        if work not in self.known:
            self.known.add(work)
            self.limit = self.first
        yield
        self.limit = before

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
            faulthandler.dump_traceback_later(5 * self.limit, exit=True, file=2)
            self._write_note()
            if time.monotonic() - self.since > self.limit:
                self._end_process(pulse)
        faulthandler.cancel_dump_traceback_later()

    def _write_note(self, beat: str | None = None) -> None:
        """Publishes step, phase, beat (default: the time) and host of this process."""
        if self.store is not None:
            with suppress(RuntimeError):  # the process that keeps the store is gone or stopped
                note = f"{self.step} {self.phase} {beat or time.time()} {socket.gethostname()}"
                self.store.set(f"watchdog/{self.rank}", note)

    def _end_process(self, pulse: float) -> None:
        stacks = _all_stacks()
        reason = f"process {self.rank} made no progress for {self.limit:g} s: {self._find_cause(pulse)}"
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
        """Returns (step, phase, beat, host) of a process, or None if the store does not have it."""
        assert self.store is not None
        try:
            self.store.wait([f"watchdog/{rank}"], timedelta(seconds=max(1.0, pulse)))
            step, phase, beat, host = self.store.get(f"watchdog/{rank}").decode().split()
        except RuntimeError:
            return None
        return int(step), int(phase), beat, host


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
