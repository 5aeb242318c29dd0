"""Words for messages: counts, short lists of names, durations."""

import difflib
from collections.abc import Iterable, Sequence
from datetime import timedelta


def count_of(number: int, noun: str) -> str:
    """Returns the number with its noun: "1 image", "2 images", "2 processes", "2 classes"."""
    plural = f"{noun}es" if noun.endswith(("s", "x", "tch")) else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def shorten(names: Sequence[str], most: int = 3) -> str:
    """Returns the first `most` names, separated by commas."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def close_to(name: str, known: Iterable[str]) -> str:
    """Returns "; close to it: NAMES", the known names that a misspelt or shortened one may mean, or ""."""
    known = list(known)
    near = sorted((other for other in known if name and name in other), key=lambda other: not other.startswith(name))
    near = near or difflib.get_close_matches(name, known)
    return f"; close to it: {', '.join(near[:5])}" if near else ""


def duration(seconds: float) -> str:
    """Returns hours, minutes and seconds: "1:02:03"."""
    return str(timedelta(seconds=round(seconds)))
