"""Random crops and evaluation views against torchvision, PIL and timm."""

import math
import random

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as TF
from PIL import Image
from timm.data import create_transform
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode, RandomResizedCrop

from util.data.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    FinetuneAugment,
    Normalize,
    PaddedCropFlip,
    RandomResizedCropFlip,
    ResizeCenterCrop,
    reflected,
    resize,
)


def boxes(height, width, count=4000):
    augment = RandomResizedCropFlip(32, seed=0)
    uniform = np.random.default_rng(0).random((count, 23))
    return np.array([augment.box(height, width, draws) for draws in uniform])


@pytest.mark.parametrize("size", [(60, 80), (500, 333)])
def test_boxes_are_distributed_as_in_torchvision(size):
    height, width = size
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, (0.2, 1.0), (3 / 4, 4 / 3)) for _ in range(4000)])
    ours = boxes(height, width)
    for of in (
        lambda b: b[:, 2] * b[:, 3] / (height * width),
        lambda b: b[:, 3] / b[:, 2],
        lambda b: b[:, 0],
        lambda b: b[:, 1],
    ):
        a, b = np.sort(of(ours)), np.sort(of(theirs))
        grid = np.concatenate([a, b])
        gap = np.abs(np.searchsorted(a, grid, "right") - np.searchsorted(b, grid, "right")).max() / 4000
        assert gap < 0.044  # two-sample Kolmogorov-Smirnov test at a level of about 1e-3
    assert (ours[:, 0] + ours[:, 2] <= height).all() and (ours[:, 1] + ours[:, 3] <= width).all() and (ours >= 0).all()


def test_extreme_shapes_fall_back_to_a_central_crop():
    assert (boxes(10, 1000, 50) == [0, 493, 10, 13]).all()
    assert (boxes(1000, 10, 50) == [493, 0, 13, 10]).all()
    assert (boxes(1, 1, 5) == [0, 0, 1, 1]).all()


def test_crops_equal_those_of_pil_within_a_twentieth_of_a_level():
    """Antialiased bicubic. The reference is PIL, which torchvision's RandomResizedCrop uses for JPEGs."""
    rng, errors = np.random.default_rng(0), []
    augment = RandomResizedCropFlip(64, seed=0)
    for _ in range(30):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 30, 3), dtype=np.uint8))
        pil = coarse.resize((int(rng.integers(80, 400)), int(rng.integers(80, 400))), Image.BICUBIC)
        img = torch.from_numpy(np.array(pil)).permute(2, 0, 1)
        top, left, h, w = augment.box(*img.shape[1:], rng.random(23))
        expected = TF.resized_crop(pil, top, left, h, w, (64, 64), InterpolationMode.BICUBIC)
        ours = resize(img[:, top : top + h, left : left + w], (64, 64))
        errors.append(np.abs(ours.permute(1, 2, 0).numpy().astype(float) - np.asarray(expected)).mean())
        exact = resize(img[:, top : top + h, left : left + w], (64, 64), reference=True)
        assert np.array_equal(exact.permute(1, 2, 0).numpy(), np.asarray(expected))
    assert 0 < np.mean(errors) < 0.05


def test_augmentation_is_a_function_of_the_address():
    augment = RandomResizedCropFlip((16, 24), seed=5)
    img = torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8)
    first = augment(img, 3, 7)
    assert first.shape == (3, 16, 24) and first.dtype == torch.uint8 and first.is_contiguous()
    assert torch.equal(first, augment(img, 3, 7))
    assert not torch.equal(first, augment(img, 4, 7)) and not torch.equal(first, augment(img, 3, 8))
    assert not torch.equal(first, RandomResizedCropFlip((16, 24), seed=6)(img, 3, 7))


