"""Pixel type, mean and deviation: which ones a trained model has, and which ones a run takes."""

import numpy as np
import pytest
import torch

from tests.util.data.test_pixel_format import choose, pixels
from util.data.datasets import open_images
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import complete_settings, measure_statistics, normalizer
from util.run.checkpoint import pixel_settings, save_checkpoint

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FLOATS = PixelFormat(2, "float32")


def test_what_a_checkpoint_says_about_its_images():
    assert pixel_settings({}) == {"pixels": None, "mean": None, "std": None}
    older = {"settings": {"model": "mae_vit_base_patch16"}}
    assert pixel_settings(older) == {"pixels": "uint8", "mean": None, "std": None}
    newer = {"settings": {"model": "m", "mean": [1.0], "std": [2.0]}, "pixels": "float32"}
    assert pixel_settings(newer) == {"pixels": "float32", "mean": [1.0], "std": [2.0]}


def test_a_model_s_images_are_normalised_by_what_is_known():
    imgs = torch.rand(1, 3, 2, 2).mul(255).to(torch.uint8)
    expected = (imgs.double() / 255 - torch.tensor(IMAGENET[0]).view(3, 1, 1)) / torch.tensor(IMAGENET[1]).view(3, 1, 1)
    torch.testing.assert_close(normalizer(pixel_settings({}), RGB8)(imgs), expected.float())
    own = {"pixels": None, "mean": [100.0, 0.0], "std": [50.0, 2.0]}
    values = torch.tensor([200.0, 3.0]).view(1, 2, 1, 1)
    assert normalizer(own, FLOATS)(values).flatten().tolist() == [2.0, 1.5]  # their type is unknown: the data's
    with pytest.raises(ValueError, match="was trained on pixels of uint8, but the images have 2 channels of float32"):
        normalizer(own | {"pixels": "uint8"}, FLOATS)
    for format_ in (FLOATS, PixelFormat(5, "uint16"), PixelFormat(3, "float32")):
        with pytest.raises(ValueError, match=f"deviation of its {format_.channels} channels: give --mean and --std"):
            normalizer(pixel_settings({}), format_)


def test_statistics_that_a_file_lacks_are_measured(tmp_path, photos):
    images = open_arrays(tmp_path / "data")
    found, (remark,) = complete_settings(pixel_settings({}), images)
    own, number = measure_statistics(images)
    assert found == {"pixels": None, "mean": own[0], "std": own[1]}
    assert remark.endswith(f"measured on {number} images, 2 channels of uint16") and f"{own[0][0]:.6g}" in remark
    given = {"pixels": "uint16", "mean": [0.1, 0.2], "std": [0.3, 0.4]}
    assert complete_settings(given, images) == (given, [])
    rgb = {"pixels": None, "mean": IMAGENET[0], "std": IMAGENET[1]}
    assert complete_settings(pixel_settings({}), open_images("folder", photos)) == (rgb, [])


def open_arrays(folder, dtype="uint16"):
    folder.mkdir()
    for i in range(3):
        np.save(folder / f"{i}.npy", pixels(2, dtype, seed=i))
    return open_images("folder", folder, in_chans=2)


@pytest.mark.parametrize(("pixels_of_encoder", "dtype", "fits"), [(None, "uint16", True), (None, "float32", False)])
def test_an_encoder_of_unknown_pixels_fits_integers(tmp_path, pixels_of_encoder, dtype, fits):
    images = open_arrays(tmp_path / "data", dtype)
    stored = [0.25, 0.5], [0.125, 0.25]
    path = save_checkpoint(tmp_path, 1, {}, {"settings": {"mean": stored[0], "std": stored[1]}})
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
