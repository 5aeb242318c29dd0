"""The one way to weights: reads a file of any origin, and fits it into any model. `trained` builds the model, too.

    from encoders.load import load_encoder

    print(load_encoder(model, "mae_pretrain_vit_base.pth"))  # a file of any origin, or the folder of a run

`load_all`, `load_encoder` and `load_blocks` differ in what must match. `encoders.names` has the key names of each
origin, `encoders.kinds` the kinds of encoders, `encoders.resize` what adapts tensors to the model's size. A model may
define

new_keys: endings of its parameters that pre-training does not have.
unused_keys: beginnings of an encoder's parameters that it does not use.
adapt_weights(tensors): returns the weights under names of its own.

Errors are CheckpointErrors, which are ValueErrors and name the file; FloatingPointError if a weight is not finite.
"""

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from encoders import exported, strict
from encoders.kinds import PLAIN, SWIN, Kind, find_kind
from encoders.names import (
    CLS_TOKEN_MLP,
    COMPUTED_KEYS,
    Tensors,
    constant_mlp,
    drop_prefix,
    find_origin,
    fold_cls_token,
    fold_scales,
    from_dino,
    is_scale,
    swap_merging,
)
from encoders.resize import choose_rgb_bands, fit_patch_embed, fit_tables
from models_vit import traits_in
from util.pos_embed import BIAS_TABLE, height_and_width
from util.run.errors import CheckpointError
from util.run.files import checkpoint
from util.run.files.record import CheckpointInfo
from util.text import shorten

if TYPE_CHECKING:
    from util.run.start.run import Run

# Beginnings of the keys that file and model must both have, or neither. A final norm is not among them: the heads of
# classifiers with mean pooling, of dense tasks, and CrossMAE's decoder read what is before it.
ENCODER_KEYS = (
    "patch_embed.",
    "cls_token",
    "reg_token",
    "pos_embed",
    "rel_pos_bias.",
    "norm_pre.",
    "pre_norm.",
    "blocks.",
    "layers.",
)
# Beginnings of keys of others: of heads and of what only pre-training has.
OTHER_KEYS = (
    *("head", "norm.", "fc_norm.", "pooler.", "mask_token", "masked_embed", "decoder", "pred."),
    *("aggregation.", "proj_layers.", "proj_weights", "encoder_adaptor.", "cls_token_mlp.", "rope_embed."),
    *("wfm.", "dec_norms.", "forward_fea_decoder.", "forward_att_decoder.", "hog_enc."),  # of releases
)


@dataclass(frozen=True)
class Weights:
    """What a file holds, see `interpret`.

    path: of the file, or a name. label: names the file and its origin in messages. raw: its tensors under its own
    names. tensors: the same under the names here, which are those of MAE and timm. info: what the file says beside
    them. settings: what the file says of its run or network, and its weights of their network. kind: of the encoder.
    traits: those arguments of a plain ViT that follow from its first weights, see `models_vit.TRAITS`.
    """

    path: str | Path
    label: str
    raw: Tensors
    tensors: Tensors
    info: CheckpointInfo
    settings: dict[str, Any]
    kind: Kind
    traits: dict[str, Any]
    in_chans: int | None  # None without a patch embedding
    num_classes: int | None  # of the head, that of a linear probe included; None without a head


def interpret(path: str | Path, raw: Tensors, info: CheckpointInfo) -> Weights:
    """Finds out what weights are. CheckpointError if they are of a network that no encoder here is.

    path, raw, info: see `Weights`.
    """
    origin = find_origin(raw)
    tensors = origin.rename(raw)
    kind = find_kind(tensors)
    of_network: dict[str, Any] = {}
    if kind is PLAIN:
        if "blocks.0.gamma_1" in tensors and "pos_embed" in tensors:
            raise CheckpointError(
                f"{str(path)!r} has a table of positions and the names of timm's ViTs that rotate queries, too, which "
                "no encoder here does; of DeiT III give timm's file"
            )
        if "pos_embed" in tensors and not tensors["pos_embed"].any():
            raise CheckpointError(
                f"the table of positions in {str(path)!r} is zero everywhere, as ViTMAEForPreTraining(config) of "
                "Transformers 5 begins and keeps it: give weights that were trained with positions"
            )
        tensors, of_network = from_dino(tensors, info.settings)
    settings = {**of_network, **info.settings}
    provenance = origin.name
    if info.settings.get("model"):
        provenance = f"made as {info.settings['model']}"
    kernel = tensors.get("patch_embed.proj.weight")
    head = tensors.get("head.weight", tensors.get("head.1.weight"))
    return Weights(
        path=path,
        label=f"{str(path)!r} ({provenance})",
        raw=raw,
        tensors=tensors,
        info=info,
        settings=settings,
        kind=kind,
        traits=traits_in(settings),
        in_chans=None if kernel is None else kernel.shape[1],
        num_classes=None if head is None else len(head),
    )


