"""GreenMIM (Huang et al., NeurIPS 2022) with PR-MIM: MAE on Swin, whose encoder sees only the visible units.

Images are masked in units of 32 px, the cells of Swin's last stage. All images of a batch share one visible set, so
that its windows are grouped once. The decoder works on the grid of units. There PR-MIM throws units of each image
independently, as it does with MAE's tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from encoders import models_swin
from encoders.models_swin import SwinEncoder
from encoders.names import swap_merging
from framework import PixelFramework, weights_in
from frameworks.window_groups import WindowGrouper
from models_vit import init_weights
from prmim import MaskCollator, Method, ProgressiveDecoder, TokenOrder, TokenOrderSampler
from util.flag import Flag

__all__ = [
    "GreenMIMSwin",
    "greenmim_swin_micro_patch4_window4",
    "greenmim_swin_base_patch4_window7",
    "greenmim_swin_large_patch4_window14",
]

DECODER_ORDER = Flag(
    "decoder_order",
    help="where the decoder places the visible units. true: at their own positions; reference: as the release's code, "
    "which takes their raster order for the order of the mask's noise (default: true)",
    choices=("true", "reference"),
)


class NoiseOrderSampler(TokenOrderSampler):
    """A `TokenOrderSampler` whose visible tokens are in the order of the mask's noise."""

    def sort(self, shuffled: np.ndarray, retained: np.ndarray) -> np.ndarray:
        ids_shuffle = super().sort(shuffled, retained)
        num_visible = self.counts.num_visible
        ids_shuffle[:, :num_visible] = shuffled[:, :num_visible]
        return ids_shuffle


class GroupCollator:
    """Adds to the batches of `collate` the groups of windows of the visible units that all images of a batch share."""

    def __init__(self, collate: MaskCollator, grouper: WindowGrouper) -> None:
        self.collate = collate
        self.grouper = grouper

    def __call__(self, samples: Iterable[tuple]) -> tuple[Tensor, ...]:
        batch = self.collate(samples)
        ids_visible = batch[2][:, : self.collate.sampler.counts.num_visible]
        ids_visible[:] = ids_visible[:1].clone()  # the same units, now in the first image's order, too
        return (*batch, *self.grouper(ids_visible[0]))


