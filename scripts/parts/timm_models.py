"""The timm architecture, arguments and weights that equal an encoder or a classifier of this project.

| model here | timm architecture |
|---|---|
| `models_vit` | `vit_<size>_patch<p>_224`, a `VisionTransformer` |
| `models_relative_vit` | `beit_base_patch16_224` |
| `models_absolute_vit` | `beit_base_patch16_224` with `use_abs_pos_emb` instead of `use_rel_pos_bias` |
| `models_swin` | `swin_<size>_patch4_window7_224` |

Sizes that differ from those of the architecture become arguments.
"""

from collections.abc import Mapping
from typing import Any

import timm
import torch
from torch import nn

from encoders.models_absolute_vit import AbsoluteViTEncoder
from encoders.models_relative_vit import RelativeViTEncoder
from encoders.models_swin import SwinEncoder
from encoders.names import Tensors
from models_vit import BASE, HUGE, LARGE, SMALL, TINY

TOLERANCE = 1e-5  # of the outputs, absolute and relative

# Sizes of timm's architectures. The first of those that fit equally well is taken.
SHARED = dict(mlp_ratio=4.0, in_chans=3)
VIT_SIZES: dict[str, dict[str, Any]] = {
    f"vit_{name}_patch{side}_224": {**sizes, "patch_size": side, **SHARED}
    for name, sizes in {"base": BASE, "tiny": TINY, "small": SMALL, "large": LARGE, "huge": HUGE}.items()
    for side in (16, 14, 8, 32)
    if timm.is_model(f"vit_{name}_patch{side}_224")
}
BEIT_SIZES: dict[str, dict[str, Any]] = {"beit_base_patch16_224": {**BASE, **SHARED}}
SWIN_SIZES: dict[str, dict[str, Any]] = {
    f"swin_{name}_patch4_window7_224": {
        **dict(patch_size=4, embed_dim=width, depths=[2, 2, depth, 2], window_size=7),
        **dict(num_heads=[width // 32 << stage for stage in range(4)]),
        **SHARED,
    }
    for name, width, depth in (("base", 128, 18), ("tiny", 96, 6), ("small", 96, 18), ("large", 192, 18))
}


def is_classifier(model: nn.Module) -> bool:
    """Returns whether a model of this project is a classifier, and not an encoder alone."""
    return hasattr(model, "head")


def num_outputs(classifier: nn.Module) -> int:
    """Returns the number of classes of a classifier, which may have the head of a linear probe."""
    head = classifier.head
    return (head[-1] if isinstance(head, nn.Sequential) else head).out_features


def timm_weights(model: nn.Module) -> Tensors:
    """Returns the model's state dict with a plain linear head: the BatchNorm of a linear probe is folded into it.

    timm's models have these names, and `timm.create_model` renames those of Swin as it loads them from a folder. All
    class tokens but the first are timm's register tokens.
    """
    state = model.state_dict()
    if getattr(model, "num_cls_tokens", 1) > 1:
        state["cls_token"], state["reg_token"] = (x.contiguous() for x in state["cls_token"].tensor_split([1], dim=1))
    if not is_classifier(model) or not isinstance(model.head, nn.Sequential):
        return state
    # BatchNorm, then linear: W ((x - mean) / s) + b = (W / s) x + (b - (W / s) mean), with s = sqrt(var + eps).
    without_head = {name: value for name, value in state.items() if not name.startswith("head.")}
    names = ("0.running_mean", "0.running_var", "1.weight", "1.bias")
    mean, var, weight, bias = (state[f"head.{name}"].double() for name in names)
    weight = weight / (var + model.head[0].eps).sqrt()
    return without_head | {"head.weight": weight.float(), "head.bias": (bias - weight @ mean).float()}


def timm_arguments(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """Returns the name and the keyword arguments with which `timm.create_model` builds `model`, without its weights.

    The architecture is the one that shares most sizes with the model. Its other sizes become arguments. An encoder of a
    BEiT has the pooling `token`, because timm drops the final norm for `avg`.
    """
    sizes = dict(patch_size=model.patch_size, embed_dim=model.embed_dim, in_chans=model.in_chans)
    others: dict[str, Any] = {}
    if isinstance(model, SwinEncoder):
        known, blocks = SWIN_SIZES, [stage.blocks[0] for stage in model.layers]
        sizes |= dict(depths=list(model.depths), num_heads=[block.attn.num_heads for block in blocks])
        sizes["window_size"] = max(stage.window for stage in model.layers)
    else:
        known, blocks = VIT_SIZES, model.blocks
        sizes |= dict(depth=len(blocks), num_heads=blocks[0].attn.num_heads)
    if isinstance(model, (RelativeViTEncoder, AbsoluteViTEncoder)):
        known, others = BEIT_SIZES, {"global_pool": "token"}
    if (num_registers := getattr(model, "num_cls_tokens", 1) - 1) > 0:
        others["reg_tokens"] = num_registers
        if is_classifier(model) and model.global_pool == "token":
            raise ValueError(
                f"timm reads one class token, and this classifier the mean of {model.num_cls_tokens}: only classifiers "
                "with --global_pool avg can be exported; main_finetune.py --eval --resume takes it as it is"
            )
    if isinstance(model, AbsoluteViTEncoder):
        others |= dict(use_abs_pos_emb=True, use_rel_pos_bias=False)
    sizes["mlp_ratio"] = blocks[0].mlp.fc1.out_features / model.embed_dim
    name = max(known, key=lambda name: sum(sizes[key] == value for key, value in known[name].items()))
    options = {key: value for key, value in sizes.items() if value != known[name][key]} | others
    height, width = model.img_size
    if (height, width) != (224, 224):
        options = {"img_size": height if height == width else (height, width)} | options
    if not is_classifier(model):
        return name, options | {"num_classes": 0}
    return name, options | {"global_pool": model.global_pool, "num_classes": num_outputs(model)}


@torch.inference_mode()
def largest_difference(ours: nn.Module, theirs: nn.Module, whose: str = "timm's") -> str:
    """Returns the largest difference of a model's features or logits from ours, as text. whose: it is, for errors.

    The outputs of two random images are compared in float32. If they differ by more than TOLERANCE, which may be
    rounding, they are compared in float64. Raises ValueError if they still differ, FloatingPointError if they are not
    finite.
    """
    imgs, differences = random_images(ours), []
    for dtype in (torch.float32, torch.float64):
        models = ours.to(dtype), theirs.to(dtype)
        expected, output = (output_of(model, imgs.to(dtype), is_classifier(ours)) for model in models)
        differences.append(f"{(output - expected).abs().max().item():.1e}")
        if torch.allclose(output, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return " in float32, which is rounding: in float64 ".join(differences)
    outputs = "logits" if is_classifier(ours) else "features"
    rows = " (timm shifts the windows of a stage that is one row of windows)" if isinstance(ours, SwinEncoder) else ""
    raise ValueError(
        f"{whose} {outputs} differ from ours by up to {differences[-1]}, more than {TOLERANCE}{rows}; nothing is "
        "written"
    )


def random_images(model: nn.Module) -> torch.Tensor:
    """Returns two images of noise [2, C, H, W] for a model of this project."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, model.in_chans, *model.img_size, generator=generator)


def output_of(model: nn.Module, imgs: torch.Tensor, as_classifier: bool) -> torch.Tensor:
    """Returns the logits of a model, ours or timm's, or its features [B, tokens, D].

    FloatingPointError if they are not finite.
    """
    output = model(imgs) if as_classifier else model.forward_features(imgs)
    if not output.isfinite().all():
        raise FloatingPointError(
            f"the {'logits' if as_classifier else 'features'} of two random images are not finite; nothing is written"
        )
    return output.flatten(1, 2) if output.ndim == 4 else output  # timm's Swin keeps the grid


def data_config(model: nn.Module, settings: Mapping[str, Any], mean: list[float], std: list[float]) -> dict[str, Any]:
    """Returns timm's `pretrained_cfg` of a model: the images that it takes, and the names of its first and last layer.

    settings: those of the run. mean, std: of the pixels.
    """
    in_chans, size = model.in_chans, list(model.img_size)
    return dict(
        input_size=[in_chans, *size],
        fixed_input_size=True,
        mean=mean,
        std=std,
        crop_pct=settings.get("crop_pct") or (0.875 if max(size) <= 224 else 1.0),
        interpolation="bicubic",
        num_classes=timm_arguments(model)[1]["num_classes"],
        # Older versions of timm drop a first kernel of another number of channels if they know its name.
        first_conv="patch_embed.proj" if in_chans in (1, 3) else None,
        classifier="head.fc" if isinstance(model, SwinEncoder) else "head",
    )
