"""Command lines: help with defaults, short errors, recipes as named defaults, and exit codes that a shell expects."""

import argparse
import errno
import math
import operator
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

from util.host import signal_if_parent_dies
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
FEW = 20  # a program with at most as many flags shows all of them by --help
# What another value of a flag changes. "rounding": results still agree to rounding. "split": how the total batch is
# split over processes and micro-batches; each step has the same images.
Change = Literal["nothing", "rounding", "split", "results"]


@dataclass(frozen=True)
class FlagRule:
    """What a flag means to the programs that read it, and which values it takes.

    help, choices: as in argparse. argparse itself gets the choices unless there are many, see `Parser.check_choice`.
    """

    changes: Change = "results"
    per_process: bool = False
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    everyday: bool = False
    help: str = ""
    choices: Sequence[Any] = ()

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
        for bound, is_met, words in (
            (self.at_least, operator.ge, "at least"),
            (self.at_most, operator.le, "at most"),
            (self.above, operator.gt, "above"),
            (self.below, operator.lt, "below"),
        ):
            if bound is not None and not is_met(value, bound):
                return f"must be {words} {bound}"
        if isinstance(value, float) and not math.isfinite(value):
            return "must be finite"
        return None


class FlagContainer(argparse._ActionsContainer):
    """A parser, or a group of it, whose flags say what they change and which numbers they take."""

    rules: dict[str, FlagRule]  # of all flags of the parser, by `dest`
    actions: dict[str, argparse.Action]  # likewise; positional arguments, too

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
        choices: Iterable[Any] | None = None,
        **options: Any,
    ) -> argparse.Action:
        """Adds a flag, as argparse does.

        changes: what another value changes: see `Change`. A resumed run may have other values than before, unless they
        change results.
        per_process: whether the processes of one start may have different values, such as paths of their node.
        at_least, at_most, above, below: bounds of its number.
        everyday: whether --help shows it, with the first clause of its help: up to a semicolon or parenthesis.
        choices: values that it takes. Many of a flag are not listed in the usage.
        """
        known = list(choices or ())
        if known and (names[0][0] != "-" or len(",".join(map(str, known))) <= LONG_CHOICES):
            options["choices"] = known
            known = []
        action = super().add_argument(*names, **options)
        if action.default == argparse.SUPPRESS:  # help
            return action
        takes_value = action.option_strings and action.nargs != 0
        if takes_value and action.metavar is None and action.choices is None:
            action.metavar = action.dest.rpartition("_")[2].upper()
        if isinstance(action.default, str) and "type" in options:
            action.default = options["type"](action.default)
        rule = FlagRule(
            changes, per_process, at_least, at_most, above, below, everyday, help=action.help or "", choices=known
        )
        self.rules[action.dest] = rule
        self.actions[action.dest] = action
        return action


class FlagGroup(FlagContainer, argparse._ArgumentGroup):
    """A titled group of flags."""

    def __init__(self, container: FlagContainer, *args: Any, **options: Any) -> None:
        self.rules = container.rules
        self.actions = container.actions
        super().__init__(container, *args, **options)


