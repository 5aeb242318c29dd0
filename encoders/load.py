"""The one way to weights: reads a file of any origin, and fits it into any model.

    from encoders.load import load_encoder, load_model

    model = load_model("output/prmim50_base")  # a run, a file of a release or of timm, a folder of Transformers
    print(load_encoder(model, "mae_pretrain_vit_base.pth"))  # into a model that is there already

`encoders.names` has the key names of each origin, `encoders.kinds` the kinds of encoders. A model may define

new_keys: endings of its parameters that pre-training does not have.
unused_keys: beginnings of an encoder's parameters that it does not use.
adapt_weights(tensors): returns the weights under names of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from encoders.kinds import SWIN, Kind, find_kind
from encoders.names import (
    CLS_TOKEN_MLP,
    COMPUTED_KEYS,
    Origin,
    Tensors,
    find_origin,
    fold_cls_token,
    is_published_tec,
    join_registers,
    swap_merging,
)
from encoders.rel_pos import resize_bias_table
from util.lazy import LazyModule
from util.pos_embed import BIAS_TABLE, grid_from_settings, resize_pos_embed
from util.run import checkpoint
from util.run.checkpoint import CheckpointError
from util.text import count_of, shorten

timm_models = LazyModule("timm.models")

Part = Literal["all", "encoder", "blocks"]

# Beginnings of an encoder's keys. Weights with such a key that the model lacks are those of another network. Positions
# may be a table or biases, and a classifier with mean pooling has another final norm: PATCH_KEYS are the others.
PATCH_KEYS = ("patch_embed.", "blocks.", "layers.", "norm_pre.", "reg_token")
ENCODER_KEYS = (*PATCH_KEYS, "cls_token", "pos_embed", "norm.", "rel_pos_bias.")


@dataclass(frozen=True)
class Weights:
    """What a file holds.

    path: of the file, or a name. raw: its tensors under its own names. meta: see `util.run.checkpoint.meta_of`.
    """

    path: str | Path
    raw: Tensors
    meta: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def origin(self) -> Origin:
        return find_origin(self.raw)

    @cached_property
    def tensors(self) -> Tensors:
        """The weights under the names here, which are those of MAE and timm."""
        weights = self.origin.rename(self.raw)
        kernel = weights.get("patch_embed.proj.weight")
        return join_registers(weights, None if kernel is None else grid_from_settings(self.settings, kernel.shape[-1]))

    @property
    def what(self) -> str:
        """Names the file and its origin in messages."""
        made_as = self.settings.get("model")
        return f"{str(self.path)!r} ({f'made as {made_as}' if made_as else self.origin.name})"

    @property
    def settings(self) -> dict[str, Any]:
        return self.meta.get("settings", {})

    @property
    def classes(self) -> list[str] | None:
        return self.meta.get("classes")

    @property
    def num_classes(self) -> int | None:
        """The number of classes of the head, that of a linear probe included. None: no head."""
        head = self.tensors.get("head.weight", self.tensors.get("head.1.weight"))
        return None if head is None else len(head)

    @property
    def pixels(self) -> dict[str, Any]:
        """Type, mean and std of the images, None where unknown."""
        return checkpoint.pixel_settings(self.meta)

    @cached_property
    def kind(self) -> Kind:
        return find_kind(self.tensors)

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """Arguments of `kind.encoder`. ValueError if the weights are of no known kind or size."""
        return self.kind.read_sizes(self.tensors, self.settings, self.what)


class LoadReport(NamedTuple):
    """What `fit` did with the keys of the file and of the model."""

    loaded: list[str]
    resized: list[str]
    missing: list[str]
    unexpected: list[str]
    remarks: Sequence[str] = ()

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
        return "; ".join([*parts, *self.remarks])


# --------------------------------------------------------------------------------------------------------------- read


def read(path: str | Path) -> Weights:
    """Reads the weights at `path`: a file, or the folder of a run, of an export, or of Transformers.

    A run's folder stands for its newest intact checkpoint. Raises CheckpointError, a ValueError, if there are no
    weights.
    """
    is_verified = Path(path).is_dir()  # by `find_checkpoint_file`
    path = checkpoint.find_checkpoint_file(path)
    contents = [checkpoint.read_checkpoint(file, is_verified) for file in checkpoint.list_shards(path)]
    raw = {name: value for content in contents for name, value in unwrap(content, path).items()}
    return Weights(path, raw, checkpoint.meta_of(contents[0]))


def unwrap(content: Mapping[str, Any], path: str | Path) -> Tensors:
    """Returns the tensors in a file's content. CheckpointError if there are none with names.

    They lie under `model` (this project, MAE), `state_dict` (iBOT's backbones, mmpretrain) or `student` (training
    checkpoints of iBOT and DINO), or are the content itself (timm).
    """
    weights = content.get("model", content.get("state_dict", content.get("student", content)))
    if isinstance(weights, dict) and all(isinstance(key, str) for key in weights):
        tensors = {key: value for key, value in weights.items() if torch.is_tensor(value)}
        if tensors:
            return tensors
    raise CheckpointError(
        f"{str(path)!r} holds no weights by their names, not in `model`, `state_dict` or `student` either"
    )


# --------------------------------------------------------------------------------------------------------------- load


def load_model(path: str | Path) -> nn.Module:
    """Loads the encoder or the classifier at `path` (see `read`), in eval mode. A classifier has the attribute `head`.

    Raises ValueError if the file holds no model of a known kind.
    """
    return build(read(path))[0]


def load_encoder(
    model: nn.Module,
    path: str | Path,
    part: Part = "encoder",
    classes: Sequence[str] | None = None,
    first_release_merging: bool = False,
) -> LoadReport:
    """Loads the weights at `path` into `model`, see `read` and `fit`.

    first_release_merging: re-index the patch merging of GreenMIM's public files.
    """
    weights = read(path)
    if first_release_merging:
        weights = replace(weights, raw=swap_merging(weights.raw))
    return fit(model, weights, part, classes)


def build(weights: Weights, with_head: bool = True, **sizes: Any) -> tuple[nn.Module, LoadReport]:
    """Builds the encoder or the classifier that `weights` hold. Returns (model in eval mode, report).

    Each block of a ViT with relative positions has a bias table of its own.

    with_head: False leaves out the head of a classifier, and the final norm if the file holds none.
    sizes: win over the sizes that were inferred.
    """
    kind, tensors, sizes = weights.kind, weights.tensors, {**weights.sizes, **sizes}
    is_classifier = with_head and weights.num_classes is not None
    if is_classifier:
        pool = "avg" if kind is SWIN or "fc_norm.weight" in tensors else "token"
        options = dict(num_classes=weights.num_classes, global_pool=pool, probe="head.1.weight" in tensors)
        model = kind.classifier(**options, **sizes)
    else:
        model = kind.encoder(**sizes)
        if not with_head and "norm.weight" not in tensors:
            model.norm = nn.Identity()
    set_norm_eps(model, weights)
    report = fit(model, weights, "all" if is_classifier else "encoder")
    return model.eval(), report


def set_norm_eps(model: nn.Module, weights: Weights) -> None:
    """Gives the LayerNorms of `model` the epsilon that the file's config names."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = weights.settings.get("norm_eps", module.eps)


