"""Invalid pixels from files to batches: what marks them, crops, normalisation and statistics."""

import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from tests.util.data.test_pixel_format import (
    FORMS,
    TRANSFORMS,
    UNIT,
    antialias_matrix,
    assert_loads,
    pixels,
    save_arrays,
    tensor,
    write_tiff,
)
from util.data.datasets import AddressedDataset
from util.data.images import FolderImages, ImageError, Reading
from util.data.invalid_pixels import InvalidPixels, transform_valid
from util.data.open import open_images
from util.data.pixel_format import PixelFormat, declares_invalid, nodata_value
from util.data.statistics import IMAGENET, measure_statistics, statistics_of
from util.data.transforms import Normalize, resize

pytest.importorskip("tifffile")

SIZE = (40, 52)
CODES = {"uint8": 7, "uint16": 65535, "float32": -3.4e38}
TEN_BANDS = (0, 1, 2, 3, 4, 5, 6, 8, 11, 12)


def clouds(channels=1, seed=0, size=SIZE):
    """A mask [H, W, C], True in a third of the pixels: a large cloud, the border of a scan, and a dead column."""
    rng = np.random.default_rng(seed)
    height, width = size
    mask = np.zeros((*size, channels), bool)
    for c in range(channels):
        top = rng.integers(0, height // 4)
        left = rng.integers(0, width // 4)
        bottom = top + int(0.6 * height)
        right = left + int(0.45 * width)
        mask[top:bottom, left:right, c] = True
        mask[:, -2 - c :, c] = True
        mask[:, int(0.8 * width), c] = True
    assert 0.25 < mask.mean() < 0.4
    return mask


def marked(array, mask):
    """The image as it is to be read: floats, NaN where it is invalid."""
    return np.where(mask, np.nan, array.astype(np.float32))


# --------------------------------------------------------------------------------------------- what marks them in files


@pytest.mark.parametrize("dtype", UNIT)
def test_nodata_marks_values_of_single_bands(tmp_path, dtype):
    mask = clouds(5)
    array = pixels(5, dtype)
    array[array == CODES[dtype]] += 1
    code = array.copy()
    code[mask] = CODES[dtype]
    save_arrays(tmp_path, code, array)
    images = open_images("folder", tmp_path, in_chans=5, invalid=InvalidPixels(CODES[dtype]))
    assert images.pixel_format == PixelFormat(5, dtype, has_invalid=True)
    assert_loads(images, 0, marked(array, mask))
    assert_loads(images, 1, array)


def test_nan_of_floats_is_declared(tmp_path):
    mask = clouds(5)
    array = marked(pixels(5, "float32"), mask)
    save_arrays(tmp_path, array)
    with pytest.raises(ImageError, match="NaN or infinite values are in band 0, 1, 2, .*see --nodata"):
        open_images("folder", tmp_path, in_chans=5)
    for value in (-9999.0, np.nan):
        declared = InvalidPixels(value)
        images = open_images("folder", tmp_path, in_chans=5, invalid=declared)
        assert_loads(images, 0, array)
    array[0, 0, 2] = np.inf
    save_arrays(tmp_path, array)
    with pytest.raises(ImageError, match="NaN or infinite values are in band 2"):
        open_images("folder", tmp_path, in_chans=5, invalid=declared)


@pytest.mark.parametrize("place", [0, 2, 5, -1])
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_band_is_no_channel(tmp_path, form, place):
    mask = clouds()
    array = pixels(5, "uint16")
    band = np.where(mask, 0, 1 + array[:, :, :1]).astype(np.uint16)
    before, after = np.split(array, [place % 6], axis=2)
    file = np.concatenate([before, band, after], axis=2)
    ending, write = FORMS[form]
    write(tmp_path / f"0{ending}", file)
    images = open_images("folder", tmp_path, in_chans=5, invalid=InvalidPixels(mask_band=place))
    assert images.pixel_format == PixelFormat(5, "uint16", has_invalid=True)
    assert_loads(images, 0, marked(array, mask))


@pytest.mark.parametrize("channels", [1, 3])
def test_alpha_is_a_mask_band(tmp_path, channels):
    mask = clouds()
    array = pixels(channels, "uint8")
    alpha = np.where(mask, 0, 255).astype(np.uint8)
    with_alpha = np.concatenate([array, alpha], axis=2)
    Image.fromarray(with_alpha).save(tmp_path / "0.png")
    images = open_images("folder", tmp_path, in_chans=channels, invalid=InvalidPixels(mask_band=channels))
    assert_loads(images, 0, marked(array, mask))


@pytest.mark.parametrize("form", FORMS)
def test_bands_that_a_file_lacks_are_invalid(tmp_path, form):
    complete = pixels(13, "uint16")
    ending, write = FORMS[form]
    write(tmp_path / f"0{ending}", complete)
    write(tmp_path / f"1{ending}", np.ascontiguousarray(complete[:, :, TEN_BANDS]))
    images = open_images("folder", tmp_path, in_chans=13, invalid=InvalidPixels(bands=(TEN_BANDS,)))
    expected = np.full(complete.shape, np.nan, np.float32)
    expected[:, :, TEN_BANDS] = complete[:, :, TEN_BANDS]
    assert images.load(0)[0].dtype == np.uint16
    assert_loads(images, 1, expected)
    if form != "without options":  # without the flag nothing says which axis has the bands
        with pytest.raises(ImageError, match="has 10 channels of uint16, .* takes 13 .*--in_chans 10 .*--bands"):
            open_images("folder", tmp_path, in_chans=13)


OF_THREE_OR_ONE = [(form, (0, 1, 2)) for form in FORMS]
OF_THREE_OR_ONE += [("npy", (2,)), ("contiguous", (2,))]


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize(("form", "bands"), OF_THREE_OR_ONE)
def test_files_of_three_bands_or_of_one_are_taken_as_they_are(tmp_path, form, bands, dtype):
    """Elsewhere three bands become RGB of 8 bits, and so does a grey image if three are wanted."""
    complete = pixels(4, dtype)
    ending, write = FORMS[form]
    write(tmp_path / f"0{ending}", complete)
    write(tmp_path / f"1{ending}", np.ascontiguousarray(complete[:, :, bands]))
    declared = InvalidPixels(bands=((0, 1, 2), (2,)))
    images = open_images("folder", tmp_path, in_chans=4, invalid=declared)
    expected = np.full(complete.shape, np.nan, np.float32)
    expected[:, :, bands] = complete[:, :, bands]
    assert_loads(images, 0, complete)
    assert_loads(images, 1, expected)


def test_all_marks_together_in_each_source(tmp_path):
    """A file that lacks a band, with a mask band and a code of its own, in a folder and a tar."""
    array = pixels(3, "uint16")
    mask = clouds(3)
    array[array == 5] = 6
    code = array.copy()
    code[mask] = 5
    cloud = clouds(seed=4)
    file = np.concatenate([~cloud, code], axis=2, dtype=np.uint16)
    expected = np.full((*SIZE, 4), np.nan, np.float32)
    expected[:, :, [3, 0, 1]] = marked(array, mask | cloud)
    invalid = InvalidPixels(5.0, mask_band=0, bands=((3, 0, 1), (1, 2)))
    folder = tmp_path / "folder"
    folder.mkdir()
    write_tiff(folder / "0.tif", file)
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        tar.add(folder / "0.tif", "0.tif")
    for path in (folder, tmp_path / "images.tar"):
        images = open_images("folder", path, in_chans=4, invalid=invalid)
        assert_loads(images, 0, expected)


@pytest.mark.parametrize(
    ("invalid", "flag"),
    [
        (InvalidPixels(70_000.0), "--nodata 70000"),
        (InvalidPixels(float("nan")), "--nodata nan"),
        (InvalidPixels(0.5), "--nodata 0.5"),
        (InvalidPixels(mask_band=6), "--mask_band"),
        (InvalidPixels(mask_band=2), "--mask_band"),  # a file of 5 bands has none
        (InvalidPixels(bands=((0, 5),)), "--bands 0 5"),
        (InvalidPixels(bands=((0, 0),)), "--bands 0 0"),
        (InvalidPixels(bands=((0, 1), (2, 3))), "--bands 2 3"),
        (InvalidPixels(bands=((4, 3, 2, 1, 0),)), "--bands 4 3 2 1 0"),
        (InvalidPixels(mask_band=2, bands=((0, 1),)), "--mask_band"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path, invalid, flag):
    save_arrays(tmp_path, pixels(5, "uint16"))
    with pytest.raises(ValueError, match=flag):
        open_images("folder", tmp_path, in_chans=5, invalid=invalid)


def test_a_file_of_another_number_of_bands_or_type_is_named(tmp_path):
    array = pixels(5, "uint16")
    save_arrays(tmp_path, array, array, array, array[:, :, :4], pixels(5, "float32"))
    declared = InvalidPixels(0.0, bands=((0, 1, 2),))
    with pytest.raises(ImageError, match=r"3\.npy"):
        open_images("folder", tmp_path, in_chans=5, invalid=declared)
    images = FolderImages(tmp_path, reading=Reading(5, invalid=declared))
    images.num_checked = 1
    images.check()
    for i in (3, 4):
        with pytest.raises(ImageError, match=rf"{i}\.npy"):
            images.load(i)


def test_values_of_nodata():
    assert nodata_value("-9999") == -9999.0
    assert nodata_value("NaN") == "nan"
    for word in ("inf", "none"):
        with pytest.raises(ValueError):
            nodata_value(word)
    settings = {"nodata": "nan", "mask_band": 0, "bands": [[0, 1]]}
    found = InvalidPixels.from_settings(settings)
    assert np.isnan(found.nodata)
    assert found.mask_band == 0
    assert found.bands == ((0, 1),)
    assert not declares_invalid({"nodata": None, "bands": []})
    assert declares_invalid({"mask_band": 0})


# ---------------------------------------------------------------------------------------------------------------- crops


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("shared", [True, False], ids=["clouds", "of each band"])
def test_what_lies_under_invalid_pixels_changes_no_crop(kind, shared, reference):
    transform = TRANSFORMS[kind](reference=reference)
    mask = clouds(1 if shared else 5)
    array = pixels(5, "uint16")
    other = np.where(mask, 0, array)
    invalid = InvalidPixels(mask_band=5)
    imgs = []
    for values in (array, other):
        if shared:
            file = np.concatenate([values, ~mask], axis=2, dtype=np.uint16)
            imgs.append(invalid.mark(file, 5))
        else:
            imgs.append(marked(values, mask))
    for index in range(4):
        crop, crop_of_other = [transform_valid(transform, tensor(img), 2, index) for img in imgs]
        assert crop.shape == (5, 24, 32)
        assert crop.dtype == torch.float32
        assert torch.equal(crop.nan_to_num(-1), crop_of_other.nan_to_num(-1))
        share = crop.isnan().float().mean()
        assert 0 < share < 0.9


def test_pixels_of_a_crop_are_means_of_valid_pixels():
    """The resize in float64, by the weights of the interpolation on valid pixels, divided by their sum."""
    mask = clouds(5)
    array = pixels(5, "uint16")
    rows = antialias_matrix(40, 23)
    columns = antialias_matrix(52, 31)

    def squash(img, epoch, index):
        return resize(img, (23, 31))

    found = transform_valid(squash, tensor(marked(array, mask)), 0, 0).numpy()
    for c in range(5):
        for i in range(23):
            for j in range(31):
                weights = np.outer(rows[i], columns[j]) * ~mask[:, :, c]
                share = weights.sum()
                if abs(share - 0.5) < 1e-4:
                    continue
                if share < 0.5:
                    assert np.isnan(found[c, i, j])
                    continue
                mean = (weights * array[:, :, c]).sum() / share
                assert found[c, i, j] == pytest.approx(mean, rel=1e-4, abs=0.5)


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("dtype", UNIT)
def test_images_without_invalid_pixels_give_the_crops_of_a_run_without_flags(tmp_path, dtype, kind):
    array = pixels(5, dtype)
    array[array == CODES[dtype]] += 1
    folder = save_arrays(tmp_path, array)
    transform = TRANSFORMS[kind]()
    plain = AddressedDataset(open_images("folder", folder, in_chans=5), transform)
    images = open_images("folder", folder, in_chans=5, invalid=InvalidPixels(CODES[dtype]))
    declared = AddressedDataset(images, transform)
    for index in range(3):
        expected, *_ = plain[index, 0]
        found, *_ = declared[index, 0]
        assert found.dtype == torch.float32
        assert torch.equal(found, expected.float())


# ------------------------------------------------------------------------------------------- normalisation, statistics


@pytest.mark.parametrize("dtype", UNIT)
def test_the_model_gets_the_mean_in_place_of_invalid_pixels(dtype):
    mean = [0.1, 0.3, 0.5, 0.7, 0.9]
    std = [0.05, 0.1, 0.2, 0.3, 0.4]
    mask = clouds(5)
    array = pixels(5, dtype)
    imgs = tensor(marked(array, mask))[None]
    normalize = Normalize(mean, std, PixelFormat(5, dtype, has_invalid=True))
    plain = Normalize(mean, std, PixelFormat(5, dtype))
    invalid = tensor(mask)[None]
    expected = torch.where(invalid, 0, plain(tensor(array)[None]))
    assert torch.equal(normalize(imgs), expected)
    unfilled = normalize(imgs, fill=False)
    assert torch.equal(unfilled.isnan(), invalid)
    assert torch.equal(unfilled.nan_to_num(0), expected)


@pytest.mark.parametrize("dtype", UNIT)
def test_statistics_equal_a_loop_over_valid_pixels(tmp_path, dtype):
    arrays = []
    masks = []
    for i in range(5):
        size = (44, 52 + i)
        arrays.append(pixels(3, dtype, size, seed=i))
        masks.append(clouds(3, seed=i, size=size))
    masks[3][:, :, 1] = True  # a band without valid pixels
    masks[4][:] = False
    for array, mask in zip(arrays, masks, strict=True):
        array[array == CODES[dtype]] += 1
        array[mask] = CODES[dtype]
    save_arrays(tmp_path, *arrays)
    images = open_images("folder", tmp_path, invalid=InvalidPixels(CODES[dtype]))
    (mean, std), (remark,) = measure_statistics(images)
    assert "measured on 5 images" in remark
    for c in range(3):
        values = []
        for array, mask in zip(arrays, masks, strict=True):
            band = array[:, :, c].astype(float)
            values += band[~mask[:, :, c]].tolist()
        assert mean[c] * UNIT[dtype] == pytest.approx(np.mean(values), rel=1e-12)
        assert std[c] * UNIT[dtype] == pytest.approx(np.std(values), rel=1e-9)


@pytest.mark.parametrize(("nodata", "is_found"), [(0.0, True), (65535.0, False)])
def test_a_mark_that_no_measured_image_has_is_said(tmp_path, nodata, is_found):
    """Black borders whose mark is 0."""
    arrays = [pixels(4, "uint16", seed=i).clip(1, 65534) for i in range(3)]
    arrays[1][:3] = 0
    save_arrays(tmp_path, *arrays)
    images = open_images("folder", tmp_path, in_chans=4, invalid=InvalidPixels(nodata))
    _, (measured, *others) = statistics_of((None, None), None, images)
    assert "measured on 3 images" in measured
    assert (others == ["note: --nodata 65535 marks no pixel of the 3 measured images"]) != is_found
    assert not (is_found and others)


@pytest.mark.parametrize("declared", [None, InvalidPixels(mask_band=3), InvalidPixels(0.0)])
def test_a_nodata_tag_that_no_flag_declares_is_said(tmp_path, declared):
    tifffile = pytest.importorskip("tifffile")
    tag = (42113, "s", 0, "7", True)
    tifffile.imwrite(tmp_path / "0.tif", pixels(4, "uint16"), photometric="minisblack", extratags=[tag])
    in_chans = 4
    if declared and declared.mask_band:
        in_chans = 3
    notes = open_images("folder", tmp_path, in_chans=in_chans, invalid=declared).notes
    assert ["nodata 7" in note and "--nodata" in note for note in notes] == [True]
    assert not open_images("folder", tmp_path, in_chans=4, invalid=InvalidPixels(7.0)).notes


def test_a_band_without_valid_pixels_has_no_statistics(tmp_path):
    arrays = [pixels(3, "uint16", seed=i) for i in range(3)]
    for array in arrays:
        array[:, :, 2] = 0
    images = open_images("folder", save_arrays(tmp_path, *arrays), invalid=InvalidPixels(0.0))
    with pytest.raises(ValueError, match="channel 2 .counted from 0. has no valid pixel in 3 images"):
        measure_statistics(images)


def test_rgb_with_invalid_pixels_has_imagenets_statistics(tmp_path):
    save_arrays(tmp_path, pixels(3, "uint8"))
    images = open_images("folder", tmp_path, invalid=InvalidPixels(0.0))
    assert statistics_of((None, None), None, images) == (IMAGENET, [])
