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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from encoders import exported, strict
from encoders.kinds import PLAIN, SWIN, Kind, find_kind
from encoders.names import (
    CLS_TOKEN_MLP,
    COMPUTED_KEYS,
    Origin,
    Tensors,
    constant_mlp,
    drop_prefix,
    find_origin,
    fold_cls_token,
    fold_scales,
    from_dino,
    is_gated,
    is_scale,
    swap_merging,
)
from encoders.resize import check_cls_tokens, choose_rgb_bands, fit_patch_embed, fit_tables, patch_size
from models_vit import traits_in
from util.pos_embed import BIAS_TABLE, grid_from_settings, height_and_width
from util.run.errors import CheckpointError
from util.run.files import checkpoint
from util.run.files.record import CheckpointInfo
from util.text import shorten

if TYPE_CHECKING:
    from util.run.start.run import Run

# Beginnings of an encoder's keys. Weights with such a key that the model lacks are those of another network. Positions
# may be a table or biases, and a classifier with mean pooling has another final norm: PATCH_KEYS are the others.
PATCH_KEYS = ("patch_embed.", "blocks.", "layers.", "norm_pre.", "pre_norm.", "reg_token")
ENCODER_KEYS = (*PATCH_KEYS, "cls_token", "pos_embed", "norm.", "rel_pos_bias.")
# Beginnings of keys of others: of heads and of what only pre-training has.
OTHER_KEYS = (
    *("head", "fc_norm.", "pooler.", "mask_token", "masked_embed", "decoder", "pred."),
    *("aggregation.", "proj_layers.", "proj_weights", "encoder_adaptor.", "cls_token_mlp.", "rope_embed."),
    *("wfm.", "dec_norms.", "forward_fea_decoder.", "forward_att_decoder.", "hog_enc."),  # of releases
)
DENSE_PROGRAMS = ("main_segmentation.py", "main_detection.py")  # their encoders have positions in each block


