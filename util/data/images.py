"""Sources of images: `images.load(i)` returns ([H, W, C], label). `util.data.datasets` adds the epoch.

A source may add label maps to what a data set transforms: `load_sample`. `load` always returns the image alone.

All images of a source have one `PixelFormat`: RGB of 8 bits unless other files or another number of channels are
wanted. Classes are optional here, because pre-training needs none.
"""

import errno
import hashlib
import io
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import TiffImagePlugin, UnidentifiedImageError

from util.data.decode import PILLOW_ERRORS, open_image
from util.data.folders import find_samples, spelling
from util.data.pixel_format import (
    GDAL_NODATA,
    RGB8,
    Header,
    PixelFormat,
    declares_invalid,
    read_header,
    read_pixels,
    tifffile,
)
from util.text import count_of, shorten

if TYPE_CHECKING:
    from util.data.invalid_pixels import InvalidPixels

PNG_BITS = 24  # place of the bits per channel in a PNG

T = TypeVar("T")


class ImageError(ValueError):
    """A file cannot be read as an image. The message names the file, for the user."""


class MissingImage(ImageError):
    """The file is missing or cannot be opened."""


# Errors of a single file. Any other OSError is a failure of the storage, where another image would not help.
FILE_ERRORS = (errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def evenly_spaced(length: int, most: int) -> np.ndarray:
    """Returns up to `most` evenly spaced indices below `length`."""
    return np.unique(np.linspace(0, length - 1, min(most, length)).astype(int))


def retry_io(read: Callable[[], T]) -> T:
    """Returns `read()`. If the storage fails, tries again for 11 seconds."""
    for seconds in (0.1, 1.0, 10.0):
        try:
            return read()
        except OSError as error:
            if error.errno in FILE_ERRORS:
                raise
            time.sleep(seconds)
    return read()


def read_file(path: str) -> bytes:
    """Returns the bytes of an image file; MissingImage if it is missing or unreadable."""
    try:
        return retry_io(Path(path).read_bytes)
    except OSError as error:
        if error.errno not in FILE_ERRORS:
            raise
        raise MissingImage(f"{path!r} is not a readable image ({error})") from error


@dataclass(frozen=True)
class Reading:
    """How encoded images are read. ValueError if the parts do not go with each other.

    in_chans: channels that are wanted; 3 are RGB of 8 bits. use_pillow: decode everything by Pillow, as torchvision's
    ImageFolder does. invalid: what marks invalid pixels; None: all pixels are valid.
    """

    in_chans: int = 3
    use_pillow: bool = False
    invalid: "InvalidPixels | None" = None

    def __post_init__(self) -> None:
        if self.invalid is not None:
            self.invalid.check(self.in_chans)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "Reading":
        """Returns what flags, or the settings of a run, say."""
        in_chans = settings["in_chans"]
        use_pillow = settings.get("loader") == "reference"
        if not declares_invalid(settings):
            return cls(in_chans, use_pillow)
        from util.data.invalid_pixels import InvalidPixels

        return cls(in_chans, use_pillow, InvalidPixels.from_settings(settings))


AS_RGB = Reading()


class Images:
    """Images of one format, with labels. Subclasses define `path`, `fingerprint`, `check` and `load`.

    A source is pickled for other ranks, unless its images `lie_in_files`, and forked workers call `load`: it keeps no
    file open. Where `find_images` of `util/data/open.py` opens it, it gives the images of the split, or raises
    MissingSplit. Splits are chosen by `choose_split` of `util/data/folders.py`. Where the storage fails, as with a lost
    archive, `load` raises OSError. `EncodedImages` is for files of images: with names relative to the folder of the
    split, in torchvision's order, they have the fingerprint of that folder.

    labels: int64 [n]. classes: their names, as `spelling` returns them. notes: sentences on what is ignored or
    replaced, for the log. in_chans: channels that are wanted. lie_in_files: each rank maps or loads them from files
    that rank 0 has written. pinned_path: --data_path with the commit, if it is a data set of the Hub.
    """

    in_chans = 3
    pixel_format = RGB8
    invalid: "InvalidPixels | None" = None
    lie_in_files = False
    pinned_path: str | None = None
    typical_side: int | None = None  # median of the shorter sides of images that were looked at

    def __init__(self, root: str | Path, labels: np.ndarray, classes: Sequence[str], notes: Sequence[str] = ()) -> None:
        self.root = root
        self.labels = labels
        self.classes = [spelling(name) for name in classes]
        self.notes = list(notes)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, i: int) -> str:
        """Returns where image i is stored, for messages."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Returns a hash of what the images are: equal for two copies of a data set."""
        raise NotImplementedError

    def check(self, max_bad_fraction: float = 0.0) -> None:
        """Looks at the files before training. ImageError if more than that share of images is bad."""

    def describe_targets(self) -> list[str]:
        """Returns what --check_data prints about label maps or objects."""
        return []

    def use_classes(self, classes: Sequence[str], whose: str) -> None:
        """Numbers the labels as in `classes`, which may have more classes than these images. They are noted.

        whose: where `classes` come from, for messages. ValueError if a class of these images is not among them.
        """
        if list(classes) == self.classes:
            return
        unknown = [name for name in self.classes if name not in classes]
        if unknown:
            raise ValueError(f"{str(self.root)!r} has the classes {shorten(unknown, 5)}, which {whose} does not have")
        missing = [name for name in classes if name not in self.classes]
        if missing:
            self.notes.append(f"note: {str(self.root)!r} has no image of {shorten(missing, 5)}")
        positions = [list(classes).index(name) for name in self.classes]
        self.labels = np.array(positions, np.int64)[self.labels]
        self.classes = list(classes)

    def load(self, i: int) -> tuple[np.ndarray, int]:
        """Returns ([H, W, C] in `pixel_format`, label); ImageError names the file.

        With invalid pixels the image is float32, and they are NaN.
        """
        raise NotImplementedError

    def prepare(self, indices: Sequence[int]) -> None:
        """Announces that `load` is about to be called for these images, in this order."""

    def load_sample(self, i: int) -> tuple[np.ndarray, int]:
        """Returns ([H, W, D], label) for the transform of a data set: the image, or the image and its label map."""
        return self.load(i)


