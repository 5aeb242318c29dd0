"""The plain Vision Transformer (Dosovitskiy et al., ICLR 2021) as MAE uses it.

`ViTEncoder` is the encoder that the pre-training frameworks on ViT inherit. `VisionTransformer` is the model that is
fine-tuned. State-dict names are those of MAE's releases and of timm's `VisionTransformer`. To compute features:

    from models_vit import vit_base_patch16
    from encoders.load import load_encoder

    model = vit_base_patch16(global_pool="token")
    print(load_encoder(model, "checkpoint.pth"))
    tokens = model.eval().forward_features(imgs)  # [B, 1 + N, 768], class token first; imgs ImageNet-normalised
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from util.attention import self_attention
from util.pos_embed import height_and_width, position_table, rotary_table, rotate
from util.tokens import take_tokens

__all__ = [
    "VisionTransformer",
    "vit_nano_patch4",
    "vit_micro_patch4",
    "vit_mini_patch4",
    "vit_tiny_patch16",
    "vit_small_patch16",
    "vit_base_patch16",
    "vit_large_patch16",
    "vit_huge_patch14",
]


Sizes = dict[str, Any]  # arguments of an encoder

# Encoder sizes by their usual names. "Nano" to "mini" are ours, for 32-px images: 64 tokens of 4 px.
NANO: Sizes = dict(img_size=32, patch_size=4, embed_dim=64, depth=3, num_heads=2)
MICRO: Sizes = dict(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3)
MINI: Sizes = dict(img_size=32, patch_size=4, embed_dim=192, depth=6, num_heads=3)
TINY: Sizes = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
SMALL: Sizes = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
BASE: Sizes = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
LARGE: Sizes = dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16)
HUGE: Sizes = dict(patch_size=14, embed_dim=1280, depth=32, num_heads=16)


def layer_norm(dim: int) -> nn.LayerNorm:
    """Returns a LayerNorm with MAE's epsilon, 1e-6."""
    return nn.LayerNorm(dim, eps=1e-6)


