"""Pixel type, mean and deviation: which ones a trained model has, and which ones a run takes."""

import numpy as np
import pytest
import torch

from tests.util.data.test_pixel_format import choose, pixels, save_arrays
from util.data.open import open_images
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import complete_settings, measure_statistics, normalizer
from util.run.files.checkpoint import save_checkpoint
from util.run.files.record import CheckpointInfo

MEAN = [0.485, 0.456, 0.406]
STD = [0.229, 0.224, 0.225]
FLOATS = PixelFormat(2, "float32")
STORED = {"settings": {"mean": [0.25, 0.5], "std": [0.125, 0.25]}, "pixels": "uint16"}
UNKNOWN = CheckpointInfo().pixel_settings


def test_rgb_is_normalised_by_imagenet_s_statistics_if_none_are_known():
    imgs = torch.randint(0, 256, (1, 3, 2, 2), dtype=torch.uint8)
    (found,) = normalizer(UNKNOWN, RGB8)(imgs)
    for c in range(3):
        expected = (imgs[0, c] / 255 - MEAN[c]) / STD[c]
        torch.testing.assert_close(found[c], expected)


@pytest.mark.parametrize("pixel_format", [FLOATS, PixelFormat(5, "uint16"), PixelFormat(3, "float32")])
def test_other_images_need_statistics(pixel_format):
    with pytest.raises(ValueError, match=f"of its {pixel_format.channels} channels: give --mean and --std"):
        normalizer(UNKNOWN, pixel_format)


def open_arrays(folder, dtype="uint16"):
    arrays = [pixels(2, dtype, seed=i) for i in range(3)]
    return open_images("folder", save_arrays(folder / "data", *arrays), in_chans=2)


def test_statistics_that_a_file_lacks_are_measured(tmp_path):
    images = open_arrays(tmp_path)
    settings, (remark,) = complete_settings(UNKNOWN, images)
    (mean, std), number, _ = measure_statistics(images)
    assert settings == {"pixels": None, "mean": mean, "std": std}
    assert remark.endswith(f"measured on {number} images, 2 channels of uint16")
    assert f"{mean[0]:.6g}" in remark


def test_statistics_that_a_file_has_are_kept(tmp_path):
    settings = {"pixels": "uint16", **STORED["settings"]}
    assert complete_settings(settings, open_arrays(tmp_path)) == (settings, [])


def test_statistics_of_another_depth_are_measured(tmp_path):
    images = open_arrays(tmp_path)
    settings, remarks = complete_settings({"pixels": "uint8", **STORED["settings"]}, images)
    mean, std = measure_statistics(images).statistics
    assert settings["mean"] == mean
    assert settings["std"] == std
    assert len(remarks) == 1


def test_statistics_of_rgb_are_imagenet_s(photos):
    expected = {"pixels": None, "mean": MEAN, "std": STD}
    images = open_images("folder", photos)
    assert complete_settings(UNKNOWN, images) == (expected, [])


@pytest.mark.parametrize(("dtype", "fits"), [("uint16", True), ("float32", False)])
def test_an_encoder_of_unknown_pixels_fits_integers(tmp_path, dtype, fits):
    images = open_arrays(tmp_path, dtype)
    path = save_checkpoint(tmp_path, 1, {}, {"settings": STORED["settings"]})
    expected = ([0.25, 0.5], [0.125, 0.25])
    if not fits:
        expected = measure_statistics(images).statistics
    statistics, _ = choose(images, encoder={"path": str(path)})
    assert statistics == expected


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_statistics_of_an_encoder_of_another_depth_are_measured_anew(tmp_path, dtype):
    """Cameras of 12 bits use a sixteenth of 16 bits: by fractions of 8 bits, their images would be almost black."""
    images = open_arrays(tmp_path, dtype)
    path = save_checkpoint(tmp_path, 1, {}, STORED)  # of uint16
    expected = ([0.25, 0.5], [0.125, 0.25])
    if dtype == "uint8":
        expected = measure_statistics(images).statistics
    statistics, _ = choose(images, encoder={"path": str(path)})
    assert statistics == expected


GIVEN = [0.3, 0.3]


@pytest.mark.parametrize(
    ("flags", "remarks"),
    [
        ({}, ["pixel mean {mean}, deviation {std}: measured on 3 images, 2 channels of uint16"]),
        ({"mean": GIVEN}, ["pixel deviation {std}: measured on 3 images, 2 channels of uint16"]),
        ({"std": GIVEN}, ["pixel mean {mean}: measured on 3 images, 2 channels of uint16"]),
        ({"mean": GIVEN, "std": GIVEN}, []),
    ],
)
def test_remarks_name_only_the_statistics_that_are_used(tmp_path, flags, remarks):
    images = open_arrays(tmp_path)
    measured = measure_statistics(images).statistics
    mean, std = [" ".join(f"{value:.6g}" for value in values) for values in measured]
    _, found = choose(images, **flags)
    assert found == [remark.format(mean=mean, std=std) for remark in remarks]


