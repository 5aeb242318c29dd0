"""Backbone, neck and heads against counts by hand and slow derivations; encoders and published weights that load."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from downstream.recipes import SEGMENTATION_RECIPES
from downstream.segmentation import main_segmentation
from downstream.segmentation.batch_norm import SyncBatchNorm2d
from downstream.segmentation.engine_segmentation import segmentation_losses
from downstream.segmentation.models import LinearSegmenter, UPerNet
from downstream.segmentation.released import mmsegmentation_names
from downstream.segmentation.vit_backbone import DenseViT, pyramid_blocks
from encoders.load import load_encoder
from encoders.models_relative_vit import RelativeViTEncoder
from encoders.rel_pos import resize_bias_table
from models_vit import BASE, VisionTransformer
from tests.two_processes import run_in_two_processes
from util.run.checkpoint import CheckpointError, load_strict

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


def vit_weights(**sizes):
    return randomise(VisionTransformer(global_pool="token", **{**SIZES, **sizes}), seed=3).state_dict()


# ------------------------------------------------------------------------------------------------------------ sizes


def test_upernet_on_vit_base_has_the_sizes_of_the_protocol():
    with torch.device("meta"):
        model = UPerNet(150, 768, **{**BASE, "img_size": 512})
        logits = model(torch.empty(2, 3, 512, 512))
    assert logits["decode"].shape == (2, 150, 128, 128) and logits["aux"].shape == (2, 150, 32, 32)
    d, table = 768, ((2 * 32 - 1) ** 2 + 3) * 12
    block = 4 * d + (3 * d * d + 2 * d) + (d * d + d) + (8 * d * d + 5 * d) + 2 * d + table
    backbone = (16 * 16 * 3 * d + d) + d + (1 + 32 * 32) * d + 12 * block
    neck = 3 * (4 * d * d + d) + 2 * d

    def conv(inputs, outputs, side):
        return inputs * outputs * side**2 + 2 * outputs  # and BatchNorm

    head = 4 * conv(d, d, 1) + conv(5 * d, d, 3) + 3 * conv(d, d, 1) + 3 * conv(d, d, 3) + conv(4 * d, d, 3)
    head += 150 * d + 150
    aux = conv(d, 256, 3) + 150 * 256 + 150
    for part, number in ((model.backbone, backbone), (model.neck, neck), (model.decode_head, head)):
        assert sum(p.numel() for p in part.parameters()) == number
    assert sum(p.numel() for p in model.auxiliary_head.parameters()) == aux
    assert model.backbone.blocks[11].attn.relative_position_bias_table.shape == (3972, 12)


def test_the_maps_are_those_of_four_depths():
    assert pyramid_blocks(12) == (3, 5, 7, 11) and pyramid_blocks(24) == (7, 11, 15, 23)
    model = randomise(DenseViT(out_blocks=(0, 1, 1, 3), **SIZES))
    imgs = torch.randn(2, 3, 16, 16)
    x = model.prepend_cls_token(model.patch_embed(model.patchify(imgs)) + model.pos_embed[:, 1:])
    expected = []
    for block in model.blocks:
        x = block(x)
        expected.append(x[:, 1:].transpose(1, 2).reshape(2, 12, 4, 4))
    for found, number in zip(model(imgs), (0, 1, 1, 3), strict=True):
        assert torch.equal(found, expected[number])


# --------------------------------------------------------------------------------------------------------- backbone


def test_a_new_backbone_computes_what_the_pretrained_vit_does(tmp_path):
    """Biases begin at 0 and scales at 1. The bias of keys is random and changes nothing."""
    plain = VisionTransformer(global_pool="token", **SIZES).double()
    plain.load_state_dict(vit_weights())
    torch.save({"model": plain.state_dict()}, tmp_path / "w.pth")
    model = LinearSegmenter(5, **SIZES).double()
    report = load_encoder(model.backbone, tmp_path / "w.pth")
    assert {key.rsplit(".", 1)[1] for key in report.missing} == {"relative_position_bias_table", "gamma_1", "gamma_2"}
    imgs = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected = plain.forward_features(imgs)[:, 1:]
    torch.testing.assert_close(model.backbone(imgs)[0].flatten(2).transpose(1, 2), expected)
    model.backbone.blocks[2].attn.relative_position_bias_table.data[5, 1] = 1.0
    assert not torch.allclose(model.backbone(imgs)[0].flatten(2).transpose(1, 2), expected)


def test_relative_biases_against_brute_force():
    """Attention of a 3 x 2 grid and a class token, pair by pair."""
    model = randomise(DenseViT(**{**SIZES, "img_size": (12, 8), "depth": 1})).double()
    attn, x = model.blocks[0].attn, torch.randn(1, 7, 12, dtype=torch.float64)
    weights, table = attn.state_dict(), attn.relative_position_bias_table.detach()
    cells = [None, *((row, column) for row in range(3) for column in range(2))]
    offsets = [(down, across) for down in range(-2, 3) for across in range(-1, 2)]  # query less key

    def row_of(query, key):
        if query is None or key is None:
            return len(offsets) + {(True, False): 0, (False, True): 1, (True, True): 2}[query is None, key is None]
        return offsets.index((query[0] - key[0], query[1] - key[1]))

    q, k, v = (x[0] @ w.T for w in weights["qkv.weight"].chunk(3))
    q, v = q + weights["q_bias"], v + weights["v_bias"]
    out = torch.zeros(7, 12, dtype=torch.float64)
    for head in range(3):
        part = slice(4 * head, 4 * head + 4)
        for i, query in enumerate(cells):
            logits = [q[i, part] @ k[j, part] / 2 + table[row_of(query, key), head] for j, key in enumerate(cells)]
            shares = torch.stack(logits).softmax(dim=0)
            out[i, part] = sum(share * v[j, part] for j, share in enumerate(shares))
    expected = out @ weights["proj.weight"].T + weights["proj.bias"]
    torch.testing.assert_close(attn(x)[0], expected)


def test_encoders_of_other_kinds_load(tmp_path):
    """timm's layer scales, SimMIM's relative positions, another grid and other channels."""
    model = DenseViT(**SIZES)
    weights = vit_weights(img_size=24) | {f"blocks.{i}.ls1.gamma": torch.full((12,), i + 2.0) for i in range(4)}
    torch.save(weights, tmp_path / "timm.pth")
    report = load_encoder(model, tmp_path / "timm.pth")
    assert (
        report.resized == ["pos_embed"] and model.blocks[3].gamma_1.eq(5).all() and model.blocks[3].gamma_2.eq(1).all()
    )

    simmim = randomise(RelativeViTEncoder(**SIZES))
    torch.save({"model": simmim.state_dict()}, tmp_path / "simmim.pth")
    model = DenseViT(**SIZES, final_norm=True)
    load_encoder(model, tmp_path / "simmim.pth")
    imgs = torch.randn(2, 3, 16, 16)
    expected = simmim.norm(simmim.encode(simmim.patch_embed(simmim.patchify(imgs))))[:, 1:]
    torch.testing.assert_close(model(imgs)[0].flatten(2).transpose(1, 2), expected, rtol=1e-4, atol=1e-4)

    torch.save(vit_weights(), tmp_path / "rgb.pth")
    grey = DenseViT(**SIZES, in_chans=1)
    load_encoder(grey, tmp_path / "rgb.pth")
    torch.testing.assert_close(grey.patch_embed.proj.weight[:, 0], vit_weights()["patch_embed.proj.weight"].sum(dim=1))


@pytest.mark.parametrize("size", [16, 24])
def test_a_simmim_run_loads_at_any_size(tmp_path, size):
    """Checkpoints of this project name their input size. The position table is 0; shared biases go to all blocks."""
    simmim = randomise(RelativeViTEncoder(**{**SIZES, "img_size": size}))
    weights = {name: value for name, value in simmim.state_dict().items() if "bias_table" not in name}
    shared = torch.randn((2 * (size // 4) - 1) ** 2 + 3, 3)
    weights["rel_pos_bias.relative_position_bias_table"] = shared
    meta = {"settings": {"input_size": size, "patch_size": 4}}
    torch.save({"model": weights, "meta": json.dumps(meta)}, tmp_path / "simmim.pth")
    model = DenseViT(**SIZES, final_norm=True)
    report = load_encoder(model, tmp_path / "simmim.pth")
    assert "pos_embed" not in report.missing and model.pos_embed.shape == (1, 17, 12) and not model.pos_embed.any()
    expected = shared if size == 16 else resize_bias_table(shared, (6, 6), (4, 4), 3)
    assert all(torch.equal(block.attn.relative_position_bias_table, expected) for block in model.blocks)
    torch.testing.assert_close(model.patch_embed.proj.weight, simmim.patch_embed.proj.weight)


def test_an_encoder_of_five_channels_loads(tmp_path):
    torch.save(vit_weights(in_chans=5), tmp_path / "w.pth")
    load_encoder(DenseViT(**SIZES, in_chans=5), tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("changes", "more", "in_chans", "message"),
    [
        (dict(in_chans=5), {}, 1, "of 5 channels, this DenseViT is for 1: only encoders of 3"),
        (dict(in_chans=5), {}, 4, "of 5 channels, this DenseViT is for 4: only encoders of 3"),
        (dict(embed_dim=24), {}, 3, "encoder of width 24, this DenseViT has width 12"),
        ({}, {"reg_token": torch.zeros(1, 4, 12)}, 3, "another kind of encoder: this DenseViT has no reg_token"),
        ({}, {"pos_embed": None}, 3, "missing: pos_embed"),
    ],
)
def test_what_cannot_fit_is_refused(tmp_path, changes, more, in_chans, message):
    weights = {name: value for name, value in (vit_weights(**changes) | more).items() if value is not None}
    torch.save(weights, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=message):
        load_encoder(DenseViT(**SIZES, in_chans=in_chans), tmp_path / "w.pth")


def test_the_linear_model_freezes_its_encoder():
    model = randomise(LinearSegmenter(5, drop_path_rate=0.5, **SIZES)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    imgs = torch.randn(4, 3, 16, 16)
    logits = model(imgs)["decode"]
    features = model.backbone(imgs)[0]
    centred = features - features.mean(dim=(0, 2, 3), keepdim=True)
    normed = centred / (features.var(dim=(0, 2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()
    weights = before["decode_head.conv_seg.weight"][:, :, 0, 0], before["decode_head.conv_seg.bias"]
    expected = F.linear(normed.permute(0, 2, 3, 1), *weights).permute(0, 3, 1, 2)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    logits.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    head = "decode_head."
    names = ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked", "conv_seg.weight", "conv_seg.bias")
    assert changed == {head + name for name in names} and head + "bn.weight" not in before


# ------------------------------------------------------------------------------------------------------------ heads


def slow_conv_module(weights, name, x):
    """Convolution, BatchNorm with running statistics, ReLU."""
    kernel = weights[f"{name}.conv.weight"]
    x = F.conv2d(x, kernel, padding=kernel.shape[-1] // 2)
    scale = weights[f"{name}.bn.weight"] / (weights[f"{name}.bn.running_var"] + 1e-5).sqrt()
    shift = weights[f"{name}.bn.bias"] - weights[f"{name}.bn.running_mean"] * scale
    return (x * scale[:, None, None] + shift[:, None, None]).relu()


def up(x, size):
    return F.interpolate(x, size=size, mode="bilinear")


def test_upernet_against_its_definition():
    model = randomise(UPerNet(5, 6, **SIZES)).double().eval()
    weights = model.state_dict()
    imgs = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    m = model.backbone(imgs)

    def double(x, name):
        return F.conv_transpose2d(x, weights[f"neck.{name}.weight"], weights[f"neck.{name}.bias"], stride=2)

    x = double(m[0], "upsample_4x.0")
    n = {key: weights[f"neck.upsample_4x.1.{key}"] for key in ("running_mean", "running_var", "weight", "bias")}
    x = F.gelu(F.batch_norm(x, n["running_mean"], n["running_var"], n["weight"], n["bias"]))
    c2, c3, c4 = double(x, "upsample_4x.3"), double(m[1], "upsample_2x.0"), m[2]
    c5 = m[3].unflatten(3, (2, 2)).unflatten(2, (2, 2)).amax(dim=(3, 5))
    assert [c.shape[-1] for c in (c2, c3, c4, c5)] == [16, 8, 4, 2]
    head = {name.removeprefix("decode_head."): w for name, w in weights.items() if name.startswith("decode_head.")}
    pooled = [c5]
    for i, side in enumerate((1, 2, 3, 6)):
        pooled.append(up(slow_conv_module(head, f"psp_modules.{i}.1", F.adaptive_avg_pool2d(c5, side)), 2))
    p5 = slow_conv_module(head, "bottleneck", torch.cat(pooled, dim=1))
    p4 = slow_conv_module(head, "lateral_convs.2", c4) + up(p5, 4)
    p3 = slow_conv_module(head, "lateral_convs.1", c3) + up(p4, 8)
    p2 = slow_conv_module(head, "lateral_convs.0", c2) + up(p3, 16)
    outs = [slow_conv_module(head, f"fpn_convs.{i}", p) for i, p in enumerate((p2, p3, p4))]
    out = slow_conv_module(head, "fpn_bottleneck", torch.cat([up(o, 16) for o in (*outs, p5)], dim=1))
    expected = F.conv2d(out, head["conv_seg.weight"], head["conv_seg.bias"])
    found = model(imgs)
    torch.testing.assert_close(found["decode"], expected)
    assert set(found) == {"decode"}  # the auxiliary head is for training
    model.train()
    model.auxiliary_head.eval()
    aux = slow_conv_module(weights, "auxiliary_head.convs.0", c4)
    aux = F.conv2d(aux, weights["auxiliary_head.conv_seg.weight"], weights["auxiliary_head.conv_seg.bias"])
    torch.testing.assert_close(model(imgs)["aux"], aux)


def test_learning_rates_and_weight_decay_by_layer():
    model = UPerNet(5, 6, **SIZES)
    args = main_segmentation.parse_args(["--recipe", "ade20k_upernet_vit_base"])[1]
    names = {id(p): name for name, p in model.named_parameters()}
    groups = main_segmentation.make_optimizer(model, args, lr=1e-4).param_groups
    found = {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        layer = 5  # neck and heads
        if name.startswith("backbone."):
            layer = int(name.split(".")[2]) + 1 if ".blocks." in name else 0
        no_decay = parameter.ndim == 1 or name in ("backbone.cls_token", "backbone.pos_embed")
        assert found.pop(name) == (pytest.approx(0.75 ** (5 - layer)), 0.0 if no_decay else 0.05), name
    assert not found


def _normalise_share(rank):
    torch.manual_seed(0)
    x, norm = torch.randn(4, 3, 2, 5) * 3 + 7, randomise(SyncBatchNorm2d(3)).train()
    share = x[2 * rank : 2 * rank + 2].requires_grad_()
    out = norm(share)
    (out * torch.linspace(-1, 1, 4 * 30).view(4, 3, 2, 5)[2 * rank : 2 * rank + 2]).sum().backward()
    return {"out": out.detach(), "grad": share.grad, **norm.state_dict(), "weight_grad": norm.weight.grad}


def test_batch_norm_in_two_processes_is_that_of_the_whole_batch():
    first, second = run_in_two_processes(_normalise_share)
    torch.manual_seed(0)
    x, norm = torch.randn(4, 3, 2, 5) * 3 + 7, randomise(nn.BatchNorm2d(3)).double().train()
    x = x.double().requires_grad_()
    (norm(x) * torch.linspace(-1, 1, 4 * 30).view(4, 3, 2, 5)).sum().backward()
    for key in ("running_mean", "running_var"):
        torch.testing.assert_close(torch.from_numpy(first[key]), norm.state_dict()[key].float())
        assert (first[key] == second[key]).all()
    assert first["num_batches_tracked"] == 1
    whole = {key: torch.cat([torch.from_numpy(part[key]) for part in (first, second)]) for key in ("out", "grad")}
    norm.eval()
    torch.testing.assert_close(whole["grad"], x.grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(first["weight_grad"] + second["weight_grad"]), norm.weight.grad.float())
    mean, std = x.mean(dim=(0, 2, 3), keepdim=True), (x.var(dim=(0, 2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()
    expected = (x - mean) / std * norm.weight[:, None, None] + norm.bias[:, None, None]
    torch.testing.assert_close(whole["out"], expected.float(), rtol=1e-4, atol=1e-5)


def _train_share(rank, world_size=2):
    """One step of UPerNet on a share of four images. Returns its gradients and its running statistics."""
    model = randomise(UPerNet(3, 6, **SIZES)).train()
    model.decode_head.dropout.p = model.auxiliary_head.dropout.p = 0.0
    torch.manual_seed(0)
    imgs, labels = torch.randn(4, 3, 16, 16), torch.randint(0, 3, (4, 16, 16), dtype=torch.uint8)
    wrapped = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
    share = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    sum(segmentation_losses(wrapped(imgs[share]), labels[share], False).values()).backward()
    grads = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    return {**grads, **{name: value for name, value in model.state_dict().items() if "running" in name}}


def test_upernet_in_two_processes_is_that_of_the_whole_batch():
    first, second = run_in_two_processes(_train_share)
    for name, value in _train_share(0, world_size=1).items():
        assert (first[name] == second[name]).all(), name
        torch.testing.assert_close(torch.from_numpy(first[name]), value, rtol=1e-3, atol=1e-5, msg=name)


# ------------------------------------------------------------------------------------------------ published weights


def published_shapes(qkv_bias, num_layers=12, d=768, num_classes=150):
    """{key: shape} of mmsegmentation's UPerNet on its MAE backbone (qkv_bias) or its BEiT backbone."""
    shapes = {"backbone.cls_token": (1, 1, d)}
    if qkv_bias:
        shapes["backbone.pos_embed"] = (1, 1025, d)
    shapes |= {"backbone.patch_embed.projection.weight": (d, 3, 16, 16), "backbone.patch_embed.projection.bias": (d,)}

    def linear(name, outputs, inputs):
        shapes.update({f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)})

    def norm(name, channels, running=True):
        shapes.update({f"{name}.weight": (channels,), f"{name}.bias": (channels,)})
        if running:
            shapes.update({f"{name}.running_mean": (channels,), f"{name}.running_var": (channels,)})
            shapes[f"{name}.num_batches_tracked"] = ()

    for i in range(num_layers):
        layer = f"backbone.layers.{i}"
        norm(f"{layer}.ln1", d, running=False)
        norm(f"{layer}.ln2", d, running=False)
        shapes[f"{layer}.attn.qkv.weight"] = (3 * d, d)
        bias = {"attn.qkv.bias": (3 * d,)} if qkv_bias else {"attn.q_bias": (d,), "attn.v_bias": (d,)}
        shapes |= {f"{layer}.{key}": shape for key, shape in bias.items()}
        shapes[f"{layer}.attn.relative_position_bias_table"] = (63 * 63 + 3, 12)
        shapes[f"{layer}.attn.relative_position_index"] = (1025, 1025)
        linear(f"{layer}.attn.proj", d, d)
        linear(f"{layer}.ffn.layers.0.0", 4 * d, d)
        linear(f"{layer}.ffn.layers.1", d, 4 * d)
        shapes |= {f"{layer}.gamma_1": (d,), f"{layer}.gamma_2": (d,)}
    for name in ("upsample_4x.0", "upsample_4x.3", "upsample_2x.0"):
        shapes |= {f"neck.{name}.weight": (d, d, 2, 2), f"neck.{name}.bias": (d,)}
    norm("neck.upsample_4x.1", d)

    def conv(name, outputs, inputs, side):
        shapes[f"{name}.conv.weight"] = (outputs, inputs, side, side)
        norm(f"{name}.bn", outputs)

    for i in range(4):
        conv(f"decode_head.psp_modules.{i}.1", d, d, 1)
    conv("decode_head.bottleneck", d, 5 * d, 3)
    for i in range(3):
        conv(f"decode_head.lateral_convs.{i}", d, d, 1)
        conv(f"decode_head.fpn_convs.{i}", d, d, 3)
    conv("decode_head.fpn_bottleneck", d, 4 * d, 3)
    conv("auxiliary_head.convs.0", 256, d, 3)
    for head, channels in (("decode_head", d), ("auxiliary_head", 256)):
        shapes |= {f"{head}.conv_seg.weight": (num_classes, channels, 1, 1), f"{head}.conv_seg.bias": (num_classes,)}
    return shapes


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_the_table_of_published_names_is_complete(qkv_bias):
    with torch.device("meta"):
        model = UPerNet(150, 768, **{**BASE, "img_size": 512})
        weights = {key: torch.empty(shape) for key, shape in published_shapes(qkv_bias).items()}
        load_strict(model, mmsegmentation_names(weights), "the published weights")


