"""Maps of a model's attention, one per training image, and the weights of a view's tokens that follow from them.

A file holds the maps of all images, float16 [M, rows, columns] in [0, 1], as numpy's .npy. Its grid is that of the
model's tokens over the whole image. Workers map the file into memory, and read the maps of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from util.atomic import replaced_file
from util.data.datasets import Address, AddressedDataset, Sample
from util.data.padded_crop import PaddedCropFlip
from util.data.transforms import RandomResizedCropFlip, Sides, Size, covering_size, resize
from util.pos_embed import height_and_width

CROPS = ("view", "released")


def maps_path(output_dir: str | Path, epoch: int) -> Path:
    """Returns the file of the maps that are made after `epoch` in the output folder of a run."""
    return Path(output_dir) / "attention" / f"epoch-{epoch:04d}.npy"


def write_maps(path: Path, maps: np.ndarray) -> None:
    """Writes maps [M, rows, columns] as float16. Replaces the file in one step; OSError names it."""
    path.parent.mkdir(exist_ok=True)
    with replaced_file(path, durable=True) as temporary:
        np.save(temporary, maps.astype(np.float16))


class Squash:
    """Resizes the whole image to `size`, bilinear, whatever its aspect ratio: what attention maps are made of."""

    def __init__(self, size: Sides, reference: bool = False) -> None:
        self.size = height_and_width(size)
        self.reference = reference

    def __call__(self, img: Tensor, epoch: int = 0, index: int = 0) -> Tensor:
        """Resizes [C, H, W]. Returns [C, *size] of the same type, contiguous."""
        return resize(img, self.size, "bilinear", self.reference).contiguous()


class CropBox(NamedTuple):
    """The box that a transform cuts out of an image, in fractions of the image's height and width, and the flip.

    The box may exceed the image where a transform pads.
    """

    top: float
    left: float
    height: float
    width: float
    flip: bool  # the columns are mirrored


def crop_box(transform: RandomResizedCropFlip | PaddedCropFlip, size: Size, epoch: int, index: int) -> CropBox:
    """Returns the box that the transform cuts out of an image of `size` at an address."""
    if isinstance(transform, PaddedCropFlip):
        size = covering_size(size, transform.size)  # it resizes the image before it crops
    height, width = size
    top, left, crop_height, crop_width, flip = transform.draw(size, epoch, index)
    return CropBox(top / height, left / width, crop_height / height, crop_width / width, flip)


class BoxedDataset(AddressedDataset):
    """A data set whose samples end with (index of the image that was read, box of its crop)."""

    def __init__(self, dataset: AddressedDataset) -> None:
        super().__init__(dataset.images, dataset.transform)
        self.bad = dataset.bad

    def _view(self, index_read: int, pixels: np.ndarray, label: int, address: Address) -> Sample:
        box = crop_box(self.transform, pixels.shape[:2], *address)
        return *super()._view(index_read, pixels, label, address), (index_read, box)


@dataclass(frozen=True)
class AttentionMaps:
    """The maps in a file, as token weights of views.

    path, patch_size: the file, and the side of a token in pixels of the view.
    crop: "view" reads the part of a map that the view shows. "released" reads what AMT's public code reads: the 2 x 2
        cells in the upper left corner of the map for almost every view, because its offsets lack the factor from
        fractions of the image to cells. A third row or column is read if the view reaches that end of the image.
    """

    path: Path
    patch_size: int
    crop: str = "view"

    def token_weights(self, boxes: Sequence[tuple[int, CropBox]]) -> np.ndarray:
        """Returns the weights of the tokens of crops, float32 [B, N], for pairs of an image's index and its box.

        A map is interpolated bilinearly between the centres of its cells, and is constant beyond the outer centres. The
        weight of a token is the mean over its pixels. Along each axis that is a small matrix.
        """
        indices, crops = zip(*boxes, strict=True)
        all_maps = np.load(self.path, mmap_mode="r")
        maps = all_maps[list(indices)].astype(np.float32)  # [B, rows, columns]
        num_images, num_rows, num_columns = maps.shape
        top, left, height, width, flip = np.array(crops, np.float64).T
        rows = self._axis_matrices(top, height, num_rows)
        columns = self._axis_matrices(left, width, num_columns)
        is_flipped = flip[:, None, None] > 0
        columns = np.where(is_flipped, columns[:, ::-1], columns)
        weights = rows @ maps @ columns.swapaxes(1, 2)
        return weights.reshape(num_images, -1)

    def _axis_matrices(self, start: np.ndarray, length: np.ndarray, num_cells: int) -> np.ndarray:
        """Returns [B, tokens, cells] of one axis: the share of each cell of the map in each token of the view.

        start, length: of the views [B], in fractions of the image.
        """
        start = start[:, None]
        length = length[:, None]
        num_pixels = num_cells * self.patch_size
        centres = (np.arange(num_pixels) + 0.5) / num_pixels  # of the view's pixels
        last: np.ndarray | int = num_cells - 1
        if self.crop == "view":
            places = (start + length * centres) * num_cells - 0.5
        else:
            num_read = 2 + (start + length > 1 - 1e-9)
            places = centres * num_read - 0.5
            last = np.minimum(num_read, num_cells) - 1
        places = places.clip(0, last).astype(np.float32)
        cells = np.arange(num_cells, dtype=np.float32)
        distances = np.abs(places[..., None] - cells)
        shares = np.maximum(0, 1 - distances)
        shares = shares.reshape(len(start), num_cells, self.patch_size, num_cells)
        return shares.mean(axis=2)
