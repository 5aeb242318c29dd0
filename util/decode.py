"""From the bytes of an image file to pixels: fast where it is a plain JPEG, by Pillow where it is anything else.

Pixels are the same either way, bit for bit. EXIF is ignored, as torchvision's ImageFolder does.
"""

import io

import numpy as np
from PIL import Image

try:
    import simplejpeg  # libjpeg-turbo without Pillow's copies; optional
except ImportError:
    simplejpeg = None

# What Pillow raises for files that are broken, are no images, or would unfold to gigabytes.
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
_PLAIN = ("YCbCr", "Gray")  # others, CMYK say, have their own rules in Pillow


def decode(data, reference=False):
    """Bytes of a file -> uint8 [H, W, 3]; one of `PILLOW_ERRORS` where it cannot be. `reference`: Pillow in any case."""
    if simplejpeg is not None and not reference and data[:2] == b"\xff\xd8":
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
            if colorspace in _PLAIN and height * width <= (Image.MAX_IMAGE_PIXELS or np.inf):
                return simplejpeg.decode_jpeg(data, "RGB")
        except ValueError:  # a damaged file: Pillow says how, or reads it after all
            pass
    with Image.open(io.BytesIO(data)) as img:
        img.load()
        return np.array(img if img.mode == "RGB" else img.convert("RGB"))  # convert copies what it need not
