"""Label maps of images without labels, and pictures of them.

    OUT/labels/NAME.png      palette PNG in the size of the image, with the values of the training's label files; .tif,
                             tiled, with the geo tags of the image and the names of the classes, for a TIFF
    OUT/pictures/NAME.png    the image under the colours of its classes, for the first images

Images are seen as in the evaluation of the run, scaled into its --image_scale. With `keep_size` they are not scaled,
and TIFFs may have any size: large ones are read and predicted row of windows by row of windows. Pixels that are invalid
in all channels have the value of --ignore_index.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from downstream.common import scaled_size
from downstream.segmentation.data import LabelValues, resize_bilinear, scale_image
from downstream.segmentation.engine_segmentation import blend, classes_of, slide_logits, slide_rows, window_starts
from downstream.segmentation.large_tiffs import LargeTiff, Tags, is_tiff, read_geo_tags
from encoders.trained import Trained
from util.atomic import replaced_file
from util.data.images import EncodedImages, ImageError, evenly_spaced
from util.data.pictures import as_picture
from util.data.pixel_format import GDAL_NODATA
from util.data.transforms import Size
from util.evaluate.context import EvalContext
from util.evaluate.predictions import name_unreadable, output_paths, readable_batches, view_of_one
from util.pictures import save

MAX_WHOLE = 2**22  # pixels of a TIFF that is predicted as a whole, if it is not scaled
TILE = 256  # side of the tiles of label maps
PICTURE = 1024  # longest side of a picture
MAX_SHRINK = 2.0
GDAL_METADATA = 42112  # a tag
TEXT = 2  # a type of tags, whose values tifffile counts and ends


class Seen(NamedTuple):
    """An image as the model sees it, [C, h, w] as stored. invalid: bool [H, W] in its own size."""

    img: Tensor
    invalid: Tensor


class View:
    """Scales an image [C, H, W] as stored as `ResizeForEvaluation` does, or not at all."""

    respects_invalid = True

    def __init__(self, image_scale: Sequence[int] | None) -> None:
        self.image_scale = image_scale

    def __call__(self, img: Tensor, epoch: int, index: int) -> Seen:
        seen = img
        if self.image_scale is not None:
            seen = scale_image(img, self.image_scale)
        return Seen(seen, img.isnan().all(dim=0))


def picture_size(size: Size) -> Size:
    """Returns the size of the picture of an image, which is never enlarged."""
    return scaled_size(size, min(PICTURE, max(size)))


def take_nearest(array: np.ndarray, size: Size) -> np.ndarray:
    """Returns the nearest pixels of uint8 [H, W] or [H, W, 3] in another size."""
    height, width = size
    return np.asarray(Image.fromarray(array).resize((width, height), Image.Resampling.NEAREST))


class LabelMaps:
    """Predicts and writes the label maps of images.

    num_pictures: how many of the first images have a picture. window_weights: default: those of the run.
    """

    def __init__(
        self,
        trained: Trained,
        images: EncodedImages,
        out: Path,
        context: EvalContext,
        keep_size: bool = False,
        num_pictures: int = 0,
        window_weights: str | None = None,
    ) -> None:
        settings = trained.settings
        classes = classes_of(trained.weights.info)
        self.model = trained.model.to(context.device)
        self.images = images
        self.context = context
        self.num_pictures = num_pictures
        self.stride = settings["stride"]
        self.weights = window_weights or settings["window_weights"]
        self.image_scale = None if keep_size else settings["image_scale"]
        self.values = LabelValues(
            settings["num_classes"],
            settings["ignore_index"],
            settings["reduce_zero_label"],
            settings["label_values"],
        )
        self.class_names = classes.names
        self.palette = np.zeros((256, 3), np.uint8)  # by value of a label map
        self.palette[self.values.of_classes] = classes.colors
        self.paths = output_paths(out / "labels", images, label_ending)
        self.picture_paths = output_paths(out / "pictures", images, lambda name: ".png")

    def facts(self) -> dict[str, Any]:
        """Returns what the values in the label maps and the colours in the pictures mean."""
        classes = {str(value): name for value, name in zip(self.values.of_classes, self.class_names, strict=True)}
        colors = {value: self.palette[int(value)].tolist() for value in classes}
        return {"classes": classes, "colors": colors, "no_class": self.values.no_class}

    def missing(self) -> list[int]:
        """Returns the images without a label map."""
        return [i for i, path in enumerate(self.paths) if not path.exists()]

    def refuse_shrinking(self) -> None:
        """ValueError if an image of a sample is shrunk more than MAX_SHRINK times into --image_scale of the run."""
        assert self.image_scale is not None
        for i in evenly_spaced(len(self.images), self.images.num_checked).tolist():
            with suppress(ImageError):  # it is named later
                _, size = self.images.read_header(i)
                factor = size[0] / scaled_size(size, *self.image_scale)[0]
                if factor > MAX_SHRINK:
                    raise ValueError(
                        f"{self.images.path(i)!r} of {size[1]} x {size[0]} pixels is shrunk {factor:.3g} times into "
                        "--image_scale of the run: give --keep_size, or --no-keep_size to shrink it"
                    )

    @torch.no_grad()
    def write_missing(self) -> None:
        """Writes the label maps that are missing. FloatingPointError if logits are not finite."""
        whole = []
        large = []
        for i in self.missing():
            if self.is_large(i):
                large.append(i)
            else:
                whole.append(i)
        view = View(self.image_scale)
        for (i,), seen in readable_batches(self.images, view, whole, self.context.one_by_one(), view_of_one, (0, 0)):
            self.predict_whole(i, seen)
        for i in large:
            try:
                self.predict_large(i)
            except ImageError as error:
                name_unreadable(str(error))

    def is_large(self, i: int) -> bool:
        """Whether an image is a large TIFF that can be read row by row."""
        if self.image_scale is not None:
            return False
        try:
            tiff = LargeTiff(self.images, i)
        except ImageError:  # reading it as a whole names what is wrong
            return False
        return math.prod(tiff.size) > MAX_WHOLE and tiff.pixels == self.images.pixel_format

    def predict_whole(self, i: int, seen: Seen) -> None:
        """Writes the label map of an image in memory."""
        img = self.normalized(seen.img)
        logits = slide_logits(self.logits_of_windows, img, self.model.img_size, self.stride, self.weights)
        size = (seen.invalid.shape[0], seen.invalid.shape[1])
        labels = self.label_values(resize_bilinear(logits, size))
        labels[seen.invalid.numpy()] = self.values.no_class
        if i < self.num_pictures:
            self.write_picture(i, seen.img, labels)
        self.write_labels(i, labels)

    def predict_large(self, i: int) -> None:
        """Writes the label map of a TIFF that is read row by row. ImageError if it cannot be read."""
        tiff = LargeTiff(self.images, i)
        with tiff.file:
            is_invalid = np.zeros(tiff.size, bool)

            def read(rows: slice) -> Tensor:
                stored = tiff.read(rows)
                if tiff.pixels.has_invalid:
                    is_invalid[rows] = stored.isnan().all(dim=0)
                return self.normalized(stored)

            height, _ = tiff.size
            window = self.model.img_size
            parts = slide_rows(self.logits_of_windows, read, tiff.size, window, self.stride, self.weights)
            num_parts = len(window_starts(height, window[0], self.stride))
            bar = tqdm(parts, total=num_parts, unit="row of windows", leave=False, disable=None)
            labels = np.concatenate([self.label_values(logits) for logits in bar])
            labels[is_invalid] = self.values.no_class
            if i < self.num_pictures:
                img = tiff.read(slice(0, height), picture_size(tiff.size))
                self.write_picture(i, img, labels)
            self.write_labels(i, labels)

    def normalized(self, img: Tensor) -> Tensor:
        """Returns an image [C, h, w] as stored, normalised and on the device."""
        return self.context.normalize(img[None].to(self.context.device, non_blocking=True))[0]

    def logits_of_windows(self, windows: Tensor) -> Tensor:
        """Returns the logits of normalised windows. FloatingPointError if they are not finite."""
        with self.context.autocast():
            logits = self.model(windows)["decode"]
        if not logits.isfinite().all():
            raise FloatingPointError("the logits of an image are not finite: try --precision fp32, and check --std")
        return logits

    def label_values(self, logits: Tensor) -> np.ndarray:
        """Returns the values that label files have for the classes of logits [K, h, w], uint8 [h, w]."""
        return self.values.of_classes[logits.argmax(dim=0).cpu().numpy()]

    def write_labels(self, i: int, labels: np.ndarray) -> None:
        """Writes the label map of an image, which is done then."""
        path = self.paths[i]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as temporary:
            if path.suffix == ".tif":
                tags = gdal_tags(self.values.no_class, self.facts()["classes"])
                write_label_tiff(temporary, labels, self.palette, [*read_geo_tags(self.images.source(i)), *tags])
            else:
                picture = Image.fromarray(labels)
                picture.putpalette(self.palette.tobytes())
                picture.save(temporary)

    def write_picture(self, i: int, img: Tensor, labels: np.ndarray) -> None:
        """Writes an image [C, h, w] as stored, of any size, under the colours of a label map [H, W]."""
        size = picture_size((labels.shape[0], labels.shape[1]))
        shown = take_nearest(as_picture(img, self.context.normalize), size)
        values = take_nearest(labels, size)
        path = self.picture_paths[i]
        path.parent.mkdir(parents=True, exist_ok=True)
        save(blend(shown, values, self.palette, self.values.no_class), path)


def gdal_tags(no_class: int, names: Mapping[str, str]) -> Tags:
    """Returns the tags by which GDAL knows the value of pixels without a class, and the name of each value."""
    items = "".join(f'<Item name="class_{value}">{escape(name)}</Item>' for value, name in names.items())
    metadata = f"<GDALMetadata>{items}</GDALMetadata>".encode()
    return [(GDAL_NODATA, TEXT, 0, str(no_class), True), (GDAL_METADATA, TEXT, 0, metadata, True)]


def write_label_tiff(path: Path, labels: np.ndarray, palette: np.ndarray, tags: Tags) -> None:
    """Writes a label map as a tiled TIFF with a colour table. palette: uint8 [256, 3]."""
    import tifffile

    colormap = palette.T.astype(np.uint16) * 257
    tifffile.imwrite(
        path,
        labels,
        tile=(TILE, TILE),
        compression="zlib",
        photometric="palette",
        colormap=colormap,
        extratags=tags,
        metadata=None,
    )


def label_ending(name: str) -> str:
    """Returns the ending of the label map of an image."""
    if is_tiff(name):
        return ".tif"
    return ".png"
