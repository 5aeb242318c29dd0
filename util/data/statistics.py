"""Mean and standard deviation of a source's pixels, by which its images are normalised."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from util.collectives import run_on_rank0
from util.data.images import ImageError, Images, evenly_spaced
from util.data.pixel_format import PixelFormat
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalize
from util.text import shorten

SAMPLE = 256  # images that statistics are computed from

IMAGENET = ([*IMAGENET_MEAN], [*IMAGENET_STD])
Statistics = tuple[list[float], list[float]]  # mean and standard deviation of each channel
PixelSettings = Mapping[str, Any]  # "pixels": the type, "mean", "std"; see `checkpoint.pixel_settings`


def measure_statistics(images: Images) -> tuple[Statistics, list[str]]:
    """Measures mean and deviation of each channel over all valid pixels of evenly spaced images. Returns remarks, too.

    In float64. Those of integers are fractions of the full range. Unreadable images are skipped. ValueError if a
    channel is constant, or has no valid pixel.
    """
    num_channels = images.pixel_format.channels
    moments: list[np.ndarray] = []  # of each image: number, mean and sum of squared deviations of each channel [3, C]
    are_all_valid = True
    indices = evenly_spaced(len(images), SAMPLE).tolist()
    for i in indices:
        try:
            img = images.load(i)[0]
        except ImageError:
            continue
        assert img.shape[2] == num_channels  # `load` returns the image alone
        pixels = img.reshape(-1, num_channels).astype(np.float64)
        valid = ~np.isnan(pixels)
        are_all_valid = are_all_valid and bool(valid.all())
        number = valid.sum(axis=0)
        mean = np.where(valid, pixels, 0).sum(axis=0) / np.maximum(number, 1)
        squares = np.square(np.where(valid, pixels - mean, 0)).sum(axis=0)
        moments.append(np.stack([number, mean, squares]))
    num_read = len(moments)
    if not num_read:
        raise ValueError(f"no pixel statistics: none of {len(indices)} images of {images.root} can be read")
    numbers, means, squares_of_images = np.stack(moments, axis=1)  # [n, C] each
    total = numbers.sum(axis=0)
    empty = [str(c) for c in np.flatnonzero(total == 0)]
    if empty:
        problem = f"channel {shorten(empty, 10)} (counted from 0) has no valid pixel in {num_read} images"
        raise ValueError(f"{problem} of {images.root}: give --mean and --std")
    mean = (numbers * means).sum(axis=0) / total
    # Sums of squared deviations add up without the loss of digits of a sum of squares.
    squares = squares_of_images + numbers * np.square(means - mean)
    std = np.sqrt(squares.sum(axis=0) / total)
    if not std.all():
        constant = shorten([str(c) for c in np.flatnonzero(std == 0)], 10)
        problem = f"channel {constant} (counted from 0) is constant in {num_read} images of {images.root}"
        raise ValueError(f"{problem}: remove it, or give --mean and --std")
    full_range = images.pixel_format.full_range
    statistics = ((mean / full_range).tolist(), (std / full_range).tolist())
    shown = [" ".join(f"{value:.6g}" for value in values) for values in statistics]
    remarks = [f"pixel mean {shown[0]}, deviation {shown[1]}: measured on {num_read} images, {images.pixel_format}"]
    if images.invalid is not None and are_all_valid:
        remarks.append(f"note: {images.invalid} marks no pixel of the {num_read} measured images")
    return statistics, remarks


def statistics_of(
    given: Sequence[Sequence[float] | None], known: PixelSettings | None, images: Images
) -> tuple[Statistics, list[str]]:
    """Returns the statistics to train with on images, and remarks. All ranks must call it.

    These are, in this order: --mean and --std, those of a trained model if it has some for such images, ImageNet's for
    RGB of 8 bits, or else those of the data, which rank 0 measures.

    given: --mean and --std. known: pixel settings of the model. ValueError if the flags do not fit.
    """
    pixels = images.pixel_format
    mean, std = given
    remarks: list[str] = []
    if not mean or not std:
        if known is not None and has_statistics(known, pixels):
            found = (known["mean"], known["std"])
        elif pixels.is_rgb8:
            found = IMAGENET
        else:
            found, remarks = run_on_rank0(lambda: measure_statistics(images))
        mean = mean or found[0]
        std = std or found[1]
    check_statistics(mean, std, pixels)
    return (list(mean), list(std)), remarks


def keep_colors(of_rgb: Statistics, of_bands: Statistics, rgb_bands: Sequence[int]) -> Statistics:
    """Returns statistics of bands in which red, green and blue have those of a model of RGB.

    rgb_bands: the bands of red, green and blue. One that holds several of them gets the mean of theirs.
    """
    kept: Statistics = ([*of_bands[0]], [*of_bands[1]])
    for band in rgb_bands:
        colors = [color for color, other in enumerate(rgb_bands) if other == band]
        for values, rgb_values in zip(kept, of_rgb, strict=True):
            values[band] = sum(rgb_values[color] for color in colors) / len(colors)
    return kept


def has_statistics(settings: PixelSettings, pixels: PixelFormat) -> bool:
    """Whether a checkpoint has statistics of images with as many channels, and of the same type.

    If their type is unknown, integers are assumed. Fractions of 8 bits do not fit 16: cameras seldom use the full range
    of 16 bits.
    """
    if settings["pixels"] not in (None, pixels.dtype) or (settings["pixels"] is None and pixels.is_float):
        return False
    return len(settings["mean"] or ()) == len(settings["std"] or ()) == pixels.channels


def check_statistics(mean: Sequence[float], std: Sequence[float], pixels: PixelFormat) -> None:
    """ValueError unless there is one mean and one positive deviation for each channel, in the unit of the pixels."""
    if any(value <= 0 for value in std):
        raise ValueError(f"--std must be positive, got {list(std)}")
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != pixels.channels:
            raise ValueError(f"--{name} must have a value for each of {pixels.channels} channels, got {list(values)}")
        if not pixels.is_float and not all(0 <= value <= 1 for value in values):
            unit = f"--{name} of {pixels.dtype} pixels is a fraction of their full range"
            raise ValueError(f"{unit}, got {list(values)}: divide by {pixels.full_range:g}")


def find_statistics(settings: PixelSettings, pixels: PixelFormat) -> Statistics | None:
    """Returns the statistics in the settings of a trained model for images of a format, or None if they are unknown.

    Older runs and files of other projects have none of their own: for RGB of 8 bits they are ImageNet's.
    """
    mean = settings.get("mean")
    std = settings.get("std")
    if pixels.is_rgb8:
        mean = mean or IMAGENET_MEAN
        std = std or IMAGENET_STD
    if not mean or not std:
        return None
    return list(mean), list(std)


def describe_pixels(pixels: str | None) -> str:
    """Returns in words what the pixels of a model are before mean and deviation are applied. None: unknown type."""
    if pixels is None:
        return "pixels of a type that is not recorded"
    if PixelFormat(1, pixels).is_float:
        return f"pixels of {pixels} in the unit of the data"
    return f"pixels of {pixels}, divided by {PixelFormat(1, pixels).full_range:g}"


def normalizer(settings: PixelSettings, pixels: PixelFormat) -> Normalize:
    """Returns the normalisation of a trained model for images of a format. settings: of its run, and the
    type of its `pixels`.

    ValueError for floats where the run had integers, or the other way round, and if there are no statistics.
    """
    trained_on = settings.get("pixels")
    if trained_on and (trained_on == "float32") != pixels.is_float:
        raise ValueError(f"the model was trained on pixels of {trained_on}, but the images have {pixels}")
    statistics = find_statistics(settings, pixels)
    if statistics is None:
        raise ValueError(f"the checkpoint holds no pixel mean and deviation of {pixels} (see --mean and --std)")
    mean, std = statistics
    check_statistics(mean, std, pixels)
    return Normalize(mean, std, pixels)
