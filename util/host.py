"""What a process has of its host: cores, and a parent that may die."""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def available_cores() -> int:
    """Returns how many cores this process may use: its CPU affinity and its cgroup may allow fewer than all."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # there is no limit: the file is missing, or the quota is "max"
        return cores


def cores_per_process(local_world_size: int) -> int:
    """Returns this process's share of the cores, at least 1. local_world_size: processes on this node.

    The tasks of srun may be bound to cores of their own. Each then sees only its --cpus-per-task, and does not share
    them.
    """
    cores = available_cores()
    share = max(1, cores // local_world_size)
    allotted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if allotted.isdecimal() and "TORCHELASTIC_RUN_ID" not in os.environ:
        share = max(share, int(allotted))
    return min(cores, share)


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
