"""Groups of windows for attention among visible tokens (GreenMIM, Huang et al., NeurIPS 2022).

A window of a masked image holds between zero and all of its tokens. Several windows share a group of fixed size, so
that attention runs on few groups of equal size. Inside a group, tokens of different windows do not attend to each
other.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from encoders.rel_pos import relative_offset_index

if TYPE_CHECKING:
    from encoders.models_swin import SwinEncoder


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


def group_tokens(windows: Sequence[int] | np.ndarray, group_size: int, capacity: int = 0) -> np.ndarray:
    """Returns the tokens of each group, int64 [G, group_size], padded with -1.

    windows: the number of each token's window, [T]. capacity: the smallest number of groups. Empty groups follow the
    others, so that groupings for different masks have the same shape.
    """
    _, homes, counts = np.unique(np.asarray(windows), return_inverse=True, return_counts=True)
    tokens = np.split(np.argsort(homes, kind="stable"), np.cumsum(counts)[:-1])  # the tokens of each window
    groups = group_windows(counts, group_size)
    grouping = np.full((max(len(groups), capacity), group_size), -1, np.int64)
    for row, group in zip(grouping, groups, strict=False):
        members = np.concatenate([tokens[window] for window in group])
        row[: len(members)] = members
    return grouping


class WindowGroups:
    """Which of T visible tokens attend to each other, computed in groups of whole windows that are padded to one size.

    coords: (row, column) of each token, int64 [T, 2].
    window, shift: side of a window, and shift of all windows, in tokens.
    groups: tokens of each group, int64 [G, g], padded with -1. None is one group of all tokens. The grouping changes
        the cost only, not the result.
    """

    def __init__(self, coords: torch.Tensor, window: int, shift: int, groups: torch.Tensor | None = None) -> None:
        self.ids: torch.Tensor | None = None
        self.slots: torch.Tensor | None = None
        if groups is None:
            coords, present = coords.unsqueeze(0), None  # [1, T, 2]
        else:
            present, T = groups >= 0, len(coords)
            has_values = type(groups) is torch.Tensor and groups.device.type == "cpu"  # a fake tensor has none
            if has_values and not torch.compiler.is_compiling() and int(present.sum()) != T:
                raise ValueError(f"the grouping holds {int(present.sum())} tokens, but {T} are visible")
            self.ids = groups.clamp(min=0)
            ranks = torch.arange(groups.numel(), device=groups.device)
            home = torch.where(present, groups, T).flatten()  # padding is sent to a place after the last token
            self.slots = torch.full((T + 1,), -1, device=groups.device).scatter_(0, home, ranks)[:T]
            coords = coords[self.ids]  # [G, g, 2]
        homes = window_of(coords, window, shift)
        same = (homes[:, :, None] == homes[:, None]).all(dim=-1)
        if present is not None:
            same = same & present[:, :, None] & present[:, None]
        self.bias_index = torch.where(same, relative_offset_index(coords, (window, window)), 0)  # [G, g, g]
        self.mask = torch.where(same, 0.0, -100.0)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers the tokens [B, T, C] of each group. Returns [B, G, g, C]."""
        if self.ids is None:
            return x.unsqueeze(1)
        return _Gather.apply(x, self.ids.flatten(), self.slots).unflatten(1, self.ids.shape)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Puts the tokens of all groups [B, G, g, C] back into their order [B, T, C] and drops the padding."""
        return x.squeeze(1) if self.ids is None else x.flatten(1, 2).index_select(1, self.slots)


class _Gather(torch.autograd.Function):
    """Gathers tokens [B, T, C] into slots [B, S, C].

    Padding reads token 0 and gets no gradient. The backward pass is therefore a gather, too. A scatter would add up in
    no fixed order on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(1, ids)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return gradient.index_select(1, slots), None, None


def window_of(coords: torch.Tensor, window: int, shift: int) -> torch.Tensor:
    """Returns the (row, column) of the shifted window that holds each token (row, column) [..., 2], without a roll."""
    return (coords + (window - shift) % window) // window


def unit_coords(units: torch.Tensor, columns: int, side: int) -> torch.Tensor:
    """Returns the (row, column) of all tokens of the units [V], raster ids on a grid that is `columns` units wide.

    A unit has side * side tokens. The result has the shape [V * side * side, 2].
    """
    y, x = units // columns, units % columns
    corner = side * torch.stack([y, x], dim=-1)  # [V, 2]
    inside = torch.stack(torch.meshgrid(*[torch.arange(side, device=units.device)] * 2, indexing="ij"), dim=-1)
    return (corner[:, None, None] + inside).flatten(0, 2)


class WindowGrouper:
    """Groups the windows of every stage for a set of visible units. It is slow, so the DataLoader workers run it.

    `grouper(units)` takes raster ids, int64 [V], and returns int64 [G, window * window] for each stage and shift, for
    `SwinEncoder.encode_visible` on sorted units. A group has the size of a full window for every mask, so that shapes
    are static. Only the attention itself runs on the padding.

    The number of groups depends on the mask. Plans are padded to the largest number among `samples` random masks. If a
    mask needs more in any stage, its groupings are padded to a number that no mask can exceed. So there are two shapes.
    """

    def __init__(self, encoder: "SwinEncoder", num_visible: int, samples: int = 64) -> None:
        self.columns, self.stages = encoder.unit_grid[1], encoder.grouped_stages(num_visible)
        # Any two groups exceed the capacity of one group. Otherwise they would have been merged.
        tokens = [num_visible * side**2 for side, _, _ in self.stages]
        self.ceilings = [2 * (T // (window**2 + 1)) + 1 for T, (_, window, _) in zip(tokens, self.stages, strict=True)]
        rng, num_units = np.random.default_rng(0), encoder.unit_grid[0] * encoder.unit_grid[1]
        self.capacities = [0] * len(self.stages)
        if self.stages:
            for _ in range(samples):
                units = torch.from_numpy(np.sort(rng.permutation(num_units)[:num_visible]))
                needed = [len(grouping) for grouping in self.group(units, [0] * len(self.stages))]
                self.capacities = [max(pair) for pair in zip(self.capacities, needed, strict=True)]

    def __call__(self, units: torch.Tensor) -> list[torch.Tensor]:
        groupings = self.group(units, self.capacities)
        if any(len(grouping) > capacity for grouping, capacity in zip(groupings, self.capacities, strict=True)):
            groupings = self.group(units, self.ceilings)
        return groupings

    def shapes(self, units: torch.Tensor) -> list[list[torch.Tensor]]:
        """Returns groupings of each possible shape, to compile for. Those of the smaller shape may lack tokens."""
        if not self.stages:
            return []
        largest = self.group(units, self.ceilings)
        return [[grouping[:n] for grouping, n in zip(largest, self.capacities, strict=True)], largest]

    def group(self, units: torch.Tensor, capacities: Sequence[int]) -> list[torch.Tensor]:
        """Returns a grouping for each stage and shift, padded to at least `capacities` groups."""
        groupings, units = [], units.sort().values  # tokens are numbered in the order in which the encoder takes them
        for (side, window, shift), capacity in zip(self.stages, capacities, strict=True):
            y, x = window_of(unit_coords(units, self.columns, side), window, shift).T.numpy()
            groupings.append(torch.from_numpy(group_tokens(y * (x.max() + 1) + x, window**2, capacity)))
        return groupings
