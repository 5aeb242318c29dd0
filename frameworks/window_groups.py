"""How GreenMIM (Huang et al., NeurIPS 2022) packs windows into groups, in the DataLoader workers.

A window of a masked image holds between zero and all of its tokens. Several windows share a group of fixed size, so
that attention runs on few groups of equal size, see `encoders.window_groups`.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from encoders.window_groups import GroupedWindows, unit_coords, window_of


def group_windows(counts: Sequence[int] | np.ndarray, group_size: int) -> list[list[int]]:
    """Packs windows into groups and returns the groups, each a list of positions in `counts`.

    The first group is the fullest that is possible, the second the fullest of the remaining windows, and so on. Of
    equally full groups the one without the last window is taken, then without the one before it, and so on.

    counts: number of tokens in each window, from 1 to `group_size`.
    """
    up_to_group_size = (1 << (group_size + 1)) - 1  # bits 0 to group_size
    remaining = list(range(len(counts)))
    groups = []
    while remaining:
        # Bit n of reachable[k] is set if some of the first k remaining windows hold n tokens together.
        reachable = [1]
        for window in remaining:
            without_window = reachable[-1]
            with_window = without_window << int(counts[window])
            reachable.append((without_window | with_window) & up_to_group_size)
        total = reachable[-1].bit_length() - 1  # tokens in the fullest group
        group: list[int] = []
        for k in reversed(range(len(remaining))):
            is_reachable_without = reachable[k] >> total & 1
            if not is_reachable_without:
                window = remaining.pop(k)
                group.insert(0, window)
                total -= int(counts[window])
        groups.append(group)
    return groups


def group_tokens(
    windows: Sequence[int] | np.ndarray,
    group_size: int,
    capacity: int = 0,
) -> np.ndarray:
    """Returns the tokens of each group, int64 [G, group_size], padded with -1.

    windows: the number of each token's window, [T]. capacity: the smallest number of groups. Empty groups follow the
    others, so that groupings for different masks have the same shape.
    """
    _, window_ids, counts = np.unique(np.asarray(windows), return_inverse=True, return_counts=True)
    tokens = np.argsort(window_ids, kind="stable")
    ends = np.cumsum(counts)
    tokens_by_window = np.split(tokens, ends[:-1])
    groups = group_windows(counts, group_size)
    num_groups = max(len(groups), capacity)
    grouping = np.full((num_groups, group_size), -1, np.int64)
    for i, group in enumerate(groups):
        members = np.concatenate([tokens_by_window[window] for window in group])
        grouping[i, : len(members)] = members
    return grouping


class WindowGrouper:
    """Groups the windows of every stage for a set of visible units. It is slow, so the DataLoader workers run it.

    `grouper(units)` takes raster ids, int64 [V], and returns int64 [G, window * window] for each stage and shift, for
    `SwinEncoder.encode_visible` on sorted units. A group has the size of a full window for every mask, so that shapes
    are static. Only the attention itself runs on the padding.

    unit_grid: (rows, columns) of all units. stages: those of `SwinEncoder.grouped_stages(num_visible)`.

    The number of groups depends on the mask. Groupings are padded to the maximum of `samples` random masks, or to the
    worst case if a mask needs more in any stage. So there are two shapes in all.
    """

    def __init__(
        self,
        unit_grid: tuple[int, int],
        num_visible: int,
        stages: Sequence[GroupedWindows],
        samples: int = 64,
    ) -> None:
        self.columns = unit_grid[1]
        self.stages = stages
        self.ceilings = []  # the most groups that a mask can need, for each stage and shift
        for stage in stages:
            # Any two groups exceed the size of one group. Otherwise they would have been merged.
            num_tokens = num_visible * stage.side**2
            num_pairs = num_tokens // (stage.window**2 + 1)
            self.ceilings.append(2 * num_pairs + 1)
        self.capacities = [0] * len(stages)
        if stages:
            rng = np.random.default_rng(0)
            for _ in range(samples):
                shuffled = rng.permutation(math.prod(unit_grid))
                units = torch.from_numpy(shuffled[:num_visible])
                groupings = self.group(units, self.capacities)
                self.capacities = [len(grouping) for grouping in groupings]  # at least the former capacities

    def __call__(self, units: Tensor) -> list[Tensor]:
        groupings = self.group(units, self.capacities)
        if [len(grouping) for grouping in groupings] == self.capacities:
            return groupings
        return self.group(units, self.ceilings)

    def group(self, units: Tensor, capacities: Sequence[int]) -> list[Tensor]:
        """Returns a grouping for each stage and shift, padded to at least `capacities` groups."""
        units = units.sort().values  # tokens are numbered in the order in which the encoder takes them
        groupings = []
        for stage, capacity in zip(self.stages, capacities, strict=True):
            coords = unit_coords(units, self.columns, stage.side)
            row, column = window_of(coords, stage.window, stage.shift).T.numpy()
            windows = row * (column.max() + 1) + column
            grouping = group_tokens(windows, group_size=stage.window**2, capacity=capacity)
            groupings.append(torch.from_numpy(grouping))
        return groupings
