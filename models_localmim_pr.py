"""LocalMIM (Wang et al., CVPR 2023) with PR-MIM: four depths of the encoder reconstruct HOG features at four scales.

After four of its blocks the visible tokens go through a norm and a small decoder of that level's own; low blocks predict
fine cells, high ones coarse cells, and the four losses are summed. PR-MIM works in every decoder, on the token grid, where
all four share the image's split into retained and thrown tokens.
"""

import torch
from torch import nn
from torch.nn import functional as F

from framework import Framework
from models_vit import BASE, LARGE, MICRO, MINI, ViTEncoder, layer_norm, patchify, unpatchify
from prmim import ProgressiveDecoder, TokenCounts, TokenOrder
from util.hog import hog, orientation_colors
from util.run.checkpoint import load_strict

__all__ = [
    "LocalMIMViT",
    "localmim_vit_micro_patch4",
    "localmim_vit_mini_patch4",
    "localmim_vit_base_patch16",
    "localmim_vit_large_patch16",
]

SCALES = (4, 2, 1, 0.5)  # a level's cells a side of a token: its decoder predicts 56 x 56, 28 x 28, 14 x 14, 7 x 7 cells


class LocalMIMViT(Framework, ViTEncoder):
    """A ViT encoder that owns four progressive decoders. Arguments are MAE's, then LocalMIM's, then PR-MIM's.

    taps: numbers of the four blocks (from 0) whose outputs are decoded, increasing to the last block; by default the
    release's second, fourth, third last and last. hog_bias: the gradient filters have a random bias that never changes, as in
    the release's ViT-L. norm_pix_loss has no effect; it is there because every framework has it.
    """

    def __init__(
        self,
        img_size=224,
        patch_size=16,
        in_chans=3,
        embed_dim=768,
        depth=12,
        num_heads=12,
        decoder_embed_dim=256,
        decoder_depth=1,
        decoder_num_heads=8,
        mlp_ratio=4.0,
        taps=None,
        num_bins=9,
        hog_bias=False,
        norm_pix_loss=False,
        mask_ratio=0.75,
        throw_ratio=0.65,
        progressive=True,
        kernel_size=7,
        aggregation="dwconv",
        applies_to="thrown",
    ):
        super().__init__(img_size, patch_size, in_chans, embed_dim, depth, num_heads, mlp_ratio)
        self.taps = tuple((1, 3, depth - 3, depth - 1) if taps is None else taps)
        if len({*self.taps}) != 4 or sorted(self.taps) != list(self.taps) or self.taps[0] < 0 or self.taps[3] != depth - 1:
            raise ValueError(
                f"taps must be four numbers that increase from 0 or more to the last block {depth - 1}, got {self.taps}"
            )
        if patch_size % 4 or any(side % 2 for side in self.grid_size):
            rows, columns = self.grid_size
            raise ValueError(
                f"LocalMIM needs a patch_size that is a multiple of 4 and an even grid of tokens, got patch_size {patch_size} "
                f"and a grid of {rows} x {columns}"
            )
        self.cells, self.num_bins = tuple(int(patch_size / scale) for scale in SCALES), num_bins  # pixels a side of a cell
        self.counts = TokenCounts.from_ratios(self.num_tokens, mask_ratio, throw_ratio)
        self.register_buffer("hog_bias", torch.empty(4, 2).uniform_(-1 / 3, 1 / 3) if hog_bias else None)
        self.norm = nn.ModuleList(layer_norm(embed_dim) for _ in SCALES)
        self.decoder = nn.ModuleList(
            LocalDecoder(
                self.grid_size,
                self.counts,
                embed_dim,
                head=make_head(scale, decoder_embed_dim, in_chans * num_bins),
                decoder_embed_dim=decoder_embed_dim,
                decoder_depth=decoder_depth,
                decoder_num_heads=decoder_num_heads,
                mlp_ratio=mlp_ratio,
                progressive=False,
            )
            for scale in SCALES
        )
        for decoder in self.decoder if progressive else ():
            decoder.add_aggregation(kernel_size, aggregation, applies_to)

    def forward(self, imgs, ids_shuffle):
        """imgs [B, C, H, W], normalised, and ids_shuffle int64 [B, N] -> {"hog4", "hog8", "hog16", "hog32": scalar losses}."""
        order = TokenOrder(ids_shuffle, self.counts)
        *targets, coarse = self.target(imgs)
        *features, last = [d.reconstruct(x, order) for d, x in zip(self.decoder, self.forward_encoder(imgs, order), strict=True)]
        losses = [self.token_loss(k, x, t, order) for k, (x, t) in enumerate(zip(features, targets, strict=True))]
        losses.append(self.group_loss(last, coarse, order))
        return {f"hog{cell}": loss for cell, loss in zip(self.cells, losses, strict=True)}

    def forward_encoder(self, imgs, order):
        """imgs -> a latent of the visible tokens for each level, four of [B, 1 + num_visible, D], class token first."""
        return self.encode(self.patch_embed(order.take_visible(self.cut(imgs))) + order.take_visible(self.pos_embed[:, 1:]))

    def encode(self, tokens):
        """Embedded tokens with positions [B, n, D] -> four of [B, 1 + n, D], after each level's norm, class token first."""
        x, levels = self.prepend_cls_token(tokens), []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i in self.taps:  # the norm is a side branch: the next block takes x as it is
                levels.append(self.norm[len(levels)](x))
        return levels

    def forward_features(self, imgs):
        """Images [B, C, H, W], normalised -> token features [B, 1 + N, D], class token first, after the last level's norm."""
        return self.encode(self.patch_embed(self.cut(imgs)) + self.pos_embed[:, 1:])[-1]

    def target(self, imgs):
        """HOG features of all cells, four of [B, C * num_bins, rows, columns], from 4 to 32 px; float32, without gradient."""
        return hog(imgs, self.cells, self.num_bins, self.hog_bias)

    def token_loss(self, level, x, target, order):
        """Levels 0 to 2, whose tokens are predicted one by one: mean squared error over the supervised tokens' cells.

        x [B, n, C]: features in token order; target [B, C', rows, columns].
        """
        supervised = slice(self.counts.num_visible, x.shape[1])
        target = order.take(patchify(target, int(SCALES[level])), order.ids_shuffle[:, supervised])  # [B, n', cells * C']
        pred = self.decoder[level].predict(x[:, supervised])
        return (pred.to(target.dtype) - target).square().mean()

    def group_loss(self, x, target, order):
        """Level 3, whose cells are groups of 2 x 2 tokens: squared error weighted by the share of supervised tokens."""
        pred = self.decoder[3].predict(x, order)  # [B, N/4, C']
        error = (pred.to(target.dtype) - target.flatten(2).transpose(1, 2)).square().mean(dim=-1)
        supervised = order.masked_of_first(x.shape[1])
        weights = pool(supervised.unsqueeze(-1).to(error.dtype), self.grid_size).squeeze(-1)  # 0, 1/4, 1/2, 3/4, 1
        return (error * weights).sum() / weights.sum()

    @torch.no_grad()
    def reconstruct(self, imgs, ids_shuffle):
        """-> (predicted HOG features, four of [B, cells, C * num_bins] in raster order; mask bool [B, N] of predicted tokens).

        Plain partial reconstruction predicts no thrown token: the mask is False there, and the cells of levels 0 to 2 are zero.
        """
        order = TokenOrder(ids_shuffle, self.counts)
        latents, preds = self.forward_encoder(imgs, order), []
        for level, (decoder, latent) in enumerate(zip(self.decoder, latents, strict=True)):
            x = decoder.reconstruct(latent, order)
            if level == 3:
                preds.append(decoder.predict(x, order))
            else:
                grid = unpatchify(order.restore(decoder.predict(x)), int(SCALES[level]), self.grid_size)
                preds.append(grid.flatten(2).transpose(1, 2))
        return preds, order.masked_of_first(x.shape[1])

    @torch.no_grad()
    def panels(self, imgs, ids_shuffle, undo):
        """Target and prediction of each level as orientations: true where visible, predicted where masked, black elsewhere."""
        (preds, mask), panels = self.reconstruct(imgs, ids_shuffle), {}
        visible = ~TokenOrder(ids_shuffle, self.counts).mask
        for cell, pred, target in zip(self.cells, preds, self.target(imgs), strict=True):
            truth = orientation_colors(target, self.num_bins)
            pred = orientation_colors(pred.transpose(1, 2).reshape(target.shape), self.num_bins)
            truth, pred = (F.interpolate(x, size=self.img_size, mode="nearest") for x in (truth, pred))
            shown, true = (F.interpolate(m.view(-1, 1, *self.grid_size).float(), size=self.img_size) for m in (mask, visible))
            panels |= {f"HOG, {cell} px": truth, f"predicted, {cell} px": pred * shown + truth * true}
        return panels

    @torch.no_grad()
    def token_errors(self, imgs, ids_shuffle, undo):
        """Squared error of each level's features, averaged over a token's cells; tokens share the error of a larger cell."""
        preds, _ = self.reconstruct(imgs, ids_shuffle)
        errors = {}
        for cell, pred, target in zip(self.cells, preds, self.target(imgs), strict=True):
            error = (pred - target.flatten(2).transpose(1, 2)).square().mean(dim=-1).view(-1, 1, *target.shape[2:])
            resize = F.adaptive_avg_pool2d if cell <= self.patch_size else F.interpolate
            errors[f"HOG error at {cell} px"] = resize(error, self.grid_size).flatten(1)
        return errors

    def load_official(self, state_dict):
        """Loads the weights of LocalMIM's ViT releases before fine-tuning: their content, or its `model`.

        Names are the release's, so it is strict apart from the aggregators; the gradient filters are computed, and their
        bias is zero where the file has none. ValueError names missing, unexpected and mis-shaped keys.
        """
        weights = dict(state_dict.get("model", state_dict))
        filters = {name: weights.pop(name) for name in [*weights] if name.startswith("hog_enc.")}
        if self.hog_bias is not None:
            zero = torch.zeros(2)
            weights["hog_bias"] = torch.stack([filters.get(f"hog_enc.{k}.conv.bias", zero) for k in range(len(SCALES))])
        elif any(name.endswith(".bias") for name in filters):
            raise ValueError("these LocalMIM weights have a bias in their gradient filters: build the model with hog_bias=True")
        load_strict(self, weights, "LocalMIM weights", optional="aggregation.")


