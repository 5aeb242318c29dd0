"""An output folder that another process holds."""

import os
import socket
import time
from contextlib import contextmanager

from tests.warm import server
from util.run.files.lock import FolderLock


def _hold(folder, connection):
    lock = FolderLock(folder)
    connection.send(os.getpid())
    time.sleep(600)
    del lock


@contextmanager
def held_by_another_process(folder):
    """Locks the folder in a process that is killed in the end. Yields what the error of a second run says."""
    folder.mkdir()
    ours, theirs = server().Pipe()
    other = server().Process(target=_hold, args=(str(folder), theirs))
    other.start()
    try:
        assert ours.poll(240)
        yield f"is in use by process {ours.recv()} on {socket.gethostname()}: wait"
    finally:
        other.kill()
        other.join()