class LoadReport(NamedTuple):
    """What became of the keys of the file and of the model."""

    loaded: list[str]
    resized: Sequence[str] = ()
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def __str__(self) -> str:
        """Returns one line of counts and names of modules, such as `decoder`."""
        parts = [f"{len(self.loaded)} loaded"]
        for what, keys in {"resized": self.resized, "missing": self.missing, "not used": self.unexpected}.items():
            part = f"{len(keys)} {what}"
            if keys:
                modules = dict.fromkeys(key.partition(".")[0] for key in keys)
                part += f" ({shorten([*modules], most=6)})"
            parts.append(part)
        return "; ".join([*parts, *self.remarks])


# --------------------------------------------------------------------------------------------------------------- read


def read(path: str | Path, is_verified: bool = False) -> Weights:
    """Reads the weights at `path`: a file, or the folder of a run, of an export, or of Transformers.

    A run's folder stands for its newest intact checkpoint. Raises CheckpointError, a ValueError, if there are no
    weights. is_verified: the hash of the file has just been compared.
    """
    file = checkpoint.find_checkpoint_file(path)
    raw, info = read_file(file, is_verified or Path(path).is_dir())
    return interpret(file, raw, info)


def read_file(path: Path, is_verified: bool = False) -> tuple[Tensors, CheckpointInfo]:
    """Returns the tensors in a file, and what it says beside them. A tensor is read when it is used."""
    if path.suffix == ".safetensors":
        content = exported.read_safetensors(path)
    else:
        content = checkpoint.read_checkpoint(path, is_verified, mmap=True)
    info = content.info
    if path.suffix in (".safetensors", ".bin"):
        info = exported.add_config(info, path)
    return content.weights, info


class FirstWeights(NamedTuple):
    """What a run begins with. A resumed run reads no weights again.

    weights: those of a new run, None if they are random. rgb_bands: which bands of the images hold red, green and blue,
    if the weights are for RGB and the images have other bands; see `encoders.resize.choose_rgb_bands`. settings: what
    the settings of the run say of both. pixels: type, mean and std of the weights' images, None where unknown.
    """

    weights: Weights | None
    rgb_bands: Sequence[int] | None
    settings: dict[str, Any]
    pixels: dict[str, Any]


def read_first(run: "Run") -> FirstWeights:
    """Reads the weights that a new run begins with, or what a resumed run has recorded of its own.

    ValueError if --rgb_bands is missing or has no effect.
    """
    weights = None
    traits: dict[str, Any] = {}
    pixels: dict[str, Any] = {}
    in_chans = None
    rgb_bands = run.args.rgb_bands
    if run.resumed is not None:
        traits = traits_in(run.resumed.settings)
        rgb_bands = rgb_bands or run.resumed.settings.get("rgb_bands")
    else:
        if run.first_weights is not None:
            weights = read(run.first_weights.path, run.process.need_not_verify)
            traits = weights.traits
            pixels = weights.info.pixel_settings
            in_chans = weights.in_chans
        rgb_bands = choose_rgb_bands(rgb_bands, in_chans, run.args.in_chans)
    return FirstWeights(weights, rgb_bands, {"rgb_bands": rgb_bands, **traits}, pixels)


# --------------------------------------------------------------------------------------------------------------- load


def load_all(model: nn.Module, weights: Weights) -> LoadReport:
    """Loads every key of the file, which must be those of the model, without resizing."""
    tensors, remarks = _rename_for(model, weights)
    strict.load_strict(model, tensors, f"the weights in {weights.label}")
    return LoadReport(list(tensors), remarks=remarks)


