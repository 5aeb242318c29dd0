"""TIFFs of any size, of which rasterio reads rows, and the geo tags that label maps copy, by tifffile."""

import io
import os
import warnings
from typing import Any

import numpy as np
from torch import Tensor

from util.data.images import EncodedImages, ImageError
from util.data.pixel_format import RANGES, PixelFormat, refuse_not_finite, tifffile
from util.data.transforms import Size, to_tensor

# ModelPixelScale, ModelTiepoint, ModelTransformation, GeoKeyDirectory, GeoDoubleParams, GeoAsciiParams
GEO_TAGS = (33550, 33922, 34264, 34735, 34736, 34737)

Tags = list[tuple[int, int, int, Any, bool]]  # (code, type, count, value, on the first page alone), of tifffile


def is_tiff(name: str) -> bool:
    return name.lower().endswith((".tif", ".tiff"))


class LargeTiff:
    """A TIFF whose rows are read one after the other. ImageError unless they are those of the whole image.

    size: (height, width). pixels: the format that the whole image would have.
    """

    def __init__(self, images: EncodedImages, i: int) -> None:
        self.path = images.path(i)
        self.invalid = images.invalid
        if not is_tiff(self.path):
            raise ImageError(f"{self.path!r} is no TIFF, and cannot be read in parts")
        os.environ.setdefault("GDAL_CACHEMAX", "256")  # MB; else a share of the machine's memory, not of the job's
        try:
            import rasterio

            warnings.filterwarnings("ignore", category=rasterio.errors.NotGeoreferencedWarning)  # as of microscopes
            self.file = rasterio.open(self.path, driver="GTiff")
        except ImportError as error:
            raise ImageError(f"{self.path!r} is read in parts by rasterio: pip install rasterio") from error
        except OSError as error:
            raise ImageError(f"{self.path!r} cannot be read in parts: {error}") from error
        self.size: Size = self.file.shape
        dtype = self.file.dtypes[0]
        is_packed = "NBITS" in self.file.tags(1, ns="IMAGE_STRUCTURE")  # such as float16, which becomes float32
        counts = [images.in_chans]
        if self.invalid is not None:
            counts = self.invalid.band_counts(images.in_chans)
        has_bands = self.file.count in counts
        if self.file.subdatasets or is_packed or dtype not in RANGES or not has_bands:
            raise ImageError(
                f"{self.path!r} is not read in parts: it must be one page of {images.in_chans} channels of "
                f"{', '.join(RANGES)}"
            )
        self.pixels = PixelFormat(images.in_chans, dtype, self.invalid is not None)

    def read(self, rows: slice, shape: Size | None = None) -> Tensor:
        """Returns rows as images are stored, [C, h, W]; their nearest pixels, if another (h, W) is given.

        ImageError if they are damaged.
        """
        window = (rows.start, rows.stop), (0, self.size[1])
        if shape is None:
            shape = (rows.stop - rows.start, self.size[1])
        try:
            bands = self.file.read(window=window, out_shape=(self.file.count, *shape))
            array = np.moveaxis(bands, 0, -1)
            if self.invalid is not None:
                array = self.invalid.mark(array, self.pixels.channels)
            elif self.pixels.is_float:
                refuse_not_finite(array)
        except (OSError, ValueError) as error:
            raise ImageError(f"{self.path!r} cannot be decoded: {error}") from error
        return to_tensor(array)


def read_geo_tags(source: str | io.BytesIO) -> Tags:
    """Returns the geo tags of a TIFF as tifffile writes them: all, or none if one cannot be read."""
    try:
        with tifffile.TiffFile(source) as file:
            tags = file.pages[0].tags
            found = [tags[code] for code in GEO_TAGS if code in tags]
            return [(tag.code, int(tag.dtype), tag.count, tag.value, True) for tag in found]
    except Exception:  # of many types; its pixels have been read
        return []
