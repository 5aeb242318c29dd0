"""Words for messages: counts, short lists of names, durations."""

from collections.abc import Sequence
from datetime import timedelta


def count_of(number: int, noun: str) -> str:
    """Returns the number with its noun: "1 image", "2 images", "2 processes", "2 classes"."""
    plural = f"{noun}es" if noun.endswith(("s", "x", "tch")) else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def shorten(names: Sequence[str], most: int = 3) -> str:
    """Returns the first `most` names, separated by commas."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def duration(seconds: float) -> str:
    """Returns hours, minutes and seconds: "1:02:03"."""
    return str(timedelta(seconds=round(seconds)))
