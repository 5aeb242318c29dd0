"""ViTDet's backbone (Li et al., ECCV 2022): a plain ViT with windowed and global blocks, and a simple feature pyramid.

Every block has decomposed relative positions, which begin at 0. So the network begins as the plain ViT that was
pre-trained, apart from the windows.
"""

import math

import torch
from timm.layers import DropPath, LayerNorm2d, LayerScale, Mlp
from timm.models.vision_transformer_sam import window_partition, window_unpartition
from torch import Tensor, nn
from torch.nn import functional as F

from models_vit import PatchEmbed, check_image_size, drop_path_rates, init_weights, layer_norm, patchify
from util.attention import split_heads
from util.pos_embed import resize_pos_embed, sincos_pos_embed

Grid = tuple[int, int]  # (rows, columns)


def relative_table(table: Tensor, side: int) -> Tensor:
    """Returns the embedding of each pair (query, key) of places on an axis, [side, side, d].

    table: [2 side - 1, d], whose row `side - 1` belongs to equal places, and the rows after it to a query after the
    key.
    """
    places = torch.arange(side, device=table.device)
    offsets = places[:, None] - places[None, :]
    return table[offsets + side - 1]


class DecomposedAttention(nn.Module):
    """Self-attention on a grid with relative positions, decomposed into one table for each axis.

    The logit of a query q and a key k is q.k / sqrt(d) + q.R_h[row offset] + q.R_w[column offset]. The two last terms
    become products, too: the query gets its products with both tables as further entries, and the key gets the one-hot
    codes of its row and its column. So torch's fused kernels apply, and no matrix of biases is stored.
    """

    def __init__(self, dim: int, num_heads: int, grid_size: Grid) -> None:
        super().__init__()
        rows, columns = grid_size
        head_dim = dim // num_heads
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * rows - 1, head_dim))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * columns - 1, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, rows, columns, C]."""
        rows, columns = x.shape[1:3]
        qkv = self.qkv(x).flatten(1, 2)
        q, k, v = split_heads(qkv, self.num_heads)  # each [B, heads, T, d]
        head_dim = q.shape[-1]
        logits = self.position_logits(q, rows, columns)
        codes = position_codes(k, rows, columns)
        queries = torch.cat([q * head_dim**-0.5, logits], dim=-1)
        keys = torch.cat([k, codes], dim=-1)
        width = 8 * math.ceil(keys.shape[-1] / 8)  # flash attention needs one width, a multiple of 8
        out = F.scaled_dot_product_attention(
            pad_width(queries, width),
            pad_width(keys, width),
            pad_width(v, width),
            scale=1.0,
        )
        out = out[..., :head_dim].transpose(1, 2).flatten(2)
        return self.proj(out).unflatten(1, (rows, columns))

    def position_logits(self, q: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the products of queries [B, heads, T, d] with both tables, [B, heads, T, rows + columns]."""
        grid = q.unflatten(2, (rows, columns))
        row_table = relative_table(self.rel_pos_h, rows).to(q.dtype)
        column_table = relative_table(self.rel_pos_w, columns).to(q.dtype)
        down = torch.einsum("bnhwd,hkd->bnhwk", grid, row_table)
        across = torch.einsum("bnhwd,wkd->bnhwk", grid, column_table)
        logits = torch.cat([down, across], dim=-1)
        return logits.flatten(2, 3)


def position_codes(k: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the one-hot codes of the row and the column of each key, [B, heads, T, rows + columns]."""
    row_codes = torch.eye(rows, device=k.device)
    row_codes = row_codes.repeat_interleave(columns, dim=0)
    column_codes = torch.eye(columns, device=k.device)
    column_codes = column_codes.repeat(rows, 1)
    codes = torch.cat([row_codes, column_codes], dim=1).to(k.dtype)
    batch_size, num_heads = k.shape[:2]
    return codes.expand(batch_size, num_heads, -1, -1)


def pad_width(x: Tensor, width: int) -> Tensor:
    """Pads the last axis with zeros."""
    return F.pad(x, (0, width - x.shape[-1]))


class MapBlock(nn.Module):
    """Pre-norm Transformer block on maps [B, H, W, C]. window_size: side of its windows; 0: attention is global.

    Padded places of a window are zeros after the norm, and they are keys, as in detectron2.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        drop_path: float,
        grid_size: Grid,
        window_size: int = 0,
        layer_scale: bool = False,
    ) -> None:
        super().__init__()
        self.window_size = window_size
        if window_size:
            grid_size = (window_size, window_size)
        self.norm1 = layer_norm(dim)
        self.attn = DecomposedAttention(dim, num_heads, grid_size)
        self.norm2 = layer_norm(dim)
        self.mlp = Mlp(dim, 4 * dim)
        self.ls1 = LayerScale(dim, init_values=1.0) if layer_scale else nn.Identity()
        self.ls2 = LayerScale(dim, init_values=1.0) if layer_scale else nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        if self.window_size:
            windows, padded_size = window_partition(y, self.window_size)
            y = window_unpartition(self.attn(windows), self.window_size, x.shape[1:3], padded_size)
        else:
            y = self.attn(y)
        x = x + self.drop_path(self.ls1(y))
        y = self.mlp(self.norm2(x))
        return x + self.drop_path(self.ls2(y))


