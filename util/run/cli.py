"""Command lines: help with defaults, short errors, recipes as named defaults, and exit codes that a shell expects."""

import argparse
import copy
import errno
import math
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

from util.parent import signal_if_parent_dies
from util.text import close_to, describe_owner, printable
from util.urls import redact

LONG_CHOICES = 50  # characters
# Exit codes after which a restart would fail again: user error, values that are not finite, no usable checkpoint.
FINAL = (2, 3, 4)
TEMPORARY = 75  # exit code (EX_TEMPFAIL): the same command may succeed later
# Numbers of OSErrors of a path that the user gave. Others, such as a full disk, may pass.
PATH_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
PERMISSION_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)
ARGUMENTS = {"img_size": "input_size"}  # of models, whose flag has another name
PROGRESS = ".progress"  # file in the output folder that says how far the run is
LOG = "log.txt"
WARMUPS = {"warmup_epochs": "epochs", "warmup_iters": "num_iters"}  # {flag: the flag of the schedule's length}
HELP = ("help", "help_all")  # flags that print help
FEW = 20  # a program with at most as many flags shows all of them by --help
# What another value of a flag changes. "rounding": results still agree to rounding. "split": how the total batch is
# split over processes and micro-batches; each step has the same images.
Change = Literal["nothing", "rounding", "split", "results"]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every flag that has one.

    A long list of choices appears once, in the flag's help. If it has more than 12 entries, only their number is shown,
    and the value "list" prints them. A value has the last word of its flag as its name.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_action(self, action: argparse.Action) -> str:
        notes = []
        if _has_long_choices(action):
            choices = list(action.choices or ())
            if len(choices) <= 12:
                notes.append(f"one of {', '.join(map(str, choices))}")
            else:
                notes.append(f"`{_flag_of(action)} list` names all {len(choices)}")
        default = action.default
        if isinstance(default, (list, tuple)):
            default = " ".join(map(str, default))
        is_set = default is not None and default not in (argparse.SUPPRESS, "")
        if is_set and "default" not in (action.help or ""):
            notes.append(f"default: {default}")
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

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return action.dest.rpartition("_")[2].upper()

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]", 1)
        return super()._format_action_invocation(action)


def _has_long_choices(action: argparse.Action) -> bool:
    return action.choices is not None and len(",".join(map(str, action.choices))) > LONG_CHOICES


def _flag_of(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else action.dest


@dataclass(frozen=True)
class FlagRule:
    """What a flag means to the programs that read it, and which numbers it takes."""

    changes: Change = "results"
    per_process: bool = False
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    everyday: bool = False

    def objection(self, value: Any) -> str | None:
        """Returns what is wrong with a value of the flag, or None. Of a list, each number has the bounds."""
        if isinstance(value, (list, tuple)):
            for number in value:
                objection = self.objection(number)
                if objection is not None:
                    return objection
            return None
        if value is None:
            return None
        if isinstance(value, float) and not math.isfinite(value):
            return "must be finite"
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least}"
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below}"
        return None


class FlagContainer(argparse._ActionsContainer):
    """A parser, or a group of it, whose flags say what they change and which numbers they take."""

    rules: dict[str, FlagRule]  # of all flags of the parser, by `dest`

    def add_argument(
        self,
        *names: str,
        changes: Change = "results",
        per_process: bool = False,
        at_least: float | None = None,
        at_most: float | None = None,
        above: float | None = None,
        below: float | None = None,
        everyday: bool = False,
        **options: Any,
    ) -> argparse.Action:
        """Adds a flag, as argparse does.

        changes: what another value changes: see `Change`. A resumed run may have other values than before, unless they
        change results.
        per_process: whether the processes of one start may have different values, such as paths of their node.
        at_least, at_most, above, below: bounds of its number.
        everyday: whether --help shows it, with the first clause of its help: up to a semicolon or parenthesis.
        """
        action = super().add_argument(*names, **options)
        self.rules[action.dest] = FlagRule(changes, per_process, at_least, at_most, above, below, everyday)
        return action


class FlagGroup(FlagContainer, argparse._ArgumentGroup):
    """A titled group of flags."""

    def __init__(self, container: FlagContainer, *args: Any, **options: Any) -> None:
        self.rules = container.rules
        super().__init__(container, *args, **options)


