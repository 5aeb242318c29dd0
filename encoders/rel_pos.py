"""Relative positions: biases of attention from tables, and tables resized for another grid.

A table of relative-position biases has a row for every offset (query less key) inside a grid or window of
(rows, columns) cells: (2 rows - 1) (2 columns - 1) rows. Tables are resized as SimMIM's release does it, with numpy
alone. The offsets of the source are spread geometrically over those of the target: near offsets keep their distance and
far ones move apart. A bicubic interpolating spline through the values at the source's offsets is then evaluated at the
target's offsets.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


def grid_coords(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """Returns the (row, column) of every cell of a grid in raster order, int64 [rows * columns, 2]."""
    return torch.cartesian_prod(torch.arange(rows, device=device), torch.arange(columns, device=device))


def relative_offset_index(coords: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Returns the row of the bias table for every pair (query, key) of cells, int64 [..., L, L].

    coords: int64 [..., L, 2], the (row, column) of the cells. grid_size: the (rows, columns) of the grid or window that
    the table belongs to. The index is meaningless for pairs that do not fit into it.
    """
    rows, columns = grid_size
    offsets = coords.unsqueeze(-2) - coords.unsqueeze(-3)  # query less key
    down, across = offsets.unbind(-1)
    table_row = down + rows - 1
    table_column = across + columns - 1
    return table_row * (2 * columns - 1) + table_column


def lookup_bias(index: Tensor, table: Tensor, mask: Tensor | None = None) -> Tensor:
    """Looks up rows `index` [..., q, k] of a bias table [rows, heads]. Returns [..., heads, q, k].

    mask: added to the biases of all heads, [..., q, k]. The result has the precision of autocast, and the memory layout
    that fused attention needs on a GPU: rows of keys that begin at multiples of 8, as a view of a padded tensor. Both
    are made here once, and not in each block that uses the biases.
    """
    device = table.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # the meta device, used to count costs, has no autocast
        table = table.to(torch.get_autocast_dtype(device))
    bias = F.embedding(index, table).movedim(-1, -3).contiguous()
    if mask is not None:
        bias = bias + mask.unsqueeze(-3).to(bias.dtype)
    num_keys = bias.shape[-1]
    padding = -num_keys % 8
    if padding:
        bias = F.pad(bias, (0, padding))[..., :num_keys]
    return bias


def resize_bias_table(
    table: Tensor,
    source: tuple[int, int],
    target: tuple[int, int],
    num_extra: int = 0,
) -> Tensor:
    """Resizes a table of biases [(2 r - 1)(2 c - 1) + num_extra, heads] from the grid `source` (r, c) to `target`.

    The extra rows (of a class token) are kept. Raises ValueError if the table does not belong to `source`.
    """
    rows = 2 * source[0] - 1
    columns = 2 * source[1] - 1
    num_offsets = rows * columns
    if len(table) != num_offsets + num_extra:
        raise ValueError(f"a bias table of {len(table)} rows does not belong to {rows} x {columns} offsets")
    num_heads = table.shape[1]
    biases = table[:num_offsets].double().numpy()
    grid = biases.reshape(rows, columns, num_heads)
    down = interpolation_matrix(rows, 2 * target[0] - 1)
    across = interpolation_matrix(columns, 2 * target[1] - 1)
    resized = np.einsum("ij,jkh,lk->ilh", down, grid, across)
    resized = resized.reshape(-1, num_heads)
    extra = table[num_offsets:]
    return torch.cat([torch.from_numpy(resized).to(table.dtype), extra])


def interpolation_matrix(src: int, dst: int) -> np.ndarray:
    """Returns the matrix [dst, src] from values at `src` geometric offsets to the spline's values at `dst` integers."""
    x = geometric_offsets(src, dst)
    offsets = np.arange(dst) - dst // 2
    queries = offsets.clip(x[0], x[-1])
    if src < 4:  # too few points for a cubic spline: take the polynomial through all of them
        powers = np.arange(src)
        basis_at_x = x[:, None] ** powers
        basis_at_queries = queries[:, None] ** powers
    else:
        first = [x[0]] * 4
        last = [x[-1]] * 4
        inner = x[2:-2]  # not-a-knot end conditions
        knots = np.concatenate([first, inner, last])
        basis_at_x = b_splines(x, knots)
        basis_at_queries = b_splines(queries, knots)
    return basis_at_queries @ np.linalg.inv(basis_at_x)


def geometric_offsets(src: int, dst: int) -> np.ndarray:
    """Returns the `src` offsets 0, +-1, +-(1 + q), +-(1 + q + q^2), ..., whose outermost lie at about dst // 2.

    The ratio q is found by bisection.
    """
    n = src // 2
    low = 1.01
    high = 1.5
    while high - low > 1e-6:
        q = (low + high) / 2
        outermost = (1 - q**n) / (1 - q)
        if outermost > dst // 2:
            high = q
        else:
            low = q
    half = np.cumsum(q ** np.arange(n))
    return np.concatenate([-half[::-1], [0.0], half])


def b_splines(x: np.ndarray, knots: np.ndarray, degree: int = 3) -> np.ndarray:
    """Returns the values at `x` of all B-splines over `knots` by Cox-de Boor, [len(x), len(knots) - degree - 1]."""
    x = x[:, None]
    is_inside = (knots[:-1] <= x) & (x < knots[1:])
    last = np.flatnonzero(np.diff(knots))[-1]  # the last interval is closed, all others are half-open
    is_inside[:, last] |= x[:, 0] == knots[-1]
    basis = is_inside.astype(float)
    for k in range(1, degree + 1):
        start = knots[: -k - 1]
        end = knots[k + 1 :]
        rising = _divide(x - start, knots[k:-1] - start)
        falling = _divide(end - x, end - knots[1:-k])
        left = rising * basis[:, :-1]
        right = falling * basis[:, 1:]
        basis = left + right
    return basis


def _divide(distances: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Returns distances / widths, and 0 where intervals of repeated knots have no width."""
    zeros = np.zeros_like(distances)
    return np.divide(distances, widths, out=zeros, where=widths > 0)
