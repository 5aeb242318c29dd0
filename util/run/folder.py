"""The output folder of a run, and the start of a run in it: its lock, and the checkpoint to resume from."""

import argparse
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from util import collectives
from util.atomic import replaced_file
from util.code_version import code_version, source_hash
from util.data.folders import refuse_inside_data
from util.run import checkpoint, distributed
from util.run.checkpoint import CheckpointError, StartInfo
from util.run.cli import PROGRESS, Parser
from util.run.supervise import collective_timeout
from util.text import shorten

# Files that a killed process was about to rename.
LEFTOVERS = (
    ".checkpoint-*.tmp-*",
    ".bad-step-*.tmp-*",
    ".settings.tmp-*",
    ".results.tmp-*",
    ".log.tmp-*",
    ".predictions.tmp-*",
    ".detections.tmp-*",
    "..progress.tmp-*",
    ".shared-*",
    "attention/.*.tmp-*",
)
LOCK = ".lock"
FILES = ("log.txt", "log.jsonl", "settings.json", "results.json")  # of a run that trains
# What a run that starts anew would replace or continue. The log comes last: see `set_aside_earlier_run`.
REPORTS = (
    "results.json",
    "checkpoint-best.pth",
    "checkpoint-best.json",
    "settings.json",
    "tensorboard",
    "attention",
    "log.jsonl",
)
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


def refuse_foreign_files(folder: Path) -> None:
    """ValueError if the folder holds files with the names of FILES that no run has written."""
    names = [name for name in FILES if (folder / name).exists()]
    is_run = (folder / LOCK).exists() or "output_dir" in read_json(folder / "settings.json")
    if names and not is_run and not checkpoint.list_finished(folder):
        problem = f"--output_dir {str(folder)!r} holds {', '.join(names)}, but no run"
        raise ValueError(f"{problem}: choose another folder, or move them away")


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
                    if created is not None:
                        if is_new:
                            created.append(self.path)
                        paths = [self.path.with_name(name) for name in FILES]
                        created += [path for path in paths if not path.exists()]  # by now: another start may have ended
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
        info = checkpoint.read_info(path)
        began_at = None if info.run is None else info.run.origin.started_from
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
        if skipped:
            remarks.append("warning: the run starts from step 0")
        return None, remarks
    path = checkpoint.find_checkpoint_file(resume)
    checkpoint.refuse_damage(path)
    return path, remarks


def adopt_unfinished(output_dir: str | Path) -> list[str]:
    """Writes the sidecars of all checkpoints that have none and can be read. Returns remarks for the log."""
    finished = checkpoint.list_finished(output_dir)
    remarks = []
    for path in checkpoint.list_checkpoints(output_dir):
        if path in finished:
            continue
        outcome = "it can be read, so one is written, and it is kept for good"
        problem = checkpoint.adopt_checkpoint(path)
        if problem is not None:
            outcome = f"not used: {problem}"
        remarks.append(f"warning: {path.name} had no .json; {outcome}")
    return remarks