def fit(model: nn.Module, weights: Weights, part: Part = "encoder", classes: Sequence[str] | None = None) -> LoadReport:
    """Loads `weights` into `model`, and reports what was loaded, resized, missing and not used.

    part: what must match.
        "all": every key of file and model, without resizing.
        "encoder": all keys of the model but `head`, `fc_norm` and its `new_keys`, and each part of an encoder in the
            file. Encoders of CrossMAE and TEC's published ones have no final norm; it starts with weight 1 and bias 0.
        "blocks": patch embedding, class token and blocks. All else is loaded where names and shapes fit, a decoder, for
            example, as the start of another pre-training.
    classes: names of the model's classes, in order. A head of other classes is left out.

    Position tables of another grid are resized bicubically, with the class rows kept, and tables of relative-position
    biases by a spline. A bias table that all blocks share is copied into each block. A patch embedding of 3 channels is
    adapted to other channels by timm's rule: it is repeated and divided by the growth of their number, or summed for
    one channel. The MLP on TEC's class token is folded into the token, unless the model has such an MLP. In TEC's
    published files it is folded already: the model then loses its MLP.

    Raises CheckpointError, a ValueError, which names the file, its origin, the model's class and the keys. That also
    holds for position tables that are zero everywhere. FloatingPointError if a weight is not finite. The model is then
    unchanged.
    """
    tensors, remarks = _rename_for(model, weights)
    own, what, name = model.state_dict(), weights.what, type(model).__name__
    loses_mlp = CLS_TOKEN_MLP in own and is_published_tec(weights.raw)
    if loses_mlp:
        own = {key: value for key, value in own.items() if not key.startswith("cls_token_mlp.")}
        remarks.append("the file is taken for TEC's publication, so the class token is used without its MLP")
    if part == "all":
        checkpoint.load_strict(model, tensors, f"the weights in {what}")
        return LoadReport(list(tensors), [], [], [], remarks)
    tensors = _copy_shared_bias_table(tensors, own)
    found = {key: value for key, value in tensors.items() if key in own}
    if _has_other_classes(weights, found, own, classes):
        found = {key: value for key, value in found.items() if not key.startswith("head.")}
    _check_cls_tokens(found, own, what, name)
    remarks += _fit_patch_embed(found, own, what, name)
    resized = _fit_tables(found, weights.settings, own, model, what)
    if part == "blocks":
        found = {key: value for key, value in found.items() if value.shape == own[key].shape or _is_of_blocks(key)}
    missing = [key for key in own if key not in found]
    lacks_norm = "norm.weight" in missing and not weights.origin.has_norm
    new = ("head.", "fc_norm.", "norm.") if lacks_norm else ("head.", "fc_norm.")
    needed = [key for key in missing if not (key.startswith(new) or key.endswith(getattr(model, "new_keys", ())))]
    needed = [key for key in needed if part == "encoder" or _is_of_blocks(key)]
    problems = [f"missing: {shorten(needed, most=6)}"] if needed else []
    if misshaped := checkpoint.list_misshaped(found, own):
        problems.append(shorten(misshaped, most=6))
    if problems:
        raise CheckpointError(f"{what} does not hold the encoder of this {name}: {'; '.join(problems)}")
    used = [key for key in tensors if not key.startswith(getattr(model, "unused_keys", ()))]
    # The final norm and the positions of a classifier or of a pre-training model may be others.
    refuse_foreign(model, used, what, PATCH_KEYS if part == "blocks" or hasattr(model, "head") else ENCODER_KEYS)
    checkpoint.check_values(found, f"the weights in {what}")
    if loses_mlp:
        model.cls_token_mlp = nn.Identity()
    model.load_state_dict(found, strict=False)
    if lacks_norm:
        model.norm.reset_parameters()
        remarks.append(f"the file, {weights.origin.name}, holds no final norm: norm starts with weight 1 and bias 0")
    return LoadReport(list(found), resized, missing, [key for key in tensors if key not in found], remarks)


