"""The lock of an output folder."""

import errno
import fcntl
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOCK = ".lock"
# Errors of a path that will never be writable. Others, such as a full disk or a stale handle, may pass.
WRONG_PATH = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOENT,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,
)
# Seconds. NFS releases the locks of a lost client after 90, a watchdog ends a process that hangs after 600.
LOCK_WAIT = 660


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
        if error.errno not in WRONG_PATH:
            raise
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
    """Another process works in the output folder."""


def in_use(folder: str | Path, holder: str) -> str:
    """Returns the error that a folder is locked by `holder`."""
    return (
        f"--output_dir {str(folder)!r} is in use by {holder}: wait for it, stop it, or choose another "
        f"folder; if that process is gone, remove {LOCK} there"
    )


class FolderLock:
    """Reserves the folder for this process until it ends, however it ends.

    Raises FolderInUse, with the process that holds the lock, if that process is on this host. A lock of another host is
    waited for, since a file server may keep that of a lost node for a while. If the file system has no locks, `remarks`
    says so. `created` gets the file.
    """

    # Not `filelock`: its flock is inherited by DataLoader workers, and its files do not name the holder.
    def __init__(self, folder: str | Path, created: list[Path] | None = None) -> None:
        self.remarks: list[str] = []
        self.path = Path(folder) / LOCK
        here = socket.gethostname()
        end = time.monotonic() + LOCK_WAIT
        is_new = not self.path.exists()
        is_told = False
        while True:
            self.file = open(self.path, "a+")
            self.folder = self.path.parent.stat()
            try:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self.is_lost() or time.monotonic() > end:
                    if created is not None and is_new:
                        created.append(self.path)
                    break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    self.remarks.append(f"note: the output folder has no lock ({error}); start only one run there")
                    return
                self.file.seek(0)
                holder = self.file.read().strip() or "another process"
                if holder.endswith(f" on {here}") or time.monotonic() > end:
                    raise FolderInUse(in_use(folder, holder)) from error
                if not is_told:
                    is_told = True
                    print(f"{self.path} is held by {holder}: waiting for it, {LOCK_WAIT} s at most", file=sys.stderr)
            time.sleep(2)
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {here}\n")
        self.file.flush()

    def is_lost(self) -> bool:
        """Whether the lock's file was deleted, alone or with the folder, or is another one now."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return True

    def has_folder(self) -> bool:
        """Whether the folder is the one that was locked, so that at most the lock's file was deleted."""
        try:
            return os.path.samestat(self.path.parent.stat(), self.folder)
        except FileNotFoundError:
            return False

    def is_deleted(self) -> bool:
        """Whether a lost file was deleted. Otherwise it is where the path does not lead any more: the folder was moved,
        or its file system unmounted.
        """
        try:
            return os.fstat(self.file.fileno()).st_nlink == 0
        except OSError as error:
            return error.errno == errno.ESTALE  # deleted by another host

    def take_again(self) -> None:
        """Makes and locks the file again. FolderInUse if another process has done so."""
        other = FolderLock(self.path.parent)
        self.file.close()
        self.file = other.file


@dataclass(frozen=True)
class LockView:
    """The lock of a folder as this process sees it. holder: the last that took it, or "". host: its host, or "".

    is_held: None if it cannot be known: the file cannot be read, or its file system has no locks.
    """

    holder: str
    is_held: bool | None

    @property
    def host(self) -> str:
        return self.holder.partition(" on ")[2]


def view_lock(folder: str | Path) -> LockView:
    """Looks at the lock without taking it, so that no start of a run is refused meanwhile.

    Not for the process that holds it: to close the file would free it.
    """
    try:
        with open(Path(folder) / LOCK, errors="replace") as file:
            holder = file.read(1000).strip()
            return LockView(holder, _is_locked(file.fileno()))
    except FileNotFoundError:
        return LockView("", False)
    except OSError:
        return LockView("", None)


def _is_locked(descriptor: int) -> bool | None:
    """Asks whether another process has locked the file; None if this system is not Linux. OSError without locks."""
    if not sys.platform.startswith("linux"):
        return None
    fields = "hhqqi4x"  # struct flock: type, whence, start, length (0: to the end), process
    asked = struct.pack(fields, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
    return bool(struct.unpack(fields, answer)[0] != fcntl.F_UNLCK)
