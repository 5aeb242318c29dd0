"""Groups of windows for attention among visible tokens (GreenMIM, Huang et al., NeurIPS 2022).

A window of a masked image holds between zero and all of its tokens. Several windows share a group of fixed size, so
that attention runs on few groups of equal size. Inside a group, tokens of different windows do not attend to each
other.
"""

from collections.abc import Sequence

import numpy as np


def group_windows(counts: Sequence[int] | np.ndarray, group_size: int) -> list[list[int]]:
    """Packs windows into groups and returns the groups, each a list of positions in `counts`.

    The first group is the fullest that is possible, the second the fullest of the remaining windows, and so on. Of
    equally full groups the one without the last window is taken, then without the one before it, and so on.

    counts: number of tokens in each window, from 1 to `group_size`. Raises ValueError for other counts.
    """
    if not all(1 <= count <= group_size for count in counts):
        raise ValueError(f"windows must hold from 1 to {group_size} tokens, a group's size; got {list(counts)}")
    remaining, groups, allowed = list(range(len(counts))), [], (1 << (group_size + 1)) - 1
    while remaining:
        # Bit n of number k is set if some of the first k remaining windows hold n tokens together.
        reachable = [1]
        for window in remaining:
            reachable.append((reachable[-1] | reachable[-1] << int(counts[window])) & allowed)
        total = reachable[-1].bit_length() - 1
        group: list[int] = []
        for k in range(len(remaining) - 1, -1, -1):
            if not reachable[k] >> total & 1:  # the total cannot be reached without this window
                group.append(remaining.pop(k))
                total -= int(counts[group[-1]])
        groups.append(group[::-1])
    return groups


def plan_groups(windows: Sequence[int] | np.ndarray, group_size: int, capacity: int = 0) -> np.ndarray:
    """Returns the tokens of each group, int64 [G, group_size], padded with -1.

    windows: the number of each token's window, [T]. capacity: the smallest number of groups. Empty groups follow the
    others, so that plans for different masks have the same shape.
    """
    _, homes, counts = np.unique(np.asarray(windows), return_inverse=True, return_counts=True)
    tokens = np.split(np.argsort(homes, kind="stable"), np.cumsum(counts)[:-1])  # the tokens of each window
    groups = group_windows(counts, group_size)
    plan = np.full((max(len(groups), capacity), group_size), -1, np.int64)
    for row, group in zip(plan, groups, strict=False):
        members = np.concatenate([tokens[window] for window in group])
        row[: len(members)] = members
    return plan
