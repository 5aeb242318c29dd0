"""Random crops and evaluation views against torchvision, PIL and timm."""

import math
import random

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as TF
from PIL import Image
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode, RandomResizedCrop

from util.data.finetune_augment import FinetuneAugment
from util.data.padded_crop import PaddedCropFlip, reflected
from util.data.transforms import (
    RandomResizedCropFlip,
    RandomVerticalFlip,
    ResizeCenterCrop,
    resize,
)

BICUBIC = InterpolationMode.BICUBIC


def random_image(*size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator)


def smooth_picture(rng, height, width):
    coarse = rng.integers(0, 256, (24, 30, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.BICUBIC)


def to_tensor(picture):
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def mean_difference(img, picture):
    difference = img.double() - to_tensor(picture)
    return difference.abs().mean()


# ------------------------------------------------------------------------------------------------------ random crops


def boxes(height, width, count=4000):
    augment = RandomResizedCropFlip(32, seed=0)
    uniform = np.random.default_rng(0).random((count, 23))
    return np.array([augment.box(height, width, draws) for draws in uniform])


def torchvision_boxes(height, width, count=4000):
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    drawn = []
    for _ in range(count):
        drawn.append(RandomResizedCrop.get_params(image, (0.2, 1.0), (3 / 4, 4 / 3)))
    return np.array(drawn)


def largest_gap(a, b):
    """The statistic of the two-sample Kolmogorov-Smirnov test."""
    a = np.sort(a)
    b = np.sort(b)
    places = np.concatenate([a, b])
    share_a = np.searchsorted(a, places, "right") / len(a)
    share_b = np.searchsorted(b, places, "right") / len(b)
    return np.abs(share_a - share_b).max()


@pytest.mark.parametrize(("height", "width"), [(60, 80), (500, 333)])
def test_boxes_are_distributed_as_in_torchvision(height, width):
    top, left, rows, columns = boxes(height, width).T
    their_top, their_left, their_rows, their_columns = torchvision_boxes(height, width).T
    level = 0.044  # of about 1e-3
    assert largest_gap(rows * columns, their_rows * their_columns) < level
    assert largest_gap(columns / rows, their_columns / their_rows) < level
    assert largest_gap(top, their_top) < level
    assert largest_gap(left, their_left) < level
    assert top.min() >= 0
    assert left.min() >= 0
    assert (top + rows).max() <= height
    assert (left + columns).max() <= width


def test_extreme_shapes_fall_back_to_a_central_crop():
    assert (boxes(10, 1000, 50) == [0, 493, 10, 13]).all()
    assert (boxes(1000, 10, 50) == [493, 0, 13, 10]).all()
    assert (boxes(1, 1, 5) == [0, 0, 1, 1]).all()


def test_crops_equal_those_of_pil_within_a_twentieth_of_a_level():
    """Antialiased bicubic. The reference is PIL, which torchvision's RandomResizedCrop uses for JPEGs."""
    rng = np.random.default_rng(0)
    augment = RandomResizedCropFlip(64, seed=0)
    errors = []
    for _ in range(30):
        picture = smooth_picture(rng, *rng.integers(80, 400, 2).tolist())
        img = to_tensor(picture)
        top, left, height, width = augment.box(*img.shape[1:], rng.random(23))
        crop = img[:, top : top + height, left : left + width]
        expected = TF.resized_crop(picture, top, left, height, width, (64, 64), BICUBIC)
        errors.append(mean_difference(resize(crop, (64, 64)), expected))
        assert mean_difference(resize(crop, (64, 64), reference=True), expected) == 0
    assert 0 < np.mean(errors) < 0.05


def test_augmentation_is_a_function_of_the_address():
    augment = RandomResizedCropFlip((16, 24), seed=5)
    img = random_image(40, 50)
    crop = augment(img, 3, 7)
    assert crop.shape == (3, 16, 24)
    assert crop.dtype == torch.uint8
    assert crop.is_contiguous()
    assert torch.equal(crop, augment(img, 3, 7))
    assert not torch.equal(crop, augment(img, 4, 7))
    assert not torch.equal(crop, augment(img, 3, 8))
    other = RandomResizedCropFlip((16, 24), seed=6)
    assert not torch.equal(crop, other(img, 3, 7))


def test_the_clipped_crop_takes_one_try():
    """MAE's linear probing draws area and log-ratio once and clips the sides to the image."""
    augment = RandomResizedCropFlip(32, seed=0, scale=(0.08, 1.0), clip=True)
    for draws in np.random.default_rng(0).random((500, 23)):
        top, left, height, width = augment.box(50, 80, draws)
        area = 4000 * (0.08 + 0.92 * draws[0])
        ratio = 3 / 4 * (16 / 9) ** draws[1]
        assert height == min(50, round(math.sqrt(area / ratio)))
        assert width == min(80, round(math.sqrt(area * ratio)))
        assert 0 <= top <= 50 - height
        assert 0 <= left <= 80 - width
    assert augment.box(1, 1, [0.0] * 23) == (0, 0, 1, 1)


def test_padded_crop_is_a_window_of_the_resized_and_reflected_image():
    img = random_image(40, 60)
    resized = F.interpolate(img[None], size=(20, 30), mode="bilinear", antialias=True)
    padded = F.pad(resized.float(), (4, 4, 4, 4), mode="reflect")[0].byte()
    place_of = {}
    for top in range(9):
        for left in range(19):
            window = padded[:, top : top + 20, left : left + 20]
            place_of[window.numpy().tobytes()] = (top, left)
            place_of[window.flip(-1).numpy().tobytes()] = (top, left)
    augment = PaddedCropFlip((20, 20), seed=3)
    places = []
    for index in range(1000):
        crop = augment(img, 0, index)
        assert crop.shape == (3, 20, 20)
        assert crop.is_contiguous()
        places.append(place_of[crop.numpy().tobytes()])  # KeyError if no window has these pixels
    tops, lefts = np.transpose(places)
    assert {*tops} == {*range(9)}
    assert {*lefts} == {*range(19)}
    assert tops.mean() == pytest.approx(4, abs=0.6)
    assert lefts.mean() == pytest.approx(9, abs=0.6)
    crop = augment(img, 5, 7)
    assert torch.equal(augment(img, 5, 7), crop)
    assert not torch.equal(augment(img, 6, 7), crop)


@pytest.mark.parametrize(
    ("first", "count", "length"),
    [
        (-4, 9, 5),
        (0, 5, 5),
        (2, 7, 5),
        (-4, 13, 5),
    ],
)
def test_reflection_against_numpy(first, count, length):
    padded = np.pad(np.arange(length), 4, mode="reflect")
    expected = padded[first + 4 : first + 4 + count]
    assert reflected(first, count, length).tolist() == expected.tolist()


# --------------------------------------------------------------------------------------------------- evaluation views


@pytest.mark.parametrize(
    ("height", "width"),
    [
        (81, 60),
        (500, 333),
        (224, 224),
        (48, 75),
        (400, 31),
    ],
)
@pytest.mark.parametrize(
    ("target", "crop_pct", "resized"),
    [
        (224, None, 256),
        (32, None, 36),
        (48, 1.0, 48),
        (384, None, 384),
    ],
)
def test_evaluation_view_equals_that_of_torchvision(height, width, target, crop_pct, resized):
    """The same size after the resize, the same offset of the crop, and pixels within 0.05 levels of PIL on average."""
    picture = smooth_picture(np.random.default_rng(0), height, width)
    expected = TF.center_crop(TF.resize(picture, resized, BICUBIC), [target, target])
    img = to_tensor(picture)
    fast = ResizeCenterCrop(target, crop_pct)
    reference = ResizeCenterCrop(target, crop_pct, reference=True)
    assert mean_difference(fast(img), expected) < 0.05
    assert mean_difference(reference(img), expected) == 0


# -------------------------------------------------------------------------------------------------------- fine-tuning

POLICY = "rand-m9-mstd0.5-inc1"


def generators():
    of_numpy = np.random.get_state()[1].tolist()
    return random.getstate(), of_numpy, torch.get_rng_state().tolist()


def test_finetune_augmentation_draws_by_address():
    """A sample depends only on its address, not on earlier draws. The global generators are not changed."""
    augment = FinetuneAugment(32, seed=3, auto_augment=POLICY)
    img = random_image(50, 40)
    expected = [augment(img, 1, i) for i in range(20)]
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = generators()
    for i in reversed(range(20)):
        assert torch.equal(augment(img, 1, i), expected[i])
    assert generators() == before


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float32])
def test_images_are_turned_upside_down_by_their_address(dtype):
    crop = RandomResizedCropFlip(32, 3)
    flip = RandomVerticalFlip(crop, 3)
    img = random_image(50, 40).to(dtype)
    flips = []
    for i in range(40):
        expected = crop(img, 1, i)
        flips.append(not torch.equal(flip(img, 1, i), expected))
        if flips[-1]:
            expected = torch.from_numpy(expected.numpy()[:, ::-1].copy())
        assert torch.equal(flip(img, 1, i), expected)
    assert 10 < sum(flips) < 30


def test_without_a_policy_the_crop_is_left():
    plain = FinetuneAugment(32, seed=3)
    crop = RandomResizedCropFlip(32, 3, (0.08, 1.0))
    img = random_image(50, 40)
    for i in range(20):
        assert torch.equal(plain(img, 1, i), crop(img, 1, i))
