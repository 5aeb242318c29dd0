"""Trained segmentation models: loads ours, and the published UPerNets of mmsegmentation, for evaluation."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from downstream.segmentation.models import Segmenter, build_segmenter, is_mmsegmentation, mmsegmentation_names
from encoders.kinds import find_factory
from encoders.load import fit, read
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from util.run.flags import check_same

ADE20K_CLASSES = 150
# Flags that describe a trained model and its data. Evaluation takes them from the checkpoint.
MODEL_FLAGS = ("head", "model", "input_size", "patch_size", "in_chans", "decoder_channels", "num_classes")
DATA_FLAGS = ("ignore_index", "reduce_zero_label", "image_scale", "stride", "mean", "std")


def check_data_flags(settings: Mapping[str, Any]) -> None:
    """ValueError if settings that describe data and evaluation are out of range or missing."""
    if settings["num_classes"] is None:
        raise ValueError("--num_classes is needed: the number of classes in the label files; recipes of ADE20K set it")
    for name in ("in_chans", "input_size", "stride"):
        if settings[name] < 1:
            raise ValueError(f"--{name} must be at least 1, got {settings[name]}")
    if settings["stride"] > settings["input_size"]:
        raise ValueError(
            f"--stride {settings['stride']} must be at most --input_size {settings['input_size']}: windows would leave "
            f"gaps"
        )
    if not settings["image_scale"][0] >= settings["image_scale"][1] >= 1:
        raise ValueError(f"--image_scale must be two sides, the longer one first, got {settings['image_scale']}")
    for name in ("mean", "std"):
        if len(settings[name]) != settings["in_chans"]:
            raise ValueError(
                f"--{name} must have a value for each of {settings['in_chans']} channels, got {settings[name]}"
            )
    if not all(0 <= value <= 1 for value in settings["mean"]):
        raise ValueError(f"--mean must lie in [0, 1], got {settings['mean']}: divide by 255 what is for 0 to 255")
    if not all(0 < value <= 1 for value in settings["std"]):
        raise ValueError(f"--std must lie in (0, 1], got {settings['std']}: divide by 255 what is for 0 to 255")


def load_segmenter(
    path: str | Path, args: argparse.Namespace, given: set[str]
) -> tuple[Segmenter, dict[str, Any], dict[str, Any]]:
    """Loads a trained model: ours, or a published UPerNet of mmsegmentation.

    Returns (model in eval mode, settings, meta of the checkpoint).
    Our checkpoints hold their settings; explicit flags of the data win. Those of a published file follow from its
    weights and the flags. given: names of the flags that were set explicitly. ValueError if the flags contradict the
    model.
    """
    weights = read(path)
    path, stored = weights.path, weights.settings
    settings = vars(args) | {"drop_path": 0.0}
    if is_mmsegmentation(weights.raw):
        weights = dataclasses.replace(weights, raw=mmsegmentation_names(weights.raw))
        stored = infer_settings(weights.raw, repr(str(path)))
        if (
            stored["num_classes"] == ADE20K_CLASSES
            and not settings["reduce_zero_label"]
            and "reduce_zero_label" not in given
        ):
            raise ValueError(
                f"{str(path)!r} has the {ADE20K_CLASSES} classes of ADE20K, whose label files begin at 1: give "
                f"--recipe ade20k_upernet_vit_base or --reduce_zero_label (--no-reduce_zero_label for other data)"
            )
    if "head" not in stored:
        raise ValueError(f"{str(path)!r} holds no segmentation model of this program or of mmsegmentation's UPerNet")
    check_same(args, stored, given.intersection(MODEL_FLAGS), f"the model at {str(path)!r}")
    settings |= {name: stored[name] for name in MODEL_FLAGS}
    settings |= {name: stored[name] for name in DATA_FLAGS if name not in given and name in stored}
    settings["mean"], settings["std"] = settings["mean"] or IMAGENET_MEAN, settings["std"] or IMAGENET_STD
    check_data_flags(settings)
    model = build_segmenter(settings)
    fit(model, weights, "all")
    return model.eval(), settings, weights.meta


def infer_settings(weights: Mapping[str, torch.Tensor], what: str) -> dict[str, Any]:
    """Returns the MODEL_FLAGS of a published UPerNet from its weights. ValueError if a weight is missing."""
    names = ("backbone.patch_embed.proj.weight", "backbone.pos_embed", "decode_head.conv_seg.weight")
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(f"{what} holds no UPerNet on a ViT with a position table: {', '.join(missing)} missing")
    kernel, positions, head = (weights[name] for name in names)
    depth = len({name.split(".")[2] for name in weights if name.startswith("backbone.blocks.")})
    return {
        "head": "upernet",
        "model": find_factory(kernel.shape[0], depth, what)[0],
        "input_size": round((positions.shape[1] - 1) ** 0.5) * kernel.shape[2],
        "patch_size": kernel.shape[2],
        "in_chans": kernel.shape[1],
        "decoder_channels": head.shape[1],
        "num_classes": len(head),
    }