class EncodedImages(Images):
    """Images that are stored encoded. Subclasses define `path` and `read`.

    names: bytes [n]. `check` finds out the `pixel_format` of all images.
    """

    num_checked = 1000  # headers that `check` reads
    num_decoded = 64  # of these, the images of floats that `check` decodes

    def __init__(
        self,
        root: str | Path,
        names: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
        notes: Sequence[str] = (),
        reading: Reading = AS_RGB,
    ) -> None:
        super().__init__(root, labels, classes, notes)
        self.names = names
        self.in_chans = reading.in_chans
        self.use_pillow = reading.use_pillow
        self.invalid = reading.invalid

    def read(self, i: int) -> bytes:
        """Returns the encoded bytes of image i; ImageError if that file is missing or unreadable."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all names and labels in order: the same for a folder and the tars packed from it."""
        digest = hashlib.sha256()
        for first in range(0, len(self), 1 << 20):  # in parts: `tolist` makes an object of each name
            names = self.names[first : first + (1 << 20)].tolist()
            digest.update(b"".join(name + b"\0" for name in names))
        digest.update(self.labels.tobytes())
        return digest.hexdigest()

    def check(self, max_bad_fraction: float = 0.0) -> None:
        self.survey(max_bad_fraction, self.read_header)

    def survey(self, max_bad_fraction: float, read_header: Callable[[int], Header]) -> None:
        """Reads the headers of up to `num_checked` evenly spaced images, and finds out the `pixel_format`.

        Images are bad if they cannot be read, do not have `in_chans` channels or the format of the first good one, or,
        among some that are decoded, if floats are not finite. A single bad image is accepted, unless the fraction is 0
        or no other is good. ImageError if more are. ValueError if they cannot have the value that marks invalid pixels.
        """
        checked = evenly_spaced(len(self), self.num_checked).tolist()
        decoded = set(checked[:: math.ceil(len(checked) / self.num_decoded)])
        problems: list[str] = []
        good: list[int] = []
        sides: list[int] = []
        for i in checked:
            try:
                pixels, size = read_header(i)
                self._refuse_channels(i, pixels)
                if good and pixels != self.pixel_format:
                    paths = f"{self.path(good[0])!r} and {self.path(i)!r}"
                    raise ImageError(f"{paths} have {self.pixel_format} and {pixels}: all images need one format")
                self.pixel_format = pixels
                if pixels.is_float and i in decoded:
                    self.load(i)
            except ImageError as error:
                problems.append(str(error))
                continue
            good.append(i)
            sides.append(min(size))
        self._refuse_bad(problems, len(checked), max_bad_fraction)
        self.typical_side = sorted(sides)[len(sides) // 2]
        if self.invalid is not None:
            self.invalid.check_type(self.pixel_format)
        self._note_loss(good[0])
        self._note_nodata(good[0])

    def read_header(self, i: int) -> Header:
        """Returns format and size of image i; ImageError if it cannot be read."""
        try:
            if self.invalid is not None:
                return self.invalid.read_header(self.source(i), self.in_chans)
            return read_header(self.source(i), self.in_chans)
        except ImageError:
            raise
        except PILLOW_ERRORS as error:
            raise ImageError(f"{self.path(i)!r} is not a readable image ({error})") from error

    def _refuse_bad(self, problems: Sequence[str], num_checked: int, max_bad_fraction: float) -> None:
        """ImageError if too many of the checked images have problems, which it notes otherwise."""
        message = f"{len(problems)} of {num_checked} checked images cannot be used"
        num_accepted = 0.0
        if max_bad_fraction:
            num_accepted = max(1, max_bad_fraction * num_checked)
        if len(problems) == num_checked or len(problems) > num_accepted:
            if max_bad_fraction:
                message += f", more than --max_bad_fraction {max_bad_fraction:g}"
            raise ImageError(f"{message}; the first one: {problems[0]}")
        if problems:
            self.notes.append(f"warning: {message}; the first one: {problems[0]}")

    def _refuse_channels(self, i: int, pixels: PixelFormat) -> None:
        """ImageError if image i has other channels than those that are wanted."""
        if pixels.channels != self.in_chans:
            wanted = count_of(self.in_chans, "channel")
            raise ImageError(
                f"{self.path(i)!r} has {pixels}, but the model takes {wanted}: if all images are alike, train with "
                f"--in_chans {pixels.channels} (see also --mask_band and --bands)"
            )

    def _note_loss(self, i: int) -> None:
        """Notes that images like i, which can be read, are made RGB of 8 bits and have more bits or bands."""
        if self.pixel_format != RGB8:
            return
        data = self.read(i)
        bits = 8
        bands = 3
        losses: list[str] = []
        with suppress(UnidentifiedImageError), open_image(io.BytesIO(data)) as img:
            if img.format == "PNG":
                bits = data[PNG_BITS]
            elif img.format == "TIFF":
                bits = max(img.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (8,)))
                bands = img.tag_v2.get(TiffImagePlugin.SAMPLESPERPIXEL, 1)
        if bits > 8:
            losses.append(f"{bits} bits")
        if bands > 3:
            losses.append(f"{bands} bands")
        if losses:
            problem = f"{self.path(i)!r} has {' and '.join(losses)}, and is read as RGB of 8 bits"
            self.notes.append(f"warning: {problem}: see --in_chans")

    def _note_nodata(self, i: int) -> None:
        """Notes that the tag of a GeoTIFF like i names another value of invalid pixels than --nodata."""
        declared: float | None = None
        if self.invalid is not None:
            declared = self.invalid.nodata
        with suppress(Exception), tifffile.TiffFile(self.source(i)) as tiff:  # of many types, for other files
            value = float(tiff.pages[0].tags[GDAL_NODATA].value)
            if str(value) != str(declared):  # as text, in which NaN equals itself
                tag = f"the tag of {self.path(i)!r} says nodata {value:.10g}"
                self.notes.append(f"note: {tag}, and --nodata is {declared}")

    def source(self, i: int) -> str | io.BytesIO:
        """Returns image i in a form that Pillow opens."""
        return io.BytesIO(self.read(i))

    def load(self, i: int) -> tuple[np.ndarray, int]:
        data = self.read(i)
        label = int(self.labels[i])
        try:
            if self.invalid is not None:
                return self.invalid.read_pixels(data, self.pixel_format, self.use_pillow), label
            return read_pixels(data, self.pixel_format, self.use_pillow), label
        except PILLOW_ERRORS as error:
            raise ImageError(f"{self.path(i)!r} cannot be decoded: {error}") from error


