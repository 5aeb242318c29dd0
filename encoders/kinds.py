"""The kinds of encoders: their classes, by name, and their size arguments, inferred from weights and settings.

To add a kind, add a `Kind` and its sign to `find_kind`. Its module is imported when a file is of this kind.
"""

import importlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import models_vit
from encoders.names import Q_BIAS, Tensors
from util.pos_embed import BIAS_TABLE, grid_from_settings

# {(width, depth): sizes of a factory of `models_vit`}
VIT_SIZES: dict[tuple[int, int], dict[str, Any]] = {}
for _name in models_vit.__all__:
    if _name.islower():
        _sizes = getattr(models_vit, _name).keywords
        VIT_SIZES[_sizes["embed_dim"], _sizes["depth"]] = _sizes


# What encoders have that MAE's have not, in messages: see `models_vit.TRAITS`.
TRAITS_IN_WORDS = {
    "rotary": "rotary positions (DINOv3)",
    "registers": "registers (DINOv2, DINOv3)",
    "num_cls_tokens": "several class tokens",
    "layer_scale": "layer scales (DINOv2, DINOv3)",
}


def choose_traits(settings: Mapping[str, Any], accepted: Collection[str], task: str) -> dict[str, Any]:
    """Returns those of `models_vit.TRAITS` in some settings that are not MAE's.

    ValueError if they are not all accepted. task: the model that is to start from such an encoder.
    """
    traits = models_vit.traits_in(settings)
    for name, words in TRAITS_IN_WORDS.items():
        if name in traits and name not in accepted:
            raise ValueError(f"{task} cannot start from an encoder with {words}")
    return traits


class Kind(NamedTuple):
    """A kind of encoder.

    module, encoder, classifier: where its classes are, and their names. options: of the encoder's constructor.
    read_sizes: infers the size arguments of the encoder from (weights under this project's names, settings of their
    run or {}, name of their file for errors). ValueError if the weights are of another kind.
    """

    name: str  # in messages
    module: str
    encoder: str
    classifier: str
    read_sizes: Callable[[Tensors, Mapping[str, Any], str], dict[str, Any]]
    options: Mapping[str, Any] = {}

    def make_encoder(self, **sizes: Any) -> nn.Module:
        return getattr(importlib.import_module(self.module), self.encoder)(**self.options, **sizes)

    def make_classifier(self, **options: Any) -> nn.Module:
        return getattr(importlib.import_module(self.module), self.classifier)(**options)


