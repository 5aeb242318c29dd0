"""The lock of an output folder."""

import errno
import fcntl
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from util.run.cli import PATH_ERRORS, PERMISSION_ERRORS

LOCK = ".lock"


def writable_folder(path: str | Path, created: list[Path] | None = None) -> Path:
    """Creates the folder. ValueError if files cannot be written there, OSError if that may pass.

    `created` gets the folders made.
    """
    try:
        if created is not None:
            for folder in (*reversed(Path(path).parents), Path(path)):
                if not folder.exists():
                    created.append(folder)
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        if error.errno not in (*PATH_ERRORS, *PERMISSION_ERRORS, errno.EINVAL):
            raise  # it may pass
        raise ValueError(f"--output_dir {str(path)!r} cannot be written to ({error}); choose another folder") from error


def remove_created(paths: Sequence[Path]) -> None:
    """Removes what a start that has failed has created, in this order. Folders that hold anything else stay."""
    for path in reversed(paths):
        with suppress(OSError):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()


class FolderInUse(ValueError):
    """Another process of this host works in the output folder."""


class FolderLock:
    """Reserves the folder for this process until it ends, however it ends.

    Raises FolderInUse, with the process that holds the lock, if that process is on this host. OSError if it is on
    another one: a file server may keep the lock of a lost node for a while, so a later start may succeed. If the file
    system has no locks, `remarks` says so. `created` gets the file.
    """

    # Not `filelock`: its flock is inherited by DataLoader workers, and its files do not name the holder.
    def __init__(self, folder: str | Path, created: list[Path] | None = None) -> None:
        self.remarks: list[str] = []
        path = Path(folder) / LOCK
        is_new = not path.exists()
        self.file = open(path, "a+")
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self.file.seek(0)
                raise in_use(folder, self.file.read().strip() or "another process") from error
            self.remarks.append(f"note: the output folder has no lock ({error}); start only one run there")
            return
        if created is not None and is_new:
            created.append(path)
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.file.flush()


def in_use(folder: str | Path, holder: str) -> Exception:
    """Returns the error that a folder is locked by `holder`: see `FolderLock`."""
    message = f"--output_dir {str(folder)!r} is in use by {holder}: wait for it, stop it, or choose another folder"
    if holder.endswith(f" on {socket.gethostname()}"):
        return FolderInUse(message)
    return OSError(message)


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