class ViTDet(nn.Module):
    """A ViT without class token. Every fourth part of the depth ends with a global block; the others have windows.

    img_size: side of an image in pixels. pretrain_size: side of the images of pre-training; the position table has that
    grid, and is interpolated to the image's in each forward pass. Other arguments: see `models_vit.ViTEncoder`.
    """

    new_keys = (".rel_pos_h", ".rel_pos_w")
    unused_keys = ("cls_token", "norm.")

    def __init__(
        self,
        img_size: int = 1024,
        pretrain_size: int = 224,
        window_size: int = 14,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        drop_path_rate: float = 0.0,
        layer_scale: bool = False,
    ) -> None:
        super().__init__()
        if img_size % (4 * patch_size):
            raise ValueError(f"--input_size {img_size} must be a multiple of {4 * patch_size}, 4 patches")
        self.img_size = (img_size, img_size)
        self.patch_size = patch_size
        self.in_chans = in_chans
        self.embed_dim = embed_dim
        self.layer_scale = layer_scale
        self.window_size = window_size
        map_side = img_size // patch_size
        table_side = pretrain_size // patch_size
        self.map_size = (map_side, map_side)
        self.grid_size = (table_side, table_side)  # of the position table
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        table = sincos_pos_embed(embed_dim, self.grid_size, num_prefix=1).float()
        self.pos_embed = nn.Parameter(table.unsqueeze(0))  # [1, 1 + N, D]; the class token's row is not used
        self.global_blocks = tuple(depth * quarter // 4 - 1 for quarter in (1, 2, 3, 4))
        self.blocks = nn.ModuleList()
        for i, rate in enumerate(drop_path_rates(drop_path_rate, depth)):
            side = window_size
            if i in self.global_blocks:
                side = 0
            block = MapBlock(embed_dim, num_heads, rate, self.map_size, side, layer_scale)
            self.blocks.append(block)
        self.norm: nn.Module = nn.Identity()  # of `forward_features`
        init_weights(self)

    def adapt_weights(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns an encoder's weights with one row for class tokens in the position table, however many it has."""
        if "cls_token" not in tensors or "pos_embed" not in tensors:
            return tensors
        num_class_rows = tensors["cls_token"].shape[1]
        table = tensors["pos_embed"][:, num_class_rows - 1 :]
        return {**tensors, "pos_embed": table}

    def forward(self, imgs: Tensor) -> Tensor:
        return self.encode(imgs)

    def encode(self, imgs: Tensor) -> Tensor:
        """Returns the last block's map [B, D, rows, columns] of normalised images [B, C, H, W], without a norm."""
        check_image_size(imgs, self.img_size)
        x = self.patch_embed(patchify(imgs, self.patch_size))
        x = x + self.patch_positions
        x = x.unflatten(1, self.map_size)
        for block in self.blocks:
            x = block(x)
        return x.permute(0, 3, 1, 2).contiguous()

    @property
    def patch_positions(self) -> Tensor:
        """The positions of the patches of an image [1, N, D]."""
        table = resize_pos_embed(self.pos_embed, self.grid_size, self.map_size)
        return table[:, 1:]

    def forward_features(self, imgs: Tensor) -> Tensor:
        """Returns the tokens of the map in raster order, [B, N, D], after the norm."""
        tokens = self.encode(imgs).flatten(2).transpose(1, 2)
        return self.norm(tokens)


def upsample_and_halve(width: int) -> nn.ConvTranspose2d:
    """Returns the layer that doubles the resolution and halves the channels."""
    return nn.ConvTranspose2d(width, width // 2, kernel_size=2, stride=2)


def lateral(width: int, channels: int) -> list[nn.Module]:
    """Returns the last layers of a level of the pyramid."""
    return [
        nn.Conv2d(width, channels, kernel_size=1, bias=False),
        LayerNorm2d(channels),
        nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
        LayerNorm2d(channels),
    ]


class SimpleFeaturePyramid(nn.Module):
    """Makes maps of 4, 2, 1, 1/2 and 1/4 times the resolution of one map of a ViT, each with `channels` channels."""

    def __init__(self, dim: int, channels: int = 256) -> None:
        super().__init__()
        quadruple = [
            upsample_and_halve(dim),
            LayerNorm2d(dim // 2),
            nn.GELU(),
            upsample_and_halve(dim // 2),
        ]
        twice = upsample_and_halve(dim)
        half = nn.MaxPool2d(kernel_size=2, stride=2)
        self.stages = nn.ModuleList(
            [
                nn.Sequential(*quadruple, *lateral(dim // 4, channels)),
                nn.Sequential(twice, *lateral(dim // 2, channels)),
                nn.Sequential(*lateral(dim, channels)),
                nn.Sequential(half, *lateral(dim, channels)),
            ]
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """Returns five float32 maps, the finest first, of a map [B, D, rows, columns]."""
        maps = [stage(x).float() for stage in self.stages]  # in bfloat16 anchors would be several pixels off
        coarsest = F.max_pool2d(maps[-1], kernel_size=1, stride=2)
        return [*maps, coarsest]
