"""Groups of windows for attention among visible tokens (GreenMIM, Huang et al., NeurIPS 2022).

Of a masked image a window holds anything from no token to all of its own. Several windows share a group of fixed size, so
that attention runs on few and equally large groups; inside one, tokens of different windows do not see each other.
"""

import numpy as np


def group_windows(counts, group_size):
    """Packs windows into groups: the fullest group that can be had, then the fullest of what remains, and so on.

    counts: tokens of each window, integers from 1 to group_size; -> a list of groups, each a list of positions in `counts`.
    Among equally full groups that without the last window is taken, then without the one before it, and so on.
    """
    if not all(1 <= count <= group_size for count in counts):
        raise ValueError(f"windows must hold from 1 to {group_size} tokens, a group's size; got {list(counts)}")
    remaining, groups, below = list(range(len(counts))), [], (1 << (group_size + 1)) - 1
    while remaining:
        reachable = [1]  # bit n of number k: some of the first k windows hold n tokens together
        for window in remaining:
            reachable.append((reachable[-1] | reachable[-1] << int(counts[window])) & below)
        total, group = reachable[-1].bit_length() - 1, []
        for k in range(len(remaining) - 1, -1, -1):
            if not reachable[k] >> total & 1:  # the total cannot do without this window
                group.append(remaining.pop(k))
                total -= int(counts[group[-1]])
        groups.append(group[::-1])
    return groups


def plan_groups(windows, group_size, capacity=0):
    """Each token's window [T] -> the tokens of each group, int64 [G, group_size], padded with -1.

    There are at least `capacity` groups, empty ones at the end, so that plans for different masks have one shape.
    """
    numbers, homes, counts = np.unique(np.asarray(windows), return_inverse=True, return_counts=True)
    tokens = np.split(np.argsort(homes, kind="stable"), np.cumsum(counts)[:-1])  # of each window
    groups = group_windows(counts, group_size)
    plan = np.full((max(len(groups), capacity), group_size), -1, np.int64)
    for row, group in zip(plan, groups, strict=False):
        members = np.concatenate([tokens[window] for window in group])
        row[: len(members)] = members
    return plan
