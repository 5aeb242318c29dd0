"""Key names and config of Hugging Face Transformers' ViT and ViTMAE, version 4 and 5."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from util.run.checkpoint import CheckpointError

# Parameter names of Transformers -> those of MAE's releases. The first rows undo what version 5 has renamed in memory.
_RENAMED = (
    (r"\.attention\.([qkv])_proj\.", r".attn.\1."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.attention\.attention\.(?:(q)uery|(k)ey|(v)alue)\.", r".attn.\1\2\3."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(layers?\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^(?:vit\.)?embeddings\.cls_token$", "cls_token"),
    (r"^(?:vit\.)?embeddings\.position_embeddings$", "pos_embed"),
    (r"^(?:vit\.)?embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^decoder\.decoder_(?:encoder\.layer|layers)\.", "decoder_blocks."),
    (r"^decoder\.", ""),
    (r"^(?:vit\.)?(?:encoder\.layer|layers)\.", "blocks."),
    (r"^(?:vit\.)?layernorm\.", "norm."),
    (r"^classifier\.", "head."),
)


def read_transformers(
    weights: Mapping[str, torch.Tensor], config_path: Path | None, what: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns (the weights under the names of MAE's releases, meta with the config's settings and classes)."""
    renamed = {}
    for key, value in weights.items():
        for pattern, replacement in _RENAMED:
            key = re.sub(pattern, replacement, key)
        renamed[key] = value
    for key in [key for key in renamed if key.endswith(".attn.q.weight")]:
        block = key.removesuffix("q.weight")
        parts = [renamed.pop(f"{block}{p}.weight") for p in "qkv"]
        biases = [renamed.pop(f"{block}{p}.bias", torch.zeros(len(w))) for p, w in zip("qkv", parts, strict=True)]
        renamed[f"{block}qkv.weight"], renamed[f"{block}qkv.bias"] = torch.cat(parts), torch.cat(biases)
    if config_path is None:
        return renamed, {}
    config = json.loads(config_path.read_text())
    if config.get("hidden_act", "gelu") != "gelu":
        raise CheckpointError(f"{what} has the activation {config['hidden_act']!r}; the encoders here have gelu")
    side = config["image_size"]
    settings = {
        "input_size": [side, side] if isinstance(side, int) else side,
        "patch_size": config["patch_size"],
        "num_heads": config["num_attention_heads"],
    }
    labels = config.get("id2label") if any(key.startswith("head.") for key in renamed) else None
    classes = None if labels is None else [labels[str(i)] for i in range(len(labels))]
    if classes == [f"LABEL_{i}" for i in range(len(classes or ()))]:
        classes = None  # no names were given
    images = config_path.with_name("preprocessor_config.json")
    if images.is_file():
        said = json.loads(images.read_text())
        if said.get("do_normalize", True):
            settings |= {"mean": said.get("image_mean"), "std": said.get("image_std")}
    settings["norm_eps"] = config.get("layer_norm_eps", 1e-12)  # that of ViTConfig
    return renamed, {"settings": settings, "classes": classes}
