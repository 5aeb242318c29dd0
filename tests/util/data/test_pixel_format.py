"""Images of any channels and depth: files, crops, normalisation and statistics."""

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from prmim import MaskCollator, TokenCounts, TokenOrderSampler
from scripts import pack_dataset
from tests.util.data.test_decode import deep_colour_png
from util.data import pixel_format
from util.data.datasets import AddressedDataset
from util.data.images import FolderImages, ImageError
from util.data.invalid_pixels import InvalidPixels
from util.data.loader import Loader
from util.data.open import open_images
from util.data.pixel_format import RGB8, FormatError, PixelFormat, read_format
from util.data.statistics import choose_statistics, measure_statistics
from util.data.transforms import Normalize, PaddedCropFlip, RandomResizedCropFlip, ResizeCenterCrop, Squash, resize
from util.run.files.checkpoint import read_info
from util.run.files.record import CheckpointInfo

tifffile = pytest.importorskip("tifffile")

DTYPES = ["uint8", "uint16", "float32"]
U16 = PixelFormat(5, "uint16")
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
    lost = f"{str(tmp_path / '0.png')!r} has 16 bits, but with 3 channels images become RGB of 8 bits"
    assert note == f"warning: {lost}: give --in_chans 1 to keep 16 bits"


@pytest.mark.parametrize(
    ("in_chans", "reason"),
    [
        (3, "with 3 channels images become RGB of 8 bits"),
        (4, "Pillow reads its colours with 8 bits"),
    ],
)
def test_colours_of_16_bits_lose_them_with_a_warning(tmp_path, in_chans, reason):
    (tmp_path / "0.png").write_bytes(deep_colour_png(in_chans))
    images = open_images("folder", tmp_path, in_chans=in_chans)
    assert images.pixel_format == PixelFormat(in_chans, "uint8")
    lost = f"{str(tmp_path / '0.png')!r} has 16 bits, but {reason}"
    assert images.notes == [f"warning: {lost}: store the images as .npy to keep 16 bits"]


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_three_bands_keep_their_depth_where_pillow_reads_nothing(tmp_path, dtype):
    images = open_images("folder", save_arrays(tmp_path, pixels(3, dtype)))
    assert images.pixel_format == PixelFormat(3, dtype)
    assert_loads(images, 0, pixels(3, dtype))


def test_three_bands_of_floats_in_a_tiff(tmp_path):
    write_tiff(tmp_path / "0.tif", pixels(3, "float32"))
    assert read_format(str(tmp_path / "0.tif")) == PixelFormat(3, "float32")


def test_two_dimensions_are_one_channel(tmp_path):
    images = open_images("folder", save_arrays(tmp_path, GREY16), in_chans=1)
    assert_loads(images, 0, GREY16[:, :, None])


def test_a_packed_folder_is_the_folder(tmp_path, capsys):
    for seed, name in enumerate("ab"):
        folder = tmp_path / "data" / "train" / name
        folder.mkdir(parents=True)
        write_tiff(folder / "0.tif", pixels(5, "uint16", seed=seed))
    flags = ["--in_chans", "5", "--workers", "1"]
    pack_dataset.main([str(tmp_path / "data"), str(tmp_path / "packed"), *flags])
    folder = open_images("folder", tmp_path / "data", in_chans=5)
    packed = open_images("folder", tmp_path / "packed", in_chans=5)
    assert folder.fingerprint() == packed.fingerprint()
    for i in range(2):
        assert_loads(folder, i, packed.load(i)[0])
    with pytest.raises(SystemExit):
        pack_dataset.main([str(tmp_path / "data"), str(tmp_path / "jpegs"), *flags, "--quality", "90"])
    assert "--quality makes JPEGs of RGB images" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- bad input


def refused(folder, **options):
    with pytest.raises(ImageError) as error:
        open_images("folder", folder, max_bad_fraction=0.01, **options)
    return str(error.value)


