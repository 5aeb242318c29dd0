"""The ViT with relative positions, as SimMIM takes it from BEiT (Bao et al., ICLR 2022): encoder and fine-tune model.

Learned biases of the attention logits stand for positions; outputs of attention and MLP have a learned scale. State-dict
names are those of SimMIM's releases.
"""

import torch
from timm.layers import DropPath, Mlp
from torch import nn
from torch.nn import functional as F

from models_vit import BASE, MICRO, MINI, Classifier, PatchEncoder, drop_path_rates, layer_norm, split_heads

__all__ = [
    "RelativeVisionTransformer",
    "relative_vit_micro_patch4",
    "relative_vit_mini_patch4",
    "relative_vit_base_patch16",
]


def relative_position_index(grid_size):
    """Rows of the bias table for each (query, key) of [class token, N raster tokens]: int64 [1 + N, 1 + N].

    The table has (2 rows - 1) (2 columns - 1) offsets, query less key, then class -> token, token -> class, class -> class.
    """
    rows, columns = grid_size
    y, x = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    offsets = (2 * rows - 1) * (2 * columns - 1)
    index = torch.full((1 + rows * columns, 1 + rows * columns), offsets)  # class -> token
    index[1:, 1:] = (y[:, None] - y + rows - 1) * (2 * columns - 1) + (x[:, None] - x + columns - 1)
    index[1:, 0], index[0, 0] = offsets + 1, offsets + 2
    return index


class RelativePositionBias(nn.Module):
    """A learned bias of the attention logits for every offset between tokens, and three with the class token."""

    def __init__(self, grid_size, num_heads):
        super().__init__()
        rows = (2 * grid_size[0] - 1) * (2 * grid_size[1] - 1) + 3
        self.relative_position_bias_table = nn.Parameter(torch.zeros(rows, num_heads))
        self.register_buffer("relative_position_index", relative_position_index(grid_size), persistent=False)

    def forward(self, ids=None):
        """-> [1, heads, 1 + N, 1 + N]; of the tokens at raster `ids` [B, n] alone: [B, heads, 1 + n, 1 + n]."""
        index = self.relative_position_index
        if ids is None:
            index = index.unsqueeze(0)
        else:
            tokens = F.pad(ids + 1, (1, 0))  # [B, 1 + n], class token first
            index = index[tokens.unsqueeze(2), tokens.unsqueeze(1)]
        return lookup_bias(index, self.relative_position_bias_table)


def lookup_bias(index, table):
    """Rows [..., q, k] of a table [rows, heads] -> [..., heads, q, k], laid out as the GPU's fused attention wants it.

    In autocast's precision: cast here, once, and not by each block that uses it.
    """
    device = table.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # meta, where costs are counted, knows no autocast
        table = table.to(torch.get_autocast_dtype(device))
    return F.embedding(index, table).movedim(-1, -3).contiguous()


class RelativeAttention(nn.Module):
    """Attention whose logits take a bias; queries and values have one of their own, keys have none.

    With a grid_size the table is the block's own (fine-tuning), without it the bias comes from outside.
    """

    def __init__(self, dim, num_heads, grid_size=None):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.proj = nn.Linear(dim, dim)
        if grid_size is not None:
            own = RelativePositionBias(grid_size, num_heads)
            self.relative_position_bias_table = own.relative_position_bias_table
            self.register_buffer("relative_position_index", own.relative_position_index, persistent=False)

    def forward(self, x, bias=None):
        if bias is None:
            bias = RelativePositionBias.forward(self)
        qkv_bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        q, k, v = split_heads(F.linear(x, self.qkv.weight, qkv_bias), self.num_heads)  # each [B, heads, T, d]
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)).transpose(1, 2).flatten(2))


