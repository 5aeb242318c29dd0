"""The start of a run: it joins the processes, checks that they agree, and takes the output folder."""

import argparse
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from util.data.folders import refuse_inside_data
from util.run import distributed
from util.run.code_version import code_version, source_hash
from util.run.resume_rules import PROCESS_FLAGS
from util.run.run_folder import FolderLock, find_checkpoint, refuse_foreign_files, writable_folder
from util.text import shorten

# Files that a killed process was about to rename.
LEFTOVERS = (".shared-*", ".settings.tmp-*", ".results.tmp-*", ".log.tmp-*", "..progress.tmp-*", "attention/.*.tmp-*")


@dataclass(frozen=True)
class Start:
    """One start of a run, in one process."""

    program: str  # the main, for example "main_pretrain.py"
    process: distributed.Process
    output_dir: Path
    resume_path: Path | None  # the checkpoint that the run continues from
    origin: dict[str, Any]  # code version, command line and hosts, for the checkpoints
    lock: FolderLock | None  # rank 0 holds the folder until its process ends

    @property
    def began_elsewhere(self) -> bool:
        """Whether the run starts at a checkpoint of another folder than its own."""
        return self.resume_path is not None and self.resume_path.resolve().parent != self.output_dir.resolve()


def join_processes(args: argparse.Namespace, path_flags: Set[str] = frozenset()) -> distributed.Process:
    """Joins the process group. ValueError on all ranks if they were started with other flags, code or torch.

    path_flags: further flags that may differ, because they name files of a node.
    """
    process = distributed.init_process(args.device, max(30, args.dist_timeout / 60 + 5), max(60, args.dist_timeout))
    refuse_different_starts(args, PROCESS_FLAGS | path_flags)
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
        refuse_output_inside_data(args)
        return writable_folder(args.output_dir, created)

    distributed.run_on_rank0(check_folder)  # if the start fails, rank 0 removes the folders that it has created
    output_dir = distributed.run_everywhere(check_folder)
    command = [program, *(sys.argv[1:] if argv is None else argv)]
    hosts = sorted(set(distributed.gather_objects(socket.gethostname())))
    origin = {"code": code_version(), "command": shlex.join(command), "hosts": hosts}
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
    resume_path, remarks = distributed.run_on_rank0(lock_and_look)
    if process.world_size > 1:
        refuse_separate_folders(output_dir)
    return Start(program, process, output_dir, resume_path, origin, lock), remarks


def refuse_separate_folders(output_dir: Path) -> None:
    """ValueError on all ranks unless all see a file that rank 0 writes into the folder, within 6 seconds."""

    def write_token() -> str:
        descriptor, path = tempfile.mkstemp(prefix=".shared-", dir=output_dir)
        os.close(descriptor)
        return Path(path).name

    token = output_dir / distributed.run_on_rank0(write_token)
    for seconds in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2):
        if token.exists():
            break
        time.sleep(seconds)
    found = distributed.gather_objects((socket.gethostname(), token.exists()))
    distributed.run_on_rank0(lambda: token.unlink(missing_ok=True))
    blind = [f"rank {rank} on {host}" for rank, (host, is_seen) in enumerate(found) if not is_seen]
    if blind:
        raise ValueError(
            f"--output_dir {str(output_dir)!r} is not the same folder for all processes: a file of rank 0 on "
            f"{found[0][0]} does not appear for {shorten(blind)}; choose a folder on storage that all nodes share"
        )


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

    return distributed.run_on_rank0(create_and_lock), lock


def refuse_different_starts(args: argparse.Namespace, process_flags: Set[str] = PROCESS_FLAGS) -> None:
    """ValueError on all ranks if code, torch or flags differ between them. Flags in `process_flags` may differ."""
    flags = {f"--{name}": value for name, value in vars(args).items() if name not in process_flags}
    distributed.refuse_differences(flags | {"code": source_hash(), "torch": torch.__version__}, "flags and code")


def refuse_output_inside_data(args: argparse.Namespace) -> None:
    """ValueError if the run would write between its own images: the next start would read other data."""
    if args.dataset in ("folder", "hf"):
        refuse_inside_data("--output_dir", args.output_dir, args.data_path)
