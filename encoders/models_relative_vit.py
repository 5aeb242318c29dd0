"""The ViT with relative positions that SimMIM takes from BEiT (Bao et al., ICLR 2022): encoder and fine-tune model.

Positions enter as learned biases of the attention logits. The outputs of attention and MLP have learned scales.
State-dict names are those of SimMIM's releases.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encoders.rel_pos import grid_coords, lookup_bias, relative_offset_index
from models_vit import (
    BASE,
    MICRO,
    MINI,
    Classifier,
    ViTEncoder,
    drop_path_rates,
    layer_norm,
    make_drop_path,
)
from util.attention import biased_attention, split_heads

__all__ = [
    "RelativeVisionTransformer",
    "relative_vit_micro_patch4",
    "relative_vit_mini_patch4",
    "relative_vit_base_patch16",
]


def relative_position_index(grid_size: tuple[int, int], num_cls_tokens: int = 1) -> Tensor:
    """Returns the row of the bias table for each (query, key) of [P class tokens, N raster tokens], int64 [P + N]^2.

    The table has a row for each of the (2 rows - 1) (2 columns - 1) offsets, which are query less key. Three rows
    follow, for (query, key) = (class, token), (token, class) and (class, class).
    """
    rows, columns = grid_size
    num_offsets = (2 * rows - 1) * (2 * columns - 1)
    P = num_cls_tokens
    length = P + rows * columns
    index = torch.empty(length, length, dtype=torch.int64)
    index[P:, P:] = relative_offset_index(grid_coords(rows, columns), grid_size)
    index[:P, P:] = num_offsets
    index[P:, :P] = num_offsets + 1
    index[:P, :P] = num_offsets + 2
    return index


def add_bias_table(module: nn.Module, grid_size: tuple[int, int], num_heads: int, num_cls_tokens: int = 1) -> None:
    """Adds a table of biases, which begins at 0, and its index, under the names of SimMIM's releases."""
    rows, columns = grid_size
    num_offsets = (2 * rows - 1) * (2 * columns - 1)
    module.relative_position_bias_table = nn.Parameter(torch.zeros(num_offsets + 3, num_heads))
    index = relative_position_index(grid_size, num_cls_tokens)
    module.register_buffer("relative_position_index", index, persistent=False)


class RelativePositionBias(nn.Module):
    """Learned biases of the attention logits: one for each offset between two tokens, and three for the class token."""

    def __init__(self, grid_size: tuple[int, int], num_heads: int) -> None:
        super().__init__()
        add_bias_table(self, grid_size, num_heads)

    def forward(self, ids: Tensor | None = None) -> Tensor:
        """Returns the biases of all tokens [1, heads, 1 + N, 1 + N].

        With raster `ids` [B, n] it returns those of these tokens only, [B, heads, 1 + n, 1 + n].
        """
        index = self.relative_position_index
        if ids is None:
            index = index.unsqueeze(0)
        else:
            tokens = F.pad(ids + 1, (1, 0))  # [B, 1 + n], class token first
            index = index[tokens.unsqueeze(2), tokens.unsqueeze(1)]
        return lookup_bias(index, self.relative_position_bias_table)


class RelativeAttention(nn.Module):
    """Attention with biased logits. The projections of queries and values have a bias, that of keys has none.

    dim, num_heads: width, and number of heads.
    grid_size: (rows, columns) of the tokens if this layer has a bias table of its own, as in fine-tuning. Without it
        the caller passes the bias, or None for logits without bias. num_cls_tokens: before them.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: tuple[int, int] | None = None,
        num_cls_tokens: int = 1,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.proj = nn.Linear(dim, dim)
        if grid_size is not None:
            add_bias_table(self, grid_size, num_heads, num_cls_tokens)

    def project(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns queries, keys and values of x [B, T, C], each [B, heads, T, d], and the bias of the logits."""
        k_bias = torch.zeros_like(self.q_bias)
        qkv_bias = torch.cat([self.q_bias, k_bias, self.v_bias])
        qkv = F.linear(x, self.qkv.weight, qkv_bias)
        q, k, v = split_heads(qkv, self.num_heads)
        if bias is None and hasattr(self, "relative_position_bias_table"):
            bias = lookup_bias(self.relative_position_index.unsqueeze(0), self.relative_position_bias_table)
        if bias is not None:
            bias = bias.to(q.dtype)
        return q, k, v, bias

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v, bias = self.project(x, bias)
        if bias is None:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = biased_attention(q, k, v, bias)
        return self.proj(out.transpose(1, 2).flatten(2))


