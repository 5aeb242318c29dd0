"""Decodes image files: plain JPEGs by simplejpeg if it is installed, everything else by Pillow.

Pixels equal those of Pillow's `convert("RGB")` bit for bit, except for grey images of 16 bits. Pillow clips these at
255, so that most pixels become white. Here they are scaled to 8 bits. EXIF is ignored, as in torchvision's ImageFolder.
"""

import io
import itertools
import logging
import os
import warnings
from contextlib import suppress
from typing import BinaryIO

import numpy as np
from PIL import Image, TiffImagePlugin, UnidentifiedImageError

try:
    import simplejpeg  # libjpeg-turbo without Pillow's copies; optional
except ImportError:
    simplejpeg = None

logging.getLogger("PIL").addHandler(logging.NullHandler())  # without one, stderr shows what it logs before an error

# The formats of ImageFolder's extensions. For some other formats Pillow starts external programs.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
READABLE = (*FORMATS, "GIF")  # a GIF may have the ending of another format, or none in a data set of Hugging Face

# Errors of Pillow for files that are broken, are no images, or would need gigabytes once decoded.
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
ORIENTATION = 274  # a tag of TIFF and EXIF
NEW_SUBFILE_TYPE, REDUCED, MASK = 254, 1, 4  # another one, and its bits
PLAIN_COLORS = ("YCbCr", "Gray")  # Pillow converts others, such as CMYK, by rules of its own


class FormatError(ValueError):
    """Files of this kind are never read. One of them is no damaged file, so it is not replaced by another image."""


def decode(data: bytes, reference: bool = False) -> np.ndarray:
    """Decodes a file to uint8 [H, W, 3]; one of `PILLOW_ERRORS` if that fails. reference: always use Pillow."""
    if simplejpeg is not None and not reference and data[:2] == b"\xff\xd8":
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
            if colorspace in PLAIN_COLORS and height * width <= max_pixels():
                return simplejpeg.decode_jpeg(data, "RGB")
        except ValueError:  # a damaged file: Pillow may still read it, or has a better message
            pass
    with open_image(io.BytesIO(data)) as img:
        refuse_unlike_rgb(img)
        img.load()
        if has_16_bits(img):
            return np.repeat(to_8_bits(img)[:, :, None], 3, axis=2)
        if img.mode == "RGB":
            return np.array(img)
        return np.array(img.convert("RGB"))  # `convert` always copies, also in mode RGB


def has_16_bits(img: Image.Image) -> bool:
    """Whether it is a grey image of 16 bits. For PNG and PPM, Pillow's mode "I" never holds more bits."""
    if img.mode == "I":
        return img.format in ("PNG", "PPM")
    return img.mode.startswith("I;16")


def to_8_bits(img: Image.Image) -> np.ndarray:
    """Scales a grey image of 16 bits to 0 to 255 (divides by 257) and rounds. Returns uint8 [H, W]."""
    bits = 16
    if isinstance(img, TiffImagePlugin.TiffImageFile):  # images of 12 bits have the same mode
        bits = img.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (bits,))[0]
    most = 2**bits - 1
    values = np.asarray(img).astype(np.uint32)
    scaled = (values * 255 + most // 2) // most
    return scaled.astype(np.uint8)


def max_pixels() -> float:
    """Returns Pillow's limit: 89 million pixels by default. It protects from small files of huge images."""
    return Image.MAX_IMAGE_PIXELS or np.inf


def open_image(source: str | os.PathLike[str] | BinaryIO) -> Image.Image:
    """Opens an image and reads its header; one of `PILLOW_ERRORS` if that fails, or if it has too many pixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            img = Image.open(source, formats=READABLE)
    except UnidentifiedImageError as error:
        raise UnidentifiedImageError(f"it does not begin as one of {', '.join(FORMATS)}") from error
    if img.width * img.height > max_pixels():  # Pillow itself raises at twice the limit
        img.close()
        raise Image.DecompressionBombError(f"{img.width} x {img.height} pixels are more than {max_pixels()}")
    return img


def refuse_unlike_rgb(img: Image.Image) -> None:
    """ValueError for an opened image that Pillow would make RGB with other pixels than it has.

    These are values without a fixed range, and TIFFs of several pages of one size, of which thumbnails, overviews and
    masks are none, as are pages that Pillow cannot read.
    """
    if img.mode == "F" or (img.mode == "I" and not has_16_bits(img)):
        raise ValueError("its pixels are floats or 32-bit integers, which have no fixed range: see --in_chans 1")
    if not isinstance(img, TiffImagePlugin.TiffImageFile):
        return
    refuse_turned(img.tag_v2.get(ORIENTATION))
    size = img.size
    num_pages = 1
    with suppress(Exception):  # EOFError after the last page; of many types for damaged files
        for page in itertools.count(1):
            img.seek(page)
            is_extra = img.tag_v2.get(NEW_SUBFILE_TYPE, 0) & (REDUCED | MASK)
            if img.size == size and not is_extra:
                num_pages += 1
    img.seek(0)
    if num_pages > 1:
        raise FormatError(
            f"it has {num_pages} pages: save each image in one page, or give --in_chans {num_pages} for channels"
        )


def refuse_turned(orientation: int | None) -> None:
    """FormatError for a TIFF that is to be shown turned: some libraries turn it, and others do not."""
    if orientation not in (None, 1):
        raise FormatError(f"its TIFF orientation is {orientation}: store its pixels upright, with orientation 1")
