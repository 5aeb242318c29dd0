"""Position tables of ViTs, and the grids of tokens that they belong to."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BIAS_TABLE = "relative_position_bias_table"  # ending of the names of tables of relative-position biases


def height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Returns an image size as (height, width). One number, alone or in a sequence, stands for both sides."""
    if isinstance(size, int):
        return size, size
    return size[0], size[-1]


def grid_from_settings(settings: Mapping[str, Any], patch_size: int | None) -> tuple[int, int] | None:
    """Returns the (rows, columns) of the tokens of a run, or None if its `settings` or the patch size are missing."""
    size = settings.get("input_size")
    if not size or not patch_size:
        return None
    height, width = height_and_width(size)
    return height // patch_size, width // patch_size


def sincos_pos_embed(
    dim: int, grid_size: tuple[int, int], num_prefix: int = 0, device: torch.device | str | None = None
) -> torch.Tensor:
    """Returns MAE's fixed 2-D sine-cosine table [rows * columns, dim] in raster order, float64.

    The cell at (row r, column c) is [sin(c w), cos(c w), sin(r w), cos(r w)] with w_k = 10000^(-k / (dim / 4)) for
    k = 0 .. dim/4 - 1. The column comes first, as in MAE's release. The table begins with `num_prefix` rows of zeros.
    Raises ValueError if `dim` is not a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"a 2-D sine-cosine table needs a width that is a multiple of 4, got {dim}")
    rows, columns = grid_size
    omega = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64, device=device) / (dim / 4))
    row, column = torch.meshgrid(
        torch.arange(rows, dtype=torch.float64, device=device),
        torch.arange(columns, dtype=torch.float64, device=device),
        indexing="ij",
    )
    parts = []
    for axis in (column, row):
        angle = axis.reshape(-1, 1) * omega  # [N, dim/4]
        parts += [angle.sin(), angle.cos()]
    table = torch.cat(parts, dim=1)  # [N, dim]
    return torch.cat([table.new_zeros(num_prefix, dim), table])


def position_table(dim: int, grid_size: tuple[int, int], num_prefix: int, learned: bool) -> nn.Parameter:
    """Returns a table of positions [1, num_prefix + N, dim]: MAE's, which is frozen, or a learned one.

    A learned table starts with normal numbers of deviation 0.02, truncated.
    """
    if learned:
        return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, num_prefix + math.prod(grid_size), dim), std=0.02))
    return nn.Parameter(sincos_pos_embed(dim, grid_size, num_prefix).float().unsqueeze(0), requires_grad=False)


def list_empty_tables(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of the position tables that are zero everywhere; none if the positions are biases.

    No table becomes so by training: sine-cosine tables are fixed, and the first step changes a learned one.
    """
    if any(name.endswith(BIAS_TABLE) for name in weights):
        return []
    tables = {name: value for name, value in weights.items() if name.endswith("pos_embed") and not value.is_meta}
    return [name for name, value in tables.items() if not value.any()]


def table_for_grid(table: torch.Tensor, source: tuple[int, int], target: tuple[int, int]) -> torch.Tensor:
    """Returns a table of positions for another grid than its own; the table itself for its own grid."""
    if source == target:
        return table
    return resize_pos_embed(table, source, target)


def resize_pos_embed(table: torch.Tensor, source: tuple[int, int], target: tuple[int, int]) -> torch.Tensor:
    """Resizes a position table with P rows of class tokens [1, P + n, D] from the grid `source` to the grid `target`.

    The class rows are kept. The grid is interpolated bicubically in float32. Returns [1, P + m, D].
    """
    num_prefix = table.shape[1] - math.prod(source)
    grid = table[:, num_prefix:].float().unflatten(1, source).permute(0, 3, 1, 2)  # [1, D, rows, columns]
    grid = F.interpolate(grid, size=target, mode="bicubic", align_corners=False)
    return torch.cat([table[:, :num_prefix].float(), grid.flatten(2).transpose(1, 2)], dim=1)
