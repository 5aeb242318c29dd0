"""The pre-training frameworks: their models by name, their flags, and the models that runs have pre-trained.

To add a framework, add its module to `FRAMEWORKS`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import models_mae_pr
from encoders.load import fit, read
from framework import Flag, Framework
from frameworks import (
    models_amt_pr,
    models_crossmae_pr,
    models_greenmim_pr,
    models_localmim_pr,
    models_mff_pr,
    models_simmim_pr,
    models_tec_pr,
)
from prmim import METHOD_ARGUMENTS
from util.data.invalid_pixels import InvalidPixels
from util.run.files.record import CheckpointError, CheckpointInfo
from util.text import count_of

FRAMEWORKS = (
    models_mae_pr,
    models_mff_pr,
    models_simmim_pr,
    models_localmim_pr,
    models_tec_pr,
    models_greenmim_pr,
    models_crossmae_pr,
    models_amt_pr,
)
MODELS: dict[str, Any] = {}  # {name: factory}, a partial of its class
for _module in FRAMEWORKS:
    for _name in _module.__all__:
        if _name.islower():
            MODELS[_name] = getattr(_module, _name)
CLASS_OF = {name: factory.func for name, factory in MODELS.items()}


def own_flags() -> dict[Flag, list[str]]:
    """Returns {flag: first words of the names of the models that have it} for the flags of some frameworks only.

    ValueError if two frameworks have different flags of the same name.
    """
    found: dict[Flag, list[str]] = {}
    first_of: dict[str, Flag] = {}
    for name, model in CLASS_OF.items():
        family = name.split("_")[0]
        for flag in model.flags:
            first = first_of.setdefault(flag.name, flag)
            if flag != first:
                raise ValueError(
                    f"--{flag.name} of {family} models is another flag than that of {', '.join(found[first])} models: "
                    "give it another name, or let all of them have the same `Flag`"
                )
            families = found.setdefault(flag, [])
            if family not in families:
                families.append(family)
    return found


def check_own_flags(settings: Mapping[str, Any]) -> None:
    """Raises ValueError if a flag that the framework needs is missing."""
    for flag in CLASS_OF[settings["model"]].flags:
        if flag.required and settings.get(flag.name) is None:
            raise ValueError(f"--model {settings['model']} needs --{flag.name}: {flag.help}")


def build_model(settings: Mapping[str, Any], read_files: bool = True) -> Framework:
    """Builds the model that `settings` describe: vars(args) or a checkpoint's. ValueError for an impossible pair.

    read_files: whether to read the files that a framework's flags name. On the meta device nothing can be read.
    """
    name = settings["model"]
    settings = dict(settings)
    if not read_files:
        for flag in CLASS_OF[name].flags:
            if flag.names_file:
                settings[flag.name] = None
    options = {argument: settings[argument] for argument in METHOD_ARGUMENTS}
    options["norm_pix_loss"] = settings["norm_pix_loss"]
    options["in_chans"] = settings.get("in_chans", 3)
    has_invalid = InvalidPixels.from_settings(settings).is_declared
    if has_invalid:
        options["has_invalid"] = True
    for flag, families in own_flags().items():
        if settings.get(flag.name) is not None:
            if flag not in CLASS_OF[name].flags:
                owners = ", ".join(families)
                raise ValueError(f"--{flag.name} belongs to {owners} models, but --model is {name}: leave it out")
            options[flag.name] = settings[flag.name]
    for setting, option in {"patch_size": "patch_size", "drop_path": "drop_path_rate"}.items():
        if settings.get(setting) is not None:
            options[option] = settings[setting]
    if settings["input_size"] is not None:
        if len(settings["input_size"]) > 2:
            raise ValueError(f"--input_size takes one or two numbers, got {settings['input_size']}")
        options["img_size"] = (settings["input_size"][0], settings["input_size"][-1])
    model = MODELS[name](**options)
    if has_invalid and not model.predicts_pixels():
        raise ValueError(
            f"--nodata, --mask_band and --bands keep invalid pixels out of losses on pixels, but {name} predicts other "
            "targets: leave them out, with invalid pixels replaced in the files, or choose a model that predicts pixels"
        )
    check_visible(model, settings["mask_ratio"])
    return model


def check_visible(model: Framework, mask_ratio: float) -> None:
    """ValueError if the model sees no token of its images."""
    if model.counts.num_visible == 0:
        tokens = count_of(model.counts.num_tokens, "token")
        raise ValueError(
            f"--mask_ratio {mask_ratio} leaves none of {tokens} visible: lower it, or use larger images, smaller "
            "patches or smaller masked squares"
        )


def load_run(path: str | Path, moved: Mapping[str, str] | None = None) -> tuple[Framework, dict[str, Any]]:
    """Loads a model that this program has pre-trained. Returns (model in eval mode, settings of its run).

    path: a checkpoint, or the folder of a run, whose newest intact checkpoint is used. moved: {flag: new path} of files
    that have moved since the run, such as a teacher's.

    ValueError if the checkpoint was not written by this program, or if such a file is not that of the run.
    """
    weights = read(path)
    check_pretrained(weights.info, weights.path)
    settings = {**weights.settings, **weights.pixels, **(moved or {})}
    try:
        model = build_model(settings)
    except KeyError as error:
        raise CheckpointError(
            f"{str(weights.path)!r} does not say {error}: it was written by another version of this code, which can "
            "read it"
        ) from error
    files = {} if weights.info.run is None else weights.info.run.files
    for flag, file in model.named_files().items():
        if files.get(flag, file.fingerprint) != file.fingerprint:
            raise ValueError(
                f"the {flag} {settings[flag]!r} has other weights than that of the run at {str(weights.path)!r}"
            )
    fit(model, weights, "all")
    if settings.get("mean"):
        model.use_statistics(settings["mean"], settings["std"])
    return model.eval(), settings


def check_pretrained(info: CheckpointInfo, path: str | Path) -> None:
    """ValueError unless a checkpoint holds a model of a framework."""
    settings = info.settings
    if "nb_classes" in settings:
        encoder = settings.get("finetune")
        if info.run is not None and info.run.encoder is not None:
            encoder = info.run.encoder.path
        advice = f"give its encoder, {encoder!r}" if encoder else "give a checkpoint of main_pretrain.py"
        raise ValueError(f"{str(path)!r} is a fine-tuned classifier, which reconstructs no images: {advice}")
    if "mask_ratio" not in settings:
        raise ValueError(
            f"{str(path)!r} does not hold the settings of its model: give a checkpoint of main_pretrain.py; exported "
            "and released weights have no settings"
        )
    if settings["model"] not in MODELS:
        raise ValueError(f"{str(path)!r} holds a {settings['model']!r}, which main_pretrain.py does not know")
