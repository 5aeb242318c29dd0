"""The one way to weights: reads a file of any origin, and fits it into any model. `trained` builds the model, too.

    from encoders.load import load_encoder

    print(load_encoder(model, "mae_pretrain_vit_base.pth"))  # a file of any origin, or the folder of a run

`encoders.names` has the key names of each origin, `encoders.kinds` the kinds of encoders, `encoders.resize` what
adapts tensors to the model's size. A model may define

new_keys: endings of its parameters that pre-training does not have.
unused_keys: beginnings of an encoder's parameters that it does not use.
adapt_weights(tensors): returns the weights under names of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from encoders.kinds import SWIN, Kind, find_kind
from encoders.names import (
    CLS_TOKEN_MLP,
    COMPUTED_KEYS,
    Origin,
    Tensors,
    drop_prefix,
    find_origin,
    fold_cls_token,
    is_published_tec,
    join_registers,
    swap_merging,
)
from encoders.resize import check_cls_tokens, fit_patch_embed, fit_tables, patch_size
from util.pos_embed import BIAS_TABLE, grid_from_settings, height_and_width
from util.run.files import checkpoint, search, strict
from util.run.files.record import CheckpointError, CheckpointInfo
from util.text import shorten

Part = Literal["all", "encoder", "blocks"]

# Beginnings of an encoder's keys. Weights with such a key that the model lacks are those of another network. Positions
# may be a table or biases, and a classifier with mean pooling has another final norm: PATCH_KEYS are the others.
PATCH_KEYS = ("patch_embed.", "blocks.", "layers.", "norm_pre.", "pre_norm.", "reg_token")
ENCODER_KEYS = (*PATCH_KEYS, "cls_token", "pos_embed", "norm.", "rel_pos_bias.")
DENSE_PROGRAMS = ("main_segmentation.py", "main_detection.py")  # their encoders have positions in each block


@dataclass(frozen=True)
class Weights:
    """What a file holds.

    path: of the file, or a name. raw: its tensors under its own names. info: what the file says beside them.
    """

    path: str | Path
    raw: Tensors
    info: CheckpointInfo = field(default_factory=CheckpointInfo)

    @cached_property
    def origin(self) -> Origin:
        return find_origin(self.raw)

    @cached_property
    def tensors(self) -> Tensors:
        """The weights under the names here, which are those of MAE and timm."""
        weights = self.origin.rename(self.raw)
        grid = grid_from_settings(self.settings, patch_size(weights))
        return join_registers(weights, grid)

    @property
    def what(self) -> str:
        """Names the file and its origin in messages."""
        provenance = self.origin.name
        if self.settings.get("model"):
            provenance = f"made as {self.settings['model']}"
        return f"{str(self.path)!r} ({provenance})"

    @property
    def settings(self) -> dict[str, Any]:
        return self.info.settings

    @property
    def classes(self) -> list[str] | None:
        return self.info.classes

    @property
    def num_classes(self) -> int | None:
        """The number of classes of the head, that of a linear probe included. None: no head."""
        for key in ("head.weight", "head.1.weight"):
            if key in self.tensors:
                return len(self.tensors[key])
        return None

    @property
    def pixels(self) -> dict[str, Any]:
        """Type, mean and std of the images, None where unknown."""
        return self.info.pixel_settings

    @property
    def is_dense(self) -> bool:
        """Whether it is the model of a dense task: `downstream.encoders` has its encoder."""
        run = self.info.run
        return run is not None and run.program in DENSE_PROGRAMS

    def refuse_dense(self) -> None:
        """Raises CheckpointError for the model of a dense task, whose encoder is of no kind."""
        run = self.info.run
        if run is None or not self.is_dense:
            return
        message = (
            f"{self.what} is a model of {run.program}, which evaluates it (--eval --resume) and starts other runs "
            "from it (--finetune). Its encoder has positions in each block: scripts/export.py writes it as a "
            "folder for timm, and torch.hub's 'encoder' loads it"
        )
        if run.encoder is not None:
            message += f". The encoder that it started from: {run.encoder.path}"
        raise CheckpointError(message)

    @cached_property
    def kind(self) -> Kind:
        """The kind of encoder. CheckpointError for the model of a dense task, see `refuse_dense`."""
        self.refuse_dense()
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
        unused_modules = list(dict.fromkeys(key.partition(".")[0] for key in self.unexpected))
        return "; ".join(
            [
                f"{len(self.loaded)} loaded",
                f"{len(self.resized)} resized{_in_brackets(self.resized)}",
                f"{len(self.missing)} missing{_in_brackets(self.missing)}",
                f"{len(self.unexpected)} not used{_in_brackets(unused_modules)}",
                *self.remarks,
            ]
        )


def _in_brackets(names: Sequence[str]) -> str:
    return f" ({shorten(names, most=6)})" if names else ""


# --------------------------------------------------------------------------------------------------------------- read


def read(path: str | Path) -> Weights:
    """Reads the weights at `path`: a file, or the folder of a run, of an export, or of Transformers.

    A run's folder stands for its newest intact checkpoint. Raises CheckpointError, a ValueError, if there are no
    weights.
    """
    is_verified = Path(path).is_dir()  # by `find_checkpoint_file`
    path = search.find_checkpoint_file(path)
    raw: Tensors = {}
    for file in search.list_shards(path):
        part = checkpoint.read_checkpoint(file, is_verified)
        raw.update(part.weights)
    return Weights(path, raw, part.info)


# --------------------------------------------------------------------------------------------------------------- load


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
    kind = weights.kind
    tensors = weights.tensors
    sizes = {**weights.sizes, **sizes}
    part: Part
    if with_head and weights.num_classes is not None:
        part = "all"
        pools_mean = kind is SWIN or "fc_norm.weight" in tensors
        model = kind.classifier(
            num_classes=weights.num_classes,
            global_pool="avg" if pools_mean else "token",
            probe="head.1.weight" in tensors,
            **sizes,
        )
    else:
        part = "encoder"
        model = kind.encoder(**sizes)
        if not with_head and "norm.weight" not in tensors:
            model.norm = nn.Identity()
    set_norm_eps(model, weights)
    report = fit(model, weights, part)
    return model.eval(), report


def set_norm_eps(model: nn.Module, weights: Weights) -> None:
    """Gives the LayerNorms of `model` the epsilon that the file's config names."""
    stored = weights.settings.get("norm_eps")
    if stored is None:
        return
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = stored


