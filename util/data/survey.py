"""What `--check_data` reports on the images of a split: files, classes, sizes, pixels, copies. See `util.findings`."""

import hashlib
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from util.data.folders import (
    ARCHIVES,
    HUGGING_FACE,
    TEXTS,
    UNREAD_RAW,
    UNREAD_WEB,
    files_of_ending,
    is_hidden,
    is_image,
    list_folder,
)
from util.data.images import EncodedImages, FolderImages, ImageError, Images, evenly_spaced
from util.data.pixel_format import FormatError, PixelFormat
from util.data.statistics import measure_statistics
from util.data.tars import TarImages
from util.findings import Part, keep
from util.text import count_of, shorten

NUM_HEADERS = 1000  # that are read of a split, unless every file is read to find copies
NUM_TARS = 20  # whose members are listed
FREQUENT = 0.05  # share of all values from which on the most frequent one is reported
MOST_CLASSES = 20  # that are listed in words
LONGEST_ENDING = 16  # characters; what is longer is no ending


def check_images(images: Images, check: Callable[[], None]) -> None:
    """Calls `check`, which looks at the files before training.

    If it fails in a check of data, which goes on, a format is set by which later stages judge the images.
    """
    try:
        check()
    except (ValueError, OSError) as error:
        keep(error)
        if isinstance(images, EncodedImages):
            images.pixel_format = first_format(images)


def first_format(images: EncodedImages) -> PixelFormat:
    """Returns the format of the first of some images that has the channels that are wanted."""
    for i in evenly_spaced(len(images), 100).tolist():
        try:
            pixels, _ = images.read_header(i)
        except ValueError:
            continue
        if pixels.channels == images.in_chans:
            return pixels
    return PixelFormat(images.in_chans, "uint8", images.invalid.is_declared)


def survey(images: Images, with_every_file: bool = False) -> Part:
    """Returns what the images of a split are. Reads some headers and images, or every header `with_every_file`."""
    part = Part({"root": str(images.root), "images": len(images)})
    part.add(survey_files(images))
    part.add(survey_classes(images))
    part.add(images.survey_targets())
    part.add(survey_headers(images, with_every_file))
    part.add(survey_pixels(images))
    part.content["notes"] = images.notes
    return part


# ------------------------------------------------------------------------------------------------------------- files


def survey_files(images: Images) -> Part:
    """Returns which files are read, by their endings, and which are not, and why."""
    part = Part()
    unread: Counter[tuple[str, str]] = Counter()
    if isinstance(images, TarImages):
        tars = [Path(images.storage.path(images.tars[i])) for i in evenly_spaced(len(images.tars), NUM_TARS).tolist()]
        if images.packed is None:  # the shards of pack_dataset.py hold nothing else
            unread = unread_members(images, tars)
        part.lines.append(f"tars         {count_of(len(images.tars), 'tar')}, {len(tars)} of them listed here")
    for root, names in images.files_read().items():
        endings = Counter(ending_of(os.fsdecode(name)) for name in names)
        kinds = [files_of_ending(number, ending) for ending, number in endings.most_common()]
        part.content.setdefault("read", {})[str(root)] = dict(endings)
        part.lines.append(f"read         {shorten(kinds, 8)} in {root}")
        unread += unread_files(root, names)
    part.content["not_read"] = []
    for (ending, reason), number in unread.most_common():
        part.content["not_read"].append({"ending": ending, "reason": reason, "files": number})
        part.lines.append(f"not read     {files_of_ending(number, ending)}: {reason}")
    return part


def ending_of(name: str) -> str:
    """Returns the ending of a file's name in lower case, with its point; "" if there is none."""
    if is_hidden(os.path.basename(name)):
        return ""
    ending = os.path.splitext(name)[1].lower()
    if len(ending) > LONGEST_ENDING:
        return ""
    return ending


