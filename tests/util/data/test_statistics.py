"""Pixel type, mean and deviation: which ones a trained model has, and which ones a run takes."""

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
    with pytest.raises(ValueError, match="give --mean and --std"):
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


def test_given_statistics_win_and_need_no_measurement(tmp_path):
    images = open_arrays(tmp_path)
    measured = measure_statistics(images).statistics
    given = [0.3, 0.3]
    assert choose(images, mean=given) == ((given, measured[1]), choose(images)[1])
    assert choose(images, mean=given, std=given) == ((given, given), [])
    path = save_checkpoint(tmp_path, 1, {}, STORED)
    statistics, remarks = choose(images, encoder={"path": str(path)}, mean=given)
    assert statistics == (given, [0.125, 0.25])
    assert len(remarks) == 1
