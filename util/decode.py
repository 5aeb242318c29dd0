"""From the bytes of an image file to pixels: fast where it is a plain JPEG, by Pillow where it is anything else.

Pixels are the same either way, bit for bit. EXIF is ignored, as torchvision's ImageFolder does.
"""

import io
import warnings

import numpy as np
from PIL import Image, UnidentifiedImageError

try:
    import simplejpeg  # libjpeg-turbo without Pillow's copies; optional
except ImportError:
    simplejpeg = None

# The formats of ImageFolder's extensions. Others that Pillow knows start programs of their own.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # an error here

# What Pillow raises for files that are broken, are no images, or would unfold to gigabytes.
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
_PLAIN = ("YCbCr", "Gray")  # others, CMYK say, have their own rules in Pillow


def decode(data, reference=False):
    """Bytes of a file -> uint8 [H, W, 3]; one of `PILLOW_ERRORS` where it cannot be. `reference`: Pillow in any case."""
    if simplejpeg is not None and not reference and data[:2] == b"\xff\xd8":
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
            if colorspace in _PLAIN and height * width <= max_pixels():
                return simplejpeg.decode_jpeg(data, "RGB")
        except ValueError:  # a damaged file: Pillow says how, or reads it after all
            pass
    with open_image(io.BytesIO(data)) as img:
        img.load()
        return np.array(img if img.mode == "RGB" else img.convert("RGB"))  # convert copies what it need not


def max_pixels():
    """Pillow's limit, 89 million unless it is set: what a few kilobytes would unfold to is known from their header."""
    return Image.MAX_IMAGE_PIXELS or np.inf


def open_image(source):
    """Pillow's image of a path or file, of which only the header has been read; one of `PILLOW_ERRORS`."""
    try:
        img = Image.open(source, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise UnidentifiedImageError(f"it does not begin as one of {', '.join(FORMATS)}") from error
    if img.width * img.height > max_pixels():
        img.close()
        raise Image.DecompressionBombError(f"{img.width} x {img.height} pixels are more than {max_pixels()}")
    return img


def check_header(source):
    """One of `PILLOW_ERRORS` if a path or file does not start as an image."""
    open_image(source).close()
