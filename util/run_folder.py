"""The folder of a run: one process group writes into it at a time, and it says where the run goes on."""

import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path

from util import checkpoint
from util.checkpoint import CheckpointError

LOCK = ".lock"


def writable_folder(path):
    """Creates the folder; ValueError where it cannot be written to."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise ValueError(f"--output_dir {str(path)!r} cannot be written to ({error}); choose another folder") from error


class FolderLock:
    """Keeps a second run out of the folder, from its construction until this process ends.

    ValueError names the process that holds it. The lock is the kernel's: it goes with the process, however that ends, and
    workers do not inherit it. `remarks` says so where the file system has no locks.
    """

    def __init__(self, folder):
        self.remarks, self.file = [], open(Path(folder) / LOCK, "a+")
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self.file.seek(0)
                holder = self.file.read().strip() or "another process"
                raise ValueError(
                    f"--output_dir {str(folder)!r} is in use by {holder}: wait for it, stop it, or choose another"
                ) from error
            self.remarks.append(f"note: no lock on the output folder ({error}); take care that one run alone writes there")
            return
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.file.flush()


def find_checkpoint(output_dir, resume):
    """-> (path of the checkpoint that --resume means, or None for a new run; what to say about it)."""
    present = bool(checkpoint.list_checkpoints(output_dir))
    if resume == "none":
        if present:
            raise ValueError(f"--resume none, but {output_dir!r} holds a run: choose another --output_dir, or --resume auto")
        return None, []
    if resume != "auto":
        return resume, []
    path, skipped = checkpoint.newest_checkpoint(output_dir)
    if path is None and present:
        raise CheckpointError(f"no checkpoint in {output_dir!r} is intact ({'; '.join(skipped)}); remove them to start over")
    return path, [f"skipped a checkpoint, {reason}" for reason in skipped]
