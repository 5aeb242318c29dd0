"""A flag of a program, or of a framework: one record says what its values are, and what another value changes."""

import argparse
import math
import operator
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

# "rounding": results still agree to rounding. "split": how the total batch is split over processes and micro-batches;
# each step has the same images.
Change = Literal["nothing", "rounding", "split", "results"]
LONG_CHOICES = 50  # characters of a list that the help does not show in the place of a value


@dataclass(frozen=True)
class Flag:
    """The flag `--name` of a command line.

    A framework's flags are arguments of its constructor, and attributes of the model that hold them. They have no
    default of their own: that of the constructor or of the model's factory applies, and `help` names it.

    type: reads a value; `bool` makes a switch: --name, --no-name. help: until a semicolon or parenthesis for --help,
    all of it for --help_all. nargs, metavar: as in argparse.
    changes: what another value changes. A resumed run may have another value, unless it changes results.
    per_process: whether the processes of one start may have different values, such as paths of their node.
    everyday: whether --help shows it. positional: given by its place in the command. repeats: a list, of which each
    use of the flag adds one. required: whether a command must give it.
    at_least, at_most, above, below: bounds of its number, or of each of its numbers.
    names_file: of frameworks, whose runs need the file. Its attribute has `source`, the path or name; `fingerprint`,
    which checkpoints record, because files may move but must not change; `origin`, a sentence for the log; and
    `use_statistics(mean, std)`, which says by what the images are normalised; ImageNet's without a call.
    """

    name: str
    type: Callable[[str], Any] = str
    default: Any = None
    help: str = ""
    _: KW_ONLY
    everyday: bool = False
    changes: Change = "results"
    per_process: bool = False
    choices: Collection[str] = ()
    nargs: int | str | None = None
    metavar: str | tuple[str, ...] | None = None
    positional: bool = False
    repeats: bool = False
    required: bool = False
    names_file: bool = False
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    @property
    def has_many_choices(self) -> bool:
        """Whether its choices are a list of their own, which `--name list` prints."""
        return not self.positional and len(",".join(self.choices)) > LONG_CHOICES

    @property
    def option(self) -> str:
        """What a command gives it by."""
        return self.name if self.positional else f"--{self.name}"

    def argparse_options(self) -> dict[str, Any]:
        """Returns the keywords of argparse's `add_argument`. A command that leaves the flag out sets nothing."""
        if self.type is bool:
            return {"action": argparse.BooleanOptionalAction, "default": argparse.SUPPRESS}
        options: dict[str, Any] = {"type": self.type, "nargs": self.nargs, "default": argparse.SUPPRESS}
        if self.choices and not self.has_many_choices:
            options["choices"] = list(self.choices)
        elif not self.positional:
            options["metavar"] = self.name.rpartition("_")[2].upper()
        if self.metavar is not None:
            options["metavar"] = self.metavar
        if self.repeats:
            options["action"] = "append"
        if self.required:
            options["required"] = True
        return options

    def objection(self, value: Any) -> str | None:
        """Returns what is wrong with a value, or None."""
        if isinstance(value, (list, tuple)):
            objections = [self.objection(number) for number in value]
            return next((objection for objection in objections if objection is not None), None)
        if value is None:
            return None
        for bound, is_met, words in (
            (self.at_least, operator.ge, "at least"),
            (self.at_most, operator.le, "at most"),
            (self.above, operator.gt, "above"),
            (self.below, operator.lt, "below"),
        ):
            if bound is not None and not is_met(value, bound):
                return f"must be {words} {bound}, got {value}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"must be finite, got {value}"
        return None
