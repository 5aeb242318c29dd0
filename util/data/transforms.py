"""From a decoded image to a normalised batch: workers crop images, the device normalises them.

Images are uint8, uint16 or float32, with any number of channels, and keep their type up to the device.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from util.addressed import AUGMENT, VFLIP, addressed_numbers
from util.data.pixel_format import RGB8, PixelFormat
from util.pos_embed import height_and_width
from util.tokens import fill_invalid

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
TRIES = 10  # of a crop

Size = tuple[int, int]  # (height, width)
Sides = int | Sequence[int]  # one number, or (height, width)


def mirror(img: Tensor, axis: int = -1) -> Tensor:
    """Reverses the columns, or another axis, of [C, H, W]. torch 2.11 does not flip uint16: those as int16."""
    if img.dtype == torch.uint16:
        return img.view(torch.int16).flip(axis).view(torch.uint16)
    return img.flip(axis)


class RandomResizedCropFlip:
    """MAE's pre-training augmentation: random resized crop and flip, drawn from the sample's address.

    The box follows torchvision's RandomResizedCrop: up to 10 tries of an area in `scale` and a log-uniform aspect ratio
    in `ratio`, then the largest central crop. The resize is torch's antialiased kernel. On uint8 it differs from PIL's
    by 0.05/255 on average and is three times as fast.

    clip: try once, and clip the sides to the image, as MAE does for linear probing. interpolation: "bicubic" or
    "bilinear". reference: resize by PIL. hflip: mirror half of the images.
    """

    def __init__(
        self,
        size: Sides,
        seed: int,
        scale: Sequence[float] = (0.2, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        clip: bool = False,
        interpolation: str = "bicubic",
        reference: bool = False,
        hflip: bool = True,
    ) -> None:
        self.size = height_and_width(size)
        self.seed = seed
        self.scale = tuple(scale)
        self.ratio = tuple(ratio)
        self.clip = clip
        self.interpolation = interpolation
        self.reference = reference
        self.hflip = hflip

    def __call__(self, img: Tensor, epoch: int, index: int) -> Tensor:
        """Crops [C, H, W] (any strides). Returns [C, *size] of the same type, contiguous."""
        top, left, height, width, flip = self.draw(height_and_width(img.shape[-2:]), epoch, index)
        crop = img[:, top : top + height, left : left + width]
        crop = resize(crop, self.size, self.interpolation, self.reference)
        if flip:
            crop = mirror(crop)
        return crop.contiguous()

    def draw(self, size: Size, epoch: int, index: int) -> tuple[int, int, int, int, bool]:
        """Returns (top, left, height, width, flip) of the crop of an image of `size`, in pixels."""
        height, width = size
        draws = addressed_numbers(AUGMENT, self.seed, epoch, index, 2 * TRIES + 3)
        box = self.box(height, width, draws)
        flip = self.hflip and draws[-1] < 0.5
        return *box, flip

    def box(self, height: int, width: int, draws: Sequence[float]) -> tuple[int, int, int, int]:
        """Returns (top, left, height, width) of the crop of an image. draws: 2 * TRIES + 3 numbers in [0, 1)."""
        min_scale, max_scale = self.scale
        min_ratio, max_ratio = self.ratio
        log_min_ratio = math.log(min_ratio)
        log_max_ratio = math.log(max_ratio)
        for attempt in range(TRIES):
            scale = min_scale + draws[2 * attempt] * (max_scale - min_scale)
            log_ratio = log_min_ratio + draws[2 * attempt + 1] * (log_max_ratio - log_min_ratio)
            area = height * width * scale
            ratio = math.exp(log_ratio)
            crop_width = round(math.sqrt(area * ratio))
            crop_height = round(math.sqrt(area / ratio))
            if self.clip:
                crop_width = min(max(crop_width, 1), width)
                crop_height = min(max(crop_height, 1), height)
            if 0 < crop_width <= width and 0 < crop_height <= height:
                top = int(draws[-3] * (height - crop_height + 1))
                left = int(draws[-2] * (width - crop_width + 1))
                return top, left, crop_height, crop_width
        crop_width = min(width, round(height * max_ratio))
        crop_height = min(height, round(width / min_ratio))
        top = (height - crop_height) // 2
        left = (width - crop_width) // 2
        return top, left, crop_height, crop_width


def to_picture(img: Tensor) -> Image.Image:
    """Returns uint8 [3, H, W] as an image of Pillow."""
    return Image.fromarray(img.permute(1, 2, 0).numpy())


def to_tensor(array: np.ndarray) -> Tensor:
    """Returns [H, W, C] as [C, H, W], without a copy."""
    return torch.from_numpy(array).permute(2, 0, 1)


def default_crop_pct(size: Sequence[int]) -> float:
    """Returns the share of an image's side that MAE's evaluation sees at this size: 224 / 256 up to 224 px, else 1."""
    return 0.875 if max(size) <= 224 else 1.0


class RandomVerticalFlip:
    """Turns half of the results of `transform` upside down, drawn from the sample's address."""

    def __init__(self, transform: Callable[[Tensor, int, int], Tensor], seed: int) -> None:
        self.transform = transform
        self.seed = seed

    def __call__(self, img: Tensor, epoch: int, index: int) -> Tensor:
        """Transforms [C, H, W]. Returns [C, h, w] of the same type, contiguous."""
        img = self.transform(img, epoch, index)
        if addressed_numbers(VFLIP, self.seed, epoch, index, 1)[0] < 0.5:
            img = mirror(img, axis=-2).contiguous()
        return img


