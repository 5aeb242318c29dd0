"""The kinds of encoders: their classes, by name, and their size arguments, inferred from weights and settings.

To add a kind, add a `Kind` and its sign to `find_kind`. Its module is imported when a file is of this kind.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import models_vit
from encoders.names import Tensors
from util.pos_embed import BIAS_TABLE, grid_from_settings, grid_of

# {(width, depth): number of heads} of the factories of `models_vit`
NUM_HEADS: dict[tuple[int, int], int] = {}
for _name in models_vit.__all__:
    if _name.islower():
        _sizes = getattr(models_vit, _name).keywords
        NUM_HEADS[_sizes["embed_dim"], _sizes["depth"]] = _sizes["num_heads"]


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

    encoder, classifier: the paths of its classes, "module:class".
    read_sizes: infers the size arguments of the encoder from (weights under this project's names, settings of their
    run or {}). KeyError if a weight is missing, ValueError if they are of another kind.
    """

    name: str  # in messages
    encoder: str
    classifier: str
    read_sizes: Callable[[Tensors, Mapping[str, Any]], dict[str, Any]]


def read_sizes(weights: Tensors, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Infers the sizes of a ViT with a position table, or with rotary positions.

    Without settings, width and depth tell the number of heads, and images of rotary positions have 224 pixels.
    """
    patch_size = weights["patch_embed.proj.weight"].shape[-1]
    grid = grid_from_settings(settings, patch_size)
    if settings.get("rotary"):
        side = 224 // patch_size
        grid = grid or (side, side)
    else:
        num_tokens = weights["pos_embed"].shape[1] - weights["cls_token"].shape[1]
        grid = grid_of(num_tokens, grid)
        if grid is None:
            raise ValueError(f"it has positions for {num_tokens} tokens, which is no square grid, and no image size")
    sizes = common_sizes(weights, grid, "blocks.0") | models_vit.traits_in(settings)
    sizes["depth"] = count_modules(weights, "blocks.")
    size = (sizes["embed_dim"], sizes["depth"])
    sizes["num_heads"] = settings.get("num_heads") or NUM_HEADS.get(size)
    if sizes["num_heads"] is None:
        raise ValueError(f"it does not say its number of heads: (width, depth) is {size}, known are {[*NUM_HEADS]}")
    return sizes


def read_relative_sizes(weights: Tensors, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Infers the sizes of a ViT with relative positions. Without settings, the grid is square."""
    table = next(value for name, value in weights.items() if name.endswith(BIAS_TABLE))
    patch_size = weights["patch_embed.proj.weight"].shape[-1]
    grid = grid_from_settings(settings, patch_size) or square_of_biases(len(table) - 3)
    sizes = common_sizes(weights, grid, "blocks.0")
    sizes["depth"] = count_modules(weights, "blocks.")
    sizes["num_heads"] = table.shape[1]
    return sizes


def read_swin_sizes(weights: Tensors, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Infers the sizes of a Swin Transformer of this project.

    ValueError for weights of other projects, some of which merge patches in another order than Swin.
    """
    grid = grid_from_settings(settings, weights["patch_embed.proj.weight"].shape[-1])
    if grid is None:
        raise ValueError("it has no settings, without which the image size of a Swin Transformer is unknown")
    stages = range(count_modules(weights, "layers."))
    tables = [weights[f"layers.{s}.blocks.0.attn.{BIAS_TABLE}"] for s in stages]
    sizes = common_sizes(weights, grid, "layers.0.blocks.0")
    sizes["depths"] = [count_modules(weights, f"layers.{s}.blocks.") for s in stages]
    sizes["num_heads"] = [table.shape[1] for table in tables]
    largest = max(len(table) for table in tables)  # late stages may have smaller windows
    sizes["window_size"], _ = square_of_biases(largest)
    return sizes


def square_of_biases(num_offsets: int) -> tuple[int, int]:
    """Returns the square grid or window that has this number of offsets between two tokens, (2 side - 1)^2."""
    side = (math.isqrt(num_offsets) + 1) // 2
    return side, side


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


def count_modules(weights: Mapping[str, Any], prefix: str) -> int:
    """Returns how many different names follow `prefix`, up to the next dot."""
    tails = [name.removeprefix(prefix) for name in weights if name.startswith(prefix)]
    return len({tail.partition(".")[0] for tail in tails})


PLAIN = Kind("a plain ViT", "models_vit:ViTEncoder", "models_vit:VisionTransformer", read_sizes)
RELATIVE = Kind(
    "a ViT with relative positions",
    "encoders.models_relative_vit:RelativeViTEncoder",
    "encoders.models_relative_vit:RelativeVisionTransformer",
    read_relative_sizes,
)
ABSOLUTE = Kind(
    "SimMIM's ViT with absolute positions",
    "encoders.models_absolute_vit:AbsoluteViTEncoder",
    "encoders.models_absolute_vit:AbsoluteVisionTransformer",
    read_sizes,
)
SWIN = Kind(
    "a Swin Transformer",
    "encoders.models_swin:SwinEncoder",
    "encoders.models_swin:SwinTransformer",
    read_swin_sizes,
)


def find_kind(weights: Mapping[str, Any]) -> Kind:
    """Returns the kind of encoder that a state dict, under this project's names, belongs to."""
    if any(name.startswith("layers.") for name in weights):
        return SWIN
    if any(name.endswith(BIAS_TABLE) for name in weights):
        return RELATIVE
    if {"pos_embed", "blocks.0.attn.q_bias"} <= weights.keys():
        return ABSOLUTE
    return PLAIN