def test_remarks_name_the_encoder(tmp_path):
    images = open_arrays(tmp_path)
    path = save_checkpoint(tmp_path, 1, {}, STORED)
    encoder = {"path": str(path)}
    _, remarks = choose(images, encoder=encoder)
    assert remarks == ["note: pixel mean and deviation are those of the encoder"]
    statistics, remarks = choose(images, encoder=encoder, mean=GIVEN)
    assert statistics == (GIVEN, [0.125, 0.25])
    assert remarks == [
        "note: pixel deviation is that of the encoder",
        "note: --mean is not the encoder's, which is 0.25 0.5",
    ]


HALVES = [0.5, 0.5, 0.5]
OTHER = {"mean": HALVES, "std": [0.25, 0.25, 0.25]}


@pytest.mark.parametrize(
    ("stored", "flags", "remarks"),
    [
        ({}, {"mean": HALVES}, ["note: --mean is not the encoder's, which is 0.485 0.456 0.406"]),
        ({}, {"mean": MEAN, "std": [0.2291, 0.224, 0.225]}, []),
        (OTHER, OTHER, []),
        (OTHER, OTHER | {"std": STD}, ["note: --std is not the encoder's, which is 0.25 0.25 0.25"]),
    ],
)
def test_given_statistics_that_are_not_the_encoder_s_are_said(photos, tmp_path, stored, flags, remarks):
    """Without statistics in the file, the encoder's were ImageNet's."""
    path = save_checkpoint(tmp_path, 1, {}, {"settings": stored, "pixels": "uint8"})
    images = open_images("folder", photos)
    _, found = choose(images, encoder={"path": str(path)}, **flags)
    assert found == remarks
    _, found = choose(images, **flags)
    assert found == []


# ------------------------------------------------------------------------------------------ marks of missing pixels


def measure(folder, images, dtype="float32"):
    save_arrays(folder, *images.astype(dtype))
    opened = open_images("folder", folder, in_chans=images.shape[-1])
    return measure_statistics(opened)


@pytest.mark.parametrize("fill", [-9999.0, -3.4e38, 1e20])
def test_a_mark_of_missing_pixels_is_named_with_its_number(tmp_path, fill):
    images = np.random.default_rng(0).random((16, 40, 40, 2))
    others = images[..., 1].copy()
    images[3:5, :5, :5, 1] = fill
    others = others[images[..., 1] != fill]
    measured = measure(tmp_path, images)
    (warning,) = measured.remarks
    value = f"{float(np.float32(fill)):.10g}"
    assert f"50 of 25600 measured pixels of channel 1 (counted from 0) are {value}" in warning
    assert f"all others lie between {others.min():.6g} and {others.max():.6g}" in warning
    assert measured.statistics[1][1] > 100  # as before: the run goes on with what was measured


def test_the_warning_is_in_the_remarks_of_a_run(tmp_path):
    images = np.random.default_rng(0).random((4, 8, 8, 1), np.float32)
    images[:, 0, 0] = -9999
    save_arrays(tmp_path, *images)
    _, remarks = choose(open_images("folder", tmp_path, in_chans=1))
    assert len(remarks) == 2
    assert "4 of 256 measured pixels of channel 0" in remarks[1]


def collimated(rng):
    """A part of each image is zero; the other values begin beside it."""
    images = 0.05 + 0.9 * rng.random((16, 40, 40, 1))
    images[:, :, 28:] = 0
    return images


def sparse(rng):
    """A background that is exactly zero, and some beads of nearly the same brightness."""
    images = np.zeros((16, 40, 40, 1))
    beads = 0.9 + 0.05 * rng.random((16, 4, 4, 1))
    images[:, 10:14, 10:14] = beads
    return images


def one_peak(rng):
    """Values of one pixel far above all others."""
    images = 0.01 * rng.random((16, 40, 40, 1))
    images[3, 5, 5] = 1
    return images


def saturated(rng):
    light = 1.5 * rng.random((16, 40, 40, 1))
    return light.clip(0, 1)


def two_values(rng):
    is_bright = rng.random((16, 40, 40, 1)) < 0.2
    return is_bright.astype(float)


@pytest.mark.parametrize("make", [saturated, collimated, sparse, one_peak, two_values])
def test_values_of_other_images_are_no_marks_of_missing_pixels(tmp_path, make):
    images = make(np.random.default_rng(0))
    assert measure(tmp_path, images, "float32").remarks == []


def test_every_value_of_8_bits_may_be_a_brightness(tmp_path):
    """Ink on paper."""
    images = np.random.default_rng(0).integers(250, 256, (16, 40, 40, 1))
    images[:, 3] = 0
    assert measure(tmp_path, images, "uint8").remarks == []
    assert measure(tmp_path, images, "uint16").remarks != []
