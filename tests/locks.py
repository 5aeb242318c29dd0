"""An output folder that another process holds."""

import os
import socket
import time
from contextlib import contextmanager
from pathlib import Path

from tests.warm import server
from util.run.files.lock import lock_folder


def _hold(folder, connection):
    file, _ = lock_folder(Path(folder))
    connection.send(os.getpid())
    time.sleep(600)
    file.close()


@contextmanager
def held_by_another_process(folder):
    """Locks the folder in a process that is killed in the end. Yields what the error of a second run says."""
    folder.mkdir()
    ours, theirs = server().Pipe()
    other = server().Process(target=_hold, args=(str(folder), theirs))
    other.start()
    try:
        assert ours.poll(900)
        yield f"is in use by process {ours.recv()} on {socket.gethostname()}: wait"
    finally:
        other.kill()
        other.join()