def test_a_published_beit_has_no_absolute_positions():
    """The grid of the table of zeros follows from the biases: 5 x 5 patches have 9 x 9 offsets and 3 more rows."""
    weights = {"backbone.layers.0.attn.relative_position_bias_table": torch.ones(84, 3)}
    table = mmsegmentation_names(weights | {"backbone.cls_token": torch.ones(1, 1, 12)})["backbone.pos_embed"]
    assert table.shape == (1, 26, 12) and not table.any()
    given = {"backbone.cls_token": torch.ones(1, 1, 12), "backbone.pos_embed": torch.ones(1, 26, 12)}
    assert mmsegmentation_names(weights | given)["backbone.pos_embed"] is given["backbone.pos_embed"]


def test_queries_and_values_of_a_published_bias_keep_their_places():
    bias = torch.arange(6.0)
    renamed = mmsegmentation_names({"backbone.layers.3.attn.qkv.bias": bias})
    assert {name: value.tolist() for name, value in renamed.items()} == {
        "backbone.blocks.3.attn.q_bias": [0, 1],
        "backbone.blocks.3.attn.v_bias": [4, 5],
    }


@pytest.mark.parametrize("recipe", SEGMENTATION_RECIPES)
def test_recipes_build(recipe):
    args = main_segmentation.parse_args(["--recipe", recipe, "--finetune", "encoder.pth"])[1]
    main_segmentation.check_flags(args, SimpleNamespace(batch_size=args.total_batch_size))
    with torch.device("meta"):
        model = main_segmentation.build_segmenter(vars(args))
    assert model.img_size == (args.input_size,) * 2 and any(p.requires_grad for p in model.parameters())


def test_ade20k_follows_the_protocol():
    s = vars(main_segmentation.parse_args(["--recipe", "ade20k_upernet_vit_base"])[1])
    expected = dict(num_iters=160_000, warmup_iters=1500, total_batch_size=16, lr=1e-4, min_lr=0, clip_grad=None)
    expected |= dict(weight_decay=0.05, layer_decay=0.75, drop_path=0.1, decoder_channels=768, eval_every=16_000)
    expected |= dict(input_size=512, image_scale=(2048, 512), ratio_range=(0.5, 2.0), stride=341, cat_max_ratio=0.75)
    expected |= dict(num_classes=150, reduce_zero_label=True, ignore_index=255, mean_over_valid=False, photometric=True)
    assert {name: s[name] for name in expected} == expected
    mae = vars(main_segmentation.parse_args(["--recipe", "ade20k_upernet_vit_base_mae"])[1])
    assert {key for key in s if s[key] != mae[key]} == {"recipe", "layer_decay"} and mae["layer_decay"] == 0.65
    linear = vars(main_segmentation.parse_args(["--head", "linear"])[1])
    assert (linear["num_iters"], linear["lr"], linear["drop_path"], linear["total_batch_size"]) == (40_000, 1e-3, 0, 16)
