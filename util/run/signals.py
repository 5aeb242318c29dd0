"""Signals ask a run to stop: it finishes the step, saves a checkpoint, and ends. The same command resumes it.

SLURM sends TERM before it cancels or preempts a job, and the signal of `--signal` before the time limit. A terminal
sends INT, and HUP when it is closed. The handlers only set a flag. All ranks must stop after the same step, so they
all-reduce the flag every step, asynchronously, and read the result one step later.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from util.data.workers import SIGNALS

PATIENCE = 5.0  # seconds; a later second signal ends the process at once (SLURM sends TERM twice within 0.1 s)


class StopSignal:
    """Handles signals from its construction on. Every rank calls `agreed` once per step.

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

    def __exit__(self, kind: object, *_: object) -> None:
        """After an error, restores the previous handlers. Otherwise `close` or `finish` has done so."""
        if kind is not None:
            self.restore()

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
        """Waits for the last all-reduce and returns whether any rank received a signal. The handlers stay installed."""
        if self.pending is None:
            return False
        wait, flags = self.pending
        self.pending = None
        wait()
        return bool(flags.item())

    def close(self) -> None:
        """Settles, and restores the previous handlers."""
        self.settle()
        self.restore()

    def finish(self) -> None:
        """Restores the previous handlers after a finished run, but ignores USR1 and USR2 from now on.

        A batch system may send these while the process ends. They would kill it, or make submitit requeue the job.
        """
        for number in {signal.SIGUSR1, signal.SIGUSR2} & self.previous.keys():
            self.previous[number] = signal.SIG_IGN
        self.restore()

    def restore(self) -> None:
        """Restores the previous handlers without waiting for other ranks, as after an error."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}
