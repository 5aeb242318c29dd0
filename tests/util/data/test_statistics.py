"""Pixel type, mean and deviation: which ones a trained model has, and which ones a run takes."""

import numpy as np
import pytest
import torch

from tests.util.data.test_pixel_format import choose, pixels
from util.data.datasets import open_images
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import complete_settings, measure_statistics, normalizer
from util.run.checkpoint import CheckpointInfo, save_checkpoint

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FLOATS = PixelFormat(2, "float32")


def test_what_a_checkpoint_says_about_its_images():
    assert CheckpointInfo().pixel_settings == {"pixels": None, "mean": None, "std": None}
    known = CheckpointInfo({"mean": [1.0], "std": [2.0]}, "float32")
    assert known.pixel_settings == {"pixels": "float32", "mean": [1.0], "std": [2.0]}


def test_a_model_s_images_are_normalised_by_what_is_known():
    imgs = torch.rand(1, 3, 2, 2).mul(255).to(torch.uint8)
    expected = (imgs.double() / 255 - torch.tensor(IMAGENET[0]).view(3, 1, 1)) / torch.tensor(IMAGENET[1]).view(3, 1, 1)
    torch.testing.assert_close(normalizer(CheckpointInfo().pixel_settings, RGB8)(imgs), expected.float())
    own = {"pixels": None, "mean": [100.0, 0.0], "std": [50.0, 2.0]}
    values = torch.tensor([200.0, 3.0]).view(1, 2, 1, 1)
    assert normalizer(own, FLOATS)(values).flatten().tolist() == [2.0, 1.5]  # their type is unknown: the data's
    with pytest.raises(ValueError, match="was trained on pixels of uint8, but the images have 2 channels of float32"):
        normalizer(own | {"pixels": "uint8"}, FLOATS)
    for format_ in (FLOATS, PixelFormat(5, "uint16"), PixelFormat(3, "float32")):
        with pytest.raises(ValueError, match=f"deviation of its {format_.channels} channels: give --mean and --std"):
            normalizer(CheckpointInfo().pixel_settings, format_)


def test_statistics_that_a_file_lacks_are_measured(tmp_path, photos):
    images = open_arrays(tmp_path / "data")
    found, (remark,) = complete_settings(CheckpointInfo().pixel_settings, images)
    own, number, _ = measure_statistics(images)
    assert found == {"pixels": None, "mean": own[0], "std": own[1]}
    assert remark.endswith(f"measured on {number} images, 2 channels of uint16") and f"{own[0][0]:.6g}" in remark
    given = {"pixels": "uint16", "mean": [0.1, 0.2], "std": [0.3, 0.4]}
    assert complete_settings(given, images) == (given, [])
    rgb = {"pixels": None, "mean": IMAGENET[0], "std": IMAGENET[1]}
    assert complete_settings(CheckpointInfo().pixel_settings, open_images("folder", photos)) == (rgb, [])


def open_arrays(folder, dtype="uint16"):
    folder.mkdir()
    for i in range(3):
        np.save(folder / f"{i}.npy", pixels(2, dtype, seed=i))
    return open_images("folder", folder, in_chans=2)


@pytest.mark.parametrize(("pixels_of_encoder", "dtype", "fits"), [(None, "uint16", True), (None, "float32", False)])
def test_an_encoder_of_unknown_pixels_fits_integers(tmp_path, pixels_of_encoder, dtype, fits):
    images = open_arrays(tmp_path / "data", dtype)
    stored = [0.25, 0.5], [0.125, 0.25]
    path = save_checkpoint(tmp_path, 1, {"w": torch.zeros(1)}, {"settings": {"mean": stored[0], "std": stored[1]}})
    found, _ = choose(images, encoder={"path": str(path)})
    assert found == (stored if fits else measure_statistics(images)[0])


