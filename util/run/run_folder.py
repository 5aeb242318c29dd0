"""The output folder of a run: its lock, the checkpoint to resume from, and the files that other programs read."""

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from util.atomic import replaced_file
from util.run import checkpoint
from util.run.checkpoint import CheckpointError

LOCK, PROGRESS = ".lock", ".progress"
FILES = ("log.txt", "log.jsonl", "settings.json", "results.json")  # of a run that trains
PATIENCE = 120  # seconds; NFS releases the locks of a lost client after 90


def writable_folder(path: str | Path, created: list[Path] | None = None) -> Path:
    """Creates the folder. Raises ValueError if files cannot be written there. `created` gets the folders made."""
    try:
        if created is not None:
            created += (folder for folder in (*reversed(Path(path).parents), Path(path)) if not folder.exists())
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise ValueError(f"--output_dir {str(path)!r} cannot be written to ({error}); choose another folder") from error


def remove_created(paths: Sequence[Path]) -> None:
    """Removes what a start that has failed has created, in this order. Folders that hold anything else stay."""
    for path in reversed(paths):
        with suppress(OSError):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()


def refuse_foreign_files(folder: Path) -> None:
    """ValueError if the folder holds files with the names of FILES that no run has written."""
    found = [name for name in FILES if (folder / name).exists()]
    is_run = (folder / LOCK).exists() or "output_dir" in read_json(folder / "settings.json")
    if found and not is_run and not checkpoint.list_finished(folder):
        raise ValueError(
            f"--output_dir {str(folder)!r} holds {', '.join(found)}, but no run: the run would overwrite them; choose "
            "another folder, or move them away"
        )


class FolderInUse(ValueError):
    """Another process works in the output folder."""


class FolderLock:
    """Reserves the folder for this process until it ends, however it ends.

    Raises FolderInUse, with the process that holds the lock, if that process is on this host. A lock of another host is
    waited for, since a file server may keep that of a lost node for a while. If the file system has no locks, `remarks`
    says so. `created` gets the files that a run makes here.
    """

    # Not `filelock`: its flock is inherited by DataLoader workers, and its files do not name the holder.
    def __init__(self, folder: str | Path, created: list[Path] | None = None) -> None:
        self.remarks: list[str] = []
        self.path = Path(folder) / LOCK
        here, end = socket.gethostname(), time.monotonic() + PATIENCE
        paths = [self.path.with_name(name) for name in (LOCK, *FILES)]
        new = [path for path in paths if not path.exists()]
        while True:
            self.file = open(self.path, "a+")
            try:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self.is_lost() or time.monotonic() > end:
                    if created is not None:
                        created += new
                    break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    self.remarks.append(f"note: the output folder has no lock ({error}); start only one run there")
                    return
                self.file.seek(0)
                holder = self.file.read().strip() or "another process"
                if holder.endswith(f" on {here}") or time.monotonic() > end:
                    raise FolderInUse(
                        f"--output_dir {str(folder)!r} is in use by {holder}: wait for it, stop it, or choose another "
                        f"folder; if that process is gone, remove {LOCK} there"
                    ) from error
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


def find_checkpoint(output_dir: str | Path, resume: str) -> tuple[Path | None, list[str]]:
    """Returns the checkpoint to resume from, or None for a new run, and remarks for the log.

    A folder with checkpoints resumes from its newest good one, whatever `resume` says, so that the same command can be
    started again at any time. `resume` says where a run starts whose folder is empty: the path of a checkpoint, the
    folder of a run (its newest good checkpoint), or "auto" or "none" for a run from scratch. Raises CheckpointError if
    the folder holds finished checkpoints but no good one.

    A checkpoint without its .json gets one, if it can be read. Otherwise it is not used, and it is not deleted.
    """
    remarks = adopt_unfinished(output_dir)
    path, skipped = checkpoint.newest_checkpoint(output_dir)
    remarks += [f"skipped a checkpoint, {reason}" for reason in skipped]
    named = None if resume in ("auto", "none") else Path(resume).resolve()
    if path is not None:
        began_at = (checkpoint.read_record(path) or {}).get("started_from")
        known = [path.resolve(), Path(output_dir).resolve()]
        if began_at:
            known += [Path(began_at).resolve(), Path(began_at).resolve().parent]
        if resume != "auto" and named not in known:
            remarks.append(
                f"warning: --resume {resume} is not used, because {str(output_dir)!r} holds a run, which is resumed; "
                f"to start anew or from another checkpoint, choose another --output_dir"
            )
        return path, remarks
    if checkpoint.list_finished(output_dir):
        raise CheckpointError(
            f"no checkpoint in {str(output_dir)!r} is intact ({'; '.join(skipped)}); remove them to start over"
        )
    if named in (None, Path(output_dir).resolve()):
        return None, remarks + (["warning: the run starts from step 0"] if skipped else [])
    return checkpoint.find_checkpoint_file(resume), remarks


def adopt_unfinished(output_dir: str | Path) -> list[str]:
    """Writes the records of all checkpoints that have none and can be read. Returns remarks for the log."""
    finished, remarks = checkpoint.list_finished(output_dir), []
    for path in checkpoint.list_checkpoints(output_dir):
        if path not in finished:
            problem = checkpoint.adopt_checkpoint(path)
            what = f"not used: {problem}" if problem else "it can be read, so one is written, and it is kept for good"
            remarks.append(f"warning: {path.name} had no .json; {what}")
    return remarks


def read_json(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file; an empty dict if it is missing or damaged."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: object) -> None:
    """Writes `content` as JSON and replaces the file in one step."""
    with replaced_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def write_progress(output_dir: str | Path, progress: object) -> None:
    """Writes how far the run is. The SLURM job requeues a failed run only if this has changed since its start.

    OSError is ignored: without the file, one requeue is lost at most.
    """
    with suppress(OSError), replaced_file(Path(output_dir) / PROGRESS) as temporary:
        temporary.write_text(f"{progress}\n")
