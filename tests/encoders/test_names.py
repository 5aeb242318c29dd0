"""Weights of other layouts, key names and sizes are fitted into an encoder."""

import argparse

import pytest
import torch
from safetensors.torch import save_file

from encoders.names import (
    LoadReport,
    encoder_names,
    holds_student,
    load_encoder,
    weights_of,
)
from models_vit import VisionTransformer
from util.run.checkpoint import CheckpointError, read_checkpoint, save_checkpoint

SIZES = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)


def encoder_weights(**sizes):
    torch.manual_seed(1)
    return VisionTransformer(global_pool="token", **{**SIZES, **sizes}).state_dict()


@pytest.mark.fault("F41", "files of the releases (MAE's holds a Namespace), timm's", "read; equal tensors")
@pytest.mark.parametrize("layout", ["model", "state_dict", "bare"])
def test_load_encoder_accepts_the_usual_layouts(tmp_path, layout):
    """MAE's releases hold `model` and a pickled argparse.Namespace; timm's files are the state dict itself."""
    weights = {k: v for k, v in encoder_weights().items() if not k.startswith("head.")}
    weights |= {"decoder_embed.weight": torch.zeros(3), "mask_token": torch.zeros(1)}
    content = weights if layout == "bare" else {layout: weights, "epoch": 799, "args": argparse.Namespace(lr=0.1)}
    torch.save(content, tmp_path / "w.pth")
    model = VisionTransformer(num_classes=5, **SIZES)
    report = load_encoder(model, tmp_path / "w.pth")
    assert set(report.missing) == {"head.weight", "head.bias", "fc_norm.weight", "fc_norm.bias"}
    assert set(report.unexpected) == {"decoder_embed.weight", "mask_token", "norm.weight", "norm.bias"}
    assert "4 missing (fc_norm.weight, fc_norm.bias, head.weight, head.bias)" in str(report)
    assert all(torch.equal(model.state_dict()[k], weights[k]) for k in report.loaded)


def test_load_encoder_resizes_positions(tmp_path):
    torch.save(encoder_weights(img_size=64), tmp_path / "w.pth")
    model = VisionTransformer(num_classes=5, **SIZES)
    assert load_encoder(model, tmp_path / "w.pth").resized == ["pos_embed"]
    table = encoder_weights(img_size=64)["pos_embed"]
    assert torch.equal(model.pos_embed[:, 0], table[:, 0])
    grid = table[0, 1:].view(8, 8, 48).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(grid, size=(4, 4), mode="bicubic", align_corners=False)
    torch.testing.assert_close(model.pos_embed[0, 1:], expected[0].permute(1, 2, 0).reshape(16, 48))


def test_load_encoder_resizes_a_grid_that_is_not_square(tmp_path):
    """4 x 16 and 8 x 8 tokens have tables of the same shape. Only the settings distinguish them."""
    weights = encoder_weights(img_size=(32, 128))
    path = save_checkpoint(tmp_path, 1, {"model": weights}, {"settings": {"input_size": [32, 128], "patch_size": 8}})
    model = VisionTransformer(num_classes=5, **{**SIZES, "img_size": 64})
    assert load_encoder(model, path).resized == ["pos_embed"]
    grid = weights["pos_embed"][0, 1:].view(4, 16, 48).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(grid, size=(8, 8), mode="bicubic", align_corners=False)
    torch.testing.assert_close(model.pos_embed[0, 1:], expected[0].permute(1, 2, 0).reshape(64, 48))


def test_load_encoder_refuses_what_does_not_fit(tmp_path):
    torch.save(encoder_weights(embed_dim=96), tmp_path / "wide.pth")
    with pytest.raises(ValueError, match="holds an encoder of width 96, this VisionTransformer has width 48"):
        load_encoder(VisionTransformer(**SIZES), tmp_path / "wide.pth")
    torch.save(encoder_weights(depth=1), tmp_path / "shallow.pth")
    with pytest.raises(ValueError, match="missing: blocks.1.norm1.weight"):
        load_encoder(VisionTransformer(**SIZES), tmp_path / "shallow.pth")
    torch.save(encoder_weights(patch_size=4, img_size=16), tmp_path / "patch4.pth")
    with pytest.raises(ValueError, match=r"patch_embed.proj.weight is \[48, 3, 4, 4\], the model's \[48, 3, 8, 8\]"):
        load_encoder(VisionTransformer(**SIZES), tmp_path / "patch4.pth")
    torch.save(encoder_weights(img_size=(16, 32)), tmp_path / "oblong.pth")
    with pytest.raises(ValueError, match=r"pos_embed \[1, 9, 48\] of '.*oblong.pth' cannot be resized"):
        load_encoder(VisionTransformer(**SIZES), tmp_path / "oblong.pth")


