"""Images with label maps: folders of images and class-index PNGs, as ADE20K (ADEChallengeData2016) has them.

    ROOT/images/training/*.jpg       ROOT/annotations/training/*.png      train, training
    ROOT/images/validation/*.jpg     ROOT/annotations/validation/*.png    val, valid, validation

A label file has the name of its image, with the ending .png, .tif or .tiff, and one value per pixel. Images have any
channels and depth, see `util.data.pixel_format`. To the transforms, an image and its labels travel as one array of the
image's type, whose last channel is the label map. IGNORE marks pixels without a class.
"""

import io
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from downstream.common import scaled_size
from util.addressed import AUGMENT, addressed_numbers
from util.data.decode import PILLOW_ERRORS, has_16_bits, open_image, refuse_unlike_rgb
from util.data.folders import list_images, spelling, split_of
from util.data.images import AS_RGB, ImageError, ImageFiles, Reading, evenly_spaced, read_file
from util.data.invalid_pixels import invalid_everywhere, resize_valid
from util.data.transforms import TRIES, Size, mirror
from util.text import count_of, shorten

IGNORE = 255
LABEL_ENDINGS = (".png", ".tif", ".tiff")


class LabelValues:
    """Turns the values of label files into classes 0 .. num_classes - 1 and IGNORE.

    ignore_index: value of pixels without a class. reduce_zero_label: 0 marks such pixels, too, and the classes begin at
    the value 1, as in ADE20K. label_values: those of the classes instead. If `ignore_index` is one of them, no pixel of
    label files is without a class, and label maps mark such pixels by the highest other value. ValueError if the values
    do not fit.

    no_class: the value that marks pixels without a class in label maps.
    """

    def __init__(
        self,
        num_classes: int,
        ignore_index: int = IGNORE,
        reduce_zero_label: bool = False,
        label_values: Sequence[int] | None = None,
    ) -> None:
        first = int(reduce_zero_label)
        values = list(label_values or range(first, first + num_classes))
        are_bytes = all(value in range(256) for value in [*values, ignore_index])
        are_different = num_classes == len(values) == len(set(values))
        is_ignored_twice = ignore_index in values and not label_values
        if not (are_bytes and are_different) or is_ignored_twice:
            raise ValueError(
                f"--num_classes {num_classes} with values {shorten([str(value) for value in values])} (--label_values, "
                f"--reduce_zero_label) and --ignore_index {ignore_index} must be different values from 0 to 255"
            )
        self.num_classes = num_classes
        self.of_classes = np.array(values, np.uint8)
        self.table = np.full(256, -1, np.int16)
        self.table[:first] = IGNORE
        self.table[ignore_index] = IGNORE
        self.table[values] = np.arange(num_classes)
        self.no_class = ignore_index
        if ignore_index in values:
            self.no_class = int(np.flatnonzero(self.table < 0)[-1])

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Returns the classes of uint8 values [H, W], uint8 [H, W]. ValueError names values that have no meaning."""
        classes = self.table[values]
        unknown = np.unique(values[classes < 0])
        if len(unknown):
            raise ValueError(
                f"it holds the values {shorten([str(value) for value in unknown])}, which are no classes and not "
                "ignored (--num_classes, --label_values, --ignore_index, --reduce_zero_label)"
            )
        return classes.astype(np.uint8)

    def describe(self, num_pixels: np.ndarray) -> str:
        """Returns the shares of all values with a meaning in words. num_pixels: of each value, [256]."""
        shares = []
        for value in np.flatnonzero(self.table >= 0).tolist():
            meaning = "ignored"
            if self.table[value] != IGNORE:
                meaning = f"class {self.table[value]}"
            shares.append(f"{value} ({meaning}) {num_pixels[value] / num_pixels.sum():.1%}")
        return shorten(shares, 50)


class SegmentationImages(ImageFiles):
    """Pairs of an image and its label map. `load(i)` returns the image alone, `load_sample(i)` the pair.

    Pixels that are invalid in all channels have no class. num_pixels: int64 [256], how many pixels have each value in
    the label files that `check` has read.

    ValueError if folders or files are missing, if the split is empty, or if an image has no label file or the other way
    round. ImageError, from `check` and `load_sample`, if a file is unreadable, sizes differ, or a value has no class.
    """

    def __init__(
        self,
        data_path: str | Path,
        split: str,
        values: LabelValues,
        reading: Reading = AS_RGB,
    ) -> None:
        self.split = split
        self.values = values
        self.num_pixels = np.zeros(256, np.int64)
        self.colors: dict[int, list[int]] = {}  # of values, in palettes
        image_root = folder_of_split(Path(data_path) / "images", split)
        self.label_root = folder_of_split(Path(data_path) / "annotations", split)
        images = by_stem(image_root, list_images(image_root, ""))
        label_files = list_images(self.label_root, "")
        labels = by_stem(self.label_root, [name for name in label_files if name.lower().endswith(LABEL_ENDINGS)])
        unpaired = sorted(images.keys() ^ labels.keys())
        if not images:
            raise ValueError(f"{str(image_root)!r} holds no images")
        if unpaired:
            raise ValueError(f"only one of {str(image_root)!r} and {str(self.label_root)!r} has {shorten(unpaired)}")
        samples = [(name, 0) for name in images.values()]
        super().__init__(image_root, samples, classes=[], reading=reading)
        self.label_names = np.array([os.fsencode(labels[stem]) for stem in images])
        if split != "train":
            self.num_checked = len(self)  # an evaluation fails after hours

    def label_path(self, i: int) -> str:
        """Returns the path of the label file of image i."""
        return os.path.join(self.label_root, os.fsdecode(bytes(self.label_names[i])))

    def describe_targets(self) -> list[str]:
        return [f"values of the label files: {self.values.describe(self.num_pixels)}"]

    def check(self, max_bad_fraction: float = 0.0) -> None:
        """As `EncodedImages.check`, with the label files of the images that it looks at.

        ImageError, too, if no pixel has a class, or if all in a training split have the same one.
        """
        super().check(max_bad_fraction)
        problems = []
        checked = evenly_spaced(len(self), self.num_checked).tolist()
        for i in checked:
            try:
                _, size = self.read_header(i)
                values, _, palette = self.load_values(i)
                self.refuse_sizes(i, size, values.shape)
            except ImageError as error:
                problems.append(str(error))
                continue
            counts = np.bincount(values.ravel(), minlength=256)
            if palette:
                self.refuse_other_colors(i, np.flatnonzero(counts).tolist(), palette)
            self.num_pixels += counts
        self._refuse_bad(problems, len(checked), max_bad_fraction)
        classes = self.values.table[self.num_pixels > 0]
        found = int((classes != IGNORE).sum())
        if found == 0:
            raise ImageError(f"no pixel of {self.split} has a class: check --ignore_index and --reduce_zero_label")
        described = f"{found} of {count_of(self.values.num_classes, 'class')} found in {self.split}"
        if found == 1 and self.values.num_classes > 1 and self.split == "train":
            raise ImageError(f"{described}, by the label files: {self.values.describe(self.num_pixels)}")
        ignored = self.num_pixels[self.values.table == IGNORE].sum() / self.num_pixels.sum()
        self.notes.append(f"{described}, {ignored:.1%} of the pixels are ignored")

    def refuse_other_colors(self, i: int, values: list[int], palette: list[int]) -> None:
        """ImageError if the palette of label file i has another colour for one of its values than an earlier one."""
        for value in values:
            color = palette[3 * value : 3 * value + 3]
            if self.colors.setdefault(value, color) != color:
                raise ImageError(
                    f"{self.label_path(i)!r} has another colour for the value {value} in its palette than other label "
                    "files: values are classes, so give all files one palette"
                )

    def refuse_sizes(self, i: int, size: Size, label_size: Size) -> None:
        """ImageError unless the (height, width) of image i and that of its labels are equal."""
        if size != label_size:
            raise ImageError(
                f"{self.path(i)!r} has {size[1]} x {size[0]} pixels, its labels {self.label_path(i)!r} "
                f"{label_size[1]} x {label_size[0]} (EXIF orientations are ignored)"
            )

    def load_sample(self, i: int) -> tuple[np.ndarray, int]:
        """Returns ([H, W, C + 1], 0): the image, and the labels as last channel."""
        img, label = self.load(i)
        labels = self.load_labels(i)
        self.refuse_sizes(i, img.shape[:2], labels.shape)
        if self.invalid is not None:
            labels = np.where(invalid_everywhere(img), IGNORE, labels)
        last_channel = labels[:, :, None].astype(img.dtype)
        return np.concatenate([img, last_channel], axis=2), label

    def load_labels(self, i: int) -> np.ndarray:
        """Returns the classes, uint8 [H, W]. ImageError if the file is no class-index PNG or holds other values."""
        return self.load_values(i)[1]

    def load_values(self, i: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Returns the values in the label file, their classes, both uint8 [H, W], and its palette.

        Errors: see `load_labels`.
        """
        path = self.label_path(i)
        values, palette = read_values(path)
        try:
            return values, self.values(values), palette
        except ValueError as error:
            raise ImageError(f"{path!r} is no label file of this data set: {error}") from error


