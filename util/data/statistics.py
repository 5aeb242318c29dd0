"""Mean and standard deviation of a source's pixels, by which its images are normalised."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from util.collectives import run_on_rank0
from util.data.images import ImageError, Images, evenly_spaced
from util.data.pixel_format import RGB8, PixelFormat
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalize
from util.text import count_of

SAMPLE = 256  # images that statistics are computed from

NAMES = ("mean", "deviation")  # in messages
IMAGENET = [*IMAGENET_MEAN], [*IMAGENET_STD]
FAR = 3  # how many times the range of all other values a fill value lies away from them, at least
Statistics = tuple[list[float], list[float]]  # mean and standard deviation of each channel


class Measurement(NamedTuple):
    """What was measured on images. fill_values: warnings of values that look like marks of missing pixels."""

    statistics: Statistics
    num_images: int
    fill_values: list[str]


@dataclass
class Lowest:
    """The lowest value of a channel, the number of its pixels, and the lowest of all other values."""

    value: float = math.inf
    count: int = 0
    next_value: float = math.inf

    def add(self, values: np.ndarray) -> None:
        """Adds the values of an image, float64 [n]."""
        value = float(values.min())
        count = int(np.count_nonzero(values == value))
        next_value = float(values.min(where=values > value, initial=math.inf))
        if value > self.value:
            self.next_value = min(self.next_value, value)
        elif value == self.value:
            self.count += count
            self.next_value = min(self.next_value, next_value)
        else:
            self.next_value = min(self.value, next_value)
            self.value = value
            self.count = count

    def is_fill_value(self, highest: float, num_pixels: int) -> bool:
        """Whether the lowest value looks like the mark of missing pixels, such as -9999.

        It occurs more than once, but in less than half of the pixels: it is no single dark pixel, and no background.
        Its distance from all other values is more than FAR times their range. Saturated pixels, and zeros around an
        object, lie next to other values. highest: value of the channel.
        """
        distance = self.next_value - self.value
        others = highest - self.next_value
        return 1 < self.count < num_pixels / 2 and 0 < FAR * others < distance


def warn_of_fill_values(channel: int, lowest: Lowest, highest: Lowest, num_pixels: int) -> list[str]:
    """Returns warnings if the lowest or the highest value of a channel looks like the mark of missing pixels.

    highest: that of the negated values.
    """
    found = []
    if lowest.is_fill_value(-highest.value, num_pixels):
        found.append((lowest.value, lowest.count, lowest.next_value, -highest.value))
    if highest.is_fill_value(-lowest.value, num_pixels):
        found.append((-highest.value, highest.count, lowest.value, -highest.next_value))
    warnings = []
    for value, count, low, high in found:
        warnings.append(
            f"warning: {count} of {num_pixels} measured pixels of channel {channel} (counted from 0) are {value:.10g}, "
            f"all others lie between {low:.6g} and {high:.6g}. If the value marks missing pixels, mean and deviation "
            "are wrong: replace it in the files, for example by the mean of the other pixels, and start a new run"
        )
    return warnings


def measure_statistics(images: Images, num_images: int = SAMPLE) -> Measurement:
    """Measures the mean and standard deviation of each channel over all pixels of evenly spaced images, in float64.

    Those of integers are fractions of the full range. Unreadable images are skipped. ValueError if a channel is
    constant.
    """
    count, num_read = 0, 0
    mean, squares = np.zeros(images.pixel_format.channels), np.zeros(images.pixel_format.channels)
    lowest = [Lowest() for _ in mean]
    highest = [Lowest() for _ in mean]  # of the negated values
    for i in evenly_spaced(len(images), num_images).tolist():
        try:
            img = images.load(i)[0]
        except ImageError:
            continue
        assert img.shape[2] == len(mean)  # `load` returns the image alone
        pixels = img.reshape(-1, len(mean))
        num_read += 1
        own_mean = pixels.mean(axis=0, dtype=np.float64)
        own_squares = np.zeros(len(mean))
        for c in range(len(mean)):
            values = pixels[:, c].astype(np.float64)
            lowest[c].add(values)
            highest[c].add(-values)
            own_squares[c] = np.square(values - own_mean[c]).sum()
        # Chan et al.: sums of squared deviations of two sets, without the loss of digits of a sum of squares.
        total = count + len(pixels)
        shift = own_mean - mean
        mean = mean + shift * len(pixels) / total
        squares = squares + own_squares + shift**2 * count * len(pixels) / total
        count = total
    if not num_read:
        raise ValueError(f"no pixel statistics: none of {num_images} images of {images.root} can be read")
    std = np.sqrt(squares / count)
    if not std.all():
        constant = ", ".join(map(str, np.flatnonzero(std == 0).tolist()))
        what = f"channel {constant} (counted from 0) is constant in {num_read} images of {images.root}"
        raise ValueError(f"{what}: remove it, or give --mean and --std")
    full_range = images.pixel_format.full_range
    statistics = (mean / full_range).tolist(), (std / full_range).tolist()
    fill_values = list[str]()
    if images.pixel_format.dtype != "uint8":  # in 256 values every one may be a brightness
        for c in range(len(mean)):
            fill_values += warn_of_fill_values(c, lowest[c], highest[c], count)
    return Measurement(statistics, num_read, fill_values)


def measure_on_rank0(images: Images, used: Sequence[str] = NAMES) -> tuple[Statistics, list[str]]:
    """Returns the statistics of the data, which rank 0 measures, and remarks on those used. All ranks must call it."""
    found = run_on_rank0(lambda: measure_statistics(images))
    values = zip(NAMES, found.statistics, strict=True)
    text = ", ".join(f"{name} {' '.join(f'{x:.6g}' for x in part)}" for name, part in values if name in used)
    remark = f"pixel {text}: measured on {found.num_images} images, {images.pixel_format}"
    return found.statistics, [remark, *found.fill_values]


def choose_statistics(
    given: Sequence[Sequence[float] | None],
    images: Images,
    resumed: Mapping[str, Any] | None,
    encoder: Mapping[str, Any],
) -> tuple[Statistics, list[str]]:
    """Returns the statistics that a run normalises with, and remarks. All ranks must call it.

    These are, in this order: --mean and --std, those of the resumed run, those of the pre-trained encoder if it has
    some for such images, ImageNet's for RGB of 8 bits, or else those of the data, which rank 0 measures.

    given: --mean and --std. resumed, encoder: pixel settings of the run's checkpoint (None for a new run) and of the
    encoder's; see `CheckpointInfo.pixel_settings`. ValueError if the flags do not fit.
    """
    pixels = images.pixel_format
    settings = resumed or {}
    in_chans = settings.get("in_chans", pixels.channels)
    if not same_kind(settings, pixels) or in_chans != pixels.channels:
        before = PixelFormat(in_chans, settings["pixels"])
        raise ValueError(f"the images of the run had {before} and now have {pixels}; choose another --output_dir")
    remarks: list[str] = []
    used = [name for name, value in zip(NAMES, given, strict=True) if not value]  # by default
    if not used:
        found = list(given[0] or ()), list(given[1] or ())
    elif settings.get("mean"):
        found = settings["mean"], settings["std"]
    elif encoder and fits_encoder(encoder, pixels):
        found = encoder["mean"], encoder["std"]
        whose = "are those of the encoder" if len(used) == 2 else "is that of the encoder"
        remarks = [f"note: pixel {' and '.join(used)} {whose}"] if found != IMAGENET else []
    elif pixels == RGB8:
        found = IMAGENET
    else:
        found, remarks = measure_on_rank0(images, used)
    mean, std = given[0] or found[0], given[1] or found[1]
    check_statistics(mean, std, pixels)
    return (list(mean), list(std)), remarks


def fits_encoder(stored: Mapping[str, Any], pixels: PixelFormat) -> bool:
    """Whether a checkpoint has statistics of images with as many channels, and of the same kind, integer or float.

    stored: its `pixel_settings`. If their type is unknown, integers are assumed.
    """
    known = {**stored, "pixels": stored["pixels"] or "uint8"}
    return same_kind(known, pixels) and len(stored["mean"] or ()) == len(stored["std"] or ()) == pixels.channels


def same_kind(settings: Mapping[str, Any], pixels: PixelFormat) -> bool:
    """Whether a model had integers if `pixels` are integers, or floats if they are floats, as far as this is known.

    settings: hold the type of its `pixels`, None or nothing if it is unknown.
    """
    return not settings.get("pixels") or (settings["pixels"] == "float32") == pixels.is_float


def check_statistics(mean: Sequence[float], std: Sequence[float], pixels: PixelFormat) -> None:
    """ValueError unless there is one mean and one positive deviation for each channel, in the unit of the pixels."""
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != pixels.channels:
            raise ValueError(f"--{name} must have a value for each of {pixels.channels} channels, got {list(values)}")
    if any(value <= 0 for value in std):
        raise ValueError(f"--std must be positive, got {list(std)}")
    for name, values in (("mean", mean), ("std", std)):
        if not pixels.is_float and not all(0 <= value <= 1 for value in values):
            what = f"--{name} of {pixels.dtype} pixels is a fraction of their full range"
            raise ValueError(f"{what}, got {list(values)}: divide by {pixels.full_range:g}")


def known_statistics(settings: Mapping[str, Any], pixels: PixelFormat) -> Statistics | None:
    """Returns the statistics in the settings of a trained model for images of a format, or None if they are unknown.

    Older runs and files of other projects have none of their own: for RGB integers they are ImageNet's.
    """
    mean, std = settings.get("mean"), settings.get("std")
    if pixels.channels == 3 and not pixels.is_float:
        mean, std = mean or IMAGENET_MEAN, std or IMAGENET_STD
    return (list(mean), list(std)) if mean and std else None


def describe_pixels(pixels: str | None) -> str:
    """Returns in words what the pixels of a model are before mean and deviation are applied. None: unknown type."""
    if pixels is None:
        return "pixels of a type that is not recorded"
    if PixelFormat(1, pixels).is_float:
        return f"pixels of {pixels} in the unit of the data"
    return f"pixels of {pixels}, divided by {PixelFormat(1, pixels).full_range:g}"


def complete_settings(settings: Mapping[str, Any], images: Images) -> tuple[dict[str, Any], list[str]]:
    """Returns the pixel settings of a trained model with mean and deviation, and remarks. All ranks must call it.

    Statistics that its file lacks are ImageNet's for RGB integers, or else those of the `images`.
    """
    found, remarks = known_statistics(settings, images.pixel_format), list[str]()
    if found is None:
        found, remarks = measure_on_rank0(images)
    return {**settings, "mean": found[0], "std": found[1]}, remarks


def normalizer(settings: Mapping[str, Any], pixels: PixelFormat) -> Normalize:
    """Returns the normalisation of a trained model for images of a format. settings: of its run, and the
    type of its `pixels`.

    ValueError for floats where the run had integers, or the other way round, and if there are no statistics.
    """
    if not same_kind(settings, pixels):
        raise ValueError(f"the model was trained on pixels of {settings['pixels']}, but the images have {pixels}")
    found = known_statistics(settings, pixels)
    if found is None:
        channels = count_of(pixels.channels, "channel")
        raise ValueError(f"the checkpoint holds no pixel mean and deviation of its {channels}: give --mean and --std")
    mean, std = found
    check_statistics(mean, std, pixels)
    return Normalize(mean, std, pixels)
