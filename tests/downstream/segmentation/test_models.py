"""Backbone, neck and heads against counts by hand and slow derivations; encoders that load."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from downstream.recipes import SEGMENTATION_RECIPES
from downstream.segmentation import main_segmentation
from downstream.segmentation.models import LinearSegmenter, UPerNet
from downstream.segmentation.vit_backbone import DenseViT, pyramid_blocks
from encoders.load import load_encoder
from encoders.models_relative_vit import RelativeViTEncoder
from models_vit import BASE, VisionTransformer

SIZES = dict(img_size=16, patch_size=4, embed_dim=12, depth=4, num_heads=3)


def randomise(model, seed=0):
    """Random parameters and running statistics, so that no part of a model is neutral."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.2)
            if name.endswith("running_var"):
                value.abs_().add_(0.5)
    return model


def random_vit(**sizes):
    return randomise(VisionTransformer(global_pool="token", **{**SIZES, **sizes}), seed=3)


def load(model, weights, tmp_path):
    """Loads an encoder's weights from a file, and returns the report."""
    torch.save({"model": weights}, tmp_path / "weights.pth")
    return load_encoder(model, tmp_path / "weights.pth")


def tokens_of(level):
    """The tokens [B, N, D] of a map [B, D, rows, columns]."""
    return level.flatten(2).transpose(1, 2)


# ------------------------------------------------------------------------------------------------------------ sizes


def test_the_logits_of_upernet_have_the_sizes_of_the_protocol():
    with torch.device("meta"):
        model = UPerNet(150, 768, **{**BASE, "img_size": 512})
        logits = model(torch.empty(2, 3, 512, 512))
    assert logits["decode"].shape == (2, 150, 128, 128)
    assert logits["aux"].shape == (2, 150, 32, 32)


# --------------------------------------------------------------------------------------------------------- backbone


def test_a_new_backbone_computes_what_the_pretrained_vit_does(tmp_path):
    """Biases begin at 0 and scales at 1. The bias of keys is random and changes nothing."""
    plain = random_vit().double()
    model = LinearSegmenter(5, **SIZES).double()
    report = load(model.backbone, plain.state_dict(), tmp_path)
    assert not report.missing  # tables of positions begin at zero
    imgs = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected = plain.forward_features(imgs)[:, 1:]
    (features,) = model.backbone(imgs)
    assert_close(tokens_of(features), expected)
    table = model.backbone.blocks[2].attn.relative_position_bias_table
    table.data[5, 1] = 1.0
    (features,) = model.backbone(imgs)
    assert not torch.allclose(tokens_of(features), expected)


def test_relative_positions_of_simmim_load(tmp_path):
    simmim = randomise(RelativeViTEncoder(**SIZES, pretraining=True))
    model = DenseViT(**SIZES, final_norm=True)
    load(model, simmim.state_dict(), tmp_path)
    imgs = torch.randn(2, 3, 16, 16)
    expected = simmim.forward_features(imgs)[:, 1:]
    (features,) = model(imgs)
    assert_close(tokens_of(features), expected, rtol=1e-4, atol=1e-4)


