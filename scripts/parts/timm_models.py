"""The timm architecture, arguments and weights that equal an encoder or a classifier of this project.

| model here | timm architecture |
|---|---|
| `models_vit` | `vit_<size>_patch<p>_224`, a `VisionTransformer` |
| `models_relative_vit` | `beit_base_patch16_224` |
| `models_absolute_vit` | `beit_base_patch16_224` with `use_abs_pos_emb` instead of `use_rel_pos_bias` |
| `models_swin` | `swin_<size>_patch4_window7_224` |
| `DenseViT` of segmentation | `beit_base_patch16_224` with `use_abs_pos_emb` |
| `ViTDet` of detection | `samvit_base_patch16` without its convolutions |

Sizes that differ from those of the architecture become arguments.
"""

from collections.abc import Mapping
from typing import Any

import timm
import torch
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from downstream.detection.backbone import ViTDet
from downstream.segmentation.vit_backbone import DenseViT
from encoders.models_absolute_vit import AbsoluteViTEncoder
from encoders.models_relative_vit import RelativeViTEncoder
from encoders.models_swin import SwinEncoder
from encoders.names import Tensors, rename
from encoders.trained import Trained
from models_vit import BASE, HUGE, LARGE, SMALL, TINY, layer_norm

TOLERANCE = 1e-5  # of the outputs, absolute and relative
NO_NORM = (
    "the heads read blocks, and the run has no final norm: norm starts with weight 1 and bias 0; "
    "`model.forward_intermediates(imgs)` of timm returns what the heads read"
)


def vit_architectures() -> dict[str, dict[str, Any]]:
    """Returns the sizes of timm's plain ViTs. The first of those that fit a model equally well is taken."""
    architectures = {}
    for size, widths in {"base": BASE, "tiny": TINY, "small": SMALL, "large": LARGE, "huge": HUGE}.items():
        for patch_size in (16, 14, 8, 32):
            name = f"vit_{size}_patch{patch_size}_224"
            if timm.is_model(name):
                architectures[name] = {**widths, "patch_size": patch_size}
    return architectures