class RelativeBlock(nn.Module):
    """Pre-norm block with layer scale."""

    def __init__(self, dim, num_heads, mlp_ratio=4.0, drop_path=0.0, init_values=0.1, grid_size=None):
        super().__init__()
        self.norm1, self.norm2 = layer_norm(dim), layer_norm(dim)
        self.attn = RelativeAttention(dim, num_heads, grid_size)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.gamma_1, self.gamma_2 = (nn.Parameter(torch.full((dim,), init_values)) for _ in range(2))
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x, bias=None):
        x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x), bias))
        return x + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))


class RelativeViTEncoder(PatchEncoder):
    """SimMIM's ViT: no position table; one bias table that all blocks share (`shared_bias`), or one in each."""

    def __init__(
        self,
        img_size=224,
        patch_size=16,
        in_chans=3,
        embed_dim=768,
        depth=12,
        num_heads=12,
        mlp_ratio=4.0,
        drop_path_rate=0.0,
        init_values=0.1,
        shared_bias=True,
    ):
        super().__init__(img_size, patch_size, in_chans, embed_dim)
        grid_size = None if shared_bias else self.grid_size
        self.blocks = nn.ModuleList(
            RelativeBlock(embed_dim, num_heads, mlp_ratio, rate, init_values, grid_size)
            for rate in drop_path_rates(drop_path_rate, depth)
        )
        self.rel_pos_bias = RelativePositionBias(self.grid_size, num_heads) if shared_bias else None
        self.norm = layer_norm(embed_dim)
        # The release cuts the normal at one sigma in pre-training, and not in fine-tuning.
        init_weights_simmim(self, cut=0.02 if shared_bias else 2.0)

    def encode(self, tokens, ids=None):
        """Embedded tokens [B, n, D] at raster `ids` (all: None) -> [B, 1 + n, D], class token first, before the norm."""
        x = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], dim=1)
        bias = self.rel_pos_bias(ids) if self.rel_pos_bias is not None else None
        for block in self.blocks:
            x = block(x, bias)
        return x


def init_weights_simmim(encoder, cut):
    """SimMIM's initialisation: normal, sigma .02, cut at +-`cut`; each block's outputs are scaled down with its depth."""
    for m in encoder.modules():
        if isinstance(m, (nn.Linear, nn.Conv2d)):
            nn.init.trunc_normal_(m.weight, std=0.02, a=-cut, b=cut)
            if m.bias is not None:
                nn.init.zeros_(m.bias)
    nn.init.trunc_normal_(encoder.cls_token, std=0.02, a=-cut, b=cut)
    for number, block in enumerate(encoder.blocks, start=1):
        for linear in (block.attn.proj, block.mlp.fc2):
            linear.weight.data.div_((2 * number) ** 0.5)


class RelativeVisionTransformer(Classifier, RelativeViTEncoder):
    """The encoder with a head, as SimMIM fine-tunes it: a bias table in each block, mean of the patch tokens, `fc_norm`."""

    def __init__(self, num_classes=1000, global_pool="avg", probe=False, **kwargs):
        super().__init__(shared_bias=False, **kwargs)
        if global_pool != "avg" or probe:
            raise ValueError(f"this model pools its patch tokens (global_pool 'avg') and has no probe, got {global_pool!r}")
        self.global_pool = global_pool
        self.norm, self.fc_norm = nn.Identity(), layer_norm(self.embed_dim)
        self.head = nn.Linear(self.embed_dim, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02 * 0.001)
        nn.init.zeros_(self.head.bias)

    def forward_features(self, imgs):
        """Images [B, C, H, W], normalised -> token features [B, 1 + N, D], class token first."""
        return self.norm(self.encode(self.patch_embed(self.cut(imgs))))

    def no_weight_decay(self):
        """The bias tables decay, as in the release."""
        return {"cls_token"}


def relative_vit_micro_patch4(**kwargs):
    return RelativeVisionTransformer(**{**MICRO, **kwargs})


def relative_vit_mini_patch4(**kwargs):
    return RelativeVisionTransformer(**{**MINI, **kwargs})


def relative_vit_base_patch16(**kwargs):
    return RelativeVisionTransformer(**{**BASE, **kwargs})
