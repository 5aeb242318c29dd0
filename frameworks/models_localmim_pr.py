"""LocalMIM (Wang et al., CVPR 2023) with PR-MIM: four depths of the encoder reconstruct HOG features at four scales.

After each of four blocks, the visible tokens go through a norm and a small decoder of that level. Low blocks predict
fine cells, high blocks predict coarse cells. The four losses are summed. PR-MIM works in every decoder, on the grid of
tokens, and all four decoders throw the same tokens of an image.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from framework import Framework
from frameworks.hog import hog, orientation_colors
from frameworks.views import View
from models_vit import BASE, LARGE, MICRO, MINI, ViTEncoder, layer_norm, patchify, unpatchify
from prmim import Method, ProgressiveDecoder, TokenOrder

__all__ = [
    "LocalMIMViT",
    "localmim_vit_micro_patch4",
    "localmim_vit_mini_patch4",
    "localmim_vit_base_patch16",
    "localmim_vit_large_patch16",
]

SCALES = (4, 2, 1, 0.5)  # cells per side of a token at each level: for ViT-B 56 x 56, 28 x 28, 14 x 14 and 7 x 7 cells


class LocalMIMViT(Framework, ViTEncoder):
    """A ViT encoder that owns four progressive decoders.

    decoder_embed_dim, decoder_depth, decoder_num_heads: the blocks of each decoder, with the encoder's `mlp_ratio`.
    taps: numbers (from 0) of the four blocks whose outputs are decoded. They increase up to the last block. The default
        is the second, fourth, third last and last block, as in the release.
    num_bins: orientations of a histogram.
    hog_bias: give the gradient filters a random bias that is never trained, as in the release's ViT-L.
    img_size, ..., layer_scale: of the encoder, see `models_vit.ViTEncoder`. norm_pix_loss, ..., has_invalid: see
        `framework.Framework.use_method`. mask_ratio, ..., applies_to: see `prmim.Method`.
    """

    release = "LocalMIM"
    compiled_methods = ("embed_visible", "target", "token_loss", "group_loss")

    def __init__(
        self,
        decoder_embed_dim: int = 256,
        decoder_depth: int = 1,
        decoder_num_heads: int = 8,
        taps: Sequence[int] | None = None,
        num_bins: int = 9,
        hog_bias: bool = False,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        layer_scale: bool = False,
        norm_pix_loss: bool = False,
        mask_unit: int = 1,
        has_invalid: bool = False,
        mask_ratio: float = 0.75,
        throw_ratio: float = 0.65,
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
            layer_scale=layer_scale,
        )
        method = Method(mask_ratio, throw_ratio, progressive, kernel_size, aggregation, applies_to)
        self.use_method(method, norm_pix_loss, mask_unit, has_invalid)
        if taps is None:
            taps = (1, 3, depth - 3, depth - 1)
        self.taps = tuple(taps)
        rows, columns = self.grid_size
        if self.patch_size % 4 or rows % 2 or columns % 2:
            raise ValueError(
                f"LocalMIM needs a patch_size that is a multiple of 4 and an even grid of tokens, "
                f"got patch_size {self.patch_size} and a grid of {rows} x {columns}"
            )
        self.cells = tuple(int(self.patch_size / scale) for scale in SCALES)  # side in pixels, at each level
        self.num_bins = num_bins
        self.register_buffer("hog_bias", None)
        if hog_bias:
            self.hog_bias = torch.empty(4, 2).uniform_(-1 / 3, 1 / 3)
        self.norm = nn.ModuleList(layer_norm(self.embed_dim) for _ in SCALES)
        self.decoder = nn.ModuleList()
        for scale in SCALES:
            decoder = LocalDecoder(
                self.grid_size,
                embed_dim,
                head=make_head(scale, decoder_embed_dim, in_chans * num_bins),
                make_aggregation=self.make_aggregation,
                decoder_embed_dim=decoder_embed_dim,
                decoder_depth=decoder_depth,
                decoder_num_heads=decoder_num_heads,
                mlp_ratio=mlp_ratio,
            )
            self.decoder.append(decoder)

    def forward(self, imgs: Tensor, ids_shuffle: Tensor) -> dict[str, Tensor]:
        """Returns the scalar losses of normalised images [B, C, H, W] with ids_shuffle int64 [B, N].

        There is one per level, named by the side of a cell: "hog4", "hog8", "hog16" and "hog32" for patches of 16 px.
        """
        order = TokenOrder(ids_shuffle, self.counts)
        targets = self.target(imgs)
        latents = self.forward_encoder(imgs, order)
        losses = {}
        for level, cell in enumerate(self.cells):
            x = self.decoder[level].features(latents[level], order)
            if level < 3:
                loss = self.token_loss(level, x, targets[level], order)
            else:
                loss = self.group_loss(x, targets[level], order)
            losses[f"hog{cell}"] = loss
        return losses

    def forward_encoder(self, imgs: Tensor, order: TokenOrder) -> list[Tensor]:
        """Returns the latents of the visible tokens at the four levels, [B, 1 + num_visible, D] each."""
        tokens = self.embed_visible(self.patchify(imgs), order.ids_visible)
        return self.encode(tokens)

    def encode(self, tokens: Tensor, relative: Tensor | None = None) -> list[Tensor]:
        """Returns the outputs of the four levels after their norms, [B, 1 + n, D] each, class token first."""
        x = self.prepend_cls_token(tokens)
        norms = iter(self.norm)
        levels = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i in self.taps:  # the norm is on a side branch; the next block takes x itself
                norm = next(norms)
                levels.append(norm(x))
        return levels

    def forward_features(self, imgs: Tensor) -> Tensor:
        return self.encode(self.embed(imgs))[-1]

    def target(self, imgs: Tensor) -> list[Tensor]:
        """Returns the HOG features of the four levels, float32 [B, C * num_bins, rows, columns] without gradient."""
        return hog(imgs, self.cells, self.num_bins, self.hog_bias)

    def token_loss(self, level: int, x: Tensor, target: Tensor, order: TokenOrder) -> Tensor:
        """Returns the loss of level 0, 1 or 2: the mean squared error over the cells of the supervised tokens.

        x: features [B, n, C] in token order. target: [B, C', rows, columns].
        """
        supervised = slice(self.counts.num_visible, x.shape[1])
        cells = patchify(target, int(SCALES[level]))  # [B, N, cells * C']
        target = order.take(cells, order.ids_shuffle[:, supervised])
        pred = self.decoder[level].predict(x[:, supervised])
        error = pred.to(target.dtype) - target
        return error.square().mean()

    def group_loss(self, x: Tensor, target: Tensor, order: TokenOrder) -> Tensor:
        """Returns the loss of level 3, in which a cell is a group of 2 x 2 tokens.

        It is the squared error, weighted by the share of supervised tokens in each group. x: features [B, n, C] in
        token order. target: [B, C', rows / 2, columns / 2].
        """
        pred = self.decoder[3].predict_groups(x, order)  # [B, N/4, C']
        target = target.flatten(2).transpose(1, 2)
        error = (pred.to(target.dtype) - target).square().mean(dim=-1)  # [B, N/4]
        supervised = self.supervised(order).unsqueeze(-1).to(error.dtype)
        weights = pool(supervised, self.grid_size).squeeze(-1)  # 0, 1/4, 1/2, 3/4 or 1
        return (error * weights).sum() / weights.sum()

    @torch.no_grad()
    def reconstruct(self, imgs: Tensor, ids_shuffle: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns (HOG features predicted at the four levels, mask of the predicted tokens, bool [B, N]).

        The features are [B, cells, C * num_bins] each, in raster order. Plain partial reconstruction predicts no thrown
        token. The mask is False there, and the cells of levels 0 to 2 are zero.
        """
        order = TokenOrder(ids_shuffle, self.counts)
        latents = self.forward_encoder(imgs, order)
        preds = []
        for level, decoder in enumerate(self.decoder):
            x = decoder.features(latents[level], order)
            if level < 3:
                pred = order.restore(decoder.predict(x))  # [B, N, cells of a token * C']
                grid = unpatchify(pred, int(SCALES[level]), self.grid_size)
                preds.append(grid.flatten(2).transpose(1, 2))
            else:
                preds.append(decoder.predict_groups(x, order))
        return preds, self.supervised(order)

    @torch.no_grad()
    def views(
        self,
        imgs: Tensor,
        ids_shuffle: Tensor,
        undo: Callable[[Tensor], Tensor],
    ) -> list[View]:
        """Returns a view per level, whose colours are orientations.

        The errors are squared errors of the features, averaged over the cells of each token. At level 3 the tokens of a
        cell have the same error.
        """
        preds, _ = self.reconstruct(imgs, ids_shuffle)
        targets = self.target(imgs)
        views = []
        for level, cell in enumerate(self.cells):
            target = targets[level]
            pred = preds[level].transpose(1, 2).reshape(target.shape)
            error = (pred - target).square().mean(dim=1, keepdim=True)  # [B, 1, rows, columns] of cells
            if cell <= self.patch_size:
                errors = F.adaptive_avg_pool2d(error, self.grid_size)
            else:
                errors = F.interpolate(error, self.grid_size)
            view = View(
                title=f"predicted, {cell} px",
                truth_title=f"HOG, {cell} px",
                truth=self.draw(target),
                prediction=self.draw(pred),
                measure=f"HOG error at {cell} px",
                errors=errors.flatten(1),
            )
            views.append(view)
        return views

    def draw(self, histograms: Tensor) -> Tensor:
        """Turns histograms of cells [B, C * num_bins, rows, columns] into images of the model's size [B, 3, H, W]."""
        return F.interpolate(orientation_colors(histograms, self.num_bins), size=self.img_size)

    def official_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns LocalMIM's weights without its gradient filters, which are computed here; but with their bias."""
        filters = {}
        others = {}
        for name, value in weights.items():
            if name.startswith("hog_enc."):
                filters[name] = value
            else:
                others[name] = value
        if self.hog_bias is not None:
            zero = torch.zeros(2)
            biases = [filters.get(f"hog_enc.{level}.conv.bias", zero) for level in range(len(SCALES))]
            others["hog_bias"] = torch.stack(biases)
        elif any(name.endswith(".bias") for name in filters):
            raise ValueError(
                "these LocalMIM weights have a bias in their gradient filters: build the model with hog_bias=True"
            )
        return others


class LocalDecoder(ProgressiveDecoder):
    """The decoder of one level: blocks, aggregation, norm, and a head that brings the tokens to the level's scale."""

    compiled_methods = ("embed_tokens",)

    def predict(self, x: Tensor) -> Tensor:
        """Predicts the cells of each token, in raster order, from features [B, n, C]. Returns [B, n, cells * C']."""
        return self.pred(self.norm(x)).flatten(2)

    def predict_groups(self, x: Tensor, order: TokenOrder) -> Tensor:
        """Predicts the cells of level 3, each of which is a group of 2 x 2 tokens, from features [B, n, C].

        Each group is the mean over its tokens that are present. Plain partial reconstruction lacks some of them. A mean
        with zeros in their place would shrink the features by the share of tokens that are present. Returns
        [B, N/4, C'].
        """
        x = self.norm(x)
        present = order.restore(torch.ones_like(x[..., :1]))
        share = pool(present, self.grid_size)  # of tokens that are present: at least 1/4, unless the group is empty
        x = pool(order.restore(x), self.grid_size) / share.clamp(min=0.25)
        return self.pred(x)


def pool(x: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Averages raster tokens [B, N, C] over groups of 2 x 2. Returns [B, N/4, C]."""
    rows, columns = grid_size
    grid = x.reshape(len(x), rows // 2, 2, columns // 2, 2, -1)
    return grid.mean(dim=(2, 4)).flatten(1, 2)


def make_head(scale: float, dim: int, out_dim: int) -> nn.Sequential:
    """Returns a head from tokens [B, n, dim] to cells [B, n, cells, out_dim].

    If a token has no more than one cell, the result is [B, n, out_dim]. The modules have the same indices as the
    release's convolutions on the grid. Those of stride 2 do not overlap, so the head works token by token, and only on
    the tokens that are needed.
    """
    if scale == 4:
        return nn.Sequential(
            Upsample(dim, dim // 2),
            layer_norm(dim // 2),
            nn.GELU(),
            Upsample(dim // 2, dim // 4),
            Pointwise(dim // 4, out_dim),
            RasterCells(),
        )
    if scale == 2:
        return nn.Sequential(Upsample(dim, dim // 2), Pointwise(dim // 2, out_dim))
    if scale == 1:
        return nn.Sequential(Pointwise(dim, out_dim))
    return nn.Sequential(nn.Identity(), Pointwise(dim, out_dim))  # index 0 is the pooling, done by LocalDecoder


class Upsample(nn.ConvTranspose2d):
    """A transposed convolution of 2 x 2 cells and stride 2, on tokens: [..., C] to [..., 4, C'] in raster order."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__(dim, out_dim, kernel_size=2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.permute(2, 3, 1, 0).flatten(0, 2)  # [4 * C', C]
        x = F.linear(x, weight, self.bias.repeat(4))
        return x.unflatten(-1, (4, -1))


class Pointwise(nn.Conv2d):
    """A 1 x 1 convolution, on tokens: [..., C] to [..., C']."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__(dim, out_dim, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.flatten(1), self.bias)


class RasterCells(nn.Module):
    """Puts the cells of cells that two upsamplings make, [B, n, 4, 4, C], in raster order, [B, n, 16, C]."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(3, (2, 2)).unflatten(2, (2, 2))  # [B, n, 2, 2, 2, 2, C]
        return x.transpose(3, 4).flatten(2, 5)


localmim_vit_micro_patch4 = partial(LocalMIMViT, **MICRO, decoder_embed_dim=64, decoder_num_heads=2, taps=(0, 1, 2, 3))
localmim_vit_mini_patch4 = partial(LocalMIMViT, **MINI, decoder_embed_dim=128, decoder_num_heads=4, taps=(1, 2, 3, 5))
localmim_vit_base_patch16 = partial(LocalMIMViT, **BASE)
localmim_vit_large_patch16 = partial(LocalMIMViT, **LARGE, num_bins=18, hog_bias=True)
