"""Pictures of token patterns and panels, pixel by pixel."""

import numpy as np
import pytest
import torch

from util import pictures

BLUE, YELLOW, WHITE = pictures.COLORS[pictures.RETAINED], pictures.COLORS[pictures.THROWN], (255, 255, 255)


def count(picture, color):
    """Returns the number of pixels of this colour."""
    return (picture == color).all(axis=2).sum()


def test_the_cells_of_a_pattern_have_the_right_colours():
    state = np.array([[0, 1, 2], [2, 0, 1]])
    picture = pictures.pattern(state, cell=8)
    assert picture.shape == (17, 25, 3)
    for (row, column), value in np.ndenumerate(state):
        inside = picture[8 * row + 1 : 8 * row + 8, 8 * column + 1 : 8 * column + 8]
        assert (inside == (WHITE, BLUE, YELLOW)[value]).all()
    lines = np.concatenate([picture[::8].reshape(-1, 3), picture[:, ::8].reshape(-1, 3)])
    assert (lines == 200).all()  # around every cell, including the last ones


def test_a_table_of_patterns_shows_all_of_them_and_a_legend():
    rng = np.random.default_rng(0)
    groups = {}
    for name in ("random", "furthest"):
        groups[name] = [[pictures.pattern(rng.integers(0, 3, (4, 5))) for _ in range(2)] for _ in range(3)]
    picture = pictures.pattern_table(groups, ["a", "b", "c"])
    panels = [panel for rows in groups.values() for row in rows for panel in row]
    for color in (BLUE, YELLOW):
        assert count(picture[:-40], color) == sum(count(panel, color) for panel in panels)
    legend = picture[-40:]
    assert count(legend, BLUE) == count(legend, YELLOW) == 13**2  # one cell with its outline
    assert (legend < 100).all(axis=2).sum() > 100  # letters
    assert (legend[:, -5:] == 255).all()  # the text is not cut off


@pytest.mark.parametrize(("num_images", "num_panels", "rows", "columns"), [(3, 1, 3, 3), (5, 1, 3, 6), (4, 2, 4, 4)])
def test_a_grid_of_panels_holds_two_images_a_row_if_there_are_four_with_one_panel(
    num_images, num_panels, rows, columns
):
    imgs = torch.full((num_images, 3, 64, 64), 100, dtype=torch.uint8)
    panels = {str(k): torch.full((num_images, 3, 64, 64), 100 / 255) for k in range(num_panels)}
    picture = pictures.panel_grid(imgs, torch.zeros(num_images, 4, 4, dtype=torch.int64), panels)
    assert picture.shape == (20 + rows * (128 + 6), columns * (128 + 6) + 6, 3)  # enlarged twice, with gaps and titles
    assert count(picture[20:], 100) == num_images * (2 + num_panels) * 128**2


@pytest.mark.parametrize("name", ["p", "p.txt", "p.psd"])
def test_suffixes_that_pillow_cannot_write_are_refused(tmp_path, name):
    pictures.check_suffix(tmp_path / "p.png")
    pictures.check_suffix(tmp_path / "P.JPG")
    with pytest.raises(ValueError, match="the name must end in .png, .jpg or the like"):
        pictures.check_suffix(tmp_path / name)


def test_other_channels_are_shown_by_three():
    imgs = torch.rand(2, 5, 4, 4)
    assert torch.equal(pictures.as_rgb(imgs), imgs[:, :3]) and torch.equal(pictures.as_rgb(imgs[:, :4]), imgs[:, :3])
    assert torch.equal(pictures.as_rgb(imgs[:, :1]), imgs[:, [0, 0, 0]])
    assert (
        torch.equal(pictures.as_rgb(imgs[:, :2])[:, :2], imgs[:, :2]) and not pictures.as_rgb(imgs[:, :2])[:, 2].any()
    )
    assert pictures.as_rgb(imgs[:, :3]).data_ptr() == imgs.data_ptr()
