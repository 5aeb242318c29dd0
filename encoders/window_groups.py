"""Attention of Swin's windows among visible tokens alone (GreenMIM, Huang et al., NeurIPS 2022).

Several windows share a group of fixed size. Inside a group, tokens of different windows do not attend to each other.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from encoders.rel_pos import grid_coords, relative_offset_index
from util.tokens import put_tokens, take_tokens


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
