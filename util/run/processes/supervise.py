"""What ends a run from outside: signals, data that cannot be loaded, and a watchdog for a process that hangs.

Signals ask a run to stop: it finishes the step, saves a checkpoint, and ends. The same command resumes it.

SLURM sends TERM before it cancels or preempts a job, and the signal of `--signal` before the time limit. A terminal
sends INT, and HUP when it is closed. The handlers print a line and set a flag. All ranks must stop at the same place,
so they all-reduce the flag every step, and read the result one step later. Work between steps does so every batch, and
is dropped by the exception `Stopped`.

Each process has a watchdog. Without progress for `timeout` seconds, it prints its stacks and its phase, and exits with
code 75. torchrun or SLURM's requeue then restarts the run from its last checkpoint. Of several
processes, the set-up is watched, too.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from util.collectives import all_reduce_sum
from util.data.images import ImageError
from util.data.workers import SIGNALS, expect_signal, note_signal
from util.run.exits import TEMPORARY


class Stopped(BaseException):
    """The run is to save and to end. All ranks raise it in work between two steps, which the next start then does.

    No Exception: a library that reads an image would catch it, and call the image damaged.
    """


class StopSignal:
    """Context manager that handles signals. Every rank calls `agreed` once per step, and in the end `wait` or `finish`.

    Further signals change nothing: SLURM sends TERM twice, and a second one must not end the save. Only SIGQUIT, which
    is not handled, ends the process at once.

    The host waits for the flags of the previous step only, so a GPU always has work queued.

    A process whose data cannot be loaded asks for the same: see `error` and `BatchesAhead`.
    """

    def __init__(self, device: torch.device) -> None:
        self.name: str | None = None  # of the signal that this process received
        self.error: Exception | None = None  # for which this process asks all to stop, and then raises it
        self.interrupts = False  # whether a signal interrupts what this process does, by `Stopped`
        self.device = device
        self.num_asked: torch.Tensor | None = None  # of the last step, on the CPU once `copied` has happened
        self.copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.copied = torch.cuda.Event(blocking=True)  # without it, the wait keeps a core busy
        self.previous: dict[signal.Signals, Any] = {}  # handlers

    def __enter__(self) -> "StopSignal":
        """Installs the handlers."""
        expect_signal()
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # nohup starts programs with HUP ignored, which stays so.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the previous handlers."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        note_signal()
        if self.name is None:
            self.name = signal.Signals(number).name
        elif number != signal.SIGINT:
            return
        text = (
            f"{self.name}: stopping after this step or batch; a run saves its steps first (SIGQUIT ends it at once)\n"
        )
        with suppress(OSError):
            os.write(2, text.encode())  # `print` may be what the signal has interrupted
        if self.interrupts:
            raise Stopped

    @property
    def is_asked(self) -> bool:
        """Whether this process asks all to stop."""
        return self.name is not None or self.error is not None

    def agreed(self) -> bool:
        """Whether to stop after this step. All ranks get the same answer, one step after the first one's signal."""
        if not dist.is_initialized() and self.device.type != "cuda":
            return self.is_asked
        num_asked = all_reduce_sum(torch.full((1,), float(self.is_asked), device=self.device))
        stop = self.wait()  # on a single GPU, too: so the host never runs far ahead, and its waits are measured
        self.num_asked = num_asked.to("cpu", non_blocking=True)  # to pinned memory
        if self.copied is not None:
            self.copied.record()
        return stop

    def wait(self) -> bool:
        """Waits for the flags of the last step and returns whether any was set. To be called at the end."""
        if self.num_asked is None:
            return False
        if self.copied is not None:
            self.copied.synchronize()
        is_asked = bool(self.num_asked.item())
        self.num_asked = None
        return is_asked

    def finish(self) -> None:
        """Settles at the end of a finished run. From the end of the context on, USR1 and USR2 are ignored.

        A batch system may send these while the process ends. They would kill it, or make submitit requeue the job.
        """
        self.wait()
        for number in {signal.SIGUSR1, signal.SIGUSR2} & self.previous.keys():
            self.previous[number] = signal.SIG_IGN


