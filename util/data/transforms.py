"""From a decoded image to a normalised batch: crop in the worker on bytes, normalise on the device."""

import math
from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment as timm_ops
from timm.data import create_transform
from torch import nn
from torch.nn import functional as F
from torchvision.transforms import Compose

from util.addressed import AUGMENT, LIBRARY, addressed_seed, addressed_uniform, seeded_libraries

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_TRIES = 10


class RandomResizedCropFlip:
    """MAE's pre-training augmentation, drawn from the sample's address: random resized crop, bicubic, and flip.

    The box follows torchvision's RandomResizedCrop: up to 10 tries of an area in `scale` and a log-uniform aspect
    ratio in `ratio`, then the largest central crop. The resize is torch's antialiased kernel on uint8, within
    0.05/255 of PIL's on average and three times as fast; `interpolation`: "bicubic" or "bilinear". `clip`: one try only,
    its sides clipped to the image, as MAE crops for linear probing.
    """

    def __init__(self, size, seed, scale=(0.2, 1.0), ratio=(3 / 4, 4 / 3), clip=False, interpolation="bicubic", reference=False):
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.seed, self.scale, self.ratio, self.clip = seed, tuple(scale), tuple(ratio), clip
        self.interpolation, self.reference = interpolation, reference

    def __call__(self, img, epoch, index):
        """uint8 [3, H, W] (any strides) -> uint8 [3, *size], contiguous."""
        draws = addressed_uniform(AUGMENT, self.seed, epoch, [index], 2 * _TRIES + 3)[0].tolist()
        top, left, height, width = self.box(img.shape[-2], img.shape[-1], draws)
        crop = resize(img[:, top : top + height, left : left + width], self.size, self.interpolation, self.reference)
        return (crop.flip(-1) if draws[-1] < 0.5 else crop).contiguous()

    def box(self, height, width, draws):
        """(top, left, height, width) of the crop of an image, from uniform numbers in [0, 1)."""
        for u_area, u_ratio in zip(draws[0 : 2 * _TRIES : 2], draws[1 : 2 * _TRIES : 2], strict=True):
            area = height * width * (self.scale[0] + u_area * (self.scale[1] - self.scale[0]))
            low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
            ratio = math.exp(low + u_ratio * (high - low))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if self.clip:
                w, h = min(max(w, 1), width), min(max(h, 1), height)
            if 0 < w <= width and 0 < h <= height:
                return int(draws[-3] * (height - h + 1)), int(draws[-2] * (width - w + 1)), h, w
        w = min(width, round(height * self.ratio[1]))
        h = min(height, round(width / self.ratio[0]))
        return (height - h) // 2, (width - w) // 2, h, w


class PaddedCropFlip:
    """MFF's pre-training augmentation, drawn from the sample's address: no random scale, no random shape.

    The shorter side is resized to fit, 4 px of reflection are padded all round, and a window of `size` is cut out at
    random; then a flip.
    """

    padding = 4

    def __init__(self, size, seed, interpolation="bilinear", reference=False):
        self.size, self.seed, self.interpolation = (size, size) if isinstance(size, int) else tuple(size), seed, interpolation
        self.reference = reference

    def __call__(self, img, epoch, index):
        """uint8 [3, H, W] (any strides) -> uint8 [3, *size], contiguous."""
        u_top, u_left, u_flip = addressed_uniform(AUGMENT, self.seed, epoch, [index], 3)[0].tolist()
        img = resize(img, covering_size(img.shape[-2:], self.size), self.interpolation, self.reference)
        (rows, columns), pad = self.size, self.padding
        height, width = img.shape[-2:]
        top, left = int(u_top * (height + 2 * pad - rows + 1)), int(u_left * (width + 2 * pad - columns + 1))
        # A window of the padded image, read through reflected indices: nothing is padded that is not kept.
        img = img[:, reflected(top - pad, rows, height)][:, :, reflected(left - pad, columns, width)]
        return (img.flip(-1) if u_flip < 0.5 else img).contiguous()


def reflected(first, count, length):
    """Indices first .. first + count - 1 of an axis that continues as its mirror image, the border itself not repeated."""
    indices = torch.arange(first, first + count).abs()
    return (length - 1) - (length - 1 - indices).abs()


