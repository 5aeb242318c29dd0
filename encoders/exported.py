"""What files say that are no runs' checkpoints: exports, and folders of timm and Transformers."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from util.run.errors import CheckpointError
from util.run.files.checkpoint import find_weights, reading
from util.run.files.record import INVALID_SETTINGS, Checkpoint, CheckpointInfo

# What the encoders here compute with, by the names in a config of Transformers, where weights do not show it. The
# smallest epsilon is as good as 1e-6.
COMPUTED = {"hidden_act": ("gelu",), "layer_norm_eps": (1e-12, 1e-6), "rope_theta": (100.0,), "key_bias": (False,)}
DINOV3 = {**COMPUTED, "layer_norm_eps": (1e-5,)}
EXPORTED_SETTINGS = ("mean", "std", "input_size", "crop_pct", "registers", *INVALID_SETTINGS)
EXPORTED_FACTS = ("classes", "pixels", *EXPORTED_SETTINGS)


def read_safetensors(path: Path) -> Checkpoint:
    """Reads a .safetensors file. What scripts/export.py says of the weights is in its metadata.

    Raises the errors of `util.run.files.checkpoint.read_checkpoint`.
    """
    with reading(path), safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts = {name: json.loads(metadata[name]) for name in EXPORTED_FACTS if name in metadata}
    return Checkpoint(path, find_weights(weights, path), exported_info(facts), {})


def exported_info(facts: Mapping[str, Any]) -> CheckpointInfo:
    """Returns what an exported file says. facts: those of EXPORTED_FACTS that are known."""
    settings = {name: facts[name] for name in EXPORTED_SETTINGS if name in facts}
    return CheckpointInfo(settings, pixels=facts.get("pixels"), classes=facts.get("classes"))


def add_config(info: CheckpointInfo, path: Path) -> CheckpointInfo:
    """Adds what the config of a folder of timm or Transformers says, whatever the file itself does not say.

    Files of others are left as they are.
    """
    config = _read_json(path.with_name("config.json"))
    if "pretrained_cfg" in config:
        images = config["pretrained_cfg"]
        view = {name: images[name] for name in ("mean", "std", "crop_pct") if images.get(name) is not None}
        classes = info.classes
        if classes is None and isinstance(config.get("label_names"), list):
            classes = config["label_names"]
        return replace(info, settings={**view, **info.settings}, pixels=info.pixels or "uint8", classes=classes)
    if config.get("model_type") not in ("vit", "vit_mae", "dinov2", "dinov2_with_registers", "dinov3_vit"):
        return info
    computed = DINOV3 if config["model_type"] == "dinov3_vit" else COMPUTED
    for name, values in computed.items():
        if config.get(name, values[0]) not in values:
            raise CheckpointError(
                f"the config of {str(path)!r} has {name} {config[name]!r}; the encoders here have {values[-1]!r}"
            )
    settings = {
        "input_size": config["image_size"],
        "num_heads": config["num_attention_heads"],
    }
    images = _read_json(path.with_name("preprocessor_config.json"))
    if images.get("do_normalize", bool(images)):
        settings["mean"] = images.get("image_mean")
        settings["std"] = images.get("image_std")
    factor = 1.0
    if images.get("do_rescale", True):
        factor = images.get("rescale_factor", 0.0)
    pixels = {1.0: "float32", 1 / 255: "uint8", 1 / 65535: "uint16"}.get(factor)
    return replace(
        info,
        settings={**settings, **info.settings},
        pixels=info.pixels or pixels,
        classes=info.classes or _class_names(config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _class_names(config: Mapping[str, Any]) -> list[str] | None:
    """Returns the classes in a config of Transformers; None if there is no classifier, or if they have no names."""
    if not any(name.endswith("ForImageClassification") for name in config.get("architectures") or ()):
        return None
    labels = config.get("id2label", {})
    classes = [labels[str(i)] for i in range(len(labels))]

    from timm.data import ImageNetInfo

    imagenet = ImageNetInfo()
    if classes == [imagenet.index_to_description(i) for i in range(imagenet.num_classes())]:
        return imagenet.label_names()  # the names of ImageNet's folders
    return None if classes == [f"LABEL_{i}" for i in range(len(classes))] else classes
