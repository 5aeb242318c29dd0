"""Position tables against closed forms, and the grids that they belong to."""

import math

import pytest
import torch

from util.pos_embed import grid_from_settings, height_and_width, resize_pos_embed, sincos_pos_embed


@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (4, 4)])
def test_position_table_cell_by_cell(rows, columns):
    table = sincos_pos_embed(16, (rows, columns), num_prefix=1)
    assert table.shape == (1 + rows * columns, 16)
    assert table.dtype == torch.float64
    assert not table[0].any()
    omegas = [1.0, 0.1, 0.01, 0.001]  # 10000 ** (-k / 4)
    for row in range(rows):
        for column in range(columns):
            expected = []
            for position in (column, row):
                expected += [math.sin(position * omega) for omega in omegas]
                expected += [math.cos(position * omega) for omega in omegas]
            assert table[1 + row * columns + column].tolist() == pytest.approx(expected, abs=1e-12)


def test_position_table_needs_a_multiple_of_four():
    with pytest.raises(ValueError, match="multiple of 4, got 30"):
        sincos_pos_embed(30, (2, 2))


def test_resized_position_tables():
    """A linear ramp stays linear between the outermost cells, the class row stays as it is."""
    class_row = torch.full((1, 1, 2), 9.0)
    ramp = torch.arange(8.0).repeat(4)  # 4 rows of 0 .. 7
    cells = torch.stack([ramp, -ramp], dim=-1)
    table = torch.cat([class_row, cells[None]], dim=1)
    resized = resize_pos_embed(table, (4, 8), (4, 4))
    assert resized.shape == (1, 17, 2)
    assert torch.equal(resized[:, :1], class_row)
    grid = resized[0, 1:].view(4, 4, 2)
    assert torch.equal(grid[..., 0], -grid[..., 1])
    assert torch.equal(grid[0], grid[3])
    torch.testing.assert_close(grid[0, 1:3, 0], torch.tensor([2.5, 4.5]))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (32, (32, 32)),
        ([32], (32, 32)),
        ([32, 48], (32, 48)),
    ],
)
def test_one_number_stands_for_height_and_width(size, expected):
    height, width = height_and_width(size)
    assert (height, width) == expected
    assert grid_from_settings({"input_size": size}, 8) == (height // 8, width // 8)


def test_a_grid_needs_an_image_size_and_a_patch_size():
    assert grid_from_settings({}, 8) is None
    assert grid_from_settings({"input_size": 32}, None) is None
