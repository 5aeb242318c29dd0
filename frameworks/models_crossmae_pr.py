"""CrossMAE (Fu et al., TMLR 2025: "Rethinking Patch Dependence for Masked Autoencoders") with PR-MIM.

The encoder is MAE's, without the final norm. The decoder has no self-attention. Each masked token is a query that reads
the encoder's tokens, but no other query. Each decoder block reads its own learned mixture of the encoder's levels.

`throw_ratio=0` is CrossMAE that predicts all masked tokens. `progressive=False` with `--sampling random` is CrossMAE
with a smaller prediction ratio, which is mask_ratio - throw_ratio. PR-MIM on CrossMAE is not published: the decoder
makes no features of visible tokens, so `visible_source` says what the convolution reads there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn import functional as F

from framework import DECODER_FLAGS, PixelFramework, decoder_heads, rename_prefixes
from models_vit import BASE, HUGE, LARGE, MICRO, MINI, NANO, SMALL, ViTEncoder, init_weights, layer_norm
from prmim import Method, SpatialAggregation, TokenOrder
from util.flag import Flag
from util.pos_embed import position_table

__all__ = [
    "CrossMaskedAutoencoderViT",
    "crossmae_vit_nano_patch4",
    "crossmae_vit_micro_patch4",
    "crossmae_vit_mini_patch4",
    "crossmae_vit_small_patch16",
    "crossmae_vit_base_patch16",
    "crossmae_vit_large_patch16",
    "crossmae_vit_huge_patch14",
]

# Prefixes of parameter names in CrossMAE's releases, and the ones here.
OFFICIAL_NAMES = {
    "mask_token": "decoder.mask_token",
    "decoder_pos_embed": "decoder.pos_embed",
    "wfm.linear.weight": "decoder.level_weights",
    "dec_norms.": "decoder.level_norms.",
    "decoder_blocks.": "decoder.blocks.",
    "decoder_norm.": "decoder.norm.",
    "decoder_pred.": "decoder.pred.",
}
VISIBLE_SOURCE = Flag(
    "visible_source",
    help="what the aggregation reads in visible cells. embed: a projection of the encoder's features; zeros: nothing; "
    "blocks: the features of visible tokens that run through the decoder, too (default: embed)",
    choices=("embed", "zeros", "blocks"),
)


class CrossMaskedAutoencoderViT(PixelFramework, ViTEncoder):
    """A ViT encoder, without final norm, that owns a cross-attention decoder. Without sizes it is a ViT-L.

    decoder_embed_dim, decoder_depth, decoder_num_heads: the decoder's blocks, by default with one head per 32 channels.
        `mlp_ratio` is the same as the encoder's.
    visible_source: see `CrossAggregation`. It has no effect without aggregation.
    img_size, ..., layer_scale: of the encoder, see `models_vit.ViTEncoder`. norm_pix_loss, ..., has_invalid: see
        `framework.Framework.use_method`. mask_ratio, ..., applies_to: see `prmim.Method`.
    """

    release = "CrossMAE"
    flags = (*DECODER_FLAGS, VISIBLE_SOURCE)
    compiled_methods = ("embed_visible", "forward_loss")

    def __init__(
        self,
        decoder_embed_dim: int = 512,
        decoder_depth: int = 12,
        decoder_num_heads: int | None = None,
        visible_source: str = "embed",
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 1024,
        depth: int = 24,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        layer_scale: bool = False,
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
        self.decoder_embed_dim = decoder_embed_dim
        self.decoder_depth = decoder_depth
        self.decoder_num_heads = decoder_heads(decoder_embed_dim, decoder_num_heads)
        self.norm = nn.Identity()
        self.visible_source = visible_source
        self.decoder = CrossAttentionDecoder(
            self.grid_size,
            self.embed_dim,
            num_levels=self.num_levels,
            out_dim=patch_size**2 * in_chans,
            make_aggregation=self.make_aggregation,
            decoder_embed_dim=decoder_embed_dim,
            decoder_depth=decoder_depth,
            decoder_num_heads=self.decoder_num_heads,
            mlp_ratio=mlp_ratio,
        )

    @property
    def num_levels(self) -> int:
        """The number k of levels that the decoder reads: the input of the blocks, and the output of each."""
        return 1 + len(self.blocks)

    def new_aggregation(self, dim: int) -> "CrossAggregation":
        return CrossAggregation(dim, self.embed_dim, self.num_levels, self.visible_source, self.method)

    def forward(self, imgs: Tensor, ids_shuffle: Tensor) -> dict[str, Tensor]:
        """Returns {"pixel": scalar loss} of normalised images [B, C, H, W] with ids_shuffle int64 [B, N]."""
        order = TokenOrder(ids_shuffle, self.counts)
        patches = self.token_pixels(imgs)  # [B, N, p*p*C]
        levels = self.forward_encoder(patches, order)  # [k, B, 1 + num_visible, D]
        pred = self.forward_decoder(levels, order)  # [B, num_supervised, p*p*C]
        return {"pixel": self.forward_loss(pred, imgs, patches, order)}

    def forward_encoder(self, patches: Tensor, order: TokenOrder) -> Tensor:
        """Encodes the visible ones of all patches [B, N, p*p*C]. Returns the levels [k, B, 1 + num_visible, D]."""
        x = self.prepend_cls_token(self.embed_visible(patches, order.ids_visible))
        levels = [x]
        for block in self.blocks:
            x = block(x)
            levels.append(x)
        return torch.stack(levels)

    def forward_decoder(self, levels: Tensor, order: TokenOrder, all_tokens: bool = False) -> Tensor:
        """Predicts the supervised tokens. The decoder predicts no visible ones: `all_tokens` adds zeros for them."""
        pred = self.decoder(levels, order)
        if all_tokens:
            return F.pad(pred, (0, 0, self.counts.num_visible, 0))
        return pred

    def official_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return rename_prefixes(weights, OFFICIAL_NAMES)


class CrossAttentionDecoder(nn.Module):
    """CrossMAE's decoder: mask tokens that read mixtures of the encoder's levels.

    embed_dim, num_levels: width and number k of the encoder's levels. Other sizes: see `prmim.ProgressiveDecoder`.
    `level_weights` [decoder_depth, k] are the weights of the mixtures. They are free, that is, not normalised. Their
    initialisation is that of the release, Xavier-uniform.
    """

    def __init__(
        self,
        grid_size: tuple[int, int],
        embed_dim: int,
        num_levels: int,
        out_dim: int,
        make_aggregation: Callable[[int], "CrossAggregation | None"],
        decoder_embed_dim: int,
        decoder_depth: int,
        decoder_num_heads: int,
        mlp_ratio: float,
    ) -> None:
        super().__init__()
        self.grid_size = grid_size
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_embed_dim))
        # The row of the class token is unused.
        self.pos_embed = position_table(decoder_embed_dim, grid_size, num_prefix=1, learned=False)
        self.level_weights = nn.Parameter(torch.empty(decoder_depth, num_levels))
        self.level_norms = nn.ModuleList()
        self.blocks = nn.ModuleList()
        for _ in range(decoder_depth):
            self.level_norms.append(layer_norm(embed_dim))
            self.blocks.append(CrossBlock(decoder_embed_dim, embed_dim, decoder_num_heads, mlp_ratio))
        self.norm = layer_norm(decoder_embed_dim)
        self.pred = nn.Linear(decoder_embed_dim, out_dim)
        init_weights(self)
        nn.init.xavier_uniform_(self.level_weights)
        nn.init.normal_(self.mask_token, std=0.02)
        self.aggregation = make_aggregation(decoder_embed_dim)

    def forward(self, levels: Tensor, order: TokenOrder) -> Tensor:
        """Predicts the supervised tokens [B, num_supervised, out_dim] from the levels [k, B, 1 + num_visible, D]."""
        return self.pred(self.norm(self.features(levels, order)))

    def features(self, levels: Tensor, order: TokenOrder) -> Tensor:
        """Turns the levels [k, B, 1 + num_visible, D] into features of the supervised tokens [B, num_supervised, C]."""
        num_visible = order.counts.num_visible
        positions = order.take_kept(self.pos_embed[:, 1:])
        queries = self.mask_token + positions[:, num_visible:]  # [B, num_retained, C]
        if self.aggregation is None:
            return self.decode(queries, levels)
        visible = self.aggregation.visible_features(levels)  # [B, num_visible, C]
        if self.aggregation.visible_source == "blocks":
            visible = visible + positions[:, :num_visible]
            kept = self.decode(torch.cat([visible, queries], dim=1), levels)
        else:
            kept = torch.cat([visible, self.decode(queries, levels)], dim=1)
        x = self.aggregation(kept, order, self.grid_size)
        return x[:, num_visible:]

    def decode(self, x: Tensor, levels: Tensor) -> Tensor:
        """Runs the blocks on queries [B, n, C], which read the levels [k, B, T, D]. Returns [B, n, C]."""
        mixtures = mix_levels(self.level_weights, levels).unbind()
        for block, norm, mixture in zip(self.blocks, self.level_norms, mixtures, strict=True):
            x = block(x, norm(mixture))
        return x


def mix_levels(weights: Tensor, levels: Tensor) -> Tensor:
    """Returns the mixtures [J, B, T, D] of the levels [k, B, T, D] by the weights [J, k].

    Autocast is off: levels are residual streams in float32, and half precision would round their differences.
    """
    device = levels.device.type
    if device == "meta":  # autocast has no meta device
        device = "cpu"
    with torch.autocast(device, enabled=False):
        return Mixture.apply(weights, levels)


class Mixture(torch.autograd.Function):
    """The product [J, k] x [k, B T D] of `mix_levels`, with a gradient of the weights that suits a GPU.

    As one product, J x k sums over B T D numbers, it would occupy few of a GPU's processors. So it is summed over each
    image first, which makes B products, and then over images.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, levels: Tensor) -> Tensor:
        """weights: [J, k]. levels: [k, B, T, D]. Returns [J, B, T, D]."""
        ctx.save_for_backward(weights, levels)
        mixtures = weights @ levels.flatten(1)
        return mixtures.view(-1, *levels.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of weights and levels."""
        weights, levels = ctx.saved_tensors
        grad_by_image = grad.flatten(2).transpose(0, 1)  # [B, J, T D]
        levels_by_image = levels.flatten(2).permute(1, 2, 0)  # [B, T D, k]
        grad_of_weights = grad_by_image @ levels_by_image  # [B, J, k]
        grad_of_levels = weights.T @ grad.flatten(1)
        return grad_of_weights.sum(0), grad_of_levels.view_as(levels)


class CrossBlock(nn.Module):
    """Pre-norm block: cross-attention from queries to a context, then an MLP (exact GELU), each with a residual.

    The context is not normalised here.
    """

    def __init__(self, dim: int, context_dim: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = layer_norm(dim)
        self.cross_attn = CrossAttention(dim, context_dim, num_heads)
        self.norm2 = layer_norm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Updates the queries `x` [B, n, C] from the context [B, T, D]. Returns [B, n, C]."""
        x = x + self.cross_attn(self.norm1(x), context)
        return x + self.mlp(self.norm2(x))


class CrossAttention(nn.Module):
    """Multi-head cross-attention on torch's fused kernel. Keys and values are made from a context of another width."""

    def __init__(self, dim: int, context_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(context_dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1))  # [B, n, heads, d]
        q = q.transpose(1, 2)  # [B, heads, n, d]
        kv = self.kv(context).unflatten(-1, (2, self.num_heads, -1))  # [B, T, 2, heads, d]
        k, v = (tensor.transpose(1, 2) for tensor in kv.unbind(2))  # each [B, heads, T, d]
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).flatten(2))


