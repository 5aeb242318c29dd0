"""SimMIM (Xie et al., CVPR 2022) on ViT with PR-MIM, and on Swin without it.

The encoder runs on visible and masked tokens. A linear head predicts the pixels of the masked tokens, with an L1 loss.
Images are masked in units of 32 px, and tokens are thrown one by one.

On ViT, thrown tokens are dropped before the first block, together with their rows and columns of the relative-position
bias. The aggregation after the last block reconstructs them. On Swin no token can be thrown, because its windows need
whole grids. SimMIM on Swin is the release's baseline, and GreenMIM is the Swin with PR-MIM.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from encoders import models_swin
from encoders.models_relative_vit import RelativeViTEncoder
from encoders.models_swin import SwinEncoder
from encoders.names import from_simmim
from framework import PixelFramework
from models_vit import BASE, MICRO, MINI, patchify, unpatchify
from prmim import Method, TokenOrder

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


class SimMIM(PixelFramework):
    """How SimMIM counts, and its L1 loss. The number of masked units is rounded up: 30 of 49 at mask_ratio 0.6."""

    release = "SimMIM"

    def count_visible_units(self, num_units: int) -> int:
        num_masked = math.ceil(num_units * self.method.mask_ratio)
        return num_units - num_masked

    def forward(self, imgs: Tensor, ids_shuffle: Tensor) -> dict[str, Tensor]:
        """Returns {"pixel": scalar loss} of normalised images [B, C, H, W] with ids_shuffle int64 [B, N]."""
        order = TokenOrder(ids_shuffle, self.counts)
        patches = self.token_pixels(imgs)  # [B, N, p*p*C]
        latent = self.forward_encoder(patches, order)  # [B, N, D], or of a Swin [B, cells, 8 D]
        pred = self.forward_decoder(latent, order)  # [B, num_supervised, p*p*C]
        return {"pixel": self.forward_loss(pred, imgs, patches, order)}

    def penalty(self, error: Tensor) -> Tensor:
        return error.abs()


def tokens_of_32_px(patch_size: int) -> int:
    """Returns the side of SimMIM's masked squares, in tokens. ValueError if they are no whole tokens."""
    if 32 % patch_size:
        raise ValueError(f"SimMIM masks squares of 32 px, which --patch_size must divide, got {patch_size}")
    return 32 // patch_size


class SimMIMOnViT(SimMIM):
    """What SimMIM has on any ViT: mask tokens that run through the encoder, a linear head, an L1 loss.

    mask_unit: side of the masked squares in tokens; None: that of SimMIM's squares of 32 px.
    img_size, ..., init_values: of the encoder, see `SimMIMEncoder`. norm_pix_loss, has_invalid: see
        `framework.Framework.use_method`. mask_ratio, ..., applies_to: see `prmim.Method`.
    """

    def __init__(
        self,
        mask_unit: int | None = 2,
        patch_size: int = 16,
        *,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        init_values: float = 0.1,
        norm_pix_loss: bool = False,
        has_invalid: bool = False,
        mask_ratio: float = 0.6,
        throw_ratio: float = 0.3,
        progressive: bool = True,
        kernel_size: int = 7,
        aggregation: str = "dwconv",
        applies_to: str = "thrown",
    ) -> None:
        super().__init__(
            img_size,
            patch_size,
            in_chans,
            embed_dim,
            depth,
            num_heads,
            mlp_ratio,
            drop_path_rate,
            init_values,
            pretraining=True,
        )
        if mask_unit is None:
            mask_unit = tokens_of_32_px(patch_size)
        method = Method(mask_ratio, throw_ratio, progressive, kernel_size, aggregation, applies_to)
        self.use_method(method, norm_pix_loss, mask_unit, has_invalid)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02, a=-0.02, b=0.02)
        self.pred = nn.Linear(embed_dim, patch_size**2 * in_chans)
        self.aggregation = self.make_aggregation(embed_dim)

    def encode_kept(self, tokens: Tensor, order: TokenOrder) -> Tensor:
        """Runs the encoder on the kept tokens [B, num_kept, D]. Returns [B, 1 + num_kept, D], class token first."""
        raise NotImplementedError

    def forward_encoder(self, patches: Tensor, order: TokenOrder) -> Tensor:
        """Encodes the kept tokens and reconstructs the thrown ones, from all patches [B, N, p*p*C].

        Returns [B, N, D] in token order. Plain partial reconstruction returns the kept tokens [B, num_kept, D].
        """
        visible = self.patch_embed(order.take_visible(patches))
        tokens = order.append_mask_tokens(visible, self.mask_token)  # [B, num_kept, D]
        x = self.encode_kept(tokens, order)
        x = x[:, 1:]  # without the class token
        if self.aggregation is None:
            return x
        return self.aggregation(x, order, self.grid_size)

    def forward_decoder(self, latent: Tensor, order: TokenOrder, all_tokens: bool = False) -> Tensor:
        """Applies norm and head to the supervised ones of the features, or to all, token by token."""
        if not all_tokens:
            latent = latent[:, self.counts.num_visible :]
        return self.pred(self.norm(latent))


