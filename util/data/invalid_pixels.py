"""Invalid pixels: clouds, borders of a scan, dead detectors, and bands that a file lacks.

NaN marks them from the file to the loss. An image that has some is float32 in the unit of its file, because no integer
could be kept free for them: a crop interpolates, and may return any.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from util.data.pixel_format import FormatError, Header, PixelFormat, read_header, read_pixels, refuse_not_finite
from util.text import count_of

VALID_SHARE = 0.5  # of the weights that make a pixel of a crop: with less on valid pixels it is invalid


@dataclass(frozen=True)
class InvalidPixels:
    """What marks pixels of files as invalid. Sources of images have None where all pixels are valid.

    nodata: value of invalid pixels of a band, in the unit of the files. If anything is declared, NaN is another one.
    mask_band: number of the band, from 0, that is 0 at invalid pixels; -1 is the last one. It is no channel of images.
    bands: the channels that files hold which lack some, one tuple for each number of bands.
    """

    nodata: float | None = None
    mask_band: int | None = None
    bands: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "InvalidPixels":
        """Returns what flags or the settings of a run declare, for those that `pixel_format.declares_invalid`."""
        nodata = settings.get("nodata")
        if nodata is not None:
            nodata = float(nodata)
        bands = tuple(tuple(channels) for channels in settings.get("bands") or ())
        return cls(nodata, settings.get("mask_band"), bands)

    def __str__(self) -> str:
        """Returns the flags that declare this."""
        flags = []
        if self.nodata is not None:
            flags.append(f"--nodata {self.nodata:.10g}")
        if self.mask_band is not None:
            flags.append(f"--mask_band {self.mask_band}")
        for channels in self.bands:
            flags.append(f"--bands {' '.join(map(str, channels))}")
        return " ".join(flags)

    def check(self, in_chans: int) -> None:
        """ValueError if the flags do not go with images of `in_chans` channels, or with each other."""
        lengths = set()
        for channels in self.bands:
            listed = " ".join(map(str, channels))
            if len(set(channels)) != len(channels) or min(channels) < 0 or max(channels) >= in_chans:
                raise ValueError(f"--bands {listed}: give different channels from 0 to {in_chans - 1}")
            if len(channels) == in_chans or len(channels) in lengths:
                raise ValueError(
                    f"--bands {listed}: files of {count_of(len(channels), 'band')} hold other channels already, and "
                    "the number of bands is what tells files apart"
                )
            lengths.add(len(channels))
        if self.mask_band is None:
            return
        if self.bands and self.mask_band not in (0, -1):
            raise ValueError(f"--mask_band must be 0 or -1 with --bands, as files differ, got {self.mask_band}")
        if not -in_chans - 1 <= self.mask_band <= in_chans:
            raise ValueError(
                f"--mask_band must lie between 0 and {in_chans}, or be -1: files have {in_chans} channels and the "
                f"mask, got {self.mask_band}"
            )

    def check_type(self, pixels: PixelFormat) -> None:
        """ValueError if no pixel of this type can have the value `nodata`."""
        if self.nodata is None or pixels.is_float:
            return
        highest = int(pixels.full_range)
        if not (0 <= self.nodata <= highest and self.nodata == int(self.nodata)):
            raise ValueError(f"--nodata {self.nodata:g} is no value of {pixels.dtype}: give an integer up to {highest}")

    def band_counts(self, in_chans: int) -> list[int]:
        """Returns how many bands files may have, those of complete ones first."""
        counts = [in_chans]
        for channels in self.bands:
            counts.append(len(channels))
        if self.mask_band is not None:
            return [count + 1 for count in counts]
        return counts

    @property
    def keep_bands(self) -> bool:
        """Whether files never become RGB, see `pixel_format.read_header`: their number of bands has a meaning."""
        return bool(self.bands) or self.mask_band is not None

    def read_header(self, source: str | os.PathLike[str] | BytesIO, in_chans: int) -> Header:
        """Reads the format and the size of a file's image. The errors are those of `pixel_format.read_header`."""
        file_format, size = self._read_file_header(source, in_chans)
        return PixelFormat(in_chans, file_format.dtype, has_invalid=True), size

    def _read_file_header(self, source: str | os.PathLike[str] | BytesIO, in_chans: int) -> Header:
        """Reads the header of a file, with all its bands; FormatError if it has another number of them.

        Which axis of an array has the bands depends on the number that is expected, so each one is tried.
        """
        counts = self.band_counts(in_chans)
        problem = ""
        for count in counts:
            try:
                file_format, size = read_header(source, count, self.keep_bands)
            except FormatError as error:
                problem = problem or str(error)
                continue
            if file_format.channels == count:
                return file_format, size
            problem = problem or f"it has {file_format}"
        expected = " or ".join(map(str, counts))
        raise FormatError(f"{problem}; --in_chans, --mask_band and --bands expect files of {expected} bands")

    def read_pixels(self, data: bytes, expected: PixelFormat, reference: bool = False) -> np.ndarray:
        """Decodes a file to [H, W, C]: in the type of the file if all pixels are valid, else float32 with NaN.

        expected, reference, errors: see `pixel_format.read_pixels`.
        """
        file_format, _ = self._read_file_header(BytesIO(data), expected.channels)
        if file_format.dtype != expected.dtype:
            raise ValueError(f"it has {file_format}, other images have {expected}")
        array = read_pixels(data, file_format, reference, may_hold_nan=True, keep_bands=self.keep_bands)
        return self.mark(array, expected.channels)

    def mark(self, array: np.ndarray, in_chans: int) -> np.ndarray:
        """Returns the image [H, W, in_chans] of a file's bands [H, W, K], see `read_pixels`.

        ValueError for infinite values that nothing declares invalid.
        """
        invalid = np.zeros((), bool)
        if self.mask_band is not None:
            invalid = array[:, :, [self.mask_band]] == 0
            array = np.delete(array, self.mask_band, axis=2)
        if self.nodata is not None:
            is_nodata = array == array.dtype.type(self.nodata)
            if np.isnan(self.nodata):
                is_nodata = np.isnan(array)
            invalid = invalid | is_nodata
        if array.dtype.kind == "f":
            invalid = invalid | np.isnan(array)
        if array.dtype.kind == "f":
            refuse_not_finite(np.where(invalid, 0, array))
        held: tuple[int, ...] | None = None
        for channels in self.bands:
            if len(channels) == array.shape[2]:
                held = channels
        if held is None and not invalid.any():
            return np.ascontiguousarray(array)
        image = array.astype(np.float32)
        np.copyto(image, np.nan, where=invalid)
        if held is None:
            return image
        complete = np.full((*image.shape[:2], in_chans), np.nan, np.float32)
        complete[:, :, held] = image
        return complete