class GreenMIMSwin(PixelFramework, SwinEncoder):
    """A Swin encoder on visible units that owns a progressive decoder.

    N is the number of units here, not of patches. decoder_order: "true" places the visible units where they belong.
    "reference" does as the release's code, which encodes them in raster order and then treats them as if they were in
    the order of the mask's noise. Each visible unit is then placed at a random one of the visible positions. That needs
    the batches of `collator`, since only they keep the order of the noise.

    img_size, ..., drop_path_rate: of the encoder, see `encoders.models_swin.SwinEncoder`. norm_pix_loss, ...,
        has_invalid: see `framework.Framework.use_method`. mask_ratio, ..., applies_to: see `prmim.Method`.
    """

    release = "GreenMIM"
    shared_visible = True
    flags = (DECODER_ORDER,)
    compiled_methods = ("embed_units", "forward_loss")

    def __init__(
        self,
        decoder_embed_dim: int = 512,
        decoder_depth: int = 1,
        decoder_num_heads: int = 16,
        decoder_order: str = "true",
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        embed_dim: int = 128,
        depths: Sequence[int] = (2, 2, 18, 2),
        num_heads: Sequence[int] = (4, 8, 16, 32),
        window_size: int = 7,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        norm_pix_loss: bool = False,
        mask_unit: int = 1,
        has_invalid: bool = False,
        mask_ratio: float = 0.75,
        throw_ratio: float = 0.5,
        progressive: bool = True,
        kernel_size: int = 7,
        aggregation: str = "dwconv",
        applies_to: str = "thrown",
    ) -> None:
        super().__init__(
            img_size, patch_size, in_chans, embed_dim, depths, num_heads, window_size, mlp_ratio, drop_path_rate
        )
        method = Method(mask_ratio, throw_ratio, progressive, kernel_size, aggregation, applies_to)
        self.use_method(method, norm_pix_loss, mask_unit, has_invalid)
        self.decoder_order = decoder_order
        for module in self.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-6  # only in pre-training: fine-tuning uses Swin's 1e-5
        init_weights(self)  # MAE's initialisation of everything except the bias tables
        num_visible = self.counts.num_visible
        self.grouper = WindowGrouper(self.unit_grid, num_visible, self.grouped_stages(num_visible))
        self.decoder = ProgressiveDecoder(
            self.grid_size,
            self.num_features,
            head=self.stride**2 * in_chans,
            make_aggregation=self.make_aggregation,
            decoder_embed_dim=decoder_embed_dim,
            decoder_depth=decoder_depth,
            decoder_num_heads=decoder_num_heads,
            mlp_ratio=mlp_ratio,
            num_prefix=0,
        )

    @property
    def grid_size(self) -> tuple[int, int]:  # type: ignore[override]
        """The (rows, columns) of the units, which are what is masked and thrown."""
        return self.unit_grid

    def sampler(self, sampling: str) -> TokenOrderSampler:
        kind = TokenOrderSampler
        if self.decoder_order == "reference":
            kind = NoiseOrderSampler
        return kind(self.grid_size, self.counts, sampling, self.mask_unit)

    def collator(self, sampling: str, seed: int) -> GroupCollator:  # type: ignore[override]
        return GroupCollator(super().collator(sampling, seed), self.grouper)

    def forward(
        self,
        imgs: Tensor,
        ids_shuffle: Tensor,
        *groupings: Tensor,
    ) -> dict[str, Tensor]:
        """Returns the scalar loss {"pixel"}.

        groupings: of the windows of the batch's visible set, made by `collator`. Without them each stage has one group
        of all visible tokens: the result is the same, but it takes longer.
        """
        order = TokenOrder(ids_shuffle, self.counts)
        units = self.token_pixels(imgs)  # [B, N, 32 * 32 * C]
        latent = self.forward_encoder(units, order, groupings)  # [B, num_visible, 8 D]
        pred = self.forward_decoder(latent, order)  # [B, num_supervised, 32 * 32 * C]
        return {"pixel": self.forward_loss(pred, imgs, units, order)}

    def forward_encoder(
        self,
        units: Tensor,
        order: TokenOrder,
        groupings: Sequence[Tensor] = (),
    ) -> Tensor:
        """Returns the latent of the visible units [B, num_visible, 8 D].

        units: all of them, [B, N, 32 * 32 * C]. Raises ValueError, on the CPU, if the images of the batch do not share
        their visible units.
        """
        check_shared(order.ids_visible)
        ids = order.ids_visible
        if self.decoder_order == "reference":  # the reference encodes in raster order, not in the order of the noise
            ids = ids.sort(dim=1).values
        tokens = self.embed_units(units, ids)
        return self.encode_visible(tokens, ids[0], groupings)

    def embed_units(self, units: Tensor, ids: Tensor) -> Tensor:
        """Embeds those of all units [B, N, 32 * 32 * C] that are at `ids` [B, V]. Returns [B, V, 8, 8, D]."""
        p = self.patch_size
        side = self.stride // p
        visible = TokenOrder.take(units, ids)  # [B, V, 32 * 32 * C]
        pixels = visible.unflatten(2, (side, p, side, p, -1))  # [B, V, 8, 4, 8, 4, C]
        patches = pixels.transpose(3, 4).flatten(4)  # [B, V, 8, 8, 4 * 4 * C]
        return self.patch_embed(patches)

    def forward_decoder(self, latent: Tensor, order: TokenOrder, all_tokens: bool = False) -> Tensor:
        return self.decoder(latent, order, all_tokens)

    def no_weight_decay(self) -> set[str]:
        names = [name for name, _ in self.named_parameters()]
        return {name for name in names if "position_bias" in name or "token" in name}

    def official_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns GreenMIM's weights under the names here, without buffers that the model computes."""
        renamed: dict[str, Tensor] = {}
        for name, value in weights.items():
            if name.startswith("decoder_") or name == "mask_token":
                renamed["decoder." + name.removeprefix("decoder_")] = value
            elif not name.endswith(("relative_position_index", "attn_mask")):
                renamed[name.removeprefix("encoder.")] = value
        return renamed

    def load_official(self, state_dict: Mapping[str, Any], first_release: bool = False) -> None:
        """Loads a release of GreenMIM from before fine-tuning, see `Framework.load_official`.

        first_release: re-index the patch merging from the order 00, 01, 10, 11 of the public files to Swin's 00, 10,
        01, 11.
        """
        weights = weights_in(state_dict)
        if first_release:
            weights = swap_merging(weights)
        super().load_official(weights)


def check_shared(ids_visible: Tensor) -> None:
    """Raises ValueError, on the CPU, if images do not share their visible units [B, V]."""
    if ids_visible.device.type == "cpu" and not (ids_visible == ids_visible[:1]).all():
        raise ValueError(
            "all images of a batch must share their visible tokens: use MaskCollator with shared_visible=True"
        )


greenmim_swin_micro_patch4_window4 = partial(
    GreenMIMSwin, **models_swin.MICRO, decoder_embed_dim=64, decoder_num_heads=2
)
greenmim_swin_base_patch4_window7 = partial(GreenMIMSwin, **(models_swin.BASE | {"window_size": 7}))
greenmim_swin_large_patch4_window14 = partial(GreenMIMSwin, **(models_swin.LARGE | {"window_size": 14}))
