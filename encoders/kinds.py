"""The kinds of encoders: their classes, and their size arguments, which are inferred from weights and settings."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import models_vit
from encoders.models_absolute_vit import AbsoluteVisionTransformer, AbsoluteViTEncoder
from encoders.models_relative_vit import RelativeVisionTransformer, RelativeViTEncoder
from encoders.models_swin import SwinEncoder, SwinTransformer
from encoders.names import Tensors
from util.pos_embed import BIAS_TABLE, grid_from_settings

# {(width, depth): (name of a factory of `models_vit`, its sizes)}
VIT_FACTORIES: dict[tuple[int, int], tuple[str, dict[str, Any]]] = {}
for _name in models_vit.__all__:
    if _name.islower():
        _sizes = getattr(models_vit, _name).keywords
        VIT_FACTORIES[_sizes["embed_dim"], _sizes["depth"]] = (_name, _sizes)


class Kind(NamedTuple):
    """A kind of encoder.

    read_sizes: infers the size arguments of `encoder` from (weights under this project's names, settings of their run
    or {}, name of their file for errors). ValueError if the weights are of another kind.
    """

    name: str  # in messages
    encoder: Callable[..., nn.Module]
    classifier: Callable[..., nn.Module]
    read_sizes: Callable[[Tensors, Mapping[str, Any], str], dict[str, Any]]


def read_sizes(weights: Tensors, settings: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Infers the sizes of a ViT with a position table. No weight shows the number of heads; see `find_factory`."""
    kernel, table, cls_token, _, _ = need(
        weights,
        ["patch_embed.proj.weight", "pos_embed", "cls_token", "blocks.0.mlp.fc1.weight", "blocks.0.attn.qkv.weight"],
        what,
    )
    if kernel.ndim != 4 or kernel.shape[2] != kernel.shape[3] or table.ndim != 3:
        shapes = f"patch_embed.proj.weight is {list(kernel.shape)}, pos_embed {list(table.shape)}"
        raise ValueError(f"{what} holds no encoder of a known kind: {shapes}")
    num_cls_tokens = cls_token.shape[1]
    grid = read_grid(settings, kernel.shape[2], table.shape[1] - num_cls_tokens, what)
    sizes = common_sizes(weights, grid, "blocks.0")
    sizes["depth"] = count_blocks(weights)
    sizes["num_heads"] = settings.get("num_heads")
    if not sizes["num_heads"]:
        _, factory_sizes = find_factory(sizes["embed_dim"], sizes["depth"], what)
        sizes["num_heads"] = factory_sizes["num_heads"]
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

    Raises ValueError for weights of other projects, because some files merge patches in another order than Swin.
    """
    kernel, _ = need(weights, ("patch_embed.proj.weight", "layers.0.blocks.0.mlp.fc1.weight"), what)
    grid = grid_from_settings(settings, kernel.shape[2])
    if grid is None:
        raise ValueError(
            f"{what} holds a Swin Transformer without the settings of a run: its image size and the order of its "
            "patch merging are unknown; give a checkpoint of this project"
        )
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


def find_factory(embed_dim: int, depth: int, what: str) -> tuple[str, dict[str, Any]]:
    """Returns (name, sizes) of the factory of `models_vit` with this width and depth.

    Raises ValueError, with `what` as the name of the file, if there is none.
    """
    if (embed_dim, depth) not in VIT_FACTORIES:
        known = ", ".join(map(str, VIT_FACTORIES))
        sizes = f"width {embed_dim} and depth {depth}; known (width, depth): {known}"
        raise ValueError(f"{what} does not say its number of heads, and none is known for {sizes}")
    return VIT_FACTORIES[embed_dim, depth]


PLAIN = Kind("a plain ViT", models_vit.ViTEncoder, models_vit.VisionTransformer, read_sizes)
_RELATIVE = partial(RelativeViTEncoder, shared_bias=False)
RELATIVE = Kind("a ViT with relative positions", _RELATIVE, RelativeVisionTransformer, read_relative_sizes)
ABSOLUTE = Kind("SimMIM's ViT with absolute positions", AbsoluteViTEncoder, AbsoluteVisionTransformer, read_sizes)
SWIN = Kind("a Swin Transformer", SwinEncoder, SwinTransformer, read_swin_sizes)


def find_kind(weights: Mapping[str, Any]) -> Kind:
    """Returns the kind of encoder that a state dict, under this project's names, belongs to."""
    if any(name.startswith("layers.") for name in weights):
        return SWIN
    if any(name.endswith(BIAS_TABLE) for name in weights):
        return RELATIVE
    if "blocks.0.attn.q_bias" in weights:
        return ABSOLUTE
    return PLAIN