def test_remarks_name_only_the_statistics_that_are_used(tmp_path):
    images = open_arrays(tmp_path / "data")
    mean, std = (" ".join(f"{value:.6g}" for value in part) for part in measure_statistics(images)[0])
    tail = "measured on 3 images, 2 channels of uint16"
    assert choose(images)[1] == [f"pixel mean {mean}, deviation {std}: {tail}"]
    assert choose(images, mean=[0.3, 0.3])[1] == [f"pixel deviation {std}: {tail}"]
    assert choose(images, std=[0.3, 0.3])[1] == [f"pixel mean {mean}: {tail}"]
    assert choose(images, mean=[0.3, 0.3], std=[0.3, 0.3])[1] == []
    meta = {"settings": {"mean": [0.25, 0.5], "std": [0.125, 0.25]}, "pixels": "uint16"}
    encoder = {"path": str(save_checkpoint(tmp_path, 1, {}, meta))}
    assert choose(images, encoder=encoder)[1] == ["note: pixel mean and deviation are those of the encoder"]
    found, remarks = choose(images, encoder=encoder, mean=[0.3, 0.3])
    assert found == ([0.3, 0.3], [0.125, 0.25]) and remarks == ["note: pixel deviation is that of the encoder"]


# ------------------------------------------------------------------------------------------ marks of missing pixels


def measured(folder, images, dtype="float32"):
    for i, array in enumerate(images):
        np.save(folder / f"{i}.npy", array.astype(dtype))
    return measure_statistics(open_images("folder", folder, in_chans=images.shape[-1]))


@pytest.mark.parametrize("fill", [-9999.0, -3.4e38, 1e20])
def test_a_mark_of_missing_pixels_is_named_with_its_number(tmp_path, fill):
    images = np.random.default_rng(0).random((16, 40, 40, 2))
    images[3:5, :5, :5, 1] = fill
    own = measured(tmp_path, images)
    (warning,) = own.fill_values
    others = images[..., 1][images[..., 1] != fill]
    value = f"{float(np.float32(fill)):.10g}"
    assert f"50 of 25600 measured pixels of channel 1 (counted from 0) are {value}, all others lie between" in warning
    assert f"between {others.min():.6g} and {others.max():.6g}. If the value marks missing pixels" in warning
    assert own.statistics[1][1] > 100  # as before: the run goes on with what was measured


def test_the_warning_is_in_the_remarks_of_a_run(tmp_path):
    images = np.random.default_rng(0).random((4, 8, 8, 1))
    images[:, 0, 0] = -9999
    measured(tmp_path, images)
    _, remarks = choose(open_images("folder", tmp_path, in_chans=1))
    assert len(remarks) == 2 and "4 of 256 measured pixels of channel 0" in remarks[1]


def spots(rng):
    """Dim background and few blurred spots, of which the brightest are cut off at the end of the range."""
    images = rng.normal(0.01, 0.002, (16, 40, 40, 1)).clip(0)
    rows, columns = np.mgrid[:40, :40]
    for image in images:
        row, column = rng.integers(5, 35, 2)
        image[..., 0] += 5 * np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / 4)
    return images.clip(0, 1)


def collimated(rng):
    """A part of each image is zero; the other values begin beside it."""
    images = 0.05 + 0.9 * rng.random((16, 40, 40, 1))
    images[:, :, 28:] = 0
    return images


def sparse(rng):
    """A background that is exactly zero, and some beads of nearly the same brightness."""
    images = np.zeros((16, 40, 40, 1))
    images[:, 10:14, 10:14] = 0.9 + 0.05 * rng.random((16, 4, 4, 1))
    return images


def one_peak(rng):
    """Values of one pixel far above all others."""
    images = 0.01 * rng.random((16, 40, 40, 1))
    images[3, 5, 5] = 1
    return images


INNOCENT = {
    "saturated": lambda rng: (1.5 * rng.random((16, 40, 40, 1))).clip(0, 1),
    "blurred spots": spots,
    "collimated": collimated,
    "sparse": sparse,
    "one peak": one_peak,
    "two values": lambda rng: (rng.random((16, 40, 40, 1)) < 0.2).astype(float),
    "steps": lambda rng: np.floor(4 * rng.random((16, 40, 40, 1))) / 4,
}


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("kind", INNOCENT)
def test_values_of_other_images_are_no_marks_of_missing_pixels(tmp_path, kind, dtype):
    images = INNOCENT[kind](np.random.default_rng(0))
    if dtype == "uint16":
        images = images * 65535
    assert measured(tmp_path, images, dtype).fill_values == []


def test_every_value_of_8_bits_may_be_a_brightness(tmp_path):
    """Ink on paper."""
    images = np.random.default_rng(0).integers(250, 256, (16, 40, 40, 1))
    images[:, 3] = 0
    assert measured(tmp_path, images, "uint8").fill_values == []
    assert measured(tmp_path, images, "uint16").fill_values != []
