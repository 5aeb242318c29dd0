"""Builds the encoder or the classifier that a checkpoint holds, of any kind.

    from encoders.kinds import load_model

    model, meta = load_model("output/prmim50_base")  # a checkpoint, or the folder of a run
    tokens = model.forward_features(imgs)  # [B, 1 + N, D]; Swin: [B, cells, 8 D]

The kind and the sizes are inferred from the weights and from the settings in the checkpoint.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from encoders.models_absolute_vit import AbsoluteVisionTransformer, AbsoluteViTEncoder
from encoders.models_relative_vit import RelativeVisionTransformer, RelativeViTEncoder
from encoders.models_swin import SwinEncoder, SwinTransformer
from encoders.names import encoder_weights_of, fit_encoder, refuse_foreign
from models_vit import VisionTransformer, ViTEncoder, read_sizes
from util.pos_embed import grid_from_settings
from util.run import checkpoint

Weights = dict[str, torch.Tensor]
_BIAS_TABLE = "relative_position_bias_table"


class Kind(NamedTuple):
    """A kind of encoder."""

    name: str  # in messages
    encoder: Callable[..., nn.Module]
    classifier: Callable[..., nn.Module]
    read_sizes: Callable[[Weights, Mapping[str, Any], str], dict[str, Any]]  # see `models_vit.read_sizes`


def read_relative_sizes(weights: Weights, settings: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Infers the size arguments of `RelativeViTEncoder` from the weights of one. See `models_vit.read_sizes`."""
    table = next(value for name, value in weights.items() if name.endswith(_BIAS_TABLE))
    kernel, hidden = need(weights, ("patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"), what)
    embed_dim, in_chans, patch_size, _ = kernel.shape
    side = (math.isqrt(len(table) - 3) + 1) // 2  # of a square grid
    rows, columns = grid_from_settings(settings, patch_size) or (side, side)
    return dict(
        img_size=(rows * patch_size, columns * patch_size),
        patch_size=patch_size,
        in_chans=in_chans,
        embed_dim=embed_dim,
        depth=len({name.split(".")[1] for name in weights if name.startswith("blocks.")}),
        num_heads=table.shape[1],
        mlp_ratio=len(hidden) / embed_dim,
    )


def read_swin_sizes(weights: Weights, settings: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Infers the size arguments of `SwinEncoder` from the weights and the settings of one of this project.

    Raises ValueError for weights of other projects, because some files merge patches in another order than Swin.
    """
    kernel, hidden = need(weights, ("patch_embed.proj.weight", "layers.0.blocks.0.mlp.fc1.weight"), what)
    embed_dim, in_chans, patch_size, _ = kernel.shape
    grid = grid_from_settings(settings, patch_size)
    if grid is None:
        raise ValueError(
            f"{what} holds a Swin Transformer without the settings of a run: its image size and the order of its patch "
            "merging are unknown; give a checkpoint of main_pretrain.py or main_finetune.py"
        )
    stages = [name for name in weights if name.startswith("layers.")]
    blocks = {tuple(map(int, name.split(".")[1:4:2])) for name in stages if ".blocks." in name}  # (stage, block)
    depths = [sum(stage == s for stage, _ in blocks) for s in range(1 + max(blocks)[0])]
    names = [f"layers.{s}.blocks.0.attn.{_BIAS_TABLE}" for s in range(len(depths))]
    tables = need(weights, names, what)
    return dict(
        img_size=(grid[0] * patch_size, grid[1] * patch_size),
        patch_size=patch_size,
        in_chans=in_chans,
        embed_dim=embed_dim,
        depths=depths,
        num_heads=[table.shape[1] for table in tables],
        window_size=max((math.isqrt(len(table)) + 1) // 2 for table in tables),  # late stages may have smaller windows
        mlp_ratio=len(hidden) / embed_dim,
    )


def need(weights: Weights, names: Sequence[str], what: str) -> list[torch.Tensor]:
    """Returns the named weights. ValueError, with `what` as the name of the file, if one is missing."""
    missing = [name for name in names if not torch.is_tensor(weights.get(name))]
    if missing:
        raise ValueError(f"{what} holds no encoder of this kind: {', '.join(missing)} missing")
    return [weights[name] for name in names]


PLAIN = Kind("a plain ViT", ViTEncoder, VisionTransformer, read_sizes)
RELATIVE = Kind(
    "a ViT with relative positions",
    partial(RelativeViTEncoder, shared_bias=False),
    RelativeVisionTransformer,
    read_relative_sizes,
)
ABSOLUTE = Kind("SimMIM's ViT with absolute positions", AbsoluteViTEncoder, AbsoluteVisionTransformer, read_sizes)
SWIN = Kind("a Swin Transformer", SwinEncoder, SwinTransformer, read_swin_sizes)


def find_kind(weights: Mapping[str, Any]) -> Kind:
    """Returns the kind of encoder that a state dict, under this project's names, belongs to."""
    if any(name.startswith("layers.") for name in weights):
        return SWIN
    if any(name.endswith(_BIAS_TABLE) for name in weights):
        return RELATIVE
    return ABSOLUTE if "blocks.0.attn.q_bias" in weights else PLAIN


def head_of(weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Returns the matrix [classes, D] of a classifier's head, that of a linear probe included, or None."""
    return weights.get("head.weight", weights.get("head.1.weight"))


def read_encoder(content: Mapping[str, Any], what: str) -> tuple[Kind, Weights, dict[str, Any]]:
    """Returns (kind, weights under this project's names, size arguments) of the encoder in a checkpoint's content.

    what: name of the file in errors. Raises ValueError if it is of no known kind.
    """
    weights = encoder_weights_of(content)
    kind = find_kind(weights)
    return kind, weights, kind.read_sizes(weights, checkpoint.meta_of(content).get("settings", {}), what)


def load_model(path: str | Path) -> tuple[nn.Module, dict[str, Any]]:
    """Loads the encoder, or the classifier, that a checkpoint holds. Returns (model in eval mode, meta).

    path: a file, or the folder of a run, whose newest intact checkpoint is used. meta: what the checkpoint says about
    its run, or {} for files of other projects. Raises ValueError if the file holds no model of a known kind.
    """
    path = checkpoint.find_checkpoint_file(path)
    content = checkpoint.read_checkpoint(path)
    return build_model(content, repr(str(path))), checkpoint.meta_of(content)


def build_model(content: Mapping[str, Any], what: str) -> nn.Module:
    """Does what `load_model` does for content that was read already. `what` names it in errors.

    A classifier has the attribute `head`. Each block of a `RelativeViTEncoder` has a bias table of its own.
    """
    kind, weights, sizes = read_encoder(content, what)
    head = head_of(weights)
    if head is None:
        model = kind.encoder(**sizes)
        # A table that all blocks share in pre-training is copied into each block.
        refuse_foreign(model, {name: v for name, v in weights.items() if not name.startswith("rel_pos_bias.")}, what)
        report = fit_encoder(model, content, what)
        assert not report.resized, report
    else:
        pool = "avg" if kind is SWIN or "fc_norm.weight" in weights else "token"
        options = dict(num_classes=len(head), global_pool=pool, probe="head.1.weight" in weights)
        model = kind.classifier(**options, **sizes)
        checkpoint.load_strict(model, weights, f"the weights in {what}")
    return model.eval()