class ImageFiles(EncodedImages):
    """Images in files of their own. samples: [(path relative to `root`, label)]."""

    def __init__(
        self,
        root: str | Path,
        samples: Sequence[tuple[str, int]],
        classes: Sequence[str],
        notes: Sequence[str] = (),
        reading: Reading = AS_RGB,
    ) -> None:
        # Arrays, because forked workers share their memory. Reading a list would copy it into each worker.
        names = np.array([os.fsencode(path) for path, _ in samples])
        labels = np.array([label for _, label in samples], np.int64)
        super().__init__(root, names, labels, classes, notes, reading)

    def read(self, i: int) -> bytes:
        return read_file(self.path(i))

    def path(self, i: int) -> str:
        return os.path.join(self.root, os.fsdecode(bytes(self.names[i])))

    def source(self, i: int) -> str:
        return self.path(i)  # Pillow then reads no more than the header


class FolderImages(ImageFiles):
    """Images of a folder: those in its class folders, or those directly in it, without classes and with label 0.

    ValueError if the folder holds none, if a class has none, or if there are no classes although they are `labelled`.
    """

    def __init__(
        self,
        root: str | Path,
        labelled: bool = False,
        notes: Sequence[str] = (),
        reading: Reading = AS_RGB,
    ) -> None:
        classes, samples, more_notes = find_samples(root, labelled)
        super().__init__(root, samples, classes, [*notes, *more_notes], reading)


