"""AMT (Liu et al., "Good helper is around you: Attention-driven Masked Image Modeling"), a peer of PR-MIM, on MAE.

One weighted permutation of the tokens decides everything. The tokens drawn first, those of high attention, are masked
and reconstructed. The next ones are thrown: neither encoder nor decoder sees them. The last ones are visible. The
weights are the attention maps of `attention_phases.py`. Before there are maps, masking is random and nothing is thrown.

In the notation of PR-MIM `mask_ratio` includes the thrown tokens: AMT's mask ratio .45 and throw ratio .40 are
mask_ratio .85 and throw_ratio .40 here. AMT does not supervise thrown tokens, which is `--no-progressive`.
With `--progressive` they get PR-MIM's aggregation, which nobody has published.
"""

from typing import Any

import numpy as np

from models_mae_pr import MaskedAutoencoderViT
from models_vit import BASE, MICRO, MINI
from prmim import TokenCounts, TokenOrderSampler
from util.peer_sampling import weighted_permutation

__all__ = ["AMTViT", "amt_vit_micro_patch4", "amt_vit_mini_patch4", "amt_vit_base_patch16"]

RANDOM_MASK_RATIO = 0.75  # before there are attention maps


def count_amt(num_tokens: int, mask_ratio: float, throw_ratio: float) -> TokenCounts:
    """Returns AMT's counts: int(N (mask_ratio - throw_ratio)) retained tokens and int(N mask_ratio) masked ones.

    For example, 196 tokens with ratios 0.85 and 0.4 give 30 visible, 88 retained and 78 thrown tokens. Raises
    ValueError unless 0 <= throw_ratio < mask_ratio < 1 and at least one token is retained.
    """
    TokenCounts.from_ratios(num_tokens, mask_ratio, throw_ratio)  # checks the ratios
    # A difference of decimals such as .85 - .4 may lie just below its exact value.
    num_retained, num_masked = (int(num_tokens * share + 1e-9) for share in (mask_ratio - throw_ratio, mask_ratio))
    return TokenCounts(num_tokens - num_masked, num_retained, num_masked - num_retained)


class AMTOrderSampler(TokenOrderSampler):
    """Draws one weighted permutation of the masked units: the first are retained, the next thrown, the last visible."""

    def __call__(
        self, noise: np.ndarray, visible: np.ndarray | None = None, weights: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns ids_shuffle [B, N] for noise [B, N]. weights: of the tokens [B, N], by default all the same.

        The weight of a unit is the mean of its tokens' weights. Its noise is that of its first token. `visible` is not
        used.
        """
        unit, (rows, columns) = self.mask_unit, self.grid_size
        cells = (len(noise), rows // unit, unit, columns // unit, unit)
        unit_noise = noise.reshape(cells)[:, :, 0, :, 0].reshape(len(noise), -1)  # [B, units]
        unit_weights = np.ones_like(unit_noise)
        if weights is not None:
            unit_weights = weights.reshape(cells).mean(axis=(2, 4)).reshape(len(noise), -1)
        order = weighted_permutation(unit_weights, unit_noise)
        num_retained, num_masked = (n // unit**2 for n in (self.counts.num_retained, self.counts.num_masked))
        state = np.zeros(order.shape, np.int8)  # 0 visible, 1 retained, 2 thrown
        np.put_along_axis(state, order[:, :num_retained], 1, axis=1)
        np.put_along_axis(state, order[:, num_retained:num_masked], 2, axis=1)
        state = state.reshape(-1, rows // unit, 1, columns // unit, 1)
        state = np.broadcast_to(state, cells).reshape(noise.shape)
        return state.argsort(axis=1, kind="stable")  # stable = raster-ascending inside each segment


class AMTViT(MaskedAutoencoderViT):
    """MAE with AMT's masking and throwing. It has MAE's parameters, and loads MAE's releases and AMT's.

    mask_ratio, throw_ratio: shares of all tokens that are masked and thrown. The former includes the latter.
    kwargs: arguments of `MaskedAutoencoderViT`. AMT itself has `progressive=False`.
    """

    masks_by_attention = True

    def __init__(self, mask_ratio: float = 0.85, throw_ratio: float = 0.4, **kwargs: Any) -> None:
        super().__init__(mask_ratio=mask_ratio, throw_ratio=throw_ratio, **kwargs)
        self.ratios = mask_ratio, throw_ratio
        self.set_attention_phase(True)

    def set_attention_phase(self, has_maps: bool) -> None:
        """Sets AMT's token counts, or those of random masking (.75, nothing thrown) before there are maps."""
        if has_maps:
            self.counts = count_amt(self.num_tokens, *self.ratios)
        else:
            self.counts = TokenCounts.from_ratios(self.num_tokens, RANDOM_MASK_RATIO, 0.0)
        self.decoder.counts = self.counts

    def sampler(self, sampling: str) -> TokenOrderSampler:
        """Returns AMT's sampler, whatever `sampling` is."""
        return AMTOrderSampler(self.grid_size, self.counts, "attention", self.mask_unit)


def amt_vit_micro_patch4(**kwargs: Any) -> AMTViT:
    decoder = dict(decoder_embed_dim=64, decoder_depth=4, decoder_num_heads=2)
    return AMTViT(**{**MICRO, **decoder, **kwargs})


def amt_vit_mini_patch4(**kwargs: Any) -> AMTViT:
    decoder = dict(decoder_embed_dim=128, decoder_depth=4, decoder_num_heads=4)
    return AMTViT(**{**MINI, **decoder, **kwargs})


def amt_vit_base_patch16(**kwargs: Any) -> AMTViT:
    return AMTViT(**{**BASE, **kwargs})