@pytest.mark.parametrize("in_chans", [3, 4])
def test_files_of_other_channels_are_named_with_the_flag_that_fits(tmp_path, in_chans):
    write_tiff(tmp_path / "0.tif", pixels(5, "uint16"))
    wanted = f"the model takes {in_chans} channels (--in_chans in training)"
    assert f"'{tmp_path / '0.tif'}' has 5 channels of uint16, but {wanted}" in refused(tmp_path, in_chans=in_chans)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_whose_rows_became_pages_is_named_with_its_channels(tmp_path, dtype):
    """tifffile writes [H, W, C] as H pages of [W, C]. Its height is no number of channels, whatever is asked for."""
    array = pixels(5, dtype)
    tifffile.imwrite(tmp_path / "0.tif", array)
    for in_chans in (1, 3, 4):
        message = refused(tmp_path, in_chans=in_chans)
        assert "it has 40 pages of 52 x 5 values: save each image in one page" in message
        assert "give --in_chans 5 if each page is a row of an array [H, W, C]" in message
        assert "give --in_chans 40 if each page is a channel" in message
    images = open_images("folder", tmp_path, in_chans=5)
    assert_loads(images, 0, array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_no_rgb_image(tmp_path, dtype):
    write_pages(tmp_path / "0.tif", pixels(5, dtype))
    message = refused(tmp_path)
    assert "it has 5 pages of 40 x 52 values: save each image in one page" in message
    assert message.endswith("or give --in_chans 5 if each page is a channel")
    assert f"has 5 channels of {dtype}, but the model takes 4 channels" in refused(tmp_path, in_chans=4)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("uint8", RGB8),
        ("uint16", RGB8),
        ("float32", PixelFormat(3, "float32")),
    ],
)
def test_three_pages_are_refused_with_advice_that_works(tmp_path, dtype, expected):
    write_pages(tmp_path / "0.tif", pixels(3, dtype))
    advice = "save each image in one page, such as tifffile.imwrite(path, array, photometric='rgb')"
    assert refused(tmp_path).endswith(f"it has 3 pages of 40 x 52 values: {advice}")
    tifffile.imwrite(tmp_path / "0.tif", pixels(3, dtype), photometric="rgb")
    assert open_images("folder", tmp_path).pixel_format == expected


def test_two_rgb_images_in_a_file_are_refused(tmp_path):
    two_images = np.stack([pixels(3, "uint8")] * 2)
    tifffile.imwrite(tmp_path / "0.tif", two_images, photometric="rgb")
    assert "it has 2 pages of 3 channels: save each page as a file of its own" in refused(tmp_path)


def test_pages_that_the_check_has_not_seen_are_no_rgb_image(tmp_path):
    """The check at the start reads a sample of the headers. The same error comes when the image is loaded."""
    for name in ("0", "2"):
        Image.fromarray(pixels(3, "uint8")).save(tmp_path / f"{name}.tif")
    write_pages(tmp_path / "1.tif", pixels(5, "uint8"))
    images = FolderImages(tmp_path)
    images.num_checked = 2
    images.check()
    assert_loads(images, 0, pixels(3, "uint8"))
    with pytest.raises(ImageError, match="1.tif' cannot be decoded: it has 5 pages of 40 x 52 values"):
        images.load(1)


@pytest.mark.parametrize("flags", [{"subfiletype": 1}, {}])
def test_thumbnails_are_no_pages(tmp_path, flags):
    array = pixels(3, "uint8")
    with tifffile.TiffWriter(tmp_path / "0.tif") as file:
        file.write(array, photometric="rgb", metadata=None)
        thumbnail = pixels(3, "uint8", size=(10, 13))
        file.write(thumbnail, photometric="rgb", metadata=None, **flags)
    images = open_images("folder", tmp_path)
    assert images.pixel_format == RGB8
    assert images.notes == []
    assert_loads(images, 0, array)


def test_a_name_says_nothing_about_bits(tmp_path):
    folder = tmp_path / "16 bits"
    folder.mkdir()
    tifffile.imwrite(folder / "0.tif", pixels(4, "uint8"), photometric="rgb")
    (note,) = open_images("folder", folder, invalid=InvalidPixels(0.0)).notes
    assert "has 4 bands" in note