def find_storage_error(images: Images) -> OSError | None:
    """Returns an error if none of up to 100 evenly spaced images can be opened, which no single file explains."""
    if not isinstance(images, EncodedImages):
        return None
    for i in evenly_spaced(len(images), 100).tolist():
        try:
            images.read(i)
        except MissingImage:
            continue
        except ImageError:
            return None
        except OSError as error:
            return error
        return None
    return OSError(f"the images in {str(images.root)!r} cannot be opened any more")


def refuse_single_class(images: Any) -> None:
    """ValueError if all images have one class: any classifier would be right."""
    if len(images.classes) < 2 or has_one_label(images):
        problem = f"all {count_of(len(images), 'image')} of {str(images.root)!r} have the class"
        raise ValueError(f"{problem} {images.classes[images.labels[0]]!r}, but a classifier needs two or more")


def has_one_label(images: Any) -> bool:
    return bool((images.labels == images.labels[0]).all())


def note_on_small_images(images: Images, img_size: tuple[int, int]) -> list[str]:
    """Returns a note if a typical image is enlarged more than twice to the size that the model sees."""
    side = images.typical_side
    if side is None or 2 * side >= min(img_size):
        return []
    return [
        f"note: the shorter side of a typical image has {count_of(side, 'pixel')}, and it is enlarged "
        f"{min(img_size) / side:.1f} times: a smaller --input_size, with a smaller --patch_size, shows as much"
    ]


def match_splits(images: Images, val_images: Images) -> None:
    """Numbers the classes of validation images as those of the training images. ValueError if they do not fit."""
    val_images.use_classes(images.classes, "the training data")
    check_splits(images, val_images)


def check_splits(images: Any, val_images: Any) -> None:
    """ValueError unless training and validation images have the same format."""
    if val_images.pixel_format != images.pixel_format:
        raise ValueError(
            f"the training images have {images.pixel_format}, the validation images {val_images.pixel_format}"
        )


def check_classes(ours: Sequence[str], theirs: Sequence[str], what: str, whose: str) -> None:
    """ValueError if the lists of classes differ. It names the first differences."""
    if list(ours) == list(theirs):
        return
    difference = "in another order"
    odd = sorted(set(ours) ^ set(theirs))
    if odd:
        difference = f"only one of them has {', '.join(odd[:5])}"
    raise ValueError(f"{what} has {len(ours)} classes, {whose} {len(theirs)}; {difference}")