class HelpOfAllFlags(argparse.Action):
    """Prints the help of all flags, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help_all(), end="")
        parser.exit()


class Parser(FlagContainer, argparse.ArgumentParser):
    """An ArgumentParser with rules of flags, recipes as named defaults, and errors of one paragraph without the usage.

    A command is read once. `given` holds the flags that it sets itself, `recipe` the values of its recipe; the defaults
    of flags stay as they are. A flag must be spelt out.
    """

    given: dict[str, Any]  # by `dest`
    recipe: Mapping[str, Any]
    constants: dict[str, Any]  # of `set_defaults`, that are no flags

    def __init__(self, *args: Any, **options: Any) -> None:
        self.rules = {}
        self.actions = {}
        self.given = {}
        self.constants = {}
        self.recipe = {}
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)
        super().__init__(*args, **{"formatter_class": formatter, "allow_abbrev": False, **options})
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

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses a command without recipes."""
        self.read(args)
        return self.resolve()

    def read(self, argv: Sequence[str] | None = None, recipes: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Reads the flags that a command gives, and the values of the recipe that it names, if there are recipes.

        argv: with the user's home for `~`, which shells leave in `--flag=~/x` as it is.
        """
        words = [expand_home(word) for word in (sys.argv[1:] if argv is None else argv)]
        not_given = argparse.Namespace(**dict.fromkeys(self.actions))  # so argparse sets no defaults
        parsed, unknown = self.parse_known_args(words, not_given)
        self.given = {}
        for name, value in vars(parsed).items():
            if name not in self.actions:
                self.constants[name] = value
            elif value is not None:
                self.given[name] = value
        for name, rule in self.rules.items():
            if rule.choices and name in self.given:
                given = self.given[name]
                values = given if isinstance(given, list) else [given]
                for value in values:
                    self.check_choice(name, value, rule.choices)
        if unknown:
            self.refuse_unknown(unknown)
        recipe = self.given.get("recipe")
        if recipes is not None and recipe is not None:
            self.check_choice("recipe", recipe, recipes)
            self.recipe = recipes[recipe]
            strange = [key for key in self.recipe if key not in self.actions]
            if strange:
                self.error(f"recipe {recipe!r} sets {', '.join(strange)}, which {self.prog} does not know")

    def resolve(self) -> argparse.Namespace:
        """Returns the value of each flag: the command's, else the recipe's, else the flag's default.

        A number outside the bounds of its flag ends the program, also that of a recipe.
        """
        values = {name: self.get_default(name) for name in self.actions}
        args = argparse.Namespace(**{**self.constants, **values, **self.recipe, **self.given})
        for name, rule in self.rules.items():
            value = getattr(args, name, None)
            objection = rule.objection(value)
            if objection is not None:
                self.error(f"--{name} {objection}, got {value}")
        if "patch_size" in self.recipe and "patch_size" not in self.given:
            refuse_other_patch(self, args, self.recipe["patch_size"])
        fit_warmup(self, args)
        return args

    def value_without_flag(self, name: str) -> Any:
        """Returns the value of a flag that a command does not give: the recipe's, or the flag's own default."""
        return self.recipe.get(name, self.get_default(name))

    def value(self, name: str) -> Any:
        """Returns the value of a flag, before all are resolved."""
        return self.given.get(name, self.value_without_flag(name))

    def flags_chosen(self) -> dict[str, Any]:
        """Returns the flags that the command sets, or that its recipe sets to another value than its default."""
        by_recipe = {name: value for name, value in self.recipe.items() if value != self.get_default(name)}
        return by_recipe | self.given

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Ends the program, because it knows no flag to which these words belong."""
        remarks = []
        flags = [f"--{name}" for name, action in self.actions.items() if action.option_strings]
        for word in words:
            if word.startswith("--"):
                flag = word.partition("=")[0]
                remarks.append(f"unknown flag {flag}{close_to(flag[2:], flags)}")
        self.error("; ".join(remarks) or f"unrecognized arguments: {' '.join(words)}")

    def check_choice(self, name: str, value: str, known: Iterable[str]) -> None:
        """For many choices: "list" prints them, and an unknown value is answered with those close to it."""
        if value == "list":
            print("\n".join(known))
            self.exit()
        if value not in known:
            self.error(f"unknown --{name} {value!r}{close_to(value, known)} (`--{name} list` names all)")

    def format_help(self) -> str:
        """Returns the help of everyday flags. If there are few flags, returns that of all."""
        flags = [name for name, action in self.actions.items() if action.option_strings]
        if len(flags) <= FEW:
            return self.format_help_all()
        for name in flags:
            self.actions[name].help = argparse.SUPPRESS
            if self.rules[name].everyday:
                self.actions[name].help = self.describe(name, re.split(r"; | \(", self.rules[name].help)[0])
        self.name_positionals()
        return f"{super().format_help()}\n`{self.prog} --help_all` lists all {len(flags)} flags.\n"

    def format_help_all(self) -> str:
        """Returns the help of all flags."""
        for name, action in self.actions.items():
            action.help = self.describe(name, self.rules[name].help)
        self.name_positionals()
        return super().format_help()

    def name_positionals(self) -> None:
        """Lets the usage name positional arguments only."""
        if self.usage is None:
            names = [str(action.metavar or name) for name, action in self.actions.items() if not action.option_strings]
            self.usage = " ".join(["%(prog)s", "[flags]", *names])

    def describe(self, name: str, text: str) -> str:
        """Returns the help `text` of a flag with many choices, if there are, and its default."""
        notes = []
        choices = self.rules[name].choices
        if len(choices) > 12:
            notes.append(f"`--{name} list` names all {len(choices)}")
        elif choices:
            notes.append(f"one of {', '.join(map(str, choices))}")
        default = self.get_default(name)
        if isinstance(default, (list, tuple)):
            default = " ".join(map(str, default))
        if default not in (None, "") and "default" not in text:
            notes.append(f"default: {default}")
        if not notes:
            return text
        note = "; ".join(notes).replace("%", "%%")
        return f"{text} ({note})" if text else note

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2. Lines of the message are joined."""
        text = " ".join(line.strip() for line in message.splitlines() if line.strip())
        self.exit(2, f"{self.prog}: error: {text}\n(`{self.prog} --help_all` lists every flag)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends the program, and torchrun with it if it would start a final error again."""
        if message:
            print(printable(redact(message)), end="", file=sys.stderr)
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
    """Parses `argv`. `--recipe NAME` sets defaults from `recipes[NAME]`; explicit flags win."""
    parser.read(argv, recipes)
    return parser.resolve()


def early_value(argv: Sequence[str] | None, name: str) -> str | None:
    """Returns the last value of a flag in a command whose other flags are not known yet, or None."""
    found = None
    words = sys.argv[1:] if argv is None else argv
    for word, next_word in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag == f"--{name}":
            found = value if equals else next_word
    return found


def refuse_other_patch(parser: Parser, args: argparse.Namespace, patch_size: int) -> None:
    """Ends the program if `--model` is named for other patches than the recipe's model, and not for `patch_size`.

    patch_size: of the recipe. It wins over the name of the recipe's model, but may not be meant for another one.
    """
    named = re.search(r"_patch(\d+)", args.model)
    expected = re.search(r"_patch(\d+)", parser.value_without_flag("model"))
    if named is None or expected is None or named[1] in (expected[1], str(patch_size)):
        return
    parser.error(f"recipe {args.recipe!r} sets --patch_size {patch_size}, but --model {args.model}: give --patch_size")


def fit_warmup(parser: Parser, args: argparse.Namespace) -> None:
    """Sets the warm-up that no flag gives. Ends the program if it is more than half of the schedule."""
    for flag, length_flag in WARMUPS.items():
        if flag in parser.given or parser.value_without_flag(flag) is None:
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
    length_flag = WARMUPS[flag]
    made_for = parser.get_default(length_flag)
    if flag in parser.recipe:
        made_for = parser.value_without_flag(length_flag)
    most = max(length / 10, warmup * length / made_for)
    if length >= made_for or warmup <= most:
        return warmup
    if flag == "warmup_iters":
        return int(most)
    return most


def with_dashes(message: str, parser: Parser) -> str:
    """Returns the message with `--` before the names of the parser's flags. Errors of a library name its arguments.

    Names without an underscore, such as "model", are words as well and stay as they are.
    """
    names = [name for name in parser.actions if "_" in name]
    if not names:
        return message

    def spell_flag(match: re.Match[str]) -> str:
        return f"--{ARGUMENTS.get(match[1], match[1])}"

    for argument, flag in ARGUMENTS.items():
        if flag in names:
            names.append(argument)
    return re.sub(rf"(?<![\w'\"./=-])({'|'.join(names)})(?![\w'\"./=-])", spell_flag, message)


@contextmanager
def user_errors(parser: Parser) -> Iterator[None]:
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
    """Creates the folder of a file that `flag` asks for. ValueError or OSError if it cannot be written.

    Programs call it before they compute for minutes. ValueError for another suffix, too. path: None if not given.
    """
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{flag} {str(path)!r} must end in {' or '.join(suffixes)}")
    folder = path.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{flag} {str(path)!r} cannot be written")
