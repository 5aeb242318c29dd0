"""Fits weights of other key names and sizes into an encoder: `load_encoder(model, path)`.

It accepts checkpoints of this project, timm's files, and the releases of MAE, MFF (mmpretrain), SimMIM, LocalMIM, TEC,
GreenMIM, CrossMAE, iBOT and DINO. Keys are renamed to those of the encoders here, which are timm's and MAE's. Position
tables and tables of relative-position biases are resized to the model's grid. A patch embedding of RGB images is
adapted to other numbers of channels. `load_pretrained` starts a pre-training model from such weights.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.models import adapt_input_conv
from torch.nn import functional as F

from encoders.rel_pos import resize_bias_table
from util.pos_embed import grid_from_settings, resize_pos_embed
from util.run.checkpoint import (
    CheckpointError,
    find_checkpoint_file,
    list_misshaped,
    meta_of,
    read_checkpoint,
    refuse_non_finite,
)
from util.text import shorten

Weights = dict[str, torch.Tensor]

# Keys that belong to an encoder. If a ViT here lacks one of them, the weights are those of another network.
ENCODER_KEYS = (
    "cls_token",
    "pos_embed",
    "patch_embed.",
    "blocks.",
    "norm.",
    "norm_pre.",
    "reg_token",
    "rel_pos_bias.",
)
# Those among them without which the patch tokens of every model here would differ. Positions can be tables or biases,
# and a classifier with mean pooling has another final norm.
_PATCH_TOKEN_KEYS = ("patch_embed.", "blocks.", "norm_pre.", "reg_token")
_COMPUTED_KEYS = ("relative_position_index", "attn_mask")  # endings of buffers that a model computes itself
_BIAS_TABLE = "relative_position_bias_table"
# Keys of CrossMAE's pre-training, in its release and here. Its encoder has no final norm.
_CROSSMAE_KEYS = ("wfm.linear.weight", "decoder.level_weights")
_CLS_TOKEN_MLP = "cls_token_mlp.fc1.weight"


class LoadReport(NamedTuple):
    """What `load_encoder` did with the keys of the file and of the model."""

    loaded: list[str]
    resized: list[str]
    missing: list[str]
    unexpected: list[str]
    adapted: str = ""  # how the patch embedding was adapted to other channels
    folded: str = ""  # where the MLP on TEC's class token was folded into the token

    def __str__(self) -> str:
        """Returns one line of counts and names. Unexpected keys are named by their modules, such as `decoder`."""
        unused = list(dict.fromkeys(key.partition(".")[0] for key in self.unexpected))
        parts = [f"{len(self.loaded)} loaded"]
        for keys, what, names in (
            (self.resized, "resized", self.resized),
            (self.missing, "missing", self.missing),
            (self.unexpected, "not used", unused),
        ):
            parts.append(f"{len(keys)} {what} ({shorten(names, most=6)})" if names else f"{len(keys)} {what}")
        parts += [remark for remark in (self.adapted, self.folded) if remark]
        if "norm.weight" in self.missing:
            parts.append("the file holds no final norm, so norm starts with weight 1 and bias 0")
        return "; ".join(parts)


def load_encoder(
    model: torch.nn.Module, path: str | Path, first_release_merging: bool = False, classes: list[str] | None = None
) -> LoadReport:
    """Loads a pre-trained encoder into a fine-tune model, and reports what was loaded, resized, missing and unexpected.

    A patch embedding of 3 channels is adapted to other channels by timm's rule: it is repeated and divided by the
    growth of their number, or summed for one channel.
    Position tables of another grid are resized bicubically, with the class row kept. Tables of relative-position biases
    are resized by a spline. A bias table that all blocks shared is copied into each block. The MLP on TEC's class token
    is folded into the token, unless the model has such an MLP. In TEC's published files it is folded already: the model
    then loses its MLP.

    path: a file, or the folder of a run, whose newest checkpoint is used.
    first_release_merging: re-index the patch merging of GreenMIM's public files. classes: names of the model's classes,
    in order. A head is loaded if its shape fits and the file names no other classes.

    Only the head and the pooling norm `fc_norm` may be missing. CrossMAE's encoder and TEC's published files have no
    final norm: the model's `norm` then gets weight 1 and bias 0. Raises CheckpointError, a ValueError, if any other key
    of the model is missing or of another shape, and if the file holds parts of blocks or of the patch embedding that
    the model lacks. FloatingPointError if a weight is not finite.
    """
    path = find_checkpoint_file(path)
    return fit_encoder(model, read_checkpoint(path), repr(str(path)), first_release_merging, classes)


def fit_encoder(
    model: torch.nn.Module,
    content: Mapping[str, Any],
    what: str,
    first_release_merging: bool = False,
    classes: list[str] | None = None,
    new_keys: tuple[str, ...] = (),
) -> LoadReport:
    """Does what `load_encoder` does for content that was read already, or a state dict. `what` names it in errors.

    new_keys: endings of keys that may be missing, too, because pre-training has no such parameters.
    """
    raw, meta = weights_of(content), meta_of(content)
    folded = _fold_cls_token_mlp(model, raw)
    own = model.state_dict()
    weights = encoder_names(raw, fold_cls_token=_CLS_TOKEN_MLP not in own)
    settings = meta.get("settings", {})
    if settings.get("model"):
        what = f"{what} (it was made as {settings['model']})"
    if first_release_merging:
        weights = swap_merging(weights)
    weights = _copy_shared_bias_table(weights, own)
    found = {key: value for key, value in weights.items() if key in own and torch.is_tensor(value)}
    found = _drop_unfit_head(found, own, meta.get("classes"), classes)
    _check_width(found, own, what, type(model).__name__)
    adapted = _adapt_channels(found, own, what)
    resized = _fit_tables(found, settings, own, model, what)
    missing = [key for key in own if key not in found]
    has_none = any(key in weights for key in _CROSSMAE_KEYS) or is_published_tec(weights)
    lacks_norm = "norm.weight" in missing and has_none
    optional = ("head.", "fc_norm.", "norm.") if lacks_norm else ("head.", "fc_norm.")
    needed = [key for key in missing if not key.startswith(optional) and not key.endswith(new_keys)]
    misshaped = list_misshaped(found, own)
    problems = []
    if needed:
        problems.append(f"missing: {shorten(needed, most=6)}")
    if misshaped:
        problems.append(shorten(misshaped, most=6))
    if problems:
        raise CheckpointError(f"{what} does not hold the encoder of this {type(model).__name__}: {'; '.join(problems)}")
    refuse_foreign(model, weights, what, _PATCH_TOKEN_KEYS)
    refuse_non_finite(found, f"the weights in {what}")
    model.load_state_dict(found, strict=False)
    if lacks_norm:
        model.norm.reset_parameters()
    return LoadReport(list(found), resized, missing, [key for key in weights if key not in found], adapted, folded)


def load_pretrained(model: torch.nn.Module, path: str | Path) -> LoadReport:
    """Starts a pre-training model from the weights of another one, or of an encoder, as `load_encoder` does.

    All weights are loaded whose names and shapes fit, those of a decoder included. Raises CheckpointError if a part of
    the encoder is missing or does not fit, and if the file holds parts of blocks or of the patch embedding that the
    model lacks.
    """
    path = find_checkpoint_file(path)
    content, own, what = read_checkpoint(path), model.state_dict(), repr(str(path))
    raw = weights_of(content)
    renamed = encoder_names(raw, fold_cls_token=_CLS_TOKEN_MLP not in own)
    # A pre-training model may have parts that `encoder_names` leaves out, such as LocalMIM's norms.
    weights = {key: value for key, value in raw.items() if key in own} | renamed
    found = {key: value for key, value in weights.items() if key in own and torch.is_tensor(value)}
    _check_width(found, own, what, type(model).__name__)
    adapted = _adapt_channels(found, own, what)
    resized = _fit_tables(found, meta_of(content).get("settings", {}), own, model, what)
    found = {key: value for key, value in found.items() if value.shape == own[key].shape}
    missing = [key for key in own if key not in found]
    needed = [key for key in missing if key == "cls_token" or key.startswith(("patch_embed.", "blocks.", "layers."))]
    if needed:
        raise CheckpointError(
            f"{what} does not hold the encoder of this {type(model).__name__}: missing or of another shape: "
            f"{shorten(needed, most=6)}"
        )
    refuse_foreign(model, weights, what, _PATCH_TOKEN_KEYS)
    refuse_non_finite(found, f"the weights in {what}")
    model.load_state_dict(found, strict=False)
    return LoadReport(list(found), resized, missing, [key for key in weights if key not in found], adapted)


def refuse_foreign(
    model: torch.nn.Module, weights: Iterable[str], what: str, parts: tuple[str, ...] = ENCODER_KEYS
) -> None:
    """Raises CheckpointError if `weights` hold parts of an encoder that `model` lacks: its features would differ.

    weights: the keys of a file. parts: how the keys of these parts begin.
    """
    own = model.state_dict()
    foreign = [k for k in weights if k.startswith(parts) and not k.endswith(_COMPUTED_KEYS) and k not in own]
    if foreign:
        raise CheckpointError(
            f"{what} holds another kind of encoder: this {type(model).__name__} has no {shorten(foreign, most=6)}"
        )


# ------------------------------------------------------------------------------------------------ weights inside a file


def encoder_weights_of(content: Mapping[str, Any], fold_cls_token: bool = True) -> Weights:
    """Returns the state dict in a checkpoint's content, with the encoder's keys renamed to ours.

    fold_cls_token: fold the MLP on TEC's class token into the token, or keep both as they are.
    """
    return encoder_names(weights_of(content), fold_cls_token)


def weights_of(content: Mapping[str, Any]) -> Weights:
    """Returns the state dict in a checkpoint's content.

    It is the value of `model` (this project, MAE), `state_dict` (iBOT's backbones, mmpretrain) or `student` (training
    checkpoints of iBOT and DINO, of which the student's backbone is returned), else the content itself (timm). Raises
    CheckpointError if that is no dict of named values.
    """
    weights = content.get("model", content.get("state_dict", content.get("student", content)))
    if not isinstance(weights, dict) or not all(isinstance(key, str) for key in weights):
        raise CheckpointError(
            "the file holds no weights by their names: they may lie under `model`, `state_dict` or `student`"
        )
    wrapped = "module.backbone."
    backbone = {key.removeprefix(wrapped): value for key, value in weights.items() if key.startswith(wrapped)}
    return backbone or weights


def holds_student(content: Mapping[str, Any]) -> bool:
    """Returns whether a content is a training checkpoint of iBOT or DINO, of which `weights_of` returns the student."""
    return "student" in content and not {"model", "state_dict"} & content.keys()


def is_published_tec(weights: Iterable[str]) -> bool:
    """Returns whether the keys of a file are those of TEC's published encoders.

    In these the MLP on the class token is folded into the token, and there is no final norm.
    """
    return all(key in ("cls_token", "pos_embed") or key.startswith(("patch_embed.", "blocks.")) for key in weights)


def _fold_cls_token_mlp(model: torch.nn.Module, weights: Iterable[str]) -> str:
    """Removes the model's MLP on the class token if it is folded in the file. Returns a remark on folding, or ""."""
    in_model = _CLS_TOKEN_MLP in model.state_dict()
    if not in_model:
        return "the MLP on the class token is folded into the token" if _CLS_TOKEN_MLP in weights else ""
    if not is_published_tec(weights):
        return ""
    model.cls_token_mlp = torch.nn.Identity()
    return "the MLP on the class token is folded into the token in this file, so the token is used without it"


def _copy_shared_bias_table(weights: Weights, own: Mapping[str, torch.Tensor]) -> Weights:
    """Copies the bias table that SimMIM's blocks share in pre-training into each block of the model."""
    shared = weights.get(f"rel_pos_bias.{_BIAS_TABLE}")
    if shared is None:
        return weights
    weights = {key: value for key, value in weights.items() if key != f"rel_pos_bias.{_BIAS_TABLE}"}
    copies = {key: shared for key in own if key.endswith(f"attn.{_BIAS_TABLE}") and key not in weights}
    return weights | copies


def _drop_unfit_head(
    found: Weights, own: Mapping[str, torch.Tensor], head_classes: list[str] | None, classes: list[str] | None
) -> Weights:
    """Leaves out the head of other classes, as MAE's fine-tuning does: of another shape, or of other class names."""
    has_other_names = classes is not None and head_classes is not None and head_classes != list(classes)
    kept = {}
    for key, value in found.items():
        if key.startswith("head.") and (has_other_names or value.shape != own[key].shape):
            continue
        kept[key] = value
    return kept


def _check_width(
    found: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], what: str, model_name: str
) -> None:
    """Raises CheckpointError if the encoder's width is not the model's, before less helpful errors about every key."""
    kernel, own_kernel = found.get("patch_embed.proj.weight"), own.get("patch_embed.proj.weight")
    if kernel is not None and own_kernel is not None and len(kernel) != len(own_kernel):
        raise CheckpointError(
            f"{what} holds an encoder of width {len(kernel)}, this {model_name} has width {len(own_kernel)}: "
            "choose the --model of its size"
        )


