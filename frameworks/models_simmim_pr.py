"""SimMIM (Xie et al., CVPR 2022) on ViT with PR-MIM, and on Swin without it.

The encoder runs on visible and masked tokens. A linear head predicts the pixels of the masked tokens, with an L1 loss.
Images are masked in units of 32 px, and tokens are thrown one by one.

On ViT, thrown tokens are dropped before the first block, together with their rows and columns of the relative-position
bias. The aggregation after the last block reconstructs them. On Swin no token can be thrown, because its windows need
whole grids. SimMIM on Swin is the release's baseline, and GreenMIM is the Swin with PR-MIM.
"""

import math
from functools import partial

import torch
from torch import nn
from typing_extensions import Unpack

from encoders import models_swin
from encoders.models_relative_vit import RelativeViTEncoder
from encoders.models_swin import SwinEncoder
from encoders.names import from_simmim
from framework import PixelFramework, SwinArguments, ViTArguments
from models_vit import BASE, MICRO, MINI, patchify, unpatchify
from prmim import TokenCounts, TokenOrder

__all__ = [
    "SimMIMViT",
    "SimMIMSwin",
    "simmim_vit_micro_patch4",
    "simmim_vit_mini_patch4",
    "simmim_vit_base_patch16",
    "simmim_swin_micro_patch4_window4",
    "simmim_swin_base_patch4_window6",
    "simmim_swin_large_patch4_window12",
]


class RelativeArguments(ViTArguments, total=False):
    """The arguments of SimMIM on a ViT."""

    init_values: float
    shared_bias: bool


