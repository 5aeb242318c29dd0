"""The pictures of token patterns, pixel by pixel."""

import numpy as np
import pytest

from util import pictures

BLUE, YELLOW, WHITE = pictures.COLORS[pictures.RETAINED], pictures.COLORS[pictures.THROWN], (255, 255, 255)


def count(picture, color):
    """Pixels of this colour."""
    return (picture == color).all(axis=2).sum()


def test_a_pattern_s_cells_have_their_colours():
    state = np.array([[0, 1, 2], [2, 0, 1]])
    picture = pictures.pattern(state, cell=8)
    assert picture.shape == (17, 25, 3)
    for (row, column), value in np.ndenumerate(state):
        inside = picture[8 * row + 1 : 8 * row + 8, 8 * column + 1 : 8 * column + 8]
        assert (inside == (WHITE, BLUE, YELLOW)[value]).all()
    lines = np.concatenate([picture[::8].reshape(-1, 3), picture[:, ::8].reshape(-1, 3)])
    assert (lines == 200).all()  # around every cell, the last ones included


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
    assert count(legend, BLUE) == count(legend, YELLOW) == 13**2  # a cell with its outline
    assert (legend < 100).all(axis=2).sum() > 100  # letters
    assert (legend[:, -5:] == 255).all()  # none is cut off


@pytest.mark.parametrize("name", ["p", "p.txt", "p.psd"])
def test_suffixes_that_pillow_does_not_write(tmp_path, name):
    pictures.check_suffix(tmp_path / "p.png")
    pictures.check_suffix(tmp_path / "P.JPG")
    with pytest.raises(ValueError, match="the name must end in .png, .jpg or the like"):
        pictures.check_suffix(tmp_path / name)
