"""Folders in timm's layout load as `local-dir:FOLDER` with the features of our models."""

import inspect
import os

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.layers import resize_rel_pos_bias_table
from torch.nn import functional as F
from torch.testing import assert_close

from downstream.probe.models import open_encoder
from encoders import classifiers, trained
from scripts import export
from scripts.parts import timm_models
from tests.scripts.exports import (
    ABSOLUTE,
    CLOSE,
    NORMLESS,
    RELATIVE,
    SIMMIM_SWIN,
    SWIN,
    VIT,
    features_by_finetuning,
    finetuned,
    pretrained,
    refused,
    run,
)

FILES = {"config.json", "model.safetensors", "README.md"}
# Newer versions of timm read oblong tables of relative positions, and build all models on the meta device.
TIMM_IS_NEW = "old_window_size" in inspect.signature(resize_rel_pos_bias_table).parameters


def load(folder, **options):
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **options).eval()


def timm_features(model, imgs):
    """Features [B, T, D]. timm's Swin keeps the grid."""
    x = model.forward_features(imgs)
    if x.ndim == 4:
        x = x.flatten(1, 2)
    return x


# ------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (VIT, {}),
        (VIT, {"in_chans": 1}),
        (VIT, {"in_chans": 5}),
        (VIT, {"patch_size": 8}),
        (VIT, {"img_size": (16, 64)}),
        (NORMLESS, {}),
        (RELATIVE, {}),
        (RELATIVE, {"patch_size": 8, "in_chans": 5}),
        pytest.param(
            RELATIVE,
            {"img_size": (16, 64)},
            marks=pytest.mark.skipif(not TIMM_IS_NEW, reason="timm reads no oblong tables"),
        ),
        (ABSOLUTE, {}),
        (ABSOLUTE, {"img_size": (64, 32), "in_chans": 1}),
        (SWIN, {}),
        (SWIN, {"img_size": (64, 96), "in_chans": 5}),
        (SIMMIM_SWIN, {"in_chans": 1}),
    ],
)
@torch.no_grad()
def test_encoders(tmp_path, capsys, family, options):
    pretraining, finetuning = family
    path = pretrained(tmp_path / "run", pretraining, **options)
    out = tmp_path / "encoder"
    line = run(capsys, tmp_path / "run", out)[-1]
    assert line == f'timm.create_model("local-dir:{out}", pretrained=True)'
    assert set(os.listdir(out)) == FILES
    assert sorted(os.listdir(tmp_path)) == ["encoder", "run"]
    imgs = torch.randn(2, options.get("in_chans", 3), *options.get("img_size", (32, 32)))
    others = {name: value for name, value in options.items() if name != "in_chans"}
    expected = features_by_finetuning(path, finetuning, imgs, **others)
    assert expected.std() > 0.1
    theirs = eval(line, {"timm": timm}).eval()
    assert_close(timm_features(theirs, imgs), expected, **CLOSE)
    for ours in (trained.load(out).model, open_encoder(out).network):
        assert ours.img_size == imgs.shape[2:]
        assert_close(ours.forward_features(imgs), expected, **CLOSE)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (VIT[1], {"global_pool": "avg"}),
        (VIT[1], {"global_pool": "token", "in_chans": 5}),
        (VIT[1], {"global_pool": "token", "probe": True}),
        (RELATIVE[1], {}),
        (ABSOLUTE[1], {"global_pool": "avg"}),
        (ABSOLUTE[1], {"global_pool": "token"}),
        (SWIN[1], {"in_chans": 5}),
    ],
)
@torch.no_grad()
def test_classifiers(tmp_path, capsys, name, options):
    path, ours = finetuned(tmp_path, name, **options)
    run(capsys, path, tmp_path / "classifier")
    theirs = load(tmp_path / "classifier")
    imgs = torch.randn(3, ours.in_chans, 32, 32)
    assert ours(imgs).std() > 0.05
    assert_close(theirs(imgs), ours(imgs), **CLOSE)
    assert list(theirs.pretrained_cfg["label_names"]) == list("abcde")


@pytest.mark.parametrize(
    "family",
    [
        VIT,
        RELATIVE,
        ABSOLUTE,
        SWIN,
    ],
    ids=["vit", "relative", "absolute", "swin"],
)
@torch.no_grad()
def test_other_uses_in_timm(tmp_path, capsys, family):
    """A new head, maps of features, and another image size."""
    pretraining, finetuning = family
    path = pretrained(tmp_path, pretraining)
    run(capsys, path, tmp_path / "encoder")
    imgs = torch.randn(1, 3, 32, 32)
    expected = features_by_finetuning(path, finetuning, imgs)
    assert load(tmp_path / "encoder", num_classes=7)(imgs).shape == (1, 7)
    last = load(tmp_path / "encoder", features_only=True)(imgs)[-1]
    weights = load_file(tmp_path / "encoder" / "model.safetensors")
    if family is SWIN:
        tokens = last.flatten(1, 2)
        eps = 1e-5
    else:
        tokens = last.flatten(2).transpose(1, 2)
        eps = 1e-6
        expected = expected[:, 1:]
    normed = F.layer_norm(tokens, tokens.shape[-1:], weights["norm.weight"], weights["norm.bias"], eps)
    assert_close(normed, expected, **CLOSE)
    larger = load(tmp_path / "encoder", img_size=64)
    assert larger(torch.randn(1, 3, 64, 64)).isfinite().all()
    assert torch.equal(larger.state_dict()["patch_embed.proj.weight"], weights["patch_embed.proj.weight"])


