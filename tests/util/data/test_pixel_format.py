"""Images of any channels and depth: files, crops, normalisation and statistics."""

import io
import pickle
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from prmim import MaskCollator, TokenCounts, TokenOrderSampler
from tests.conftest import write_photo
from util.data import pixel_format
from util.data.datasets import AddressedDataset, batches, open_images
from util.data.images import FolderImages, ImageError
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import choose_statistics, measure_statistics
from util.data.transforms import Normalize, PaddedCropFlip, RandomResizedCropFlip, ResizeCenterCrop, Squash, resize
from util.run.checkpoint import CheckpointInfo, read_info

tifffile = pytest.importorskip("tifffile")

U16, F32 = PixelFormat(5, "uint16"), PixelFormat(5, "float32")


def pixels(channels, dtype, size=(40, 52), seed=0):
    """Smooth random images, so that crops have something to show; floats also lie outside [0, 1]."""
    coarse = torch.from_numpy(np.random.default_rng(seed).random((1, channels, 6, 7)))
    smooth = F.interpolate(coarse, size=size, mode="bilinear")[0].permute(1, 2, 0).numpy()
    if dtype == "float32":
        return (300 * smooth - 100).astype(np.float32)
    return (smooth * np.iinfo(dtype).max).round().astype(dtype)


def write_tiff(path, array, **options):
    if array.shape[2] == 1:
        return tifffile.imwrite(path, array[:, :, 0], **options)
    return tifffile.imwrite(path, array, photometric="minisblack", planarconfig="contig", **options)


def stored(array, name):
    """Bytes of an array [H, W, C] in one of the forms that users have."""
    buffer = io.BytesIO()
    if name == "npy":
        np.save(buffer, array)
    elif name == "big-endian npy":
        np.save(buffer, array.astype(array.dtype.newbyteorder(">")))
    elif name == "Fortran npy":
        np.save(buffer, np.asfortranarray(array))
    elif name == "planes":
        planes = np.moveaxis(array, -1, 0)
        tifffile.imwrite(buffer, planes, photometric="minisblack", planarconfig="separate")
    elif name == "pages":
        tifffile.imwrite(buffer, np.moveaxis(array, -1, 0), photometric="minisblack")
    elif name == "without options":
        tifffile.imwrite(buffer, array)
    elif name == "BigTIFF":
        write_tiff(buffer, array, bigtiff=True)
    else:
        write_tiff(buffer, array, compression="zlib", byteorder=">" if name == "big-endian" else "<")
    return buffer.getvalue()


ARRAYS = ("npy", "big-endian npy", "Fortran npy")
FORMS = (*ARRAYS, "contiguous", "big-endian", "planes", "pages", "without options", "BigTIFF")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_all_bands_are_read_as_they_are(tmp_path, dtype, form):
    array = pixels(5, dtype)
    (tmp_path / ("0.npy" if form in ARRAYS else "0.tif")).write_bytes(stored(array, form))
    images = open_images("folder", tmp_path, in_chans=5)
    assert images.pixel_format == PixelFormat(5, dtype)
    found, label = images.load(0)
    assert found.dtype == array.dtype and found.dtype.isnative and label == 0
    assert np.array_equal(found, array) and found.flags.c_contiguous and found.flags.writeable


