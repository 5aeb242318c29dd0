"""Images of any channels and depth: files, crops, normalisation and statistics."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from tests.util.data.test_decode import deep_colour_png
from util.data import pixel_format, statistics
from util.data.attention_maps import Squash
from util.data.images import FolderImages, ImageError, Reading
from util.data.open import open_images
from util.data.padded_crop import PaddedCropFlip
from util.data.pixel_format import RGB8, FormatError, PixelFormat, read_header
from util.data.statistics import measure_statistics
from util.data.transforms import Normalize, RandomResizedCropFlip, ResizeCenterCrop, resize

tifffile = pytest.importorskip("tifffile")

DTYPES = ["uint8", "uint16", "float32"]
UNIT = {"uint8": 255, "uint16": 65535, "float32": 1}


def pixels(channels, dtype, size=(40, 52), seed=0):
    """Smooth random images, so that crops have something to show; floats also lie outside [0, 1]."""
    coarse = np.random.default_rng(seed).random((1, channels, 6, 7))
    (fine,) = F.interpolate(torch.from_numpy(coarse), size=size, mode="bilinear")
    smooth = fine.permute(1, 2, 0).numpy()
    if dtype == "float32":
        return (300 * smooth - 100).astype(np.float32)
    return (smooth * np.iinfo(dtype).max).round().astype(dtype)


def tensor(array):
    return torch.from_numpy(array).permute(2, 0, 1)


def save_arrays(folder, *arrays):
    folder.mkdir(parents=True, exist_ok=True)
    for i, array in enumerate(arrays):
        np.save(folder / f"{i}.npy", array)
    return folder


def assert_loads(images, number, expected):
    img, _ = images.load(number)
    assert img.dtype == expected.dtype
    np.testing.assert_array_equal(img, expected)


def write_tiff(path, array, **options):
    if array.shape[2] == 1:
        tifffile.imwrite(path, array[:, :, 0], **options)
    else:
        tifffile.imwrite(
            path,
            array,
            photometric="minisblack",
            planarconfig="contig",
            **options,
        )


def write_pages(path, array):
    tifffile.imwrite(path, np.moveaxis(array, -1, 0), photometric="minisblack")


def write_planes(path, array):
    tifffile.imwrite(path, np.moveaxis(array, -1, 0), photometric="minisblack", planarconfig="separate")


def write_big_endian(path, array):
    np.save(path, array.astype(array.dtype.newbyteorder(">")))


FORMS = {  # the ways in which users store an array [H, W, C]: (ending, writer)
    "npy": (".npy", np.save),
    "big-endian npy": (".npy", write_big_endian),
    "Fortran npy": (".npy", lambda path, array: np.save(path, np.asfortranarray(array))),
    "contiguous": (".tif", lambda path, array: write_tiff(path, array, compression="zlib")),
    "big-endian": (".tif", lambda path, array: write_tiff(path, array, byteorder=">")),
    "BigTIFF": (".tif", lambda path, array: write_tiff(path, array, bigtiff=True)),
    "planes": (".tif", write_planes),
    "pages": (".tif", write_pages),
    "without options": (".tif", tifffile.imwrite),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_all_bands_are_read_as_they_are(tmp_path, dtype, form):
    array = pixels(5, dtype)
    ending, write = FORMS[form]
    write(tmp_path / f"0{ending}", array)
    images = open_images("folder", tmp_path, in_chans=5)
    img, label = images.load(0)
    assert images.pixel_format == PixelFormat(5, dtype)
    assert label == 0
    assert img.dtype == array.dtype
    assert img.dtype.isnative
    assert np.array_equal(img, array)
    assert img.flags.c_contiguous
    assert img.flags.writeable


GREY16 = pixels(1, "uint16")[:, :, 0]
PICTURES = {  # {name: (picture, format with its own channels)}
    "grey": (Image.fromarray(GREY16 // 257).convert("L"), PixelFormat(1, "uint8")),
    "grey with alpha": (Image.fromarray(pixels(2, "uint8"), "LA"), PixelFormat(2, "uint8")),
    "RGB with alpha": (Image.fromarray(pixels(4, "uint8")), PixelFormat(4, "uint8")),
    "two colours": (Image.fromarray(GREY16 > 2**15), PixelFormat(1, "uint8")),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures_keep_their_channels_unless_three_are_wanted(tmp_path, kind):
    picture, own_format = PICTURES[kind]
    picture.save(tmp_path / "0.png")
    images = open_images("folder", tmp_path, in_chans=own_format.channels)
    rgb = open_images("folder", tmp_path)
    expected = np.asarray(picture).astype(np.uint8)
    if kind == "two colours":
        expected = 255 * expected
    assert images.pixel_format == own_format
    assert_loads(images, 0, expected.reshape(40, 52, -1))
    assert rgb.pixel_format == RGB8
    assert rgb.notes == []
    expected = np.asarray(picture.convert("RGB"))
    assert_loads(rgb, 0, expected)


def test_three_bands_of_8_bits_without_colours_are_read_as_they_are(tmp_path):
    """Pillow opens no TIFF of three grey bands."""
    for i in range(2):
        write_tiff(tmp_path / f"{i}.tif", pixels(3, "uint8", seed=i))
    images = open_images("folder", tmp_path)
    assert images.pixel_format == RGB8
    for i in range(2):
        assert_loads(images, i, pixels(3, "uint8", seed=i))


def test_grey_of_16_bits_keeps_them_unless_three_channels_are_wanted(tmp_path):
    Image.fromarray(GREY16).save(tmp_path / "0.png")
    images = open_images("folder", tmp_path, in_chans=1)
    assert images.pixel_format == PixelFormat(1, "uint16")
    assert_loads(images, 0, GREY16[:, :, None])
    rgb = open_images("folder", tmp_path)
    img, _ = rgb.load(0)
    assert np.array_equal(img[:, :, 1], np.rint(GREY16 / 257))
    (note,) = rgb.notes
    assert "--in_chans" in note


def test_colours_of_16_bits_lose_them_with_a_warning(tmp_path):
    (tmp_path / "0.png").write_bytes(deep_colour_png(3))
    images = open_images("folder", tmp_path)
    assert images.pixel_format == PixelFormat(3, "uint8")
    (note,) = images.notes
    assert "0.png' has 16 bits" in note


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_three_bands_keep_their_depth_where_pillow_reads_nothing(tmp_path, dtype):
    images = open_images("folder", save_arrays(tmp_path, pixels(3, dtype)))
    assert images.pixel_format == PixelFormat(3, dtype)
    assert_loads(images, 0, pixels(3, dtype))


# ----------------------------------------------------------------------------------------------------------- bad input


def write_turned(path, array):
    write_tiff(path, array, extratags=[(274, "H", 1, 6, True)])


def write_ome(path, array):
    """Writes two images."""
    with tifffile.TiffWriter(path, ome=True) as file:
        for _ in range(2):
            file.write(np.moveaxis(array, -1, 0), photometric="minisblack", metadata={"axes": "CYX"})


OTHERS = {  # {name: (ending, writer, array, channels that are wanted)}
    "other channels": (".tif", write_tiff, pixels(5, "uint16"), 4),
    "other channels than RGB": (".tif", write_tiff, pixels(5, "uint16"), 3),
    "rows became pages": (".tif", tifffile.imwrite, pixels(5, "uint8"), 3),
    "pages": (".tif", write_pages, pixels(5, "uint8"), 3),
    "three pages": (".tif", write_pages, pixels(3, "uint8"), 3),
    "two RGB images": (
        ".tif",
        lambda path, array: tifffile.imwrite(path, [array] * 2, photometric="rgb"),
        pixels(3, "uint8"),
        3,
    ),
    "two OME images": (".ome.tif", write_ome, pixels(2, "uint16"), 2),
    "turned bands": (".tif", write_turned, pixels(5, "uint16"), 5),
    "turned grey": (".tif", write_turned, pixels(1, "uint16"), 3),
    "bands first": (".npy", np.save, np.moveaxis(pixels(5, "uint16"), -1, 0), 5),
    "bands first, other channels": (".npy", np.save, np.moveaxis(pixels(5, "uint16"), -1, 0), 3),
    "one axis": (".npy", np.save, np.zeros(4, np.uint8), 5),
    "no rows": (".npy", np.save, np.zeros((0, 4, 5), np.uint8), 5),
    "float64": (".npy", np.save, pixels(5, "uint8").astype(float), 5),
    "objects": (".npy", np.save, pixels(5, "uint8").astype(object), 5),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_are_refused_by_name_at_the_check_and_later(tmp_path, kind):
    """The check at the start reads a sample of the headers."""
    ending, write, array, in_chans = OTHERS[kind]
    write(tmp_path / f"1{ending}", array)
    with pytest.raises(ImageError, match=f"1{ending}'"):
        open_images("folder", tmp_path, in_chans=in_chans)
    for name in ("0", "2"):
        np.save(tmp_path / f"{name}.npy", pixels(in_chans, "uint8"))
    images = FolderImages(tmp_path, reading=Reading(in_chans))
    images.num_checked = 2
    images.check()
    images.load(0)
    with pytest.raises(ImageError, match=f"1{ending}'"):
        images.load(1)


@pytest.mark.parametrize("flags", [{"subfiletype": 1}, {}])
def test_thumbnails_and_overviews_are_no_pages(tmp_path, flags):
    array = pixels(3, "uint8")
    size = (40, 52) if flags else (10, 13)
    with tifffile.TiffWriter(tmp_path / "0.tif") as file:
        file.write(array, photometric="rgb", metadata=None)
        file.write(pixels(3, "uint8", size=size), photometric="rgb", metadata=None, **flags)
    images = open_images("folder", tmp_path)
    assert images.notes == []
    assert_loads(images, 0, array)


OME = """<?xml version="1.0" encoding="UTF-8"?>
<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:{}"><Image ID="Image:0">
<Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" SizeX="52" SizeY="40" SizeC="2" SizeZ="1" SizeT="1">
<TiffData FirstC="0" IFD="0" PlaneCount="1"><UUID FileName="0.ome.tif">urn:uuid:0</UUID></TiffData>
<TiffData FirstC="1" IFD="0" PlaneCount="1"><UUID FileName="1.ome.tif">urn:uuid:1</UUID></TiffData>
</Pixels></Image></OME>"""


def test_an_ome_tiff_whose_bands_are_in_several_files_is_refused(tmp_path):
    """tifffile finds the other files if it is given a path, and reads zeros in their place if it is given bytes."""
    for i in range(2):
        plane = pixels(1, "uint8", seed=i)[:, :, 0]
        tifffile.imwrite(tmp_path / f"{i}.ome.tif", plane, description=OME.format(i), metadata=None)
    path = tmp_path / "0.ome.tif"
    for source in (str(path), io.BytesIO(path.read_bytes())):
        with pytest.raises(FormatError):
            read_header(source, in_chans=2)


def test_an_ome_tiff_of_one_image_is_read(tmp_path):
    array = np.moveaxis(pixels(2, "uint16"), -1, 0)
    tifffile.imwrite(tmp_path / "0.ome.tif", array, photometric="minisblack", metadata={"axes": "CYX"})
    assert_loads(open_images("folder", tmp_path, in_chans=2), 0, pixels(2, "uint16"))


def test_an_image_of_one_channel_and_three_axes_is_no_stack(tmp_path):
    array = pixels(1, "uint16")
    tifffile.imwrite(tmp_path / "0.tif", array)
    with pytest.raises(ImageError):
        open_images("folder", tmp_path, in_chans=5)
    images = open_images("folder", tmp_path, in_chans=1)
    assert_loads(images, 0, array)


@pytest.mark.parametrize("other", [pixels(5, "float32"), pixels(4, "uint16")], ids=["depth", "channels"])
def test_an_image_of_another_format_is_named_and_bad(tmp_path, other):
    save_arrays(tmp_path, *[pixels(5, "uint16", seed=i) for i in range(3)])
    np.save(tmp_path / "7.npy", other)
    with pytest.raises(ImageError, match="7.npy'"):
        open_images("folder", tmp_path, in_chans=5)
    images = open_images("folder", tmp_path, in_chans=5, max_bad_fraction=0.01)
    assert images.pixel_format == PixelFormat(5, "uint16")
    assert "7.npy'" in images.notes[0]
    with pytest.raises(ImageError, match="7.npy'"):
        images.load(3)
    (tmp_path / "6.npy").write_bytes((tmp_path / "7.npy").read_bytes())
    with pytest.raises(ImageError, match="--max_bad_fraction"):
        open_images("folder", tmp_path, in_chans=5, max_bad_fraction=0.01)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_floats_that_are_not_finite_name_the_bands(tmp_path, value):
    bad = pixels(5, "float32")
    bad[3, 4, [1, 3]] = value
    save_arrays(tmp_path, pixels(5, "float32"), bad)
    with pytest.raises(ImageError, match="1.npy'.* band 1, 3"):
        open_images("folder", tmp_path, in_chans=5)


def test_files_that_would_need_gigabytes_are_refused_by_their_header(tmp_path, monkeypatch):
    save_arrays(tmp_path, pixels(5, "uint8"))
    monkeypatch.setattr(pixel_format, "max_pixels", lambda: 40 * 52 - 1)
    monkeypatch.replace_in(pixel_format, "np.load", lambda *args, **options: pytest.fail("the pixels are read"))
    with pytest.raises(ImageError, match="0.npy'"):
        open_images("folder", tmp_path, in_chans=5)


@pytest.mark.parametrize("form", ["npy", "contiguous"])
def test_damaged_files_are_named(tmp_path, form):
    ending, write = FORMS[form]
    path = tmp_path / f"1{ending}"
    save_arrays(tmp_path, pixels(5, "uint16"))
    write(path, pixels(5, "uint16"))
    images = open_images("folder", tmp_path, in_chans=5)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ImageError, match=f"{path.name}' cannot be decoded"):
        images.load(1)


# -------------------------------------------------------------------------------------------------------------- crops

TRANSFORMS = {
    "resized": lambda **how: RandomResizedCropFlip((24, 32), seed=3, **how),
    "padded": lambda **how: PaddedCropFlip((24, 32), seed=3, **how),
    "center": lambda **how: ResizeCenterCrop((24, 32), **how),
    "squash": lambda **how: Squash((24, 32), **how),
}


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("channels", [1, 2, 4, 12])
def test_crops_equal_those_of_rgb_channel_by_channel(kind, channels, reference):
    transform = TRANSFORMS[kind](reference=reference)
    array = pixels(channels, "uint8")
    for index in range(3):
        crop = transform(tensor(array), 2, index)
        assert crop.shape == (channels, 24, 32)
        assert crop.dtype == torch.uint8
        assert crop.is_contiguous()
        for c in range(channels):
            rgb = np.repeat(array[:, :, [c]], 3, axis=2)
            expected = transform(tensor(rgb), 2, index)
            assert torch.equal(crop[c], expected[0])


def bicubic(x):
    """Keys' kernel with a = -0.5."""
    x = abs(x)
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    if x < 2:
        return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return 0.0


