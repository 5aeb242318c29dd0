"""Groups of windows for attention among visible tokens (GreenMIM, Huang et al., NeurIPS 2022).

A window of a masked image holds between zero and all of its tokens. Several windows share a group of fixed size, so
that attention runs on few groups of equal size. Inside a group, tokens of different windows do not attend to each
other.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from encoders.rel_pos import grid_coords, relative_offset_index
from util.tokens import put_tokens, take_tokens


def group_windows(counts: Sequence[int] | np.ndarray, group_size: int) -> list[list[int]]:
    """Packs windows into groups and returns the groups, each a list of positions in `counts`.

    The first group is the fullest that is possible, the second the fullest of the remaining windows, and so on. Of
    equally full groups the one without the last window is taken, then without the one before it, and so on.

    counts: number of tokens in each window, from 1 to `group_size`. Raises ValueError for other counts.
    """
    if not all(1 <= count <= group_size for count in counts):
        raise ValueError(f"windows must hold from 1 to {group_size} tokens, a group's size; got {list(counts)}")
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


class WindowGroups:
    """Which of T visible tokens attend to each other, computed in groups of whole windows that are padded to one size.

    coords: (row, column) of each token, int64 [T, 2].
    window, shift: side of a window, and shift of all windows, in tokens.
    groups: tokens of each group, int64 [G, g], padded with -1. None is one group of all tokens. The grouping changes
        the cost only, not the result.
    """

    def __init__(
        self,
        coords: Tensor,
        window: int,
        shift: int,
        groups: Tensor | None = None,
    ) -> None:
        self.shape = (1, len(coords))  # (G, g)
        self.slots: Tensor | None = None  # [T], where each token stands among the G * g
        present: Tensor | None = None  # [G, g], False where a group is padded
        if groups is None:
            coords = coords.unsqueeze(0)  # [1, T, 2]
        else:
            present = groups >= 0
            num_tokens = len(coords)
            _check_count(present, num_tokens)
            self.shape = groups.shape
            positions = torch.arange(groups.numel(), device=groups.device)
            tokens = torch.where(present, groups, num_tokens).flatten()  # padding becomes one more token
            slots = torch.zeros(num_tokens + 1, dtype=torch.int64, device=groups.device)
            slots.scatter_(0, tokens, positions)
            self.slots = slots[:num_tokens]
            coords = coords[groups.clamp(min=0)]  # [G, g, 2]
        windows = window_of(coords, window, shift)
        is_equal = windows.unsqueeze(2) == windows.unsqueeze(1)  # [G, g, g, 2]
        attends = is_equal.all(dim=-1)
        if present is not None:
            attends = attends & present.unsqueeze(2) & present.unsqueeze(1)
        index = relative_offset_index(coords, (window, window))
        self.bias_index = torch.where(attends, index, 0)  # [G, g, g]
        self.mask = torch.where(attends, 0.0, -100.0)

    def gather(self, x: Tensor) -> Tensor:
        """Puts the tokens [B, T, C] into their groups [B, G, g, C], which are padded with zeros."""
        if self.slots is None:
            return x.unsqueeze(1)
        tokens = put_tokens(x, self.slots.expand(len(x), -1), math.prod(self.shape))
        return tokens.unflatten(1, self.shape)

    def scatter(self, x: Tensor) -> Tensor:
        """Puts the tokens of all groups [B, G, g, C] back into their order [B, T, C] and drops the padding."""
        if self.slots is None:
            return x.squeeze(1)
        return take_tokens(x.flatten(1, 2), self.slots.expand(len(x), -1))


def _check_count(present: Tensor, num_tokens: int) -> None:
    """Raises ValueError if a grouping misses tokens. On other devices than the CPU the check would cost a sync."""
    has_values = type(present) is Tensor and present.device.type == "cpu"  # a fake tensor has none
    if torch.compiler.is_compiling() or not has_values:
        return
    num_present = int(present.sum())
    if num_present != num_tokens:
        raise ValueError(f"the grouping holds {num_present} tokens, but {num_tokens} are visible")


def window_of(coords: Tensor, window: int, shift: int) -> Tensor:
    """Returns the (row, column) of the shifted window that holds each token (row, column) [..., 2], without a roll."""
    return (coords + (window - shift) % window) // window


def unit_coords(units: Tensor, columns: int, side: int) -> Tensor:
    """Returns the (row, column) of all tokens of the units [V], raster ids on a grid that is `columns` units wide.

    A unit has side * side tokens. The result has the shape [V * side * side, 2].
    """
    places = torch.stack([units // columns, units % columns], dim=-1)  # [V, 2]
    corners = side * places.unsqueeze(1)  # [V, 1, 2]
    inside = grid_coords(side, side, units.device)  # [side * side, 2]
    return (corners + inside).flatten(0, 1)


class GroupedWindows(NamedTuple):
    """The windows of one shift in one stage, in tokens. side: of a unit. window: of a window."""

    side: int
    window: int
    shift: int


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
                units = np.sort(shuffled[:num_visible])
                self.sample = torch.from_numpy(units)
                groupings = self.group(self.sample, self.capacities)
                self.capacities = [len(grouping) for grouping in groupings]  # at least the former capacities

    def __call__(self, units: Tensor) -> list[Tensor]:
        groupings = self.group(units, self.capacities)
        if [len(grouping) for grouping in groupings] == self.capacities:
            return groupings
        return self.group(units, self.ceilings)

    def shapes(self, units: Tensor) -> list[list[Tensor]]:
        """Returns groupings of each possible shape, to compile for. Those of the smaller shape are of another mask."""
        if not self.stages:
            return []
        return [self.group(self.sample, self.capacities), self.group(units, self.ceilings)]

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
