"""Detectors that were released as files of detectron2: ViTDet with Mask R-CNN on a plain ViT."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from encoders.kinds import find_factory
from encoders.names import Tensors
from util.run.checkpoint import CheckpointError

# Names that a pickle of arrays needs. Nothing else is loaded, so reading a file runs no code of it.
_ARRAYS = {
    (f"numpy.{core}.{module}", name)
    for core in ("core", "_core")
    for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
} | {("numpy", "ndarray"), ("numpy", "dtype"), ("collections", "OrderedDict"), ("_codecs", "encode")}


class ArrayUnpickler(pickle.Unpickler):
    """Reads pickles of plain values and numpy arrays; UnpicklingError for anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"it holds {module}.{name}; files whose reading could run code are refused")
        return super().find_class(module, name)


def read_released(path: Path) -> Tensors:
    """Returns the weights in a .pkl file of detectron2. CheckpointError if it is none."""
    try:
        with path.open("rb") as file:
            content = ArrayUnpickler(file, encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, ImportError, IndexError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read as a file of detectron2: {error}") from error
    weights = content.get("model", content) if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise CheckpointError(f"{str(path)!r} holds no weights by their names")
    arrays = {name: value for name, value in weights.items() if isinstance(value, np.ndarray)}
    try:
        return {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
    except TypeError as error:  # of objects or words
        raise CheckpointError(f"{str(path)!r} holds arrays that are no numbers: {error}") from error


def is_detectron2(weights: Mapping[str, Any]) -> bool:
    """Whether a state dict has the key names of detectron2's ViTDet."""
    return any(name.startswith("backbone.net.blocks.") for name in weights)


# Our stage, and the number of modules before its two convolutions, of detectron2's modules `simfp_2` to `simfp_5`.
_STAGES = {"2": (0, 4), "3": (1, 1), "4": (2, 0), "5": (3, 1)}
_RENAMED = (
    (r"^backbone\.net\.", "backbone."),
    (r"^proposal_generator\.rpn_head\.conv\.conv(\d+)\.", r"rpn.head.conv.\1.0."),
    (r"^proposal_generator\.rpn_head\.objectness_logits\.", "rpn.head.cls_logits."),
    (r"^proposal_generator\.rpn_head\.anchor_deltas\.", "rpn.head.bbox_pred."),
    (r"^roi_heads\.box_head\.fc1\.", "roi_heads.box_head.5."),
    (r"^roi_heads\.mask_head\.deconv\.", "roi_heads.mask_predictor.conv5_mask."),
    (r"^roi_heads\.mask_head\.predictor\.", "roi_heads.mask_predictor.mask_fcn_logits."),
)


def detectron2_names(weights: Tensors) -> Tensors:
    """Returns a state dict of detectron2's ViTDet under the names of `Detector`.

    The background is the first class here and the last one there. Boxes and masks of the background, which nothing
    reads, become zeros. Buffers of pixel statistics and anchors are left out.
    """
    renamed = {}
    for name, value in weights.items():
        if name.startswith(("pixel_", "proposal_generator.anchor_generator.")):
            continue
        name = _rename(name)
        if name.startswith("roi_heads.box_predictor.cls_score."):
            value = value.roll(1, dims=0)
        elif name.startswith("roi_heads.box_predictor.bbox_pred."):
            value = torch.cat([value.new_zeros(4, *value.shape[1:]), value])
        elif name.startswith("roi_heads.mask_predictor.mask_fcn_logits."):
            value = torch.cat([value.new_zeros(1, *value.shape[1:]), value])
        renamed[name] = value
    return renamed


def _rename(name: str) -> str:
    if match := re.fullmatch(r"backbone\.simfp_([2-5])\.(\d+)(\.norm)?\.(weight|bias)", name):
        stage, first = _STAGES[match[1]]
        number = int(match[2])
        if number >= first:  # a convolution with its norm is one module there and two here
            number = first + 2 * (number - first) + (match[3] is not None)
        return f"pyramid.stages.{stage}.{number}.{match[4]}"
    if match := re.fullmatch(r"roi_heads\.(?:box_head\.conv|mask_head\.mask_fcn)(\d)(\.norm)?\.(weight|bias)", name):
        head = name.split(".")[1]
        return f"roi_heads.{head}.{int(match[1]) - 1}.{1 if match[2] else 0}.{match[3]}"
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def infer_settings(weights: Mapping[str, torch.Tensor], what: str) -> dict[str, Any]:
    """Returns the settings of a released model from its weights under our names, and "num_classes".

    CheckpointError if a weight is missing.
    """
    names = ["backbone.patch_embed.proj.weight", "backbone.pos_embed", "pyramid.stages.2.0.weight"]
    names.append("roi_heads.box_predictor.cls_score.weight")
    blocks = {int(name.split(".")[2]) for name in weights if name.startswith("backbone.blocks.")}
    tables = tuple(f"backbone.blocks.{number}.attn.rel_pos_h" for number in (0, max(blocks, default=0)))
    missing = [name for name in (*names, *tables) if name not in weights]
    if missing:
        raise CheckpointError(f"{what} holds no ViTDet: {', '.join(missing)} missing")
    kernel, positions, lateral, classifier = (weights[name] for name in names)
    window, grid = ((len(weights[name]) + 1) // 2 for name in tables)
    patch = kernel.shape[2]
    return {
        "model": find_factory(kernel.shape[0], len(blocks), what)[0],
        "input_size": grid * patch,
        "patch_size": patch,
        "in_chans": kernel.shape[1],
        "pretrain_size": round((positions.shape[1] - 1) ** 0.5) * patch,
        "window_size": window,
        "decoder_channels": lateral.shape[0],
        "masks": any(name.startswith("roi_heads.mask_head.") for name in weights),
        "num_classes": len(classifier) - 1,
    }
