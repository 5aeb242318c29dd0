"""Checks of image files before training: sizes from headers, and many files at once, in threads."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from util.cores import available_cores
from util.data.decode import PILLOW_ERRORS, open_image
from util.data.images import FILE_ERRORS, ImageError, ImageFiles
from util.data.pixel_format import PixelFormat
from util.data.transforms import Size

MAX_THREADS = 16  # of a process that reads files for a check
T = TypeVar("T")


def read_size(path: str) -> Size:
    """Reads the (height, width) of an image from its header; ImageError if it cannot be read."""
    with image_errors(path):
        with open_image(path) as img:
            return img.height, img.width


def read_formats(
    images: ImageFiles,
    compare: Callable[[int, Size], None],
    indices: Sequence[int],
    max_bad_fraction: float,
    noun: str = "images",
) -> dict[PixelFormat, int]:
    """Reads the headers of images. Returns their formats, each with an image that has it.

    compare: `compare(i, (height, width))` raises ImageError for a size that does not fit. ImageError, too, if more than
    `max_bad_fraction` of the images are bad.
    """

    def read_format(i: int) -> tuple[PixelFormat, int]:
        with image_errors(images.path(i)):
            pixel_format, size = images.header_of(images.path(i))
        compare(i, size)
        return pixel_format, i

    return dict(examine(read_format, indices, max_bad_fraction, noun))


@contextmanager
def image_errors(path: str) -> Iterator[None]:
    """Turns errors of a single file inside into an ImageError that names it. Failures of the storage stay OSErrors."""
    try:
        yield
    except (*PILLOW_ERRORS, EOFError) as error:
        if isinstance(error, OSError) and error.errno not in (None, *FILE_ERRORS):
            raise
        raise ImageError(f"{path!r} cannot be read: {error}; replace the file") from error


def examine(look: Callable[[int], T], indices: Sequence[int], max_bad_fraction: float, noun: str) -> list[T]:
    """Returns what `look(i)` returns for the indices, in threads. ImageError if more than that share raises one.

    noun: of what is examined, for the message.
    """

    def try_one(i: int) -> T | ImageError:
        try:
            return look(i)
        except ImageError as error:
            return error

    with ThreadPoolExecutor(min(MAX_THREADS, available_cores())) as pool:
        outcomes = list(pool.map(try_one, indices))  # stops at other errors, such as those of the storage
    problems = [str(outcome) for outcome in outcomes if isinstance(outcome, ImageError)]
    if len(problems) > max_bad_fraction * len(indices):
        raise ImageError(f"{len(problems)} of {len(indices)} checked {noun} are bad: {'; '.join(problems[:3])}")
    return [outcome for outcome in outcomes if not isinstance(outcome, ImageError)]
