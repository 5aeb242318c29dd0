"""What is said beside exported weights: facts on the images of a model, and its description."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from encoders.names import Tensors
from encoders.trained import Trained
from util.data.pixel_format import RGB8, PixelFormat, declares_invalid
from util.data.statistics import describe_pixels, find_statistics
from util.data.transforms import default_crop_pct
from util.run.files import record
from util.text import count_of

# Settings of a segmentation run that say what its logits mean, and which images it has seen.
SEGMENTATION_SETTINGS = ("ignore_index", "reduce_zero_label", "label_values", "image_scale", "stride", "window_weights")
OUTPUTS = {
    "encoder": "tokens",
    "classification": "logits of images",
    "segmentation": "logits of pixels",
    "detection": "objects of one image, which may be smaller",
}


def known_facts(model: nn.Module, trained: Trained) -> dict[str, Any]:
    """What is stored beside the weights of `model`, see `exported.EXPORTED_FACTS`, as far as it is known.

    model: that of `trained`, or its encoder. ValueError if the pixel statistics are unknown.
    """
    info = trained.weights.info
    pixels = info.pixel_settings
    statistics = find_statistics(pixels, PixelFormat(model.in_chans, pixels["pixels"] or RGB8.dtype))
    if statistics is None or not len(statistics[0]) == len(statistics[1]) == model.in_chans:
        raise ValueError(
            f"{trained.weights.label} does not hold the pixel mean and deviation of its {model.in_chans} channels"
        )
    facts = {
        "mean": statistics[0],
        "std": statistics[1],
        "pixels": pixels["pixels"],
        "input_size": list(model.img_size),
        "crop_pct": info.settings.get("crop_pct") or default_crop_pct(model.img_size),
    }
    if getattr(model, "registers", False):
        facts["registers"] = True
    if trained.task == "classification":
        facts["classes"] = info.classes
    facts = {name: value for name, value in facts.items() if value}
    for name in record.INVALID_SETTINGS:
        if name in pixels:  # 0 is a value, too
            facts[name] = pixels[name]
    return facts


def describe(model: nn.Module, state: Tensors, facts: Mapping[str, Any]) -> str:
    """What the model is and which images it takes. facts: see `known_facts`."""
    million = sum(value.numel() for value in state.values()) / 1e6
    height, width = model.img_size
    channels = count_of(model.in_chans, "channel")
    text = (
        f"{million:.1f} M parameters; images of {channels} and {height} x {width} pixels, "
        f"{describe_pixels(facts.get('pixels'))}, normalised with mean {facts['mean']} and std {facts['std']}"
    )
    if declares_invalid(facts):
        text += "; invalid pixels, and bands that an image lacks, are 0 after that"
    return text


def facts_of_program(trained: Trained) -> dict[str, Any]:
    """What is stored beside a program of torch.export: `known_facts`, and what its outputs mean."""
    model = trained.encoder
    info = trained.weights.info
    facts = known_facts(model, trained)
    facts["interpolation"] = "bicubic"
    facts["antialias"] = True
    facts["pixels"] = facts.get("pixels") or RGB8.dtype
    facts["input_dtype"] = pixels_of(model, facts).batch_dtype
    facts["outputs"] = OUTPUTS[trained.task]
    if trained.task in ("segmentation", "detection"):
        del facts["crop_pct"]  # images are scaled as a whole
        facts["interpolation"] = "bilinear"
    if trained.task == "segmentation":
        facts["antialias"] = False
        facts["classes"] = info.classes
        facts["class_colors"] = info.class_colors
        for name in SEGMENTATION_SETTINGS:
            facts[name] = info.settings[name]
    elif trained.task == "detection":
        facts["categories"] = info.settings["categories"]
    return facts


def pixels_of(model: nn.Module, facts: Mapping[str, Any]) -> PixelFormat:
    """The format of the images that a model takes. facts: see `known_facts`."""
    is_declared = declares_invalid(facts)
    return PixelFormat(model.in_chans, facts.get("pixels") or RGB8.dtype, is_declared)