def load_encoder(
    model: nn.Module,
    source: str | Path | Weights,
    classes: Sequence[str] | None = None,
    first_release_merging: bool = False,
    rgb_bands: Sequence[int] | None = None,
) -> LoadReport:
    """Loads an encoder, and a head if it fits, into an encoder or a classifier.

    source: see `read`, or what it has returned.
    classes: names of the model's classes, in order. A head of other classes is left out.
    first_release_merging: re-index the patch merging of GreenMIM's public files.
    rgb_bands: the model's channels that hold red, green and blue for weights of RGB, from 0; the others begin without
        effect. Of one channel they are 0, 0, 0 by default. ValueError if they are needed or have no effect.

    All keys of the model must be in the file but `head`, `fc_norm`, its `new_keys` and the final norm, which starts
    with weight 1 and bias 0 then: CrossMAE's encoders and TEC's published ones have none. Each part of the file's
    encoder must be in the model.

    Position tables of another grid are resized bicubically, with the class rows kept, and tables of relative-position
    biases by a spline. A bias table that all blocks share is copied into each block. The MLP on TEC's class token is
    folded into the token, unless the model has such an MLP. Where the file has none, the MLP begins as a constant map
    to the file's token: TEC's published files are such. Layer scales that the model lacks are folded into its weights.
    """
    weights = source if isinstance(source, Weights) else read(source)
    if first_release_merging:
        weights = replace(weights, tensors=swap_merging(weights.tensors))
    fitted = _fit(model, weights, rgb_bands)
    model_state = model.state_dict()
    has_other_classes = classes is not None and weights.info.classes not in (None, [*classes])
    for key, value in fitted.fitting.items():
        if key.startswith("head.") and value.shape != model_state[key].shape:
            has_other_classes = True
    if has_other_classes:
        fitted.remarks.append("the head is not loaded: it is for other classes")
        fitted = fitted._replace(fitting=drop_prefix(fitted.fitting, "head."))
    report = _put(model, weights, fitted)
    if "norm.weight" in report.missing:
        model.norm.reset_parameters()
        fitted.remarks.append("the file holds no final norm: norm starts with weight 1 and bias 0")
    return report


def load_blocks(model: nn.Module, source: str | Path | Weights, rgb_bands: Sequence[int] | None = None) -> LoadReport:
    """Loads the start of another pre-training: patch embedding, positions, class token and blocks must match.

    All else, a decoder, for example, is loaded where names and shapes fit. Tensors are fitted as in `load_encoder`.
    """
    weights = source if isinstance(source, Weights) else read(source)
    fitted = _fit(model, weights, rgb_bands)
    size = weights.settings.get("input_size")
    has_other_grid = "pos_embed" in fitted.resized
    if size and height_and_width(size) != tuple(model.img_size):
        has_other_grid = True
    model_state = model.state_dict()
    fitting = {}
    for key, value in fitted.fitting.items():
        # Tables of decoders may have as many tokens, in other places.
        is_misplaced = has_other_grid and key.endswith(".pos_embed")
        if key.startswith(ENCODER_KEYS) or (value.shape == model_state[key].shape and not is_misplaced):
            fitting[key] = value
    return _put(model, weights, fitted._replace(fitting=fitting))


def sizes_of(weights: Weights) -> dict[str, Any]:
    """Infers the arguments of the encoder. CheckpointError if the weights are of no known kind or size."""
    try:
        return weights.kind.read_sizes(weights.tensors, weights.settings)
    except KeyError as error:
        raise CheckpointError(f"{weights.label} holds no encoder of a known kind: it has no {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{weights.label}: {error}") from error


def build(weights: Weights, with_head: bool = True, **sizes: Any) -> tuple[nn.Module, LoadReport]:
    """Builds the encoder or the classifier that `weights` hold. Returns (model in eval mode, report).

    Each block of a ViT with relative positions has a bias table of its own.

    with_head: False leaves out the head of a classifier, and the final norm if the file holds none.
    sizes: win over the sizes that were inferred.
    """
    sizes = {**sizes_of(weights), **sizes}
    kind = weights.kind
    tensors = weights.tensors
    model: nn.Module
    if with_head and weights.num_classes is not None:
        pools_mean = kind is SWIN or "fc_norm.weight" in tensors
        model = pkgutil.resolve_name(kind.classifier)(
            num_classes=weights.num_classes,
            global_pool="avg" if pools_mean else "token",
            probe="head.1.weight" in tensors,
            **sizes,
        )
        return model.eval(), load_all(model, weights)
    model = pkgutil.resolve_name(kind.encoder)(**sizes)
    if not with_head and "norm.weight" not in tensors:
        model.norm = nn.Identity()
    report = load_encoder(model, weights)
    return model.eval(), report


# ------------------------------------------------------------------------------------------------------ what is shared


class _Fitted(NamedTuple):
    """The tensors of a file under the model's names, and those of them that the model has, in the model's size."""

    tensors: Tensors
    fitting: Tensors
    resized: list[str]
    remarks: list[str]


