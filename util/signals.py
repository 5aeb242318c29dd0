"""Signals ask a run to stop: it finishes the step, saves, and ends; the same command goes on.

SLURM sends TERM before a job is cancelled or preempted, and whatever `--signal` says before its time is up; a terminal sends
INT. A handler only takes note. All processes must stop after the same step, so each step they compare notes by an all-reduce
of one number on the CPU, which runs beside the step and is read a step later: the device is never waited for.
"""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
PATIENCE = 5.0  # seconds; a later signal ends the process at once (SLURM sends TERM twice within .1 s)


class StopSignal:
    """Takes note of signals from its construction on; `agreed()` is called once a step by every process."""

    def __init__(self):
        self.name, self.since = None, None
        self.pending, self.group = None, None
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo")
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            self.previous = {number: signal.signal(number, self._take_note) for number in SIGNALS}

    def _take_note(self, number, frame):
        if self.name is None:
            self.name, self.since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self.since > PATIENCE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def agreed(self):
        """Whether to stop after this step: the same answer in every process, one step after the first took note."""
        if self.group is None:
            return self.name is not None
        stop = False
        if self.pending is not None:
            work, notes = self.pending
            work.wait()
            stop = bool(notes.item())
        notes = torch.tensor([float(self.name is not None)])
        self.pending = dist.all_reduce(notes, group=self.group, async_op=True), notes
        return stop

    def close(self):
        """Signals mean again what they meant before; the last comparison is waited for, since all took part in it."""
        if self.pending is not None:
            self.pending[0].wait()
            self.pending = None
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}


def ignore_in_worker(_):
    """For DataLoader workers: signals to a whole job are the trainer's to answer, which still needs its batches."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
