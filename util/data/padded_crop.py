"""MFF's crop for pre-training, `--crop padded`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from util.addressed import AUGMENT, addressed_numbers
from util.data.transforms import Size, covering_size, mirror, resize
from util.pos_embed import height_and_width


@dataclass(frozen=True)
class PaddedCropFlip:
    """MFF's pre-training augmentation, drawn from the sample's address: no random scale, no random aspect ratio.

    The image is resized to just cover `size`. 4 px of reflection are padded on all sides, a random window of `size` is
    cut out, and flipped at random.
    """

    size: Size
    seed: int
    interpolation: str = "bilinear"
    reference: bool = False
    hflip: bool = True
    padding = 4

    def __call__(self, img: Tensor, epoch: int, index: int) -> Tensor:
        """Crops [C, H, W] (any strides). Returns [C, *size] of the same type, contiguous."""
        height, width = covering_size(height_and_width(img.shape[-2:]), self.size)
        img = resize(img, (height, width), self.interpolation, self.reference)
        top, left, *_, flip = self.draw((height, width), epoch, index)
        # Reads the window of the padded image through reflected indices, so that no padded image is made.
        rows = reflected(top, self.size[0], height)
        columns = reflected(left, self.size[1], width)
        img = img[:, rows][:, :, columns]
        if flip:
            img = mirror(img)
        return img.contiguous()

    def draw(self, size: Size, epoch: int, index: int) -> tuple[int, int, int, int, bool]:
        """Returns (top, left, height, width, flip) of the window in the resized image of `size`, in pixels.

        top, left: -4 at the least.
        """
        u_top, u_left, u_flip = addressed_numbers(AUGMENT, self.seed, epoch, index, 3)
        height, width = size
        rows, columns = self.size
        num_tops = height + 2 * self.padding - rows + 1
        num_lefts = width + 2 * self.padding - columns + 1
        top = int(u_top * num_tops) - self.padding
        left = int(u_left * num_lefts) - self.padding
        flip = self.hflip and u_flip < 0.5
        return top, left, rows, columns, flip


def reflected(first: int, count: int, length: int) -> Tensor:
    """Returns indices first .. first + count - 1 of an axis with reflection padding. The border is not repeated."""
    indices = torch.arange(first, first + count).abs()
    last = length - 1
    return last - (last - indices).abs()