class SimMIMViT(SimMIMOnViT, RelativeViTEncoder):
    """A ViT with a shared relative-position bias, whose encoder also runs on mask tokens, and a linear head."""

    def encode_kept(self, tokens: Tensor, order: TokenOrder) -> Tensor:
        """Thrown tokens have no row and no column in the bias."""
        return self.encode(tokens, self.relative_positions(order.ids_kept))

    def no_weight_decay(self) -> set[str]:
        return {"cls_token"}  # as in the release: the mask token and the bias table decay

    def official_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return rename_release(weights, self.patch_size)


class SimMIMSwin(SimMIM, SwinEncoder):
    """A dense Swin that also runs on mask tokens, with a linear head on the last stage. Its cells are the masked units.

    No token can be thrown, because its windows need whole grids.
    depths, ..., drop_path_rate: of the encoder, see `encoders.models_swin.SwinEncoder`. norm_pix_loss, has_invalid: see
        `framework.Framework.use_method`. mask_ratio, ..., applies_to: see `prmim.Method`.
    """

    def __init__(
        self,
        depths: Sequence[int] = (2, 2, 18, 2),
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        embed_dim: int = 128,
        num_heads: Sequence[int] = (4, 8, 16, 32),
        window_size: int = 7,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        norm_pix_loss: bool = False,
        has_invalid: bool = False,
        mask_ratio: float = 0.6,
        throw_ratio: float = 0.0,
        progressive: bool = True,
        kernel_size: int = 7,
        aggregation: str = "dwconv",
        applies_to: str = "thrown",
    ) -> None:
        super().__init__(
            img_size, patch_size, in_chans, embed_dim, depths, num_heads, window_size, mlp_ratio, drop_path_rate
        )
        side_of_unit = 2 ** (len(depths) - 1)  # in tokens
        method = Method(mask_ratio, throw_ratio, progressive, kernel_size, aggregation, applies_to)
        self.use_method(method, norm_pix_loss, side_of_unit, has_invalid)
        if throw_ratio:
            raise ValueError(f"{type(self).__name__} throws no tokens, got throw_ratio {throw_ratio}; set it to 0")
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        self.pred = nn.Linear(self.num_features, self.stride**2 * in_chans)

    def forward_encoder(self, patches: Tensor, order: TokenOrder) -> Tensor:
        """Encodes visible patches and mask tokens. Returns the last stage's cells [B, cells, 8 D] in raster order."""
        visible = self.patch_embed(order.take_visible(patches))
        tokens = order.append_mask_tokens(visible, self.mask_token)
        return self.encode(order.restore(tokens))

    def forward_decoder(self, latent: Tensor, order: TokenOrder, all_tokens: bool = False) -> Tensor:
        """Applies the head to each cell, and cuts its pixels into tokens."""
        cells = self.pred(latent)  # [B, cells, stride * stride * C]
        imgs = unpatchify(cells, self.stride, self.unit_grid)
        pred = patchify(imgs, self.patch_size)  # [B, N, p*p*C], raster
        ids = order.ids_shuffle
        if not all_tokens:
            ids = ids[:, self.counts.num_visible :]
        return order.take(pred, ids)

    def no_weight_decay(self) -> set[str]:
        return {"mask_token"}  # as in the release: bias tables decay

    def official_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return rename_release(weights, self.stride)


def rename_release(weights: dict[str, Tensor], stride: int) -> dict[str, Tensor]:
    """Returns the weights of SimMIM's release under the names here, with the head re-indexed.

    The release's head is a 1x1 convolution with channels (colour, row, column). The linear head here has outputs (row,
    column, colour). Keys that a release does not have stay as they are. stride: side, in pixels, of the square that one
    output of the head covers.
    """
    renamed = from_simmim(weights)
    for name, value in weights.items():
        if name == "decoder.0.weight":
            renamed["pred.weight"] = reorder_head(value.flatten(1), stride)
        elif name == "decoder.0.bias":
            renamed["pred.bias"] = reorder_head(value, stride)
        elif not name.startswith("encoder."):
            renamed.setdefault(name, value)
    return renamed


def reorder_head(value: Tensor, stride: int) -> Tensor:
    """Returns a weight or bias whose outputs (colour, row, column) have become (row, column, colour)."""
    value = value.unflatten(0, (-1, stride, stride))  # [colours, rows, columns, ...]
    return value.movedim(0, 2).flatten(0, 2)


simmim_vit_micro_patch4 = partial(SimMIMViT, **MICRO)
simmim_vit_mini_patch4 = partial(SimMIMViT, **MINI)
simmim_vit_base_patch16 = partial(SimMIMViT, **BASE | {"drop_path_rate": 0.1, "mask_unit": None})
simmim_swin_micro_patch4_window4 = partial(SimMIMSwin, **models_swin.MICRO)
simmim_swin_base_patch4_window6 = partial(SimMIMSwin, **(models_swin.BASE | {"img_size": 192, "window_size": 6}))
simmim_swin_large_patch4_window12 = partial(SimMIMSwin, **(models_swin.LARGE | {"img_size": 192, "window_size": 12}))
