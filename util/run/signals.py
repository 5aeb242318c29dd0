"""Signals ask a run to stop: it finishes the step, saves, and ends; the same command goes on.

SLURM sends TERM before a job is cancelled or preempted, and whatever `--signal` says before its time is up; a terminal sends
INT, and HUP when it is closed (not under nohup). A handler only sets a flag. All processes must stop after the same step, so
they all-reduce the flag every step, beside the step's own work, and read the outcome a step later.
"""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PATIENCE = 5.0  # seconds; a later signal ends the process at once (SLURM sends TERM twice within .1 s)


class StopSignal:
    """Takes note of signals from its construction on; `agreed()` is called once a step by every process.

    On a GPU the comparison has a stream of its own, and what is waited for is the step before the last one that was queued:
    the device never runs out of work.
    """

    def __init__(self, device):
        self.name, self.since, self.pending = None, None, None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and dist.is_initialized() else None
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            # nohup starts programs with HUP ignored: it stays so.
            heard = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
            self.previous = {number: signal.signal(number, self._take_note) for number in heard}

    def _take_note(self, number, frame):
        if self.name is None:
            self.name, self.since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self.since > PATIENCE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def agreed(self):
        """Whether to stop after this step: the same answer in every process, one step after the first took note."""
        if not dist.is_initialized():
            return self.name is not None
        stop = self._outcome()
        self.pending = self._compare(float(self.name is not None))
        return stop

    def _compare(self, note):
        """Starts an all-reduce; -> (function that waits for it, number of notes on the CPU)."""
        if self.stream is None:
            notes = torch.full((1,), note)
            return dist.all_reduce(notes, async_op=True).wait, notes
        with torch.cuda.stream(self.stream):
            notes = torch.full((1,), note, device=self.stream.device)
            dist.all_reduce(notes)
            outcome = torch.empty(1, pin_memory=True).copy_(notes, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event.synchronize, outcome

    def _outcome(self):
        if self.pending is None:
            return False
        wait, notes = self.pending
        wait()
        return bool(notes.item())

    def settle(self) -> None:
        """Waits for the last comparison, in which all took part. Signals are still only noted."""
        self._outcome()
        self.pending = None

    def close(self) -> None:
        """Settles, and gives signals their former meaning."""
        self.settle()
        self.restore()

    def finish(self) -> None:
        """The run is over: USR1 and USR2 are ignored from now on, and the other signals have their former meaning.

        A batch system's signal while the process ends would kill it, or make submitit requeue a finished job.
        """
        for number in {signal.SIGUSR1, signal.SIGUSR2} & self.previous.keys():
            self.previous[number] = signal.SIG_IGN
        self.restore()

    def restore(self) -> None:
        """The handlers alone, where something has gone wrong and nobody else takes part."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}


def ignore_in_worker(_):
    """For DataLoader workers: signals to a whole job are the trainer's to answer, which still needs its batches.

    A worker that hangs would outlive its trainer, and hold its pipes and memory; so Linux kills it with the trainer.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def let_children_die_quietly(workers: Iterable[BaseProcess]) -> None:
    """After a DataLoader has started `workers`. Its handler would raise in the middle of a step, or of a save, if one dies.

    It finds out anyhow when it waits for that worker's next batch, within five seconds. When this process exits, the
    workers are killed: they ignore TERM, with which multiprocessing would end them, and then wait without end.
    """
    atexit.unregister(kill_workers)  # each evaluation starts workers: once is enough
    atexit.register(kill_workers)
    _workers.update(workers)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def kill_workers() -> None:
    """Ends the DataLoader workers. At exit it runs before multiprocessing's own handler."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for worker in list(_workers):
        with suppress(ValueError):  # closed
            worker.kill()
            worker.join(5)
