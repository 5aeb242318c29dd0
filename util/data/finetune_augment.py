"""MAE's augmentation of single images for fine-tuning: a random crop, then timm's policies."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from util.addressed import LIBRARY, addressed_seed, seeded_libraries
from util.data.transforms import RandomResizedCropFlip, Sides, to_picture, to_tensor


class FinetuneAugment:
    """MAE's augmentation for fine-tuning: random resized crop and flip, then timm's RandAugment or colour jitter.

    auto_augment: timm's policy, such as "rand-m9-mstd0.5-inc1", or None. color_jitter: strength, used without a policy,
    or None. timm draws from global generators, which are seeded by the sample's address around the call. ValueError
    for a policy that timm cannot build or apply.
    """

    def __init__(
        self,
        size: Sides,
        seed: int,
        scale: Sequence[float] = (0.08, 1.0),
        auto_augment: str | None = None,
        color_jitter: float | None = None,
        reference: bool = False,
        hflip: bool = True,
    ) -> None:
        from timm.data import auto_augment as timm_ops
        from timm.data import create_transform

        self.crop = RandomResizedCropFlip(size, seed, scale, reference=reference, hflip=hflip)
        try:
            _, self.augment, _ = create_transform(
                self.crop.size,
                is_training=True,
                separate=True,
                auto_augment=auto_augment,
                color_jitter=color_jitter,
                interpolation="bicubic",
            )
            for op in augment_ops(self.augment):
                if op.aug_fn is timm_ops.posterize:
                    op.aug_fn = posterize
            self(torch.zeros(3, *self.crop.size, dtype=torch.uint8), 0, 0)  # some errors occur only in use
        except (AssertionError, KeyError, ValueError, RuntimeError) as error:
            unknown = f"a colour jitter of {color_jitter}"
            if auto_augment:
                unknown = f"the augmentation policy {auto_augment!r}"
            raise ValueError(f"timm does not know {unknown} ({error})") from error

    def __call__(self, img: Tensor, epoch: int, index: int) -> Tensor:
        """Augments uint8 [3, H, W]. Returns uint8 [3, *size]."""
        img = self.crop(img, epoch, index)
        if not self.augment.transforms:
            return img
        seed = addressed_seed(LIBRARY, self.crop.seed, epoch, index)
        with seeded_libraries(seed):
            picture = self.augment(to_picture(img))
        return to_tensor(np.array(picture)).contiguous()


def augment_ops(augment: Any) -> Iterator[Any]:
    """Yields the ops of timm's policies. RandAugment and AugMix hold a list of ops, AutoAugment a list of lists."""
    for transform in augment.transforms:
        yield from getattr(transform, "ops", [])
        for ops in getattr(transform, "policy", []):
            yield from ops


def posterize(img: Image.Image, bits_to_keep: int, **options: object) -> Image.Image:
    """Like timm's op, but 0 bits and fewer return black. Pillow 13 refuses them; earlier versions returned black."""
    if bits_to_keep <= 0:
        return Image.new(img.mode, img.size)
    from timm.data import auto_augment as timm_ops

    return timm_ops.posterize(img, bits_to_keep, **options)