class LocalDecoder(ProgressiveDecoder):
    """A level's decoder: one block, aggregation, norm, then a head that brings the tokens to the level's scale."""

    def predict(self, x, order=None):
        """Features [B, n, C] -> predictions: [B, n, cells * C'], a token's cells in raster order; with `order` [B, N/4, C'].

        The latter is level 3's: the mean over the present tokens of each 2 x 2 group. Plain partial reconstruction lacks
        some; zeros in their place would shrink the features by the share of those that are present.
        """
        x = self.norm(x)
        if order is not None:
            present = pool(order.restore(torch.ones_like(x[..., :1])), self.grid_size)
            x = pool(order.restore(x), self.grid_size) / present.clamp(min=0.25)  # 1/4, or nothing is there
        return self.pred(x).flatten(2)


def pool(x, grid_size):
    """Raster tokens [B, N, C] -> the mean of each 2 x 2 group [B, N/4, C]."""
    rows, columns = grid_size
    return x.reshape(len(x), rows // 2, 2, columns // 2, 2, -1).mean(dim=(2, 4)).flatten(1, 2)


def make_head(scale, dim, out_dim):
    """Tokens [B, n, dim] -> [B, n, cells, out_dim], or [B, n, out_dim] where a token is no more than one cell.

    Index by index the release's convolutions on the grid. Those of stride 2 do not overlap, so each token can be computed by
    itself, and only where it is needed.
    """
    if scale == 4:
        up = [Upsample(dim, dim // 2), layer_norm(dim // 2), nn.GELU(), Upsample(dim // 2, dim // 4)]
        return nn.Sequential(*up, Pointwise(dim // 4, out_dim), RasterCells())
    if scale == 2:
        return nn.Sequential(Upsample(dim, dim // 2), Pointwise(dim // 2, out_dim))
    if scale == 1:
        return nn.Sequential(Pointwise(dim, out_dim))
    return nn.Sequential(nn.Identity(), Pointwise(dim, out_dim))  # first comes the pooling, which LocalDecoder does


class Upsample(nn.ConvTranspose2d):
    """A transposed convolution of 2 x 2 cells and stride 2, on tokens: [..., C] -> [..., 4, C'], cells in raster order."""

    def __init__(self, dim, out_dim):
        super().__init__(dim, out_dim, kernel_size=2, stride=2)

    def forward(self, x):
        weight = self.weight.permute(2, 3, 1, 0).flatten(0, 2)  # [4 * C', C]
        return F.linear(x, weight, self.bias.repeat(4)).unflatten(-1, (4, -1))


class Pointwise(nn.Conv2d):
    """A 1 x 1 convolution, on tokens: [..., C] -> [..., C']."""

    def __init__(self, dim, out_dim):
        super().__init__(dim, out_dim, kernel_size=1)

    def forward(self, x):
        return F.linear(x, self.weight.flatten(1), self.bias)


class RasterCells(nn.Module):
    """Cells of cells [B, n, 4, 4, C], as two upsamplings make them, -> the token's 4 x 4 cells in raster order [B, n, 16, C]."""

    def forward(self, x):
        return x.unflatten(3, (2, 2)).unflatten(2, (2, 2)).transpose(3, 4).flatten(2, 5)


def localmim_vit_micro_patch4(**kwargs):
    decoder = dict(decoder_embed_dim=64, decoder_num_heads=2, taps=(0, 1, 2, 3))
    return LocalMIMViT(**{**MICRO, **decoder, **kwargs})


def localmim_vit_mini_patch4(**kwargs):
    decoder = dict(decoder_embed_dim=128, decoder_num_heads=4, taps=(1, 2, 3, 5))
    return LocalMIMViT(**{**MINI, **decoder, **kwargs})


def localmim_vit_base_patch16(**kwargs):
    return LocalMIMViT(**{**BASE, **kwargs})


def localmim_vit_large_patch16(**kwargs):
    return LocalMIMViT(**{**LARGE, "num_bins": 18, "hog_bias": True, **kwargs})
