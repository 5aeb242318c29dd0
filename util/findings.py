"""Errors of the user that a check collects, where a run would end at the first one.

A check (`--check_data`, `util.run.start.data_check`) is a run that ends before its first step. Its stages are those of
the run, in the same code: `with collected():` stands around a stage without which the later ones still make sense.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Part:
    """A part of the report of a check. content: for JSON. lines: the same in words."""

    content: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add(self, other: "Part") -> None:
        self.content |= other.content
        self.lines += other.lines


@dataclass
class Findings:
    """What a check has found so far, in this process.

    opened: the images of each split, also those with errors. run: what is known once all of the set-up is done.
    notes: those of the run, for its log.
    """

    errors: list[Exception] = field(default_factory=list)
    opened: dict[str, Any] = field(default_factory=dict)
    run: Part = field(default_factory=Part)
    notes: list[str] = field(default_factory=list)


class EndOfCheck(Exception):
    """Ends the set-up of a run that is only checked. part: what is known about the run at the end of it."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part


_current: Findings | None = None  # of the check in progress


@contextmanager
def collecting() -> Iterator[Findings]:
    """Context of a check. An error of the user that no stage has collected, and `EndOfCheck`, end it silently.

    So does any other error after one of the user, since the stages do not expect what that one leaves behind.
    """
    global _current
    findings = Findings()
    _current = findings
    try:
        yield findings
    except EndOfCheck as end:
        findings.run.add(end.part)
    except (ValueError, OSError) as error:
        keep(error)
    except Exception:
        if not findings.errors:
            raise
    finally:
        _current = None


def is_checking() -> bool:
    """Whether a check is in progress."""
    return _current is not None


def keep(error: Exception) -> None:
    """Keeps an error of the user, if a check is in progress. Otherwise it is raised."""
    if _current is None:
        raise error
    if str(error) not in [str(known) for known in _current.errors]:
        _current.errors.append(error)


@contextmanager
def collected() -> Iterator[None]:
    """Context of a stage. A check keeps its error, and goes on behind the context."""
    try:
        yield
    except (ValueError, OSError) as error:
        keep(error)


def collect_all(*calls: Callable[[], Any]) -> list[Any]:
    """Returns what the calls return. A check makes all of them before it ends with the first error."""
    results = []
    errors: list[Exception] = []
    for call in calls:
        try:
            results.append(call())
        except (ValueError, OSError) as error:
            keep(error)
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def note_opened(split: str, images: Any) -> None:
    """Tells a check which images were opened for a split."""
    if _current is not None:
        _current.opened[split] = images
