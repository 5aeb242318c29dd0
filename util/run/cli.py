"""Command lines: help with defaults, short errors, and recipes as named defaults."""

import argparse
import os
import re
import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from util.flag import Change, Flag
from util.run.exits import FINAL, stop_torchrun
from util.text import close_to, printable
from util.urls import redact

WARMUPS = {"warmup_epochs": "epochs", "warmup_iters": "num_iters"}  # {flag: the flag of the schedule's length}
FEW = 20  # a program with at most as many flags shows all of them by --help


class HelpOfAllFlags(argparse.Action):
    """Prints the help of all flags, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help_all(), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An ArgumentParser of `Flag`s, with recipes as named defaults, and errors of one paragraph without the usage.

    A flag must be spelt out.
    """

    flags: dict[str, Flag]
    changes: dict[str, Change]  # what each flag changes; also other settings of a run, if they change less than results
    values: ChainMap[str, Any]  # {flag: its value in the command, else in the recipe, else by default}, after `read`

    def __init__(self, program: str, description: str | None, *flags: Flag) -> None:
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)
        super().__init__(program, description=description, formatter_class=formatter, allow_abbrev=False)
        self.flags = {}
        self.changes = {}
        self.defaults: dict[str, Any] = {}
        self.actions: dict[str, argparse.Action] = {}
        self.values = ChainMap({}, {}, self.defaults)
        self.add_argument(
            "--help_all", action=HelpOfAllFlags, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        self.add_flags("", *flags)

    def add_flags(self, title: str, *flags: Flag) -> None:
        """Adds flags, in a group of the help with this title, if there is one."""
        add = self.add_argument_group(title).add_argument if title else self.add_argument
        for flag in flags:
            self.actions[flag.name] = add(flag.option, **flag.argparse_options())
            self.flags[flag.name] = flag
            self.changes[flag.name] = flag.changes
            self.defaults[flag.name] = flag.default
        names = [str(flag.metavar or flag.name) for flag in self.flags.values() if flag.positional]
        self.usage = " ".join(["%(prog)s", "[flags]", *names])

    def set_defaults(self, **defaults: Any) -> None:
        """Replaces defaults of flags. A name may be that of a setting that is no flag."""
        self.defaults.update(defaults)

    @property
    def given(self) -> Mapping[str, Any]:
        """The flags of the command."""
        return self.values.maps[0]

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The flags of the recipe that the command names."""
        return self.values.maps[1]

    def flags_chosen(self) -> dict[str, Any]:
        """Returns the flags that the command sets, or that its recipe sets to another value than its default."""
        by_recipe = {name: value for name, value in self.recipe.items() if value != self.defaults[name]}
        return {**by_recipe, **self.given}

    def parse_args(self, args: Any = None, namespace: Any = None, recipes: Any = None) -> Any:
        """Reads a command, see `read`, and returns the value of each flag."""
        self.read(args, recipes)
        return self.resolve()

    def read(self, argv: Sequence[str] | None = None, recipes: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Reads the flags that a command gives, and the values of the recipe that it names, if there are recipes.

        argv: with the user's home for `~`, which shells leave in `--flag=~/x` as it is.
        """
        words = [expand_home(word) for word in (sys.argv[1:] if argv is None else argv)]
        parsed, unknown = self.parse_known_args(words)
        given = vars(parsed)
        for name, value in given.items():
            if self.flags[name].has_many_choices:
                self.check_choice(name, value, self.flags[name].choices)
        if unknown:
            name = unknown[0].partition("=")[0].lstrip("-")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{close_to(name, self.flags)}")
        recipe: Mapping[str, Any] = {}
        if recipes is not None and "recipe" in given:
            self.check_choice("recipe", given["recipe"], recipes)
            recipe = recipes[given["recipe"]]
            strange = recipe.keys() - self.flags.keys()
            if strange:
                unknown_to = f"which {self.prog} does not know"
                self.error(f"recipe {given['recipe']!r} sets {', '.join(sorted(strange))}, {unknown_to}")
        self.values = ChainMap(given, dict(recipe), self.defaults)

    def resolve(self) -> argparse.Namespace:
        """Returns the value of each flag. One that is out of bounds ends the program, also that of a recipe."""
        for name, flag in self.flags.items():
            objection = flag.objection(self.values[name])
            if objection is not None:
                self.error(f"{flag.option} {objection}")
        args = argparse.Namespace(**self.values)
        if "patch_size" in self.recipe and "patch_size" not in self.given:
            refuse_other_patch(self, args, self.recipe["patch_size"])
        for name, length_flag in WARMUPS.items():
            if self.values.get(name) is not None:
                setattr(args, name, fit_warmup(self, name, length_flag))
        return args

    def check_choice(self, name: str, value: str, known: Iterable[str]) -> None:
        """For many choices: "list" prints them, and an unknown value is answered with those close to it."""
        if value == "list":
            print("\n".join(known))
            self.exit()
        if value not in known:
            self.error(f"unknown --{name} {value!r}{close_to(value, known)} (`--{name} list` names all)")

    def format_help(self) -> str:
        """Returns the help of everyday flags. If there are few flags, returns that of all."""
        number = sum(not flag.positional for flag in self.flags.values())
        if number <= FEW:
            return self.format_help_all()
        for name, flag in self.flags.items():
            if flag.everyday or flag.positional:
                self.actions[name].help = self.describe(flag, re.split(r"; | \(", flag.help)[0])
            else:
                self.actions[name].help = argparse.SUPPRESS
        return f"{super().format_help()}\n`{self.prog} --help_all` lists all {number} flags.\n"

    def format_help_all(self) -> str:
        """Returns the help of all flags."""
        for name, flag in self.flags.items():
            self.actions[name].help = self.describe(flag, flag.help)
        return super().format_help()

    def describe(self, flag: Flag, text: str) -> str:
        """Returns the help `text` of a flag with many choices, if there are, and its default."""
        notes = []
        if flag.has_many_choices and len(flag.choices) > 12:
            notes.append(f"`--{flag.name} list` names all {len(flag.choices)}")
        elif flag.has_many_choices:
            notes.append(f"one of {', '.join(flag.choices)}")
        default = self.defaults[flag.name]
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


def expand_home(word: str) -> str:
    """Returns a word of a command line in which a `~` at the start, or after `NAME=`, is the user's home."""
    name, equals, value = word.partition("=")
    if equals and "/" not in name:
        return name + equals + os.path.expanduser(value)
    return os.path.expanduser(word)


def early_values(argv: Sequence[str] | None, *names: str) -> dict[str, str]:
    """Returns those of the flags that a command gives, whose other flags are not known yet."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in names:
        early.add_argument(f"--{name}", nargs="?", const="")
    return vars(early.parse_known_args(argv)[0])


def refuse_other_patch(parser: Parser, args: argparse.Namespace, patch_size: int) -> None:
    """Ends the program if `--model` is named for other patches than the recipe's model, and not for `patch_size`.

    patch_size: of the recipe. It wins over the name of the recipe's model, but may not be meant for another one.
    """
    named = re.search(r"_patch(\d+)", args.model)
    expected = re.search(r"_patch(\d+)", parser.values.parents["model"])
    if named is None or expected is None or named[1] in (expected[1], str(patch_size)):
        return
    parser.error(f"recipe {args.recipe!r} sets --patch_size {patch_size}, but --model {args.model}: give --patch_size")


def fit_warmup(parser: Parser, flag: str, length_flag: str) -> float:
    """Returns the warm-up of a schedule.

    One that no flag gives is that of the recipe or of the defaults, as papers keep it for schedules of several lengths.
    In a schedule that is shorter than theirs it is at most a tenth, or their share if that is more. So one epoch more
    or less changes it little, and there is always time for the rate to fall.
    """
    warmup = parser.values[flag]
    length = parser.values[length_flag]
    made_for = parser.defaults[length_flag]
    if flag in parser.recipe:
        made_for = parser.values.parents[length_flag]
    if flag in parser.given or length >= made_for:
        return warmup
    fitting = max(length / 10, warmup * length / made_for)
    return min(warmup, parser.flags[flag].type(fitting))
