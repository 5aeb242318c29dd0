import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from frameworks.hog import hog


def slow_hog(img, cell, num_bins, bias=(0.0, 0.0)):
    """Returns {(row, column) of a cell: histograms of all colours, one after another} of an image [C, H, W]."""
    joined = {}
    for channel in img:
        histograms = slow_histograms(channel, cell, num_bins, *bias)
        for place, histogram in histograms.items():
            joined[place] = joined.get(place, []) + histogram
    return joined


def slow_histograms(channel, cell, num_bins, horizontal_bias, vertical_bias):
    """Returns {(row, column) of a cell: histogram} of one colour [H, W], pixel by pixel with Python's floats."""
    height, width = channel.shape
    values = channel.tolist()

    def pixel(y, x):
        """Mirrors the image at its border."""
        y = abs(y)
        x = abs(x)
        if y >= height:
            y = 2 * height - 2 - y
        if x >= width:
            x = 2 * width - 2 - x
        return values[y][x]

    histograms = {}
    for y in range(height):
        for x in range(width):
            horizontal = horizontal_bias
            vertical = vertical_bias
            for offset in (-1, 0, 1):
                weight = 2 - abs(offset)
                row = y + offset
                column = x + offset
                horizontal += weight * (pixel(row, x - 1) - pixel(row, x + 1))
                vertical += weight * (pixel(y - 1, column) - pixel(y + 1, column))
            angle = math.atan2(horizontal, vertical)
            k = math.floor(angle / math.pi * num_bins) % num_bins
            place = (y // cell, x // cell)
            histogram = histograms.setdefault(place, [0.0] * num_bins)
            histogram[k] += math.hypot(horizontal, vertical) / cell**2
    for histogram in histograms.values():
        norm = max(math.hypot(*histogram), 1e-12)
        histogram[:] = [value / norm for value in histogram]
    return histograms


def tie_free(size, seed=0):
    """Returns smooth float images [2, 3, *size] in which no orientation lies on the edge between two bins.

    At the left and right border the columns are equal, two pixels wide.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(2, 3, 7, 7, dtype=torch.float64, generator=generator)
    imgs = nn.functional.interpolate(coarse, size=size, mode="bicubic", align_corners=True)
    imgs[..., :2] = imgs[..., [2]]
    imgs[..., -2:] = imgs[..., [-3]]
    return imgs


@pytest.mark.parametrize("num_bins", [9, 18])
@pytest.mark.parametrize("biased", [False, True])
def test_against_a_loop_over_pixels(num_bins, biased):
    imgs = tie_free((16, 24))
    cells = (2, 4, 8)
    biases = [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    bias = None
    if biased:
        biases = [[0.3, -0.2], [0.1, 0.25], [-0.3, 0.05]]
        bias = torch.tensor(biases, dtype=torch.float64)
    found = hog(imgs, cells, num_bins, bias)
    for level, cell in enumerate(cells):
        assert found[level].shape == (2, 3 * num_bins, 16 // cell, 24 // cell)
        for img, values in zip(imgs, found[level], strict=True):
            expected = slow_hog(img, cell, num_bins, biases[level])
            for (row, column), histograms in expected.items():
                assert values[:, row, column].tolist() == pytest.approx(histograms, rel=1e-9, abs=1e-9)


def test_results_are_float32_or_wider_without_gradient():
    imgs = tie_free((16, 16)).requires_grad_()
    (exact,) = hog(imgs, (4,))
    assert exact.dtype == torch.float64
    assert not exact.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (single,) = hog(imgs.float(), (4,))
    assert_close(single, exact.float(), rtol=1e-4, atol=1e-4)
    halved = imgs.bfloat16()
    (of_halved,) = hog(halved, (4,))
    (expected,) = hog(halved.float(), (4,))
    assert torch.equal(of_halved, expected)