def test_safetensors_files_are_read(tmp_path):
    weights = encoder_weights()
    save_file(weights, tmp_path / "w.safetensors")
    model = VisionTransformer(num_classes=5, **SIZES)
    report = load_encoder(model, tmp_path / "w.safetensors")
    assert len(report.missing) == 4 and all(torch.equal(model.state_dict()[k], weights[k]) for k in report.loaded)
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(ValueError, match="text.safetensors' cannot be read as a checkpoint"):
        read_checkpoint(tmp_path / "text.safetensors")


def test_a_head_of_other_classes_is_left_out(tmp_path):
    source = VisionTransformer(num_classes=3, **SIZES)
    path = save_checkpoint(tmp_path, 1, {"model": source.state_dict()}, {"classes": ["a", "b", "c"]})
    for num_classes, classes, is_loaded in (
        (3, None, True),
        (3, list("abc"), True),
        (3, list("acb"), False),
        (4, None, False),
    ):
        model = VisionTransformer(num_classes=num_classes, **SIZES)
        report = load_encoder(model, path, classes=classes)
        assert ("head.weight" in report.loaded) == is_loaded and ("head.bias" in report.missing) != is_loaded


def test_the_report_names_what_was_resized_and_what_is_missing():
    report = LoadReport(
        ["cls_token", "pos_embed"], ["pos_embed"], [f"head.{k}" for k in range(8)], ["decoder.a", "decoder.b"]
    )
    assert str(report) == (
        "2 loaded; 1 resized (pos_embed); 8 missing (head.0, head.1, head.2, head.3, head.4, head.5, ...); "
        "2 not used (decoder)"
    )
    assert str(LoadReport(["cls_token"], [], [], [])) == "1 loaded; 0 resized; 0 missing; 0 not used"


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"w": 1}},
        {"state_dict": {"w": 1}, "epoch": 3},
        {"student": {"module.backbone.w": 1, "module.head.w": 2}},
        {"w": 1},
    ],
)
def test_weights_are_found_in_every_layout(content):
    assert weights_of(content) == {"w": 1}
    assert holds_student(content) == ("student" in content)


@pytest.mark.parametrize("content", [{"model": 1}, {"state_dict": [1]}, {0: 1}])
def test_contents_without_named_weights_are_refused(content):
    with pytest.raises(CheckpointError, match="holds no weights by their names"):
        weights_of(content)


def test_keys_of_mmpretrain_are_renamed():
    names = {
        "backbone.cls_token": "cls_token",
        "backbone.patch_embed.projection.weight": "patch_embed.proj.weight",
        "backbone.layers.3.ln1.weight": "blocks.3.norm1.weight",
        "backbone.layers.3.ffn.layers.0.0.bias": "blocks.3.mlp.fc1.bias",
        "backbone.layers.3.ffn.layers.1.bias": "blocks.3.mlp.fc2.bias",
        "backbone.ln1.weight": "norm.weight",
        "backbone.ln2.weight": "fc_norm.weight",
        "neck.ln1.bias": "decoder.norm.bias",
        "neck.decoder_embed.weight": "decoder.embed.weight",
        "head.fc.weight": "head.weight",
        "data_preprocessor.mean": None,
    }
    renamed = encoder_names({name: number for number, name in enumerate(names)})
    assert renamed == {name: number for number, name in enumerate(names.values()) if name}


def test_the_last_norm_of_localmim_is_the_final_norm():
    weights = {"norm.0.weight": 0, "norm.2.weight": 2, "norm.10.weight": 10, "blocks.0.norm1.weight": 3}
    assert encoder_names(weights) == {"norm.weight": 10, "blocks.0.norm1.weight": 3}
