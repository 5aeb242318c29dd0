"""How DataLoader workers live and die: they ignore the signals that the trainer handles, and never outlive it."""

import atexit
import ctypes
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess

import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# Before Python 3.12 a new worker hangs if another thread was entering the interpreter during the fork, because it then
# inherits the lock of the list of threads (https://github.com/python/cpython/issues/112275; 3.10.15 is corrected, too).
FORKS_HOLD_LOCKS = sys.version_info < (3, 12)
SETTLE_SECONDS = 0.25  # NCCL's thread looks for finished collectives every 0.1 s
_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def ignore_in_worker(_: int | None) -> None:
    """Makes a DataLoader worker ignore signals: the trainer handles them, and still needs its batches.

    On Linux the worker is killed if the trainer dies. If it hung, it would otherwise keep its pipes and memory.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def settle_threads() -> None:
    """Lets the threads of gloo or NCCL release the tensors of finished collectives, where a fork needs it."""
    if FORKS_HOLD_LOCKS and dist.is_available() and dist.is_initialized():
        time.sleep(SETTLE_SECONDS)


def take_over_workers(workers: Iterable[BaseProcess]) -> None:
    """Removes the SIGCHLD handler of a DataLoader that has just started `workers`, and kills these at exit.

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
