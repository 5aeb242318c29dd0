"""From the bytes of an image file to pixels: simplejpeg for plain JPEGs where it is installed, Pillow for all others.

Pixels are those of Pillow's `convert("RGB")`, bit for bit, except for grey images of 16 bits. Pillow clips these at
255, so that most of them are white. Here they are scaled to 8 bits. EXIF is ignored, as torchvision's ImageFolder does.
"""

import io
import os
from typing import BinaryIO

import numpy as np
from PIL import Image, TiffImagePlugin, UnidentifiedImageError

try:
    import simplejpeg  # libjpeg-turbo without Pillow's copies; optional
except ImportError:
    simplejpeg = None

# The formats of ImageFolder's extensions. Others that Pillow knows start programs of their own.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")

# What Pillow raises for files that are broken, are no images, or would unfold to gigabytes (a warning under python -W error).
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning)
_PLAIN = ("YCbCr", "Gray")  # others, CMYK say, have their own rules in Pillow


def decode(data: bytes, reference: bool = False) -> np.ndarray:
    """Bytes of a file -> uint8 [H, W, 3]; one of `PILLOW_ERRORS` if that fails. `reference`: Pillow in any case."""
    if simplejpeg is not None and not reference and data[:2] == b"\xff\xd8":
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
            if colorspace in _PLAIN and height * width <= max_pixels():
                return simplejpeg.decode_jpeg(data, "RGB")
        except ValueError:  # a damaged file: Pillow says how, or reads it after all
            pass
    with open_image(io.BytesIO(data)) as img:
        img.load()
        if has_16_bits(img):
            return np.repeat(to_8_bits(img)[:, :, None], 3, axis=2)
        return np.array(img if img.mode == "RGB" else img.convert("RGB"))  # convert copies what it need not


def has_16_bits(img: Image.Image) -> bool:
    """Whether it is a grey image of 16 bits. Of PNG and PPM, Pillow's mode for integers never holds more."""
    return img.mode.startswith("I;16") or (img.mode == "I" and img.format in ("PNG", "PPM"))


def to_8_bits(img: Image.Image) -> np.ndarray:
    """A grey image of 16 bits -> uint8 [H, W]: its range is scaled to 0 to 255 (divided by 257) and rounded."""
    bits = 16
    if isinstance(img, TiffImagePlugin.TiffImageFile):  # 12 bits have the same mode
        bits = img.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (bits,))[0]
    most = 2**bits - 1
    return ((np.asarray(img).astype(np.uint32) * 255 + most // 2) // most).astype(np.uint8)


def max_pixels() -> float:
    """Pillow's limit, 89 million unless it is set: what a few kilobytes would unfold to is known from their header."""
    return Image.MAX_IMAGE_PIXELS or np.inf


def open_image(source: str | os.PathLike | BinaryIO) -> Image.Image:
    """Pillow's image of a path or file, of which only the header has been read; one of `PILLOW_ERRORS`."""
    try:
        img = Image.open(source, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise UnidentifiedImageError(f"it does not begin as one of {', '.join(FORMATS)}") from error
    problem = None
    if img.width * img.height > max_pixels():  # Pillow's own error comes at twice as many
        problem = Image.DecompressionBombError(f"{img.width} x {img.height} pixels are more than {max_pixels()}")
    elif img.mode == "F" or (img.mode == "I" and not has_16_bits(img)):
        kind = "floating-point numbers" if img.mode == "F" else "signed or 32-bit integers"
        problem = ValueError(f"its pixels are {kind}, which have no fixed range: convert it to 8 or 16 bits, unsigned")
    if problem is not None:
        img.close()
        raise problem
    return img


def check_header(source: str | os.PathLike | BinaryIO) -> None:
    """One of `PILLOW_ERRORS` if a path or file does not start as an image."""
    open_image(source).close()
