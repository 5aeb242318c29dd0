"""Words for messages: counts, short lists of names, durations, escapes."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta


def count_of(number: int, noun: str) -> str:
    """Returns the number with its noun: "1 image", "2 images", "2 processes", "2 classes"."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith(("s", "x", "tch")):
        return f"{number} {noun}es"
    return f"{number} {noun}s"


def rate(per_second: float) -> str:
    """Returns a rate without digits behind the point, or with two digits in all if it is small: "1400", "8", "0.31"."""
    if per_second < 10:
        return f"{per_second:.2g}"
    return f"{per_second:.0f}"


def shorten(names: Sequence[str], most: int = 3) -> str:
    """Returns the first `most` names, separated by commas."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += ", ..."
    return text


def list_shares(counts: Counter[str]) -> str:
    """Returns the number of each name and its share of all, the most frequent ones first."""
    total = max(1, counts.total())
    return shorten([f"{name} {number} ({number / total:.1%})" for name, number in counts.most_common()], 20)


def close_to(name: str, known: Iterable[str]) -> str:
    """Returns "; close to it: NAMES", the known names that a misspelt or shortened one may mean, or ""."""
    known = list(known)
    near: list[str] = []
    if name:
        begin_alike = [other for other in known if other.startswith(name)]
        contain_it = [other for other in known if name in other and not other.startswith(name)]
        near = begin_alike + contain_it
    near = near or difflib.get_close_matches(name, known)
    if not near:
        return ""
    return f"; close to it: {', '.join(near[:5])}"


def duration(seconds: float) -> str:
    """Returns hours, minutes and seconds: "1:02:03"."""
    return str(timedelta(seconds=round(seconds)))


def printable(text: str) -> str:
    """Returns the text with escapes for what would command a terminal, which may be in the name of a file.

    Also for bytes of names that are no text. Line breaks and tabs stay.
    """

    def escape(match: re.Match[str]) -> str:
        if match[0].isprintable():
            return match[0]
        return ascii(match[0])[1:-1]

    return re.sub(r"[^\n\t]", escape, text)