def antialias_matrix(length, wanted):
    """Weights [wanted, length] of a resize whose kernel is as wide as a pixel of the result, in float64."""
    scale = length / wanted
    width = max(scale, 1.0)
    rows = []
    for i in range(wanted):
        centre = (i + 0.5) * scale
        distances = (np.arange(length) + 0.5 - centre) / width
        weights = np.array([bicubic(x) for x in distances])
        rows.append(weights / weights.sum())
    return np.array(rows)


def test_a_resize_of_16_bits_equals_float64():
    array = pixels(5, "uint16")
    rows = antialias_matrix(40, 23)
    columns = antialias_matrix(52, 31)
    values = np.einsum("ih,hwc,jw->cij", rows, array, columns)
    expected = values.round().clip(0, 65535)
    resized = resize(tensor(array), (23, 31)).double().numpy()
    assert np.abs(resized - expected).max() <= 1
    assert (resized == expected).mean() > 0.9


def test_overshoot_of_16_bits_is_clipped():
    array = np.zeros((16, 16, 1), np.uint16)
    array[:, 8:] = 65535
    resized = resize(tensor(array), (40, 40)).int()
    assert resized[:, :, :19].max() == 0  # columns 16 to 18 would lie below it, and 21 to 23 above 65535
    assert resized[:, :, 21:].min() == 65535


