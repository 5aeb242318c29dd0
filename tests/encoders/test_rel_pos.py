import numpy as np
import pytest
import torch

from encoders.rel_pos import (
    geometric_offsets,
    grid_coords,
    interpolation_matrix,
    relative_offset_index,
    resize_bias_table,
)


def not_a_knot_spline(x, y, queries):
    """Evaluates the cubic spline by its definition, with one linear system for all coefficients.

    There is one cubic per interval. Value, slope and curvature are continuous. The third derivative is continuous at
    the second and at the last but one knot.
    """
    n = len(x) - 1
    rows, rhs = [], []

    def row(interval, at, derivative):
        out = np.zeros(4 * n)
        for power in range(derivative, 4):
            factor = np.prod(np.arange(power - derivative + 1, power + 1))
            out[4 * interval + power] = factor * (at - x[interval]) ** (power - derivative)
        return out

    for i in range(n):
        rows += [row(i, x[i], 0), row(i, x[i + 1], 0)]
        rhs += [y[i], y[i + 1]]
    for i in range(1, n):
        for derivative in (1, 2):
            rows.append(row(i - 1, x[i], derivative) - row(i, x[i], derivative))
            rhs.append(0.0)
    for i in (1, n - 1):
        rows.append(row(i - 1, x[i], 3) - row(i, x[i], 3))
        rhs.append(0.0)
    coefficients = np.linalg.solve(np.array(rows), np.array(rhs))
    return [row(min(np.searchsorted(x, q, "right") - 1, n - 1), q, 0) @ coefficients for q in queries]


@pytest.mark.parametrize(("src", "dst"), [(11, 13), (23, 27), (7, 13), (27, 31)])
def test_interpolation_against_the_definition_of_the_spline(src, dst):
    x = geometric_offsets(src, dst)
    values = np.random.default_rng(0).normal(size=src)
    queries = np.clip(np.arange(dst) - dst // 2, x[0], x[-1])
    assert interpolation_matrix(src, dst) @ values == pytest.approx(not_a_knot_spline(x, values, queries), abs=1e-9)


def test_geometric_offsets():
    x = geometric_offsets(11, 13)  # windows 6 -> 7
    assert x == pytest.approx(-x[::-1]) and len(x) == 11 and x[5] == 0
    steps = np.diff(x[5:])
    assert steps[0] == 1 and steps[1:] / steps[:-1] == pytest.approx(steps[1]) and steps[1] > 1.05
    assert x[-1] == pytest.approx(6, abs=1e-4)


def test_resizing_a_table():
    table = torch.randn(11 * 11 + 3, 4)
    resized = resize_bias_table(table, (6, 6), (7, 7), num_extra=3)
    assert resized.shape == (13 * 13 + 3, 4) and torch.equal(resized[-3:], table[-3:])
    centre = resized[:-3].view(13, 13, 4)[6, 6]
    torch.testing.assert_close(centre, table[:-3].view(11, 11, 4)[5, 5])  # the bias at offset 0 is unchanged
    # Separable and per head: a product of two lines becomes the product of the two resized lines.
    y, x = torch.randn(11, dtype=torch.float64), torch.randn(11, dtype=torch.float64)
    product = resize_bias_table((y[:, None] * x).reshape(-1, 1), (6, 6), (7, 7)).view(13, 13)
    matrix = torch.from_numpy(interpolation_matrix(11, 13))
    torch.testing.assert_close(product, (matrix @ y)[:, None] * (matrix @ x))


def test_small_and_foreign_tables():
    assert resize_bias_table(torch.ones(9, 2), (2, 2), (4, 4)).shape == (49, 2)
    torch.testing.assert_close(resize_bias_table(torch.ones(9, 2), (2, 2), (4, 4)), torch.ones(49, 2))
    with pytest.raises(ValueError, match="a bias table of 120 rows does not belong to 11 x 11 offsets"):
        resize_bias_table(torch.zeros(120, 2), (6, 6), (7, 7))


@pytest.mark.parametrize("grid", [(3, 5), (4, 4), (1, 2)])
def test_an_offset_has_one_row_of_the_table_wherever_it_occurs(grid):
    """Rows are numbered in raster order of the offsets, query less key."""
    rows, columns = grid
    cells = [(y, x) for y in range(rows) for x in range(columns)]
    coords = grid_coords(rows, columns)
    assert coords.tolist() == [list(cell) for cell in cells]
    index = relative_offset_index(torch.stack([coords, coords.flip(0)]), grid)
    assert index.shape == (2, len(cells), len(cells)) and index.dtype == torch.int64
    offsets = [(dy, dx) for dy in range(1 - rows, rows) for dx in range(1 - columns, columns)]
    for i, query in enumerate(cells):
        for j, key in enumerate(cells):
            assert offsets[index[0, i, j]] == (query[0] - key[0], query[1] - key[1])
    assert torch.equal(index[1], index[0].flip(0, 1))
