"""The folder of a run: one process group writes into it at a time, and it says where the run goes on."""

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from util.run import checkpoint
from util.run.checkpoint import CheckpointError

LOCK, PROGRESS = ".lock", ".progress"
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


def find_checkpoint(output_dir: str | Path, resume: str) -> tuple[Path | None, list[str]]:
    """-> (the checkpoint that the run goes on from, or None for a new run; what to say about it).

    The one rule: a folder that holds checkpoints goes on from its newest good one, whatever `resume` says, so that the
    same command can be started again at any time. `resume` names where a run begins whose folder is still empty: the
    path of a checkpoint, a run's folder (its newest good checkpoint), or "auto" or "none" for a run from the start.
    CheckpointError where the folder holds checkpoints, but no good one.
    """
    present = checkpoint.list_checkpoints(output_dir)
    path, skipped = checkpoint.newest_checkpoint(output_dir)
    remarks = [f"skipped a checkpoint, {reason}" for reason in skipped]
    named = None if resume in ("auto", "none") else Path(resume).resolve()
    if path is not None:
        began_at = (checkpoint.read_record(path) or {}).get("started_from")
        began_at = Path(began_at).resolve() if began_at else None
        known = [path.resolve(), Path(output_dir).resolve(), *([began_at, began_at.parent] if began_at else [])]
        if resume != "auto" and named not in known:
            remarks.append(
                f"warning: --resume {resume} is not used, since {str(output_dir)!r} already holds a run, which goes on; "
                f"to begin anew or at another checkpoint, choose another --output_dir"
            )
        return path, remarks
    first_save = len(present) == 1 and not present[0].with_suffix(".json").exists()  # a kill within it leaves this
    if present and not first_save:
        raise CheckpointError(f"no checkpoint in {output_dir!r} is intact ({'; '.join(skipped)}); remove them to start over")
    if named in (None, Path(output_dir).resolve()):
        return None, remarks
    return checkpoint.find_checkpoint_file(resume), remarks


def write_json(path: Path, content: object) -> None:
    """Writes `content` in one rename, so that a reader never sees half of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def write_progress(output_dir: str | Path, progress: object) -> None:
    """Notes how far the run is. The SLURM job's script requeues a failed job only if this note has changed since its start.

    A note that cannot be written costs a requeue at most, so OSError is ignored.
    """
    with suppress(OSError):
        temporary = Path(output_dir) / f"{PROGRESS}.tmp"
        temporary.write_text(f"{progress}\n")
        os.replace(temporary, Path(output_dir) / PROGRESS)