class FinetuneAugment:
    """MAE's augmentation for fine-tuning: random resized crop and flip, then timm's RandAugment (or colour jitter).

    auto_augment: timm's policy string, as "rand-m9-mstd0.5-inc1"; color_jitter: its strength, used without a policy.
    Both may be None. timm draws from global generators, which are seeded by the sample's address around the call.
    ValueError for a policy that timm cannot build or cannot apply.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        seed: int,
        scale: tuple[float, float] = (0.08, 1.0),
        auto_augment: str | None = None,
        color_jitter: float | None = None,
        reference: bool = False,
    ) -> None:
        self.crop = RandomResizedCropFlip(size, seed, scale, reference=reference)
        options = dict(auto_augment=auto_augment, color_jitter=color_jitter, interpolation="bicubic")
        try:
            _, self.augment, _ = create_transform(self.crop.size, is_training=True, separate=True, **options)
            for op in augment_ops(self.augment):
                if op.aug_fn is timm_ops.posterize:
                    op.aug_fn = posterize
            self(torch.zeros(3, *self.crop.size, dtype=torch.uint8), 0, 0)  # some errors show only in use
        except (AssertionError, KeyError, ValueError, RuntimeError) as error:
            what = f"the augmentation policy {auto_augment!r}" if auto_augment else f"a colour jitter of {color_jitter}"
            raise ValueError(f"timm does not know {what} ({error})") from error

    def __call__(self, img: torch.Tensor, epoch: int, index: int) -> torch.Tensor:
        """uint8 [3, H, W] -> uint8 [3, *size]."""
        img = self.crop(img, epoch, index)
        if not self.augment.transforms:
            return img
        with seeded_libraries(addressed_seed(LIBRARY, self.crop.seed, epoch, index)):
            img = self.augment(Image.fromarray(img.permute(1, 2, 0).numpy()))
        return torch.from_numpy(np.array(img)).permute(2, 0, 1).contiguous()


def augment_ops(augment: Compose) -> Iterator[timm_ops.AugmentOp]:
    """All ops of timm's policies in `augment`: RandAugment and AugMix hold a list, AutoAugment a list of lists."""
    for transform in augment.transforms:
        yield from getattr(transform, "ops", chain(*getattr(transform, "policy", [])))


def posterize(img: Image.Image, bits_to_keep: int, **options: object) -> Image.Image:
    """timm's op, where 0 bits and fewer give black, as they did before Pillow 13, which refuses them."""
    if bits_to_keep <= 0:
        return Image.new(img.mode, img.size)
    return timm_ops.posterize(img, bits_to_keep, **options)


class ResizeCenterCrop:
    """The usual evaluation view: shorter side to int(size / crop_pct), bicubic, then the centre crop.

    crop_pct None: 224 / 256 up to 224 px, 1 above, as MAE evaluates. Sizes and offsets are torchvision's to the pixel.
    """

    def __init__(self, size, crop_pct=None, reference=False):
        self.size, self.reference = (size, size) if isinstance(size, int) else tuple(size), reference
        if crop_pct is None:
            crop_pct = 0.875 if max(self.size) <= 224 else 1.0
        if not 0 < crop_pct <= 1:
            raise ValueError(f"crop_pct must lie in (0, 1], got {crop_pct}")
        self.resized = tuple(int(side / crop_pct) for side in self.size)

    def __call__(self, img, epoch=0, index=0):
        """uint8 [3, H, W] -> uint8 [3, *size]."""
        img = resize(img, covering_size(img.shape[-2:], self.resized), reference=self.reference)
        top, left = (round((side - wanted) / 2) for side, wanted in zip(img.shape[-2:], self.size, strict=True))
        return img[:, top : top + self.size[0], left : left + self.size[1]].contiguous()


def covering_size(size, wanted):
    """The size (rows, columns) to which an image of `size` is scaled to just cover `wanted`, as torchvision rounds it."""
    (height, width), (rows, columns) = size, wanted
    if rows * width >= columns * height:  # the height is what is short
        return rows, rows * width // height
    return columns * height // width, columns


def resize(img, size, interpolation="bicubic", reference=False):
    """uint8 [3, H, W] -> uint8 [3, *size], antialiased: by torch's kernel on bytes, or, as the `reference`, by Pillow's."""
    if tuple(img.shape[-2:]) == tuple(size):
        return img
    if reference:
        img = Image.fromarray(img.permute(1, 2, 0).numpy()).resize(size[::-1], Image.Resampling[interpolation.upper()])
        return torch.from_numpy(np.array(img)).permute(2, 0, 1)
    return F.interpolate(img.unsqueeze(0), size=tuple(size), mode=interpolation, antialias=True).squeeze(0)


class Normalize(nn.Module):
    """uint8 [B, 3, H, W] -> float32 (x / 255 - mean) / std, on the device: bytes travel, floats do not."""

    def __init__(self, mean=IMAGENET_MEAN, std=IMAGENET_STD):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1) * 255)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1) * 255)

    def forward(self, imgs):
        return (imgs - self.mean) / self.std

    def undo(self, imgs):
        """Normalised float [B, 3, H, W] -> float in [0, 1], clipped."""
        return ((imgs * self.std + self.mean) / 255).clamp(0, 1)