def with_vflip(transform: Callable, vflip: bool, seed: int) -> Callable:
    """Returns the transform, with vertical flips if `vflip` is true."""
    if vflip:
        return RandomVerticalFlip(transform, seed)
    return transform


class ResizeCenterCrop:
    """The usual evaluation view: resizes the shorter side to int(size / crop_pct), bicubic, then crops the centre.

    crop_pct: None means 224 / 256 up to 224 px and 1 above, as in MAE. Sizes and offsets are torchvision's.
    """

    def __init__(self, size: Sides, crop_pct: float | None = None, reference: bool = False) -> None:
        self.size = height_and_width(size)
        self.reference = reference
        if crop_pct is None:
            crop_pct = default_crop_pct(self.size)
        if not 0 < crop_pct <= 1:
            raise ValueError(f"crop_pct must lie in (0, 1], got {crop_pct}")
        height, width = self.size
        self.resized = (int(height / crop_pct), int(width / crop_pct))

    def __call__(self, img: Tensor, epoch: int = 0, index: int = 0) -> Tensor:
        """Crops [C, H, W]. Returns [C, *size] of the same type."""
        height, width = covering_size(height_and_width(img.shape[-2:]), self.resized)
        img = resize(img, (height, width), reference=self.reference)
        crop_height, crop_width = self.size
        top = round((height - crop_height) / 2)
        left = round((width - crop_width) / 2)
        crop = img[:, top : top + crop_height, left : left + crop_width]
        return crop.contiguous()


def covering_size(size: Size, wanted: Size) -> Size:
    """Returns the size to which an image of `size` is scaled to just cover `wanted`, rounded as by torchvision."""
    height, width = size
    rows, columns = wanted
    if rows * width >= columns * height:  # the height limits the scale
        return rows, rows * width // height
    return columns * height // width, columns


def resize(img: Tensor, size: Size, interpolation: str = "bicubic", reference: bool = False) -> Tensor:
    """Resizes [C, H, W] to [C, *size], antialiased, by torch's kernels. reference: by Pillow.

    uint8 has a kernel of its own. uint16 is resized as float32, rounded, and clipped to its range.
    """
    if tuple(img.shape[-2:]) == size:
        return img
    if img.dtype == torch.uint16:
        resized = resize(img.float(), size, interpolation, reference)
        return resized.round().clamp(0, 65535).to(torch.uint16)
    if reference:
        return pillow_resize(img, size, interpolation)
    resized = F.interpolate(img.unsqueeze(0), size, mode=interpolation, antialias=True)
    return resized.squeeze(0)


def pillow_resize(img: Tensor, size: Size, interpolation: str) -> Tensor:
    """Resizes uint8 or float32 [C, H, W] to [C, *size] by Pillow, which knows RGB and single channels."""
    height, width = size
    resample = Image.Resampling[interpolation.upper()]

    def resize_picture(picture: Image.Image) -> np.ndarray:
        return np.array(picture.resize((width, height), resample))

    if img.dtype == torch.uint8 and len(img) == 3:
        return to_tensor(resize_picture(to_picture(img)))
    channels = []
    for channel in img:
        channels.append(resize_picture(Image.fromarray(channel.numpy())))
    return to_tensor(np.stack(channels, axis=-1))


class Normalize(nn.Module):
    """Normalises [B, C, H, W] to float32 (x - mean) / std, on the device: images are transferred as they are stored.

    mean, std: of each channel. Those of integers are fractions of their full range. pixels: the images' format. Invalid
    pixels become 0, the mean.
    """

    def __init__(
        self,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        pixels: PixelFormat = RGB8,
    ) -> None:
        super().__init__()
        self.pixels = pixels
        full_range = pixels.full_range
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1) * full_range)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1) * full_range)

    def forward(self, imgs: Tensor, fill: bool = True) -> Tensor:
        """fill: False leaves invalid pixels NaN, for models that must know which they are."""
        if imgs.dtype == torch.uint16:  # which torch does not promote
            imgs = imgs.float()
        imgs = (imgs - self.mean) / self.std
        if self.pixels.has_invalid and fill:
            return fill_invalid(imgs)
        return imgs

    def undo(self, imgs: Tensor) -> Tensor:
        """Inverts the normalisation of float [B, C, H, W] for pictures. Returns float in [0, 1], clipped.

        uint8 is divided by 255. For other types 0 and 1 are the mean -+ 2 standard deviations.
        """
        if self.pixels.dtype == "uint8":
            shown = (imgs * self.std + self.mean) / 255
        else:
            shown = (imgs + 2) / 4
        return shown.clamp(0, 1)
