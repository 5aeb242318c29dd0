"""The start that all programs share: their processes join, and take the output folder."""

import argparse
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from util import collectives
from util.code_version import source_hash
from util.data.folders import refuse_inside_data
from util.data.workers import SIGNALS
from util.run.cli import Parser
from util.run.exits import user_errors
from util.run.files.json_files import STATE, read_json, write_state
from util.run.files.lock import LOCK, lock_folder, make_writable_folder, this_process
from util.run.processes.distributed import Process, init_process, shut_down


@contextmanager
def begin(
    program: str, parser: Parser, args: argparse.Namespace, output_dir: str | Path | None, *, trains: bool = False
) -> Iterator[tuple[Process, Path | None]]:
    """Joins the processes and locks the output folder, if there is one, until the context ends. Yields both.

    All ranks must have the same flags, code and torch. Errors of the user end the program, and so do those in the
    context; run.json says how it ends. trains: the training itself does so, because it saves first, and `Run.begin`
    takes its folder.
    """
    try:
        with ExitStack() as stack:
            with user_errors(parser):
                process = init_process(args.device, max(60, vars(args).get("dist_timeout", 600)))
                refuse_different_starts(parser, args)
                folder = None
                if output_dir is not None:
                    folder = Path(output_dir)
                    take_folder(folder, args, stack)
            if not trains:
                stack.enter_context(user_errors(parser))
                if process.is_main and folder is not None:
                    stack.enter_context(reported_state(folder, program))
            yield process, folder
    except BaseException:
        collectives.wait_for_threads()  # the group is left as it is: the other ranks may wait in it
        raise
    shut_down()


def refuse_different_starts(parser: Parser, args: argparse.Namespace) -> None:
    """ValueError on all ranks if code, torch or flags differ between them, apart from flags of a process."""
    compared = {}
    for name, value in vars(args).items():
        if name not in parser.flags or not parser.flags[name].per_process:
            compared[f"--{name}"] = value
    compared["code"] = source_hash()
    compared["torch"] = torch.__version__
    collectives.refuse_differences(compared, "flags and code")


def take_folder(folder: Path, args: argparse.Namespace, stack: ExitStack) -> None:
    """Creates the folder and locks it until `stack` is closed.

    ValueError on all ranks if the folder lies inside the data, is not writable, or is in use by another process.
    """

    def lock() -> None:
        if "data_path" in args:  # where the next start would read other data
            refuse_inside_data("--output_dir", folder, args.dataset, args.data_path)
        make_writable_folder(folder)
        file, notes = lock_folder(folder)
        stack.enter_context(file)
        collectives.print_on_rank0(*notes)

    collectives.run_on_rank0(lock)


def remove_leftovers(output_dir: Path) -> None:
    """Removes the temporary files of a killed process, but no folders, such as that of an export that runs now."""
    for pattern in (".*.tmp-*", "attention/.*.tmp-*"):
        for leftover in output_dir.glob(pattern):
            if leftover.is_file():
                leftover.unlink()


def refuse_separate_folders(output_dir: Path) -> None:
    """ValueError on all ranks unless all see the lock of rank 0 in the folder, within 6 seconds."""
    holder = collectives.run_on_rank0(this_process)
    lock = output_dir / LOCK

    def wait_for_lock() -> None:
        rank, _ = collectives.rank_and_world_size()
        if rank == 0:  # it would free its lock by closing the file
            return
        for seconds in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2):
            if lock.exists() and lock.read_text().strip() == holder:  # not that of an earlier run on a disk of its own
                return
            time.sleep(seconds)
        raise ValueError(
            f"--output_dir {str(output_dir)!r} is not the same folder for all processes: {socket.gethostname()} does "
            "not see the lock of rank 0; choose a folder on storage that all nodes share"
        )

    collectives.run_everywhere(wait_for_lock)


@contextmanager
def reported_state(folder: Path, program: str) -> Iterator[None]:
    """Writes to run.json that the program runs, and how it ends, unless the folder is another program's.

    A signal that ends the program does so at once, as if it were not handled.
    """
    if read_json(folder / STATE).get("program", program) != program:
        yield
        return
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


def checkpoint_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the size of a checkpoint, whose optimizer has about two moments of each parameter."""
    tensors = list(model.state_dict().values())
    for group in optimizer.param_groups:
        tensors += [*group["params"], *group["params"]]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
