"""SimMIM (Xie et al., CVPR 2022) on ViT with PR-MIM, where what is thrown leaves the encoder; and on Swin, without throwing.

The encoder runs on visible and masked tokens; a linear head predicts the pixels of the masked ones, by L1. Images are
masked in units of 32 px, and tokens are thrown one by one. Thrown tokens are dropped before the first block, together with
their rows and columns of the relative-position bias, and the convolution after the last block brings them back. Swin's
windows need whole grids, so there nothing can be thrown: it is the release's baseline (GreenMIM is the Swin with PR-MIM).
"""

import math

import torch
from torch import nn

import models_swin
from framework import PixelFramework
from models_relative_vit import RelativeViTEncoder
from models_swin import SwinEncoder
from models_vit import BASE, MICRO, MINI, patchify, unpatchify
from prmim import SpatialAggregation, TokenCounts, TokenOrder
from util.key_names import from_simmim
from util.run.checkpoint import load_strict

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


class SimMIMViT(PixelFramework, RelativeViTEncoder):
    """A ViT with shared relative-position bias, mask tokens inside, and a linear head. Arguments as MAE's where they agree.

    mask_unit: tokens a side of the squares that are masked; 2 of 16 px are SimMIM's 32. The number of masked squares is
    rounded up, as in the release: 30 of 49 at mask_ratio .6.
    """

    def __init__(
        self,
        mask_ratio=0.6,
        throw_ratio=0.3,
        progressive=True,
        kernel_size=7,
        aggregation="dwconv",
        applies_to="thrown",
        norm_pix_loss=False,
        mask_unit=2,
        in_chans=3,
        **kwargs,
    ):
        super().__init__(in_chans=in_chans, **kwargs)
        self.mask_unit, self.norm_pix_loss = mask_unit, norm_pix_loss
        self.counts = count_tokens(self.num_tokens, mask_ratio, throw_ratio, mask_unit)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02, a=-0.02, b=0.02)
        self.pred = nn.Linear(self.embed_dim, self.patch_size**2 * in_chans)
        self.aggregation = None
        if progressive and self.counts.num_thrown:  # last: the same seed gives every arm the same first weights
            self.aggregation = SpatialAggregation(self.embed_dim, kernel_size, aggregation, applies_to)

    def forward(self, imgs, ids_shuffle):
        """imgs [B, C, H, W], normalised, and ids_shuffle int64 [B, N] -> {"pixel": scalar loss}."""
        order = TokenOrder(ids_shuffle, self.counts)
        patches = self.cut(imgs)  # [B, N, p*p*C]
        x = self.forward_encoder(patches, order)[:, self.counts.num_visible :]
        pred = self.pred(self.norm(x))  # [B, num_supervised, p*p*C]
        return {"pixel": self.error(pred, patches, order).abs().mean()}

    def forward_encoder(self, patches, order):
        """All patches [B, N, p*p*C] -> features of all tokens [B, N, D] (plain: of the kept ones), token order."""
        tokens = order.append_mask_tokens(self.patch_embed(order.take_visible(patches)), self.mask_token)  # [B, num_kept, D]
        x = self.encode(tokens, order.ids_kept)[:, 1:]
        return x if self.aggregation is None else self.aggregation(x, order, self.grid_size)

    def predict_all(self, imgs, order):
        return self.pred(self.norm(self.forward_encoder(self.cut(imgs), order)))

    def no_weight_decay(self):
        """The release decays the mask token and the bias table."""
        return {"cls_token"}

    def load_official(self, state_dict):
        """Loads the weights of SimMIM's ViT releases before fine-tuning: their content, or its `model`.

        Strict, apart from the aggregator. ValueError names missing, unexpected and mis-shaped keys.
        """
        load_strict(self, release_names(state_dict, self.patch_size), "SimMIM weights", optional="aggregation.")


