"""Token orders of images with invalid pixels."""

import numpy as np
from torch import Tensor

from models_vit import patchify
from prmim import MaskCollator
from util.tokens import counted_tokens


class ValidTokenCollator(MaskCollator):
    """A `MaskCollator` for images with invalid pixels, which are NaN. The token order depends on which ones are.

    Of the masked tokens, those are thrown first that count in no loss, because most of their pixels are invalid.
    """

    def draw(self, noise: np.ndarray, imgs: Tensor) -> np.ndarray:
        shuffled = self.sampler.shuffle(noise, self.shared_tokens(noise))
        masked = shuffled[:, self.sampler.counts.num_visible :]
        is_counted = np.take_along_axis(self.find_counted(imgs), masked, axis=1)
        counted_first = (~is_counted).argsort(axis=1, kind="stable")
        masked = np.take_along_axis(masked, counted_first, axis=1)
        num_retained = self.sampler.counts.num_retained
        retained = masked[:, :num_retained].copy()  # of images with fewer tokens that count
        num_counted = is_counted.sum(axis=1)
        for number in np.unique(num_counted[num_counted > num_retained]):  # images with as many have one shape
            images = np.flatnonzero(num_counted == number)
            retained[images] = self.choose_retained(masked[images, :number], images)
        return self.sampler.sort(shuffled, retained)

    def find_counted(self, imgs: Tensor) -> np.ndarray:
        """Returns which tokens of images [B, C, H, W] count in losses, bool [B, N]."""
        if not imgs.is_floating_point():
            return np.ones((len(imgs), self.sampler.counts.num_tokens), bool)
        token_side = imgs.shape[2] // self.sampler.grid_size[0]
        valid = patchify(~imgs.isnan(), token_side)
        return counted_tokens(valid).numpy()

    def choose_retained(self, masked: np.ndarray, images: np.ndarray) -> np.ndarray:
        """Returns those of the masked tokens [b, n] of some images of the batch that are retained."""
        return self.sampler.choose_retained(masked)