def test_timm_knows_the_images_of_the_model(tmp_path, capsys):
    path = pretrained(tmp_path, VIT[0], in_chans=5, img_size=(16, 64))
    run(capsys, path, tmp_path / "encoder")
    config = timm.data.resolve_model_data_config(load(tmp_path / "encoder"))
    assert list(config["input_size"]) == [5, 16, 64]
    assert config["interpolation"] == "bicubic"
    assert config["crop_pct"] == 0.875
    assert list(config["mean"]) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert list(config["std"]) == [0.3] * 5


@pytest.mark.parametrize(
    ("name", "architecture", "sizes"),
    [
        ("vit_tiny_patch16", "vit_tiny_patch16_224", {}),
        ("vit_small_patch16", "vit_small_patch16_224", {}),
        ("vit_base_patch16", "vit_base_patch16_224", {}),
        ("vit_large_patch16", "vit_large_patch16_224", {}),
        ("vit_huge_patch14", "vit_huge_patch14_224", {}),
        ("swin_base_patch4_window7", "swin_base_patch4_window7_224", {}),
        ("swin_large_patch4_window14", "swin_large_patch4_window7_224", {"window_size": 14}),
        ("relative_vit_base_patch16", "beit_base_patch16_224", {}),
    ],
)
def test_published_sizes_have_timm_s_names(name, architecture, sizes):
    with torch.device("meta"):
        model = classifiers.MODELS[name](num_classes=7)
        arguments = timm_models.timm_arguments(model)
        assert arguments == (architecture, {**sizes, "global_pool": "avg", "num_classes": 7})
        if not TIMM_IS_NEW and not name.startswith("vit"):
            return
        theirs = timm.create_model(architecture, **arguments[1])
    shapes = sorted(tuple(value.shape) for value in theirs.state_dict().values())
    assert shapes == sorted(tuple(value.shape) for value in model.state_dict().values())


# ------------------------------------------------------------------------------------------------------ what is refused


def test_windows_that_timm_cuts_otherwise(tmp_path, capsys):
    path = pretrained(tmp_path, SIMMIM_SWIN[0], img_size=(32, 64))
    assert "(timm shifts the windows of a stage" in refused(capsys, path, tmp_path / "encoder")


def test_weights_whose_statistics_are_unknown(tmp_path, capsys):
    content = torch.load(pretrained(tmp_path, VIT[0], in_chans=5), weights_only=True)
    torch.save({"model": content["model"]}, tmp_path / "bare.pth")
    error = refused(capsys, tmp_path / "bare.pth", tmp_path / "encoder")
    assert "does not hold the pixel mean and deviation of its 5 channels" in error


def test_a_swin_whose_image_size_is_unknown(tmp_path, capsys):
    content = torch.load(pretrained(tmp_path, SWIN[0]), weights_only=True)
    torch.save({"model": content["model"]}, tmp_path / "bare.pth")
    error = refused(capsys, tmp_path / "bare.pth", tmp_path / "encoder")
    assert "a Swin Transformer without the settings of a run: its image size and the order" in error


def test_an_existing_folder(tmp_path, capsys):
    """Other files in it stay."""
    path = pretrained(tmp_path / "run", VIT[0])
    out = tmp_path / "encoder"
    run(capsys, path, out)
    (out / "notes.txt").write_text("mine")
    assert "exists; give another name, or --overwrite" in refused(capsys, path, out)
    run(capsys, pretrained(tmp_path / "other", VIT[0], img_size=64), out, "--overwrite")
    assert load(out).patch_embed.img_size == (64, 64)
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["encoder", "other", "run"]  # no temporary folder is left


def damage_values(model):
    model.norm.bias.data += 1e-3


def damage_keys(model):
    raise RuntimeError("Missing key(s) in state_dict: cls_token")  # as a strict load does


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_values, "differ from ours by up to 1.0e-03"),
        (damage_keys, "does not load the weights"),
    ],
)
@pytest.mark.parametrize("name", ["encoder", "encoder.safetensors"])
def test_what_timm_reads_otherwise_is_not_put_in_place(tmp_path, capsys, monkeypatch, name, damage, message):
    path = pretrained(tmp_path / "run", VIT[0])
    out = tmp_path / name
    run(capsys, path, out)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    create_model = timm.create_model

    def damaged(name, **options):
        model = create_model(name, **options)
        if name.startswith("local-dir:") or "checkpoint_path" in options:
            damage(model)
        return model

    monkeypatch.replace_in(export, "timm.create_model", damaged)
    assert message in refused(capsys, path, out, "--overwrite")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_names_of_folders(tmp_path, capsys):
    """Folders above it are made."""
    path = pretrained(tmp_path / "run", VIT[0])
    run(capsys, path, tmp_path / "a" / "b")
    assert set(os.listdir(tmp_path / "a" / "b")) == FILES
    (tmp_path / "file").write_text("mine")
    assert "a file has a suffix, and a folder has none" in refused(capsys, path, tmp_path / "file", "--overwrite")
    assert "or have no suffix for a folder" in refused(capsys, path, tmp_path / "prmim.v2")


# ------------------------------------------------------------------------------------------------------------- the card


def test_the_card_says_what_the_weights_are(tmp_path, capsys):
    """Without paths of this machine."""
    path, _ = finetuned(tmp_path, VIT[1], global_pool="avg")
    run(capsys, path, tmp_path / "classifier")
    card = (tmp_path / "classifier" / "README.md").read_text()
    assert huggingface_hub.ModelCard(card).data.to_dict()["library_name"] == "timm"
    assert 'timm.create_model("local-dir:classifier", pretrained=True).eval()' in card
    assert "images of 3 channels and 32 x 32 pixels" in card
    assert "`checkpoint-best.pth`, SHA-256" in card
    assert '"model": "vit_micro_patch4"' in card
    assert str(tmp_path) not in card
