"""Splits: one rule for folders, tars, folders inside tars, and the splits of Hugging Face data sets.

A folder belongs to the split that it is named after, a tar to the split that is a word of its name. Where val is
missing, test is read. For images that need no labels, train is read there, too.
"""

import re
from collections.abc import Callable, Container, Iterable, Sequence

SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}


def split_of(name: str) -> str | None:
    """Returns the split that a folder's name stands for: train, val or test."""
    return next((split for split, names in SPLIT_NAMES.items() if name.lower() in names), None)


def split_of_tar(file_name: str) -> str | None:
    """Returns the split that a word in a tar's name stands for; None if there are two, as in train_val.tar."""
    splits = {split_of(word) for word in re.findall("[a-z]+", file_name.lower())} - {None}
    return splits.pop() if len(splits) == 1 else None


def group_by_split(names: Iterable[str], rule: Callable[[str], str | None] = split_of) -> dict[str, list[str]]:
    """Returns {split: the names that belong to it}."""
    found: dict[str, list[str]] = {}
    for name in names:
        if split := rule(name):
            found.setdefault(split, []).append(name)
    return found


def readable_splits(split: str, fall_back: bool = False) -> tuple[str, ...]:
    """Returns the splits that may be read for `split`, best first. fall_back: train may stand in for val."""
    if split != "val":
        return (split,)
    return ("val", "test", "train") if fall_back else ("val", "test")


def choose_split(found: Container[str], split: str, fall_back: bool = False) -> str | None:
    """Returns which of the splits that were found is read if `split` is asked for."""
    return next((name for name in readable_splits(split, fall_back) if name in found), None)


def only_name(names: Sequence[str], split: str, where: str, what: str = "folder") -> str:
    """Returns the name that belongs to `split`; ValueError if there are several."""
    if len(names) > 1:
        listed = " and ".join(f"{name}/" if what == "folder" else name for name in names)
        raise ValueError(f"there is more than one {what} of {split} in {where}: {listed}. Keep one and rename the rest")
    return names[0]


def stand_in_notes(what: str, chosen: str, split: str) -> list[str]:
    """Returns a note if another split is read than the one that was asked for."""
    return [] if chosen == split else [f"{what} is read as {split}, because there is no {split}"]
