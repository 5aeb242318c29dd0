"""Weights of other layouts, key names and sizes are fitted into a model."""

import argparse

import pytest
import timm
import torch

from encoders.load import load_all, load_blocks, load_encoder, read
from encoders.models_relative_vit import relative_vit_micro_patch4
from encoders.trained import load
from frameworks.models_greenmim_pr import greenmim_swin_micro_patch4_window4
from frameworks.models_simmim_pr import simmim_vit_micro_patch4
from models_mae_pr import mae_vit_micro_patch4
from models_vit import VisionTransformer
from util.run.errors import CheckpointError
from util.run.files.checkpoint import save_checkpoint

SIZES = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)


def encoder_weights(**sizes):
    torch.manual_seed(1)
    return VisionTransformer(global_pool="token", **SIZES | sizes).state_dict()


def a_classifier(**options):
    return VisionTransformer(**dict(num_classes=5) | SIZES | options)


def assert_holds(model, weights, names):
    """These weights of the model are those of a file."""
    state = model.state_dict()
    for name in names:
        assert torch.equal(state[name], weights[name]), name


@pytest.mark.parametrize("layout", ["model", "state_dict", "bare", "old"])
def test_load_encoder_accepts_the_usual_layouts(tmp_path, layout):
    """MAE's releases hold `model` and a pickled argparse.Namespace; timm's files are the state dict itself.

    Files of torch 1.5 and older are no archives, which could be mapped into memory.
    """
    weights = encoder_weights()
    del weights["head.weight"], weights["head.bias"]
    weights["decoder_embed.weight"] = torch.zeros(3)
    weights["mask_token"] = torch.zeros(1)
    content = weights
    if layout in ("model", "state_dict"):
        content = {layout: weights, "epoch": 799, "args": argparse.Namespace(lr=0.1)}
    torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=layout != "old")
    model = a_classifier()
    report = load_encoder(model, tmp_path / "w.pth")
    assert set(report.missing) == {"head.weight", "head.bias", "fc_norm.weight", "fc_norm.bias"}
    assert set(report.unexpected) == {"decoder_embed.weight", "mask_token", "norm.weight", "norm.bias"}
    assert_holds(model, weights, report.loaded)


@pytest.mark.parametrize(
    ("source_size", "size", "settings"),
    [
        (64, 32, {}),
        # 4 x 16 and 8 x 8 tokens have tables of the same shape. Only the settings distinguish them.
        ((32, 128), 64, {"input_size": [32, 128], "patch_size": 8}),
    ],
)
def test_load_encoder_resizes_positions(tmp_path, source_size, size, settings):
    source = VisionTransformer(global_pool="token", **SIZES | dict(img_size=source_size))
    path = save_checkpoint(tmp_path, 1, {"model": source.state_dict()}, {"settings": settings})
    model = a_classifier(img_size=size)
    assert load_encoder(model, path).resized == ["pos_embed"]
    assert torch.equal(model.pos_embed[:, 0], source.pos_embed[:, 0])
    grid = source.pos_embed[:, 1:].mT.unflatten(2, source.grid_size)
    resized = torch.nn.functional.interpolate(grid, size=model.grid_size, mode="bicubic")
    torch.testing.assert_close(model.pos_embed[:, 1:], resized.flatten(2).mT)


@pytest.mark.parametrize(
    "sizes",
    [dict(embed_dim=96), dict(depth=1), dict(depth=3), dict(patch_size=4, img_size=16), dict(img_size=(16, 32))],
)
def test_load_encoder_refuses_other_sizes(tmp_path, sizes):
    torch.save(encoder_weights(**sizes), tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="w.pth"):
        load_encoder(a_classifier(), tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("num_classes", "classes", "is_loaded"),
    [(3, None, True), (3, ["a", "b", "c"], True), (3, ["a", "c", "b"], False), (4, None, False)],
)
def test_a_head_of_other_classes_is_left_out(tmp_path, num_classes, classes, is_loaded):
    source = a_classifier(num_classes=3)
    path = save_checkpoint(tmp_path, 1, {"model": source.state_dict()}, {"classes": ["a", "b", "c"]})
    model = a_classifier(num_classes=num_classes)
    report = load_encoder(model, path, classes=classes)
    assert ("head.weight" in report.loaded) == is_loaded
    assert ("head.weight" in report.missing) != is_loaded
    assert any("head" in remark for remark in report.remarks) != is_loaded
    assert torch.equal(model.head.weight, source.head.weight) == is_loaded
    assert torch.equal(model.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight)