def _fit(model: nn.Module, weights: Weights, rgb_bands: Sequence[int] | None) -> _Fitted:
    """Renames and resizes the tensors of a file for `model`."""
    tensors, remarks = _rename_for(model, weights)
    model_state = model.state_dict()
    if CLS_TOKEN_MLP in model_state and CLS_TOKEN_MLP not in tensors and "cls_token" in tensors:
        tensors = {**tensors, **constant_mlp(tensors["cls_token"], model_state)}
        remarks.append("the MLP on the class token begins as the file's token")
    tensors = _copy_shared_bias_table(tensors, model_state)
    fitting = {key: value for key, value in tensors.items() if key in model_state}
    remarks += fit_patch_embed(fitting, model_state, weights.label, rgb_bands, weights.info.pixel_settings)
    resized = fit_tables(fitting, weights.settings, model_state, model, weights.label)
    return _Fitted(tensors, fitting, resized, remarks)


def _put(model: nn.Module, weights: Weights, fitted: _Fitted) -> LoadReport:
    """Loads what fits. CheckpointError if the file lacks parts of the encoder, or has other parts or shapes."""
    model_state = model.state_dict()
    absent = [key for key in model_state if key not in fitted.fitting]
    missing = [key for key in absent if not key.endswith(getattr(model, "new_keys", ()))]
    problems = strict.list_misshaped(fitted.fitting, model_state)
    required = [key for key in missing if key.startswith(ENCODER_KEYS)]
    if required:
        problems.insert(0, f"missing: {shorten(required, most=6)}")
    if problems:
        what = f"{weights.label} does not hold the encoder of this {type(model).__name__}"
        raise CheckpointError(f"{what}: {shorten(problems, most=6)}")
    expected = [key for key in fitted.tensors if not key.startswith(getattr(model, "unused_keys", ()))]
    prefixes: tuple[str, ...] = ENCODER_KEYS
    if weights.info.run is None:
        unknown = [key for key in expected if not key.startswith((*ENCODER_KEYS, *OTHER_KEYS))]
        prefixes = (*ENCODER_KEYS, *unknown)
    refuse_foreign(model, expected, weights.label, prefixes)
    strict.check_values(fitted.fitting, f"the weights in {weights.label}")
    model.load_state_dict(fitted.fitting, strict=False)
    unexpected = [key for key in fitted.tensors if key not in fitted.fitting]
    return LoadReport(list(fitted.fitting), fitted.resized, missing, unexpected, fitted.remarks)


def refuse_foreign(model: nn.Module, keys: Sequence[str], label: str, prefixes: tuple[str, ...]) -> None:
    """Raises CheckpointError if `model` lacks `keys` that begin with `prefixes`: its features would differ.

    label: names the file in the message.
    """
    model_keys = model.state_dict().keys()
    foreign = []
    for key in keys:
        is_relevant = key.startswith(prefixes) and not key.endswith(COMPUTED_KEYS)
        if is_relevant and key not in model_keys:
            foreign.append(key)
    if foreign:
        raise CheckpointError(
            f"{label} holds another kind of encoder: this {type(model).__name__} has no {shorten(foreign, most=6)}"
        )


def _rename_for(model: nn.Module, weights: Weights) -> tuple[Tensors, list[str]]:
    """Returns (the weights under the model's names, remarks on what was folded).

    A pre-training model may have the names of its release: those of which it has more are taken. CheckpointError if
    blocks have another number of heads than the file says: shapes do not show it.
    """
    remarks = []
    model_keys = model.state_dict().keys()
    tensors = weights.tensors
    if len(model_keys & weights.raw.keys()) > len(model_keys & tensors.keys()):
        tensors = weights.raw
    if CLS_TOKEN_MLP in tensors and CLS_TOKEN_MLP not in model_keys:
        tensors = fold_cls_token(tensors)
        remarks.append("the MLP on the class token is folded into the token")
    stored_heads = weights.settings.get("num_heads")
    for block in getattr(model, "blocks", ()):
        heads = getattr(block.attn, "num_heads", stored_heads)
        if stored_heads not in (None, heads):
            raise CheckpointError(f"{weights.label} has {stored_heads} heads, this {type(model).__name__} has {heads}")
    if hasattr(model, "adapt_weights"):
        tensors = model.adapt_weights(tensors)
    if any(is_scale(name) and name not in model_keys for name in tensors):
        tensors = fold_scales(tensors)
        remarks.append("layer scales are folded into the layers before them")
    return tensors, remarks


def _copy_shared_bias_table(tensors: Tensors, model_state: Tensors) -> Tensors:
    """Copies the bias table that SimMIM's blocks share in pre-training into each block of the model."""
    shared_key = f"rel_pos_bias.{BIAS_TABLE}"
    if shared_key not in tensors or shared_key in model_state:
        return tensors
    copied = dict(tensors)
    shared = copied.pop(shared_key)
    for key in model_state:
        if key.endswith(f"attn.{BIAS_TABLE}"):
            copied.setdefault(key, shared)
    return copied