def test_the_linear_model_is_batch_norm_and_a_linear_layer():
    model = randomise(LinearSegmenter(5, drop_path_rate=0.5, **SIZES)).train()
    imgs = torch.randn(4, 3, 16, 16)
    logits = model(imgs)["decode"]
    (features,) = model.backbone(imgs)  # in eval mode: without drop path
    centred = features - features.mean(dim=(0, 2, 3), keepdim=True)
    variance = centred.square().mean(dim=(0, 2, 3), keepdim=True)
    normed = centred / (variance + 1e-5).sqrt()
    layer = model.decode_head.conv_seg
    expected = F.conv2d(normed, layer.weight, layer.bias)
    assert_close(logits, expected, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------ heads


class SlowUPerNet:
    """UPerNet by its definition, from the weights of the model, with the running statistics of BatchNorm."""

    def __init__(self, weights):
        self.weights = weights

    def norm(self, name, x):
        """BatchNorm."""
        w = self.weights
        scale = w[f"{name}.weight"] / (w[f"{name}.running_var"] + 1e-5).sqrt()
        shift = w[f"{name}.bias"] - w[f"{name}.running_mean"] * scale
        return x * scale[:, None, None] + shift[:, None, None]

    def conv(self, name, x):
        """Convolution, BatchNorm, ReLU."""
        kernel = self.weights[f"{name}.conv.weight"]
        x = F.conv2d(x, kernel, padding=kernel.shape[-1] // 2)
        return self.norm(f"{name}.bn", x).relu()

    def double(self, name, x):
        bias = self.weights[f"{name}.bias"]
        return F.conv_transpose2d(x, self.weights[f"{name}.weight"], bias, stride=2)

    def classify(self, name, x):
        bias = self.weights[f"{name}.conv_seg.bias"]
        return F.conv2d(x, self.weights[f"{name}.conv_seg.weight"], bias)

    def neck(self, maps):
        x = self.double("neck.upsample_4x.0", maps[0])
        x = F.gelu(self.norm("neck.upsample_4x.1", x))
        finest = self.double("neck.upsample_4x.3", x)
        fine = self.double("neck.upsample_2x.0", maps[1])
        corners = [maps[3][:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        coarsest = torch.stack(corners).amax(dim=0)
        return [finest, fine, maps[2], coarsest]

    def decode(self, c2, c3, c4, c5):
        pooled = [c5]
        for i, side in enumerate((1, 2, 3, 6)):
            mean = F.adaptive_avg_pool2d(c5, side)
            mean = self.conv(f"decode_head.psp_modules.{i}.1", mean)
            pooled.append(up(mean, 2))
        p5 = self.conv("decode_head.bottleneck", torch.cat(pooled, dim=1))
        p4 = self.conv("decode_head.lateral_convs.2", c4) + up(p5, 4)
        p3 = self.conv("decode_head.lateral_convs.1", c3) + up(p4, 8)
        p2 = self.conv("decode_head.lateral_convs.0", c2) + up(p3, 16)
        outs = []
        for i, level in enumerate((p2, p3, p4)):
            level = self.conv(f"decode_head.fpn_convs.{i}", level)
            outs.append(up(level, 16))
        outs.append(up(p5, 16))
        out = self.conv("decode_head.fpn_bottleneck", torch.cat(outs, dim=1))
        return self.classify("decode_head", out)


def up(x, size):
    return F.interpolate(x, size=size, mode="bilinear")


def test_upernet_against_its_definition():
    assert pyramid_blocks(12) == (3, 5, 7, 11)
    assert pyramid_blocks(24) == (7, 11, 15, 23)
    model = randomise(UPerNet(5, 6, **SIZES)).double().eval()
    imgs = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    x = model.backbone.prepend_cls_token(model.backbone.embed(imgs))
    maps = []
    for number, block in enumerate(model.backbone.blocks):
        x = block(x)
        if number in (0, 1, 3):
            maps.append(x[:, 1:].transpose(1, 2).unflatten(2, (4, 4)))
    slow = SlowUPerNet(model.state_dict())
    levels = slow.neck([maps[0], maps[1], maps[1], maps[2]])
    assert [level.shape[-1] for level in levels] == [16, 8, 4, 2]
    logits = model(imgs)
    assert set(logits) == {"decode"}  # the auxiliary head is for training
    assert_close(logits["decode"], slow.decode(*levels))
    model.train()
    model.auxiliary_head.eval()
    expected = slow.classify("auxiliary_head", slow.conv("auxiliary_head.convs.0", levels[2]))
    assert_close(model(imgs)["aux"], expected)


def test_learning_rates_and_weight_decay_by_layer():
    model = UPerNet(5, 6, **SIZES)
    _, args = main_segmentation.parse_args(["--recipe", "ade20k_upernet_vit_base"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    settings = {}
    for group in main_segmentation.make_optimizer(model, args, lr=1e-4).param_groups:
        for parameter in group["params"]:
            settings[names[id(parameter)]] = (group["lr_scale"], group["weight_decay"])
    assert len(settings) == len(names)
    for name, parameter in model.named_parameters():
        layer = 5  # neck and heads
        if name.startswith("backbone.blocks."):
            layer = int(name.split(".")[2]) + 1
        elif name.startswith("backbone."):
            layer = 0
        decay = 0.05
        if parameter.ndim == 1 or name in ("backbone.cls_token", "backbone.pos_embed"):
            decay = 0.0
        assert settings[name] == (pytest.approx(0.75 ** (5 - layer)), decay), name


# ---------------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("recipe", SEGMENTATION_RECIPES)
def test_recipes_build(recipe):
    _, args = main_segmentation.parse_args(["--recipe", recipe, "--finetune", "encoder.pth"])
    main_segmentation.check_flags(args, SimpleNamespace(batch_size=args.total_batch_size))
    with torch.device("meta"):
        model = main_segmentation.build_segmenter(vars(args))
    assert model.img_size == (args.input_size, args.input_size)
