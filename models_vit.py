"""The plain Vision Transformer (Dosovitskiy et al., ICLR 2021) as MAE uses it: the encoder that every pre-training
framework inherits, and the model that is fine-tuned.

State-dict names are those of MAE's releases and of timm's `VisionTransformer`. Features in three lines:

    model = vit_base_patch16(global_pool="token")
    print(util.checkpoint.load_encoder(model, "checkpoint.pth"))
    tokens = model.eval().forward_features(imgs)  # [B, 1 + N, 768], class token first; imgs ImageNet-normalised
"""

import math

import torch
from timm.layers import DropPath, Mlp
from torch import nn
from torch.nn import functional as F

from util.pos_embed import sincos_pos_embed

__all__ = [
    "VisionTransformer",
    "RelativeVisionTransformer",
    "vit_micro_patch4",
    "vit_mini_patch4",
    "vit_tiny_patch16",
    "vit_small_patch16",
    "vit_base_patch16",
    "vit_large_patch16",
    "vit_huge_patch14",
    "relative_vit_micro_patch4",
    "relative_vit_mini_patch4",
    "relative_vit_base_patch16",
]

# Encoder sizes by their usual names. "Micro" and "mini" are ours, for 32-px images: 64 tokens of 4 px.
MICRO = dict(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3)
MINI = dict(img_size=32, patch_size=4, embed_dim=192, depth=6, num_heads=3)
TINY = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
SMALL = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
BASE = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
LARGE = dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16)
HUGE = dict(patch_size=14, embed_dim=1280, depth=32, num_heads=16)


_FACTORIES = dict(vit_micro_patch4=MICRO, vit_mini_patch4=MINI, vit_tiny_patch16=TINY, vit_small_patch16=SMALL)
_FACTORIES |= dict(vit_base_patch16=BASE, vit_large_patch16=LARGE, vit_huge_patch14=HUGE)


def layer_norm(dim):
    return nn.LayerNorm(dim, eps=1e-6)


def init_weights(module):
    """MAE's initialisation of `module` and all inside it: Linear Xavier-uniform (qkv as one matrix) with zero bias,
    patch embedding Xavier-uniform on its flattened view; everything else keeps the framework's default."""
    for m in module.modules():
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            if m.bias is not None:
                nn.init.zeros_(m.bias)
        elif isinstance(m, PatchEmbed):
            nn.init.xavier_uniform_(m.proj.weight.view(m.proj.weight.shape[0], -1))


def patchify(imgs, patch_size):
    """[B, C, H, W] -> [B, N, p*p*C]: patches in raster order, values ordered (row, column, channel), channel fastest."""
    B, C, H, W = imgs.shape
    rows, columns = H // patch_size, W // patch_size
    x = imgs.reshape(B, C, rows, patch_size, columns, patch_size)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(B, rows * columns, patch_size**2 * C)


def unpatchify(patches, patch_size, grid_size):
    """Inverse of `patchify`: [B, N, p*p*C] -> [B, C, H, W]."""
    rows, columns = grid_size
    x = patches.reshape(len(patches), rows, columns, patch_size, patch_size, -1)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), -1, rows * patch_size, columns * patch_size)


class PatchEmbed(nn.Module):
    """The patch convolution as a linear layer on cut patches, so that it can run on the visible ones alone.

    The parameters are the convolution's (`proj.weight` [D, C, p, p], `proj.bias` [D]): checkpoints fit both ways.
    """

    def __init__(self, patch_size, in_chans, embed_dim):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)

    def forward(self, patches):
        """Patches [B, n, p*p*C] as `patchify` cuts them -> [B, n, D]."""
        return F.linear(patches, self.proj.weight.permute(0, 2, 3, 1).flatten(1), self.proj.bias)