def unread_files(root: str | os.PathLike[str], names: set[bytes]) -> Counter[tuple[str, str]]:
    """Returns how many files below a folder are not read, by (ending, reason). names: of those read, below `root`."""
    counts: Counter[tuple[str, str]] = Counter()
    seen: set[str] = set()

    def count_folder(error: OSError) -> None:
        counts["", f"{error.filename} cannot be listed: {error.strerror}"] += 1

    for folder, folders, files in os.walk(root, onerror=count_folder, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in [name for name in folders if is_hidden(name)]:
            folders.remove(name)
            counts["", f"in the hidden folder {name}"] += count_below(os.path.join(folder, name))
        for name in files:
            if os.fsencode(os.path.relpath(os.path.join(folder, name), root)) not in names:
                counts[ending_of(name), why_unread(name)] += 1
    return counts


def count_below(folder: str) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def unread_members(images: TarImages, tars: Sequence[os.PathLike[str]]) -> Counter[tuple[str, str]]:
    """Returns how many members of tars are not read, by (ending, reason)."""
    counts: Counter[tuple[str, str]] = Counter()
    names = set(images.names.tolist())
    for path in tars:
        with tarfile.open(path, mode="r:") as tar:
            for member in tar:
                name = PurePosixPath(member.name)
                if not member.isdir() and name.suffix != ".cls" and os.fsencode(str(name)) not in names:
                    counts[ending_of(name.name), why_unread(name.name)] += 1
    return counts


def why_unread(name: str) -> str:
    """Returns why a file of this name is not read."""
    lower = name.lower()
    ending = ending_of(name)
    if is_hidden(name):
        return "hidden"
    if ending in UNREAD_WEB or ending in UNREAD_RAW:
        return "images of this format are not read: convert them"
    if lower.endswith(ARCHIVES):
        return "archives are not read: unpack them"
    if lower.endswith(HUGGING_FACE):
        return "--dataset hf reads them"
    if lower.endswith(".tar"):
        return "tars are not read beside images"
    if is_image(name):
        return "the data does not use them"
    if ending == "" and name not in TEXTS:
        return "without an ending no file is taken for an image"
    return "no images"


def survey_neighbours(data_path: str, opened: Mapping[str, Images]) -> Part:
    """Returns the folders and tars in --data_path that no split of the run reads."""
    root = os.path.realpath(data_path)
    used = set()
    for images in opened.values():
        if isinstance(images, (FolderImages, TarImages)):
            used.add(os.path.realpath(images.root))
    if not os.path.isdir(root) or root in used or not used:
        return Part()
    unread = []
    listing = list_folder(Path(data_path))
    for name in listing.folders:
        place = os.path.realpath(os.path.join(root, name))
        if not any(path == place or path.startswith(place + os.sep) for path in used):
            unread.append(f"{name}/")
    unread += [*listing.images, *listing.tars, *listing.others]
    if not unread:
        return Part({"not_read": []})
    return Part({"not_read": unread}, [f"not read     {shorten(unread, 10)}: of no split that this run reads"])


# ----------------------------------------------------------------------------------------------------------- classes


def survey_classes(images: Images) -> Part:
    """Returns how many images each class has."""
    if not images.classes:
        return Part()
    valid = images.labels[(images.labels >= 0) & (images.labels < len(images.classes))]
    numbers = np.bincount(valid, minlength=len(images.classes)).tolist()
    counts = dict(zip(images.classes, numbers, strict=True))
    listed = [f"{name} {number}" for name, number in counts.items()]
    lines = [f"classes      {len(counts)}: {shorten(listed, MOST_CLASSES)}"]
    if len(counts) > MOST_CLASSES:
        lines.append(f"             from {min(numbers)} to {max(numbers)} images in a class")
    num_without = len(images) - len(valid)
    if num_without:
        lines.append(f"             {count_of(num_without, 'image')} without a class")
    return Part({"classes": counts, "without_class": num_without}, lines)


# ------------------------------------------------------------------------------------------------------ sizes, pixels


def survey_headers(images: Images, every: bool) -> Part:
    """Returns sizes and formats by the headers of evenly spaced images, or of `every` one."""
    most = len(images) if every else NUM_HEADERS
    indices = evenly_spaced(len(images), most).tolist()
    formats: Counter[str] = Counter()
    heights: list[int] = []
    widths: list[int] = []
    problems: dict[str, str] = {}  # of each path
    for i in indices:
        try:
            if isinstance(images, EncodedImages):
                pixels, (height, width) = images.read_header(i)
            else:
                pixels = images.pixel_format
                height, width = images.load(i)[0].shape[:2]
        except FormatError as error:
            problems[images.path(i)] = f"{images.path(i)!r}: {error}"
            continue
        except (ImageError, OSError) as error:
            problems[images.path(i)] = str(error)
            continue
        formats[str(pixels)] += 1
        heights.append(height)
        widths.append(width)
    part = Part({"headers": len(indices), "unreadable": [*problems.values()], "formats": dict(formats)})
    where = f"by the headers of {count_of(len(indices), 'image')}"
    if heights:
        part.content["heights"] = spread_of(heights)
        part.content["widths"] = spread_of(widths)
        part.lines.append(
            f"sizes        {describe_spread(heights)} px high, {describe_spread(widths)} px wide, {where}"
        )
    for name, number in formats.most_common():
        part.lines.append(f"format       {name}: {count_of(number, 'image')}")
    if problems:
        part.lines.append(f"unreadable   {count_of(len(problems), 'image')}, {where}: {by_reason(problems)}")
    return part


def by_reason(problems: Mapping[str, str]) -> str:
    """Returns a problem of each kind, and how many files share it. problems: {path: what is said of the file}."""
    examples: dict[str, str] = {}  # of each reason
    numbers: Counter[str] = Counter()
    for path, problem in problems.items():
        reason = problem.replace(path, "")
        examples.setdefault(reason, problem)
        numbers[reason] += 1
    texts = []
    for reason, number in numbers.most_common():
        text = examples[reason]
        if number > 1:
            text += f" (and {number - 1} more like it)"
        texts.append(text)
    return shorten(texts, 5)


def spread_of(values: Sequence[int]) -> dict[str, int]:
    ordered = sorted(values)
    return {"lowest": ordered[0], "median": ordered[len(ordered) // 2], "highest": ordered[-1]}


def describe_spread(values: Sequence[int]) -> str:
    """Returns the range and the median of some numbers, or the only one."""
    spread = spread_of(values)
    if spread["lowest"] == spread["highest"]:
        return str(spread["lowest"])
    return f"{spread['lowest']} to {spread['highest']} (median {spread['median']})"


class WatchedImages:
    """Images whose values are counted while something else reads them. Stands in for them by `load`."""

    def __init__(self, images: Images) -> None:
        self.images = images
        self.num_images = 0
        self.num_with_invalid = 0
        self.num_values = 0
        self.num_invalid = 0
        self.lowest = np.full(images.pixel_format.channels, np.inf)
        self.highest = np.full(images.pixel_format.channels, -np.inf)
        self.frequent: Counter[float] = Counter()  # of each image, its most frequent value
        self.problems: dict[str, str] = {}  # of the paths of images that cannot be decoded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.images, name)

    def __len__(self) -> int:
        return len(self.images)

    def load(self, i: int) -> tuple[np.ndarray, int]:
        try:
            img, label = self.images.load(i)
        except ImageError as error:
            self.problems[self.images.path(i)] = str(error)
            raise
        self.count(img)
        return img, label

    def count(self, img: np.ndarray) -> None:
        """Counts the values of an image [H, W, C]."""
        values = img.ravel()
        self.num_images += 1
        self.num_values += values.size
        if img.dtype.kind == "f":
            is_valid = ~np.isnan(values)
            num_invalid = int(np.count_nonzero(~is_valid))
            self.num_invalid += num_invalid
            self.num_with_invalid += int(num_invalid > 0)
            values = values[is_valid]
        if not values.size:
            return
        if img.dtype.kind == "f":
            distinct, numbers = np.unique(values, return_counts=True)
            most = int(numbers.argmax())
            self.frequent[float(distinct[most])] += int(numbers[most])
        else:
            numbers = np.bincount(values)
            most = int(numbers.argmax())
            self.frequent[float(most)] += int(numbers[most])
        pixels = img.reshape(-1, img.shape[2])
        self.lowest = np.fmin(self.lowest, np.fmin.reduce(pixels, axis=0))
        self.highest = np.fmax(self.highest, np.fmax.reduce(pixels, axis=0))


def survey_pixels(images: Images) -> Part:
    """Returns the statistics of the values of evenly spaced images, and the share of invalid ones."""
    watched: Any = WatchedImages(images)
    part = Part()
    pixels: dict[str, Any] = {}
    try:
        measured = measure_statistics(watched)
    except (ValueError, OSError) as error:
        part.lines.append(f"pixels       no mean and deviation: {error}")
    else:
        mean, std = measured.statistics
        pixels |= {"mean": mean, "std": std, "remarks": measured.remarks}
        unit = "in the unit of the files"
        if not images.pixel_format.is_float:
            unit = f"as fractions of {images.pixel_format.full_range:g}"
        part.lines.append(f"pixels       of {count_of(watched.num_images, 'image')}, {unit}: mean {numbers_of(mean)}")
        part.lines.append(f"             deviation {numbers_of(std)}")
        part.lines += [f"             {remark}" for remark in measured.remarks]
    part.content["not_decoded"] = [*watched.problems.values()]
    if watched.problems:
        number = count_of(len(watched.problems), "image")
        part.lines.append(
            f"not decoded  {number} of {watched.num_images + len(watched.problems)}: {by_reason(watched.problems)}"
        )
    if not watched.num_images:
        return part
    pixels |= {"images": watched.num_images, "lowest": floats(watched.lowest), "highest": floats(watched.highest)}
    part.lines.append(f"values       lowest {numbers_of(watched.lowest)}; highest {numbers_of(watched.highest)}")
    if watched.frequent:
        value, number = watched.frequent.most_common(1)[0]
        share = number / watched.num_values
        pixels["most_frequent"] = {"value": value, "share": share}
        if share >= FREQUENT:
            part.lines.append(f"             the most frequent value is {value:.10g}: {share:.1%} of all values")
    if images.invalid.is_declared:
        share = watched.num_invalid / watched.num_values
        pixels["invalid"] = share
        affected = f"in {watched.num_with_invalid} of {count_of(watched.num_images, 'image')}"
        part.lines.append(f"invalid      {share:.1%} of all values, {affected}")
    part.content["pixels"] = pixels
    return part


def floats(values: np.ndarray) -> list[float | None]:
    """Returns the values for JSON, which has no infinity."""
    return [float(value) if np.isfinite(value) else None for value in values]


def numbers_of(values: Sequence[float] | np.ndarray) -> str:
    return shorten([f"{value:.4g}" for value in values], 16).replace(",", "")


# ------------------------------------------------------------------------------------------------------------ copies


def survey_copies(opened: Mapping[str, Images]) -> Part:
    """Returns which images have the same bytes, within a split and across splits. Reads every file."""
    first: dict[bytes, tuple[str, int]] = {}  # of each hash, the first image
    copies: dict[str, list[str]] = {}  # of each pair of splits
    num_other_class = 0
    unreadable = 0
    for split, images in opened.items():
        for i in range(len(images)):
            try:
                digest = hash_of(images, i)
            except (ImageError, OSError):
                unreadable += 1
                continue
            if digest not in first:
                first[digest] = (split, i)
                continue
            other_split, other = first[digest]
            original = opened[other_split]
            pair = f"within {split}" if split == other_split else f"{split} in {other_split}"
            copies.setdefault(pair, []).append(f"{images.path(i)} = {original.path(other)}")
            if images.classes and images.labels[i] != original.labels[other]:
                num_other_class += 1
    lines = []
    for pair, found in copies.items():
        lines.append(f"{count_of(len(found), 'image')} {pair}: {shorten(found, 5)}")
    if num_other_class:
        lines.append(f"{num_other_class} of them with another class")
    if unreadable:
        lines.append(f"{count_of(unreadable, 'image')} could not be read")
    content = {"copies": copies, "copies_with_other_class": num_other_class}
    return Part(content, lines or ["no two images have the same bytes"])


def hash_of(images: Images, i: int) -> bytes:
    """Returns the SHA-256 of an image's file, or of its pixels where there are no files."""
    if isinstance(images, EncodedImages):
        return hashlib.sha256(images.read(i)).digest()
    return hashlib.sha256(images.load(i)[0].tobytes()).digest()