GREY16 = pixels(1, "uint16")[:, :, 0]
PICTURES = {  # {name: (picture, channels of the file, its pixels)}
    "grey": lambda: (Image.fromarray(GREY16 // 257).convert("L"), 1),
    "grey of 16 bits": lambda: (Image.fromarray(GREY16), 1),
    "grey with alpha": lambda: (Image.fromarray(pixels(2, "uint8"), "LA"), 2),
    "RGB with alpha": lambda: (Image.fromarray(pixels(4, "uint8")), 4),
    "two colours": lambda: (Image.fromarray(GREY16 > 2**15), 1),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures_keep_their_channels_unless_three_are_wanted(tmp_path, kind):
    picture, channels = PICTURES[kind]()
    picture.save(tmp_path / "0.png")
    deep = kind == "grey of 16 bits"
    images = open_images("folder", tmp_path, in_chans=channels)
    assert images.pixel_format == PixelFormat(channels, "uint16" if deep else "uint8")
    expected = GREY16 if deep else np.asarray(picture).astype(np.uint8) * (255 if kind == "two colours" else 1)
    assert np.array_equal(images.load(0)[0], expected.reshape(40, 52, channels))
    rgb = open_images("folder", tmp_path)
    as_rgb = np.rint(GREY16 / 257)[:, :, None] if deep else np.asarray(picture.convert("RGB"))
    assert rgb.pixel_format == RGB8 and np.array_equal(rgb.load(0)[0], np.broadcast_to(as_rgb, (40, 52, 3)))
    lost = f"note: {str(tmp_path / '0.png')!r} has 16 bits, but with 3 channels images become RGB of 8 bits"
    assert rgb.notes == ([lost] if deep else [])


def test_three_bands_keep_their_depth_where_pillow_reads_nothing(tmp_path):
    for i, dtype in enumerate(("uint16", "float32")):
        folder = tmp_path / dtype
        folder.mkdir()
        np.save(folder / "0.npy", pixels(3, dtype, seed=i))
        images = open_images("folder", folder)
        assert images.pixel_format == PixelFormat(3, dtype)
        assert np.array_equal(images.load(0)[0], pixels(3, dtype, seed=i))
    write_tiff(tmp_path / "0.tif", pixels(3, "float32"))
    assert pixel_format.read_format(str(tmp_path / "0.tif")) == PixelFormat(3, "float32")


def test_two_dimensions_are_one_channel(tmp_path):
    np.save(tmp_path / "0.npy", GREY16)
    images = open_images("folder", tmp_path, in_chans=1)
    assert np.array_equal(images.load(0)[0], GREY16[:, :, None])


def test_tars_hold_the_same_images_as_the_folder(tmp_path):
    for i in range(4):
        (tmp_path / "train" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "train" / "ab"[i % 2] / f"{i}.npy", pixels(5, "uint16", seed=i))
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        for name in "ab":
            tar.add(tmp_path / "train" / name, name)
    folder = open_images("folder", tmp_path, in_chans=5)
    tars = open_images("folder", tmp_path / "train.tar", in_chans=5)
    assert tars.fingerprint() == folder.fingerprint() and tars.pixel_format == folder.pixel_format == U16
    for images in (tars, pickle.loads(pickle.dumps(tars))):  # as a worker gets it
        assert all(np.array_equal(images.load(i)[0], folder.load(i)[0]) for i in range(4))


def test_an_array_beside_a_picture_of_the_same_name_is_no_image(tmp_path):
    """Features are often stored so, in folders and in WebDataset samples."""
    (tmp_path / "train").mkdir()
    write_photo(tmp_path / "train" / "0.png")
    np.save(tmp_path / "train" / "0.npy", np.zeros((7, 7)))
    np.save(tmp_path / "train" / "1.npy", pixels(3, "uint8"))
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        tar.add(tmp_path / "train", ".")
    for data_path in (tmp_path / "train", tmp_path / "train.tar"):
        assert sorted(open_images("folder", data_path).names.tolist()) == [b"0.png", b"1.npy"]


# ----------------------------------------------------------------------------------------------------------- bad input


def refused(folder, **options):
    with pytest.raises(ImageError) as error:
        open_images("folder", folder, max_bad_fraction=0.01, **options)
    return str(error.value)


def test_files_of_other_channels_are_named_with_the_flag_that_fits(tmp_path):
    write_tiff(tmp_path / "0.tif", pixels(5, "uint16"))
    message = f"'{tmp_path / '0.tif'}' has 5 channels of uint16, but the model takes"
    assert refused(tmp_path, in_chans=4) == f"{message} 4 channels (--in_chans in training)"
    assert refused(tmp_path) == f"{message} 3 channels (--in_chans in training)"
    (tmp_path / "0.tif").unlink()
    write_photo(tmp_path / "0.jpg")
    assert refused(tmp_path, in_chans=5).endswith(
        "has 3 channels of uint8, but the model takes 5 channels (--in_chans in training)"
    )


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_an_array_whose_rows_became_pages_is_named_with_its_channels(tmp_path, dtype):
    """tifffile writes [H, W, C] as H pages of [W, C]. Its height is no number of channels, whatever is asked for."""
    array = pixels(5, dtype)
    tifffile.imwrite(tmp_path / "0.tif", array)
    for in_chans in (1, 3, 4):
        message = refused(tmp_path, in_chans=in_chans)
        assert "it has 40 pages of 52 x 5 values: save each image in one page" in message
        rows = "or give --in_chans 5 if each page is a row of an array [H, W, C]"
        assert message.endswith(f"{rows}, or give --in_chans 40 if each page is a channel")
    assert np.array_equal(open_images("folder", tmp_path, in_chans=5).load(0)[0], array)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_pages_are_no_rgb_image(tmp_path, dtype):
    (tmp_path / "0.tif").write_bytes(stored(pixels(5, dtype), "pages"))
    message = refused(tmp_path)
    assert "it has 5 pages of 40 x 52 values: save each image in one page" in message
    assert message.endswith("or give --in_chans 5 if each page is a channel")
    assert refused(tmp_path, in_chans=4).endswith(
        f"has 5 channels of {dtype}, but the model takes 4 channels (--in_chans in training)"
    )
    (tmp_path / "0.tif").write_bytes(stored(pixels(3, dtype), "pages"))
    advice = "save each image in one page, such as tifffile.imwrite(path, array, photometric='rgb')"
    assert refused(tmp_path).endswith(f"it has 3 pages of 40 x 52 values: {advice}")
    tifffile.imwrite(tmp_path / "0.tif", pixels(3, dtype), photometric="rgb")  # the advice
    assert open_images("folder", tmp_path).pixel_format == (PixelFormat(3, "float32") if dtype == "float32" else RGB8)
    tifffile.imwrite(tmp_path / "0.tif", np.stack([pixels(3, "uint8")] * 2), photometric="rgb")
    assert "it has 2 pages of 3 channels: save each page as a file of its own" in refused(tmp_path)


def test_pages_that_the_check_has_not_seen_are_no_rgb_image(tmp_path):
    """The check at the start reads a sample of the headers. The same error comes when the image is loaded."""
    for name in ("0", "2"):
        Image.fromarray(pixels(3, "uint8")).save(tmp_path / f"{name}.tif")
    (tmp_path / "1.tif").write_bytes(stored(pixels(5, "uint8"), "pages"))
    images = FolderImages(tmp_path)
    images.num_checked = 2
    images.check()
    assert np.array_equal(images.load(0)[0], pixels(3, "uint8"))
    with pytest.raises(ImageError, match="1.tif' cannot be decoded: it has 5 pages of 40 x 52 values"):
        images.load(1)


def test_thumbnails_overviews_and_masks_are_no_pages(tmp_path):
    array, small = pixels(3, "uint8"), pixels(3, "uint8", size=(10, 13))
    for flags in (dict(subfiletype=1), dict()):
        with tifffile.TiffWriter(tmp_path / "0.tif") as file:
            file.write(array, photometric="rgb", metadata=None)
            file.write(small, photometric="rgb", metadata=None, **flags)
        images = open_images("folder", tmp_path)
        assert images.pixel_format == RGB8 and np.array_equal(images.load(0)[0], array)
    with tifffile.TiffWriter(tmp_path / "0.tif") as file:
        file.write(pixels(3, "uint16"), photometric="rgb", metadata=None)
        file.write(small, photometric="rgb", metadata=None, subfiletype=1)
    assert "has 16 bits and 2 pages, but with 3 channels" in open_images("folder", tmp_path).notes[0]
    rest = [Image.fromarray(small), Image.fromarray(array[:, :, 0] > 128)]
    for picture, kind in zip(rest, (1, 4), strict=True):
        picture.encoderinfo = {"tiffinfo": {254: kind}}
    Image.fromarray(array).save(tmp_path / "0.tif", save_all=True, append_images=rest)
    with Image.open(tmp_path / "0.tif") as file:
        file.seek(2)
        if 254 not in file.tag_v2:
            pytest.skip("this Pillow writes no kinds of pages")
        assert file.size == (52, 40) and file.tag_v2[254] == 4
    images = open_images("folder", tmp_path)
    assert np.array_equal(images.load(0)[0], array) and "has 3 pages, but" in images.notes[0]


def test_an_image_of_one_channel_and_three_axes_is_no_stack(tmp_path):
    tifffile.imwrite(tmp_path / "0.tif", pixels(1, "uint16"))
    assert refused(tmp_path, in_chans=5).endswith(
        "has 1 channel of uint16, but the model takes 5 channels (--in_chans in training)"
    )
    assert np.array_equal(open_images("folder", tmp_path, in_chans=1).load(0)[0], pixels(1, "uint16"))


@pytest.mark.parametrize("other", [pixels(5, "float32"), pixels(4, "uint16")], ids=["depth", "channels"])
def test_mixed_formats_name_two_files(tmp_path, other):
    for i in range(3):
        write_tiff(tmp_path / f"{i}.tif", pixels(5, "uint16", seed=i))
    np.save(tmp_path / "7.npy", other)
    last, first = (repr(str(tmp_path / name)) for name in ("7.npy", "0.tif"))
    if other.shape[2] == 5:
        expected = f"{first} has 5 channels of uint16, but {last} has 5 channels of float32: all images need one format"
    else:
        expected = f"{last} has 4 channels of uint16, but the model takes 5 channels (--in_chans in training), as "
        expected += f"{first} has: a band is missing"
    assert refused(tmp_path, in_chans=5) == expected


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_floats_that_are_not_finite_name_the_bands(tmp_path, value):
    for i in range(3):
        array = pixels(5, "float32", seed=i)
        array[3, 4, [1, 3]] = value if i == 1 else 0
        np.save(tmp_path / f"{i}.npy", array)
    message = refused(tmp_path, in_chans=5)
    assert repr(str(tmp_path / "1.npy")) in message and "NaN or infinite values are in band 1, 3 (counted" in message


FIRST = "its shape [5, 40, 52] is no [H, W, C]: save numpy.moveaxis("
OTHER = [(np.moveaxis(pixels(5, "uint16"), -1, 0), in_chans, FIRST) for in_chans in (3, 5)]
for kind in ("int64", "float64", "bool", "object", "int16", "complex64"):
    message = f"its values are {kind}; only uint8, uint16, float32 are read: convert it"
    OTHER.append((pixels(5, "uint8").astype(kind), 5, message))
for shape in ((4,), (2, 3, 4, 5), (0, 4, 5)):
    OTHER.append((np.zeros(shape, np.uint8), 5, f"its shape is {list(shape)}; expected is [H, W] or [H, W, C]"))


@pytest.mark.parametrize(("array", "in_chans", "message"), OTHER, ids=[message[:30] for *_, message in OTHER])
def test_other_arrays_are_refused(tmp_path, array, in_chans, message):
    np.save(tmp_path / "0.npy", array, allow_pickle=True)
    assert message in refused(tmp_path, in_chans=in_chans)


def test_files_that_would_need_gigabytes_are_refused_by_their_header(tmp_path, monkeypatch):
    np.save(tmp_path / "0.npy", pixels(5, "uint8"))
    monkeypatch.setattr(pixel_format, "max_pixels", lambda: 40 * 52 - 1)
    monkeypatch.replace_in(pixel_format, "np.load", lambda *args, **options: pytest.fail("the pixels are read"))
    assert "52 x 40 pixels are more than" in refused(tmp_path, in_chans=5)


@pytest.mark.parametrize("in_chans", [3, 5])
def test_without_tifffile_the_message_says_what_to_install(tmp_path, monkeypatch, in_chans):
    write_tiff(tmp_path / "0.tif", pixels(5, "uint16"))
    monkeypatch.setattr(pixel_format, "tifffile", None)
    assert "pip install tifffile" in refused(tmp_path, in_chans=in_chans)


@pytest.mark.parametrize("name", ["0.npy", "0.tif"])
def test_damaged_files_are_named(tmp_path, name):
    data = stored(pixels(5, "uint16"), "npy" if name == "0.npy" else "contiguous")
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    images = FolderImages(tmp_path)
    images.pixel_format, images.in_chans = U16, 5
    with pytest.raises(ImageError, match=f"{name}' cannot be decoded"):
        images.load(0)


def test_an_image_of_another_format_is_unreadable(tmp_path):
    """One that the sample of headers has missed."""
    for i, array in enumerate((pixels(5, "uint16"), pixels(5, "float32"))):
        np.save(tmp_path / f"{i}.npy", array)
    images = FolderImages(tmp_path)
    images.pixel_format, images.in_chans = U16, 5
    images.load(0)
    with pytest.raises(ImageError, match="it has 5 channels of float32, other images have 5 channels of uint16"):
        images.load(1)


# -------------------------------------------------------------------------------------------------------------- crops

TRANSFORMS = {
    "resized": lambda **how: RandomResizedCropFlip((24, 32), seed=3, **how),
    "padded": lambda **how: PaddedCropFlip((24, 32), seed=3, **how),
    "center": lambda **how: ResizeCenterCrop((24, 32), **how),
    "squash": lambda **how: Squash((24, 32), **how),
}


def tensor(array):
    return torch.from_numpy(array).permute(2, 0, 1)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("channels", [1, 2, 4, 5, 12])
def test_crops_equal_those_of_rgb_channel_by_channel(kind, channels, reference):
    transform = TRANSFORMS[kind](reference=reference)
    for index in range(3):
        array = pixels(channels, "uint8", seed=index)
        crop = transform(tensor(array), 2, index)
        assert crop.shape == (channels, 24, 32) and crop.dtype == torch.uint8 and crop.is_contiguous()
        for c in range(channels):
            rgb = np.repeat(array[:, :, c : c + 1], 3, axis=2)
            assert torch.equal(crop[c], transform(tensor(rgb), 2, index)[0])


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_deep_pixels_are_cropped_like_those_of_8_bits(kind, reference):
    """The same images, 257 times as large or as floats, differ from the crop of 8 bits by its rounding alone."""
    transform = TRANSFORMS[kind](reference=reference)
    array = pixels(5, "uint8")
    crop = transform(tensor(array), 2, 1).double()
    deep = transform(tensor(array.astype(np.uint16) * 257), 2, 1)
    floats = transform(tensor(array.astype(np.float32)), 2, 1)
    assert deep.dtype == torch.uint16 and floats.dtype == torch.float32
    assert (deep.double() / 257 - crop).abs().max() <= 1.6 and (floats.double() - crop).abs().max() <= 1.6
    assert (deep.double() / 257 - floats.double().clamp(0, 255)).abs().max() <= 0.501 / 257 + 1e-4


def bicubic(x):
    """Keys' kernel with a = -0.5."""
    x = abs(x)
    return 1.5 * x**3 - 2.5 * x**2 + 1 if x < 1 else -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def antialias_matrix(length, wanted):
    """Weights [wanted, length] of a resize whose kernel is as wide as a pixel of the result, in float64."""
    scale = length / wanted
    width = max(scale, 1.0)
    rows = []
    for i in range(wanted):
        weights = [bicubic((j + 0.5 - (i + 0.5) * scale) / width) for j in range(length)]
        rows.append(np.array(weights) / sum(weights))
    return np.array(rows)


def test_a_resize_of_16_bits_equals_float64():
    array = pixels(5, "uint16")
    rows, columns = antialias_matrix(40, 23), antialias_matrix(52, 31)
    expected = np.einsum("ih,hwc,jw->cij", rows, array.astype(np.float64), columns).round().clip(0, 65535)
    found = resize(tensor(array), (23, 31)).numpy().astype(np.float64)
    assert np.abs(found - expected).max() <= 1 and (found == expected).mean() > 0.9


def test_overshoot_of_16_bits_is_clipped():
    array = np.zeros((16, 16, 1), np.uint16)
    array[:, 8:] = 65535
    found = resize(tensor(array), (40, 40))
    assert (found.int()[:, :, :10] <= 1).all() and (found.int()[:, :, 30:] >= 65534).all()


# ------------------------------------------------------------------------------------------ normalisation, statistics


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_normalisation_equals_float64(dtype):
    mean, std = [0.1, 0.3, 0.5, 0.7, 0.9], [0.05, 0.1, 0.2, 0.3, 0.4]
    array = pixels(5, dtype)
    unit = {"uint8": 255, "uint16": 65535, "float32": 1}[dtype]
    expected = (array.astype(np.float64) / unit - mean) / std
    normalize = Normalize(mean, std, PixelFormat(5, dtype))
    found = normalize(tensor(array)[None])
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found[0].permute(1, 2, 0).numpy(), expected, rtol=1e-5, atol=1e-5)
    shown = normalize.undo(found)[0].permute(1, 2, 0).numpy()
    scaled = array / 255 if dtype == "uint8" else ((expected + 2) / 4).clip(0, 1)
    np.testing.assert_allclose(shown, scaled, atol=1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_statistics_equal_a_loop_in_float64(tmp_path, dtype):
    arrays = [pixels(3, dtype, size=(20 + i, 30), seed=i) for i in range(9)]
    if dtype == "float32":  # squares of such values have few digits left in float32
        arrays = [array + np.float32(30_000) for array in arrays]
    for i, array in enumerate(arrays):
        np.save(tmp_path / f"{i}.npy", array)
    images = open_images("folder", tmp_path)
    unit = {"uint8": 255, "uint16": 65535, "float32": 1}[dtype]
    for number, chosen in ((256, range(9)), (3, (0, 4, 8))):
        values = np.concatenate([arrays[i].reshape(-1, 3).astype(np.float64) / unit for i in chosen])
        (mean, std), count, _ = measure_statistics(images, number)
        assert count == len(chosen)
        np.testing.assert_allclose(mean, values.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(std, values.std(axis=0), rtol=1e-9)


def choose(images, content=None, encoder=None, **flags):
    resumed, stored = None, {}
    if content is not None:
        info = CheckpointInfo.from_json(content["meta"], "")
        resumed = {"in_chans": info.settings.get("in_chans", 3), **info.pixel_settings}
    elif encoder is not None:
        stored = read_info(encoder["path"]).pixel_settings
    return choose_statistics((flags.get("mean"), flags.get("std")), images, resumed, stored)


def test_which_statistics_a_run_takes(tmp_path, photos):
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", pixels(2, "uint16", seed=i))
    images, rgb = open_images("folder", tmp_path, in_chans=2), open_images("folder", photos)
    own, count, _ = measure_statistics(images)
    found, (remark,) = choose(images)
    assert found == own and f"measured on {count} images, 2 channels of uint16" in remark
    assert choose(rgb) == (([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), [])
    assert choose(images, mean=[0.1, 0.2])[0] == ([0.1, 0.2], own[1])
    resumed = {"meta": {"settings": {"in_chans": 2, "mean": [0.3, 0.4], "std": [0.1, 0.1]}, "pixels": "uint16"}}
    with pytest.raises(ValueError, match="the run had 2 channels of uint16 and now have 3 channels of uint8"):
        choose(rgb, resumed)
    assert choose(images, resumed) == (([0.3, 0.4], [0.1, 0.1]), [])
    for flags, message in (
        (dict(mean=[0.1]), "--mean must have a value for each of 2 channels"),
        (dict(std=[0.1, 0.1, 0.1]), "--std must have a value for each of 2 channels"),
        (dict(std=[0.1, 0.0]), "--std must be positive"),
        (dict(mean=[1000.0, 0.1]), r"--mean of uint16 pixels is a fraction .* got \[1000.0, 0.1\]: divide by 65535"),
    ):
        with pytest.raises(ValueError, match=message):
            choose(images, **flags)


def test_a_constant_channel_has_no_deviation(tmp_path):
    array = pixels(3, "uint16")
    array[:, :, 1] = 7
    np.save(tmp_path / "0.npy", array)
    with pytest.raises(ValueError, match=r"channel 1 \(counted from 0\) is constant in 1 images"):
        measure_statistics(open_images("folder", tmp_path))


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_batches_of_a_worker_have_the_type_of_the_files(tmp_path, dtype):
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", pixels(5, dtype, seed=i))
    images = open_images("folder", tmp_path, in_chans=5)
    dataset = AddressedDataset(images, RandomResizedCropFlip(16, seed=0))
    collator = MaskCollator(TokenOrderSampler((4, 4), TokenCounts(4, 4, 8)), seed=0)
    addresses = [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    found = [list(batches(dataset, addresses, collator, workers, False)) for workers in (0, 1)]
    for ours, theirs in zip(*found, strict=True):
        assert ours[0].dtype == theirs[0].dtype == getattr(torch, dtype) and ours[0].shape == (2, 5, 16, 16)
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[2], theirs[2])


def test_a_packed_folder_is_the_folder(tmp_path):
    from scripts import pack_dataset

    for name in "ab":
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        write_tiff(tmp_path / "data" / "train" / name / "0.tif", pixels(5, "uint16", seed=ord(name)))
    argv = [str(tmp_path / "data"), str(tmp_path / "packed"), "--in_chans", "5", "--workers", "1"]
    pack_dataset.main(argv)
    folder, packed = (open_images("folder", tmp_path / name, in_chans=5) for name in ("data", "packed"))
    assert folder.fingerprint() == packed.fingerprint()
    assert all(np.array_equal(folder.load(i)[0], packed.load(i)[0]) for i in range(2))
    shutil.rmtree(tmp_path / "packed")
    with pytest.raises(SystemExit):
        pack_dataset.main([*argv, "--quality", "90"])