def _adapt_channels(found: Weights, own: Mapping[str, torch.Tensor], what: str) -> str:
    """Adapts a patch embedding of 3 channels, in place, to those of the model. Returns a remark, or "".

    Raises CheckpointError for a file of other channels than 3.
    """
    key = "patch_embed.proj.weight"
    kernel, own_kernel = found.get(key), own.get(key)
    if kernel is None or own_kernel is None or kernel.ndim != 4 or kernel.shape[1] == own_kernel.shape[1]:
        return ""
    channels, wanted = kernel.shape[1], own_kernel.shape[1]
    if channels != 3:
        raise CheckpointError(
            f"{what} holds an encoder of {channels} channels, but --in_chans is {wanted}: only encoders of 3 channels "
            f"can be adapted; give --in_chans {channels}"
        )
    found[key] = adapt_input_conv(wanted, kernel)
    return f"patch_embed.proj.weight adapted from 3 channels to {wanted}"


# ----------------------------------------------------------------------------------------------- tables of another size


def _fit_tables(
    found: Weights, settings: Mapping[str, Any], own: Mapping[str, torch.Tensor], model: torch.nn.Module, what: str
) -> list[str]:
    """Resizes the tables of positions and of relative-position biases, in place. Returns the keys of those resized.

    what: name of the file in errors.
    """
    kernel, resized = found.get("patch_embed.proj.weight"), []
    patch_size = settings.get("patch_size") or (None if kernel is None else kernel.shape[-1])  # exports lack the former
    grid = grid_from_settings(settings, patch_size)
    for key, value in found.items():
        if key == "pos_embed":
            found[key] = _fit_pos_embed(value, grid, own[key], tuple(model.grid_size), what)
        elif key.endswith(_BIAS_TABLE):
            found[key] = _fit_bias_table(value, grid, own[key], model, what)
        if found[key] is not value:
            resized.append(key)
    return resized


