"""The pre-training frameworks: their models by name, and the models that runs have pre-trained.

To add a framework, add its module and the names of its models to `NAMES`. A run imports the module of its model alone.
"""

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encoders.kinds import choose_traits
from encoders.load import load_all, read
from framework import Framework
from frameworks.views import predicts_pixels
from prmim import METHOD_ARGUMENTS
from util.data.pixel_format import declares_invalid
from util.lazy import ByName

NAMES = {
    "models_mae_pr": (
        "mae_vit_nano_patch4",
        "mae_vit_micro_patch4",
        "mae_vit_mini_patch4",
        "mae_vit_tiny_patch16",
        "mae_vit_small_patch16",
        "mae_vit_base_patch16",
        "mae_vit_large_patch16",
        "mae_vit_huge_patch14",
    ),
    "frameworks.models_mff_pr": (
        "mff_vit_micro_patch4",
        "mff_vit_mini_patch4",
        "mff_vit_base_patch16",
    ),
    "frameworks.models_simmim_pr": (
        "simmim_vit_micro_patch4",
        "simmim_vit_mini_patch4",
        "simmim_vit_base_patch16",
        "simmim_swin_micro_patch4_window4",
        "simmim_swin_base_patch4_window6",
        "simmim_swin_large_patch4_window12",
    ),
    "frameworks.models_localmim_pr": (
        "localmim_vit_micro_patch4",
        "localmim_vit_mini_patch4",
        "localmim_vit_base_patch16",
        "localmim_vit_large_patch16",
    ),
    "frameworks.models_tec_pr": (
        "tec_vit_micro_patch4",
        "tec_vit_mini_patch4",
        "tec_vit_base_patch16",
        "tec_vit_large_patch16",
    ),
    "frameworks.models_greenmim_pr": (
        "greenmim_swin_micro_patch4_window4",
        "greenmim_swin_base_patch4_window7",
        "greenmim_swin_large_patch4_window14",
    ),
    "frameworks.models_crossmae_pr": (
        "crossmae_vit_nano_patch4",
        "crossmae_vit_micro_patch4",
        "crossmae_vit_mini_patch4",
        "crossmae_vit_small_patch16",
        "crossmae_vit_base_patch16",
        "crossmae_vit_large_patch16",
        "crossmae_vit_huge_patch14",
    ),
    "frameworks.models_amt_pr": (
        "amt_vit_micro_patch4",
        "amt_vit_mini_patch4",
        "amt_vit_base_patch16",
        "amt_simmim_vit_micro_patch4",
        "amt_simmim_vit_mini_patch4",
        "amt_simmim_vit_base_patch16",
    ),
}
# Samplings that do more than draw tokens: modules with FLAGS, `check_sampling` and `Phases`, a `BetweenSteps`.
HOOKS = {"attention": "frameworks.hooks.attention_phases"}
MODELS = ByName(NAMES)  # {name: factory}, a partial of its class


def class_of(model: str) -> type[Framework]:
    """Returns the class of a model of this name."""
    return MODELS[model].func


def hooks_of(sampling: str) -> Any:
    """Returns the module of HOOKS of a sampling, or None."""
    return importlib.import_module(HOOKS[sampling]) if sampling in HOOKS else None


def check_files(settings: Mapping[str, Any]) -> None:
    """ValueError if a file that the framework needs is not named."""
    for flag in class_of(settings["model"]).flags:
        if flag.names_file and settings.get(flag.name) is None:
            raise ValueError(f"--model {settings['model']} needs --{flag.name}: {flag.help}")


def build_model(settings: Mapping[str, Any], read_files: bool = True) -> Framework:
    """Builds the model that `settings` describe: vars(args) or a checkpoint's. ValueError for an impossible pair.

    read_files: whether to read the files that a framework's flags name. On the meta device nothing can be read.
    """
    name = settings["model"]
    options = {argument: settings[argument] for argument in METHOD_ARGUMENTS}
    options["norm_pix_loss"] = settings["norm_pix_loss"]
    options["in_chans"] = settings.get("in_chans", 3)
    has_invalid = declares_invalid(settings)
    if has_invalid:
        options["has_invalid"] = True
    for flag in class_of(name).flags:
        if settings.get(flag.name) is not None and (read_files or not flag.names_file):
            options[flag.name] = settings[flag.name]
    options |= choose_traits(settings, inspect.signature(MODELS[name]).parameters, f"--model {name}")
    for setting, option in {"patch_size": "patch_size", "drop_path": "drop_path_rate"}.items():
        if settings.get(setting) is not None:
            options[option] = settings[setting]
    if settings["input_size"] is not None:
        if len(settings["input_size"]) > 2:
            raise ValueError(f"--input_size takes one or two numbers, got {settings['input_size']}")
        options["img_size"] = settings["input_size"]
    model = MODELS[name](**options)
    if has_invalid and not predicts_pixels(model):
        raise ValueError(
            f"--nodata, --mask_band and --bands keep invalid pixels out of losses on pixels, but {name} predicts other "
            "targets: leave them out, with invalid pixels replaced in the files, or choose a model that predicts pixels"
        )
    if model.counts.num_visible == 0:
        raise ValueError(
            f"--mask_ratio {settings['mask_ratio']} leaves none of {model.counts.num_tokens} tokens visible: lower it, "
            "or use larger images, smaller patches or smaller masked squares"
        )
    return model


def load_run(path: str | Path, moved: Mapping[str, str] | None = None) -> tuple[Framework, dict[str, Any]]:
    """Loads a model that this program has pre-trained. Returns (model in eval mode, settings of its run).

    path: a checkpoint, or the folder of a run, whose newest intact checkpoint is used. moved: {flag: new path} of files
    that have moved since the run, such as a teacher's.

    ValueError if the checkpoint was not written by this program, or if such a file is not that of the run.
    """
    weights = read(path)
    run = weights.info.run
    if run is None or run.program != "main_pretrain.py":
        raise ValueError(f"{str(weights.path)!r} is no checkpoint of main_pretrain.py, which reconstructs images")
    settings = {**weights.settings, **weights.info.pixel_settings, **(moved or {})}
    model = build_model(settings)
    for flag, file in model.named_files().items():
        if run.files.get(flag, file.fingerprint) != file.fingerprint:
            raise ValueError(f"the {flag} {settings[flag]!r} is not that of the run at {str(weights.path)!r}")
        if settings.get("mean"):
            file.use_statistics(settings["mean"], settings["std"])
    load_all(model, weights)
    return model.eval(), settings