class SimMIMOnViT(PixelFramework):
    """What SimMIM has on any ViT: mask tokens that run through the encoder, a linear head, an L1 loss."""

    def add_head(self) -> None:
        """Adds mask token, head and aggregation. A subclass calls it last."""
        self.mask_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02, a=-0.02, b=0.02)
        self.pred = nn.Linear(self.embed_dim, self.patch_size**2 * self.in_chans)
        self.aggregation = self.make_aggregation(self.embed_dim)

    def encode_kept(self, tokens: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Runs the encoder on the kept tokens [B, num_kept, D]. Returns [B, 1 + num_kept, D], class token first."""
        raise NotImplementedError

    def forward(self, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns {"pixel": scalar loss} of normalised images [B, C, H, W] with ids_shuffle int64 [B, N]."""
        order = TokenOrder(ids_shuffle, self.counts)
        patches = self.patchify(imgs)  # [B, N, p*p*C]
        x = self.forward_encoder(patches, order)[:, self.counts.num_visible :]
        pred = self.pred(self.norm(x))  # [B, num_supervised, p*p*C]
        return {"pixel": self.error(pred, imgs, order).abs().mean()}

    def forward_encoder(self, patches: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Encodes the kept tokens and reconstructs the thrown ones, from all patches [B, N, p*p*C].

        Returns [B, N, D] in token order. Plain partial reconstruction returns the kept tokens [B, num_kept, D].
        """
        visible = self.patch_embed(order.take_visible(patches))
        tokens = order.append_mask_tokens(visible, self.mask_token)  # [B, num_kept, D]
        x = self.encode_kept(tokens, order)[:, 1:]
        return x if self.aggregation is None else self.aggregation(x, order, self.grid_size)

    def predict_all(self, imgs: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        return self.pred(self.norm(self.forward_encoder(self.patchify(imgs), order)))


class SimMIMViT(SimMIMOnViT, RelativeViTEncoder):
    """A ViT with a shared relative-position bias, whose encoder also runs on mask tokens, and a linear head.

    The number of masked units is rounded up, as in the release: 30 of 49 at mask_ratio 0.6.
    kwargs: the method, see `framework.Framework`, and the arguments of `RelativeViTEncoder`.
    """

    release = "SimMIM"

    def __init__(self, **kwargs: Unpack[RelativeArguments]) -> None:
        arguments: RelativeArguments = {"mask_ratio": 0.6, "throw_ratio": 0.3, "mask_unit": 2, **kwargs}
        super().__init__(**arguments)
        self.add_head()

    def count_tokens(self, has_maps: bool = True) -> TokenCounts:
        return self.counts_of(self.num_units - math.ceil(self.num_units * self.mask_ratio))

    def encode_kept(self, tokens: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Thrown tokens have no row and no column in the bias."""
        return self.encode(tokens, order.ids_kept)

    def no_weight_decay(self) -> set[str]:
        return {"cls_token"}  # as in the release: the mask token and the bias table decay

    def official_names(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return rename_release(weights, self.patch_size)


class SimMIMSwin(PixelFramework, SwinEncoder):
    """A dense Swin that also runs on mask tokens, with a linear head on the last stage. Its cells are the masked units.

    The number of masked units is rounded up. No token can be thrown, so `throw_ratio` is 0 by default.
    kwargs: the method, see `framework.Framework`, and the arguments of `encoders.models_swin.SwinEncoder`.
    """

    release = "SimMIM"
    throws = False  # its windows need whole grids

    def __init__(self, **kwargs: Unpack[SwinArguments]) -> None:
        arguments: SwinArguments = {"mask_ratio": 0.6, "throw_ratio": 0.0, **kwargs}
        super().__init__(**arguments)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        self.pred = nn.Linear(self.num_features, self.stride**2 * self.in_chans)

    def count_tokens(self, has_maps: bool = True) -> TokenCounts:
        self.mask_unit = self.stride // self.patch_size
        return self.counts_of(self.num_units - math.ceil(self.num_units * self.mask_ratio))

    def forward(self, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns {"pixel": scalar loss} of normalised images [B, C, H, W] with ids_shuffle int64 [B, N]."""
        order = TokenOrder(ids_shuffle, self.counts)
        pred = self.predict_all(imgs, order)[:, self.counts.num_visible :]
        return {"pixel": self.error(pred, imgs, order).abs().mean()}

    def predict_all(self, imgs: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        tokens = order.append_mask_tokens(self.patch_embed(order.take_visible(self.patchify(imgs))), self.mask_token)
        cells = self.pred(self.encode(order.restore(tokens)))  # [B, cells, stride * stride * C]
        patches = patchify(unpatchify(cells, self.stride, self.unit_grid), self.patch_size)  # [B, N, p*p*C], raster
        return order.take(patches, order.ids_shuffle)

    def no_weight_decay(self) -> set[str]:
        return {"mask_token"}  # as in the release: bias tables decay

    def official_names(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return rename_release(weights, self.stride)


def rename_release(weights: dict[str, torch.Tensor], stride: int) -> dict[str, torch.Tensor]:
    """Returns the weights of SimMIM's release under the names here, with the head re-indexed.

    The release's head is a 1x1 convolution with channels (colour, row, column). The linear head here has outputs (row,
    column, colour). Keys that a release does not have stay as they are. stride: side, in pixels, of the square that one
    output of the head covers.
    """
    renamed = from_simmim(weights)
    for kind in ("weight", "bias"):
        if f"decoder.0.{kind}" in weights:
            value = weights.pop(f"decoder.0.{kind}")
            if kind == "weight":
                value = value.flatten(1)
            value = value.unflatten(0, (-1, stride, stride))
            renamed[f"pred.{kind}"] = value.movedim(0, 2).flatten(0, 2)
    return {name: value for name, value in weights.items() if not name.startswith("encoder.")} | renamed


simmim_vit_micro_patch4 = partial(SimMIMViT, **MICRO)
simmim_vit_mini_patch4 = partial(SimMIMViT, **MINI)
simmim_vit_base_patch16 = partial(SimMIMViT, **(BASE | {"drop_path_rate": 0.1}))
simmim_swin_micro_patch4_window4 = partial(SimMIMSwin, **models_swin.MICRO)
simmim_swin_base_patch4_window6 = partial(SimMIMSwin, **(models_swin.BASE | {"img_size": 192, "window_size": 6}))
simmim_swin_large_patch4_window12 = partial(SimMIMSwin, **(models_swin.LARGE | {"img_size": 192, "window_size": 12}))
