"""The one way to weights: reads a file of any origin, and fits it into any model.

    from encoders.load import fit, load_model, read

    model = load_model("output/prmim50_base")      # a run, a file of a release or of timm, a folder of Transformers
    print(fit(model, read("mae_pretrain_vit_base.pth")))

`encoders.names` has the key names of each origin. The model says what it may lack, see `fit`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from encoders import names
from encoders.kinds import Kind, find_kind, head_of
from encoders.names import LoadReport
from encoders.transformers_names import read_transformers
from util.run import checkpoint
from util.run.checkpoint import CheckpointError
from util.text import shorten

Part = Literal["all", "encoder", "blocks"]


@dataclass(frozen=True)
class Weights:
    """What a file holds, under the names of this project.

    raw: the state dict as it was, for `load_official`. meta: of the run or of the export; for other files what their
    config says: `settings` (input_size, patch_size, num_heads, mean, std) and `classes`.
    """

    path: Path
    origin: str
    raw: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def what(self) -> str:
        made_as = self.settings.get("model")
        return f"{str(self.path)!r} ({f'made as {made_as}' if made_as else self.origin})"

    @property
    def settings(self) -> dict[str, Any]:
        return self.meta.get("settings", {})

    @property
    def classes(self) -> list[str] | None:
        return self.meta.get("classes")

    @property
    def num_classes(self) -> int | None:
        head = head_of(self.tensors)
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


def read(path: str | Path) -> Weights:
    """Reads the weights at `path`: a file, or the folder of a run, of an export, or of Transformers."""
    shards = sorted(Path(path).glob("model-*-of-*.safetensors"))  # large folders of Transformers
    file = shards[0] if shards else checkpoint.find_checkpoint_file(path)
    contents = [checkpoint.read_checkpoint(shard) for shard in shards or [file]]
    raw = {name: value for content in contents for name, value in names.weights_of(content).items()}
    meta = checkpoint.meta_of(contents[0])
    config = file.parent / "config.json"
    if any(key.startswith(("vit.embeddings.", "embeddings.patch_embeddings.")) for key in raw):
        raw, meta = read_transformers(raw, config if config.is_file() else None, repr(str(file)))
        return Weights(file, "Transformers", raw, raw, meta)
    origin = "this project" if meta.get("settings") else "a release or timm"
    return Weights(file, origin, raw, names.encoder_names(raw), meta)


def build(weights: Weights, **options: Any) -> nn.Module:
    """Builds the encoder, or the classifier, that `weights` hold. options: win over the sizes that were inferred."""
    kind, sizes = weights.kind, {**weights.sizes, **options}
    if weights.num_classes is None:
        model = kind.encoder(**sizes)
        if "norm.weight" not in weights.tensors and not any(k in weights.raw for k in names._CROSSMAE_KEYS):
            model.norm = nn.Identity()
        fit(model, weights)
    else:
        pool = "avg" if kind.name.startswith("a Swin") or "fc_norm.weight" in weights.tensors else "token"
        probe = "head.1.weight" in weights.tensors
        model = kind.classifier(num_classes=weights.num_classes, global_pool=pool, probe=probe, **sizes)
        fit(model, weights, "all")
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = weights.settings.get("norm_eps", module.eps)
    return model.eval()


def load_model(path: str | Path) -> nn.Module:
    """Loads the encoder or classifier at `path`, in eval mode."""
    return build(read(path))


def fit(model: nn.Module, weights: Weights, part: Part = "encoder", classes: Sequence[str] | None = None) -> LoadReport:
    """Loads `weights` into `model` and reports what was loaded, resized, missing and not used.

    part: what must match.
        "all": every key of file and model, without resizing, apart from `model.optional_keys`.
        "encoder": every key of the model but `model.new_keys`, and every part of an encoder in the file.
        "blocks": patch embedding, class token and blocks; the rest is loaded where names and shapes fit.
    classes: the model's. A head of other classes is not loaded, except with "all".

    The model may define `new_keys` (beginnings or endings of what pre-training does not have), `optional_keys`, and
    `adapt_weights(tensors) -> tensors` (own names of the same parameters). CheckpointError names the file, its origin,
    the model's class, and the keys.
    """
    own = model.state_dict()
    tensors = dict(weights.tensors)
    if "cls_token_mlp.fc1.weight" in own:
        tensors = names.encoder_names(weights.raw, fold_cls_token=False)
    if hasattr(model, "adapt_weights"):
        tensors = model.adapt_weights(tensors)
    unused = [key for key in tensors if key.startswith(getattr(model, "unused_keys", ()))]
    tensors = {key: value for key, value in tensors.items() if key not in unused}
    if part == "all":
        optional = getattr(model, "optional_keys", None)
        checkpoint.load_strict(model, tensors, f"the weights in {weights.what}", optional)
        return LoadReport(list(tensors), [], [key for key in own if key not in tensors], [])
    if part == "blocks":
        tensors = {key: value for key, value in weights.raw.items() if key in own} | tensors
    tensors = names._copy_shared_bias_table(tensors, own)
    found = {key: value for key, value in tensors.items() if key in own and torch.is_tensor(value)}
    found = names._drop_unfit_head(found, own, weights.classes, None if classes is None else list(classes))
    names._check_width(found, own, weights.what, type(model).__name__)
    adapted = names._adapt_channels(found, own, weights.what)
    resized = names._fit_tables(found, weights.settings, own, model, weights.what)
    if part == "blocks":
        found = {key: value for key, value in found.items() if value.shape == own[key].shape}
    missing = [key for key in own if key not in found]
    lacks_norm = "norm.weight" in missing and any(key in weights.raw for key in names._CROSSMAE_KEYS)
    new = ("head.", "fc_norm.", *getattr(model, "new_keys", ()), *(("norm.",) if lacks_norm else ()))
    needed = [key for key in missing if not (key.startswith(new) or key.endswith(new))]
    if part == "blocks":
        needed = [key for key in needed if key == "cls_token" or key.startswith(_BLOCKS)]
    problems = [f"missing: {shorten(needed, most=6)}"] if needed else []
    problems += checkpoint.list_misshaped(found, own)[:6]
    if problems:
        raise CheckpointError(
            f"{weights.what} does not hold the encoder of this {type(model).__name__}: {'; '.join(problems)}"
        )
    # A classifier with mean pooling, and a pre-training model, may lack parts that change no patch token.
    parts = names._PATCH_TOKEN_KEYS if part == "blocks" or hasattr(model, "head") else names.ENCODER_KEYS
    names.refuse_foreign(model, tensors, weights.what, parts)
    model.load_state_dict(found, strict=False)
    if lacks_norm and hasattr(model.norm, "reset_parameters"):
        model.norm.reset_parameters()
    return LoadReport(list(found), resized, missing, [k for k in tensors if k not in found] + unused, adapted)


_BLOCKS = ("patch_embed.", "blocks.", "layers.")


def as_content(weights: Weights) -> Mapping[str, Any]:
    """Returns what `Framework.load_official` takes."""
    return weights.raw