# ------------------------------------------------------------------------------------------ normalisation, statistics


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalisation_equals_float64(dtype):
    mean = [0.1, 0.3, 0.5, 0.7, 0.9]
    std = [0.05, 0.1, 0.2, 0.3, 0.4]
    array = pixels(5, dtype)
    expected = (array.astype(np.float64) / UNIT[dtype] - mean) / std
    normalize = Normalize(mean, std, PixelFormat(5, dtype))
    normalised = normalize(tensor(array)[None])
    assert normalised.dtype == torch.float32
    found = normalised[0].permute(1, 2, 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    shown = ((expected + 2) / 4).clip(0, 1)
    if dtype == "uint8":
        shown = array / 255
    (undone,) = normalize.undo(normalised)
    np.testing.assert_allclose(undone.permute(1, 2, 0), shown, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("number", "chosen"), [(256, range(9)), (3, (0, 4, 8))])
def test_statistics_equal_a_loop_in_float64(tmp_path, monkeypatch, dtype, number, chosen):
    arrays = []
    for i in range(9):
        array = pixels(3, dtype, size=(20 + i, 30), seed=i)
        if dtype == "float32":
            array += 30_000  # squares of such values have few digits left in float32
        arrays.append(array)
    images = open_images("folder", save_arrays(tmp_path, *arrays))
    chosen_arrays = [arrays[i].reshape(-1, 3) for i in chosen]
    values = np.concatenate(chosen_arrays).astype(np.float64) / UNIT[dtype]
    monkeypatch.setattr(statistics, "SAMPLE", number)
    (mean, std), (remark,) = measure_statistics(images)
    assert f"measured on {len(chosen)} images" in remark
    np.testing.assert_allclose(mean, values.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(std, values.std(axis=0), rtol=1e-9)