class CrossAggregation(SpatialAggregation):
    """A `SpatialAggregation` that also makes features of the visible cells, because the decoder makes none.

    visible_source: what the visible cells hold. With `embed` it is a learned mixture of the levels, which is normalised
        and projected to the decoder's width. The mixture is the last level at first. With `zeros` it is zero. With
        `blocks`, the projected mixture, with positions, runs through the decoder's blocks as further queries.
    """

    def __init__(
        self,
        dim: int,
        embed_dim: int,
        num_levels: int,
        visible_source: str,
        method: Method,
    ) -> None:
        super().__init__(dim, method.kernel_size, method.aggregation, method.applies_to)
        self.dim = dim
        self.visible_source = visible_source
        if visible_source != "zeros":
            self.visible_weights = nn.Parameter(torch.eye(num_levels)[-1].clone())
            self.visible_norm = layer_norm(embed_dim)
            self.visible_embed = nn.Linear(embed_dim, dim)
            init_weights(self.visible_embed)

    def visible_features(self, levels: Tensor) -> Tensor:
        """Returns features of the visible tokens [B, n, C] from the levels [k, B, 1 + n, D]. They hold no positions."""
        if self.visible_source == "zeros":
            _, B, length, _ = levels.shape
            return levels.new_zeros(B, length - 1, self.dim)
        mixtures = mix_levels(self.visible_weights.unsqueeze(0), levels)  # [1, B, 1 + n, D]
        return self.visible_embed(self.visible_norm(mixtures[0, :, 1:]))

    def filled_cells(self, order: TokenOrder) -> Tensor:
        """With `zeros`, only the retained tokens have features."""
        filled = super().filled_cells(order)
        if self.visible_source == "zeros":
            return filled & order.mask
        return filled


crossmae_vit_nano_patch4 = partial(CrossMaskedAutoencoderViT, **NANO, decoder_embed_dim=64, decoder_depth=2)
crossmae_vit_micro_patch4 = partial(CrossMaskedAutoencoderViT, **MICRO, decoder_embed_dim=64, decoder_depth=4)
crossmae_vit_mini_patch4 = partial(CrossMaskedAutoencoderViT, **MINI, decoder_embed_dim=128, decoder_depth=4)
crossmae_vit_small_patch16 = partial(CrossMaskedAutoencoderViT, **SMALL, decoder_embed_dim=256)
crossmae_vit_base_patch16 = partial(CrossMaskedAutoencoderViT, **BASE)
crossmae_vit_large_patch16 = partial(CrossMaskedAutoencoderViT, **LARGE)
crossmae_vit_huge_patch14 = partial(CrossMaskedAutoencoderViT, **HUGE)