def read_sizes(weights: Tensors, settings: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Infers the sizes of a ViT with a position table, or with rotary positions.

    Without settings, width and depth tell the number of heads, and images of rotary positions have 224 pixels.
    """
    names = ["patch_embed.proj.weight", "cls_token", "blocks.0.mlp.fc1.weight", "blocks.0.attn.qkv.weight"]
    is_rotary = settings.get("rotary", False)
    if not is_rotary:
        names.append("pos_embed")
    kernel, cls_token, *_ = need(weights, names, what)
    table = weights.get("pos_embed", cls_token)
    if kernel.ndim != 4 or kernel.shape[2] != kernel.shape[3] or table.ndim != 3:
        shapes = f"patch_embed.proj.weight is {list(kernel.shape)}, pos_embed {list(table.shape)}"
        raise ValueError(f"{what} holds no encoder of a known kind: {shapes}")
    num_cls_tokens = cls_token.shape[1]
    if is_rotary:
        side = 224 // kernel.shape[2]
        grid = grid_from_settings(settings, kernel.shape[2]) or (side, side)
    else:
        grid = read_grid(settings, kernel.shape[2], table.shape[1] - num_cls_tokens, what)
    sizes = common_sizes(weights, grid, "blocks.0")
    sizes["depth"] = count_blocks(weights)
    sizes["num_heads"] = settings.get("num_heads")
    if not sizes["num_heads"]:
        size = sizes["embed_dim"], sizes["depth"]
        if size not in VIT_SIZES:
            known = ", ".join(map(str, VIT_SIZES))
            raise ValueError(f"{what} does not say its number of heads: (width, depth) is {size}, known are {known}")
        sizes["num_heads"] = VIT_SIZES[size]["num_heads"]
    sizes |= models_vit.traits_in(settings)
    if num_cls_tokens > 1:
        sizes["num_cls_tokens"] = num_cls_tokens
    return sizes


def read_relative_sizes(weights: Tensors, settings: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Infers the sizes of a ViT with relative positions. Without settings, the grid is square."""
    table = next(value for name, value in weights.items() if name.endswith(BIAS_TABLE))
    kernel, _ = need(weights, ("patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"), what)
    side = (math.isqrt(len(table) - 3) + 1) // 2
    grid = grid_from_settings(settings, kernel.shape[2]) or (side, side)
    sizes = common_sizes(weights, grid, "blocks.0")
    sizes["depth"] = count_blocks(weights)
    sizes["num_heads"] = table.shape[1]
    return sizes


def read_swin_sizes(weights: Tensors, settings: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Infers the sizes of a Swin Transformer of this project.

    Raises ValueError for weights of other projects, some of which merge patches in another order than Swin.
    """
    kernel, _ = need(weights, ("patch_embed.proj.weight", "layers.0.blocks.0.mlp.fc1.weight"), what)
    grid = grid_from_settings(settings, kernel.shape[2])
    if grid is None:
        raise ValueError(f"{what} holds a Swin Transformer and no settings: its image size is unknown")
    num_stages = count_modules(weights, "layers.")
    depths = [count_modules(weights, f"layers.{s}.blocks.") for s in range(num_stages)]
    tables = need(weights, [f"layers.{s}.blocks.0.attn.{BIAS_TABLE}" for s in range(num_stages)], what)
    most_offsets = max(len(table) for table in tables)  # late stages may have smaller windows
    sizes = common_sizes(weights, grid, "layers.0.blocks.0")
    sizes["depths"] = depths
    sizes["num_heads"] = [table.shape[1] for table in tables]
    sizes["window_size"] = (math.isqrt(most_offsets) + 1) // 2
    return sizes


def common_sizes(weights: Tensors, grid: tuple[int, int], first_block: str) -> dict[str, Any]:
    """Returns the size arguments that all kinds share."""
    embed_dim, in_chans, patch_size, _ = weights["patch_embed.proj.weight"].shape
    rows, columns = grid
    return dict(
        img_size=(rows * patch_size, columns * patch_size),
        patch_size=patch_size,
        in_chans=in_chans,
        embed_dim=embed_dim,
        mlp_ratio=len(weights[f"{first_block}.mlp.fc1.weight"]) / embed_dim,
    )


def count_blocks(weights: Mapping[str, Any]) -> int:
    return count_modules(weights, "blocks.")


def count_modules(weights: Mapping[str, Any], prefix: str) -> int:
    """Returns how many different names follow `prefix`, up to the next dot."""
    tails = [name.removeprefix(prefix) for name in weights if name.startswith(prefix)]
    return len({tail.partition(".")[0] for tail in tails})


def need(weights: Tensors, names: Sequence[str], what: str) -> list[torch.Tensor]:
    """Returns the named weights. ValueError, with `what` as the name of the file, if one is missing."""
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(f"{what} holds no encoder of a known kind: {', '.join(missing)} missing")
    return [weights[name] for name in names]


def read_grid(settings: Mapping[str, Any], patch_size: int, num_tokens: int, what: str) -> tuple[int, int]:
    """Returns the (rows, columns) of `num_tokens` tokens: those of the settings if they fit, or else a square.

    The position table does not tell, because 4 x 16 and 8 x 8 tokens have tables of the same shape.
    """
    grid = grid_from_settings(settings, patch_size)
    if grid is not None and math.prod(grid) == num_tokens:
        return grid
    side = math.isqrt(max(0, num_tokens))
    if side == 0 or side**2 != num_tokens:
        raise ValueError(f"{what} has positions for {num_tokens} tokens, which is no square grid, and no image size")
    return side, side


PLAIN = Kind("a plain ViT", "models_vit", "ViTEncoder", "VisionTransformer", read_sizes)
RELATIVE = Kind(
    "a ViT with relative positions",
    "encoders.models_relative_vit",
    "RelativeViTEncoder",
    "RelativeVisionTransformer",
    read_relative_sizes,
    options={"shared_bias": False},
)
ABSOLUTE = Kind(
    "SimMIM's ViT with absolute positions",
    "encoders.models_absolute_vit",
    "AbsoluteViTEncoder",
    "AbsoluteVisionTransformer",
    read_sizes,
)
SWIN = Kind("a Swin Transformer", "encoders.models_swin", "SwinEncoder", "SwinTransformer", read_swin_sizes)


def find_kind(weights: Mapping[str, Any]) -> Kind:
    """Returns the kind of encoder that a state dict, under this project's names, belongs to."""
    if any(name.startswith("layers.") for name in weights):
        return SWIN
    if any(name.endswith(BIAS_TABLE) for name in weights):
        return RELATIVE
    if Q_BIAS in weights:
        return ABSOLUTE
    return PLAIN
