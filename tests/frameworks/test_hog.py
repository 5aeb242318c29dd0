import math

import pytest
import torch
from torch import nn

from frameworks.hog import hog, orientation_colors


def slow_hog(img, cell, num_bins, bias=(0.0, 0.0)):
    """Returns {(row, column): histogram [C * num_bins]} of [C, H, W], pixel by pixel with Python's floats."""
    C, H, W = img.shape
    values = img.tolist()
    at = lambda c, y, x: values[c][abs(y) if y < H else 2 * H - 2 - y][abs(x) if x < W else 2 * W - 2 - x]  # noqa: E731
    cells = {(r, q): [0.0] * (C * num_bins) for r in range(H // cell) for q in range(W // cell)}
    for c in range(C):
        for y in range(H):
            for x in range(W):
                a = sum(w * (at(c, y + d, x - 1) - at(c, y + d, x + 1)) for d, w in ((-1, 1), (0, 2), (1, 1))) + bias[0]
                b = sum(w * (at(c, y - 1, x + d) - at(c, y + 1, x + d)) for d, w in ((-1, 1), (0, 2), (1, 1))) + bias[1]
                k = math.floor(math.atan2(a, b) / math.pi * num_bins) % num_bins
                cells[y // cell, x // cell][c * num_bins + k] += math.hypot(a, b) / cell**2
    for histogram in cells.values():
        for c in range(C):
            span = slice(c * num_bins, (c + 1) * num_bins)
            norm = max(math.sqrt(sum(v * v for v in histogram[span])), 1e-12)
            histogram[span] = [v / norm for v in histogram[span]]
    return cells


def tie_free(size, seed=0):
    """Returns smooth float images [2, 3, *size] in which no orientation lies on the edge between two bins.

    At the left and right border the columns are equal, two pixels wide.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(2, 3, 7, 7, dtype=torch.float64, generator=generator)
    imgs = nn.functional.interpolate(coarse, size=size, mode="bicubic", align_corners=True)
    imgs[..., :2], imgs[..., -2:] = imgs[..., 2:3].clone(), imgs[..., -3:-2].clone()
    return imgs


@pytest.mark.parametrize("num_bins", [9, 18])
@pytest.mark.parametrize("biased", [False, True])
def test_against_a_loop_over_pixels(num_bins, biased):
    imgs = tie_free((16, 24))
    bias = torch.tensor([[0.3, -0.2], [0.1, 0.25], [-0.3, 0.05]], dtype=torch.float64) if biased else None
    ours = hog(imgs, (2, 4, 8), num_bins, bias)
    for k, cell in enumerate((2, 4, 8)):
        assert ours[k].shape == (2, 3 * num_bins, 16 // cell, 24 // cell)
        for b in range(2):
            for (row, column), histogram in slow_hog(
                imgs[b], cell, num_bins, bias[k].tolist() if biased else (0, 0)
            ).items():
                expected = torch.tensor(histogram, dtype=torch.float64)
                torch.testing.assert_close(ours[k][b, :, row, column], expected, rtol=1e-9, atol=1e-9)


RAMPS = {"x": (4, 9), "y": (0, 0), "x+y": (2, 4), "x-y": (6, 13), "2*x+y": (3, 6), "x+2*y": (1, 2), "x-2*y": (7, 15)}
RAMPS |= {"2*x-y": (5, 11), "-x": (4, 9), "-y": (0, 0)}


@pytest.mark.parametrize("ramp", RAMPS)
def test_orientation_of_ramps(ramp):
    y, x = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
    img = eval(ramp, {"x": x, "y": y}).view(1, 1, 24, 24)
    for num_bins, expected in zip((9, 18), RAMPS[ramp], strict=True):
        (histogram,) = hog(img, (8,), num_bins)
        inner = histogram[0, :, 1, 1]
        assert inner[expected] == 1 and inner.sum() == 1


def test_colours_are_normalised_by_themselves_and_flat_ones_are_zero():
    imgs = tie_free((16, 16))
    imgs[:, 1] = 0.7
    (histograms,) = hog(imgs * torch.tensor([1.0, 1.0, 100.0]).view(3, 1, 1), (8,))
    norms = histograms.unflatten(1, (3, 9)).norm(dim=2)
    torch.testing.assert_close(norms[:, [0, 2]], torch.ones_like(norms[:, [0, 2]]))
    assert not norms[:, 1].any()


def test_results_are_float32_or_wider_without_gradient():
    imgs = tie_free((16, 16)).requires_grad_()
    (exact,) = hog(imgs, (4,))
    assert exact.dtype == torch.float64 and not exact.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (single,) = hog(imgs.float(), (4,))
    halved = imgs.bfloat16()
    torch.testing.assert_close(hog(halved, (4,))[0], hog(halved.float(), (4,))[0], rtol=0, atol=0)
    torch.testing.assert_close(single, exact.float(), rtol=1e-4, atol=1e-4)


def test_cells_that_do_not_divide_the_image_are_refused():
    with pytest.raises(ValueError, match=r"divide the image, 16 x 16 px; got \(4, 6\)"):
        hog(torch.zeros(1, 3, 16, 16), (4, 6))


def test_orientations_have_colours():
    """A single bin gives a bright colour of its own. Equal bins give black."""
    one = torch.eye(9).repeat(3, 1).view(1, 27, 1, 9) / 3 * 3  # nine cells: in cell k only bin k is filled
    colors = orientation_colors(one, 9)[0, :, 0].T
    assert len({tuple(c.round(decimals=3).tolist()) for c in colors}) == 9 and colors.max() > 0.9
    assert orientation_colors(torch.ones(1, 27, 1, 1), 9).max() < 1e-5
