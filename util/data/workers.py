"""How DataLoader workers live and die: they ignore the signals that the trainer handles, and never outlive it."""

import atexit
import ctypes
import math
import multiprocessing
import os
import signal
import threading
import time
import weakref
from contextlib import suppress
from multiprocessing.process import BaseProcess

from util.host import signal_if_parent_dies

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NICENESS = 10  # of workers beside a GPU
_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_signal_time = ctypes.c_double(math.inf)


def expect_signal() -> None:
    """Makes `time_of_signal` known to the workers that this process forks from now on, which ignore signals."""
    global _signal_time
    _signal_time = multiprocessing.RawValue(ctypes.c_double, math.inf)


def note_signal() -> None:
    _signal_time.value = min(_signal_time.value, time.monotonic())


def time_of_signal() -> float:
    """Returns when the trainer got a signal that ends the run, by `time.monotonic`; infinity if it got none."""
    return _signal_time.value


def ignore_in_worker(_: int | None) -> None:
    """Makes a DataLoader worker ignore signals: the trainer handles them, and still needs its batches.

    On Linux the worker is killed if the trainer dies. If it hung, it would otherwise keep its pipes and memory.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal_if_parent_dies(signal.SIGKILL)


def begin_beside_gpu(worker: int) -> None:
    """Begins a DataLoader worker of a model on a GPU: it computes when the trainer does not want its core.

    A GPU waits for a trainer that is late. On an H100, 15 busy processes on 16 cores stretched a step from 80 to
    113 ms, and not at all with a niceness of 10.
    """
    ignore_in_worker(worker)
    os.nice(NICENESS)


def kill_at_exit(workers: set[BaseProcess]) -> None:
    """Kills these workers at exit, and removes the SIGCHLD handler of the DataLoader that has just started them.

    The handler would raise in the middle of a step or a save. The loader finds a dead worker without it, within five
    seconds of waiting for its next batch. At exit, multiprocessing sends TERM to the workers and joins them without a
    timeout. Workers ignore TERM, so they are killed first.
    """
    atexit.unregister(kill_workers)  # registered once, however many loaders there are
    atexit.register(kill_workers)
    _workers.update(workers)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def kill_workers() -> None:
    """Kills the DataLoader workers. At exit it runs before multiprocessing's own handler."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for worker in list(_workers):
        with suppress(ValueError):  # the worker is closed already
            worker.kill()
            worker.join(5)
