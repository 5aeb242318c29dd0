"""The class, configuration and weights of Transformers that equal a model of this project.

| model here | class of Transformers |
|---|---|
| `models_mae_pr`, without aggregation | `ViTMAEForPreTraining` |
| encoders of `models_vit` | `ViTModel`, without its pooler |
| classifiers of `models_vit` on the class token | `ViTForImageClassification` |

Nothing here needs the library. Files have the names of its version 4, which version 5 reads and writes, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from encoders.names import Tensors, rename
from models_mae_pr import MaskedAutoencoderViT
from scripts.parts.timm_models import is_classifier, num_outputs
from util.data.pixel_format import PixelFormat
from util.data.transforms import ResizeCenterCrop

BICUBIC = 3  # of Pillow
# From the names of MAE's releases. `encoders.names` has the way back.
_NAMES = (
    (r"^cls_token$", "embeddings.cls_token"),
    (r"^pos_embed$", "embeddings.position_embeddings"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embeddings.projection."),
    (r"^blocks\.", "encoder.layer."),
    (r"^norm\.", "layernorm."),
    (r"^head\.", "classifier."),
    (r"^decoder_blocks\.", "decoder.decoder_layers."),
    (r"^(mask_token|decoder_)", r"decoder.\1"),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.attn\.qkv\.", ".attention.attention.qkv."),
    (r"\.attn\.proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)
_INSIDE = (r"^(embeddings|encoder|layernorm)\.", r"vit.\1.")  # an encoder inside another class


def transformers_class(model: nn.Module) -> str:
    """Returns the name of the class that equals a model of this project."""
    if isinstance(model, MaskedAutoencoderViT):
        return "ViTMAEForPreTraining"
    if is_classifier(model):
        return "ViTForImageClassification"
    return "ViTModel"


def transformers_names(weights: Tensors, name: str) -> Tensors:
    """Returns weights with the names of MAE's releases under those of the class `name`. All share no memory."""
    patterns = [*_NAMES]
    if name != "ViTModel":
        patterns.append(_INSIDE)
    renamed: Tensors = {}
    for key, value in rename(weights, patterns).items():
        if ".qkv." in key:
            for part, tensor in zip(("query", "key", "value"), value.chunk(3), strict=True):
                renamed[key.replace("qkv", part)] = tensor.clone()
        else:
            renamed[key] = value
    return renamed


def transformers_config(model: nn.Module, classes: Sequence[str] | None, mask_ratio: float | None) -> dict[str, Any]:
    """Returns the content of config.json. classes: names of a classifier's outputs. mask_ratio: of a pre-training."""
    height, width = model.img_size
    config = {
        "architectures": [transformers_class(model)],
        "model_type": "vit",
        "image_size": [height, width],
        "patch_size": model.patch_size,
        "num_channels": model.in_chans,
        "layer_norm_eps": model.blocks[0].norm1.eps,  # the library's default is 1e-12
        "hidden_act": "gelu",
        **_block_sizes(model.blocks),
    }
    if height == width:
        config["image_size"] = height
    if isinstance(model, MaskedAutoencoderViT):
        config["model_type"] = "vit_mae"
        config["mask_ratio"] = mask_ratio
        config["norm_pix_loss"] = model.norm_pix_loss
        for key, value in _block_sizes(model.decoder.blocks).items():
            config[f"decoder_{key}"] = value
    elif is_classifier(model):
        labels = classes or [f"LABEL_{i}" for i in range(num_outputs(model))]
        config["id2label"] = {str(i): label for i, label in enumerate(labels)}
        config["label2id"] = {label: i for i, label in enumerate(labels)}
    return config


def _block_sizes(blocks: nn.ModuleList) -> dict[str, int]:
    return {
        "hidden_size": blocks[0].mlp.fc2.out_features,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": blocks[0].attn.num_heads,
        "intermediate_size": blocks[0].mlp.fc1.out_features,
    }


def processor_config(model: nn.Module, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of preprocessor_config.json: the evaluation view of this project, and its normalisation.

    facts: mean, std, and, if they are known, the type of the pixels and crop_pct. A rectangle is resized without its
    aspect ratio.
    """
    view = ResizeCenterCrop(model.img_size, facts.get("crop_pct"))
    pixels = facts.get("pixels") or "uint8"
    height, width = view.size
    rows, columns = view.resized
    size = {"height": rows, "width": columns}
    if height == width:
        size = {"shortest_edge": rows}
    return {
        "image_processor_type": "BitImageProcessor",  # unlike ViT's, it crops
        "do_convert_rgb": model.in_chans == 3,
        "do_resize": True,
        "size": size,
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": pixels != "float32",
        "rescale_factor": 1 / PixelFormat(model.in_chans, pixels).full_range,
        "do_normalize": True,
        "image_mean": facts["mean"],
        "image_std": facts["std"],
    }


def note_on_crop(model: nn.Module, facts: Mapping[str, Any]) -> list[str]:
    """Returns a note if the library crops every image one pixel beside the evaluation view of this project.

    A crop starts at half of what the resized image has beyond it. torchvision rounds halves to even numbers, the
    library rounds them down. facts: see `processor_config`.
    """
    view = ResizeCenterCrop(model.img_size, facts.get("crop_pct"))
    for resized, size in zip(view.resized, view.size, strict=True):
        if (resized - size) % 4 == 3:
            return [
                f"the image processor resizes to {resized} pixels and crops {size}: its crop starts one pixel before "
                "that of the evaluation here, so probabilities differ a little"
            ]
    return []