class Attention(nn.Module):
    """Multi-head self-attention on torch's fused kernel."""

    def __init__(self, dim, num_heads):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"width {dim} does not divide into {num_heads} heads")
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # [B, T, 3, heads, d]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, T, d]
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm Transformer block: attention and MLP (exact GELU), each with a residual."""

    def __init__(self, dim, num_heads, mlp_ratio=4.0, drop_path=0.0):
        super().__init__()
        self.norm1 = layer_norm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = layer_norm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchEncoder(nn.Module):
    """What every plain-ViT encoder begins with: the images' size, their patches, a class token.

    img_size: pixels, an integer or (height, width), a multiple of patch_size.
    """

    def __init__(self, img_size, patch_size, in_chans, embed_dim):
        super().__init__()
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        if patch_size < 1 or height < 1 or width < 1 or height % patch_size or width % patch_size:
            near = [max(1, round(side / patch_size)) * patch_size if patch_size > 0 else side for side in (height, width)]
            raise ValueError(
                f"img_size {height} x {width} is not divisible by patch_size {patch_size}; "
                f"the nearest size that is: {near[0]} x {near[1]}"
            )
        self.img_size, self.patch_size, self.embed_dim = (height, width), patch_size, embed_dim
        self.grid_size = (height // patch_size, width // patch_size)
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))

    @property
    def num_tokens(self):
        return math.prod(self.grid_size)

    def no_weight_decay(self):
        """Parameters that weight decay leaves alone in pre-training, beside the 1-D ones: none in MAE."""
        return set()

    def cut(self, imgs):
        """imgs [B, C, H, W] of the model's size -> patches [B, N, p*p*C]."""
        if tuple(imgs.shape[-2:]) != self.img_size:
            raise ValueError(f"the model is built for images of {self.img_size} px, got {tuple(imgs.shape[-2:])}")
        return patchify(imgs, self.patch_size)


def drop_path_rates(last, depth):
    """The rates of `depth` blocks, from 0 to `last`."""
    return [last * i / max(1, depth - 1) for i in range(depth)]


