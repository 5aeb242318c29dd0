"""Position tables of ViTs, and the grids of tokens that they belong to."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
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


def grid_of(num_tokens: int, grid: tuple[int, int] | None) -> tuple[int, int] | None:
    """Returns `grid`, which settings say, if it has so many tokens; or else that of a square image; or else None.

    A position table does not tell, because 4 x 16 and 8 x 8 tokens have tables of the same shape.
    """
    if grid is not None and math.prod(grid) == num_tokens:
        return grid
    side = math.isqrt(max(0, num_tokens))
    if side == 0 or side**2 != num_tokens:
        return None
    return side, side


def sincos_pos_embed(
    dim: int,
    grid_size: tuple[int, int],
    num_prefix: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns MAE's fixed 2-D sine-cosine table [rows * columns, dim] in raster order, float64.

    The cell at (row r, column c) is [sin(c w), cos(c w), sin(r w), cos(r w)] with w_k = 10000^(-k / (dim / 4)) for
    k = 0 .. dim/4 - 1. The column comes first, as in MAE's release. The table begins with `num_prefix` rows of zeros.
    Raises ValueError if `dim` is not a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"a 2-D sine-cosine table needs a width that is a multiple of 4, got {dim}")
    rows, columns = grid_size
    exponents = torch.arange(dim // 4, dtype=torch.float64, device=device) / (dim / 4)
    omega = 10000.0**-exponents
    cells = torch.arange(rows * columns, device=device)
    parts = []
    for places in (cells % columns, cells // columns):
        angles = places.unsqueeze(1) * omega  # [N, dim/4]
        parts += [angles.sin(), angles.cos()]
    table = torch.cat(parts, dim=1)  # [N, dim]
    return torch.cat([table.new_zeros(num_prefix, dim), table])


def position_table(dim: int, grid_size: tuple[int, int], num_prefix: int, learned: bool) -> nn.Parameter:
    """Returns a table of positions [1, num_prefix + N, dim]: MAE's, which is frozen, or a learned one.

    A learned table starts with normal numbers of deviation 0.02, truncated.
    """
    if learned:
        num_rows = num_prefix + math.prod(grid_size)
        table = torch.empty(1, num_rows, dim)
        nn.init.trunc_normal_(table, std=0.02)
    else:
        table = sincos_pos_embed(dim, grid_size, num_prefix).float().unsqueeze(0)
    return nn.Parameter(table, requires_grad=learned)


def rotary_table(
    head_width: int,
    grid_size: tuple[int, int],
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns the rotations of DINOv3 for the cells of a grid in raster order, [1, N, head_width].

    The first half of the channels are cosines, the second sines of head_width / 2 angles: 2 pi y w_k, then 2 pi x w_k,
    with w_k = 100^(-k / (head_width / 4)) and places y, x of the centres of cells from -1 to 1 over the image.
    """
    rows, columns = grid_size
    exponents = torch.arange(head_width // 4, dtype=dtype, device=device) / (head_width // 4)
    omega = 2 * math.pi * 100.0**-exponents
    cells = torch.arange(rows * columns, device=device)
    y = (cells // columns + 0.5).to(dtype) / rows * 2 - 1
    x = (cells % columns + 0.5).to(dtype) / columns * 2 - 1
    angles = torch.cat([y.unsqueeze(1) * omega, x.unsqueeze(1) * omega], dim=1)  # [N, head_width / 2]
    return torch.cat([angles.cos(), angles.sin()], dim=1).unsqueeze(0)


def rotate(qkv: Tensor, rotation: Tensor, num_heads: int) -> Tensor:
    """Rotates queries and keys of a qkv layer's output [B, T, 3 C] by `rotation` [B or 1, T, head width].

    Channel i of a head and channel i + half are a plane, which turns by angle i: see `rotary_table`.
    """
    cos, sin = rotation[:, :, None, None].chunk(2, dim=-1)  # [B, T, 1, 1, half]
    halves = qkv.unflatten(-1, (3, num_heads, 2, -1))  # [B, T, 3, heads, 2, half]
    queries_and_keys = halves[:, :, :2]
    values = halves[:, :, 2:]
    first, second = queries_and_keys.unbind(-2)
    new_first = first * cos - second * sin
    new_second = second * cos + first * sin
    rotated = torch.stack([new_first, new_second], dim=-2).to(qkv.dtype)
    return torch.cat([rotated, values], dim=2).flatten(2)


def resize_pos_embed(
    table: Tensor, source: tuple[int, int], target: tuple[int, int], antialias: bool = False
) -> Tensor:
    """Resizes a position table with P rows of class tokens [1, P + n, D] from the grid `source` to the grid `target`.

    The class rows are kept. The grid is interpolated bicubically in float32. Returns [1, P + m, D]. antialias: as in
    DINOv2's networks with registers.
    """
    num_cells = math.prod(source)
    table = table.float()
    prefix = table[:, :-num_cells]
    grid = table[:, -num_cells:].unflatten(1, source)
    grid = grid.permute(0, 3, 1, 2)  # [1, D, rows, columns]
    grid = F.interpolate(grid, size=target, mode="bicubic", align_corners=False, antialias=antialias)
    cells = grid.flatten(2).transpose(1, 2)
    return torch.cat([prefix, cells], dim=1)