def swin_architectures() -> dict[str, dict[str, Any]]:
    """Returns the sizes of timm's Swins, see `vit_architectures`."""
    architectures = {}
    for size, width, depth in (("base", 128, 18), ("tiny", 96, 6), ("small", 96, 18), ("large", 192, 18)):
        architectures[f"swin_{size}_patch4_window7_224"] = {
            "patch_size": 4,
            "embed_dim": width,
            "depths": [2, 2, depth, 2],
            "num_heads": [width // 32 << stage for stage in range(4)],
            "window_size": 7,
        }
    return architectures


VIT_ARCHITECTURES = vit_architectures()
BEIT_ARCHITECTURES: dict[str, dict[str, Any]] = {"beit_base_patch16_224": dict(BASE)}
SAM_ARCHITECTURES: dict[str, dict[str, Any]] = {"samvit_base_patch16": {**BASE, "window_size": 14}}
SWIN_ARCHITECTURES = swin_architectures()


def is_classifier(model: nn.Module) -> bool:
    """Returns whether a model of this project is a classifier, and not an encoder alone."""
    return hasattr(model, "head")


def num_outputs(classifier: nn.Module) -> int:
    """Returns the number of classes of a classifier, which may have the head of a linear probe."""
    head = classifier.head
    if isinstance(head, nn.Sequential):
        head = head[-1]
    return head.out_features


def model_for_timm(trained: Trained) -> tuple[nn.Module, list[str]]:
    """Returns (the classifier, or the encoder, remarks). It has a final norm, as timm's models have."""
    model = trained.encoder
    if not isinstance(getattr(model, "norm", None), nn.Identity) or is_classifier(model):
        return model, [*trained.remarks]
    model.norm = layer_norm(model.embed_dim)
    return model, [*trained.remarks, NO_NORM]


def timm_weights(model: nn.Module) -> Tensors:
    """Returns the model's state dict with a plain linear head: the BatchNorm of a linear probe is folded into it.

    timm's models have these names, and `timm.create_model` renames those of Swin as it loads them from a folder. All
    class tokens but the first are timm's register tokens. The positions of a ViTDet are those of its images.
    """
    state = model.state_dict()
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


def timm_arguments(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """Returns the name and the keyword arguments with which `timm.create_model` builds `model`, without its weights.

    The architecture is the one that shares most sizes with the model. Its other sizes become arguments. An encoder of a
    BEiT has the pooling `token`, because timm drops the final norm for `avg`.
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
    if isinstance(model, (RelativeViTEncoder, AbsoluteViTEncoder, DenseViT)):
        options["global_pool"] = "token"
    if isinstance(model, DenseViT):
        options["use_abs_pos_emb"] = True
    if isinstance(model, ViTDet):
        options["global_attn_indexes"] = list(model.global_blocks)
        options["neck_chans"] = 0
        options["norm_layer"] = None  # its default has another epsilon
    num_registers = getattr(model, "num_cls_tokens", 1) - 1
    if num_registers > 0:
        options["reg_tokens"] = num_registers
    if isinstance(model, AbsoluteViTEncoder):
        options["use_abs_pos_emb"] = True
        options["use_rel_pos_bias"] = False
    if not is_classifier(model):
        options["num_classes"] = 0
    else:
        if num_registers > 0 and model.global_pool == "token":
            raise ValueError(
                f"timm reads one class token, and this classifier the mean of {model.num_cls_tokens}: only classifiers "
                "with --global_pool avg can be exported; main_finetune.py --eval --resume takes it as it is"
            )
        options["global_pool"] = model.global_pool
        options["num_classes"] = num_outputs(model)
    return name, options


def sizes_of(model: nn.Module) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns (the sizes of a model under timm's names, the sizes of timm's architectures of its kind)."""
    sizes = {"patch_size": model.patch_size, "embed_dim": model.embed_dim}
    if isinstance(model, SwinEncoder):
        first_blocks = [stage.blocks[0] for stage in model.layers]
        sizes["depths"] = list(model.depths)
        sizes["num_heads"] = [block.attn.num_heads for block in first_blocks]
        sizes["window_size"] = max(stage.window for stage in model.layers)
        architectures = SWIN_ARCHITECTURES
    else:
        first_blocks = [model.blocks[0]]
        sizes["depth"] = len(model.blocks)
        sizes["num_heads"] = first_blocks[0].attn.num_heads
        architectures = VIT_ARCHITECTURES
    if isinstance(model, (RelativeViTEncoder, AbsoluteViTEncoder, DenseViT)):
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
def largest_difference(ours: nn.Module, theirs: nn.Module) -> str:
    """Returns the largest difference of a model's features or logits from ours, as text.

    The outputs of two random images are compared in float32. If they differ by more than TOLERANCE, which may be
    rounding, they are compared in float64. Raises ValueError if they still differ, FloatingPointError if they are not
    finite.
    """
    imgs = random_images(ours)
    differences = []
    for dtype in (torch.float32, torch.float64):
        expected = output_of(ours.to(dtype), imgs.to(dtype), is_classifier(ours))
        output = output_of(theirs.to(dtype), imgs.to(dtype), is_classifier(ours))
        differences.append(f"{(output - expected).abs().max().item():.1e}")
        if torch.allclose(output, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return " in float32, which is rounding: in float64 ".join(differences)
    hint = ""
    if isinstance(ours, SwinEncoder):
        hint = " (timm shifts the windows of a stage that is one row of windows)"
    raise ValueError(
        f"its outputs differ from ours by up to {differences[-1]}, more than {TOLERANCE}{hint}; nothing is written"
    )


def random_images(model: nn.Module) -> torch.Tensor:
    """Returns two images of noise [2, C, H, W] for a model of this project."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, model.in_chans, *model.img_size, generator=generator)


def output_of(model: nn.Module, imgs: torch.Tensor, as_classifier: bool) -> torch.Tensor:
    """Returns the logits of a model, ours or timm's, or its features [B, tokens, D].

    FloatingPointError if they are not finite.
    """
    if as_classifier:
        output = model(imgs)
    else:
        output = model.forward_features(imgs)
    if not output.isfinite().all():
        raise FloatingPointError("the outputs of the model for two random images are not finite; nothing is written")
    if isinstance(model, VisionTransformerSAM):
        output = output.permute(0, 2, 3, 1)
    if output.ndim == 4:  # timm's Swin keeps the grid
        output = output.flatten(1, 2)
    return output


def data_config(model: nn.Module, settings: Mapping[str, Any], mean: list[float], std: list[float]) -> dict[str, Any]:
    """Returns timm's `pretrained_cfg` of a model: the images that it takes, and the names of its first and last layer.

    settings: those of the run. mean, std: of the pixels.
    """
    size = list(model.img_size)
    crop_pct = settings.get("crop_pct")
    if crop_pct is None:
        crop_pct = 0.875
        if max(size) > 224:
            crop_pct = 1.0
    config = {
        "input_size": [model.in_chans, *size],
        "fixed_input_size": True,
        "mean": mean,
        "std": std,
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "num_classes": timm_arguments(model)[1]["num_classes"],
        "first_conv": None,
        "classifier": "head",
    }
    # Older versions of timm drop a first kernel of another number of channels if they know its name.
    if model.in_chans in (1, 3):
        config["first_conv"] = "patch_embed.proj"
    if isinstance(model, (SwinEncoder, ViTDet)):
        config["classifier"] = "head.fc"
    return config
