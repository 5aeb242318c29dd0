"""Images with any number of channels: formats of pixels, and files that are read with all channels and bits.

With 3 channels, files that Pillow can open become RGB of 8 bits (`util.data.decode`). Here are all others: `.npy`
arrays, TIFFs with several bands or float values (by tifffile), and images of 8 or 16 bits that are not made RGB.
"""

import io
import math
import os
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format
from PIL import Image, UnidentifiedImageError

from util.data.decode import (
    ORIENTATION,
    PILLOW_ERRORS,
    FormatError,
    decode,
    has_16_bits,
    max_pixels,
    open_image,
    refuse_turned,
    refuse_unlike_rgb,
)
from util.text import count_of

try:
    import tifffile  # TIFFs with bands that Pillow cannot read; optional
except ImportError:
    tifffile = None

NPY = b"\x93NUMPY"
GDAL_NODATA = 42113  # a tag of GeoTIFFs
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF
RANGES = {"uint8": 255.0, "uint16": 65535.0, "float32": 1.0}
# Modes of Pillow whose channels are taken as they are. All others become RGB.
MODES = {"1": "L", "L": "L", "LA": "LA", "RGBA": "RGBA"}


def nodata_value(text: str) -> float | str:
    """Returns the value of --nodata. NaN stays a word, because settings are compared, and NaN equals nothing."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(text)
    if math.isnan(value):
        return "nan"
    return value


def declares_invalid(settings: Mapping[str, Any]) -> bool:
    """Whether flags, or the settings of a run, mark pixels as invalid: see `util.data.invalid_pixels`."""
    return settings.get("nodata") is not None or settings.get("mask_band") is not None or bool(settings.get("bands"))


@dataclass(frozen=True)
class PixelFormat:
    """What all images of a source have in common.

    dtype: of the files, uint8, uint16 or float32. has_invalid: pixels may be invalid (`util.data.invalid_pixels`).
    """

    channels: int
    dtype: str
    has_invalid: bool = False

    def __str__(self) -> str:
        text = f"{count_of(self.channels, 'channel')} of {self.dtype}"
        if self.has_invalid:
            text += ", some pixels invalid"
        return text

    @property
    def is_rgb8(self) -> bool:
        return self.channels == 3 and self.dtype == "uint8"

    @property
    def batch_dtype(self) -> str:
        """The type of batches: that of the files, or float32 if NaN marks invalid pixels."""
        if self.has_invalid:
            return "float32"
        return self.dtype

    @property
    def full_range(self) -> float:
        """The largest integer value. Statistics of integers are fractions of it; those of floats are not scaled."""
        return RANGES[self.dtype]

    @property
    def is_float(self) -> bool:
        """Whether pixels have a unit of their own instead of a fixed range."""
        return self.dtype == "float32"

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel of a batch with all its channels."""
        return self.channels * np.dtype(self.batch_dtype).itemsize


RGB8 = PixelFormat(3, "uint8")
Header = tuple[PixelFormat, tuple[int, int]]  # format and (height, width) of an image


def read_header(source: str | os.PathLike[str] | io.BytesIO, in_chans: int, keep_bands: bool = False) -> Header:
    """Reads the format and the (height, width) of an image; one of `PILLOW_ERRORS` if they cannot be read.

    source: a path, or the bytes of a file. in_chans: channels that are wanted. The result may have another number. With
    3, all that Pillow can open is RGB of 8 bits, unless files `keep_bands`.
    """
    to_rgb = in_chans == 3 and not keep_bands
    with _opened(source) as file:
        start = file.read(len(NPY))
        file.seek(0)
        if start == NPY:
            return _npy_header(file, in_chans)
        is_tiff = start.startswith(TIFF)
        if is_tiff and not to_rgb:
            return _tiff_header(file, in_chans)
    try:
        with _opened(source) as file:
            return _picture_header(file, to_rgb)
    except UnidentifiedImageError:
        if not is_tiff:
            raise
    with _opened(source) as file:
        return _tiff_header(file, in_chans)


def _opened(source: str | os.PathLike[str] | io.BytesIO) -> BinaryIO:
    """Opens a file for reading, or a copy of the bytes of one: Pillow closes what it cannot read."""
    if isinstance(source, io.BytesIO):
        return io.BytesIO(source.getvalue())
    return open(source, "rb")


def _picture_header(file: BinaryIO, to_rgb: bool) -> Header:
    """Reads the header of an image by Pillow."""
    with open_image(file) as img:
        size = (img.height, img.width)
        if to_rgb:
            refuse_unlike_rgb(img)
            return RGB8, size
        channels = Image.getmodebands(_mode(img))
        if has_16_bits(img):
            return PixelFormat(channels, "uint16"), size
        return PixelFormat(channels, "uint8"), size


