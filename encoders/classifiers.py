"""The classifiers of all kinds of encoders: by name, by the settings of a run, and from a file of any origin."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import models_vit
from encoders import models_absolute_vit, models_relative_vit, models_swin
from encoders.kinds import PLAIN, VIT_FACTORIES
from encoders.load import build, fit, read
from util.pos_embed import height_and_width

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
    names = {"patch_size": "patch_size", "drop_path": "drop_path_rate", "in_chans": "in_chans"}
    options = {option: settings[name] for name, option in names.items() if settings.get(name) is not None}
    if settings.get("input_size") is not None:
        options["img_size"] = height_and_width(settings["input_size"])
    for flag, default in VIT_FLAGS.items():
        if settings.get(flag, default) != default:
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


def load_classifier(path: str | Path, args: argparse.Namespace) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """Loads a fine-tuned checkpoint of any origin. Returns (model in eval mode, settings, its meta or {}).

    Our checkpoints hold their settings. Those of other files are inferred from the weights. --crop_pct, --mean and
    --std of `args` win.
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
        settings |= dict(
            input_size=plain_size(model.img_size),
            patch_size=model.patch_size,
            in_chans=model.patch_embed.proj.in_channels,
            nb_classes=weights.num_classes,
        )
        if weights.kind is PLAIN and (model.embed_dim, len(model.blocks)) in VIT_FACTORIES:
            settings["model"], _ = VIT_FACTORIES[model.embed_dim, len(model.blocks)]
    for name in ("crop_pct", "mean", "std"):
        settings[name] = settings.get(name) if getattr(args, name) is None else getattr(args, name)
    return model.eval(), settings, weights.meta
