"""Label maps of images without labels, and pictures of them.

    OUT/labels/NAME.png      uint8 in the size of the image, with the values of the training's label files; .tif, tiled
                             and with the geo tags of the image, for a TIFF
    OUT/pictures/NAME.png    the image under the colours of its classes, for the first images

Images are seen as in the evaluation of the run, scaled into its --image_scale. With `keep_size` they are not scaled.
Large TIFFs that are not scaled are read, predicted and written part by part. Pixels that are invalid in all channels
have the value of --ignore_index.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from downstream.common import scaled_size
from downstream.pictures import as_picture, default_colors
from downstream.segmentation.data import LabelValues, resize_image
from downstream.segmentation.engine_segmentation import (
    resize_logits,
    slide_blocks,
    slide_logits,
    window_starts,
)
from encoders.trained import Trained
from util.atomic import replaced_file
from util.data.decode import max_pixels
from util.data.images import EncodedImages, ImageError, ImageFiles
from util.data.invalid_pixels import invalid_everywhere, resize_valid
from util.data.large_tiffs import GDAL_NODATA, LargeTiff, Tags, is_tiff, read_geo_tags, with_nodata, write_tiff
from util.data.pixel_format import refuse_not_finite, tifffile
from util.data.transforms import Size, to_tensor
from util.evaluate.loop import EvalContext
from util.evaluate.predictions import Progress, output_paths, prepared_batches
from util.pictures import INVALID_COLOR, save

MAX_WHOLE = 2**22  # pixels of a TIFF that is predicted as a whole, if it is not scaled
STRIP_BYTES = 256 * 2**20  # of the pixels and sums of logits of a strip of columns of a larger one
BAND = 256  # rows that are written at once
PICTURE = 1024  # longest side of a picture


class Seen(NamedTuple):
    """An image as the model sees it, [C, h, w] as stored. invalid: bool [H, W] in its own size."""

    img: Tensor
    size: Size
    invalid: np.ndarray


@dataclass(frozen=True)
class View:
    """Scales images for the model. image_scale: (long, short), or None to keep their size."""

    image_scale: Sequence[int] | None

    def seen_size(self, size: Size) -> Size:
        """Returns the size to which an image is scaled."""
        if self.image_scale is None:
            return size
        longest, shortest = self.image_scale
        return scaled_size(size, longest, shortest)

    def __call__(self, img: Tensor) -> Seen:
        """Scales an image [C, H, W] as stored. See `ResizeForEvaluation`."""
        size = (img.shape[1], img.shape[2])
        seen_size = self.seen_size(size)
        seen = img
        if seen_size != size:
            seen = resize_valid(partial(resize_image, size=seen_size), img)
        return Seen(seen, size, find_invalid(img))


def find_invalid(img: Tensor) -> np.ndarray:
    """Returns the pixels of an image [C, H, W] that are invalid in all channels, bool [H, W]."""
    return invalid_everywhere(img.permute(1, 2, 0).numpy())


class Overlay:
    """A picture in which each pixel is the nearest one of an image, taken while the image passes in parts."""

    def __init__(self, size: Size, colors: np.ndarray) -> None:
        """size: (height, width) of the image. colors: uint8 [K, 3]."""
        self.colors = colors
        shown = size
        if max(size) > PICTURE:
            shown = scaled_size(size, PICTURE)
        self.rows = nearest_places(shown[0], size[0])
        self.columns = nearest_places(shown[1], size[1])
        self.picture = np.zeros((*shown, 3), np.uint8)

    def add(self, top: int, left: int, img: np.ndarray, classes: np.ndarray, invalid: np.ndarray) -> None:
        """Adds a part of the image, from (top, left) on: uint8 [h, w, 3], classes [h, w] and bool [h, w]."""
        height, width = classes.shape
        rows = np.flatnonzero((self.rows >= top) & (self.rows < top + height))
        columns = np.flatnonzero((self.columns >= left) & (self.columns < left + width))
        chosen = np.ix_(self.rows[rows] - top, self.columns[columns] - left)
        blend = (img[chosen].astype(np.float32) + self.colors[classes[chosen]]) / 2
        blend[invalid[chosen]] = INVALID_COLOR
        self.picture[np.ix_(rows, columns)] = blend.round().astype(np.uint8)


def nearest_places(number: int, length: int) -> np.ndarray:
    """Returns the nearest of `length` pixels for each of `number` pixels that cover the same axis."""
    return ((np.arange(number) + 0.5) * length / number).astype(np.int64)


def read_bands(file: BinaryIO, size: Size) -> Iterator[np.ndarray]:
    """Yields the rows [h, W] of an image of uint8 from a file that holds nothing else."""
    height, width = size
    for top in range(0, height, BAND):
        num_rows = min(BAND, height - top)
        yield np.frombuffer(file.read(num_rows * width), np.uint8).reshape(num_rows, width)


def with_margin(part: slice, margin: int, length: int) -> slice:
    """Returns a part of an axis, and up to `margin` pixels before and after it."""
    return slice(max(0, part.start - margin), min(part.stop + margin, length))


class LabelMaps:
    """Predicts and writes the label maps of images. num_pictures: how many of the first images have a picture."""

    def __init__(
        self,
        trained: Trained,
        images: EncodedImages,
        out: Path,
        context: EvalContext,
        keep_size: bool = False,
        num_pictures: int = 0,
    ) -> None:
        settings = trained.settings
        self.model = trained.model.to(context.device)
        self.images = images
        self.context = context
        self.num_pictures = num_pictures
        self.stride = settings["stride"]
        image_scale = None if keep_size else settings["image_scale"]
        self.view = View(image_scale)
        self.values = LabelValues(settings["num_classes"], settings["ignore_index"], settings["reduce_zero_label"])
        self.colors = class_colors(trained)
        self.paths = output_paths(out / "labels", images, label_ending)
        self.picture_paths = output_paths(out / "pictures", images, lambda name: ".png")
        if tifffile is None and any(path.suffix == ".tif" for path in self.paths):
            raise ValueError("label maps of TIFFs are TIFFs, which tifffile writes: pip install tifffile")

    def missing(self) -> list[int]:
        """Returns the images without a label map."""
        return [i for i in range(len(self.images)) if not self.paths[i].exists()]

    @torch.no_grad()
    def write_missing(self, progress: Progress) -> None:
        """Writes the label maps that are missing. FloatingPointError if logits are not finite."""
        whole, large = self.split(self.missing())
        largest = None
        if self.view.image_scale is not None:
            largest = (self.view.image_scale[0], self.view.image_scale[1])
        context = self.context.one_by_one()
        for batch in prepared_batches(self.images, whole, self.view, context, progress, largest):
            for i, seen in batch:
                self.predict_whole(i, seen)
        for i in large:
            try:
                self.predict_large(i)
            except ImageError as error:
                progress.fail(str(error))
            else:
                progress.step(1)

    def split(self, indices: list[int]) -> tuple[list[int], list[int]]:
        """Returns the images that are read as a whole, and those that are read in parts.

        ValueError for one that cannot be read as a whole, and would have to be scaled.
        """
        whole = []
        large = []
        for i in indices:
            size = self.size_of_tiff(i)
            if size is None or size[0] * size[1] <= MAX_WHOLE:
                whole.append(i)
                continue
            is_scaled = self.view.seen_size(size) != size
            can_be_whole = size[0] * size[1] <= max_pixels()
            if can_be_whole and (is_scaled or not self.can_be_in_parts(i)):
                whole.append(i)
            elif not is_scaled:
                large.append(i)
            else:
                height, width = self.view.seen_size(size)
                raise ValueError(
                    f"{self.images.path(i)!r} has {size[1]} x {size[0]} pixels, which --image_scale of the run would "
                    f"make {width} x {height}: give --keep_size to predict it in its own size"
                )
        return whole, large

    def can_be_in_parts(self, i: int) -> bool:
        """Whether a TIFF can be read in parts: not if Pillow alone decodes it, or makes it RGB."""
        try:
            with closing(self.open_large(i)) as tiff:
                tiff.keep(slice(0, 1))
                tiff.read(slice(0, 1), slice(0, 1))
        except ImageError:
            return False
        return True

    def open_large(self, i: int) -> LargeTiff:
        """Opens a TIFF that is read part by part. ImageError if it cannot be, or has another format."""
        tiff = LargeTiff(self.images.path(i))
        try:
            tiff.check(self.images.pixel_format, self.images.invalid)
        except ImageError:
            tiff.close()
            raise
        return tiff

    def size_of_tiff(self, i: int) -> Size | None:
        """Returns the size of an image that could be read in parts; None for others."""
        path = self.images.path(i)
        if not isinstance(self.images, ImageFiles) or not is_tiff(path) or tifffile is None:
            return None
        try:
            with tifffile.TiffFile(path) as file:
                page = file.pages[0]
                return page.imagelength, page.imagewidth
        except Exception:  # of many types; reading it as a whole names what is wrong
            return None

    def logits_of_windows(self, windows: Tensor) -> Tensor:
        """Returns the logits of normalised windows. FloatingPointError if they are not finite."""
        with self.context.autocast():
            logits = self.model(windows)["decode"]
        if not logits.isfinite().all():
            raise FloatingPointError("the logits of an image are not finite: try --precision fp32, and check --std")
        return logits

    def predict_whole(self, i: int, seen: Seen) -> None:
        """Writes the label map of an image in memory."""
        img = self.context.normalize(seen.img[None].to(self.context.device, non_blocking=True))[0]
        logits = slide_logits(self.logits_of_windows, img, self.model.img_size, self.stride)
        classes = resize_logits(logits, seen.size).argmax(dim=0).to(torch.uint8).cpu().numpy()
        if i < self.num_pictures:
            shown = as_picture(img, self.context.normalize)
            rows = nearest_places(seen.size[0], shown.shape[0])
            columns = nearest_places(seen.size[1], shown.shape[1])
            overlay = Overlay(seen.size, self.colors)
            overlay.add(0, 0, shown[np.ix_(rows, columns)], classes, seen.invalid)
            self.write_picture(i, overlay)
        self.write_labels(i, seen.size, iter([self.label_values(classes, seen.invalid)]))

    def predict_large(self, i: int) -> None:
        """Writes the label map of a TIFF that is read part by part. ImageError if it cannot be read.

        A strip of columns after the other, from top to bottom. Their values meet in a temporary file.
        """
        with closing(self.open_large(i)) as tiff:
            height, width = tiff.size
            overlay = Overlay(tiff.size, self.colors)
            path = self.paths[i]
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent) as values:
                strips = self.strips_of(tiff)
                with tqdm(total=height * len(strips), unit="row", leave=False, disable=None) as bar:
                    for strip in strips:
                        tiff.keep(with_margin(strip, self.model.img_size[1], width))
                        for rows, classes in self.bands_of(tiff, strip):
                            invalid = self.invalid_of(tiff, rows, strip)
                            if i < self.num_pictures:
                                self.show_rows(tiff, overlay, rows, strip, classes, invalid)
                            for row, line in enumerate(self.label_values(classes, invalid), rows.start):
                                values.seek(row * width + strip.start)
                                values.write(line.tobytes())
                            tiff.forget(rows.stop)
                            bar.update(len(classes))
                if i < self.num_pictures:
                    self.write_picture(i, overlay)
                values.seek(0)
                self.write_labels(i, tiff.size, read_bands(values, tiff.size))

    def strips_of(self, tiff: LargeTiff) -> list[slice]:
        """Returns the strips of columns of an image, which begin where a window does."""
        window_height, window_width = self.model.img_size
        num_rows = 2 * max(tiff.part_size[0], window_height)  # that are decoded
        column_bytes = num_rows * tiff.num_bands * tiff.dtype.itemsize + 4 * window_height * self.values.num_classes
        num_windows = max(2, int((STRIP_BYTES / column_bytes - window_width) / self.stride))
        _, width = tiff.size
        starts = window_starts(width, window_width, self.stride)[::num_windows]
        return [slice(start, end) for start, end in zip(starts, [*starts[1:], width], strict=True)]

    def bands_of(self, tiff: LargeTiff, strip: slice) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields rows, and their classes in a strip of columns, uint8 [h, w], from top to bottom."""

        def read(rows: slice, columns: slice) -> Tensor:
            img = self.stored(tiff, rows, columns)
            return self.context.normalize(img[None].to(self.context.device))[0]

        window = self.model.img_size
        wanted = slice(strip.start, max(strip.stop, window[1]))
        classes = np.zeros((0, 0), np.uint8)
        for block in slide_blocks(self.logits_of_windows, read, tiff.size, window, self.stride, wanted):
            if block.columns.start == strip.start:
                classes = np.zeros((block.rows.stop - block.rows.start, strip.stop - strip.start), np.uint8)
            columns = slice(block.columns.start - strip.start, block.columns.stop - strip.start)
            classes[:, columns] = block.logits.argmax(dim=0).to(torch.uint8).cpu().numpy()
            if block.columns.stop == strip.stop:
                yield block.rows, classes

    def invalid_of(self, tiff: LargeTiff, rows: slice, columns: slice) -> np.ndarray:
        """Returns which pixels of a part of an image are invalid in all channels, bool [h, w]."""
        if not self.images.pixel_format.has_invalid:
            return np.zeros((rows.stop - rows.start, columns.stop - columns.start), bool)
        return find_invalid(self.stored(tiff, rows, columns))

    def stored(self, tiff: LargeTiff, rows: slice, columns: slice) -> Tensor:
        """Returns a part of an image as a whole image is stored, [C, h, w]."""
        values = tiff.read(rows, columns)
        try:
            if not self.images.pixel_format.has_invalid:
                if values.dtype.kind == "f":
                    refuse_not_finite(values)
                return to_tensor(values)
            return to_tensor(self.images.invalid.mark(values, self.images.in_chans))
        except ValueError as error:
            raise ImageError(f"{tiff.path!r} cannot be used: {error}") from error

    def show_rows(
        self,
        tiff: LargeTiff,
        overlay: Overlay,
        rows: slice,
        columns: slice,
        classes: np.ndarray,
        invalid: np.ndarray,
    ) -> None:
        """Adds a part of an image to a picture. Rows that it does not show are not looked at."""
        shown = overlay.rows[(overlay.rows >= rows.start) & (overlay.rows < rows.stop)]
        for row in shown.tolist():
            img = self.stored(tiff, slice(row, row + 1), columns)
            pixels = self.context.normalize(img[None].to(self.context.device))[0]
            place = slice(row - rows.start, row - rows.start + 1)
            picture = as_picture(pixels, self.context.normalize)
            overlay.add(row, columns.start, picture, classes[place], invalid[place])

    def label_values(self, classes: np.ndarray, invalid: np.ndarray) -> np.ndarray:
        """Returns what the label files of the training have for these classes, uint8 [h, W]."""
        values = classes + np.uint8(self.values.first)
        values[invalid] = self.values.ignore_index
        return values

    def write_labels(self, i: int, size: Size, bands: Iterator[np.ndarray]) -> None:
        """Writes the label map of an image from the bands of its values."""
        path = self.paths[i]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as temporary:
            if path.suffix == ".tif":
                write_tiff(temporary, size, bands, self.tags_of(i))
            else:
                Image.fromarray(np.concatenate(list(bands))).save(temporary)

    def tags_of(self, i: int) -> Tags:
        """Returns the geo tags of an image. A nodata value becomes that of a label map."""
        tags = read_geo_tags(self.images.source(i))
        has_nodata = any(tag[0] == GDAL_NODATA for tag in tags)
        if self.images.pixel_format.has_invalid or has_nodata:
            return with_nodata(tags, self.values.ignore_index)
        return tags

    def write_picture(self, i: int, overlay: Overlay) -> None:
        path = self.picture_paths[i]
        path.parent.mkdir(parents=True, exist_ok=True)
        save(overlay.picture, path)


def label_ending(name: str) -> str:
    """Returns the ending of the label map of an image."""
    if is_tiff(name):
        return ".tif"
    return ".png"


def class_colors(trained: Trained) -> np.ndarray:
    """Returns the colours of the classes, uint8 [num_classes, 3]; default ones, if the file has none."""
    if trained.weights.info.class_colors:
        return np.array(trained.weights.info.class_colors, np.uint8)
    return default_colors(trained.settings["num_classes"])


def describe_labels(trained: Trained) -> dict[str, Any]:
    """Returns what the values in the label maps and the colours in the pictures mean, for the record."""
    settings = trained.settings
    values = LabelValues(settings["num_classes"], settings["ignore_index"], settings["reduce_zero_label"])
    names = trained.weights.info.classes or [str(k) for k in range(values.num_classes)]
    classes = {str(values.first + k): name for k, name in enumerate(names)}
    colors = {str(values.first + k): color for k, color in enumerate(class_colors(trained).tolist())}
    return {"classes": classes, "colors": colors, "no_class": values.ignore_index}
