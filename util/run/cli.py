"""Command lines: help with defaults, short errors, recipes as named defaults, and exit codes that a shell expects."""

import argparse
import copy
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from util.text import close_to

LONG_CHOICES = 50  # characters
# Exit codes after which a restart would fail again: user error, values that are not finite, no usable checkpoint.
FINAL = (2, 3, 4)
TEMPORARY = 75  # exit code (EX_TEMPFAIL): the same command may succeed later
PROGRESS = ".progress"  # file in the output folder that says how far the run is


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every flag that has one.

    A long list of choices appears once, in the flag's help. If it has more than 12 entries, only their number is shown,
    and the value "list" prints them.
    """

    def _format_action(self, action: argparse.Action) -> str:
        notes = []
        if _has_long_choices(action):
            flag, choices = (action.option_strings or [action.dest])[0], list(action.choices or ())
            names = f"one of {', '.join(map(str, choices))}"
            notes.append(names if len(choices) <= 12 else f"`{flag} list` names all {len(choices)}")
        default = action.default
        is_set = default is not argparse.SUPPRESS and default is not None and default not in ((), [])
        if is_set and "default" not in (action.help or ""):
            shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
            notes.append(f"default: {shown}")
        if notes:
            note = "; ".join(notes).replace("%", "%%")
            action = copy.copy(action)
            action.help = f"{action.help} ({note})" if action.help else note
        return super()._format_action(action)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if _has_long_choices(action):
            action = copy.copy(action)
            action.choices = None
        return super()._metavar_formatter(action, default_metavar)


def _has_long_choices(action: argparse.Action) -> bool:
    return action.choices is not None and len(",".join(map(str, action.choices))) > LONG_CHOICES


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with `HelpFormatter` and with errors of one paragraph, without the usage before it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **options})

    def format_help(self) -> str:
        """Returns the help. If there are many flags, the usage names positional arguments only."""
        if self.usage is None and len(self._actions) > 12:
            names = [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]
            self.usage = " ".join(["%(prog)s", "[flags]", *names])
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses `args`, with the user's home for `~`. Shells leave it in `--flag=~/x` as it is."""
        words = [expand_home(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(words, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """For a long list of choices: "list" prints them, and an unknown value is answered with those close to it."""
        if not _has_long_choices(action) or value in (action.choices or ()):
            return super()._check_value(action, value)
        choices = [str(choice) for choice in action.choices or ()]
        if value == "list":
            print("\n".join(choices))
            self.exit()
        flag = (action.option_strings or [action.dest])[0]
        raise argparse.ArgumentError(
            action, f"invalid choice: {value!r}{close_to(value, choices)} (`{flag} list` names all)"
        )

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2. Lines of the message are joined."""
        text = " ".join(line.strip() for line in message.splitlines() if line.strip())
        self.exit(2, f"{self.prog}: error: {text}\n(`{self.prog} --help` lists every flag)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends the program, and torchrun with it if it would start a final error again."""
        if message:
            self._print_message(message, sys.stderr)
        if status in FINAL:
            stop_torchrun(f"{self.prog}: exit code {status}; torchrun is stopped, which would repeat it\n")
        super().exit(status)


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


def expand_home(word: str) -> str:
    """Returns a word of a command line in which a `~` at the start, or after `NAME=`, is the user's home."""
    name, equals, value = word.partition("=")
    return name + equals + os.path.expanduser(value) if equals and "/" not in name else os.path.expanduser(word)


def parse_with_recipe(
    parser: argparse.ArgumentParser, recipes: Mapping[str, Mapping[str, Any]], argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parses `argv`. `--recipe NAME` sets defaults from `recipes[NAME]`; explicit flags win.

    A warm-up that no flag gives is scaled to a schedule that would be shorter.
    """
    name = parser.parse_known_args(argv)[0].recipe
    if name is not None:
        check_recipe(parser, name, recipes)
        flags = {action.dest for action in parser._actions}
        unknown = [key for key in recipes[name] if key not in flags]
        if unknown:
            parser.error(f"recipe {name!r} sets {', '.join(unknown)}, which {parser.prog} does not know")
        parser.set_defaults(**recipes[name])
    args = parser.parse_args(argv)
    if name is not None and "patch_size" in recipes[name].keys() - flags_given(parser, argv):
        refuse_other_patch(parser, args, recipes[name]["patch_size"])
    scale_warmup(parser, args, argv)
    return args


def check_recipe(parser: argparse.ArgumentParser, name: str, recipes: Iterable[str]) -> None:
    """Ends the program unless there is a recipe of this name. The name "list" prints all."""
    if name == "list":
        print("\n".join(recipes))
        parser.exit()
    if name not in recipes:
        parser.error(f"unknown recipe {name!r}{close_to(name, recipes)} (`list` names all)")


def refuse_other_patch(parser: argparse.ArgumentParser, args: argparse.Namespace, patch_size: int) -> None:
    """Ends the program if `--model` is named for other patches than the recipe's model, and not for `patch_size`.

    patch_size: of the recipe. It wins over the name of the recipe's model, but may not be meant for another one.
    """
    named, expected = (re.search(r"_patch(\d+)", model) for model in (args.model, parser.get_default("model")))
    if named is None or expected is None or named[1] in (expected[1], str(patch_size)):
        return
    parser.error(
        f"recipe {args.recipe!r} sets --patch_size {patch_size}, but --model {args.model} is named for patches of "
        f"{named[1]}: give --patch_size, too"
    )


def scale_warmup(parser: argparse.ArgumentParser, args: argparse.Namespace, argv: Sequence[str] | None) -> None:
    """Scales a default warm-up, or a recipe's, with the length of a schedule that has become shorter than it."""
    for length, warmup in (("epochs", "warmup_epochs"), ("num_iters", "warmup_iters")):
        steps, most = getattr(args, warmup, None), getattr(args, length, None)
        if steps and most is not None and 0 <= most < steps and warmup not in flags_given(parser, argv):
            scaled = steps * most / parser.get_default(length)
            setattr(args, warmup, scaled if length == "epochs" else int(scaled))


def flags_given(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> set[str]:
    """Returns the `dest` of each flag that `argv` itself sets, in any spelling: `--lr 1`, `--lr=1` or an abbreviation.

    Defaults and the values of a recipe do not count, and positional arguments are not flags. `argv` must be valid.
    """
    parser = copy.deepcopy(parser)
    parser._defaults.clear()
    flags = [action for action in parser._actions if action.option_strings]
    for action in flags:
        action.default = argparse.SUPPRESS  # the namespace then lacks flags that are not given
    given = vars(parser.parse_known_args(argv)[0])
    return {action.dest for action in flags} & given.keys()


def check_least(args: argparse.Namespace, least: float, names: str) -> None:
    """ValueError if one of the flags `names` is below `least`. Flags that are absent or not set are skipped."""
    for name in names.split():
        value = getattr(args, name, None)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")


def with_dashes(message: str, parser: argparse.ArgumentParser) -> str:
    """Returns the message with `--` before the names of the parser's flags. Errors of a library name its arguments.

    Names without an underscore, such as "model", are words as well and stay as they are.
    """
    names = [option[2:] for action in parser._actions for option in action.option_strings if "_" in option]
    return re.sub(rf"(?<![\w'\"./=-])({'|'.join(names)})(?![\w'\"./=-])", r"--\1", message) if names else message


@contextmanager
def user_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Turns an error of the user, or of values that are not finite, into the parser's error of one paragraph."""
    try:
        yield
    except BrokenPipeError:  # see `run_program`
        raise
    except FloatingPointError as error:
        parser.exit(3, f"{parser.prog}: error: {error}\n")
    except (ValueError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.strerror and isinstance(error.filename, (str, os.PathLike)):
            message = f"{str(error.filename)!r}: {error.strerror}"  # without the number of the error
        parser.error(with_dashes(message, parser))


def run_program(main: Callable[[], object], prog: str) -> None:
    """Calls `main` as the whole program `prog`, and ends the process as a shell expects.

    Ctrl-C prints one line and ends the process by SIGINT, so that a loop or `a && b` of the shell stops, too. A closed
    pipe (`| head`) ends it by SIGPIPE, silently. If `main` returns False, a signal stopped the run before its end: the
    exit code is 75.
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
        if not _is_output_closed():
            raise
        _die_of(signal.SIGPIPE)
    if finished is False:
        sys.exit(TEMPORARY)


def _is_output_closed() -> bool:
    """Whether the reader of stdout or stderr has closed its end. A broken pipe to a worker is an error instead."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _die_of(number: signal.Signals) -> NoReturn:
    """Ends the process by the default action of a signal, which tells the shell why it ended."""
    signal.signal(number, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # if the signal is blocked


def prepare_file(flag: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Creates the folder of a file that `flag` asks for. ValueError if it cannot be written, or for another suffix.

    Programs call it before they compute for minutes. path: None if the flag is not given.
    """
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{flag} {str(path)!r} must end in {' or '.join(suffixes)}")
    folder = path.resolve().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "it is a folder" if path.is_dir() else "permission denied"
        is_writable = not path.is_dir() and os.access(path if path.exists() else folder, os.W_OK)
    except OSError as error:
        is_writable, reason = False, f"the folder {str(folder)!r} cannot be made: {error.strerror}"
    if not is_writable:
        raise ValueError(f"{flag} {str(path)!r} cannot be written: {reason}")