class BatchesAhead:
    """Iterator over batches of this process, which are loaded so early that a failure stops all ranks in time.

    Ranks know what another one asks for at the second question after it. A rank whose data cannot be loaded, or that
    gets a signal while it waits for a batch, still has the batches up to there: no other rank waits for it in a step.
    """

    def __init__(self, batches: Iterator[Any], stop: StopSignal) -> None:
        """Before the first batch is taken, `load` is to be called for as many as are used between three questions."""
        self.batches = batches
        self.stop = stop
        self.loaded: deque[Any] = deque()

    def __iter__(self) -> "BatchesAhead":
        return self

    def __next__(self) -> Any:
        self.load()
        if not self.loaded:
            raise StopIteration
        return self.loaded.popleft()

    def load(self) -> None:
        """Loads one batch more, unless there is none, or this process asks to stop."""
        stop = self.stop
        if stop.is_asked:
            return
        try:
            stop.interrupts = True
            self.loaded.append(next(self.batches))
        except (Stopped, StopIteration):
            pass
        except (ImageError, OSError) as error:
            if stop.name is None:
                stop.error = error
        finally:
            stop.interrupts = False


# ------------------------------------------------------------------------------------------------------------- watchdog

SETUP_TIMEOUT = 1800.0  # seconds of a phase of the set-up, such as the index of a data set, and of a save
COMPILE_TIMEOUT = 3600.0  # seconds; a large model takes tens of minutes where no cache has it
PULSE = 5.0  # seconds between two looks, at most
WRITE_SECONDS = 10.0  # for the reason in log and run.json
NATIVE_MARGIN = 120.0  # seconds that a launch on a GPU may hold the GIL after the limit


def first_timeout(dist_timeout: float, compiles: bool) -> float:
    """Returns the time-out of the first steps, which may have to compile."""
    if compiles:
        return max(dist_timeout, COMPILE_TIMEOUT)
    return dist_timeout


class Watchdog(threading.Thread):
    """Context manager: ends this process if it takes longer than agreed from one `heartbeat` to the next.

    timeout: seconds, unless a heartbeat asks for more. first_timeout: seconds of the first steps, see the function.
    record: called with the reason.
    """

    def __init__(
        self, timeout: float, first_timeout: float, rank: int = 0, record: Callable[[str], object] | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.timeout = timeout
        self.first_timeout = first_timeout
        self.limit = first_timeout
        self.rank = rank
        self.record = record
        self.phase = ""
        self.since: float | None = None  # the last heartbeat
        self.stopped = threading.Event()

    def heartbeat(self, phase: str, at_least: float = 0.0) -> None:
        """Tells what this process begins to do, and the seconds that it may take, if more than the time-out."""
        self.phase = phase
        self.since = time.monotonic()  # before the limit, so that a lower one does not end the process now
        self.limit = max(self.timeout, at_least)

    def set_up(self, name: str) -> None:
        """Tells what the set-up does next. A single process is not watched: it may load data for hours."""
        if dist.is_initialized():
            self.heartbeat(f"setting up: {name}", SETUP_TIMEOUT)

    def __enter__(self) -> "Watchdog":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.join()

    def run(self) -> None:
        """Watches in this thread until the context ends."""
        pulse = min(PULSE, self.timeout / 5)
        last_look = time.monotonic()
        while not self.stopped.wait(min(pulse, self._seconds_left())):
            now = time.monotonic()
            was_suspended = now - last_look > 2 * pulse + 1
            last_look = now
            if self.since is None:
                continue
            if was_suspended:  # the whole process was, so its timer restarts
                self.since = now
            if dist.is_initialized() and dist.get_backend() == "nccl":
                # When a GPU hangs, launches of compiled code hold the GIL as soon as the GPU's queue is full. That
                # stops this thread, but not faulthandler's timer.
                faulthandler.dump_traceback_later(self._seconds_left() + NATIVE_MARGIN, exit=True, file=2)
            if self._seconds_left() == 0:
                self._end_process()
        faulthandler.cancel_dump_traceback_later()

    def _seconds_left(self) -> float:
        if self.since is None:
            return self.limit
        return max(0.0, self.since + self.limit - time.monotonic())

    def _end_process(self) -> None:
        reason = f"process {self.rank} on {socket.gethostname()} made no progress for {self.limit:g} s: {self.phase}"
        print_error(f"{thread_stacks()}{reason}; exit code {TEMPORARY}")
        if self.record is not None:
            # In a thread: the disk may be what hangs.
            recorder = threading.Thread(target=self.record, args=(reason,), daemon=True)
            recorder.start()
            recorder.join(WRITE_SECONDS)
        os._exit(TEMPORARY)


def thread_stacks() -> str:
    """The stacks of all threads. faulthandler writes them in pieces, which those of other processes would split."""
    if not hasattr(os, "memfd_create"):  # macOS
        faulthandler.dump_traceback(file=2)
        return ""
    with os.fdopen(os.memfd_create("stacks"), "w+") as file:  # no disk, which may be what hangs
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


def print_error(text: str) -> None:
    """Writes to stderr in one call, since other processes write there, too."""
    print(f"{text}\n", end="", file=sys.__stderr__, flush=True)
