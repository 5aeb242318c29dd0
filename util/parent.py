"""What becomes of a process whose parent dies."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def signal_if_parent_dies(number: signal.Signals) -> None:
    """Lets Linux send this process a signal once its parent has died; on other systems nothing is sent.

    It is sent when the parent's thread ends that has started this process.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it died just before
        os.kill(os.getpid(), number)