def _fit_pos_embed(
    table: torch.Tensor, grid: tuple[int, int] | None, own: torch.Tensor, grid_size: tuple[int, int], what: str
) -> torch.Tensor:
    """Returns a position table [1, 1 + n, D] resized to the model's `grid_size`; the same tensor if it fits already.

    grid: that of the table, from the settings of its run. If it is None or has another number of tokens, a square grid
    is assumed.
    """
    num_tokens = table.shape[1] - 1
    side = math.isqrt(num_tokens)
    square = (side, side) if side * side == num_tokens else None
    source = grid if grid is not None and math.prod(grid) == num_tokens else square
    if source == grid_size:
        return table
    if source is None or table.shape[2] != own.shape[2]:
        raise CheckpointError(
            f"pos_embed {list(table.shape)} of {what} cannot be resized to {list(own.shape)}: "
            "a square grid plus a class row is needed"
        )
    return resize_pos_embed(table, source, grid_size)


def _fit_bias_table(
    table: torch.Tensor, grid: tuple[int, int] | None, own: torch.Tensor, model: torch.nn.Module, what: str
) -> torch.Tensor:
    """Returns a table of relative-position biases resized to the model's grid (ViT) or window (Swin).

    The table of a ViT has three more rows, for the class token. Returns the same tensor if it fits already. grid: that
    of a ViT's table, which is assumed to be square if it is None.
    """
    if table.shape[1] != own.shape[1]:
        raise CheckpointError(f"{what} holds a bias table of {table.shape[1]} heads, this model has {own.shape[1]}")
    if hasattr(model, "cls_token"):
        square = round(((len(table) - 3) ** 0.5 + 1) / 2)
        source = grid or (square, square)
        target, num_extra = tuple(model.grid_size), 3
    else:
        window, own_window = ((round(len(rows) ** 0.5) + 1) // 2 for rows in (table, own))
        source, target, num_extra = (window, window), (own_window, own_window), 0
    return table if source == target else resize_bias_table(table, source, target, num_extra)


# ------------------------------------------------------------------------------------------ key names of other releases

# mmpretrain (MFF). Its layers count their norms from 1, and so does its backbone: ln1 is the encoder's final norm.
_MMPRETRAIN = [
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
]


def encoder_names(weights: Weights, fold_cls_token: bool = True) -> Weights:
    """Renames the encoder's keys to ours. The release is recognised by its keys."""
    if _CLS_TOKEN_MLP in weights:
        return from_tec(weights) if fold_cls_token else weights
    if "norm.0.weight" in weights:
        return from_localmim(weights)
    if any(name.startswith("backbone.") for name in weights):
        return from_mmpretrain(weights)
    if any(name.startswith("encoder.") for name in weights):
        return from_simmim(weights)
    return weights


def rename_prefixes(weights: Mapping[str, Any], prefixes: Mapping[str, str]) -> dict[str, Any]:
    """Returns a state dict whose keys begin with the values of `prefixes` where they began with its keys."""
    renamed = {}
    for name, value in weights.items():
        prefix = next((old for old in prefixes if name.startswith(old)), "")
        renamed[prefixes.get(prefix, "") + name[len(prefix) :]] = value
    return renamed


def from_mmpretrain(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Returns the backbone, neck and head of an mmpretrain state dict under our names. Other keys are left out."""
    renamed = {}
    for name, value in weights.items():
        if name.startswith(("backbone.", "neck.", "head.fc.")):
            for pattern, replacement in _MMPRETRAIN:
                name = re.sub(pattern, replacement, name)
            renamed[name] = value
    return renamed


def from_simmim(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Returns the encoder of a SimMIM state dict under our names, without buffers that the model computes itself."""
    return {
        name.removeprefix("encoder."): value
        for name, value in weights.items()
        if name.startswith("encoder.") and not name.endswith(_COMPUTED_KEYS)
    }


def swap_merging(weights: Weights) -> Weights:
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


def from_localmim(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Returns a LocalMIM state dict without its norms of inner levels: the last one is the encoder's final norm."""
    last = max(int(name.split(".")[1]) for name in weights if re.match(r"norm\.\d+\.", name))
    renamed = {}
    for name, value in weights.items():
        if name.startswith(f"norm.{last}."):
            name = name.replace(f"norm.{last}.", "norm.")
        if not re.match(r"norm\.\d+\.", name):
            renamed[name] = value
    return renamed


def from_tec(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Returns a TEC state dict without the MLP on the class token, which is folded into the token in float64."""
    mlp = {name: value.double() for name, value in weights.items() if name.startswith("cls_token_mlp.")}
    hidden = F.linear(weights["cls_token"].double(), mlp["cls_token_mlp.fc1.weight"], mlp["cls_token_mlp.fc1.bias"])
    folded = F.linear(F.gelu(hidden), mlp["cls_token_mlp.fc2.weight"], mlp["cls_token_mlp.fc2.bias"])
    others = {name: value for name, value in weights.items() if not name.startswith("cls_token_mlp.")}
    return others | {"cls_token": folded.to(weights["cls_token"].dtype)}
