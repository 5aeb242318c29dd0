"""The output folder of a program: its lock, how it is seen by all processes, its space."""

import argparse
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from util import collectives
from util.code_version import code_version
from util.data.folders import refuse_inside_data
from util.data.workers import SIGNALS
from util.run.files.json_files import STATE, read_json, write_state
from util.run.files.lock import lock_folder, make_writable_folder
from util.run.files.record import StartInfo
from util.text import shorten
from util.urls import redact

# Files that a killed process was about to rename.
LEFTOVERS = (".*.tmp-*", "attention/.*.tmp-*", ".shared-*")


@contextmanager
def own_folder(path: str | Path | None, program: str) -> Iterator[Path | None]:
    """Creates and locks the output folder of a program without checkpoints, whose run.json says how the program ends.

    All ranks must call it. path: None if it has none. ValueError on all ranks if the folder cannot be written to or is
    in use by another process.
    """
    if path is None:
        yield None
        return
    with ExitStack() as stack:

        def create_and_lock() -> Path:
            folder = make_writable_folder(path)
            file, notes = lock_folder(folder)
            stack.enter_context(file)
            collectives.print_on_rank0(*notes)
            return folder

        folder = collectives.run_on_rank0(create_and_lock)
        rank, _ = collectives.rank_and_world_size()
        if rank == 0 and read_json(folder / STATE).get("program", program) == program:
            stack.enter_context(reported_state(folder, program))
        yield folder


@contextmanager
def reported_state(folder: Path, program: str) -> Iterator[None]:
    """Writes to run.json that the program runs, and how it ends.

    A signal that ends the program does so at once, as if it were not handled.
    """
    previous: dict[int, Any] = {}  # handlers

    def report(number: int, frame: FrameType | None) -> None:
        write_state(folder, "stopped", why=signal.Signals(number).name)
        signal.signal(number, previous[number])
        signal.raise_signal(number)

    write_state(folder, "running", program=program)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as of HUP under nohup
            previous[number] = signal.signal(number, report)
    try:
        yield
    except Exception as error:
        write_state(folder, "failed", why=str(error))
        raise
    finally:
        for handled, handler in previous.items():
            signal.signal(handled, handler)
    write_state(folder, "finished")


def enter_folder(args: argparse.Namespace, stack: ExitStack) -> tuple[Path, list[str]]:
    """Locks the output folder of a run. Returns (folder, notes for the log).

    stack: frees the folder when it is closed. ValueError if the folder lies inside the data, is not writable, is in use
    by another run, or is not the same for all processes. With --check_data nothing that lies in the folder is changed.
    """

    def check_folder() -> Path:
        # The next start would read other data.
        refuse_inside_data("--output_dir", args.output_dir, args.dataset, args.data_path)
        return make_writable_folder(args.output_dir)

    output_dir = collectives.run_everywhere(check_folder)

    def lock_and_clear() -> list[str]:
        file, notes = lock_folder(output_dir)
        stack.enter_context(file)
        if not args.check_data:
            for pattern in LEFTOVERS:
                for leftover in output_dir.glob(pattern):
                    leftover.unlink()
        return notes

    notes = collectives.run_on_rank0(lock_and_clear)
    _, world_size = collectives.rank_and_world_size()
    if world_size > 1:
        refuse_separate_folders(output_dir)
    return output_dir, notes


def describe_start(program: str, argv: Sequence[str] | None) -> StartInfo:
    """Returns code, command line and hosts of this start. All ranks must call it. argv: None for this program's."""
    words = [redact(word) for word in (sys.argv[1:] if argv is None else argv)]
    hosts = sorted(set(collectives.gather_objects(socket.gethostname())))
    return StartInfo(collectives.run_on_rank0(code_version), shlex.join([program, *words]), hosts)


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


def checkpoint_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the size of a checkpoint. Without a state yet, an optimizer is taken for one of two moments."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    moments = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state:
                values = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value)]
            else:
                values = [parameter, parameter]
            moments += sum(value.numel() * value.element_size() for value in values)
    return weights + moments


def check_space(output_dir: Path, num_bytes: int, holds_one: bool) -> None:
    """OSError if the disk has no space for the next checkpoints, which have `num_bytes` each. For rank 0.

    holds_one: whether the folder holds a checkpoint, which is removed once the next one is complete.
    """
    free = shutil.disk_usage(output_dir).free
    needed = num_bytes
    if not holds_one:
        needed += num_bytes
    if free < needed:
        place = f"the disk of --output_dir {str(output_dir)!r} has {free / 1e6:.1f} MB free"
        raise OSError(f"{place}, but two checkpoints at a time take {num_bytes / 1e6:.1f} MB each: free some")
