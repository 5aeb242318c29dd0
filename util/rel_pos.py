"""Tables of relative-position biases for another grid, resized as SimMIM's release does, in numpy alone.

The offsets of the source are spread geometrically over those of the target (near offsets keep their distance, far ones
drift apart), and a bicubic interpolating spline through them is read at the target's offsets.
"""

import numpy as np
import torch


def resize_bias_table(table, source, target, num_extra=0):
    """[(2 r - 1)(2 c - 1) + num_extra, heads] of the grid or window `source` (r, c) -> the same of `target`.

    The extra rows (a class token's) stay as they are. ValueError if the table does not belong to `source`.
    """
    source, target = ([2 * side - 1 for side in size] for size in (source, target))
    if table.shape[0] != source[0] * source[1] + num_extra:
        raise ValueError(f"a bias table of {table.shape[0]} rows does not belong to {source[0]} x {source[1]} offsets")
    offsets, extra = table[: source[0] * source[1]], table[source[0] * source[1] :]
    grid = offsets.double().numpy().reshape(*source, -1)  # [rows, columns, heads]
    down, across = (interpolation_matrix(src, dst) for src, dst in zip(source, target, strict=True))
    grid = np.einsum("ij,jkh,lk->ilh", down, grid, across)
    return torch.cat([torch.from_numpy(grid.reshape(-1, grid.shape[2])).to(table.dtype), extra])


def interpolation_matrix(src, dst):
    """[dst, src]: values at the src geometric offsets -> the spline through them at the dst integer offsets."""
    x = geometric_offsets(src, dst)
    queries = np.clip(np.arange(dst) - dst // 2, x[0], x[-1])
    if src < 4:  # too few for a cubic: the polynomial through all of them
        powers = np.arange(src)
        return (queries[:, None] ** powers) @ np.linalg.inv(x[:, None] ** powers)
    knots = np.concatenate([[x[0]] * 4, x[2:-2], [x[-1]] * 4])  # not-a-knot
    return b_splines(queries, knots) @ np.linalg.inv(b_splines(x, knots))


def geometric_offsets(src, dst):
    """0, +-1, +-(1 + q), +-(1 + q + q^2), ...: src numbers, the outermost at about dst // 2; q by bisection."""
    n, low, high = src // 2, 1.01, 1.5
    while high - low > 1e-6:
        q = (low + high) / 2
        if (1 - q**n) / (1 - q) > dst // 2:
            high = q
        else:
            low = q
    half = np.cumsum(q ** np.arange(n))
    return np.concatenate([-half[::-1], [0.0], half])


def b_splines(x, knots, degree=3):
    """Cox-de Boor: the values at x of all B-splines over `knots`, [len(x), len(knots) - degree - 1]."""
    x = np.asarray(x, float)[:, None]
    last = np.flatnonzero(np.diff(knots))[-1]  # the last interval is closed
    basis = ((knots[:-1] <= x) & (x < knots[1:])) | ((x == knots[-1]) & (np.arange(len(knots) - 1) == last))
    basis = basis.astype(float)
    for k in range(1, degree + 1):
        left, right = knots[k:-1] - knots[: -k - 1], knots[k + 1 :] - knots[1:-k]
        rising = np.divide(x - knots[: -k - 1], left, out=np.zeros((len(x), len(left))), where=left > 0)
        falling = np.divide(knots[k + 1 :] - x, right, out=np.zeros((len(x), len(right))), where=right > 0)
        basis = rising * basis[:, :-1] + falling * basis[:, 1:]
    return basis
