"""How errors end a program: one paragraph on stderr and an exit code that says whether to start again."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import torch

from util import collectives
from util.run.cli import TEMPORARY, Parser
from util.run.files.record import CheckpointError
from util.run.processes import distributed
from util.text import describe_owner


def exit_code(error: Exception) -> int:
    """Returns 3: values not finite; 4: unusable checkpoint; 75: I/O error, start again; 2: any other user error.

    A missing permission is the user's error: it would be missing again.
    """
    if isinstance(error, FloatingPointError):
        return 3
    if isinstance(error, CheckpointError):
        return 4
    if isinstance(error, OSError) and not isinstance(error, PermissionError):
        return TEMPORARY
    return 2


def message_of(error: Exception) -> str:
    """Returns the message of an error, without the traceback that one of a DataLoader worker holds."""
    message = str(error).strip()
    if "Traceback" in message:
        parts = re.split(r"^[\w.]+Error: ", message, flags=re.MULTILINE)
        message = " ".join(parts[-1].split())
    return message


def refuse(parser: Parser, error: Exception, advice: str = "") -> NoReturn:
    """Ends the program with one paragraph and the error's `exit_code`. advice: the end of the paragraph."""
    if isinstance(error, PermissionError):
        advice = ""
    message = describe_error(error)
    collectives.wait_for_threads()
    parser.exit(exit_code(error), f"{parser.prog}: error: {message}{advice}\n")


def describe_error(error: Exception) -> str:
    """Returns what an error of the user says."""
    message = message_of(error)
    if isinstance(error, PermissionError):
        owner = f" ({describe_owner(str(error.filename))})" if error.filename else ""
        message += f"{owner}; ask for access, or give another path"
    return message


def is_full_gpu(error: BaseException | None) -> bool:
    """Whether the memory of a GPU was full. Where torch's allocator was not asked, as by cuBLAS, NCCL and the loading
    of a kernel, the error is a RuntimeError that says so.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "_ALLOC_FAILED" in text)


@contextmanager
def exit_on_setup_errors(parser: Parser) -> Iterator[ExitStack]:
    """A ValueError inside is the user's error. The process leaves the process group and exits.

    It yields a stack for what is to be closed at the end, such as the lock of the output folder.
    """
    with ExitStack() as stack:
        try:
            yield stack
        except (ValueError, FloatingPointError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_full_gpu(error):
                raise
            try:
                refuse(parser, error, "; start the same command again" if isinstance(error, OSError) else "")
            finally:
                distributed.shut_down(after_error=True)
