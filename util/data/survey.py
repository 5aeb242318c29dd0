"""What `--check_data` prints about the images of a split: files, classes, targets, sizes and values."""

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from util import collectives
from util.data.images import ImageError, Images, evenly_spaced
from util.text import count_of, list_shares, printable, shorten

NUM_DECODED = 256  # evenly spaced images whose sizes and values are reported
MOST_LISTED = 20  # classes, endings, channels


def report_split(split: str, images: Images) -> None:
    """Prints what the images of a split are, on rank 0. All ranks must call it."""

    def print_report() -> None:
        print(f"{split}: {count_of(len(images), 'image')} in {printable(str(images.root))}")
        for line in [*describe_files(images), *images.describe_targets(), *describe_pixels(images)]:
            print(f"  {printable(line)}", flush=True)

    collectives.run_on_rank0(print_report)


def describe_files(images: Any) -> list[str]:
    """Returns how many files of each ending there are, and the shares of the classes."""
    lines = []
    names = getattr(images, "names", np.array([], bytes))
    endings = Counter(os.path.splitext(os.fsdecode(name))[1].lower() for name in names.tolist())
    if endings:
        lines.append(f"files: {list_shares(endings)}")
    if images.classes:
        counts = Counter(dict.fromkeys(images.classes, 0))
        for label, number in Counter(images.labels.tolist()).items():
            name = images.classes[label] if 0 <= label < len(images.classes) else "no class"
            counts[name] += number
        lines.append(f"{count_of(len(images.classes), 'class')}: {list_shares(counts)}")
    return lines


def describe_pixels(images: Images) -> list[str]:
    """Returns sizes and values of evenly spaced images, the share of invalid values, and which cannot be decoded."""
    sizes: list[tuple[int, int]] = []
    num_channels = images.pixel_format.channels
    lowest = np.full(num_channels, np.inf)
    highest = np.full(num_channels, -np.inf)
    sums = np.zeros(num_channels)
    num_valid = np.zeros(num_channels)
    num_values = 0
    problems: list[str] = []
    indices = evenly_spaced(len(images), NUM_DECODED).tolist()
    for i in indices:
        try:
            img, _ = images.load(i)
        except ImageError as error:
            problems.append(str(error))
            continue
        is_valid = ~np.isnan(img)
        sizes.append(img.shape[:2])
        lowest = np.fmin(lowest, np.fmin.reduce(img, (0, 1)))
        highest = np.fmax(highest, np.fmax.reduce(img, (0, 1)))
        sums += img.sum((0, 1), dtype=np.float64, where=is_valid)
        num_valid += is_valid.sum((0, 1))
        num_values += img.size
    lines = []
    if problems:
        lines.append(f"{len(problems)} of {count_of(len(indices), 'image')} cannot be decoded: {shorten(problems)}")
    if sizes:
        heights, widths = zip(*sizes, strict=True)
        lines.append(f"{min(heights)} to {max(heights)} px high, {min(widths)} to {max(widths)} px wide")
        means = sums / np.maximum(1, num_valid)
        lines.append(str(images.pixel_format))
        lines.append(f"lowest {numbers(lowest)}, mean {numbers(means)}, highest {numbers(highest)}")
    if images.invalid is not None and num_values:
        lines.append(f"{1 - num_valid.sum() / num_values:.1%} of all values are invalid")
    return lines


def numbers(values: Iterable[float]) -> str:
    return shorten([f"{value:.4g}" for value in values], MOST_LISTED).replace(",", "")
