"""ViTDet's backbone (Li et al., ECCV 2022): a plain ViT with windowed and global blocks, and a simple feature pyramid.

Every block has decomposed relative positions, which begin at 0. So the network begins as the plain ViT that was
pre-trained, apart from the windows.
"""

import torch
from timm.layers import DropPath, Mlp
from torch import nn
from torch.nn import functional as F

from models_vit import PatchEmbed, check_image_size, drop_path_rates, init_weights, layer_norm, patchify, split_heads
from util.pos_embed import resize_pos_embed, sincos_pos_embed

Grid = tuple[int, int]  # (rows, columns)


def relative_table(table: torch.Tensor, side: int) -> torch.Tensor:
    """Returns the embedding of each pair (query, key) of places on an axis, [side, side, d].

    table: [2 side - 1, d], whose row `side - 1` belongs to equal places, and the rows after it to a query after the
    key.
    """
    places = torch.arange(side, device=table.device)
    return table[places[:, None] - places[None, :] + side - 1]


class DecomposedAttention(nn.Module):
    """Self-attention on a grid with relative positions, decomposed into one table for each axis.

    The logit of a query q and a key k is q.k / sqrt(d) + q.R_h[row offset] + q.R_w[column offset]. The two last terms
    become products, too: the query gets its products with both tables as further entries, and the key gets the one-hot
    codes of its row and its column. So torch's fused kernels apply, and no matrix of biases is stored.
    """

    def __init__(self, dim: int, num_heads: int, grid_size: Grid) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"width {dim} does not divide into {num_heads} heads")
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        rows, columns = grid_size
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * rows - 1, dim // num_heads))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * columns - 1, dim // num_heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, rows, columns, C]."""
        rows, columns = x.shape[1:3]
        q, k, v = split_heads(self.qkv(x).flatten(1, 2), self.num_heads)  # each [B, heads, T, d]
        queries = torch.cat([q * q.shape[-1] ** -0.5, self.position_logits(q, rows, columns)], dim=-1)
        keys = torch.cat([k, position_codes(k, rows, columns)], dim=-1)
        width = queries.shape[-1] + -queries.shape[-1] % 8  # flash attention needs one width, a multiple of 8
        queries = pad_width(queries, width)
        keys = pad_width(keys, width)
        out = F.scaled_dot_product_attention(queries, keys, pad_width(v, width), scale=1.0)
        out = out[..., : v.shape[-1]].transpose(1, 2).flatten(2)
        return self.proj(out).unflatten(1, (rows, columns))

    def position_logits(self, q: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Returns the products of queries [B, heads, T, d] with both tables, [B, heads, T, rows + columns]."""
        grid = q.unflatten(2, (rows, columns))
        down = torch.einsum("bnhwd,hkd->bnhwk", grid, relative_table(self.rel_pos_h, rows).to(q.dtype))
        across = torch.einsum("bnhwd,wkd->bnhwk", grid, relative_table(self.rel_pos_w, columns).to(q.dtype))
        return torch.cat([down, across], dim=-1).flatten(2, 3)


def position_codes(k: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Returns the one-hot codes of the row and the column of each key, [B, heads, T, rows + columns]."""
    row_codes = torch.eye(rows, dtype=k.dtype, device=k.device).repeat_interleave(columns, dim=0)
    column_codes = torch.eye(columns, dtype=k.dtype, device=k.device).repeat(rows, 1)
    return torch.cat([row_codes, column_codes], dim=1).expand(*k.shape[:2], -1, -1)


def pad_width(x: torch.Tensor, width: int) -> torch.Tensor:
    """Pads the last axis with zeros."""
    return F.pad(x, (0, width - x.shape[-1]))


def window_partition(x: torch.Tensor, side: int) -> tuple[torch.Tensor, Grid]:
    """Cuts maps [B, H, W, C] into windows [B * n, side, side, C], with zeros added at the bottom and the right.

    Returns (windows, (height, width) with the padding).
    """
    batch, height, width, channels = x.shape
    x = F.pad(x, (0, 0, 0, -width % side, 0, -height % side))
    height, width = x.shape[1:3]
    x = x.view(batch, height // side, side, width // side, side, channels)
    return x.transpose(2, 3).reshape(-1, side, side, channels), (height, width)


def window_unpartition(windows: torch.Tensor, padded: Grid, size: Grid) -> torch.Tensor:
    """Joins windows [B * n, side, side, C] into maps [B, *size, C], the inverse of `window_partition`."""
    height, width = padded
    side, _, channels = windows.shape[1:]
    x = windows.view(-1, height // side, width // side, side, side, channels)
    x = x.transpose(2, 3).reshape(-1, height, width, channels)
    return x[:, : size[0], : size[1]]


class DetBlock(nn.Module):
    """Pre-norm Transformer block on maps [B, H, W, C]. window_size: side of its windows; 0: attention is global.

    Padded places of a window are zeros after the norm, and they are keys, as in detectron2.
    """

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float, drop_path: float, grid_size: Grid, window_size: int = 0
    ) -> None:
        super().__init__()
        self.window_size = window_size
        if window_size:
            grid_size = (window_size, window_size)
        self.norm1 = layer_norm(dim)
        self.attn = DecomposedAttention(dim, num_heads, grid_size)
        self.norm2 = layer_norm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        if self.window_size:
            windows, padded = window_partition(y, self.window_size)
            y = window_unpartition(self.attn(windows), padded, tuple(x.shape[1:3]))
        else:
            y = self.attn(y)
        x = x + self.drop_path(y)
        return x + self.drop_path(self.mlp(self.norm2(x)))


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
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_multiple("input_size", img_size, 4, patch_size)
        check_multiple("pretrain_size", pretrain_size, 1, patch_size)
        self.img_size = (img_size, img_size)
        self.patch_size = patch_size
        self.embed_dim = embed_dim
        self.depth = depth
        self.map_size: Grid = (img_size // patch_size, img_size // patch_size)
        self.grid_size: Grid = (pretrain_size // patch_size, pretrain_size // patch_size)  # of the position table
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        table = sincos_pos_embed(embed_dim, self.grid_size, num_prefix=1).float()
        self.pos_embed = nn.Parameter(table.unsqueeze(0))  # [1, 1 + N, D]; the class token's row is not used
        self.global_blocks = tuple(depth * quarter // 4 - 1 for quarter in (1, 2, 3, 4))
        self.blocks = nn.ModuleList()
        for i, rate in enumerate(drop_path_rates(drop_path_rate, depth)):
            side = window_size
            if i in self.global_blocks:
                side = 0
            self.blocks.append(DetBlock(embed_dim, num_heads, mlp_ratio, rate, self.map_size, side))
        init_weights(self)

    def adapt_weights(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns an encoder's weights with one row for class tokens in the position table, however many it has."""
        if "cls_token" not in tensors or "pos_embed" not in tensors:
            return tensors
        num_class_rows = tensors["cls_token"].shape[1]
        return {**tensors, "pos_embed": tensors["pos_embed"][:, num_class_rows - 1 :]}

    def forward(self, imgs: torch.Tensor) -> torch.Tensor:
        """Returns the last block's map [B, D, rows, columns] of normalised images [B, C, H, W], without a norm."""
        check_image_size(imgs, self.img_size)
        positions = resize_pos_embed(self.pos_embed, self.grid_size, self.map_size)[:, 1:]
        x = (self.patch_embed(patchify(imgs, self.patch_size)) + positions).unflatten(1, self.map_size)
        for block in self.blocks:
            x = block(x)
        return x.permute(0, 3, 1, 2).contiguous()


def check_multiple(name: str, size: int, num_patches: int, patch_size: int) -> None:
    """ValueError unless `size`, the value of the flag `name`, is a multiple of this number of patches."""
    step = num_patches * patch_size
    if size < step or size % step:
        raise ValueError(f"--{name} {size} must be a multiple of {step}, with patches of {patch_size} pixels")


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of maps [B, C, H, W], at each place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, eps=1e-6)
        return x.permute(0, 3, 1, 2)


def double(width: int) -> nn.ConvTranspose2d:
    """Returns the layer that doubles the resolution and halves the channels."""
    return nn.ConvTranspose2d(width, width // 2, kernel_size=2, stride=2)


def lateral(width: int, channels: int) -> list[nn.Module]:
    """Returns the last layers of a level of the pyramid."""
    return [
        nn.Conv2d(width, channels, kernel_size=1, bias=False),
        ChannelNorm(channels),
        nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
        ChannelNorm(channels),
    ]


class SimpleFeaturePyramid(nn.Module):
    """Makes maps of 4, 2, 1, 1/2 and 1/4 times the resolution of one map of a ViT, each with `channels` channels."""

    def __init__(self, dim: int, channels: int = 256) -> None:
        super().__init__()
        quadruple = [double(dim), ChannelNorm(dim // 2), nn.GELU(), double(dim // 2)]
        twice = [double(dim)]
        half = [nn.MaxPool2d(kernel_size=2, stride=2)]
        self.stages = nn.ModuleList()
        for resize, width in ((quadruple, dim // 4), (twice, dim // 2), ([], dim), (half, dim)):
            self.stages.append(nn.Sequential(*resize, *lateral(width, channels)))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns five maps, the finest first, of a map [B, D, rows, columns]."""
        maps = [stage(x) for stage in self.stages]
        return [*maps, F.max_pool2d(maps[-1], kernel_size=1, stride=2)]