@dataclass(frozen=True)
class Weights:
    """What a file holds, see `interpret`.

    path: of the file, or a name. raw: its tensors under its own names. info: what the file says beside them. origin:
    the project whose names these are. tensors: the same under the names here, which are those of MAE and timm.
    settings: what the file says of its run or network, and its weights of their network. kind: of the encoder.
    """

    path: str | Path
    raw: Tensors
    info: CheckpointInfo
    origin: Origin
    tensors: Tensors
    settings: dict[str, Any]
    kind: Kind

    @property
    def what(self) -> str:
        """Names the file and its origin in messages."""
        provenance = self.origin.name
        if self.info.settings.get("model"):
            provenance = f"made as {self.info.settings['model']}"
        return f"{str(self.path)!r} ({provenance})"

    @property
    def pixels(self) -> dict[str, Any]:
        """Type, mean and std of the images, None where unknown."""
        return self.info.pixel_settings

    @property
    def num_classes(self) -> int | None:
        """The number of classes of the head, that of a linear probe included. None: no head."""
        for key in ("head.weight", "head.1.weight"):
            if key in self.tensors:
                return len(self.tensors[key])
        return None

    @property
    def in_chans(self) -> int | None:
        """The channels of the images, None without a patch embedding."""
        kernel = self.tensors.get("patch_embed.proj.weight")
        return None if kernel is None else kernel.shape[1]

    @property
    def traits(self) -> dict[str, Any]:
        """Those arguments of a plain ViT that follow from its first weights: see `models_vit.TRAITS`."""
        return traits_in(self.settings) if self.is_dense or self.kind is PLAIN else {}

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of `kind.encoder`. ValueError if the weights are of no known kind or size, or of a dense task."""
        self.refuse_dense()
        return self.kind.read_sizes(self.tensors, self.settings, self.what)

    @property
    def is_dense(self) -> bool:
        """Whether this is the model of a dense task, whose encoder has positions in each block."""
        return self.info.run is not None and self.info.run.program in DENSE_PROGRAMS

    def refuse_dense(self) -> None:
        """Raises CheckpointError for the model of a dense task."""
        if self.is_dense:
            raise CheckpointError(f"{self.what} is a model of a dense task: give the encoder that it started from")


def interpret(path: str | Path, raw: Tensors, info: CheckpointInfo) -> Weights:
    """Finds out what weights are. CheckpointError if they are of a network that no encoder here is.

    The arguments are the first fields of `Weights`.
    """
    origin = find_origin(raw)
    renamed = origin.rename(raw)
    if is_gated(renamed):
        raise CheckpointError(f"{str(path)!r} has gated MLPs (SwiGLU), which no encoder here has")
    if "blocks.0.gamma_1" in renamed and "pos_embed" in renamed and find_kind(renamed) is PLAIN:
        raise CheckpointError(
            f"{str(path)!r} has a table of positions and the names of timm's ViTs that rotate queries, too, which no "
            "encoder here does; of DeiT III give timm's file"
        )
    tensors, of_network = from_dino(renamed, grid_from_settings(info.settings, patch_size(renamed)))
    cls_token = tensors.get("cls_token")
    if cls_token is not None and cls_token.ndim == 3:
        of_network["num_cls_tokens"] = cls_token.shape[1]
    return Weights(path, raw, info, origin, tensors, {**of_network, **info.settings}, find_kind(tensors))


class LoadReport(NamedTuple):
    """What became of the keys of the file and of the model."""

    loaded: list[str]
    resized: Sequence[str] = ()
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def __str__(self) -> str:
        """Returns one line of counts and names. Unexpected keys are named by their modules, such as `decoder`."""
        parts = [f"{len(self.loaded)} loaded"]
        for what, keys in {"resized": self.resized, "missing": self.missing, "not used": self.unexpected}.items():
            names = keys
            if what == "not used":
                names = list(dict.fromkeys(key.partition(".")[0] for key in keys))
            in_brackets = f" ({shorten(names, most=6)})" if names else ""
            parts.append(f"{len(keys)} {what}{in_brackets}")
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
    """Returns the tensors in a file, and in its further shards, and what it says beside them.

    A tensor is read from the file when it is used.
    """
    tensors: Tensors = {}
    for file in exported.list_shards(path):
        if file.suffix == ".safetensors":
            part = exported.read_safetensors(file)
        else:
            part = checkpoint.read_checkpoint(file, is_verified, mmap=True)
        tensors.update(part.weights)
    info = part.info
    if path.suffix in (".safetensors", ".bin"):
        info = exported.add_config(info, path)
    return tensors, info


@dataclass(frozen=True)
class FirstWeights:
    """What a run begins with. weights: those of a new run, None if they are random. A resumed run reads none again.

    recorded: the settings of a resumed run. rgb_bands: which bands of the images hold red, green and blue, if the
    weights are for RGB and the images have other bands; see `encoders.resize.choose_rgb_bands`.
    """

    weights: Weights | None
    recorded: Mapping[str, Any]
    rgb_bands: Sequence[int] | None

    @property
    def traits(self) -> dict[str, Any]:
        """See `Weights.traits`."""
        return traits_in(self.recorded) if self.weights is None else self.weights.traits

    @property
    def settings(self) -> dict[str, Any]:
        """What the settings of the run say of them."""
        return {"rgb_bands": self.rgb_bands, **self.traits}

    @property
    def pixels(self) -> dict[str, Any]:
        """See `Weights.pixels`."""
        return {} if self.weights is None else self.weights.pixels


def read_first(run: "Run") -> FirstWeights:
    """Reads the weights that a new run begins with, or what a resumed run has recorded of its own.

    ValueError if --rgb_bands is missing or has no effect.
    """
    args = run.args
    if run.resumed is not None:
        return FirstWeights(None, run.resumed.settings, args.rgb_bands or run.resumed.settings.get("rgb_bands"))
    if run.first_weights is None:
        return FirstWeights(None, {}, choose_rgb_bands(args.rgb_bands, None, args.in_chans))
    weights = read(run.first_weights.path, run.process.need_not_verify)
    return FirstWeights(weights, {}, choose_rgb_bands(args.rgb_bands, weights.in_chans, args.in_chans))


# --------------------------------------------------------------------------------------------------------------- load


def load_all(model: nn.Module, weights: Weights) -> LoadReport:
    """Loads every key of the file, which must be those of the model, without resizing."""
    tensors, remarks = _rename_for(model, weights)
    strict.load_strict(model, tensors, f"the weights in {weights.what}")
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
    weights = _opened(source)
    if first_release_merging:
        weights = interpret(weights.path, swap_merging(weights.raw), weights.info)
    fitted = _fit(model, weights, rgb_bands)
    objection = _object_to_head(weights, fitted, model, classes)
    if objection:
        fitted.remarks.append(f"the head is not loaded: {objection}")
        fitted = fitted._replace(fitting=drop_prefix(fitted.fitting, "head."))
    missing = fitted.list_missing(model)
    optional = ("head.", "fc_norm.", "norm.")
    required = [key for key in missing if not key.startswith(optional)]
    prefixes: tuple[str, ...] = ENCODER_KEYS
    if hasattr(model, "head"):  # the final norm and the positions of a classifier may be others
        prefixes = PATCH_KEYS
    if getattr(model, "pos_embed", None) is None:
        prefixes = (*prefixes, "pos_embed")  # learnt with the encoder
    report = _put(model, weights, fitted, required, prefixes)
    if "norm.weight" in missing:
        model.norm.reset_parameters()
        fitted.remarks.append("the file holds no final norm: norm starts with weight 1 and bias 0")
    return report


def load_blocks(model: nn.Module, source: str | Path | Weights, rgb_bands: Sequence[int] | None = None) -> LoadReport:
    """Loads the start of another pre-training: patch embedding, positions, class token and blocks must match.

    All else, a decoder, for example, is loaded where names and shapes fit. Tensors are fitted as in `load_encoder`.
    """
    weights = _opened(source)
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
        if _is_of_blocks(key) or (value.shape == model_state[key].shape and not is_misplaced):
            fitting[key] = value
    fitted = fitted._replace(fitting=fitting)
    # Without its table, a file is of an encoder that knows positions in another way.
    required = [key for key in fitted.list_missing(model) if _is_of_blocks(key) or key == "pos_embed"]
    return _put(model, weights, fitted, required, PATCH_KEYS)


def build(weights: Weights, with_head: bool = True, **sizes: Any) -> tuple[nn.Module, LoadReport]:
    """Builds the encoder or the classifier that `weights` hold. Returns (model in eval mode, report).

    Each block of a ViT with relative positions has a bias table of its own.

    with_head: False leaves out the head of a classifier, and the final norm if the file holds none.
    sizes: win over the sizes that were inferred.
    """
    sizes = {**weights.sizes, **sizes}
    kind = weights.kind
    tensors = weights.tensors
    model: nn.Module
    if with_head and weights.num_classes is not None:
        pools_mean = kind is SWIN or "fc_norm.weight" in tensors
        model = kind.make_classifier(
            num_classes=weights.num_classes,
            global_pool="avg" if pools_mean else "token",
            probe="head.1.weight" in tensors,
            **sizes,
        )
        return model.eval(), load_all(model, weights)
    model = kind.make_encoder(**sizes)
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

    def list_missing(self, model: nn.Module) -> list[str]:
        """Returns the keys of the model that the file lacks, but for those that pre-training does not have."""
        missing = [key for key in model.state_dict() if key not in self.fitting]
        return [key for key in missing if not key.endswith(getattr(model, "new_keys", ()))]


def _opened(source: str | Path | Weights) -> Weights:
    return source if isinstance(source, Weights) else read(source)


def _fit(model: nn.Module, weights: Weights, rgb_bands: Sequence[int] | None) -> _Fitted:
    """Renames and resizes the tensors of a file for `model`."""
    if not hasattr(model, "new_keys"):
        weights.refuse_dense()
    tensors, remarks = _rename_for(model, weights)
    if weights.settings.get("model"):
        remarks.insert(0, f"made as {weights.settings['model']}")
    if weights.settings.get("rotary") and not getattr(model, "rotary", False):
        raise CheckpointError(
            f"{weights.what} has rotary positions, as DINOv3, which this {type(model).__name__} has not"
        )
    model_state = model.state_dict()
    if CLS_TOKEN_MLP in model_state and CLS_TOKEN_MLP not in tensors and "cls_token" in tensors:
        tensors = {**tensors, **constant_mlp(tensors["cls_token"], model_state)}
        remarks.append("the MLP on the class token begins as the file's token")
    tensors = _copy_shared_bias_table(tensors, model_state)
    fitting = {key: value for key, value in tensors.items() if key in model_state}
    label = weights.what
    class_name = type(model).__name__
    check_cls_tokens(fitting, model_state, label, class_name)
    remarks += fit_patch_embed(fitting, model_state, label, class_name, rgb_bands, weights.pixels)
    resized = fit_tables(fitting, weights.settings, model_state, model, label)
    return _Fitted(tensors, fitting, resized, remarks)


def _put(
    model: nn.Module,
    weights: Weights,
    fitted: _Fitted,
    required: Sequence[str],
    prefixes: tuple[str, ...],
) -> LoadReport:
    """Loads what fits. CheckpointError if it lacks keys or has other shapes, or if the file has other parts.

    required: keys of the model that are missing. prefixes: see `refuse_foreign`.
    """
    problems = strict.list_misshaped(fitted.fitting, model.state_dict())
    if required:
        problems.insert(0, f"missing: {shorten(required, most=6)}")
    if problems:
        what = f"{weights.what} does not hold the encoder of this {type(model).__name__}"
        raise CheckpointError(f"{what}: {shorten(problems, most=6)}")
    expected = [key for key in fitted.tensors if not key.startswith(getattr(model, "unused_keys", ()))]
    if weights.info.run is None:
        unknown = [key for key in expected if not key.startswith((*ENCODER_KEYS, *OTHER_KEYS))]
        prefixes = (*prefixes, *unknown)
    refuse_foreign(model, expected, weights.what, prefixes)
    strict.check_values(fitted.fitting, f"the weights in {weights.what}")
    missing = fitted.list_missing(model)
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


def _is_of_blocks(key: str) -> bool:
    return key == "cls_token" or key.startswith(("patch_embed.", "blocks.", "layers."))


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
            raise CheckpointError(f"{weights.what} has {stored_heads} heads, this {type(model).__name__} has {heads}")
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


def _object_to_head(weights: Weights, fitted: _Fitted, model: nn.Module, classes: Sequence[str] | None) -> str:
    """Returns what says that the file's head is for other classes than the model's, or ""."""
    model_state = model.state_dict()
    for key, value in fitted.fitting.items():
        if key.startswith("head.") and value.shape != model_state[key].shape:
            return f"it has {weights.num_classes} classes, the model {len(model_state[key])}"
    for i, (theirs, ours) in enumerate(zip(weights.info.classes or (), classes or (), strict=False)):
        if theirs != ours:
            return f"its class {i} is {theirs!r}, the model's {ours!r}"
    return ""