def fit(model: nn.Module, weights: Weights, part: Part = "encoder", classes: Sequence[str] | None = None) -> LoadReport:
    """Loads `weights` into `model`, and reports what was loaded, resized, missing and not used.

    part: what must match.
        "all": every key of file and model, without resizing.
        "encoder": all keys of the model but `head`, `fc_norm` and its `new_keys`, and each part of an encoder in the
            file. Encoders of CrossMAE and TEC's published ones have no final norm; it starts with weight 1 and bias 0.
        "blocks": patch embedding, class token and blocks. All else is loaded where names and shapes fit, a decoder, for
            example, as the start of another pre-training.
    classes: names of the model's classes, in order. A head of other classes is left out, and so is one of Transformers
        without names of classes (LABEL_0, LABEL_1, ...).

    Position tables of another grid are resized bicubically, with the class rows kept, and tables of relative-position
    biases by a spline. A bias table that all blocks share is copied into each block. A patch embedding of 3 channels is
    adapted to other channels by timm's rule: it is repeated and divided by the growth of their number, or summed for
    one channel. The MLP on TEC's class token is folded into the token, unless the model has such an MLP. In TEC's
    published files it is folded already: the model then loses its MLP.

    Raises CheckpointError, a ValueError, which names the file, its origin, the model's class and the keys. That also
    holds for position tables that are zero everywhere. FloatingPointError if a weight is not finite. The model is then
    unchanged.
    """
    if part != "all" and not hasattr(model, "new_keys"):
        weights.refuse_dense()
    tensors, remarks = _rename_for(model, weights)
    label = weights.what
    _refuse_other_heads(model, weights.settings, label)
    if part == "all":
        strict.load_strict(model, tensors, f"the weights in {label}")
        return LoadReport(loaded=list(tensors), resized=[], missing=[], unexpected=[], remarks=remarks)

    if weights.settings.get("model"):
        remarks.insert(0, f"made as {weights.settings['model']}")
    model_state = model.state_dict()
    loses_mlp = CLS_TOKEN_MLP in model_state and is_published_tec(weights.raw)
    if loses_mlp:
        model_state = drop_prefix(model_state, "cls_token_mlp.")
        remarks.append("the file is taken for TEC's publication, so the class token is used without its MLP")

    tensors = _copy_shared_bias_table(tensors, model_state)
    fitting = {key: value for key, value in tensors.items() if key in model_state}
    if any(key.startswith("head.") for key in fitting):
        objection = _object_to_head(weights, fitting, model_state, classes)
        remarks.append(_describe_head(weights, objection, classes))
        if objection:
            fitting = drop_prefix(fitting, "head.")
    check_cls_tokens(fitting, model_state, label, type(model).__name__)
    remarks += fit_patch_embed(fitting, model_state, label, type(model).__name__)
    resized = fit_tables(fitting, weights.settings, model_state, model, label)
    if part == "blocks":
        # Tables of decoders may have as many tokens, in other places.
        size = weights.settings.get("input_size")
        has_other_grid = "pos_embed" in resized
        if size and height_and_width(size) != tuple(model.img_size):
            has_other_grid = True
        for key, value in list(fitting.items()):
            is_misplaced = has_other_grid and key.endswith(".pos_embed")
            if is_misplaced or (value.shape != model_state[key].shape and not _is_of_blocks(key)):
                del fitting[key]

    missing = [key for key in model_state if key not in fitting]
    lacks_norm = "norm.weight" in missing and not weights.origin.has_norm
    required = _list_required(model, missing, part, lacks_norm)
    _refuse_misfits(required, strict.list_misshaped(fitting, model_state), label, type(model).__name__)
    _refuse_foreign_parts(model, list(tensors), part, label)
    strict.check_values(fitting, f"the weights in {label}")

    if loses_mlp:
        model.cls_token_mlp = nn.Identity()
    model.load_state_dict(fitting, strict=False)
    if lacks_norm:
        model.norm.reset_parameters()
        remarks.append(f"the file, {weights.origin.name}, holds no final norm: norm starts with weight 1 and bias 0")
    unexpected = [key for key in tensors if key not in fitting]
    return LoadReport(list(fitting), resized, missing, unexpected, remarks)