def test_weights_of_a_student_are_found(tmp_path):
    """Values that are no tensors are left out."""
    weights = {"w": torch.ones(1), "version": 3}
    torch.save({"student": weights, "epoch": 3}, tmp_path / "w.pth")
    assert read(tmp_path / "w.pth").raw == {"w": torch.ones(1)}


@pytest.mark.parametrize(
    "content",
    [
        {"model": 1},
        {0: torch.ones(1)},
        {"model": {"w": 1}},
    ],
)
def test_contents_without_named_weights_are_refused(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="w.pth"):
        read(tmp_path / "w.pth")


# -------------------------------------------------------------------------------------------------- what must match


def test_all_is_exact(tmp_path):
    torch.save(encoder_weights(), tmp_path / "w.pth")
    model = VisionTransformer(global_pool="token", **SIZES)
    assert not load_all(model, read(tmp_path / "w.pth")).missing
    torch.save(encoder_weights(img_size=64) | {"extra": torch.ones(1)}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="extra.*pos_embed"):
        load_all(model, read(tmp_path / "w.pth"))


def test_blocks_start_another_pre_training(tmp_path):
    """A decoder of another size is left as it is."""
    source = mae_vit_micro_patch4(decoder_depth=2, decoder_embed_dim=32)
    torch.save({"model": source.state_dict()}, tmp_path / "mae.pth")
    model = mae_vit_micro_patch4(decoder_depth=4, decoder_embed_dim=32)
    report = load_blocks(model, tmp_path / "mae.pth")
    assert report.missing
    assert all(key.startswith(("decoder.blocks.2.", "decoder.blocks.3.")) for key in report.missing)
    assert torch.equal(model.decoder.blocks[1].mlp.fc1.weight, source.decoder.blocks[1].mlp.fc1.weight)
    with pytest.raises(CheckpointError, match="blocks.0.gamma_1"):
        load_blocks(simmim_vit_micro_patch4(), tmp_path / "mae.pth")


@pytest.mark.parametrize("make", [mae_vit_micro_patch4, greenmim_swin_micro_patch4_window4])
def test_a_decoder_keeps_its_positions_on_another_grid_of_as_many_tokens(tmp_path, make):
    """They are frozen, so those of a square grid would be wrong for the whole run. A Swin's encoder has none."""
    source = make(img_size=64)
    path = save_checkpoint(tmp_path, 1, {"model": source.state_dict()}, {"settings": {"input_size": 64}})
    model = make(img_size=(32, 128))
    expected = model.decoder.pos_embed.clone()
    assert not torch.equal(expected, source.decoder.pos_embed)
    load_blocks(model, path)
    assert torch.equal(model.decoder.pos_embed, expected)


def test_positions_that_a_model_has_no_place_for_are_refused(tmp_path):
    """Those of a UPerNet on a relative ViT, for example: the classifier knows relative positions alone."""
    weights = relative_vit_micro_patch4(num_classes=3).state_dict()
    torch.save({"model": weights}, tmp_path / "w.pth")
    assert not load_encoder(relative_vit_micro_patch4(num_classes=3), tmp_path / "w.pth").unexpected
    torch.save({"model": weights | {"pos_embed": torch.ones(1, 65, 96)}}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="pos_embed"):
        load_encoder(relative_vit_micro_patch4(num_classes=3), tmp_path / "w.pth")


def test_keys_of_no_encoder_head_or_decoder_are_refused(tmp_path):
    weights = a_classifier().state_dict()
    torch.save(weights | {"mask_token": torch.ones(1), "rope.freqs": torch.ones(2)}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"has no rope\.freqs$"):
        load_encoder(a_classifier(), tmp_path / "w.pth")


# ----------------------------------------------------------------------------------------------------- timm's folders


def test_folders_of_timm_say_their_statistics_and_view(tmp_path):
    """As timm writes them, unlike the folders of scripts/export.py, whose files say them, too."""
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=2)
    theirs.pretrained_cfg |= {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "crop_pct": 0.9}
    timm.models.save_for_hf(theirs, tmp_path / "vit", safe_serialization=True)
    settings = load(tmp_path / "vit", "classification").settings
    assert settings["pixels"] == "uint8"
    assert settings["mean"] == [0.5, 0.4, 0.3]
    assert settings["std"] == [0.2, 0.3, 0.4]
    assert settings["crop_pct"] == 0.9


def test_a_vit_without_positions_is_refused(tmp_path):
    """Transformers 5 begins a ViTMAE with a table of zeros, which is frozen. A sine-cosine table has a row of zeros."""
    weights = encoder_weights()
    weights["pos_embed"].zero_()
    torch.save(weights, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="w.pth"):
        read(tmp_path / "w.pth")
