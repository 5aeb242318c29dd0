"""The plain Vision Transformer (Dosovitskiy et al., ICLR 2021) as MAE uses it: the encoder that every pre-training
framework inherits, and the model that is fine-tuned.

State-dict names are those of MAE's releases and of timm's `VisionTransformer`. Features in three lines:

    model = vit_base_patch16(global_pool="token")
    print(util.run.checkpoint.load_encoder(model, "checkpoint.pth"))
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
    "vit_micro_patch4",
    "vit_mini_patch4",
    "vit_tiny_patch16",
    "vit_small_patch16",
    "vit_base_patch16",
    "vit_large_patch16",
    "vit_huge_patch14",
]

# Encoder sizes by their usual names. "Micro" and "mini" are ours, for 32-px images: 64 tokens of 4 px.
MICRO = dict(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3)
MINI = dict(img_size=32, patch_size=4, embed_dim=192, depth=6, num_heads=3)
TINY = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
SMALL = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
BASE = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
LARGE = dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16)
HUGE = dict(patch_size=14, embed_dim=1280, depth=32, num_heads=16)


# What says the sizes of a ViT.
_SIZE_KEYS = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", "blocks.0.attn.qkv.weight")

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


def split_heads(qkv, num_heads):
    """Queries, keys and values of a linear layer [..., T, 3 C] -> three views [..., heads, T, d].

    They are unbound where they lie: the backward pass then packs their gradients in one copy. Unbound from a permuted tensor,
    as ViTs usually have it, they are stacked first and then copied into the layer's layout.
    """
    return [x.transpose(-3, -2) for x in qkv.unflatten(-1, (3, num_heads, -1)).unbind(-3)]


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
        q, k, v = split_heads(self.qkv(x), self.num_heads)  # each [B, heads, T, d]
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

    `frozen`: modules that stay in eval mode. `cls_token_layer_decay`: to layer-wise lr decay the class token is of the first
    layer; else of the last, as in TEC.
    """

    frozen = ()
    cls_token_layer_decay = True

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
        cls_token = r"^cls_token|" if self.cls_token_layer_decay else ""
        return {"stem": cls_token + r"^pos_embed|^patch_embed", "blocks": r"^blocks\.(\d+)"}


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


def read_sizes(weights, settings, what, num_heads=None):
    """The arguments of `ViTEncoder` that say its sizes, from the weights of one; ValueError, in which `what` names the file.

    `settings`, of our checkpoints, tell the grid. No weight shows the number of heads: without `num_heads` it is that of the
    published sizes.
    """
    missing = [k for k in _SIZE_KEYS if not (isinstance(weights, dict) and torch.is_tensor(weights.get(k)))]
    if missing:
        raise ValueError(
            f"{what} holds no Vision Transformer of this kind: {', '.join(missing)} missing. Give a checkpoint of "
            "main_pretrain.py or main_finetune.py with a ViT, or one of MAE's releases"
        )
    kernel, table = weights["patch_embed.proj.weight"].shape, weights["pos_embed"].shape
    if len(kernel) != 4 or kernel[2] != kernel[3] or len(table) != 3 or weights["blocks.0.mlp.fc1.weight"].ndim != 2:
        raise ValueError(
            f"{what} holds no Vision Transformer of this kind: patch_embed.proj.weight is {list(kernel)}, pos_embed "
            f"{list(table)}; needed are [D, channels, p, p] and [1, 1 + tokens, D]"
        )
    embed_dim, in_chans, patch_size, _ = kernel
    depth = len({key.split(".")[1] for key in weights if key.startswith("blocks.")})
    rows, columns = read_grid(settings, patch_size, table[1] - 1, what)
    return dict(
        img_size=(rows * patch_size, columns * patch_size),
        patch_size=patch_size,
        in_chans=in_chans,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads or find_factory(embed_dim, depth, what)[1]["num_heads"],
        mlp_ratio=len(weights["blocks.0.mlp.fc1.weight"]) / embed_dim,
    )


def read_grid(settings, patch_size, num_tokens, what):
    """(rows, columns) of the tokens: 4 x 16 and 8 x 8 have tables of one shape, so the settings have the say."""
    size = settings.get("input_size")
    if size:
        height, *width = [size] if isinstance(size, int) else size
        grid = height // patch_size, (width or [height])[0] // patch_size
        if math.prod(grid) == num_tokens:
            return grid
    side = math.isqrt(max(0, num_tokens))
    if side == 0 or side**2 != num_tokens:
        raise ValueError(f"{what} has positions for {num_tokens} tokens, which is no square, and does not say its image size")
    return side, side


def find_factory(embed_dim, depth, what):
    """-> (name, sizes) of the factory below that builds a ViT of this width and depth; ValueError, in which `what` names it."""
    known = {(size["embed_dim"], size["depth"]): (name, size) for name, size in _FACTORIES.items()}
    if (embed_dim, depth) not in known:
        raise ValueError(
            f"{what} does not say its number of heads, and none is known for width {embed_dim} and depth {depth}; known "
            f"(width, depth): {', '.join(map(str, known))}"
        )
    return known[embed_dim, depth]


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