def refuse_foreign(model: nn.Module, keys: Sequence[str], what: str, parts: tuple[str, ...]) -> None:
    """Raises CheckpointError if `keys` of a file belong to parts that `model` lacks: its features would differ.

    parts: how the keys of these parts begin.
    """
    own = model.state_dict()
    foreign = [k for k in keys if k.startswith(parts) and not k.endswith(COMPUTED_KEYS) and k not in own]
    if foreign:
        raise CheckpointError(
            f"{what} holds another kind of encoder: this {type(model).__name__} has no {shorten(foreign, most=6)}"
        )


def _is_of_blocks(key: str) -> bool:
    return key == "cls_token" or key.startswith(("patch_embed.", "blocks.", "layers."))


def _rename_for(model: nn.Module, weights: Weights) -> tuple[Tensors, list[str]]:
    """Returns (the weights under the model's names, remarks on the class token and on the LayerNorms).

    A pre-training model may have the names of its release: those of which it has more are taken.
    """
    own, remarks = model.state_dict(), []
    tensors = max(weights.tensors, weights.raw, key=lambda tensors: len(own.keys() & tensors.keys()))
    if CLS_TOKEN_MLP in tensors and CLS_TOKEN_MLP not in own:
        tensors = fold_cls_token(tensors)
        remarks.append("the MLP on the class token is folded into the token")
    eps = {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
    stored = weights.settings.get("norm_eps")
    if stored is not None and eps - {stored}:
        remarks.append(f"the file's config has LayerNorms with eps {stored}, here eps is {', '.join(map(str, eps))}")
    if hasattr(model, "adapt_weights"):
        tensors = model.adapt_weights(tensors)
    return tensors, remarks


def _copy_shared_bias_table(tensors: Tensors, own: Mapping[str, torch.Tensor]) -> Tensors:
    """Copies the bias table that SimMIM's blocks share in pre-training into each block of the model."""
    shared = tensors.get(f"rel_pos_bias.{BIAS_TABLE}")
    if shared is None or f"rel_pos_bias.{BIAS_TABLE}" in own:
        return tensors
    tensors = {key: value for key, value in tensors.items() if key != f"rel_pos_bias.{BIAS_TABLE}"}
    copies = {key: shared for key in own if key.endswith(f"attn.{BIAS_TABLE}") and key not in tensors}
    return tensors | copies


def _has_other_classes(
    weights: Weights, found: Tensors, own: Mapping[str, torch.Tensor], classes: Sequence[str] | None
) -> bool:
    """Returns whether the file's head is for other classes: it has another shape, or the classes other names."""
    if any(value.shape != own[key].shape for key, value in found.items() if key.startswith("head.")):
        return True
    return classes is not None and weights.classes is not None and weights.classes != list(classes)


def _check_cls_tokens(found: Tensors, own: Mapping[str, torch.Tensor], what: str, name: str) -> None:
    """Raises CheckpointError if file and model have class tokens, but not as many. name: the model's class."""
    if "cls_token" in found and found["cls_token"].shape[1:2] != own["cls_token"].shape[1:2]:
        number = found["cls_token"].shape[1]
        raise CheckpointError(
            f"{what} holds an encoder with {count_of(number, 'class token')}, this {name} has "
            f"{own['cls_token'].shape[1]}: --num_cls_tokens {number} of main_pretrain.py and main_finetune.py makes "
            "a model that fits"
        )


def _fit_patch_embed(found: Tensors, own: Mapping[str, torch.Tensor], what: str, name: str) -> list[str]:
    """Adapts a patch embedding of 3 channels, in place, to those of the model. Returns a remark, or nothing.

    Raises CheckpointError for another width, or for other channels than 3. name: the model's class, for errors.
    """
    key = "patch_embed.proj.weight"
    if key not in found or found[key].ndim != 4:
        return []
    (width, channels), (own_width, own_channels) = found[key].shape[:2], own[key].shape[:2]
    if width != own_width:
        raise CheckpointError(f"{what} holds an encoder of width {width}, this {name} has width {own_width}")
    if channels == own_channels:
        return []
    if channels != 3:
        sizes = f"holds an encoder of {channels} channels, this {name} is for {own_channels}"
        raise CheckpointError(f"{what} {sizes}: only encoders of 3 channels can be adapted")
    found[key] = timm_models.adapt_input_conv(own_channels, found[key])
    return [f"{key} adapted from 3 channels to {own_channels}"]


# ----------------------------------------------------------------------------------------------- tables of another size


def _fit_tables(
    found: Tensors, settings: Mapping[str, Any], own: Mapping[str, torch.Tensor], model: nn.Module, what: str
) -> list[str]:
    """Resizes the tables of positions and of relative-position biases, in place. Returns the keys of those resized."""
    kernel, resized = found.get("patch_embed.proj.weight"), []
    patch_size = settings.get("patch_size") or (None if kernel is None else kernel.shape[-1])  # exports lack the former
    grid = grid_from_settings(settings, patch_size)
    for key, value in found.items():
        if key == "pos_embed":
            found[key] = _fit_pos_embed(value, grid, own[key], tuple(model.grid_size), what)
        elif key.endswith(BIAS_TABLE):
            found[key] = _fit_bias_table(value, grid, own[key], model, what)
        if found[key] is not value:
            resized.append(key)
    return resized


def _fit_pos_embed(
    table: torch.Tensor, grid: tuple[int, int] | None, own: torch.Tensor, grid_size: tuple[int, int], what: str
) -> torch.Tensor:
    """Returns a position table [1, P + n, D] resized to the model's `grid_size`; the same tensor if it fits already.

    grid: that of the table, from the settings of its run. If it is None or has another number of tokens, a square grid
    is assumed.
    """
    num_tokens = table.shape[1] - (own.shape[1] - math.prod(grid_size))
    side = math.isqrt(num_tokens)
    square = (side, side) if side * side == num_tokens else None
    source = grid if grid is not None and math.prod(grid) == num_tokens else square
    if source == grid_size:
        return table
    if source is None or table.shape[2] != own.shape[2]:
        shapes = f"{list(table.shape)} of {what} cannot be resized to {list(own.shape)}"
        raise CheckpointError(f"pos_embed {shapes}: a square grid plus class rows is needed")
    return resize_pos_embed(table, source, grid_size)


def _fit_bias_table(
    table: torch.Tensor, grid: tuple[int, int] | None, own: torch.Tensor, model: nn.Module, what: str
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
