"""Command lines: short errors, recipes as named defaults, and programs that end as a shell expects."""

import argparse
import copy
import difflib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one paragraph, without forty lines of usage before it."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2. A message of several lines becomes one."""
        text = " ".join(line.strip() for line in message.splitlines() if line.strip())
        self.exit(2, f"{self.prog}: error: {text}\n(`{self.prog} --help` lists every flag)\n")


def parse_with_recipe(
    parser: argparse.ArgumentParser, recipes: Mapping[str, Mapping[str, Any]], argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parses `argv`; `--recipe NAME` sets defaults from `recipes[NAME]`, and flags given explicitly win."""
    name = parser.parse_known_args(argv)[0].recipe
    if name is not None:
        if name not in recipes:
            near = difflib.get_close_matches(name, recipes, n=3, cutoff=0.3) or list(recipes)
            parser.error(f"unknown recipe {name!r}; close to it: {', '.join(near)} (all of them: recipes.py)")
        flags = {action.dest for action in parser._actions}
        unknown = [key for key in recipes[name] if key not in flags]
        if unknown:
            parser.error(f"recipe {name!r} sets {', '.join(unknown)}, which {parser.prog} does not know")
        parser.set_defaults(**recipes[name])
    return parser.parse_args(argv)


def flags_given(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> set[str]:
    """The `dest` of each flag that `argv` sets itself, in any spelling: `--lr 1`, `--lr=1`, or an abbreviation.

    Defaults do not count, those of a recipe neither, and positional arguments are not flags. `argv` must be valid.
    """
    parser = copy.deepcopy(parser)
    parser._defaults.clear()
    flags = [action for action in parser._actions if action.option_strings]
    for action in flags:
        action.default = argparse.SUPPRESS  # a flag that is not given leaves no attribute
    given = vars(parser.parse_known_args(argv)[0])
    return {action.dest for action in flags} & given.keys()


@contextmanager
def user_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Turns a ValueError or OSError inside into the parser's one-paragraph error."""
    try:
        yield
    except BrokenPipeError:  # `| head`, which is nobody's error: see `run_program`
        raise
    except (ValueError, OSError) as error:
        parser.error(_message(error))


def _message(error: ValueError | OSError) -> str:
    """The error as text: of the file system's, the path and the reason, without a number."""
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, (str, os.PathLike)):
        return f"{str(error.filename)!r}: {error.strerror}"
    return str(error)


def run_program(main: Callable[[], object], prog: str) -> None:
    """Calls `main` as the whole program `prog`, and ends the process as a shell expects.

    Ctrl-C prints one line, then SIGINT ends the process, so that a loop or `a && b` of the shell stops, too. A reader
    that closes its pipe (`| head`) ends the process by SIGPIPE, without a word. Where `main` returns False, a signal
    has stopped the run before its end: exit code 75 (EX_TEMPFAIL).
    """
    try:
        try:
            finished = main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        with suppress(OSError):
            print(f"{prog}: interrupted", file=sys.stderr)
        _die_of(signal.SIGINT)
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        _die_of(signal.SIGPIPE)
    if finished is False:
        sys.exit(os.EX_TEMPFAIL)


def _reader_has_gone() -> bool:
    """Whether the reader of stdout or stderr has closed its end. Pipes to workers can break, too: those are errors."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _die_of(number: signal.Signals) -> NoReturn:
    """Ends the process by the default action of a signal, by which a shell knows why it ended."""
    signal.signal(number, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # where the signal is blocked


def why_not_writable(path: Path) -> str | None:
    """Why no file can be written at `path`, asked before minutes of measuring; None if it can."""
    folder = path.resolve().parent
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r}"
    if path.is_dir():
        return "it is a folder"
    return None if os.access(path if path.exists() else folder, os.W_OK) else "permission denied"


@contextmanager
def replaced_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path in the same folder, with the same suffix, which then replaces `path` in one step.

    After an error `path` is as it was. What is no regular file, a device for instance, is written to directly.
    """
    target = Path(path).resolve()  # a link stays; what it points to is replaced
    if target.exists() and not target.is_file():
        yield target
        return
    temporary = target.with_name(f".{target.stem}.tmp-{os.getpid()}{target.suffix}")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