def test_half_of_the_crops_are_flipped():
    augment = RandomResizedCropFlip(8, seed=0, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    img = torch.arange(8, dtype=torch.uint8).expand(3, 8, 8)
    flipped = [bool(augment(img, 0, i)[0, 0, 0] == 7) for i in range(1000)]
    assert 430 < sum(flipped) < 570


def test_center_crop():
    img = torch.randint(0, 256, (3, 256, 256), dtype=torch.uint8)
    assert torch.equal(ResizeCenterCrop(224)(img), img[:, 16:240, 16:240])
    assert ResizeCenterCrop((32, 48))(torch.zeros(3, 30, 200, dtype=torch.uint8)).shape == (3, 32, 48)


def test_normalize_and_back():
    imgs = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    normalize = Normalize()
    expected = TF.normalize(imgs / 255, IMAGENET_MEAN, IMAGENET_STD)
    torch.testing.assert_close(normalize(imgs), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(normalize.undo(normalize(imgs)), imgs / 255, rtol=1e-5, atol=1e-6)


def test_the_clipped_crop_takes_one_try():
    """MAE's linear probing draws area and log-ratio once and clips the sides to the image."""
    augment = RandomResizedCropFlip(32, seed=0, scale=(0.08, 1.0), clip=True)
    for draws in np.random.default_rng(0).random((500, 23)):
        top, left, h, w = augment.box(50, 80, draws)
        area, ratio = 4000 * (0.08 + 0.92 * draws[0]), math.exp(math.log(3 / 4) + draws[1] * 2 * math.log(4 / 3))
        assert (h, w) == (min(50, round(math.sqrt(area / ratio))), min(80, round(math.sqrt(area * ratio))))
        assert 0 <= top <= 50 - h and 0 <= left <= 80 - w
    assert augment.box(1, 1, [0.0] * 23) == (0, 0, 1, 1)


@pytest.mark.parametrize("size", [(60, 81), (333, 500), (224, 224), (75, 48), (31, 400)])
@pytest.mark.parametrize(("target", "crop_pct"), [(224, None), (32, None), (48, 1.0), (384, None)])
def test_evaluation_view_equals_that_of_torchvision(size, target, crop_pct):
    """The same size after the resize, the same offset of the crop, and pixels within 0.05 levels of PIL on average."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    img = coarse.resize((size[1], size[0]), Image.BICUBIC)
    pct = crop_pct or (224 / 256 if target <= 224 else 1.0)
    resized = TF.resize(img, int(target / pct), InterpolationMode.BICUBIC)
    expected = np.asarray(TF.center_crop(resized, [target, target]), dtype=float)
    pixels = torch.from_numpy(np.asarray(img).copy()).permute(2, 0, 1)
    ours = ResizeCenterCrop(target, crop_pct)(pixels)
    assert np.abs(ours.permute(1, 2, 0).numpy() - expected).mean() < 0.05
    exact = ResizeCenterCrop(target, crop_pct, reference=True)(pixels)
    assert np.array_equal(exact.permute(1, 2, 0).numpy(), expected)


def test_crop_pct_1_leaves_an_image_of_the_right_size_alone():
    img = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    assert torch.equal(ResizeCenterCrop(32, 1.0)(img), img)
    with pytest.raises(ValueError, match=r"crop_pct must lie in \(0, 1\], got 1.2"):
        ResizeCenterCrop(32, 1.2)


def test_finetune_augmentation_is_timms_policy_with_addressed_draws():
    """A sample depends only on its address, not on earlier draws. The global generators are not changed."""
    augment = FinetuneAugment(32, seed=3, auto_augment="rand-m9-mstd0.5-inc1")
    reference = create_transform(
        32, is_training=True, color_jitter=None, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic"
    )
    assert repr(augment.augment.transforms[0]) == repr(reference.transforms[2])
    assert augment.augment.transforms[0].ops[0].hparams == reference.transforms[2].ops[0].hparams
    img = torch.randint(0, 256, (3, 50, 40), dtype=torch.uint8)
    first = [augment(img, 1, i) for i in range(20)]
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    again = [augment(img, 1, i) for i in reversed(range(20))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    plain = FinetuneAugment(32, seed=3)
    assert torch.equal(plain(img, 1, 0), RandomResizedCropFlip(32, 3, (0.08, 1.0))(img, 1, 0))
    assert sum(not torch.equal(plain(img, 1, i), first[i]) for i in range(20)) >= 10
    with pytest.raises(ValueError, match="does not know the augmentation policy 'rnd'"):
        FinetuneAugment(32, seed=0, auto_augment="rnd")


def padded_window(img, size, top, left):
    """Returns a window of the image that is padded by reflection."""
    padded = F.pad(img.float().unsqueeze(0), (4, 4, 4, 4), mode="reflect").squeeze(0).to(img.dtype)
    return padded[:, top : top + size, left : left + size]


def test_padded_crop_is_a_window_of_the_resized_and_reflected_image():
    img = torch.randint(0, 256, (3, 40, 60), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    resized = F.interpolate(img.unsqueeze(0), size=(20, 30), mode="bilinear", antialias=True).squeeze(0)
    windows = {}
    for top in range(2 * 4 + 1):
        for left in range(10 + 2 * 4 + 1):
            window = padded_window(resized, 20, top, left)
            windows[window.numpy().tobytes()] = windows[window.flip(-1).numpy().tobytes()] = (top, left)
    augment = PaddedCropFlip(20, seed=3)
    crops = [augment(img, 0, index) for index in range(1000)]
    drawn = np.array([windows[crop.numpy().tobytes()] for crop in crops])  # KeyError if no window has these pixels
    assert all(crop.shape == (3, 20, 20) and crop.is_contiguous() for crop in crops)
    assert {*drawn[:, 0]} == {*range(9)} and {*drawn[:, 1]} == {*range(19)}
    assert drawn.mean(axis=0) == pytest.approx([4, 9], abs=0.6)
    assert torch.equal(augment(img, 5, 7), augment(img, 5, 7)) and not torch.equal(
        augment(img, 5, 7), augment(img, 6, 7)
    )


def test_reflection_against_numpy():
    for first, count, length in ((-4, 9, 5), (0, 5, 5), (2, 7, 5), (-4, 13, 5)):
        padded = np.pad(np.arange(length), 4, mode="reflect")
        assert reflected(first, count, length).tolist() == padded[first + 4 : first + 4 + count].tolist()


def test_an_edge_of_16_bits_is_resized_without_overflow():
    """Bicubic interpolation overshoots at an edge between the lowest and the highest value."""
    img = torch.zeros(1, 8, 8, dtype=torch.uint16)
    img[..., 4:] = 65535
    resized = resize(img, (13, 13)).int()
    assert resized[..., :5].max() < 7000 and resized[..., 8:].min() > 58000
