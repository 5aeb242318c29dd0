"""AMT (Liu et al., "Good helper is around you: Attention-driven Masked Image Modeling"), a peer of PR-MIM.

It is built on MAE and on SimMIM.

One weighted permutation of the tokens decides everything. The tokens drawn first, those of high attention, are masked
and reconstructed. The next ones are thrown: neither encoder nor decoder sees them. The last ones are visible. The
weights are the attention maps of `frameworks/hooks/attention_phases.py`. Before there are maps, masking is random and
nothing is thrown.

In the notation of PR-MIM `mask_ratio` includes the thrown tokens: AMT's mask ratio .45 and throw ratio .40 are
mask_ratio .85 and throw_ratio .40 here. AMT does not supervise thrown tokens, which is `--no-progressive`.
With `--progressive` they get PR-MIM's aggregation, which nobody has published.
"""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from encoders.models_absolute_vit import AbsoluteViTEncoder
from framework import Framework
from frameworks.models_simmim_pr import SimMIMOnViT, rename_release
from models_mae_pr import MaskedAutoencoderViT
from models_vit import BASE, MICRO, MINI, Sizes
from prmim import (
    MaskCollator,
    TokenCounts,
    TokenOrder,
    TokenOrderSampler,
    sort_by_state,
)
from util.peer_sampling import weighted_permutation
from util.tokens import RETAINED, THROWN, VISIBLE

__all__ = [
    "AMTViT",
    "AMTSimMIMViT",
    "amt_vit_micro_patch4",
    "amt_vit_mini_patch4",
    "amt_vit_base_patch16",
    "amt_simmim_vit_micro_patch4",
    "amt_simmim_vit_mini_patch4",
    "amt_simmim_vit_base_patch16",
]

RANDOM_MASK_RATIO = 0.75  # before there are attention maps


def count_amt(num_tokens: int, mask_ratio: float, throw_ratio: float) -> TokenCounts:
    """Returns AMT's counts: int(N (mask_ratio - throw_ratio)) retained tokens and int(N mask_ratio) masked ones.

    For example, 196 tokens with ratios 0.85 and 0.4 give 30 visible, 88 retained and 78 thrown tokens.
    """
    TokenCounts.from_ratios(num_tokens, mask_ratio, throw_ratio)  # checks the ratios
    rounding = 1e-9  # a difference of decimals such as .85 - .4 may lie just below its exact value
    num_retained = int(num_tokens * (mask_ratio - throw_ratio) + rounding)
    num_masked = int(num_tokens * mask_ratio + rounding)
    return TokenCounts(num_tokens - num_masked, num_retained, num_masked - num_retained)


def count_amt_units(
    num_tokens: int,
    mask_ratio: float,
    throw_ratio: float,
    mask_unit: int,
) -> TokenCounts:
    """Returns AMT's counts if whole units of mask_unit * mask_unit tokens are masked and thrown, both rounded up.

    For example, 49 units with ratios 0.7 and 0.26 give 14 visible, 22 retained and 13 thrown units.
    """
    TokenCounts.from_ratios(num_tokens, mask_ratio, throw_ratio)  # checks the ratios
    size = mask_unit**2  # of a unit
    num_units = num_tokens // size
    rounding = 1e-9
    num_retained = math.ceil(num_units * (mask_ratio - throw_ratio) - rounding)
    num_thrown = math.ceil(num_units * throw_ratio - rounding)
    num_visible = num_units - num_retained - num_thrown
    return TokenCounts(num_visible * size, num_retained * size, num_thrown * size)


