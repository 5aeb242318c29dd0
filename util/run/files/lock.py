"""The lock of an output folder."""

import errno
import fcntl
import os
import socket
import struct
import tempfile
from pathlib import Path
from typing import TextIO

from util.run.exits import PATH_ERRORS, PERMISSION_ERRORS

LOCK = ".lock"


def make_writable_folder(path: str | Path) -> Path:
    """Creates the folder. ValueError if files cannot be written there, OSError if that may pass."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno not in (*PATH_ERRORS, *PERMISSION_ERRORS, errno.EINVAL):
            raise
        message = f"--output_dir {str(folder)!r} cannot be written to ({error}); choose another folder"
        raise ValueError(message) from error
    return folder


def lock_folder(folder: Path) -> tuple[TextIO, list[str]]:
    """Reserves the folder for this process until the returned file is closed, or the process ends, however it ends.

    ValueError with the process that holds the lock, if that process is on this host. OSError if it is on another one: a
    file server may keep the lock of a lost node for a while, so a later start may succeed. If the file system has no
    locks, a note says so. The file names this process, on its disk, too: other nodes read it there.
    """
    notes = []
    # Not `filelock`: its flock is inherited by DataLoader workers, and its files do not name the holder.
    file = open(folder / LOCK, "a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            holder = file.read().strip() or "another process"
            text = f"--output_dir {str(folder)!r} is in use by {holder}: wait for it, stop it, or choose another folder"
            if holder.endswith(f" on {socket.gethostname()}"):
                raise ValueError(text) from error
            raise OSError(text) from error
        notes.append(f"note: the output folder has no lock ({error}); start only one run there")
    file.truncate(0)
    file.write(f"{this_process()}\n")
    file.flush()
    os.fsync(file.fileno())
    return file, notes


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def is_held(folder: str | Path) -> bool:
    """Whether another process holds the folder. The lock is not taken, so that no start is refused meanwhile.

    Not for the process that holds it: to close the file would free it. False without a lock, or if it cannot be read.
    """
    fields = "hhqqi4x"  # Linux' struct flock: type, whence, start, length (0: to the end), process
    asked = struct.pack(fields, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with open(Path(folder) / LOCK) as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    except OSError:
        return False
    return bool(struct.unpack(fields, answer)[0] != fcntl.F_UNLCK)
