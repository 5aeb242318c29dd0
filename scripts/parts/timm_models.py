"""The timm architecture, arguments and weights that equal an encoder or a classifier of this project.

| model here | timm architecture |
|---|---|
| `models_vit` | `vit_<size>_patch<p>_224`, a `VisionTransformer` |
| `models_vit` with rotary positions | `vit_<size>_patch16_dinov3_qkvb`, an `Eva` |
| `models_relative_vit` | `beit_base_patch16_224` |
| `models_absolute_vit` | `beit_base_patch16_224` with `use_abs_pos_emb` instead of `use_rel_pos_bias` |
| `models_swin` | `swin_<size>_patch4_window7_224` |
| `DenseViT` of segmentation | `beit_base_patch16_224` with `use_abs_pos_emb` |
| `ViTDet` of detection | `samvit_base_patch16` without its convolutions |

Sizes that differ from those of the architecture become arguments.
"""

from collections.abc import Mapping
from typing import Any

import torch
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from downstream.detection.backbone import ViTDet
from downstream.segmentation.vit_backbone import DenseViT
from encoders import models_swin
from encoders.models_absolute_vit import AbsoluteViTEncoder
from encoders.models_relative_vit import SimMIMEncoder
from encoders.models_swin import SwinEncoder
from encoders.names import Tensors, fold_scales, rename, split_key_bias
from encoders.trained import Trained
from models_vit import BASE, HUGE, LARGE, SMALL, TINY, layer_norm

TOLERANCE = 1e-5  # of the outputs, absolute and relative
NO_NORM = (
    "the heads read blocks, and the run has no final norm: norm starts with weight 1 and bias 0; "
    "`model.forward_intermediates(imgs)` of timm returns what the heads read"
)
# {name of an architecture: its sizes}. The first of those that fit a model equally well is taken.
VIT_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224": BASE,
    "vit_tiny_patch16_224": TINY,
    "vit_small_patch16_224": SMALL,
    "vit_large_patch16_224": LARGE,
    "vit_huge_patch14_224": HUGE,
}
DINOV3_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "vit_base_patch16_dinov3_qkvb": BASE,
    "vit_small_patch16_dinov3_qkvb": SMALL,
    "vit_large_patch16_dinov3_qkvb": LARGE,
}
BEIT_ARCHITECTURES: dict[str, dict[str, Any]] = {"beit_base_patch16_224": BASE}
SAM_ARCHITECTURES: dict[str, dict[str, Any]] = {"samvit_base_patch16": {**BASE, "window_size": 14}}


SWIN_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "swin_base_patch4_window7_224": {**models_swin.BASE, "patch_size": 4, "window_size": 7},
    "swin_large_patch4_window7_224": {**models_swin.LARGE, "patch_size": 4, "window_size": 7},
}


def is_classifier(model: nn.Module) -> bool:
    """Returns whether a model of this project is a classifier, and not an encoder alone."""
    return hasattr(model, "head")


def model_for_timm(trained: Trained) -> tuple[nn.Module, list[str]]:
    """Returns (the classifier, or the encoder, remarks). An encoder has a final norm, as timm's models have."""
    model = trained.encoder
    remarks = [*trained.remarks]
    if trained.task in ("segmentation", "detection") and isinstance(model.norm, nn.Identity):
        model.norm = layer_norm(model.embed_dim)
        remarks.append(NO_NORM)
    return model, remarks


def timm_weights(model: nn.Module, has_scales: bool = True) -> Tensors:
    """Returns the model's state dict with a plain linear head: the BatchNorm of a linear probe is folded into it.

    timm's models have these names, and `timm.create_model` renames those of Swin as it loads them from a folder. All
    class tokens but the first are timm's register tokens. The positions of a ViTDet are those of its images.

    has_scales: layer scales, if the model has some, stay, and are not folded into the layers before them.
    """
    state = model.state_dict()
    if not has_scales:
        state = fold_scales(state)
    if getattr(model, "rotary", False):
        state = rename(split_key_bias(state), [(r"\.ls([12])\.gamma$", r".gamma_\1")])
    if isinstance(model, ViTDet):
        state = rename(state, [(r"^norm\.", "neck.")])
        state["pos_embed"] = model.patch_positions.detach().unflatten(1, model.map_size)
    if getattr(model, "num_cls_tokens", 1) > 1:
        tokens = state["cls_token"]
        state["cls_token"] = tokens[:, :1].contiguous()
        state["reg_token"] = tokens[:, 1:].contiguous()
    if is_classifier(model) and isinstance(model.head, nn.Sequential):
        norm, linear = model.head
        state = {name: value for name, value in state.items() if not name.startswith("head.")}
        # W ((x - mean) / s) + b = (W / s) x + (b - (W / s) mean), with s = sqrt(var + eps).
        std = (norm.running_var.double() + norm.eps).sqrt()
        weight = linear.weight.detach().double() / std
        shift = weight @ norm.running_mean.double()
        bias = linear.bias.detach().double() - shift
        state["head.weight"] = weight.float()
        state["head.bias"] = bias.float()
    return state