def _list_required(model: nn.Module, missing: Sequence[str], part: Part, lacks_norm: bool) -> list[str]:
    """Returns those of the `missing` keys without which the model has no encoder."""
    optional: tuple[str, ...] = ("head.", "fc_norm.")
    if lacks_norm:
        optional = (*optional, "norm.")
    required = [key for key in missing if not key.startswith(optional)]
    required = [key for key in required if not key.endswith(getattr(model, "new_keys", ()))]
    if part == "blocks":
        required = [key for key in required if _is_of_blocks(key)]
    return required


def _refuse_misfits(missing: Sequence[str], misshaped: Sequence[str], label: str, class_name: str) -> None:
    problems = []
    if missing:
        problems.append(f"missing: {shorten(missing, most=6)}")
    if misshaped:
        problems.append(shorten(misshaped, most=6))
    if problems:
        raise CheckpointError(f"{label} does not hold the encoder of this {class_name}: {'; '.join(problems)}")


def _refuse_other_heads(model: nn.Module, settings: Mapping[str, Any], label: str) -> None:
    """Raises CheckpointError if blocks have another number of heads than the file says. Shapes do not show it."""
    expected = settings.get("num_heads")
    for block in getattr(model, "blocks", ()):
        heads = getattr(block.attn, "num_heads", expected)
        if expected is not None and heads != expected:
            raise CheckpointError(f"{label} has {expected} heads, this {type(model).__name__} has {heads}")


def _refuse_foreign_parts(model: nn.Module, keys: Sequence[str], part: Part, label: str) -> None:
    expected = [key for key in keys if not key.startswith(getattr(model, "unused_keys", ()))]
    # The final norm and the positions of a classifier or of a pre-training model may be others.
    may_differ = part == "blocks" or hasattr(model, "head")
    prefixes = PATCH_KEYS if may_differ else ENCODER_KEYS
    if part == "encoder" and not hasattr(model, "pos_embed"):
        prefixes = (*prefixes, "pos_embed")  # learnt with the encoder
    refuse_foreign(model, expected, label, prefixes)


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
    """Returns (the weights under the model's names, remarks on the class token and on the LayerNorms).

    A pre-training model may have the names of its release: those of which it has more are taken.
    """
    remarks = []
    model_keys = model.state_dict().keys()
    tensors = weights.tensors
    if len(model_keys & weights.raw.keys()) > len(model_keys & tensors.keys()):
        tensors = weights.raw
    parts = {key.partition(".")[0] for key in weights.raw}
    others = sorted(parts - {"backbone", "neck", "head"})
    if "backbone" in parts and others and weights.raw.keys() != model_keys:
        remarks.append(f"not used, as they are no encoder: {shorten(others)}")
    if CLS_TOKEN_MLP in tensors and CLS_TOKEN_MLP not in model_keys:
        tensors = fold_cls_token(tensors)
        remarks.append("the MLP on the class token is folded into the token")
    stored_eps = weights.settings.get("norm_eps")
    model_eps = {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
    if stored_eps is not None and model_eps - {stored_eps}:
        here = ", ".join(map(str, model_eps))
        remarks.append(f"the file's config has LayerNorms with eps {stored_eps}, here eps is {here}")
    if hasattr(model, "adapt_weights"):
        tensors = model.adapt_weights(tensors)
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


def _object_to_head(weights: Weights, fitting: Tensors, model_state: Tensors, classes: Sequence[str] | None) -> str:
    """Returns what says that the file's head is for other classes than the model's, or ""."""
    for key, value in fitting.items():
        if key.startswith("head.") and value.shape != model_state[key].shape:
            return f"it has {weights.num_classes} classes, the model {len(model_state[key])}"
    if weights.classes is None and weights.origin.names_classes:
        return "the file does not name its classes"
    for i, (theirs, ours) in enumerate(zip(weights.classes or (), classes or (), strict=False)):
        if theirs != ours:
            return f"its class {i} is {theirs!r}, the model's {ours!r}"
    return ""


def _describe_head(weights: Weights, objection: str, classes: Sequence[str] | None) -> str:
    """Returns what becomes of the file's head, and why. objection: see `_object_to_head`."""
    if objection:
        return f"the head is not loaded: {objection}"
    if weights.classes is None or classes is None:
        return f"the head is loaded, as it has as many classes, {weights.num_classes}; no names were compared"
    return f"the head is loaded, as its {weights.num_classes} classes are the same"
