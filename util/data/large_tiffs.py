"""TIFFs that are read and written part by part, by tifffile: images that do not fit into memory, and their geo tags."""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from util.data.images import EncodedImages, ImageError, ImageFiles
from util.data.invalid_pixels import InvalidPixels
from util.data.pixel_format import RANGES, PixelFormat, tifffile
from util.data.transforms import Size
from util.text import count_of

ENDINGS = (".tif", ".tiff")
TILE = 256  # side of the tiles that are written
STRIP = 64  # rows that are read at once of an uncompressed image without tiles
MOST_BYTES = 2**28  # of a part of a file that is decoded at once
RGB = 2  # a photometric interpretation
GDAL_NODATA = 42113
# ModelPixelScale, ModelTiepoint, ModelTransformation, GeoKeyDirectory, GeoDoubleParams, GeoAsciiParams
GEO_TAGS = (33550, 33922, 34264, 34735, 34736, 34737)

Tags = list[tuple[int, int, int, Any, bool]]  # (code, type, count, value, on the first page alone), of tifffile


def is_tiff(name: str) -> bool:
    return name.lower().endswith(ENDINGS)


class RowOfParts(NamedTuple):
    """What is kept of a row of tiles, or of a strip. values: [h, w, bands]. decoded: columns of the decoded parts."""

    values: np.ndarray
    decoded: set[int]


class LargeTiff:
    """The image of an open TIFF, of which parts are decoded when they are read, and kept until they are forgotten.

    size: (height, width). dtype: of its values. num_bands: of the file. ImageError if the file cannot be read in parts.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        if tifffile is None:
            raise ImageError(f"{path!r} is read in parts by tifffile: pip install tifffile")
        try:
            self.file = tifffile.TiffFile(path)
        except Exception as error:  # of many types, for damaged files
            raise ImageError(f"{path!r} cannot be read: {error}") from error
        try:
            self._find_pages()
        except ImageError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise ImageError(f"{path!r} cannot be read in parts ({type(error).__name__}: {error})") from error
        self.kept = slice(0, self.size[1])
        self.rows: dict[int, RowOfParts] = {}

    def _find_pages(self) -> None:
        """Finds out how the values lie in the file: in planes of one or more bands, and these in parts."""
        series = self.file.series[0]
        pages = [page.aspage() for page in series.pages]
        first = pages[0]
        planes_of_page, depth, height, width, bands_of_plane = first.shaped
        is_layered = len(pages) > 1 and (planes_of_page > 1 or bands_of_plane > 1)
        if depth != 1 or series.is_multifile or is_layered or series.shape[-1] not in (width, bands_of_plane):
            raise ImageError(f"{self.path!r} has the shape {series.shape}, which is not read in parts")
        self.pages = pages
        self.planes_of_page = planes_of_page
        self.size: Size = (height, width)
        self.dtype = np.dtype(first.dtype)
        self.num_bands = len(pages) * planes_of_page * bands_of_plane
        self.bands_of_plane = bands_of_plane
        self.is_rgb = first.photometric == RGB and self.num_bands == 3
        self.is_contiguous = bool(first.is_contiguous)
        self.part_size: Size = (first.rowsperstrip, width)
        if first.is_tiled:
            self.part_size = (first.tilelength, first.tilewidth)
        elif self.is_contiguous:
            self.part_size = (STRIP, width)
        part_bytes = self.part_size[0] * self.part_size[1] * bands_of_plane * self.dtype.itemsize
        if part_bytes > MOST_BYTES:
            raise ImageError(
                f"{self.path!r} is stored in parts of {self.part_size[1]} x {self.part_size[0]} pixels, which take too "
                f"much memory: rewrite it in tiles, such as gdal_translate -co TILED=YES"
            )

    def close(self) -> None:
        self.file.close()

    def check(self, expected: PixelFormat, invalid: InvalidPixels) -> None:
        """ImageError unless the parts have the values that reading the whole file gives, in the `expected` format.

        With three channels, other files than RGB of 8 bits would first be made RGB.
        """
        counts = invalid.band_counts(expected.channels)
        name = self.dtype.newbyteorder("=").name
        has_format = name in RANGES and name == expected.dtype and self.num_bands in counts
        becomes_rgb = expected.channels == 3 and invalid.to_rgb is None and not expected.is_float
        if not has_format or (becomes_rgb and not self.is_rgb):
            raise ImageError(
                f"{self.path!r} has {count_of(self.num_bands, 'band')} of {self.dtype.name}, but large images must "
                f"have {expected.channels} channels of {expected.dtype}, and if these are 3, be RGB"
            )

    def keep(self, columns: slice) -> None:
        """From now on, windows in these columns are read. What is decoded is freed."""
        self.kept = columns
        self.rows = {}

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        """Returns [h, w, bands of the file] of a window inside the kept columns. ImageError if it cannot be decoded."""
        assert self.kept.start <= columns.start
        assert columns.stop <= self.kept.stop
        height, _ = self.part_size
        pieces = []
        for i in range(rows.start // height, (rows.stop - 1) // height + 1):
            values = self._decoded_row(i, columns)
            first = max(rows.start - i * height, 0)
            window = slice(columns.start - self.kept.start, columns.stop - self.kept.start)
            pieces.append(values[first : rows.stop - i * height, window])
        return np.concatenate(pieces)

    def _decoded_row(self, i: int, columns: slice) -> np.ndarray:
        """Returns what is kept of a row of parts, [h, w, bands], in which those of the columns are decoded."""
        height, width = self.part_size
        kept = self.kept
        if i not in self.rows:
            num_rows = min(height, self.size[0] - i * height)
            # One array for all parts: many small ones, freed in another order, would leave gaps in the memory.
            shape = (num_rows, kept.stop - kept.start, self.num_bands)
            self.rows[i] = RowOfParts(np.empty(shape, self.dtype.newbyteorder("=")), set())
        row = self.rows[i]
        for j in range(columns.start // width, (columns.stop - 1) // width + 1):
            if j in row.decoded:
                continue
            left = max(kept.start, j * width)
            right = min(kept.stop, (j + 1) * width)
            for plane in range(self.num_bands // self.bands_of_plane):
                try:
                    part = self._decode(plane, i, j)
                except Exception as error:
                    advice = "replace or remove it"
                    if "imagecodecs" in str(error):
                        advice = "pip install imagecodecs"
                    reason = f"{type(error).__name__}: {error}"
                    raise ImageError(f"{self.path!r} cannot be decoded ({reason}); {advice}") from error
                bands = slice(plane * self.bands_of_plane, (plane + 1) * self.bands_of_plane)
                inside = part[: len(row.values), left - j * width : right - j * width]
                row.values[:, left - kept.start : right - kept.start, bands] = inside
            row.decoded.add(j)
        return row.values

    def _decode(self, plane: int, i: int, j: int) -> np.ndarray:
        """Returns a tile or strip [h, w, bands of its plane], which may exceed the image."""
        page_number, plane_of_page = divmod(plane, self.planes_of_page)
        page = self.pages[page_number]
        handle = self.file.filehandle
        height, width = self.size
        if self.is_contiguous and not page.is_tiled:
            first = i * STRIP
            num_rows = min(STRIP, height - first)
            row_values = width * self.bands_of_plane
            handle.seek(page.dataoffsets[0] + (plane_of_page * height + first) * row_values * self.dtype.itemsize)
            data = handle.read(num_rows * row_values * self.dtype.itemsize)
            values = np.frombuffer(data, self.dtype.newbyteorder(self.file.byteorder))
            return values.reshape(num_rows, width, self.bands_of_plane)
        parts_across = -(-width // self.part_size[1])
        parts_down = -(-height // self.part_size[0])
        number = (plane_of_page * parts_down + i) * parts_across + j
        encoded = None  # a sparse file leaves out parts
        if page.databytecounts[number]:
            handle.seek(page.dataoffsets[number])
            encoded = handle.read(page.databytecounts[number])
        part, _, shape = page.decode(encoded, number, jpegtables=page.jpegtables, jpegheader=page.jpegheader)
        if part is None:
            return np.full(shape[1:], page.nodata, self.dtype)
        return part[0]

    def forget(self, end: int) -> None:
        """Frees the parts that lie above the row `end`."""
        for i in list(self.rows):
            if (i + 1) * self.part_size[0] <= end:
                del self.rows[i]


def format_of_large(images: EncodedImages, i: int) -> PixelFormat:
    """Returns the format of an image that `LargeTiff` reads. ImageError if it does not, or has other bands."""
    if not isinstance(images, ImageFiles) or not is_tiff(images.path(i)):
        raise ImageError(f"{images.path(i)!r} is no file that is read in parts")
    tiff = LargeTiff(images.path(i))
    try:
        name = tiff.dtype.newbyteorder("=").name
        pixels = PixelFormat(images.in_chans, name, has_invalid=images.invalid.is_declared)
        tiff.check(pixels, images.invalid)
        return pixels
    finally:
        tiff.close()


def read_geo_tags(source: str | io.BytesIO) -> Tags:
    """Returns the geo tags of a TIFF, and that of GDAL's nodata value, as tifffile writes them. None if unreadable."""
    tags: Tags = []
    with suppress(Exception), tifffile.TiffFile(source) as file:  # its errors have many types; its pixels were read
        page = file.pages[0]
        for code in (*GEO_TAGS, GDAL_NODATA):
            tag = page.tags.get(code)
            if tag is not None:
                tags.append((code, int(tag.dtype), tag.count, tag.value, True))
    return tags


