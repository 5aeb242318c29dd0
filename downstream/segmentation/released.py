"""Published segmentation models: UPerNets of mmsegmentation on MAE or BEiT."""

from collections.abc import Mapping
from typing import Any

import torch

from downstream.segmentation.vit_backbone import dense_names
from encoders.kinds import count_blocks, find_factory
from encoders.names import Tensors, rename

# Names of mmsegmentation's MAE and BEiT backbones, and ours. Those of neck and heads are the same.
MMSEGMENTATION = (
    (r"^backbone\.patch_embed\.projection\.", "backbone.patch_embed.proj."),
    (r"^backbone\.layers\.", "backbone.blocks."),
    (r"^(backbone\.blocks\.\d+)\.(?:ln|norm)([12])\.", r"\1.norm\2."),
    (r"^(backbone\.blocks\.\d+)\.ffn\.layers\.0\.0\.", r"\1.mlp.fc1."),
    (r"^(backbone\.blocks\.\d+)\.ffn\.layers\.1\.", r"\1.mlp.fc2."),
)


def is_mmsegmentation(weights: Mapping[str, Any]) -> bool:
    """Whether a state dict has the key names of mmsegmentation's ViTs."""
    return any(name.startswith("backbone.layers.") for name in weights)


def mmsegmentation_names(weights: Tensors) -> Tensors:
    """Returns a state dict of mmsegmentation's UPerNet on MAE or BEiT under the names of `UPerNet`.

    Buffers that the model computes itself are left out, and so is the bias of keys (see `DenseViT`). A BEiT without a
    position table gets one of zeros, for the square grid of its tables of relative-position biases.
    """
    stored = {name: value for name, value in weights.items() if not name.endswith("relative_position_index")}
    renamed = rename(stored, MMSEGMENTATION)
    names = "backbone.cls_token", "backbone.blocks.0.attn.relative_position_bias_table"
    token, biases = map(renamed.get, names)
    if "backbone.pos_embed" not in renamed and token is not None and biases is not None:
        side = round(((len(biases) - 3) ** 0.5 + 1) / 2)  # (2 side - 1)^2 offsets, and three rows of the class token
        renamed["backbone.pos_embed"] = token.new_zeros(1, 1 + side**2, token.shape[2])
    return dense_names(renamed)


def infer_settings(weights: Mapping[str, torch.Tensor], what: str) -> dict[str, Any]:
    """Returns the MODEL_FLAGS of a published UPerNet from its weights. ValueError if a weight is missing."""
    names = ("backbone.patch_embed.proj.weight", "backbone.pos_embed", "decode_head.conv_seg.weight")
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(f"{what} holds no UPerNet on a ViT with a position table: {', '.join(missing)} missing")
    kernel, positions, head = (weights[name] for name in names)
    depth = count_blocks({name.removeprefix("backbone."): name for name in weights})
    return {
        "head": "upernet",
        "model": find_factory(kernel.shape[0], depth, what)[0],
        "input_size": round((positions.shape[1] - 1) ** 0.5) * kernel.shape[2],
        "patch_size": kernel.shape[2],
        "in_chans": kernel.shape[1],
        "decoder_channels": head.shape[1],
        "num_classes": len(head),
    }