@pytest.mark.parametrize("nodata", [None, 65535.0])
@pytest.mark.parametrize("place", [0, 3])
def test_bits_that_any_image_loses_are_told(tmp_path, place, nodata):
    """With --nodata it is an error: the value would be compared with what is left of the bits."""
    for i in range(4):
        array = pixels(3, "uint8")
        if i == place:
            array = pixels(3, "uint16")
        tifffile.imwrite(tmp_path / f"{i}.tif", array, photometric="rgb")
    lost = f"{str(tmp_path / f'{place}.tif')!r} has 16 bits, but with 3 channels images become RGB of 8 bits"
    if nodata is None:
        (note,) = open_images("folder", tmp_path).notes
        assert note == f"warning: {lost}: store the images as .npy to keep 16 bits"
    else:
        with pytest.raises(ImageError, match=f"--nodata 65535.0 cannot be compared with 16 bits: {re.escape(lost)}"):
            open_images("folder", tmp_path, invalid=InvalidPixels(nodata))


@pytest.mark.parametrize("bands", [2, 4, 5])
def test_bands_that_are_not_read_are_told(tmp_path, bands):
    """Two of them are grey and alpha: older Pillow opens no other ones."""
    kind = {"photometric": "rgb"}
    if bands == 2:
        kind = {"photometric": "minisblack", "extrasamples": ["unassalpha"]}
    tifffile.imwrite(tmp_path / "0.tif", pixels(bands, "uint8"), planarconfig="contig", **kind)
    (note,) = open_images("folder", tmp_path).notes
    assert f"has {bands} bands, but with 3 channels images become RGB of 8 bits: give --in_chans {bands}" in note
    images = open_images("folder", tmp_path, in_chans=bands)
    assert images.notes == []
    assert_loads(images, 0, pixels(bands, "uint8"))


@pytest.mark.parametrize(
    ("bands", "invalid"),
    [
        (4, InvalidPixels(mask_band=3)),
        (2, InvalidPixels(bands=((0, 1),))),
    ],
)
def test_nothing_is_lost_where_the_bands_have_a_meaning(tmp_path, bands, invalid):
    photometric = "rgb" if bands > 3 else "minisblack"
    tifffile.imwrite(tmp_path / "0.tif", pixels(bands, "uint8"), photometric=photometric, planarconfig="contig")
    assert open_images("folder", tmp_path, invalid=invalid).notes == []


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
    assert "some of its bands are in other files" in refused(tmp_path, in_chans=2)
    path = tmp_path / "0.ome.tif"
    for source in (str(path), io.BytesIO(path.read_bytes())):
        with pytest.raises(FormatError, match="some of its bands are in other files"):
            read_format(source, in_chans=2)


def test_an_ome_tiff_of_one_image_is_read_and_one_of_two_is_refused(tmp_path):
    array = np.moveaxis(pixels(2, "uint16"), -1, 0)
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        with tifffile.TiffWriter(folder / "0.ome.tif", ome=True) as file:
            for _ in range(number):
                file.write(array, photometric="minisblack", metadata={"axes": "CYX"})
    images = open_images("folder", tmp_path / "1", in_chans=2)
    assert_loads(images, 0, pixels(2, "uint16"))
    assert "it has 2 images of one size: save each in a file of its own" in refused(tmp_path / "2", in_chans=2)


def test_overviews_and_masks_are_no_pages(tmp_path):
    array = pixels(3, "uint8")
    overview = Image.fromarray(pixels(3, "uint8", size=(10, 13)))
    overview.encoderinfo = {"tiffinfo": {254: 1}}
    mask = Image.fromarray(array[:, :, 0] > 128)
    mask.encoderinfo = {"tiffinfo": {254: 4}}
    Image.fromarray(array).save(tmp_path / "0.tif", save_all=True, append_images=[overview, mask])
    with Image.open(tmp_path / "0.tif") as file:
        file.seek(2)
        if file.tag_v2.get(254) != 4:
            pytest.skip("this Pillow writes no kinds of pages")
    images = open_images("folder", tmp_path)
    assert_loads(images, 0, array)
    assert images.notes == []