def invalid_everywhere(img: np.ndarray) -> np.ndarray:
    """Returns the pixels of an image [H, W, C] that are invalid in all channels, bool [H, W].

    Dense tasks give them no class. A pixel with one valid channel keeps its label, as a token of pre-training counts
    with a part of its values.
    """
    if img.dtype.kind != "f":
        return np.zeros(img.shape[:2], bool)
    return np.isnan(img).all(axis=2)


def transform_valid(transform: Callable[[Tensor, int, int], Tensor], img: Tensor, epoch: int, index: int) -> Tensor:
    """Applies a crop to an image [C, H, W], see `resize_valid`. Returns float32 [C, h, w]."""
    return resize_valid(lambda whole: transform(whole, epoch, index), img).float()


def resize_valid(resize: Callable[[Tensor], Tensor], img: Tensor) -> Tensor:
    """Resizes or crops an image [C, H, W] whose invalid pixels are NaN. Returns [C, h, w] of its type.

    Each pixel of the result is the weighted mean of valid pixels, by the weights of the interpolation. It is invalid
    if less than half of their sum lies on valid ones.
    """
    if not img.is_floating_point():
        return resize(img)
    valid = ~img.isnan()
    if valid.all():
        return resize(img)
    if (valid == valid[:1]).all():  # as for clouds
        valid = valid[:1]
    values = img.nan_to_num(0.0)
    channels = torch.cat([values, valid.float()])
    total, share = resize(channels).split([len(values), len(valid)])
    return torch.where(share >= VALID_SHARE, total / share, torch.nan)


def note_on_encoder(encoder: Mapping[str, Any], args: Mapping[str, Any]) -> list[str]:
    """Returns a note if an encoder has learnt from images with invalid pixels, and a run marks them otherwise.

    encoder: its `pixel_settings`, which declare such pixels.
    """
    of_encoder = InvalidPixels.from_settings(encoder)
    invalid = InvalidPixels.from_settings(args)
    if str(invalid) == str(of_encoder):  # NaN equals nothing
        return []
    return [
        f"note: the encoder was trained with {of_encoder}, and this run has {str(invalid) or 'none of these flags'}"
    ]
