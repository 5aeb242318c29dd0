"""Pixel type, mean and deviation: which ones a trained model has, and which ones a run takes."""

import pytest
import torch

from tests.util.data.test_pixel_format import pixels, save_arrays
from util.data.open import open_images
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import measure_statistics, normalizer, statistics_of
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


@pytest.mark.parametrize("pixel_format", [FLOATS, PixelFormat(3, "uint16"), PixelFormat(3, "float32")])
def test_other_images_need_statistics(pixel_format):
    with pytest.raises(ValueError, match="--mean and --std"):
        normalizer(UNKNOWN, pixel_format)


def choose(images, stored=None, mean=None, std=None):
    """Chooses the statistics of a run. stored: what the checkpoint says that it resumes or begins with."""
    known = None
    if stored is not None:
        known = CheckpointInfo.from_json(stored, "").pixel_settings
    return statistics_of((mean, std), known, images)


def open_arrays(folder, dtype="uint16", num_channels=2):
    arrays = [pixels(num_channels, dtype, seed=i) for i in range(3)]
    return open_images("folder", save_arrays(folder / "data", *arrays), in_chans=num_channels)


@pytest.mark.parametrize("num_channels", [2, 3])
def test_statistics_that_a_file_lacks_are_measured(tmp_path, num_channels):
    """Those of RGB of 16 bits, too: by ImageNet's, images of 12 bits would be almost black."""
    images = open_arrays(tmp_path, num_channels=num_channels)
    (mean, std), (remark,) = choose(images, {"settings": {}})
    assert ((mean, std), [remark]) == measure_statistics(images)
    assert remark.endswith(f"measured on 3 images, {num_channels} channels of uint16")
    assert f"{mean[0]:.6g}" in remark


def test_statistics_of_rgb_are_imagenet_s(photos):
    assert choose(open_images("folder", photos), {"settings": {}}) == ((MEAN, STD), [])


@pytest.mark.parametrize(
    ("stored", "dtype", "fits"),
    [
        ("uint16", "uint16", True),
        ("uint16", "uint8", False),
        ("uint8", "uint16", False),  # cameras of 12 bits use a sixteenth of 16 bits
        (None, "uint16", True),
        (None, "float32", False),
    ],
)
def test_stored_statistics_are_for_images_of_their_type(tmp_path, stored, dtype, fits):
    images = open_arrays(tmp_path, dtype)
    expected = ([0.25, 0.5], [0.125, 0.25])
    if not fits:
        expected, _ = measure_statistics(images)
    statistics, remarks = choose(images, {**STORED, "pixels": stored})
    assert statistics == expected
    assert len(remarks) == (not fits)


def test_given_statistics_win_and_need_no_measurement(tmp_path):
    images = open_arrays(tmp_path)
    measured, _ = measure_statistics(images)
    given = [0.3, 0.3]
    assert choose(images, mean=given) == ((given, measured[1]), choose(images)[1])
    assert choose(images, mean=given, std=given) == ((given, given), [])
    assert choose(images, STORED, mean=given) == ((given, [0.125, 0.25]), [])
    with pytest.raises(ValueError, match="--mean"):
        choose(images, mean=[1000.0, 0.1])