class AMTOrderSampler(TokenOrderSampler):
    """Draws one weighted permutation of the masked units: the first are retained, the next thrown, the last visible."""

    def __call__(
        self,
        noise: np.ndarray,
        visible: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns ids_shuffle [B, N] for noise [B, N]. weights: of the tokens [B, N], by default all the same.

        The weight of a unit is the mean of its tokens' weights. Its noise is that of its first token. `visible` is not
        used: attention alone decides.
        """
        noise_of_first = self.split_units(noise)[:, :, 0, :, 0]
        unit_noise = noise_of_first.reshape(len(noise), -1)  # [B, units]
        unit_weights = np.ones_like(unit_noise)
        if weights is not None:
            unit_weights = self.split_units(weights).mean(axis=(2, 4))
            unit_weights = unit_weights.reshape(len(noise), -1)
        order = weighted_permutation(unit_weights, unit_noise)
        size = self.mask_unit**2
        num_retained = self.counts.num_retained // size
        num_masked = self.counts.num_masked // size
        state = np.full(order.shape, VISIBLE, np.int8)
        np.put_along_axis(state, order[:, :num_retained], RETAINED, axis=1)
        np.put_along_axis(state, order[:, num_retained:num_masked], THROWN, axis=1)
        return sort_by_state(self.spread_units(state))


class AMTMasking(Framework):
    """Draws tokens by AMT's sampler, whatever `sampling` is. Before there are attention maps it has other counts."""

    needs_attention = True
    has_maps = True

    def set_phase(self, has_maps: bool) -> None:
        """Sets the token counts of epochs that draw tokens with attention maps, or without them."""
        self.has_maps = has_maps
        self.counts = self.count_tokens()

    def sampler(self, sampling: str) -> TokenOrderSampler:
        return AMTOrderSampler(self.grid_size, self.counts, "attention", self.mask_unit)

    def collator(self, sampling: str, seed: int) -> MaskCollator:
        return MaskCollator(self.sampler(sampling), seed)  # invalid pixels have no say


class AMTViT(AMTMasking, MaskedAutoencoderViT):
    """MAE with AMT's masking and throwing. It has MAE's parameters, and loads MAE's releases and AMT's.

    `mask_ratio` includes `throw_ratio`. AMT itself has `progressive=False`, and the ratios of the factories below.
    """

    flags = ()

    def count_tokens(self) -> TokenCounts:
        """Returns AMT's token counts, or those of random masking (.75, nothing thrown) before there are maps."""
        if self.has_maps:
            return count_amt(self.num_tokens, self.method.mask_ratio, self.method.throw_ratio)
        return TokenCounts.from_ratios(self.num_tokens, RANDOM_MASK_RATIO, 0.0)


class AMTSimMIMViT(AMTMasking, SimMIMOnViT, AbsoluteViTEncoder):
    """SimMIM with AMT's masking and throwing of units. The encoder also runs on mask tokens. L1 loss, linear head.

    `mask_ratio` includes `throw_ratio`. The aggregation follows the last block. AMT itself has `progressive=False`, and
    the ratios of the factories below.
    """

    release = "AMT"

    def count_tokens(self) -> TokenCounts:
        """Returns AMT's token counts. Before there are maps, as many units are masked at random and none is thrown."""
        mask_ratio = self.method.mask_ratio
        throw_ratio = self.method.throw_ratio
        if not self.has_maps:
            mask_ratio = mask_ratio - throw_ratio
            throw_ratio = 0.0
        return count_amt_units(self.num_tokens, mask_ratio, throw_ratio, self.mask_unit)

    def encode_kept(self, tokens: Tensor, order: TokenOrder) -> Tensor:
        """Adds the positions and runs the encoder."""
        return self.encode(tokens + order.take_kept(self.patch_positions))

    def official_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights of AMT's public code on SimMIM under the names here.

        That code has a layer scale for attention, `gamma_1`, but does not use it. So it becomes 1 here.
        """
        renamed = rename_release(weights, self.patch_size)
        for name, value in renamed.items():
            if name.endswith(".gamma_1"):
                renamed[name] = torch.ones_like(value)
        return renamed


ON_MAE: Sizes = dict(mask_ratio=0.85, throw_ratio=0.4)
ON_SIMMIM: Sizes = dict(mask_ratio=0.7, throw_ratio=0.26)

amt_vit_micro_patch4 = partial(AMTViT, **MICRO, **ON_MAE, decoder_embed_dim=64, decoder_depth=4, decoder_num_heads=2)
amt_vit_mini_patch4 = partial(AMTViT, **MINI, **ON_MAE, decoder_embed_dim=128, decoder_depth=4, decoder_num_heads=4)
amt_vit_base_patch16 = partial(AMTViT, **BASE, **ON_MAE)
amt_simmim_vit_micro_patch4 = partial(AMTSimMIMViT, **MICRO, **ON_SIMMIM)
amt_simmim_vit_mini_patch4 = partial(AMTSimMIMViT, **MINI, **ON_SIMMIM)
amt_simmim_vit_base_patch16 = partial(AMTSimMIMViT, **BASE, **ON_SIMMIM, drop_path_rate=0.1, mask_unit=None)
