"""Key names of the files that hold encoders. They become the names here, which are those of MAE's releases and timm.

`find_origin` recognises a file by its keys. To read files of another project, add a row to `ORIGINS`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from util.pos_embed import grid_from_settings, grid_of

Tensors = dict[str, torch.Tensor]

CLS_TOKEN_MLP = "cls_token_mlp.fc1.weight"  # of TEC
COMPUTED_KEYS = ("relative_position_index", "attn_mask")  # endings of buffers that a model computes itself


# ---------------------------------------------------------------------------------------------------------- renaming


def rename(weights: Mapping[str, Any], patterns: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Returns the weights with all (pattern, replacement) applied to each name, in order."""
    renamed = {}
    for name, value in weights.items():
        for pattern, replacement in patterns:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed


def select_prefix(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the weights whose names begin with `prefix`, under their names without it."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def drop_prefix(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the weights whose names do not begin with `prefix`."""
    return {name: value for name, value in weights.items() if not name.startswith(prefix)}


# mmpretrain (MFF). Its layers count their norms from 1, and so does its backbone: ln1 is the encoder's final norm.
_MMPRETRAIN = (
    (r"\.(?:ln|norm)([12])\.", r".norm\1."),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    (r"^backbone\.norm1\.", "norm."),
    (r"^backbone\.norm2\.", "fc_norm."),
    (r"^backbone\.patch_embed\.projection\.", "patch_embed.proj."),
    (r"^backbone\.layers\.", "blocks."),
    (r"^backbone\.", ""),
    (r"^neck\.norm1\.", "decoder.norm."),
    (r"^neck\.(?:decoder_)?", "decoder."),
    (r"^head\.fc\.", "head."),
)


def from_mmpretrain(weights: Tensors) -> Tensors:
    """Returns the backbone, neck and head of an mmpretrain state dict under our names. Other keys are left out."""
    prefixes = ("backbone.", "neck.", "head.fc.")
    model = {name: value for name, value in weights.items() if name.startswith(prefixes)}
    return rename(model, _MMPRETRAIN)


def from_simmim(weights: Mapping[str, torch.Tensor]) -> Tensors:
    """Returns the encoder of a SimMIM state dict under our names, without buffers that the model computes itself."""
    encoder = select_prefix(weights, "encoder.")
    return {name: value for name, value in encoder.items() if not name.endswith(COMPUTED_KEYS)}


def from_student(weights: Tensors) -> Tensors:
    """Returns the backbone in a training checkpoint of iBOT or DINO."""
    return select_prefix(weights, "module.backbone.")


def from_localmim(weights: Tensors) -> Tensors:
    """Returns a LocalMIM state dict without its norms of inner levels: the last one is the encoder's final norm."""
    is_inner = re.compile(r"norm\.(\d+)\.").match
    matches = [is_inner(name) for name in weights]
    last = max(int(match[1]) for match in matches if match)
    renamed = rename(weights, [(rf"^norm\.{last}\.", "norm.")])
    return {name: value for name, value in renamed.items() if not is_inner(name)}


# Transformers' ViT, ViTMAE and DINO, version 4 and 5. The first rows undo what version 5 has renamed in memory.
_TRANSFORMERS = (
    (r"\.attention\.([qkv])_proj\.", r".attn.\1."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.attention\.attention\.(?:(q)uery|(k)ey|(v)alue)\.", r".attn.\1\2\3."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(layers?\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^(?:vit\.)?embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.mask_token$", "mask_token"),
    (r"^(?:vit\.)?embeddings\.position_embeddings$", "pos_embed"),
    (r"^(?:vit\.)?embeddings\.patch_embeddings\.(?:projection\.)?", "patch_embed.proj."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.mlp\.up_proj\.", ".mlp.fc1."),
    (r"\.mlp\.down_proj\.", ".mlp.fc2."),
    (r"^decoder\.decoder_(?:encoder\.layer|layers)\.", "decoder_blocks."),
    (r"^decoder\.", ""),
    (r"^(?:vit\.|model\.)?(?:(?:encoder\.)?layer|layers)\.", "blocks."),
    (r"^(?:vit\.)?layernorm\.", "norm."),
    (r"^classifier\.", "head."),
)


def from_transformers(weights: Tensors) -> Tensors:
    """Returns the weights of Transformers' ViT, ViTMAE or DINO under the names of MAE's releases and timm."""
    renamed = rename(weights, _TRANSFORMERS)
    query_keys = [key for key in renamed if key.endswith(".attn.q.weight")]
    for key in query_keys:
        attention = key.removesuffix("q.weight")
        matrices = []
        biases = []
        for letter in "qkv":
            matrix = renamed.pop(f"{attention}{letter}.weight")
            no_bias = matrix.new_zeros(len(matrix))  # the file has none if `qkv_bias` is False
            matrices.append(matrix)
            biases.append(renamed.pop(f"{attention}{letter}.bias", no_bias))
        renamed[f"{attention}qkv.weight"] = torch.cat(matrices)
        renamed[f"{attention}qkv.bias"] = torch.cat(biases)
    return renamed


# ------------------------------------------------------------------------------------------------------------ origins


class Origin(NamedTuple):
    """The files of a project. prefixes: beginnings of their keys, one of which is enough to recognise a file."""

    name: str  # in messages
    prefixes: tuple[str, ...]
    rename: Callable[[Tensors], Tensors]


ORIGINS = (  # the first that fits
    Origin("of LocalMIM", ("norm.0.weight",), from_localmim),
    Origin("of mmpretrain", ("backbone.",), from_mmpretrain),
    Origin("of Transformers", ("vit.embeddings.", "embeddings.patch_embeddings."), from_transformers),
    Origin("of SimMIM", ("encoder.",), from_simmim),
    Origin("the student in a training checkpoint of iBOT or DINO", ("module.backbone.",), from_student),
    Origin("with the key names of MAE and timm", ("",), dict),
)


def find_origin(names: Iterable[str]) -> Origin:
    keys = list(names)
    return next(origin for origin in ORIGINS if any(key.startswith(origin.prefixes) for key in keys))


# -------------------------------------------------------------------------------------------- weights that are changed


_SCALE = re.compile(r"(blocks\.\d+)\.ls([12])\.gamma")  # a layer scale
_SCALED = {"1": "attn.proj", "2": "mlp.fc2"}


def is_scale(name: str) -> bool:
    """Returns whether this is the name of a layer scale."""
    return _SCALE.fullmatch(name) is not None


_DINO = (
    ("^(?:register|storage)_tokens$", "reg_token"),
    (r"^(blocks\.\d+)\.(?:ls|gamma_)([12])$", r"\1.ls\2.gamma"),
)


def from_dino(weights: Tensors, settings: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Turns DINOv2, DINOv3 and DeiT III into plain ViTs. Returns (weights, arguments that follow from them).

    Registers become further class tokens, and class tokens without positions get zeros. Registers that have positions
    are class tokens. Weights with registers and without a table of positions are DINOv3's.

    settings: of the run, which say the grid of tokens; it is square if they do not.
    """
    if "cls_token" not in weights:
        return weights, {}
    joined = rename(weights, _DINO)
    registers = joined.pop("reg_token", None)
    if registers is not None:
        joined["cls_token"] = torch.cat([joined["cls_token"], registers], dim=1)
    num_cls_tokens = joined["cls_token"].shape[1]
    traits: dict[str, Any] = {"num_cls_tokens": num_cls_tokens}
    has_scales = any(is_scale(name) for name in joined)
    if not has_scales or ("pos_embed" not in joined and registers is None):
        return joined, traits
    traits["layer_scale"] = True
    joined.pop("mask_token", None)  # of another pre-training than MAE's
    if "pos_embed" not in joined:
        return without_key_bias(joined), {**traits, "registers": True, "rotary": True}
    table = joined["pos_embed"]
    grid = grid_from_settings(settings, joined["patch_embed.proj.weight"].shape[-1])
    for num_positions in (num_cls_tokens, 1, 0):  # of class tokens and registers
        if grid_of(table.shape[1] - num_positions, grid) is not None:
            zeros = table.new_zeros(1, num_cls_tokens - num_positions, table.shape[2])
            joined["pos_embed"] = torch.cat([table[:, :num_positions], zeros, table[:, num_positions:]], dim=1)
            traits["registers"] = num_positions < num_cls_tokens and registers is not None
            break
    return joined, traits


def fold_scales(weights: Tensors) -> Tensors:
    """Returns the weights with layer scales folded into the layers before them, in float64."""
    folded = dict(weights)
    for name in weights:
        scale = _SCALE.fullmatch(name)
        if scale is None:
            continue
        block, number = scale.groups()
        layer = f"{block}.{_SCALED[number]}"
        if f"{layer}.weight" not in weights:  # a gated MLP has other layers, which no model has
            continue
        weight = weights[f"{layer}.weight"]
        bias = weights[f"{layer}.bias"]
        gamma = folded.pop(name).double()
        folded[f"{layer}.weight"] = (weight.double() * gamma.unsqueeze(1)).to(weight.dtype)
        folded[f"{layer}.bias"] = (bias.double() * gamma).to(bias.dtype)
    return folded


def without_key_bias(weights: Tensors) -> Tensors:
    """Returns DINOv3's weights with one bias for queries, keys and values, which is 0 for keys, or everywhere."""
    merged = {name: value for name, value in weights.items() if not name.endswith((".bias_mask", "_bias"))}
    for name, matrix in weights.items():
        if name.endswith(".attn.qkv.weight"):
            attention = name.removesuffix("qkv.weight")
            no_bias = matrix.new_zeros(len(matrix))
            query, key, value = weights.get(f"{attention}qkv.bias", no_bias).chunk(3)
            query = weights.get(f"{attention}q_bias", query)
            value = weights.get(f"{attention}v_bias", value)
            merged[f"{attention}qkv.bias"] = torch.cat([query, torch.zeros_like(key), value])
    return merged


def split_key_bias(weights: Tensors) -> Tensors:
    """Returns weights whose biases of queries and values have names of their own. That of keys, which is 0, goes."""
    split = {}
    for name, value in weights.items():
        if name.endswith(".attn.qkv.bias"):
            q_bias, _, v_bias = value.chunk(3)
            split[name.replace("qkv.bias", "q_bias")] = q_bias
            split[name.replace("qkv.bias", "v_bias")] = v_bias
        else:
            split[name] = value
    return split


def fold_cls_token(weights: Tensors) -> Tensors:
    """Returns a TEC state dict without the MLP on the class token, which is folded into the token in float64."""
    cls_token = weights["cls_token"]
    mlp = {name: value.double() for name, value in select_prefix(weights, "cls_token_mlp.").items()}
    hidden = F.linear(cls_token.double(), mlp["fc1.weight"], mlp["fc1.bias"])
    output = F.linear(F.gelu(hidden), mlp["fc2.weight"], mlp["fc2.bias"])
    folded = drop_prefix(weights, "cls_token_mlp.")
    folded["cls_token"] = output.to(cls_token.dtype)
    return folded


def constant_mlp(cls_token: torch.Tensor, model_state: Tensors) -> Tensors:
    """Returns the weights of a model's MLP on the class token with which it always returns this token [1, 1, D]."""
    mlp = {name: value for name, value in model_state.items() if name.startswith("cls_token_mlp.")}
    mlp["cls_token_mlp.fc2.weight"] = torch.zeros_like(mlp["cls_token_mlp.fc2.weight"])
    mlp["cls_token_mlp.fc2.bias"] = cls_token.flatten()
    return mlp


def swap_merging(weights: Tensors) -> Tensors:
    """Re-indexes Swin weights whose patch merging takes neighbours in the order of GreenMIM's first release.

    That order of (row, column) is 00, 01, 10, 11. Swin's is 00, 10, 01, 11. The second and the third quarter of the
    4 C inputs of norm and matrix change places, which is exact. Raises ValueError for weights without patch merging.
    """
    merging = [name for name in weights if ".downsample." in name]
    if not merging:
        raise ValueError("these weights merge no patches: only Swin's have an order of merging")
    swapped = {}
    for name in merging:
        first, second, third, fourth = weights[name].chunk(4, dim=-1)
        swapped[name] = torch.cat([first, third, second, fourth], dim=-1)
    return weights | swapped
