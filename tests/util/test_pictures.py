"""Pictures of tokens and panels, pixel by pixel."""

import numpy as np
import torch

from util import pictures

GREY = (9, 9, 9)
BLUE = pictures.COLORS[pictures.RETAINED]
YELLOW = pictures.COLORS[pictures.THROWN]


def test_tokens_are_painted_in_the_colours_of_their_state():
    state = np.array([[0, 1, 2], [2, 0, 1]])
    img = np.full((16, 24, 3), 9, np.uint8)
    painted = pictures.paint_tokens(img, state)
    for (row, column), value in np.ndenumerate(state):
        token = painted[8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        assert (token == (GREY, BLUE, YELLOW)[value]).all()


def test_other_channels_are_shown_by_three():
    """A single one as grey; of two channels the missing blue is black."""
    imgs = torch.rand(2, 5, 4, 4)
    assert torch.equal(pictures.as_rgb(imgs), imgs[:, :3])
    assert torch.equal(pictures.as_rgb(imgs[:, :1]), imgs[:, [0, 0, 0]])
    shown = pictures.as_rgb(imgs[:, :2])
    assert torch.equal(shown[:, :2], imgs[:, :2])
    assert not shown[:, 2].any()