def read_pixels(
    data: bytes,
    expected: PixelFormat,
    reference: bool = False,
    may_hold_nan: bool = False,
    keep_bands: bool = False,
) -> np.ndarray:
    """Decodes a file to [H, W, C] in the `expected` format; one of `PILLOW_ERRORS` if that fails.

    reference: see `decode`. may_hold_nan: the caller checks floats. keep_bands: see `read_header`. ValueError if the
    file has another format, or if a float is not finite.
    """
    if expected == RGB8 and not keep_bands and not data.startswith(NPY):
        try:
            return decode(data, reference)
        except UnidentifiedImageError:
            if not data.startswith(TIFF):
                raise
    pixel_format, _ = read_header(io.BytesIO(data), expected.channels, keep_bands)
    if pixel_format != expected:
        raise ValueError(f"it has {pixel_format}, other images have {expected}")
    if data.startswith(NPY):
        array = np.load(io.BytesIO(data), allow_pickle=False)
    elif data.startswith(TIFF):
        array = _read_tiff(data, expected.channels)
    else:
        array = _read_picture(data)
    if array.ndim == 2:
        array = array[:, :, None]
    array = np.require(array, expected.dtype, ["C", "W"])  # in this machine's byte order
    if expected.is_float and not may_hold_nan:
        refuse_not_finite(array)
    return array


def _read_picture(data: bytes) -> np.ndarray:
    """Returns an image that Pillow reads, with its own channels, [H, W] or [H, W, C]."""
    with open_image(io.BytesIO(data)) as img:
        if has_16_bits(img):
            return np.asarray(img)
        return np.asarray(img.convert(_mode(img)))


def refuse_not_finite(array: np.ndarray) -> None:
    """ValueError if a band of [H, W, C] holds NaN or infinite values."""
    bad = np.flatnonzero(~np.isfinite(array).all(axis=(0, 1)))
    if len(bad):
        bands = ", ".join(map(str, bad[:10].tolist()))
        raise ValueError(f"NaN or infinite values are in band {bands} (counted from 0): replace them, or see --nodata")


def _mode(img: Image.Image) -> str:
    """Returns Pillow's mode in which the channels of an image are read."""
    if has_16_bits(img):
        return "I;16"
    return MODES.get(img.mode, "RGB")


def _checked(shape: tuple[int, ...], dtype: np.dtype) -> Header:
    """Returns the header of an array [H, W] or [H, W, C]; ValueError if it is not one that can be read."""
    name = str(dtype)
    if dtype.kind in "uf":
        name = dtype.newbyteorder("=").name
    if name not in RANGES:
        raise FormatError(f"its values are {name}; only {', '.join(RANGES)} are read: convert them, int16 to float32")
    if len(shape) not in (2, 3) or 0 in shape:
        raise FormatError(f"its shape is {list(shape)}; expected is [H, W] or [H, W, C]")
    if shape[0] * shape[1] > max_pixels():
        raise ValueError(f"{shape[1]} x {shape[0]} pixels are more than {max_pixels()}")
    channels = 1
    if len(shape) == 3:
        channels = shape[2]
    return PixelFormat(channels, name), (shape[0], shape[1])


def _npy_header(file: BinaryIO, in_chans: int) -> Header:
    version = npy_format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = npy_format.read_array_header_1_0(file)
    else:
        shape, _, dtype = npy_format.read_array_header_2_0(file)
    if len(shape) == 3 and shape[2] != in_chans and (shape[0] == in_chans or shape[0] < min(shape[1:])):
        raise FormatError(f"its shape {list(shape)} is no [H, W, C]: save numpy.moveaxis(array, 0, -1)")
    return _checked(shape, dtype)


@contextmanager
def _open_tiff(source: BinaryIO) -> Any:
    """Opens a TIFF and yields its first image. tifffile's errors become ValueError."""
    if tifffile is None:
        raise FormatError("TIFFs with any number of bands are read by tifffile: pip install tifffile")
    try:
        with tifffile.TiffFile(source) as tiff:
            refuse_turned(tiff.pages[0].tags.valueof(ORIENTATION))
            image = tiff.series[0]
            if tiff.is_ome:
                num_images = sum(other.shape == image.shape for other in tiff.series)
                if num_images > 1 or image.is_multifile or any(page is None for page in image):
                    raise FormatError("it holds several images, or some bands of one: save each in a file of its own")
            yield image
    except PILLOW_ERRORS:
        raise
    except Exception as error:  # of many types, for damaged files
        raise ValueError(f"tifffile cannot read it ({type(error).__name__}: {error})") from error


def _bands_last(shape: tuple[int, ...], axes: str, in_chans: int) -> bool:
    """Whether an image of a TIFF is [H, W, C] instead of [C, H, W].

    Bands come first if they are planes or pages. tifffile writes an array [H, W, C] as H pages if it is not told more.
    """
    if len(shape) != 3 or axes.startswith("S"):
        return False
    return axes.startswith("YX") or (shape[2] == in_chans and shape[0] != in_chans)


def _tiff_header(source: BinaryIO, in_chans: int) -> Header:
    with _open_tiff(source) as image:
        shape = image.shape
        if len(shape) == 3 and not _bands_last(shape, image.axes, in_chans):
            shape = (*shape[1:], shape[0])
        return _checked(shape, image.dtype)


def _read_tiff(data: bytes, in_chans: int) -> np.ndarray:
    """Returns all bands of a TIFF [H, W] or [H, W, C]."""
    with _open_tiff(io.BytesIO(data)) as image:
        array = image.asarray()
        if array.ndim == 3 and not _bands_last(image.shape, image.axes, in_chans):
            return np.moveaxis(array, 0, -1)
        return array
