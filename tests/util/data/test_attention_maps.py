"""Attention maps: the weights of a view's tokens, the views of the transforms, and the file that workers read."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from util.data.attention_maps import AttentionMaps, CropBox, Squash, crop_box, maps_path, write_maps
from util.data.padded_crop import PaddedCropFlip
from util.data.transforms import RandomResizedCropFlip

SIZES = [(60, 36), (37, 80), (48, 48), (33, 200)]  # of images; the last one has few boxes that fit


def written(tmp_path, maps):
    path = maps_path(tmp_path, 40)
    write_maps(path, maps)
    return path


def random_views(num, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(num):
        height, width = rng.uniform(0.2, 1, 2)
        top = rng.uniform(0, 1 - height)
        left = rng.uniform(0, 1 - width)
        flip = bool(rng.integers(2))
        yield CropBox(top, left, height, width, flip)


def slow_weight(cells, view, token, patch):
    """The mean over one token's pixels of a map that is bilinear between its cells' centres, pixel by pixel."""
    rows = len(cells)
    columns = len(cells[0])

    def at(row, column):
        row = min(max(row, 0), rows - 1)
        column = min(max(column, 0), columns - 1)
        return cells[row][column]

    total = 0.0
    first_y = token[0] * patch
    first_x = token[1] * patch
    for y in range(first_y, first_y + patch):
        for x in range(first_x, first_x + patch):
            shown = x
            if view.flip:
                shown = columns * patch - 1 - x
            v = view.top * rows + view.height * (y + 0.5) / patch - 0.5
            u = view.left * columns + view.width * (shown + 0.5) / patch - 0.5
            for row in (math.floor(v), math.floor(v) + 1):
                for column in (math.floor(u), math.floor(u) + 1):
                    share = (1 - abs(v - row)) * (1 - abs(u - column))
                    total += share * at(row, column)
    return total / patch**2


def test_weights_are_the_mean_of_the_bilinear_map_over_each_token(tmp_path):
    maps = np.random.default_rng(1).random((9, 5, 7)).astype(np.float16)
    whole = CropBox(0, 0, 1, 1, flip=False)
    padded = CropBox(-0.1, 0.3, 0.8, 0.75, flip=True)
    views = [*random_views(7), whole, padded]
    indices = [3, 0, 8, 3, 1, 2, 7, 4, 5]
    addressed = list(zip(indices, views, strict=True))
    weights = AttentionMaps(written(tmp_path, maps), 3).token_weights(addressed)
    assert weights.shape == (9, 35)
    assert weights.dtype == np.float32
    for found, (index, view) in zip(weights, addressed, strict=True):
        cells = maps[index].tolist()
        expected = []
        for token in range(35):
            expected.append(slow_weight(cells, view, divmod(token, 7), 3))
        assert found == pytest.approx(expected, abs=1e-5)


def test_the_released_crop_reads_the_corner_of_the_map(tmp_path):
    """The public code slices the map at offsets that are whole images, and resizes the slice to the view."""
    torch.manual_seed(0)
    maps = torch.rand(6, 14, 14).half()
    H = 100  # of the images
    W = 80
    patch = 4
    boxes = [
        (0, 0, 50, 40),
        (30, 20, 40, 50),
        (50, 10, 50, 60),
        (10, 30, 60, 50),
        (0, 0, 100, 80),
        (60, 40, 40, 40),
    ]
    views = []
    for i, (top, left, height, width) in enumerate(boxes):
        flip = i % 2 == 1
        view = CropBox(top / H, left / W, height / H, width / W, flip)
        views.append((i, view))
    path = written(tmp_path, maps.numpy())
    found = AttentionMaps(path, patch, "released").token_weights(views)
    shapes = set()
    for i, (top, left, height, width) in enumerate(boxes):
        rows = slice(top // H, (top + height) // H + 2)
        columns = slice(left // W, (left + width) // W + 2)
        part = maps[i, rows, columns].float()
        shapes.add(tuple(part.shape))
        pixels = F.interpolate(part[None, None], size=(14 * patch, 14 * patch), mode="bilinear")
        if i % 2 == 1:
            pixels = pixels.flip(-1)
        expected = F.avg_pool2d(pixels, patch).flatten()
        np.testing.assert_allclose(found[i], expected, atol=1e-6, rtol=1e-5)
    assert shapes == {(2, 2), (3, 2), (2, 3), (3, 3)}


@pytest.mark.parametrize("transform", [RandomResizedCropFlip(32, seed=3), PaddedCropFlip((32, 32), seed=3)])
def test_a_view_is_what_the_transform_shows(transform):
    """The image is a ramp. The first and last pixels of the view tell where the view begins and ends."""
    flips = set()
    for index in range(24):
        height, width = (5 * length for length in SIZES[index % 4])
        img = torch.empty(3, height, width, dtype=torch.uint8)
        img[0] = torch.linspace(0, 255, height)[:, None]
        img[1:] = torch.linspace(0, 255, width)
        crop = transform(img, 1, index).float() / 255
        view = crop_box(transform, (height, width), 1, index)
        flips.add(view.flip)
        place = (0.5 + torch.arange(2, 30)) / 32
        rows = crop[0, 2:30, 5]
        columns = crop[1, 5]
        if view.flip:
            columns = columns.flip(0)
        down = rows - view.top - view.height * place
        across = columns[2:30] - view.left - view.width * place
        assert down.abs().median() < 0.02
        assert across.abs().median() < 0.02
    assert flips == {True, False}


def test_squash_shows_the_whole_image(tmp_path):
    img = torch.zeros(3, 40, 100, dtype=torch.uint8)
    img[:, 20:, 50:] = 255
    small = Squash((16, 32))(img)
    assert small.shape == (3, 16, 32)
    assert small.is_contiguous()
    assert small[0].float().mean() == pytest.approx(255 / 4, abs=2)
    assert small[0, 12, 24] == 255
    assert small[0, 3, 24] == 0
    assert small[0, 12, 7] == 0
