"""The classifiers of all kinds of encoders, by name and by the settings of a run."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

import models_vit
from encoders.kinds import choose_traits
from util.lazy import ByName
from util.pos_embed import height_and_width

NAMES = {
    "models_vit": [name for name in models_vit.__all__ if name.islower()],
    "encoders.models_relative_vit": [
        "relative_vit_micro_patch4",
        "relative_vit_mini_patch4",
        "relative_vit_base_patch16",
    ],
    "encoders.models_absolute_vit": [
        "absolute_vit_micro_patch4",
        "absolute_vit_mini_patch4",
        "absolute_vit_base_patch16",
    ],
    "encoders.models_swin": [
        "swin_micro_patch4_window4",
        "swin_base_patch4_window7",
        "swin_large_patch4_window14",
    ],
}
MODELS = ByName(NAMES)  # {name: factory}
# Flags that only plain ViTs have, with their defaults.
VIT_FLAGS = {"train_pos_embed": True, "cls_token_mlp": False, "cls_token_layer_decay": True}


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
        if settings["model"] not in NAMES["models_vit"]:
            given = f"--{flag}" if settings[flag] else f"--no-{flag}"
            raise ValueError(f"{given} is for plain ViTs, but --model is {settings['model']}: leave it out")
        options[flag] = settings[flag]
    accepted: Collection[str] = ()
    if settings["model"] in NAMES["models_vit"]:
        accepted = models_vit.TRAITS
    options |= choose_traits(settings, accepted, f"--model {settings['model']}")
    blocks = settings["trainable_blocks"]
    model = MODELS[settings["model"]](
        num_classes=settings["nb_classes"], global_pool=settings["global_pool"], probe=blocks == 0, **options
    )
    if blocks is not None:
        model.freeze_all_but(blocks, has_new_bands=settings.get("rgb_bands") is not None)
    return model
