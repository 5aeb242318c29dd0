"""Starts Python programs as forks of a server process that has imported torch and the project: in 0.3 s instead of 6 s.

A fork of the test process itself would not do: it has threads, and autograd refuses to run in such a fork.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]


def server():
    """Returns the multiprocessing context whose processes are forks of the server. One main imports the others."""
    context = mp.get_context("forkserver")
    lazy = ["timm.data", "timm.optim", "torch.utils.tensorboard"]  # imported in functions
    context.set_forkserver_preload(["downstream.probe.main_probe", *lazy, "torch.distributed.run"])
    return context


RESERVED = deque(maxlen=32)  # sockets that hold ports; the oldest is closed


def reserve_port():
    """Returns a port that no other process of this machine gets, except a server that asks for it by its number.

    The port belongs to a socket that does not listen. With SO_REUSEADDR, which torch sets too, a server may share it.
    """
    if socket.has_dualstack_ipv6():
        everywhere = "::"
        holder = socket.socket(socket.AF_INET6)
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # of IPv4, too
    else:
        everywhere = "0.0.0.0"
        holder = socket.socket(socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((everywhere, 0))
    RESERVED.append(holder)
    return holder.getsockname()[1]


class Python:
    """`python SCRIPT [arguments]` or `python -m MODULE [arguments]` in a session of its own, as of subprocess.Popen.

    Standard output and error go to one file, which `communicate` returns. output: its path (default: a temporary file).
    """

    def __init__(self, *command, env=None, output=None):
        if output is None:
            file, output = tempfile.mkstemp(prefix="warm-")
            os.close(file)
        self.output = str(output)
        command = [str(word) for word in command]
        self.process = server().Process(target=_child, args=(command, {**os.environ, **(env or {})}, self.output))
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def wait(self):
        self.process.join()
        return self.returncode

    def text(self):
        """Returns what the program has printed so far."""
        return Path(self.output).read_text()

    def communicate(self, timeout=None):
        """Waits for the end. Returns (output, None)."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("python", timeout, self.text())
        text = self.text()
        os.unlink(self.output)
        return text, None


def torchrun(*command, processes=2, restarts=0, options=()):
    """Returns the arguments of `python` that run a script with torchrun, whose processes are forks, too."""
    launch = ["-m", "torch.distributed.run", "--run-path", "--start-method", "fork", "--master_port", reserve_port()]
    launch += ["--nproc_per_node", processes, "--max_restarts", restarts, "--monitor_interval", 0.1]
    return [*launch, *options, *command]


def run_by_torchrun(script, *flags):
    """Runs a script of the project in two processes. Returns (exit code, output)."""
    process = Python(*torchrun(ROOT / script, *flags), env={"OMP_NUM_THREADS": "1"})
    try:
        out, _ = process.communicate(timeout=900)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out


def _child(command, environment, output):
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()  # it is the server's
    os.environ.update(environment)
    for descriptor in (1, 2):
        file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    # As in a program that was not started by multiprocessing:
    multiprocessing.process._parent_process = None
    sys.argv = command[1:] if command[0] == "-m" else command
    try:
        if command[0] == "-m":
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()  # which multiprocessing would leave out