class SimMIMSwin(PixelFramework, SwinEncoder):
    """A dense Swin with mask tokens inside and a linear head on its last stage, whose cells are the units that are masked.

    `throw_ratio` must be 0; the arguments of throwing are there because every framework has them.
    """

    throws = False

    def __init__(
        self,
        mask_ratio=0.6,
        throw_ratio=0.0,
        progressive=True,
        kernel_size=7,
        aggregation="dwconv",
        applies_to="thrown",
        norm_pix_loss=False,
        in_chans=3,
        **kwargs,
    ):
        super().__init__(in_chans=in_chans, **kwargs)
        if throw_ratio:
            raise ValueError(f"SimMIM on Swin throws no tokens (its windows need whole grids), got throw_ratio {throw_ratio}")
        self.mask_unit, self.norm_pix_loss = self.stride // self.patch_size, norm_pix_loss
        self.counts = count_tokens(self.num_tokens, mask_ratio, 0.0, self.mask_unit)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        self.pred = nn.Linear(self.num_features, self.stride**2 * in_chans)

    def forward(self, imgs, ids_shuffle):
        """imgs [B, C, H, W], normalised, and ids_shuffle int64 [B, N] -> {"pixel": scalar loss}."""
        order = TokenOrder(ids_shuffle, self.counts)
        pred = self.predict_all(imgs, order)[:, self.counts.num_visible :]
        return {"pixel": self.error(pred, self.cut(imgs), order).abs().mean()}

    def predict_all(self, imgs, order):
        tokens = order.append_mask_tokens(self.patch_embed(order.take_visible(self.cut(imgs))), self.mask_token)
        cells = self.pred(self.encode(order.restore(tokens)))  # [B, cells, stride * stride * C]
        grid_size = tuple(side // self.stride for side in self.img_size)
        patches = patchify(unpatchify(cells, self.stride, grid_size), self.patch_size)  # [B, N, p*p*C], raster
        return order.take(patches, order.ids_shuffle)

    def no_weight_decay(self):
        """The release decays the bias tables in pre-training."""
        return {"mask_token"}

    def load_official(self, state_dict):
        """Loads the weights of SimMIM's Swin releases before fine-tuning: their content, or its `model`; strict."""
        load_strict(self, release_names(state_dict, self.stride), "SimMIM weights")


def release_names(state_dict, stride):
    """The release's names and head -> ours: its 1x1 convolution has channels (colour, row, column), ours (row, column, colour)."""
    weights = state_dict.get("model", state_dict)
    renamed = from_simmim(weights)
    for kind in ("weight", "bias"):
        if f"decoder.0.{kind}" in weights:
            value = weights[f"decoder.0.{kind}"]
            value = (value.flatten(1) if kind == "weight" else value).unflatten(0, (-1, stride, stride))
            renamed[f"pred.{kind}"] = value.movedim(0, 2).flatten(0, 2)
    return renamed


def count_tokens(num_tokens, mask_ratio, throw_ratio, mask_unit):
    """`TokenCounts` where whole units are masked, their number rounded up; throw_ratio is a share of all tokens."""
    units = num_tokens // mask_unit**2
    num_visible = (units - math.ceil(units * mask_ratio)) * mask_unit**2
    num_thrown = int(num_tokens * throw_ratio)
    if not 0 <= throw_ratio < mask_ratio < 1 or num_visible + num_thrown >= num_tokens:
        raise ValueError(
            f"ratios must satisfy 0 <= throw_ratio < mask_ratio < 1 (both are shares of all tokens), "
            f"got throw_ratio {throw_ratio} and mask_ratio {mask_ratio}"
        )
    return TokenCounts(num_visible, num_tokens - num_visible - num_thrown, num_thrown)


def simmim_vit_micro_patch4(**kwargs):
    return SimMIMViT(**{**MICRO, **kwargs})


def simmim_vit_mini_patch4(**kwargs):
    return SimMIMViT(**{**MINI, **kwargs})


def simmim_vit_base_patch16(**kwargs):
    return SimMIMViT(**{**BASE, "drop_path_rate": 0.1, **kwargs})


def simmim_swin_micro_patch4_window4(**kwargs):
    return SimMIMSwin(**{**models_swin.MICRO, **kwargs})


def simmim_swin_base_patch4_window6(**kwargs):
    return SimMIMSwin(**{**models_swin.BASE, "img_size": 192, "window_size": 6, **kwargs})


def simmim_swin_large_patch4_window12(**kwargs):
    return SimMIMSwin(**{**models_swin.LARGE, "img_size": 192, "window_size": 12, **kwargs})