def test_an_image_of_one_channel_and_three_axes_is_no_stack(tmp_path):
    array = pixels(1, "uint16")
    tifffile.imwrite(tmp_path / "0.tif", array)
    assert "has 1 channel of uint16, but the model takes 5 channels" in refused(tmp_path, in_chans=5)
    images = open_images("folder", tmp_path, in_chans=1)
    assert_loads(images, 0, array)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            pixels(5, "float32"),
            "0.tif' has 5 channels of uint16, but '.*7.npy' has 5 channels of float32: all images need",
        ),
        (pixels(4, "uint16"), "7.npy' has 4 channels of uint16, but the model takes 5 channels"),
    ],
    ids=["depth", "channels"],
)
def test_mixed_formats_are_named(tmp_path, other, message):
    for i in range(3):
        write_tiff(tmp_path / f"{i}.tif", pixels(5, "uint16", seed=i))
    np.save(tmp_path / "7.npy", other)
    assert re.search(message, refused(tmp_path, in_chans=5))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_floats_that_are_not_finite_name_the_bands(tmp_path, value):
    bad = pixels(5, "float32")
    bad[3, 4, [1, 3]] = value
    save_arrays(tmp_path, pixels(5, "float32"), bad)
    message = refused(tmp_path, in_chans=5)
    assert repr(str(tmp_path / "1.npy")) in message
    assert "NaN or infinite values are in band 1, 3 (counted from 0): replace them, or see --nodata" in message


PLANES = np.moveaxis(pixels(5, "uint16"), -1, 0)
OTHER = [
    (PLANES, 3, "its shape [5, 40, 52] is no [H, W, C]: save numpy.moveaxis("),
    (PLANES, 5, "its shape [5, 40, 52] is no [H, W, C]: save numpy.moveaxis("),
    (np.zeros(4, np.uint8), 5, "its shape is [4]; expected is [H, W] or [H, W, C]"),
    (np.zeros((0, 4, 5), np.uint8), 5, "its shape is [0, 4, 5]; expected is"),
]
for kind in ("float64", "object"):
    array = pixels(5, "uint8").astype(kind)
    OTHER.append((array, 5, f"its values are {kind}; only uint8, uint16, float32 are read: convert it"))


@pytest.mark.parametrize(("array", "in_chans", "message"), OTHER)
def test_other_arrays_are_refused(tmp_path, array, in_chans, message):
    np.save(tmp_path / "0.npy", array, allow_pickle=True)
    assert message in refused(tmp_path, in_chans=in_chans)


def test_files_that_would_need_gigabytes_are_refused_by_their_header(tmp_path, monkeypatch):
    save_arrays(tmp_path, pixels(5, "uint8"))
    monkeypatch.setattr(pixel_format, "max_pixels", lambda: 40 * 52 - 1)
    monkeypatch.replace_in(pixel_format, "np.load", lambda *args, **options: pytest.fail("the pixels are read"))
    assert "52 x 40 pixels are more than" in refused(tmp_path, in_chans=5)


@pytest.mark.parametrize("in_chans", [3, 5])
def test_without_tifffile_the_message_says_what_to_install(tmp_path, monkeypatch, in_chans):
    write_tiff(tmp_path / "0.tif", pixels(5, "uint16"))
    monkeypatch.setattr(pixel_format, "tifffile", None)
    assert "pip install tifffile" in refused(tmp_path, in_chans=in_chans)


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


