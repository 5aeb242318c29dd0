"""Tables of relative positions: their rows, and their resizing by splines."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from encoders.rel_pos import (
    geometric_offsets,
    interpolation_matrix,
    resize_bias_table,
)


def derivative_row(distance, num_intervals, interval, derivative):
    """Returns the coefficients of a derivative of the cubic of one interval, at a distance from its left end."""
    row = np.zeros(4 * num_intervals)
    for power in range(derivative, 4):
        factor = math.perm(power, derivative)
        row[4 * interval + power] = factor * distance ** (power - derivative)
    return row


def not_a_knot_spline(x, y, queries):
    """Evaluates the cubic spline by its definition, with one linear system for all coefficients.

    There is one cubic per interval. Value, slope and curvature are continuous. The third derivative is continuous at
    the second and at the last but one knot.
    """
    n = len(x) - 1
    widths = np.diff(x)
    equations = []
    values = []

    def jump(knot, derivative):
        left = derivative_row(widths[knot - 1], n, knot - 1, derivative)
        return left - derivative_row(0.0, n, knot, derivative)

    for i in range(n):
        equations.append(derivative_row(0.0, n, i, 0))
        values.append(y[i])
        equations.append(derivative_row(widths[i], n, i, 0))
        values.append(y[i + 1])
    for knot in range(1, n):
        equations.append(jump(knot, 1))
        equations.append(jump(knot, 2))
    equations.append(jump(1, 3))
    equations.append(jump(n - 1, 3))
    values += [0.0] * (len(equations) - len(values))
    coefficients = np.linalg.solve(np.array(equations), np.array(values))
    result = []
    for query in queries:
        interval = min(np.searchsorted(x, query, "right") - 1, n - 1)
        result.append(derivative_row(query - x[interval], n, interval, 0) @ coefficients)
    return result


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (11, 13),
        (23, 27),
        (7, 13),
        (27, 31),
    ],
)
def test_interpolation_against_the_definition_of_the_spline(src, dst):
    x = geometric_offsets(src, dst)
    values = np.random.default_rng(0).normal(size=src)
    queries = np.clip(np.arange(dst) - dst // 2, x[0], x[-1])
    expected = not_a_knot_spline(x, values, queries)
    assert interpolation_matrix(src, dst) @ values == pytest.approx(expected, abs=1e-9)


def test_geometric_offsets():
    x = geometric_offsets(11, 13)  # windows 6 -> 7
    assert len(x) == 11
    assert x == pytest.approx(-x[::-1])
    steps = np.diff(x[5:])
    ratios = steps[1:] / steps[:-1]
    assert steps[0] == 1
    assert ratios == pytest.approx(ratios[0])
    assert ratios[0] > 1.05
    assert x[-1] == pytest.approx(6, abs=1e-4)


def test_the_bias_at_offset_zero_and_the_extra_rows_are_unchanged():
    table = torch.randn(11 * 11 + 3, 4)
    resized = resize_bias_table(table, (6, 6), (7, 7), num_extra=3)
    assert resized.shape == (13 * 13 + 3, 4)
    assert torch.equal(resized[-3:], table[-3:])
    assert_close(resized[6 * 13 + 6], table[5 * 11 + 5])


def test_tables_are_resized_along_both_axes():
    """A product of two lines becomes the product of the two resized lines."""
    y = torch.randn(11, dtype=torch.float64)
    x = torch.randn(11, dtype=torch.float64)
    table = torch.outer(y, x).view(-1, 1)
    resized = resize_bias_table(table, (6, 6), (7, 7))
    matrix = torch.from_numpy(interpolation_matrix(11, 13))
    expected = torch.outer(matrix @ y, matrix @ x)
    assert_close(resized.view(13, 13), expected)