class ViTEncoder(PatchEncoder):
    """Patch embedding, class token, sine-cosine positions, blocks and final norm. The position table is frozen."""

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
    ):
        super().__init__(img_size, patch_size, in_chans, embed_dim)
        table = sincos_pos_embed(embed_dim, self.grid_size, cls_token=True).float()
        self.pos_embed = nn.Parameter(table.unsqueeze(0), requires_grad=False)  # [1, 1 + N, D], class row zero
        rates = drop_path_rates(drop_path_rate, depth)
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, mlp_ratio, rate) for rate in rates)
        self.norm = layer_norm(embed_dim)
        init_weights(self)
        nn.init.normal_(self.cls_token, std=0.02)

    def encode(self, tokens):
        """Embedded tokens with positions [B, n, D] -> [B, 1 + n, D] after the blocks, class token first, before the norm."""
        x = self.prepend_cls_token(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def prepend_cls_token(self, tokens):
        """[B, n, D] -> [B, 1 + n, D]"""
        cls_token = (self.cls_token + self.pos_embed[:, :1]).expand(len(tokens), -1, -1)
        return torch.cat([cls_token, tokens], dim=1)

    def forward_features(self, imgs):
        """Images [B, C, H, W], normalised -> token features [B, 1 + N, D], class token first, after the norm."""
        return self.norm(self.encode(self.patch_embed(self.cut(imgs)) + self.pos_embed[:, 1:]))


class Classifier(nn.Module):
    """What turns an encoder into a classifier: pooling, head, and freezing all but its last blocks.

    `frozen`: modules that stay in eval mode.
    """

    frozen = ()

    def forward(self, imgs):
        """Images [B, C, H, W], normalised -> logits [B, num_classes]."""
        x = self.forward_features(imgs)
        x = self.fc_norm(x[:, 1:].mean(dim=1) if self.global_pool == "avg" else x[:, 0])
        # Logits of 8 bits would tie: the head costs nothing, so it computes in its own precision.
        with torch.autocast(x.device.type, enabled=False):
            return self.head(x.to(self.cls_token.dtype))

    def freeze_all_but(self, trainable_blocks):
        """Trains the last `trainable_blocks` blocks and what follows them; 0: the head alone, on frozen features.

        What is frozen lies before what is trained, so autograd records nothing of it, and it stays in eval mode.
        """
        depth = len(self.blocks)
        if not 0 <= trainable_blocks < depth:
            raise ValueError(f"trainable_blocks must be at least 0 and below the {depth} blocks, got {trainable_blocks}")
        if trainable_blocks == 0 and self.global_pool == "avg":
            raise ValueError("trainable_blocks 0 needs global_pool 'token': fc_norm of 'avg' is not pre-trained")
        self.frozen = [self.patch_embed, *self.blocks[: depth - trainable_blocks]]
        self.frozen += [self.norm] if trainable_blocks == 0 else []
        embeddings = [p for name, p in self.named_parameters() if name in ("cls_token", "pos_embed")]
        for parameter in [*embeddings, *(p for module in self.frozen for p in module.parameters())]:
            parameter.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self

    def group_matcher(self, coarse=False):
        """timm's description of the layers, for layer-wise lr decay: embeddings, each block, then norm and head together."""
        return {"stem": r"^cls_token|^pos_embed|^patch_embed", "blocks": r"^blocks\.(\d+)"}


class VisionTransformer(Classifier, ViTEncoder):
    """The encoder with a classification head, as MAE fine-tunes it.

    global_pool "avg": mean of the patch tokens, then a fresh norm `fc_norm` (the encoder's `norm` is left out);
    "token": the class token after the encoder's norm. probe: the head of linear probing, a BatchNorm without parameters
    before the linear layer. The position table is trained, unless `freeze_all_but` says otherwise.
    """

    def __init__(self, num_classes=1000, global_pool="avg", probe=False, **kwargs):
        super().__init__(**kwargs)
        if global_pool not in ("avg", "token"):
            raise ValueError(f"unknown global_pool {global_pool!r}, choose from avg, token")
        self.global_pool = global_pool
        self.pos_embed.requires_grad_(True)
        if global_pool == "avg":
            self.norm, self.fc_norm = nn.Identity(), layer_norm(self.embed_dim)
        else:
            self.fc_norm = nn.Identity()
        self.head = nn.Linear(self.embed_dim, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.01 if probe else 2e-5)
        nn.init.zeros_(self.head.bias)
        if probe:
            self.head = nn.Sequential(nn.BatchNorm1d(self.embed_dim, affine=False, eps=1e-6), self.head)

    def no_weight_decay(self):
        """Parameters that weight decay leaves alone, beside the 1-D ones."""
        return {"cls_token", "pos_embed"}


# ------------------------------------------------------------------------------- ViT with relative positions (BEiT, SimMIM)


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
        qkv = F.linear(x, self.qkv.weight, qkv_bias).unflatten(-1, (3, self.num_heads, -1))  # [B, T, 3, heads, d]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, T, d]
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


def find_factory(embed_dim, depth):
    """The name of the factory below that builds a ViT of this width and depth; ValueError where none does."""
    sizes = {(size["embed_dim"], size["depth"]): name for name, size in _FACTORIES.items()}
    if (embed_dim, depth) not in sizes:
        raise ValueError(f"no ViT of width {embed_dim} and depth {depth} is known; (width, depth): {', '.join(map(str, sizes))}")
    return sizes[embed_dim, depth]


def vit_micro_patch4(**kwargs):
    return VisionTransformer(**{**MICRO, **kwargs})


def vit_mini_patch4(**kwargs):
    return VisionTransformer(**{**MINI, **kwargs})


def vit_tiny_patch16(**kwargs):
    return VisionTransformer(**{**TINY, **kwargs})


def vit_small_patch16(**kwargs):
    return VisionTransformer(**{**SMALL, **kwargs})


def vit_base_patch16(**kwargs):
    return VisionTransformer(**{**BASE, **kwargs})


def vit_large_patch16(**kwargs):
    return VisionTransformer(**{**LARGE, **kwargs})


def vit_huge_patch14(**kwargs):
    return VisionTransformer(**{**HUGE, **kwargs})


def relative_vit_micro_patch4(**kwargs):
    return RelativeVisionTransformer(**{**MICRO, **kwargs})


def relative_vit_mini_patch4(**kwargs):
    return RelativeVisionTransformer(**{**MINI, **kwargs})


def relative_vit_base_patch16(**kwargs):
    return RelativeVisionTransformer(**{**BASE, **kwargs})
