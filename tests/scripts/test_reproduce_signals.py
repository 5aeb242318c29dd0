"""Signals to reproduce_table.py, in a process of its own: one that nothing handles would end the tests."""

import signal
import sys

import pytest

from scripts import reproduce_table
from tests.until import wait_until
from tests.warm import Python

# A program that saves after SIGTERM, which takes a while. Without a signal it ends with its parent alone.
CHILD = """
import os, signal, sys, time

def save(*_):
    time.sleep(0.3)
    open("saved", "a").write("once ")
    sys.exit(75)

parent = os.getppid()
signal.signal(signal.SIGTERM, save)
open("ready", "w").close()
while os.getppid() == parent:
    time.sleep(0.1)
"""
# Prints how `call` has ended, whether the child had saved by then, and whether the signal's old handler is back.
CALLER = """
import os, signal, subprocess, sys
from scripts import reproduce_table
from tests.patches import StandIn
from tests.until import wait_until

os.chdir({folder!r})
number = signal.Signals({number})

def start(*args, **options):
    process = subprocess.Popen(*args, **options)
    wait_until(lambda: os.path.exists("ready"))
    os.kill(os.getpid(), number)
    return process

if number == signal.SIGINT:
    signal.signal(number, signal.default_int_handler)
else:
    signal.signal(number, signal.SIG_DFL)  # whatever started the tests may ignore it
if {while_starting}:
    reproduce_table.subprocess = StandIn(subprocess, Popen=start)
before = signal.getsignal(number)
try:
    reproduce_table.call([sys.executable, "child.py"])
except (KeyboardInterrupt, reproduce_table.StoppedError) as stop:
    print(repr(stop), open("saved").read(), signal.getsignal(number) == before)
"""


def test_a_signal_that_is_ignored_stays_ignored():
    """nohup has SIGHUP ignored."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hang_up = "import os, signal; os.kill(os.getppid(), signal.SIGHUP)"
        assert reproduce_table.call([sys.executable, "-c", hang_up]) == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("while_starting", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_lets_the_program_save_first(number, while_starting, tmp_path):
    """It may come while the program runs, or before Popen has returned."""
    (tmp_path / "child.py").write_text(CHILD)
    text = CALLER.format(folder=str(tmp_path), number=int(number), while_starting=while_starting)
    (tmp_path / "caller.py").write_text(text)
    caller = Python(tmp_path / "caller.py")
    if not while_starting:
        wait_until(lambda: (tmp_path / "ready").exists() or caller.poll() is not None)
        caller.send_signal(number)
    out, _ = caller.communicate(timeout=240)
    error = "KeyboardInterrupt()" if number == signal.SIGINT else f"StoppedError('{number.name}')"
    assert (caller.returncode, out) == (0, f"{error} once  True\n")
