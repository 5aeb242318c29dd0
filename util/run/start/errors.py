"""How errors end a program: one paragraph on stderr and an exit code that says whether to start again."""

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

import torch

from util import collectives
from util.data.workers import SIGNALS
from util.run.cli import TEMPORARY, Parser, die_of, with_dashes
from util.run.files.lock import LOCK, lock_folder, make_writable_folder
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
    message = describe_error(parser, error)
    collectives.settle_threads()
    parser.exit(exit_code(error), f"{parser.prog}: error: {message}{advice}\n")


def describe_error(parser: Parser, error: Exception) -> str:
    """Returns what an error of the user says, with the names of the parser's flags."""
    message = message_of(error)
    if isinstance(error, PermissionError):
        owner = f" ({describe_owner(str(error.filename))})" if error.filename else ""
        message += f"{owner}; ask for access, or give another path"
    return with_dashes(message, parser)


def is_full_gpu(error: BaseException | None) -> bool:
    """Whether the memory of a GPU was full. Where torch's allocator was not asked, as by cuBLAS, NCCL and the loading
    of a kernel, the error is a RuntimeError that says so.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "_ALLOC_FAILED" in text)


class Signalled(BaseException):
    """A signal ends the set-up. It is raised in the main thread."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)


class SetUp:
    """The start of a program, until training begins: the folder that it takes, and signals.

    If it fails, what it has created is removed.
    """

    def __init__(self) -> None:
        self.new: list[Path] = []  # folders and files, in the order of their creation
        self.lock: TextIO | None = None  # on rank 0
        self.is_over = False
        self.handled: list[signal.Signals] = []

    def create_folder(self, path: str | Path) -> Path:
        """Creates the output folder. ValueError if files cannot be written there, OSError if that may pass."""
        folder = Path(path)
        self.new += [place for place in (*reversed(folder.parents), folder) if not place.exists()]
        make_writable_folder(folder)
        return folder

    def lock_folder(self, folder: Path, files: Sequence[str] = ()) -> list[str]:
        """Takes the folder until the program ends. For rank 0. Returns notes. files: names that it is going to write.

        Raises what `lock.lock_folder` raises.
        """
        is_first = not (folder / LOCK).exists()
        self.lock, notes = lock_folder(folder)
        if is_first:
            self.new.append(folder / LOCK)
        self.new += [folder / name for name in files if not (folder / name).exists()]
        return notes

    def undo(self) -> None:
        """Removes what was created. Folders that hold anything else stay."""
        for path in reversed(self.new):
            with suppress(OSError):
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()

    def handle_signals(self) -> None:
        """From now on a signal that would kill this process raises `Signalled`, so that `undo` comes first.

        Other handlers stay. For rank 0, which creates: where the others wait for it, a handler might never run.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                self.handled.append(number)
                signal.signal(number, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> NoReturn:
        self.leave_signals()  # a second one kills the process
        raise Signalled(number)

    def leave_signals(self) -> None:
        """Gives the handled signals their default action again."""
        while self.handled:
            signal.signal(self.handled.pop(), signal.SIG_DFL)

    def end(self) -> None:
        """From now on what was created stays, and a ValueError is no error of the user."""
        self.is_over = True
        self.leave_signals()


@contextmanager
def exit_on_setup_errors(parser: Parser) -> Iterator[SetUp]:
    """Before training, a ValueError is the user's error. The process leaves the process group and exits."""
    set_up = SetUp()
    try:
        yield set_up
    except BaseException as error:
        if set_up.is_over:
            raise
        set_up.undo()
        if isinstance(error, Signalled):
            die_of(error.number)
        known = (ValueError, FloatingPointError, OSError)
        if not isinstance(error, Exception) or not (isinstance(error, known) or is_full_gpu(error)):
            raise
        try:
            refuse(parser, error, "; start the same command again" if isinstance(error, OSError) else "")
        finally:
            distributed.shut_down(after_error=True)
    finally:
        set_up.leave_signals()
        if set_up.lock is not None:
            set_up.lock.close()