def read_values(path: str) -> tuple[np.ndarray, list[int]]:
    """Returns the values in a label file, uint8 [H, W], and its palette [R, G, B, R, ...], which is empty without one.

    ImageError if it cannot be read, or has several channels. Values of a palette are its indices, not its colours.
    Those of fewer than 8 bits are not scaled, and of 16 refused.
    """
    data = read_file(path)
    try:
        with open_image(io.BytesIO(data)) as img:
            refuse_unlike_rgb(img)
            img.load()
            palette = img.getpalette() or []
            if has_16_bits(img):
                raise ValueError("its values have 16 bits; labels must have 8")
            values = np.array(img).astype(np.uint8)  # mode "1" becomes 0 and 1
            if img.format == "PNG" and img.mode == "L":
                bits = data[24]  # of the header chunk IHDR
                values //= 255 // (2**bits - 1)  # Pillow scales grey values of 2 and 4 bits up to 255
    except PILLOW_ERRORS as error:
        raise ImageError(f"{path!r} cannot be read: {error}") from error
    if values.ndim != 2:
        raise ImageError(f"{path!r} has {values.shape[2]} channels; labels must be one class index per pixel")
    return values, palette


def folder_of_split(folder: Path, split: str) -> Path:
    """Returns the folder of a split inside images/ or annotations/. ValueError unless there is exactly one."""
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is no folder: --data_path must hold images/ and annotations/")
    folders = [path for path in sorted(folder.iterdir()) if split_of(path.name) == split]
    if len(folders) != 1:
        raise ValueError(f"{str(folder)!r} has {len(folders)} folders of the split {split!r}, such as {split}/")
    return folders[0]