def read_json(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file; an empty dict if it is missing or damaged."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_reports(log: Path) -> list[dict[str, Any]]:
    """Returns the reports in a log.jsonl, without lines that a kill has cut off; [] if there is no such file."""
    if not log.is_file():
        return []
    reports = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            reports.append(json.loads(line))
    return [report for report in reports if isinstance(report, dict) and isinstance(report.get("step"), int)]


def set_aside_earlier_run(folder: Path) -> list[str]:
    """Moves what an earlier run has reported to `earlier-1`, or the next free number. Returns a note for the log.

    Its checkpoints were removed, or it was killed before the first one. For a run that begins in this folder.
    """
    evaluated = [folder / "results.json", folder / "checkpoint-best.pth"]
    if not read_reports(folder / "log.jsonl") and not any(path.exists() for path in evaluated):
        return []
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    aside = folder / f"earlier-{number}"
    aside.mkdir()
    for name in REPORTS:
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    return [f"note: the folder held a run without a checkpoint to resume: its log and results are in {aside.name}"]


def write_json(path: Path, content: object) -> None:
    with replaced_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def write_progress(output_dir: str | Path, progress: object) -> None:
    """Writes how far the run is. A SLURM job is not requeued after a few starts that have not changed this.

    OSError is ignored: without the file, one requeue is lost at most.
    """
    with suppress(OSError), replaced_file(Path(output_dir) / PROGRESS) as temporary:
        temporary.write_text(f"{progress}\n")


# --------------------------------------------------------------------------------------------------------------- start


@dataclass(frozen=True)
class Start:
    """One start of a run, in one process."""

    program: str  # the main, for example "main_pretrain.py"
    process: distributed.Process
    output_dir: Path
    resume_path: Path | None  # the checkpoint that the run continues from
    origin: StartInfo
    lock: FolderLock | None  # rank 0 holds the folder until its process ends

    @property
    def continues_here(self) -> bool:
        """Whether the folder holds the checkpoint that the run continues from."""
        return self.resume_path is not None and not self.began_elsewhere

    @property
    def began_elsewhere(self) -> bool:
        """Whether the run starts at a checkpoint of another folder than its own."""
        return self.resume_path is not None and self.resume_path.resolve().parent != self.output_dir.resolve()

    def close(self) -> None:
        """Frees the folder."""
        if self.lock is not None:
            self.lock.file.close()


def join_processes(parser: Parser, args: argparse.Namespace) -> distributed.Process:
    """Joins the process group. ValueError on all ranks if they were started with other flags, code or torch."""
    minutes = collective_timeout(args.dist_timeout, distributed.may_compile(args.compile, args.device))
    process = distributed.init_process(args.device, minutes, max(60, args.dist_timeout))
    refuse_different_starts(parser, args)
    return process


def enter_folder(
    program: str,
    args: argparse.Namespace,
    argv: Sequence[str] | None,
    process: distributed.Process,
    created: list[Path],
) -> tuple[Start, list[str]]:
    """Locks the output folder and finds the checkpoint to resume from. Returns (the start, remarks for the log).

    argv: the command line (default: this program's). created: gets the paths that this start creates. ValueError if the
    folder lies inside the data, is not writable, is in use by another run, or is not the same for all processes.
    """

    def check_folder() -> Path:
        # The next start would read other data.
        refuse_inside_data("--output_dir", args.output_dir, args.dataset, args.data_path)
        return writable_folder(args.output_dir, created)

    collectives.run_on_rank0(check_folder)  # if the start fails, rank 0 removes the folders that it has created
    output_dir = collectives.run_everywhere(check_folder)
    command = [program, *(sys.argv[1:] if argv is None else argv)]
    hosts = sorted(set(collectives.gather_objects(socket.gethostname())))
    origin = StartInfo(collectives.run_on_rank0(code_version), shlex.join(command), hosts)
    lock: FolderLock | None = None

    def lock_and_look() -> tuple[Path | None, list[str]]:
        nonlocal lock
        refuse_foreign_files(output_dir)
        lock = FolderLock(output_dir, created)
        for pattern in LEFTOVERS:
            for leftover in output_dir.glob(pattern):
                leftover.unlink()
        path, remarks = find_checkpoint(output_dir, args.resume)
        return path, lock.remarks + remarks

    # Rank 0 chooses, so that all ranks resume from the same file.
    resume_path, remarks = collectives.run_on_rank0(lock_and_look)
    if process.world_size > 1:
        refuse_separate_folders(output_dir)
    return Start(program, process, output_dir, resume_path, origin, lock), remarks


def refuse_separate_folders(output_dir: Path) -> None:
    """ValueError on all ranks unless all see a file that rank 0 writes into the folder, within 6 seconds."""

    def write_token() -> str:
        descriptor, path = tempfile.mkstemp(prefix=".shared-", dir=output_dir)
        os.close(descriptor)
        return Path(path).name

    token = output_dir / collectives.run_on_rank0(write_token)
    for seconds in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2):
        if token.exists():
            break
        time.sleep(seconds)
    views = collectives.gather_objects((socket.gethostname(), token.exists()))
    collectives.run_on_rank0(lambda: token.unlink(missing_ok=True))
    blind = [f"rank {rank} on {host}" for rank, (host, is_seen) in enumerate(views) if not is_seen]
    if blind:
        problem = f"--output_dir {str(output_dir)!r} is not the same folder for all processes"
        reason = f"a file of rank 0 on {views[0][0]} does not appear for {shorten(blind)}"
        raise ValueError(f"{problem}: {reason}; choose a folder on storage that all nodes share")


def lock_folder(path: str | Path, created: list[Path] | None = None) -> tuple[Path, FolderLock | None]:
    """Creates and locks the output folder of a program without checkpoints. All ranks must call it.

    Returns (the folder, the lock on rank 0). The lock is held as long as the caller keeps it. ValueError on all ranks
    if the folder cannot be written to or is in use by another process.
    """
    lock: FolderLock | None = None

    def create_and_lock() -> Path:
        nonlocal lock
        folder = writable_folder(path, created)
        lock = FolderLock(folder, created)
        for remark in lock.remarks:
            print(remark, flush=True)
        return folder

    return collectives.run_on_rank0(create_and_lock), lock


def refuse_different_starts(parser: Parser, args: argparse.Namespace) -> None:
    """ValueError on all ranks if code, torch or flags differ between them, apart from flags of a process."""
    compared = {}
    for name, value in vars(args).items():
        if name not in parser.rules or not parser.rules[name].per_process:
            compared[f"--{name}"] = value
    compared["code"] = source_hash()
    compared["torch"] = torch.__version__
    collectives.refuse_differences(compared, "flags and code")