def with_nodata(tags: Sequence[Any], value: int) -> Tags:
    """Returns tags that say that `value` marks pixels without data."""
    text = str(value)
    others = [tag for tag in tags if tag[0] != GDAL_NODATA]
    return [*others, (GDAL_NODATA, 2, len(text) + 1, text, True)]


def write_tiff(path: Path, size: Size, bands: Iterable[np.ndarray], tags: Tags) -> None:
    """Writes a tiled, compressed TIFF of uint8. bands: [h, W] of its rows, from top to bottom."""
    tifffile.imwrite(
        path,
        tiles_of(bands, size),
        shape=size,
        dtype=np.uint8,
        tile=(TILE, TILE),
        compression="zlib",
        photometric="minisblack",
        extratags=tags,
        metadata=None,
        maxworkers=1,
    )


def tiles_of(bands: Iterable[np.ndarray], size: Size) -> Iterator[np.ndarray]:
    """Yields the tiles of an image in the order of TIFF, padded with zeros. bands: see `write_tiff`."""
    height, width = size
    columns = -(-width // TILE) * TILE
    row_of_tiles = np.zeros((TILE, columns), np.uint8)
    num_filled = 0
    num_done = 0
    for band in bands:
        first = 0
        while first < len(band):
            taken = band[first : first + TILE - num_filled]
            row_of_tiles[num_filled : num_filled + len(taken), :width] = taken
            first += len(taken)
            num_filled += len(taken)
            num_done += len(taken)
            if num_filled == TILE or num_done == height:
                row_of_tiles[num_filled:] = 0
                for left in range(0, columns, TILE):
                    yield row_of_tiles[:, left : left + TILE].copy()
                num_filled = 0