class RelativeBlock(nn.Module):
    """Pre-norm block with layer scales that begin at `init_values`. Other arguments: see `RelativeAttention`."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        init_values: float = 0.1,
        grid_size: tuple[int, int] | None = None,
        num_cls_tokens: int = 1,
    ) -> None:
        super().__init__()
        from timm.layers import Mlp  # here, because it takes seconds

        self.norm1 = layer_norm(dim)
        self.norm2 = layer_norm(dim)
        self.attn = RelativeAttention(dim, num_heads, grid_size, num_cls_tokens)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.gamma_1 = nn.Parameter(torch.full((dim,), init_values))
        self.gamma_2 = nn.Parameter(torch.full((dim,), init_values))
        self.drop_path = make_drop_path(drop_path)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x), bias))
        return x + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))


class SimMIMEncoder(ViTEncoder):
    """SimMIM's ViT: blocks with layer scales, and positions as biases, or as a learned table if `has_table`.

    img_size, ..., drop_path_rate: see `models_vit.ViTEncoder`.
    init_values: initial value of the layer scales.
    pretraining: let all blocks share one bias table, where fine-tuning has one for each; and truncate the normal
        distribution of the initial weights at one sigma, as the release does in pre-training alone.
    """

    has_table = False

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        init_values: float = 0.1,
        pretraining: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.add_embedding(img_size, patch_size, in_chans, embed_dim, mlp_ratio)
        grid_of_blocks = None
        if self.has_table:
            self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.num_tokens, embed_dim))  # class token first
        elif not pretraining:
            grid_of_blocks = self.grid_size
        self.blocks = nn.ModuleList()
        for drop_path in drop_path_rates(drop_path_rate, depth):
            block = RelativeBlock(embed_dim, num_heads, mlp_ratio, drop_path, init_values, grid_of_blocks)
            self.blocks.append(block)
        self.rel_pos_bias: RelativePositionBias | None = None
        if pretraining and not self.has_table:
            self.rel_pos_bias = RelativePositionBias(self.grid_size, num_heads)
        self.norm = layer_norm(embed_dim)
        init_weights_simmim(self, limit=0.02 if pretraining else 2.0)


class RelativeViTEncoder(SimMIMEncoder):
    """SimMIM's ViT, which has tables of relative-position biases instead of a position table."""

    def input_parameters(self) -> list[nn.Parameter]:
        if self.rel_pos_bias is not None:
            raise ValueError(
                "--trainable_blocks and --decoder_warmup_epochs do not hold SimMIM's encoder, whose blocks share a "
                "table of biases"
            )
        return super().input_parameters()

    def relative_positions(self, ids: Tensor | None = None, size: Sequence[int] | None = None) -> Tensor | None:
        """Returns the biases of the logits that all blocks share, if they share them."""
        if self.rel_pos_bias is None:
            return None
        return self.rel_pos_bias(ids)


def init_weights_simmim(encoder: ViTEncoder, limit: float) -> None:
    """Initialises an encoder as SimMIM does: normal with sigma 0.02, truncated at +-`limit`, and zero biases.

    The output layers of block k (from 1) are then divided by sqrt(2 k).
    """
    for module in encoder.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.trunc_normal_(module.weight, std=0.02, a=-limit, b=limit)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    nn.init.trunc_normal_(encoder.cls_token, std=0.02, a=-limit, b=limit)
    for number, block in enumerate(encoder.blocks, start=1):
        scale = (2 * number) ** 0.5
        block.attn.proj.weight.data.div_(scale)
        block.mlp.fc2.weight.data.div_(scale)
    if encoder.pos_embed is not None:
        nn.init.trunc_normal_(encoder.pos_embed, std=0.02, a=-limit, b=limit)


class SimMIMClassifier(Classifier):
    """A classification head as SimMIM fine-tunes it.

    num_classes, global_pool, probe: see `models_vit.Classifier`. kwargs: arguments of `SimMIMEncoder`.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        global_pool: str = "avg",
        probe: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.add_head(num_classes, global_pool, probe, std=0.02 * 0.001)


class RelativeVisionTransformer(SimMIMClassifier, RelativeViTEncoder):
    """The encoder with a classification head: a bias table per block, mean pooling, `fc_norm`."""

    pools = ("avg",)

    def no_weight_decay(self) -> set[str]:
        """Returns the parameters without weight decay, beside the 1-D ones. As in the release, bias tables decay."""
        return {"cls_token"}


relative_vit_micro_patch4 = partial(RelativeVisionTransformer, **MICRO)
relative_vit_mini_patch4 = partial(RelativeVisionTransformer, **MINI)
relative_vit_base_patch16 = partial(RelativeVisionTransformer, **BASE)
