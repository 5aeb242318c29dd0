"""How a program ends: its exit code, an error in one paragraph, signals, torchrun."""

import argparse
import errno
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from util.host import signal_if_parent_dies
from util.run.errors import CheckpointError

# Exit codes after which a restart would fail again: user error, values that are not finite, no usable checkpoint.
FINAL = (2, 3, 4)
TEMPORARY = 75  # exit code (EX_TEMPFAIL): the same command may succeed later
# Numbers of OSErrors of a path that the user gave. Others, such as a full disk, may pass.
PATH_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
PERMISSION_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)


def exit_code(error: Exception, is_training: bool = False) -> int:
    """Returns 3: values not finite; 4: unusable checkpoint; 75: I/O error, start again; 2: any other user error.

    is_training: a path that is missing now was there before, and may return. A permission would be missing again.
    """
    if isinstance(error, FloatingPointError):
        return 3
    if isinstance(error, CheckpointError):
        return 4
    if not isinstance(error, OSError) or isinstance(error, PermissionError):
        return 2
    if not is_training and error.errno in (*PATH_ERRORS, *PERMISSION_ERRORS):
        return 2
    return TEMPORARY


def describe_error(error: Exception) -> str:
    """Returns the message of an error in one paragraph.

    Without the number of an OSError, and the traceback that an error of a DataLoader worker holds.
    """
    message = str(error).strip()
    if "Traceback" in message:
        message = re.split(r"^[\w.]+Error: ", message, flags=re.MULTILINE)[-1]
    elif isinstance(error, OSError) and error.strerror and isinstance(error.filename, (str, os.PathLike)):
        message = f"{str(error.filename)!r}: {error.strerror}"
    return " ".join(message.split())


def refuse(parser: argparse.ArgumentParser, error: Exception, advice: str = "", is_training: bool = False) -> NoReturn:
    """Ends the program with one paragraph and the error's `exit_code`. advice: the end of the paragraph."""
    code = exit_code(error, is_training)
    if code == TEMPORARY:
        advice = "; start the same command again"
    parser.exit(code, f"{parser.prog}: error: {describe_error(error)}{advice}\n")


@contextmanager
def user_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the program as `refuse` does after an error of the user or of the storage, and where a GPU is full."""
    try:
        yield
    except (ValueError, FloatingPointError, OSError, RuntimeError) as error:
        is_bug = isinstance(error, RuntimeError) and not is_full_gpu(error)
        if is_bug or (isinstance(error, BrokenPipeError) and is_output_closed()):  # see `run_program`
            raise
        refuse(parser, error)


def is_full_gpu(error: BaseException | None) -> bool:
    """Whether the memory of a GPU was full, as torch's allocator, cuBLAS, NCCL or the loading of a kernel say it."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "_ALLOC_FAILED" in text)


def stop_torchrun(message: str) -> None:
    """Prints `message` and sends TERM to torchrun, if it would restart this process, as after any exit code but 0.

    Only one process of each node does so, since a second signal would disturb torchrun while it ends the others.
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) >= int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        return
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent  # .../attempt_0/<local rank>/error.json
    if attempt.name.startswith("attempt_"):
        with suppress(OSError):
            (attempt / "final").touch(exist_ok=False)
            print(message, end="", file=sys.stderr, flush=True)
            os.kill(os.getppid(), signal.SIGTERM)


def run_program(main: Callable[[], object], prog: str) -> None:
    """Calls `main` as the whole program `prog`, and ends the process as a shell expects.

    Ctrl-C prints one line and ends the process by SIGINT, so that a loop or `a && b` of the shell stops, too. A closed
    pipe (`| head`) ends it by SIGPIPE, silently. If `main` returns False, a signal stopped the run before its end: the
    exit code is 75. A process of torchrun gets SIGTERM if torchrun dies, which can then not end it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_if_parent_dies(signal.SIGTERM)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files need not be UTF-8
    try:
        try:
            finished = main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        with suppress(OSError):
            print(f"{prog}: interrupted", file=sys.stderr)
        die_of(signal.SIGINT)
    except BrokenPipeError:
        if not is_output_closed():
            raise
        die_of(signal.SIGPIPE)
    except BaseException as error:
        end_if_others_wait(error)
        raise
    if finished is False:
        sys.exit(TEMPORARY)


def end_if_others_wait(error: BaseException) -> None:
    """Ends the process now if an error ends it while it is in an NCCL group.

    The interpreter's own end would leave the group, and wait for the other ranks, which may wait for this one.
    """
    distributed = sys.modules.get("torch.distributed")  # a program that trains has loaded it
    if distributed is None or not distributed.is_initialized() or distributed.get_backend() != "nccl":
        return
    code = 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    elif error.code is None:
        code = 0
    elif isinstance(error.code, int):
        code = error.code
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def is_output_closed() -> bool:
    """Whether the reader of stdout or stderr has closed its end. A broken pipe to a worker is an error instead."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def die_of(number: signal.Signals) -> NoReturn:
    """Ends the process by the default action of a signal, which tells the shell why it ended."""
    signal.signal(number, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # if the signal is blocked
