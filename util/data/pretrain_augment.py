"""The augmentation of pre-training."""

import argparse
from collections.abc import Callable
from typing import Any

from util.data.transforms import RandomResizedCropFlip, Size, with_vflip


def make_augmentation(args: argparse.Namespace, img_size: Size) -> Callable:
    """Returns the random crop and flips of the images of a pre-training."""
    options: dict[str, Any] = {
        "interpolation": args.interpolation,
        "reference": args.loader == "reference",
        "hflip": args.hflip,
    }
    crop: Callable = RandomResizedCropFlip(img_size, args.seed, args.crop_scale, **options)
    if args.crop == "padded":
        from util.data.padded_crop import PaddedCropFlip

        crop = PaddedCropFlip(img_size, args.seed, **options)
    return with_vflip(crop, args.vflip, args.seed)
