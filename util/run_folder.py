"""The folder of a run: one process group writes into it at a time, and it says where the run goes on."""

import errno
import fcntl
import os
import socket
import tempfile
import time
from pathlib import Path

from util import checkpoint
from util.checkpoint import CheckpointError

LOCK = ".lock"
PATIENCE = 120  # seconds; NFS gives the locks of a lost client back after 90


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
    workers do not inherit it. A file server may keep that of a lost node for a while, so one of another host is waited for.
    `remarks` says so where the file system has no locks.
    """

    def __init__(self, folder):
        self.remarks, self.file, here = [], open(Path(folder) / LOCK, "a+"), socket.gethostname()
        end = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    self.remarks.append(f"note: no lock on the output folder ({error}); take care that one run alone writes there")
                    return
                self.file.seek(0)
                holder = self.file.read().strip() or "another process"
                if holder.endswith(f" on {here}") or time.monotonic() > end:
                    raise ValueError(
                        f"--output_dir {str(folder)!r} is in use by {holder}: wait for it, stop it, or choose another; "
                        f"if it is gone, remove {LOCK} there"
                    ) from error
            time.sleep(2)
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {here}\n")
        self.file.flush()


def find_checkpoint(output_dir, resume):
    """-> (path of the checkpoint that --resume means, or None for a new run; what to say about it)."""
    present = checkpoint.list_checkpoints(output_dir)
    if resume == "none":
        if present:
            raise ValueError(f"--resume none, but {output_dir!r} holds a run: choose another --output_dir, or --resume auto")
        return None, []
    if resume != "auto":
        return resume, []
    path, skipped = checkpoint.newest_checkpoint(output_dir)
    first_save = len(present) == 1 and not present[0].with_suffix(".json").exists()  # a kill within it leaves this
    if path is None and present and not first_save:
        raise CheckpointError(f"no checkpoint in {output_dir!r} is intact ({'; '.join(skipped)}); remove them to start over")
    return path, [f"skipped a checkpoint, {reason}" for reason in skipped]