def test_an_image_of_another_format_is_unreadable(tmp_path):
    """One that the sample of headers has missed."""
    save_arrays(tmp_path, pixels(5, "uint16"), pixels(5, "float32"))
    images = FolderImages(tmp_path, in_chans=5)
    images.num_checked = 1
    images.check()
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


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_deep_pixels_are_cropped_like_those_of_8_bits(kind, reference):
    """The same images, 257 times as large or as floats, differ from the crop of 8 bits by its rounding alone."""
    transform = TRANSFORMS[kind](reference=reference)
    array = pixels(5, "uint8")
    crop = transform(tensor(array), 2, 1).double()
    deep = transform(tensor(array.astype(np.uint16) * 257), 2, 1)
    floats = transform(tensor(array.astype(np.float32)), 2, 1)
    assert deep.dtype == torch.uint16
    assert floats.dtype == torch.float32
    deep = deep.double() / 257
    floats = floats.double()
    assert (deep - crop).abs().max() <= 1.6
    assert (floats - crop).abs().max() <= 1.6
    rounding = deep - floats.clamp(0, 255)
    assert rounding.abs().max() <= 0.501 / 257 + 1e-4


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
    assert resized[:, :, :10].max() <= 1
    assert resized[:, :, 30:].min() >= 65534


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
def test_statistics_equal_a_loop_in_float64(tmp_path, dtype, number, chosen):
    arrays = []
    for i in range(9):
        array = pixels(3, dtype, size=(20 + i, 30), seed=i)
        if dtype == "float32":
            array += 30_000  # squares of such values have few digits left in float32
        arrays.append(array)
    images = open_images("folder", save_arrays(tmp_path, *arrays))
    chosen_arrays = [arrays[i].reshape(-1, 3) for i in chosen]
    values = np.concatenate(chosen_arrays).astype(np.float64) / UNIT[dtype]
    (mean, std), count, _ = measure_statistics(images, number)
    assert count == len(chosen)
    np.testing.assert_allclose(mean, values.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(std, values.std(axis=0), rtol=1e-9)


def choose(images, content=None, encoder=None, **flags):
    """Chooses the statistics of a run: a new one, or one that resumes a checkpoint with this content."""
    resumed = None
    stored = {}
    if content is not None:
        info = CheckpointInfo.from_json(content["meta"], "")
        resumed = {"in_chans": info.settings.get("in_chans", 3), **info.pixel_settings}
    elif encoder is not None:
        stored = read_info(encoder["path"]).pixel_settings
    return choose_statistics((flags.get("mean"), flags.get("std")), images, resumed, stored)


@pytest.fixture
def bands(tmp_path):
    """Three images of two channels of 16 bits."""
    arrays = [pixels(2, "uint16", seed=i) for i in range(3)]
    return open_images("folder", save_arrays(tmp_path / "bands", *arrays), in_chans=2)


SETTINGS = {"in_chans": 2, "mean": [0.3, 0.4], "std": [0.1, 0.1]}
RUN = {"settings": SETTINGS, "pixels": "uint16"}


def test_which_statistics_a_run_takes(bands, photos):
    measured, count, _ = measure_statistics(bands)
    rgb = open_images("folder", photos)
    statistics, (remark,) = choose(bands)
    assert statistics == measured
    assert f"measured on {count} images, 2 channels of uint16" in remark
    statistics, remarks = choose(rgb)
    assert statistics == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert remarks == []
    statistics, _ = choose(bands, mean=[0.1, 0.2])
    assert statistics == ([0.1, 0.2], measured[1])
    statistics, remarks = choose(bands, {"meta": RUN})
    assert statistics == ([0.3, 0.4], [0.1, 0.1])
    assert remarks == []
    with pytest.raises(ValueError, match="the run had 2 channels of uint16 and now have 3 channels of uint8"):
        choose(rgb, {"meta": RUN})


def test_statistics_in_other_units_are_refused(bands):
    message = r"--mean of uint16 pixels is a fraction .* got \[1000.0, 0.1\]: divide by 65535"
    with pytest.raises(ValueError, match=message):
        choose(bands, mean=[1000.0, 0.1])


def test_a_constant_channel_has_no_deviation(tmp_path):
    array = pixels(3, "uint16")
    array[:, :, 1] = 7
    images = open_images("folder", save_arrays(tmp_path, array))
    with pytest.raises(ValueError, match=r"channel 1 \(counted from 0\) is constant in 1 images"):
        measure_statistics(images)


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_batches_of_a_worker_have_the_type_of_the_files(tmp_path, dtype):
    arrays = [pixels(5, dtype, seed=i) for i in range(4)]
    images = open_images("folder", save_arrays(tmp_path, *arrays), in_chans=5)
    dataset = AddressedDataset(images, RandomResizedCropFlip(16, seed=0))
    collator = MaskCollator(TokenOrderSampler((4, 4), TokenCounts(4, 4, 8)), seed=0)
    addresses = [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    found = []
    for num_workers in (0, 1):
        found.append(list(Loader(dataset, addresses, collator, num_workers=num_workers, for_gpu=False)))
    for ours, theirs in zip(*found, strict=True):
        assert ours[0].dtype == theirs[0].dtype == getattr(torch, dtype)
        assert ours[0].shape == (2, 5, 16, 16)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[2], theirs[2])
