"""Relative positions: indices into tables of attention biases, and tables resized for another grid.

A table of relative-position biases has a row for every offset (query less key) inside a grid or window of
(rows, columns) cells: (2 rows - 1) (2 columns - 1) rows. Tables are resized as SimMIM's release does it, with numpy
alone. The offsets of the source are spread geometrically over those of the target: near offsets keep their distance and
far ones move apart. A bicubic interpolating spline through the values at the source's offsets is then evaluated at the
target's offsets.
"""

import numpy as np
import torch


def grid_coords(rows: int, columns: int) -> torch.Tensor:
    """Returns the (row, column) of every cell of a grid in raster order, int64 [rows * columns, 2]."""
    row, column = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    return torch.stack([row, column], dim=-1)


def relative_offset_index(coords: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """Returns the row of the bias table for every pair (query, key) of cells, int64 [..., L, L].

    coords: int64 [..., L, 2], the (row, column) of the cells. grid_size: the (rows, columns) of the grid or window that
    the table belongs to. The index is meaningless for pairs that do not fit into it.
    """
    rows, columns = grid_size
    down, across = (coords[..., :, None, :] - coords[..., None, :, :]).unbind(-1)  # query less key
    return (down + rows - 1) * (2 * columns - 1) + (across + columns - 1)


def resize_bias_table(
    table: torch.Tensor, source: tuple[int, int], target: tuple[int, int], num_extra: int = 0
) -> torch.Tensor:
    """Resizes a table of biases [(2 r - 1)(2 c - 1) + num_extra, heads] from the grid `source` (r, c) to `target`.

    The extra rows (of a class token) are kept. Raises ValueError if the table does not belong to `source`.
    """
    rows, columns = (2 * side - 1 for side in source)  # of offsets
    if table.shape[0] != rows * columns + num_extra:
        raise ValueError(f"a bias table of {table.shape[0]} rows does not belong to {rows} x {columns} offsets")
    offsets, extra = table[: rows * columns], table[rows * columns :]
    grid = offsets.double().numpy().reshape(rows, columns, -1)  # [rows, columns, heads]
    down = interpolation_matrix(rows, 2 * target[0] - 1)
    across = interpolation_matrix(columns, 2 * target[1] - 1)
    grid = np.einsum("ij,jkh,lk->ilh", down, grid, across)
    return torch.cat([torch.from_numpy(grid.reshape(-1, grid.shape[2])).to(table.dtype), extra])


def interpolation_matrix(src: int, dst: int) -> np.ndarray:
    """Returns the matrix [dst, src] from values at `src` geometric offsets to the spline's values at `dst` integers."""
    x = geometric_offsets(src, dst)
    queries = np.clip(np.arange(dst) - dst // 2, x[0], x[-1])
    if src < 4:  # too few points for a cubic spline: take the polynomial through all of them
        powers = np.arange(src)
        return (queries[:, None] ** powers) @ np.linalg.inv(x[:, None] ** powers)
    knots = np.concatenate([[x[0]] * 4, x[2:-2], [x[-1]] * 4])  # not-a-knot end conditions
    return b_splines(queries, knots) @ np.linalg.inv(b_splines(x, knots))


def geometric_offsets(src: int, dst: int) -> np.ndarray:
    """Returns the `src` offsets 0, +-1, +-(1 + q), +-(1 + q + q^2), ..., whose outermost lie at about dst // 2.

    The ratio q is found by bisection.
    """
    n, low, high = src // 2, 1.01, 1.5
    while high - low > 1e-6:
        q = (low + high) / 2
        if (1 - q**n) / (1 - q) > dst // 2:
            high = q
        else:
            low = q
    half = np.cumsum(q ** np.arange(n))
    return np.concatenate([-half[::-1], [0.0], half])


def b_splines(x: np.ndarray, knots: np.ndarray, degree: int = 3) -> np.ndarray:
    """Returns the values at `x` of all B-splines over `knots` by Cox-de Boor, [len(x), len(knots) - degree - 1]."""
    x = np.asarray(x, float)[:, None]
    last = np.flatnonzero(np.diff(knots))[-1]  # the last interval is closed, all others are half-open
    is_inside = ((knots[:-1] <= x) & (x < knots[1:])) | ((x == knots[-1]) & (np.arange(len(knots) - 1) == last))
    basis = is_inside.astype(float)
    for k in range(1, degree + 1):
        left, right = knots[k:-1] - knots[: -k - 1], knots[k + 1 :] - knots[1:-k]
        rising = np.divide(x - knots[: -k - 1], left, out=np.zeros((len(x), len(left))), where=left > 0)
        falling = np.divide(knots[k + 1 :] - x, right, out=np.zeros((len(x), len(right))), where=right > 0)
        basis = rising * basis[:, :-1] + falling * basis[:, 1:]
    return basis
