"""The classifiers of all kinds of encoders: by name, by the settings of a run, and from a file of any origin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import models_vit
from encoders import models_absolute_vit, models_relative_vit, models_swin
from encoders.kinds import PLAIN, VIT_FACTORIES
from encoders.load import build, fit, read
from util.pos_embed import height_and_width
from util.run.files.record import CheckpointInfo

ENCODERS = (models_vit, models_relative_vit, models_absolute_vit, models_swin)
MODELS: dict[str, Any] = {}  # {name: factory}
for _module in ENCODERS:
    for _name in _module.__all__:
        if _name.islower():
            MODELS[_name] = getattr(_module, _name)
# Flags that only plain ViTs have, with their defaults.
VIT_FLAGS = {"train_pos_embed": True, "cls_token_mlp": False, "num_cls_tokens": 1}


def plain_size(size: Sequence[int]) -> int | list[int]:
    """Returns an image size as settings hold it: the side of a square, or [height, width]."""
    height, width = height_and_width(size)
    return height if height == width else [height, width]


def build_classifier(settings: Mapping[str, Any]) -> nn.Module:
    """Builds the classifier that `settings` (vars(args), or a checkpoint's) describe. Untrained blocks are frozen."""
    options: dict[str, Any] = {}
    for name, option in {"patch_size": "patch_size", "drop_path": "drop_path_rate", "in_chans": "in_chans"}.items():
        if settings.get(name) is not None:
            options[option] = settings[name]
    if settings.get("input_size") is not None:
        options["img_size"] = height_and_width(settings["input_size"])
    for flag, default in VIT_FLAGS.items():
        if settings.get(flag, default) == default:
            continue
        if settings["model"] not in models_vit.__all__:
            given = f"--{flag}" if settings[flag] else f"--no-{flag}"
            raise ValueError(f"{given} is for plain ViTs, but --model is {settings['model']}: leave it out")
        options[flag] = settings[flag]
    blocks = settings["trainable_blocks"]
    model = MODELS[settings["model"]](
        num_classes=settings["nb_classes"], global_pool=settings["global_pool"], probe=blocks == 0, **options
    )
    if blocks is not None and blocks != len(model.blocks):
        model.freeze_all_but(blocks)
    return model


@dataclass(frozen=True)
class Classifier:
    """A trained classifier. model: in eval mode. settings: of its run, or inferred from the weights."""

    model: nn.Module
    settings: dict[str, Any]
    info: CheckpointInfo


def note_on_view(settings: Mapping[str, Any], path: str | Path) -> list[str]:
    """Returns a note if the file at `path` does not say how its model sees images. settings: those of a Classifier."""
    if settings.get("mean"):
        return []
    view = "by ImageNet's mean and deviation"
    if settings["crop_pct"] is None:
        view += ", with MAE's crop"
    return [f"note: {str(path)!r} does not say how its model sees images: they are seen {view}"]


def load_classifier(
    path: str | Path,
    crop_pct: float | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Classifier:
    """Loads a fine-tuned checkpoint of any origin.

    Our checkpoints hold their settings. Those of other files are inferred from the weights. crop_pct, mean, std: win
    over the settings unless they are None.
    """
    weights = read(path)
    if weights.num_classes is None:
        raise ValueError(
            f"{weights.what} holds no classifier (no head.weight): fine-tune the encoder first, with --finetune"
        )
    settings = {"in_chans": 3, **weights.settings, **weights.pixels}
    settings["cls_token_mlp"] = False  # it is folded into the class token
    if "model" in settings:
        model = build_classifier(settings)
        fit(model, weights, "all")
    else:
        model, _ = build(weights)
        settings["input_size"] = plain_size(model.img_size)
        settings["patch_size"] = model.patch_size
        settings["in_chans"] = model.patch_embed.proj.in_channels
        settings["nb_classes"] = weights.num_classes
        size = model.embed_dim, len(model.blocks)
        if weights.kind is PLAIN and size in VIT_FACTORIES:
            settings["model"], _ = VIT_FACTORIES[size]
    for name, value in {"crop_pct": crop_pct, "mean": mean, "std": std}.items():
        if value is not None:
            settings[name] = value
    settings.setdefault("crop_pct", None)
    return Classifier(model.eval(), settings, weights.info)