def timm_arguments(model: nn.Module, has_scales: bool = True) -> tuple[str, dict[str, Any]]:
    """Returns the name and the keyword arguments with which `timm.create_model` builds `model`, without its weights.

    The architecture is the one that shares most sizes with the model. Its other sizes become arguments. An encoder of a
    BEiT has the pooling `token`, because timm drops the final norm for `avg`. has_scales: see `timm_weights`.
    """
    sizes, architectures = sizes_of(model)
    name = max(architectures, key=lambda name: num_equal(architectures[name], sizes))
    options: dict[str, Any] = {}
    height, width = model.img_size
    if height != width:
        options["img_size"] = (height, width)
    elif height != 224 or isinstance(model, ViTDet):  # whose architecture has 1024
        options["img_size"] = height
    known = {**architectures[name], "in_chans": 3, "mlp_ratio": 4.0}
    for option, value in sizes.items():
        if value != known[option]:
            options[option] = value
    if isinstance(model, (SimMIMEncoder, DenseViT)):
        options["global_pool"] = "token"
        if model.pos_embed is not None:
            options["use_abs_pos_emb"] = True
    if isinstance(model, AbsoluteViTEncoder):
        options["use_rel_pos_bias"] = False
    if isinstance(model, ViTDet):
        options["global_attn_indexes"] = list(model.global_blocks)
        options["neck_chans"] = 0
        options["norm_layer"] = None  # its default has another epsilon
    num_registers = getattr(model, "num_cls_tokens", 1) - 1
    if getattr(model, "rotary", False):
        options["num_reg_tokens"] = num_registers
        options["global_pool"] = "token"
    elif num_registers > 0:
        if isinstance(model, DenseViT):
            raise ValueError("timm's BEiTs, which the encoders of segmentation are, have no registers: --format torch")
        options["reg_tokens"] = num_registers
    if has_scales and getattr(model, "layer_scale", False):
        options["init_values"] = 1.0  # timm makes scales, which the file then sets
    options["num_classes"] = 0
    if is_classifier(model):
        if num_registers > 0 and model.global_pool == "token" and not model.registers:
            raise ValueError("of classifiers with several class tokens, timm takes those with --global_pool avg alone")
        head = model.head[-1] if isinstance(model.head, nn.Sequential) else model.head
        options["global_pool"] = model.global_pool
        if getattr(model, "rotary", False):
            options["use_fc_norm"] = model.global_pool == "avg"
        options["num_classes"] = head.out_features
    return name, options


def sizes_of(model: nn.Module) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns (the sizes of a model under timm's names, the sizes of timm's architectures of its kind)."""
    sizes = {"patch_size": model.patch_size, "embed_dim": model.embed_dim}
    if isinstance(model, SwinEncoder):
        first_blocks = [stage.blocks[0] for stage in model.layers]
        sizes["depths"] = model.depths
        sizes["num_heads"] = tuple(block.attn.num_heads for block in first_blocks)
        sizes["window_size"] = max(stage.window for stage in model.layers)
        architectures = SWIN_ARCHITECTURES
    else:
        first_blocks = [model.blocks[0]]
        sizes["depth"] = len(model.blocks)
        sizes["num_heads"] = first_blocks[0].attn.num_heads
        architectures = VIT_ARCHITECTURES
        if getattr(model, "rotary", False):
            architectures = DINOV3_ARCHITECTURES
    if isinstance(model, (SimMIMEncoder, DenseViT)):
        architectures = BEIT_ARCHITECTURES
    if isinstance(model, ViTDet):
        sizes["window_size"] = model.window_size
        architectures = SAM_ARCHITECTURES
    sizes["in_chans"] = model.in_chans
    sizes["mlp_ratio"] = first_blocks[0].mlp.fc1.out_features / model.embed_dim
    return sizes, architectures


def num_equal(architecture: Mapping[str, Any], sizes: Mapping[str, Any]) -> int:
    """Returns how many sizes of an architecture are those of a model."""
    return sum(sizes[name] == value for name, value in architecture.items())


@torch.inference_mode()
def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Returns the largest difference of a model's features or logits from ours, for two random images, in float64.

    Raises ValueError if it is more than TOLERANCE, FloatingPointError if our outputs are not finite.
    """
    generator = torch.Generator().manual_seed(0)
    imgs = torch.randn(2, ours.in_chans, *ours.img_size, generator=generator, dtype=torch.float64)
    if is_classifier(ours):
        expected = ours.double()(imgs)
        output = theirs.double()(imgs)
    else:
        expected = ours.double().forward_features(imgs)
        output = theirs.double().forward_features(imgs)
    if isinstance(theirs, VisionTransformerSAM):
        output = output.permute(0, 2, 3, 1)
    output = output.reshape(expected.shape)  # timm's Swin keeps the grid
    if not expected.isfinite().all():
        raise FloatingPointError("the outputs of the model for two random images are not finite; nothing is written")
    difference = (output - expected).abs().max().item()
    if not torch.allclose(output, expected, rtol=TOLERANCE, atol=TOLERANCE):
        raise ValueError(f"timm's outputs differ from ours by up to {difference:.1e}; nothing is written")
    return difference


def data_config(model: nn.Module, num_classes: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns timm's `pretrained_cfg` of a model: the images that it takes, and the names of its first and last layer.

    facts: see `export_facts.known_facts`.
    """
    config = {
        "input_size": [model.in_chans, *model.img_size],
        "fixed_input_size": True,
        "mean": facts["mean"],
        "std": facts["std"],
        "crop_pct": facts["crop_pct"],
        "interpolation": "bicubic",
        "num_classes": num_classes,
        "first_conv": None,
        "classifier": "head",
    }
    # Older versions of timm drop a first kernel of another number of channels if they know its name.
    if model.in_chans in (1, 3):
        config["first_conv"] = "patch_embed.proj"
    if isinstance(model, (SwinEncoder, ViTDet)):
        config["classifier"] = "head.fc"
    return config
