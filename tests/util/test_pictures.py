"""Pictures of tokens and panels, pixel by pixel."""

import numpy as np
import pytest
import torch

from util import pictures

GREY = (9, 9, 9)
BLUE = pictures.COLORS[pictures.RETAINED]
YELLOW = pictures.COLORS[pictures.THROWN]


def count(picture, color):
    """Returns the number of pixels of this colour."""
    return (picture == color).all(axis=2).sum()


def test_tokens_are_painted_in_the_colours_of_their_state():
    state = np.array([[0, 1, 2], [2, 0, 1]])
    img = np.full((16, 24, 3), 9, np.uint8)
    painted = pictures.paint_tokens(img, state)
    for (row, column), value in np.ndenumerate(state):
        token = painted[8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        assert (token == (GREY, BLUE, YELLOW)[value]).all()


@pytest.mark.parametrize(
    ("num_images", "num_panels", "rows", "columns"),
    [
        (3, 1, 3, 3),
        (5, 1, 3, 6),
        (4, 2, 2, 8),
        (4, 3, 4, 5),
    ],
)
def test_a_grid_holds_two_images_a_row_if_there_are_four_with_two_panels(num_images, num_panels, rows, columns):
    """Small images are enlarged twice, with gaps and titles."""
    imgs = torch.full((num_images, 3, 64, 64), 100, dtype=torch.uint8)
    panels = {str(k): imgs / 255 for k in range(num_panels)}
    picture = pictures.panel_grid(imgs, torch.zeros(num_images, 4, 4, dtype=torch.int64), panels)
    assert picture.shape == (20 + rows * (128 + 6), columns * (128 + 6) + 6, 3)
    assert count(picture[20:], 100) == num_images * (2 + num_panels) * 128**2


def test_other_channels_are_shown_by_three():
    """A single one as grey; of two channels the missing blue is black."""
    imgs = torch.rand(2, 5, 4, 4)
    assert torch.equal(pictures.as_rgb(imgs), imgs[:, :3])
    assert torch.equal(pictures.as_rgb(imgs[:, :1]), imgs[:, [0, 0, 0]])
    shown = pictures.as_rgb(imgs[:, :2])
    assert torch.equal(shown[:, :2], imgs[:, :2])
    assert not shown[:, 2].any()