def init_weights(module: nn.Module) -> None:
    """Initialises `module` and all modules inside it as MAE does.

    Linear layers are Xavier-uniform (qkv as one matrix) with zero bias. The patch embedding is Xavier-uniform on its
    flattened view. Everything else keeps PyTorch's default.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, PatchEmbed):
            kernel = layer.proj.weight
            nn.init.xavier_uniform_(kernel.view(len(kernel), -1))


def patchify(imgs: Tensor, patch_size: int) -> Tensor:
    """Cuts images [B, C, H, W] into patches [B, N, p*p*C] in raster order.

    The values of a patch are ordered (row, column, channel), with the channel fastest.
    """
    B, C, H, W = imgs.shape
    p = patch_size
    rows = H // p
    columns = W // p
    x = imgs.reshape(B, C, rows, p, columns, p)
    x = x.permute(0, 2, 4, 3, 5, 1)  # [B, rows, columns, p, p, C]
    return x.reshape(B, rows * columns, p * p * C)


def unpatchify(patches: Tensor, patch_size: int, grid_size: tuple[int, int]) -> Tensor:
    """Joins patches [B, N, p*p*C] into images [B, C, H, W], the inverse of `patchify`."""
    B = len(patches)
    p = patch_size
    rows, columns = grid_size
    x = patches.reshape(B, rows, columns, p, p, -1)
    x = x.permute(0, 5, 1, 3, 2, 4)  # [B, C, rows, p, columns, p]
    return x.reshape(B, -1, rows * p, columns * p)


class PatchEmbed(nn.Module):
    """The patch convolution as a linear layer on patches, so that it can run on the visible ones alone.

    The parameters are those of the convolution (`proj.weight` [D, C, p, p], `proj.bias` [D]), so checkpoints of other
    implementations fit.
    """

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)

    def forward(self, patches: Tensor) -> Tensor:
        """Embeds patches [B, n, p*p*C] in the layout of `patchify`. Returns [B, n, D]."""
        weight = self.proj.weight.permute(0, 2, 3, 1).flatten(1)  # [D, p*p*C]
        return F.linear(patches, weight, self.proj.bias)


class Attention(nn.Module):
    """Multi-head self-attention on a fused kernel, see `util.attention`.

    rotation: of queries and keys, see `util.pos_embed.rotate`. has_key_bias: without it the bias of keys is 0 and stays
    so.
    """

    def __init__(self, dim: int, num_heads: int, has_key_bias: bool = True) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"width {dim} does not divide into {num_heads} heads")
        self.num_heads = num_heads
        self.plain_heads = (
            num_heads,
            dim // num_heads,
        )  # number, width: --attention picks the kernel by them
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        bias_mask: Tensor | None = None
        if not has_key_bias:
            bias_mask = torch.ones(3, dim)
            bias_mask[1] = 0
            bias_mask = bias_mask.flatten()
        self.register_buffer("bias_mask", bias_mask, persistent=False)

    def forward(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        return self.proj(self_attention(self.rotated_qkv(x, rotation), self.num_heads))

    def rotated_qkv(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        if self.bias_mask is None:
            qkv = self.qkv(x)
        else:
            qkv = F.linear(x, self.qkv.weight, self.qkv.bias * self.bias_mask)
        if rotation is None:
            return qkv
        return rotate(qkv, rotation, self.num_heads)


class Block(nn.Module):
    """Pre-norm Transformer block: attention and MLP (exact GELU), each with a residual.

    layer_scale: multiply the outputs of both, as DINOv2. has_key_bias: see `Attention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        layer_scale: bool = False,
        has_key_bias: bool = True,
    ) -> None:
        from timm.layers import LayerScale, Mlp  # here, because --help waits for no slow library

        super().__init__()
        self.norm1 = layer_norm(dim)
        self.attn = Attention(dim, num_heads, has_key_bias)
        self.norm2 = layer_norm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.ls1 = LayerScale(dim, init_values=1.0) if layer_scale else nn.Identity()
        self.ls2 = LayerScale(dim, init_values=1.0) if layer_scale else nn.Identity()
        self.drop_path = make_drop_path(drop_path)

    def forward(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), rotation)))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


def make_drop_path(rate: float) -> nn.Module:
    """Returns a `DropPath`, or nothing to do if the rate is 0."""
    if rate:
        return DropPath(rate)
    return nn.Identity()


class DropPath(nn.Module):
    """timm's drop path, except that compiled code reads the rate from a tensor: blocks of any rate share one graph."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob
        self.register_buffer("keep_prob", torch.tensor(1 - drop_prob), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if not torch.compiler.is_compiling():
            from timm.layers import drop_path

            return drop_path(x, self.drop_prob, training=True)
        shape = (len(x),) + (1,) * (x.ndim - 1)
        kept = self.keep_prob.expand(shape).bernoulli()
        return x * (kept / self.keep_prob).to(x.dtype)


def check_divisible(height: int, width: int, patch_size: int) -> None:
    """Raises ValueError unless patches divide an image."""
    if height % patch_size or width % patch_size:
        raise ValueError(f"input_size {height} x {width} is not divisible by patch_size {patch_size}")


def check_image_size(imgs: Tensor, img_size: tuple[int, int]) -> None:
    """Raises ValueError if the (height, width) of the images [B, C, H, W] is not `img_size`."""
    if tuple(imgs.shape[-2:]) != img_size:
        raise ValueError(f"the model is built for images of {img_size} px, got {tuple(imgs.shape[-2:])}")


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Returns the drop-path rates of `depth` blocks, which grow linearly from 0 to `last`."""
    return [last * i / max(1, depth - 1) for i in range(depth)]


class ViTEncoder(nn.Module):
    """Patch embedding, class tokens, positions, blocks and final norm. P, N, D: class tokens, patches, width.

    img_size, patch_size: in pixels. `img_size` is one side or (height, width), each a multiple of `patch_size`.
    in_chans: number of colour channels.
    embed_dim, depth, num_heads, mlp_ratio: width, number of blocks, heads of a block, and hidden width of a block's MLP
        as a multiple of `embed_dim`.
    drop_path_rate: drop-path rate of the last block. The rates grow linearly from 0 at the first block.
    num_cls_tokens: P; MAE has one.
    learned_pos_embed: train the position table from random numbers. By default it is a frozen sine-cosine table.
    registers: all class tokens but the first are registers, which no head reads.
    rotary: rotate queries and keys by the places of their patches, as DINOv3, instead of a position table. Images may
        then have any size that patches divide. Keys have no bias, and the epsilon of LayerNorms is 1e-5, not 1e-6.
    layer_scale: multiply the outputs of attention and MLP by scales, which are trained, as in DINOv2.

    A subclass with other blocks calls `add_embedding` and makes `pos_embed`, `blocks` and `norm`.
    """

    pos_embed: Any  # the position table [1, P + N, D], or None
    registers = False
    rotary = False
    layer_scale = False
    frozen: Sequence[nn.Module] = ()  # modules that stay in eval mode, see `freeze_all_but`

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
        num_cls_tokens: int = 1,
        learned_pos_embed: bool = False,
        registers: bool = False,
        rotary: bool = False,
        layer_scale: bool = False,
    ) -> None:
        super().__init__()
        self.add_embedding(img_size, patch_size, in_chans, embed_dim, mlp_ratio, num_cls_tokens)
        self.learned_pos_embed = learned_pos_embed
        self.registers = registers
        self.rotary = rotary
        self.layer_scale = layer_scale
        if not rotary:
            self.pos_embed = position_table(embed_dim, self.grid_size, num_cls_tokens, learned_pos_embed)
        self.blocks = nn.ModuleList()
        for drop_path in drop_path_rates(drop_path_rate, depth):
            self.blocks.append(Block(embed_dim, num_heads, mlp_ratio, drop_path, layer_scale, has_key_bias=not rotary))
        self.norm = layer_norm(embed_dim)
        for module in self.modules():
            if rotary and isinstance(module, nn.LayerNorm):
                module.eps = 1e-5
        init_weights(self)
        nn.init.normal_(self.cls_token, std=0.02)

    def add_embedding(
        self,
        img_size: int | tuple[int, int],
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        mlp_ratio: float,
        num_cls_tokens: int = 1,
    ) -> None:
        """Adds the sizes, the patch embedding and the class tokens, which come before the patches."""
        if num_cls_tokens < 1:
            raise ValueError(f"num_cls_tokens must be at least 1, got {num_cls_tokens}")
        height, width = height_and_width(img_size)
        check_divisible(height, width, patch_size)
        self.img_size = (height, width)
        self.patch_size = patch_size
        self.in_chans = in_chans
        self.embed_dim = embed_dim
        self.mlp_ratio = mlp_ratio
        self.grid_size = (height // patch_size, width // patch_size)
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        self.num_cls_tokens = num_cls_tokens
        self.cls_token = nn.Parameter(torch.zeros(1, num_cls_tokens, embed_dim))
        self.cls_token_mlp: nn.Module = nn.Identity()  # TEC has an MLP
        self.pos_embed = None

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid_size)

    def no_weight_decay(self) -> set[str]:
        """Returns the parameters without weight decay in pre-training, beside the 1-D ones: none in MAE."""
        return set()

    @property
    def traits(self) -> dict[str, Any]:
        """The values of `TRAITS` that are not MAE's."""
        return traits_in(vars(self))

    def patchify(self, imgs: Tensor) -> Tensor:
        """Cuts images [B, C, H, W] into patches [B, N, p*p*C]. ValueError unless they have the model's size."""
        if self.rotary:
            height, width = imgs.shape[-2:]
            check_divisible(height, width, self.patch_size)
        else:
            check_image_size(imgs, self.img_size)
        return patchify(imgs, self.patch_size)

    @property
    def patch_positions(self) -> Tensor:
        """The positions of the patches [1, N, D]."""
        return self.pos_embed[:, self.num_cls_tokens :]

    def embed(self, imgs: Tensor) -> Tensor:
        """Embeds all patches of images [B, C, H, W], with their positions. Returns [B, N, D]."""
        tokens = self.patch_embed(self.patchify(imgs))
        if self.pos_embed is None:
            return tokens
        return tokens + self.patch_positions

    def embed_visible(self, patches: Tensor, ids: Tensor) -> Tensor:
        """Embeds those of all patches [B, N, p*p*C] that are at raster `ids` [B, n], with positions: [B, n, D]."""
        tokens = self.patch_embed(take_tokens(patches, ids))
        if self.pos_embed is None:
            return tokens
        return tokens + take_tokens(self.patch_positions, ids)

    def relative_positions(self, ids: Tensor | None = None, size: Sequence[int] | None = None) -> Tensor | None:
        """Returns what blocks take beside class tokens and the patches `ids` [B, n]: rotations if `rotary`, or None.

        ids: raster numbers; by default all patches. size: (height, width) of the images in pixels, by default
        `img_size`. See `util.pos_embed.rotate`.
        """
        if not self.rotary:
            return None
        height, width = size or self.img_size
        grid_size = (height // self.patch_size, width // self.patch_size)
        dtype = torch.promote_types(self.cls_token.dtype, torch.float32)
        head_width = self.embed_dim // self.blocks[0].attn.num_heads
        table = rotary_table(head_width, grid_size, self.cls_token.device, dtype)
        if ids is not None:
            table = take_tokens(table, ids)
        unrotated = rotary_table(head_width, (1, 1), table.device, dtype)  # the centre is the origin
        return torch.cat([unrotated.expand(len(table), self.num_cls_tokens, -1), table], dim=1)

    def encode(self, tokens: Tensor, relative: Tensor | None = None) -> Tensor:
        """Runs the blocks on embedded tokens with positions [B, n, D], and `relative_positions`.

        Returns [B, P + n, D], class tokens first, before the final norm.
        """
        x = self.prepend_cls_token(tokens)
        for block in self.blocks:
            x = block(x, relative)
        return x

    def prepend_cls_token(self, tokens: Tensor) -> Tensor:
        """Puts the class tokens, with their positions, before the tokens [B, n, D]. Returns [B, P + n, D]."""
        cls_token = self.cls_token_mlp(self.cls_token)
        if self.pos_embed is not None:
            cls_token = cls_token + self.pos_embed[:, : self.num_cls_tokens]
        cls_token = cls_token.expand(tokens.shape[0], -1, -1)
        return torch.cat([cls_token, tokens], dim=1)

    def forward_features(self, imgs: Tensor) -> Tensor:
        """Computes features [B, P + N, D] of normalised images [B, C, H, W], class tokens first, after the norm."""
        return self.norm(self.encode(self.embed(imgs), self.relative_positions(size=imgs.shape[-2:])))

    def freeze_all_but(self, trainable_blocks: int, has_new_bands: bool = False) -> None:
        """Freezes the encoder but its last `trainable_blocks` blocks and what follows them; with 0 its norm, too.

        With as many as there are blocks, nothing is frozen. Frozen modules stay in eval mode. They come before the
        trained ones, so autograd records nothing of them. has_new_bands: train the patch embedding, too, because the
        pre-trained one was for RGB. ValueError if there are fewer blocks.
        """
        depth = len(self.blocks)
        if not 0 <= trainable_blocks <= depth:
            raise ValueError(f"trainable_blocks must be from 0 to the {depth} blocks, got {trainable_blocks}")
        if trainable_blocks == depth:
            return
        self.frozen = [self.patch_embed, *self.blocks[: depth - trainable_blocks]]
        if trainable_blocks == 0:
            self.frozen.append(self.norm)
        for parameter in self.input_parameters():
            parameter.requires_grad_(False)
        for module in self.frozen:
            module.requires_grad_(False)
        if has_new_bands:
            self.patch_embed.requires_grad_(True)

    def input_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters with which the input of the first block is made."""
        parameters = list(self.patch_embed.parameters())
        for name, parameter in self.named_parameters():
            if name.startswith(("cls_token", "pos_embed")):
                parameters.append(parameter)
        return parameters

    def encoder_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that a file of an encoder holds."""
        return [*self.input_parameters(), *self.blocks.parameters(), *self.norm.parameters()]

    def train(self, mode: bool = True) -> "ViTEncoder":
        """Sets the training mode, except for the frozen modules."""
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self


# Arguments of a ViT that follow from its first weights, with MAE's values. See `from_dino` in `encoders.names`.
TRAITS: dict[str, Any] = {"num_cls_tokens": 1, "registers": False, "rotary": False, "layer_scale": False}


def traits_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of `TRAITS` in some settings that are not MAE's."""
    return {name: settings[name] for name, default in TRAITS.items() if settings.get(name) not in (None, default)}


def check_pool(model: nn.Module, global_pool: str) -> None:
    """Raises ValueError unless `global_pool` is one of the model's `pools`."""
    if global_pool not in model.pools:
        raise ValueError(f"unknown global_pool {global_pool!r}, choose from {', '.join(model.pools)}")


class Classifier(ViTEncoder):
    """Pooling, head, and freezing of all but the last blocks: turns an encoder into a classifier.

    pools: what `global_pool` may be. `avg` takes the mean of the patch tokens and a new norm, `fc_norm`, instead of the
        encoder's `norm`. `token` takes the class token after the encoder's norm, or the mean of several that are
        no registers.
    """

    pools: tuple[str, ...] = ("avg", "token")
    cls_token_layer_decay = True  # with layer-wise decay, the class token has the learning rate of the first layer

    def add_head(self, num_classes: int, global_pool: str, probe: bool, std: float) -> None:
        """Adds the pooling and the head, whose weights have the standard deviation `std` at first.

        probe: the head of linear probing has a BatchNorm without parameters before the linear layer.
        """
        check_pool(self, global_pool)
        self.global_pool = global_pool
        self.fc_norm = nn.Identity()
        if global_pool == "avg":
            self.fc_norm = nn.LayerNorm(self.embed_dim, eps=self.norm.eps)
            self.norm = nn.Identity()
        self.head = nn.Linear(self.embed_dim, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=std)
        nn.init.zeros_(self.head.bias)
        if probe:
            norm = nn.BatchNorm1d(self.embed_dim, affine=False, eps=1e-6)
            self.head = nn.Sequential(norm, self.head)

    def forward(self, imgs: Tensor) -> Tensor:
        """Computes logits [B, num_classes] of normalised images [B, C, H, W]."""
        x = self.forward_features(imgs)
        P = self.num_cls_tokens
        if self.global_pool == "avg":
            x = x[:, P:].mean(dim=1)
        elif P == 1 or self.registers:
            x = x[:, 0]
        else:
            x = x[:, :P].mean(dim=1)
        x = self.fc_norm(x)
        # Logits in bfloat16 have 8 significant bits, and many would tie. The head is cheap, so it runs in the precision
        # of its weights.
        with torch.autocast(x.device.type, enabled=False):
            return self.head(x.to(self.cls_token.dtype))

    def freeze_all_but(self, trainable_blocks: int, has_new_bands: bool = False) -> None:
        """Freezes all but the last `trainable_blocks` blocks and what follows them. 0 trains the head alone.

        has_new_bands: train the patch embedding, too, unless the head alone is trained.

        ValueError if the head alone would read a norm that is not pre-trained.
        """
        if trainable_blocks == 0 and self.global_pool == "avg":
            raise ValueError("trainable_blocks 0 needs global_pool 'token': fc_norm of 'avg' is not pre-trained")
        super().freeze_all_but(trainable_blocks, has_new_bands and trainable_blocks > 0)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Describes the layers to timm's layer-wise learning-rate decay: embeddings, each block, then norm and head."""
        stem = r"^pos_embed|^patch_embed"
        if self.cls_token_layer_decay:
            stem = r"^cls_token|" + stem
        return {"stem": stem, "blocks": r"^blocks\.(\d+)"}


class VisionTransformer(Classifier):
    """The encoder with a classification head, as MAE fine-tunes it.

    num_classes, global_pool, probe: see `Classifier`.
    train_pos_embed: train the position table, as in MAE, or keep it as it is, as in TEC.
    cls_token_mlp: send the class token through an MLP, as TEC does.
    cls_token_layer_decay: with layer-wise decay, give the class token the learning rate of the first layer, or of the
        last one, as in TEC.
    kwargs: arguments of `ViTEncoder`.
    """

    compiled_methods = ("embed",)  # beside blocks, see `util.run.train.wrap.compile_parts`

    def __init__(
        self,
        num_classes: int = 1000,
        global_pool: str = "avg",
        probe: bool = False,
        train_pos_embed: bool = True,
        cls_token_mlp: bool = False,
        cls_token_layer_decay: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.cls_token_layer_decay = cls_token_layer_decay
        if self.pos_embed is not None:
            self.pos_embed.requires_grad_(train_pos_embed)
        if cls_token_mlp:
            from timm.layers import Mlp

            self.cls_token_mlp = Mlp(self.embed_dim, self.blocks[0].mlp.fc1.out_features)
            init_weights(self.cls_token_mlp)
        std = 2e-5
        if probe:
            std = 0.01
        self.add_head(num_classes, global_pool, probe, std)

    def no_weight_decay(self) -> set[str]:
        """Returns the parameters without weight decay, beside the 1-D ones."""
        return {"cls_token", "pos_embed"}


vit_nano_patch4 = partial(VisionTransformer, **NANO)
vit_micro_patch4 = partial(VisionTransformer, **MICRO)
vit_mini_patch4 = partial(VisionTransformer, **MINI)
vit_tiny_patch16 = partial(VisionTransformer, **TINY)
vit_small_patch16 = partial(VisionTransformer, **SMALL)
vit_base_patch16 = partial(VisionTransformer, **BASE)
vit_large_patch16 = partial(VisionTransformer, **LARGE)
vit_huge_patch14 = partial(VisionTransformer, **HUGE)