def by_stem(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Returns {name without its ending: name} of files in `root`. ValueError if two differ in their ending alone."""
    found: dict[str, str] = {}
    for name in sorted(names):
        stem = spelling(os.path.splitext(name)[0])
        if stem in found:
            raise ValueError(f"{found[stem]!r} and {name!r} in {str(root)!r} differ in their ending alone")
        found[stem] = name
    return found


def stack_pairs(samples: Sequence[tuple]) -> tuple[Tensor, Tensor]:
    """Collates transformed pairs. Returns (imgs [B, C, H, W], labels uint8 [B, H, W])."""
    imgs = torch.stack([sample[0][0] for sample in samples])
    labels = torch.stack([sample[0][1] for sample in samples])
    return imgs, labels


# -------------------------------------------------------------------------------------------------------- transforms


def resize_bilinear(img: Tensor, size: Size) -> Tensor:
    """Resizes an image or logits [C, H, W], without antialiasing, as mmsegmentation does."""
    if img.dtype == torch.uint16:  # for which torch has no kernel
        return resize_bilinear(img.float(), size).round().to(torch.uint16)
    return F.interpolate(img[None], size=size, mode="bilinear", align_corners=False)[0]


def scale_image(img: Tensor, image_scale: Sequence[float]) -> Tensor:
    """Scales an image [C, H, W] into `image_scale` (longest side, shortest side), with its aspect ratio kept."""
    longest, shortest = image_scale
    size = scaled_size((img.shape[1], img.shape[2]), longest, shortest)
    return resize_valid(partial(resize_bilinear, size=size), img)


class SegmentationAugment:
    """ADE20K's training augmentation in mmsegmentation, drawn from the sample's address.

    Random scale into `image_scale` times U(ratio_range); a random crop, drawn up to TRIES times until it has more than
    one class and no class covers `cat_max_ratio` of its labelled pixels; a flip; photometric distortion of uint8;
    padding at the bottom and the right. fill: value of padded pixels, for each channel. Padded labels are IGNORE.

    has_invalid: pixels may be invalid. Crops are then float32, with NaN where they are invalid or padded, and their
    labels are IGNORE where all channels are. `photometric` is for images with the unit of uint8.
    """

    respects_invalid = True

    def __init__(
        self,
        size: Size,
        seed: int,
        fill: Sequence[float],
        image_scale: Sequence[int] = (2048, 512),
        ratio_range: Sequence[float] = (0.5, 2.0),
        cat_max_ratio: float = 0.75,
        photometric: bool = True,
        hflip: bool = True,
        has_invalid: bool = False,
    ) -> None:
        self.size = size
        self.seed = seed
        self.fill = torch.tensor(fill)[:, None, None]
        if has_invalid:
            self.fill = torch.full_like(self.fill, torch.nan, dtype=torch.float32)
        self.image_scale = image_scale
        self.ratio_range = ratio_range
        self.cat_max_ratio = cat_max_ratio
        self.photometric = photometric
        self.hflip = hflip
        self.has_invalid = has_invalid

    def __call__(self, pair: Tensor, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """Augments [C + 1, H, W]. Returns (img [C, *size], labels uint8 [*size])."""
        draws = addressed_numbers(AUGMENT, self.seed, epoch, index, 2 * TRIES + 2 + DISTORTION_DRAWS)
        u_ratio, u_flip, *draws = draws
        low, high = self.ratio_range
        ratio = low + u_ratio * (high - low)
        img = scale_image(pair[:-1], [int(side * ratio) for side in self.image_scale])
        labels = pair[-1:].to(torch.uint8)
        labels = F.interpolate(labels[None], size=img.shape[1:], mode="nearest")[0, 0]
        if self.has_invalid:
            img = img.float()
            labels = labels.masked_fill(img.isnan().all(dim=0), IGNORE)
        rows, columns = self.choose_crop(labels, draws[: 2 * TRIES])
        img = img[:, rows, columns]
        labels = labels[rows, columns]
        if self.hflip and u_flip < 0.5:
            img = mirror(img)
            labels = mirror(labels)
        if self.photometric:
            img = distort(img, draws[2 * TRIES :])
        return self.pad(img, labels)

    def choose_crop(self, labels: Tensor, draws: Sequence[float]) -> tuple[slice, slice]:
        """Returns the rows and columns of the first crop whose classes are balanced, or of the last try.

        With `cat_max_ratio` 1 the first crop is taken, whatever it shows.
        """
        for u_top, u_left in zip(draws[::2], draws[1::2], strict=True):
            rows = place_crop(u_top, labels.shape[0], self.size[0])
            columns = place_crop(u_left, labels.shape[1], self.size[1])
            if self.cat_max_ratio == 1:
                break
            counts = labels[rows, columns].flatten().bincount(minlength=256)[:IGNORE]
            if (counts > 0).sum() > 1 and counts.max() < self.cat_max_ratio * counts.sum():
                break
        return rows, columns

    def pad(self, img: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Pads a crop to `size`."""
        height, width = labels.shape
        whole_labels = torch.full(self.size, IGNORE, dtype=torch.uint8)
        whole_labels[:height, :width] = labels
        whole = self.fill.to(img.dtype).expand(-1, *self.size).clone()
        whole[:, :height, :width] = img
        return whole, whole_labels


def place_crop(u: float, length: int, wanted: int) -> slice:
    """Returns the rows or columns of a crop. u: uniform in [0, 1)."""
    last = max(0, length - wanted)
    start = int(u * (last + 1))
    return slice(start, start + wanted)


class ResizeForEvaluation:
    """Scales an image into `image_scale`, with its aspect ratio kept. Labels stay as they are."""

    respects_invalid = True

    def __init__(self, image_scale: Sequence[int] = (2048, 512)) -> None:
        self.image_scale = image_scale

    def __call__(self, pair: Tensor, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """Returns (img [C, h, w], labels uint8 [H, W]) of [C + 1, H, W]."""
        return scale_image(pair[:-1], self.image_scale), pair[-1].to(torch.uint8)


DISTORTION_DRAWS = 9


def distort(img: Tensor, draws: Sequence[float]) -> Tensor:
    """Distorts the colours of [C, H, W] in the unit of uint8, each with probability 1/2: brightness by up to +-32,
    contrast, saturation and hue. Returns whole numbers of the same type.

    Contrast and saturation are scaled by U(0.5, 1.5), hue is turned by up to +-18 of 180. Contrast comes second or
    last. Saturation and hue are those of HSV and are for RGB images only, at pixels where no channel is invalid.
    draws: DISTORTION_DRAWS numbers in [0, 1).
    """
    brightens, scales_contrast, scales_colors, turns, *amounts, contrast_is_last = draws
    is_rgb = len(img) == 3
    contrast = 1.0
    if scales_contrast < 0.5:
        contrast = 0.5 + amounts[1]
    x = img.float()
    if brightens < 0.5:
        x = (x + 64 * amounts[0] - 32).clamp(0, 255)
    if contrast_is_last >= 0.5:
        x = (x * contrast).clamp(0, 255)
    if is_rgb and scales_colors < 0.5:
        x = where_complete(scale_saturation(x, 0.5 + amounts[2]), x)
    if is_rgb and turns < 0.5:
        degrees = int(amounts[3] * 37) - 18
        x = where_complete(turn_hue(x, degrees / 180), x)
    if contrast_is_last < 0.5:
        x = (x * contrast).clamp(0, 255)
    return x.round().to(img.dtype)


def where_complete(changed: Tensor, x: Tensor) -> Tensor:
    """Returns `changed` [3, H, W], but `x` at pixels with an invalid channel, which makes all changed ones NaN."""
    return torch.where(changed.isnan(), x, changed)


def scale_saturation(x: Tensor, factor: float) -> Tensor:
    """Multiplies the saturation of RGB images [3, H, W] by `factor`, up to 1. Hue and value of HSV are kept."""
    value = x.amax(0)
    chroma = value - x.amin(0)
    largest_factor = value / chroma.clamp(min=1e-6)  # with which the saturation is 1
    return value - (value - x) * largest_factor.clamp(max=factor)


def turn_hue(x: Tensor, turn: float) -> Tensor:
    """Turns the hue of RGB images [3, H, W] by a share of the colour circle. Saturation and value of HSV are kept."""
    value = x.amax(0)
    chroma = value - x.amin(0)
    red, green, blue = x
    safe = chroma.clamp(min=1e-6)
    near_red = (green - blue) / safe
    near_green = 2 + (blue - red) / safe
    near_blue = 4 + (red - green) / safe
    sextant = torch.where(value == green, near_green, near_blue)
    sextant = torch.where(value == red, near_red, sextant)
    starts = torch.tensor([5.0, 3.0, 1.0])[:, None, None]  # of red, green and blue
    places = (sextant + 6 * turn + starts) % 6
    shares = torch.minimum(places, 4 - places).clamp(0, 1)
    return value - chroma * shares