class HelpOfAllFlags(argparse.Action):
    """Prints the help of all flags, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help_all(), end="")
        parser.exit()


class Parser(FlagContainer, argparse.ArgumentParser):
    """An ArgumentParser with `HelpFormatter`, rules of flags, and errors of one paragraph without the usage."""

    recipe: Mapping[str, Any]  # the values of the recipe in use, by `dest`

    def __init__(self, *args: Any, **options: Any) -> None:
        self.rules = {}
        self.recipe = {}
        super().__init__(*args, **{"formatter_class": HelpFormatter, **options})
        hidden = argparse.SUPPRESS  # from the settings of a run, and from the help itself
        self.add_argument("--help_all", action=HelpOfAllFlags, nargs=0, default=hidden, help=hidden)

    def add_argument_group(self, *args: Any, **options: Any) -> FlagGroup:
        """Adds a group, whose flags have rules as well."""
        group = FlagGroup(self, *args, **options)
        self._action_groups.append(group)
        return group

    @property
    def changes(self) -> dict[str, Change]:
        """What each flag changes, by `dest`."""
        return {name: rule.changes for name, rule in self.rules.items()}

    def set_changes(self, **changes: Change) -> None:
        """Replaces what flags change, as `set_defaults` replaces defaults, for a program or model that differs.

        As there, a name may be that of a setting that is no flag.
        """
        for name, change in changes.items():
            self.rules[name] = replace(self.rules.get(name, FlagRule()), changes=change)

    def use_recipe(self, values: Mapping[str, Any]) -> None:
        """Lets the values of a recipe win over the defaults of flags, which stay as they are."""
        self.recipe = dict(values)

    def value_without_flag(self, name: str) -> Any:
        """Returns the value of a flag that a command does not give: the recipe's, or the flag's own default."""
        return self.recipe.get(name, self.get_default(name))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses `args`. A number outside the bounds of its flag ends the program, also that of a recipe."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse_unknown(unknown)
        for name, rule in self.rules.items():
            value = getattr(parsed, name, None)
            objection = rule.objection(value)
            if objection is not None:
                self.error(f"--{name} {objection}, got {value}")
        return parsed

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Ends the program, because it knows no flag to which these words belong."""
        remarks = []
        for word in words:
            if word.startswith("--"):
                flag = word.partition("=")[0]
                remarks.append(f"unknown flag {flag}{close_to(flag[2:], self._option_string_actions)}")
        self.error("; ".join(remarks) or f"unrecognized arguments: {' '.join(words)}")

    def refuse_values_of_switches(self, words: Sequence[str]) -> None:
        """Ends the program if a flag that is on or off has a value, such as `--hflip False` or `--hflip=False`."""
        for word, next_word in pairwise([*words, ""]):
            flag, equals, value = word.partition("=")
            if not equals:
                value = next_word
            switch = self._option_string_actions.get(flag)
            if not isinstance(switch, argparse.BooleanOptionalAction) or value.lower() not in ("true", "false"):
                continue
            on, off = switch.option_strings
            right = on
            if (value.lower() == "true") == (flag == off):
                right = off
            self.error(f"{flag} takes no value: give {right}")

    def format_help(self) -> str:
        """Returns the help of everyday flags. If there are few flags, returns that of all."""
        brief = copy.deepcopy(self)
        flags = [action for action in brief._actions if action.option_strings and action.dest not in HELP]
        if len(flags) <= FEW:
            return self.format_help_all()
        for action in flags:
            if self.rules[action.dest].everyday:
                action.help = re.split(r"; | \(", action.help or "")[0]
            else:
                action.help = argparse.SUPPRESS
        return f"{brief.format_help_all()}\n`{self.prog} --help_all` lists all {len(flags)} flags.\n"

    def format_help_all(self) -> str:
        """Returns the help of all flags. If there are many, the usage names positional arguments only."""
        if self.usage is None and len(self._actions) > 13:
            names = [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]
            self.usage = " ".join(["%(prog)s", "[flags]", *names])
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses `args`, with the user's home for `~`. Shells leave it in `--flag=~/x` as it is."""
        words = [expand_home(word) for word in (sys.argv[1:] if args is None else args)]
        self.refuse_values_of_switches(words)
        if namespace is None:
            namespace = argparse.Namespace()
        for name, value in self.recipe.items():
            if name not in namespace:
                setattr(namespace, name, value)  # argparse takes a default only where nothing is set
        return super().parse_known_args(words, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """For a long list of choices: "list" prints them, and an unknown value is answered with those close to it."""
        if not _has_long_choices(action) or value in (action.choices or ()):
            return super()._check_value(action, value)
        choices = [str(choice) for choice in action.choices or ()]
        if value == "list":
            print("\n".join(choices))
            self.exit()
        raise argparse.ArgumentError(
            action, f"invalid choice: {value!r}{close_to(value, choices)} (`{_flag_of(action)} list` names all)"
        )

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2. Lines of the message are joined."""
        text = " ".join(line.strip() for line in message.splitlines() if line.strip())
        self.exit(2, f"{self.prog}: error: {text}\n(`{self.prog} --help_all` lists every flag)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends the program, and torchrun with it if it would start a final error again."""
        if message:
            self._print_message(printable(redact(message)), sys.stderr)
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
    if equals and "/" not in name:
        return name + equals + os.path.expanduser(value)
    return os.path.expanduser(word)


def parse_with_recipe(
    parser: Parser, recipes: Mapping[str, Mapping[str, Any]], argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parses `argv`. `--recipe NAME` sets defaults from `recipes[NAME]`; explicit flags win.

    A warm-up that no flag gives fits into a schedule that has become shorter, see `warmup_without_flag`.
    """
    name = parser.parse_known_args(argv)[0].recipe
    if name is not None:
        check_recipe(parser, name, recipes)
        flags = {action.dest for action in parser._actions}
        unknown = [key for key in recipes[name] if key not in flags]
        if unknown:
            parser.error(f"recipe {name!r} sets {', '.join(unknown)}, which {parser.prog} does not know")
        parser.use_recipe(recipes[name])
    args = parser.parse_args(argv)
    if name is not None and "patch_size" in recipes[name].keys() - flags_given(parser, argv):
        refuse_other_patch(parser, args, recipes[name]["patch_size"])
    fit_warmup(parser, args, argv)
    return args


def check_recipe(parser: argparse.ArgumentParser, name: str, recipes: Iterable[str]) -> None:
    """Ends the program unless there is a recipe of this name. The name "list" prints all."""
    if name == "list":
        print("\n".join(recipes))
        parser.exit()
    if name not in recipes:
        parser.error(f"unknown recipe {name!r}{close_to(name, recipes)} (`list` names all)")


def refuse_other_patch(parser: Parser, args: argparse.Namespace, patch_size: int) -> None:
    """Ends the program if `--model` is named for other patches than the recipe's model, and not for `patch_size`.

    patch_size: of the recipe. It wins over the name of the recipe's model, but may not be meant for another one.
    """
    named = re.search(r"_patch(\d+)", args.model)
    expected = re.search(r"_patch(\d+)", parser.value_without_flag("model"))
    if named is None or expected is None or named[1] in (expected[1], str(patch_size)):
        return
    parser.error(
        f"recipe {args.recipe!r} sets --patch_size {patch_size}, but --model {args.model} is named for patches of "
        f"{named[1]}: give --patch_size, too"
    )


def fit_warmup(parser: Parser, args: argparse.Namespace, argv: Sequence[str] | None) -> None:
    """Sets the warm-up that no flag gives. Ends the program if it is more than half of the schedule."""
    given = flags_given(parser, argv)
    for flag, length_flag in WARMUPS.items():
        if flag in given or parser.value_without_flag(flag) is None:
            continue
        length = getattr(args, length_flag)
        warmup = warmup_without_flag(parser, flag, length)
        if warmup > length / 2:
            parser.error(f"a warm-up of {warmup:g} is more than half of --{length_flag} {length}: give --{flag}")
        setattr(args, flag, warmup)


def warmup_without_flag(parser: Parser, flag: str, length: int) -> float:
    """Returns the warm-up of a schedule of this length if no flag gives one.

    It is that of the recipe or of the defaults, as papers keep it for schedules of several lengths. In a schedule that
    is shorter than theirs it is at most a tenth, or their share if that is more. So one epoch more or less changes it
    little, and there is always time for the rate to fall.
    """
    warmup = parser.value_without_flag(flag)
    made_for = length_of_warmup(parser, flag)
    most = max(length / 10, warmup * length / made_for)
    if length >= made_for or warmup <= most:
        return warmup
    if flag == "warmup_iters":
        return int(most)
    return most


def length_of_warmup(parser: Parser, flag: str) -> int:
    """Returns the length of the schedule for which the recipe, or else the defaults, set the warm-up `flag`."""
    length_flag = WARMUPS[flag]
    if flag in parser.recipe:
        return parser.value_without_flag(length_flag)
    return parser.get_default(length_flag)


def describe_warmup(parser: Parser, args: argparse.Namespace, flag: str) -> str:
    """Returns the warm-up in words, for the summary of a run."""
    warmup = getattr(args, flag)
    text = f"{warmup:g} of warm-up"
    default = parser.value_without_flag(flag)
    if warmup != default and warmup == warmup_without_flag(parser, flag, getattr(args, WARMUPS[flag])):
        text += f" (shortened from {default:g} of {length_of_warmup(parser, flag)})"
    return text


def flags_given(parser: Parser, argv: Sequence[str] | None = None) -> set[str]:
    """Returns the `dest` of each flag that `argv` itself sets, in any spelling: `--lr 1`, `--lr=1` or an abbreviation.

    Defaults and the values of a recipe do not count, and positional arguments are not flags. `argv` must be valid.
    """
    parser = copy.deepcopy(parser)
    parser.use_recipe({})
    parser._defaults.clear()
    flags = [action for action in parser._actions if action.option_strings]
    for action in flags:
        action.default = argparse.SUPPRESS  # the namespace then lacks flags that are not given
    given = vars(parser.parse_known_args(argv)[0])
    return {action.dest for action in flags} & given.keys()


def flags_chosen(parser: Parser, argv: Sequence[str] | None = None) -> set[str]:
    """Returns the `dest` of each flag that `argv` sets, or that its recipe sets to another value than its default."""
    chosen = flags_given(parser, argv)
    for name, value in parser.recipe.items():
        if value != parser.get_default(name):
            chosen.add(name)
    return chosen


def with_dashes(message: str, parser: argparse.ArgumentParser) -> str:
    """Returns the message with `--` before the names of the parser's flags. Errors of a library name its arguments.

    Names without an underscore, such as "model", are words as well and stay as they are.
    """
    names = [option[2:] for option in parser._option_string_actions if "_" in option]
    if not names:
        return message

    def spell_flag(match: re.Match[str]) -> str:
        return f"--{ARGUMENTS.get(match[1], match[1])}"

    for argument, flag in ARGUMENTS.items():
        if flag in names:
            names.append(argument)
    return re.sub(rf"(?<![\w'\"./=-])({'|'.join(names)})(?![\w'\"./=-])", spell_flag, message)


@contextmanager
def user_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Turns an error of the user, of values that are not finite, or of the storage into one paragraph and an exit code.

    An OSError without a number is none of the storage.
    """
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
            if isinstance(error, PermissionError):
                message += f" ({describe_owner(str(error.filename))}); ask for access, or give another path"
        if isinstance(error, OSError) and error.errno not in (None, *PATH_ERRORS, *PERMISSION_ERRORS):
            parser.exit(TEMPORARY, f"{parser.prog}: error: {message}; start the same command again\n")
        parser.error(with_dashes(message, parser))


def run_program(main: Callable[[], object], prog: str) -> None:
    """Calls `main` as the whole program `prog`, and ends the process as a shell expects.

    Ctrl-C prints one line and ends the process by SIGINT, so that a loop or `a && b` of the shell stops, too. A closed
    pipe (`| head`) ends it by SIGPIPE, silently. If `main` returns False, a signal stopped the run before its end: the
    exit code is 75. A process of torchrun gets SIGTERM if torchrun dies, which can then not end it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_if_parent_dies(signal.SIGTERM)
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
        if not _is_output_closed():
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


def _is_output_closed() -> bool:
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


def prepare_file(flag: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Creates the folder of a file that `flag` asks for. ValueError if it cannot be written, or for another suffix.

    Programs call it before they compute for minutes. path: None if the flag is not given.
    """
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{flag} {str(path)!r} must end in {' or '.join(suffixes)}")
    refusal = f"{flag} {str(path)!r} cannot be written"
    folder = path.resolve().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{refusal}: the folder {str(folder)!r} cannot be made: {error.strerror}") from error
    if path.is_dir():
        raise ValueError(f"{refusal}: it is a folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{refusal}: permission denied")
