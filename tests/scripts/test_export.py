"""Exports for timm, which computes our features and logits from them. Transformers loads the same folders."""

import os
import signal
import subprocess
import sys

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.testing import assert_close

from downstream.probe.models import open_encoder
from downstream.segmentation.vit_backbone import DenseViT
from encoders import classifiers, trained
from encoders.load import load_encoder
from models_vit import MICRO, vit_micro_patch4
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
    detection_run,
    features_by_finetuning,
    finetuned,
    pretrained,
    refused,
    run,
    segmentation_run,
)
from tests.scripts.programs import ROOT

FILES = {"config.json", "model.safetensors", "README.md"}


def in_timm(folder, **options):
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **options).eval()


# -------------------------------------------------------------------------------------------------- folders and files


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (VIT, {}),
        (VIT, {"in_chans": 5, "img_size": (16, 64)}),
        (VIT, {"patch_size": 8, "in_chans": 1}),
        (NORMLESS, {}),
        (RELATIVE, {"img_size": (16, 64), "in_chans": 5}),
        (ABSOLUTE, {"img_size": (64, 32), "in_chans": 1}),
        (SWIN, {"img_size": (64, 96), "in_chans": 5}),
        (SIMMIM_SWIN, {"in_chans": 1}),
    ],
)
@torch.no_grad()
def test_folders_of_encoders(tmp_path, capsys, family, options):
    pretraining, finetuning = family
    path = pretrained(tmp_path / "run", pretraining, **options)
    out = tmp_path / "encoder"
    line = run(capsys, tmp_path / "run", out)[-1]
    assert set(os.listdir(out)) == FILES
    assert sorted(os.listdir(tmp_path)) == ["encoder", "run"]
    imgs = torch.randn(2, options.get("in_chans", 3), *options.get("img_size", (32, 32)))
    others = {name: value for name, value in options.items() if name != "in_chans"}
    expected = features_by_finetuning(path, finetuning, imgs, **others)
    assert expected.std() > 0.1
    theirs = eval(line, {"timm": timm}).eval()
    assert_close(theirs.forward_features(imgs).reshape(expected.shape), expected, **CLOSE)
    for ours in (trained.load(out).model, open_encoder(out).network):
        assert ours.img_size == imgs.shape[2:]
        assert_close(ours.forward_features(imgs), expected, **CLOSE)
    config = timm.data.resolve_model_data_config(theirs)
    assert list(config["input_size"]) == list(imgs.shape[1:])
    assert config["crop_pct"] == 0.875


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (VIT[1], {"global_pool": "avg"}),
        (VIT[1], {"global_pool": "token", "probe": True}),
        (RELATIVE[1], {}),
        (ABSOLUTE[1], {"global_pool": "token"}),
        (SWIN[1], {"in_chans": 5}),
    ],
)
@torch.no_grad()
def test_folders_of_classifiers(tmp_path, capsys, name, options):
    path, ours = finetuned(tmp_path, name, crop_pct=0.95, **options)
    run(capsys, path, tmp_path / "classifier")
    theirs = in_timm(tmp_path / "classifier")
    imgs = torch.randn(3, ours.in_chans, 32, 32)
    assert ours(imgs).std() > 0.05
    assert_close(theirs(imgs), ours(imgs), **CLOSE)
    assert list(theirs.pretrained_cfg["label_names"]) == list("abcde")
    if name != SWIN[1]:
        again = trained.load(tmp_path / "classifier", "classification")
        assert again.settings["crop_pct"] == 0.95
        assert again.weights.info.classes == list("abcde")


@torch.no_grad()
def test_transformers_loads_the_folder(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    imgs = torch.randn(2, 3, 32, 32)
    path = pretrained(tmp_path, VIT[0])
    run(capsys, path, tmp_path / "encoder")
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "encoder").eval()
    assert torch.equal(theirs(imgs).last_hidden_state, in_timm(tmp_path / "encoder").forward_features(imgs))
    path, ours = finetuned(tmp_path, VIT[1])
    run(capsys, path, tmp_path / "classifier")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "classifier").eval()
    assert torch.equal(theirs(imgs).logits, in_timm(tmp_path / "classifier")(imgs))
    assert_close(theirs(imgs).logits, ours(imgs), **CLOSE)
    assert theirs.config.id2label[4] == "e"


@pytest.mark.parametrize("family", [VIT, RELATIVE, ABSOLUTE, SWIN], ids=["vit", "relative", "absolute", "swin"])
@torch.no_grad()
def test_other_uses_in_timm(tmp_path, capsys, family):
    """A new head, maps of features, and another image size."""
    pretraining, finetuning = family
    path = pretrained(tmp_path, pretraining)
    run(capsys, path, tmp_path / "encoder")
    imgs = torch.randn(1, 3, 32, 32)
    expected = features_by_finetuning(path, finetuning, imgs)
    assert in_timm(tmp_path / "encoder", num_classes=7)(imgs).shape == (1, 7)
    last = in_timm(tmp_path / "encoder", features_only=True)(imgs)[-1]
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
    larger = in_timm(tmp_path / "encoder", img_size=64)
    assert larger(torch.randn(1, 3, 64, 64)).isfinite().all()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@torch.no_grad()
def test_single_files(tmp_path, capsys, suffix):
    """4 x 16 tokens have a table of the shape of 8 x 8 tokens. MAE's scripts read "model" of a .pth."""
    path = pretrained(tmp_path, VIT[0], img_size=(16, 64))
    out = tmp_path / f"encoder{suffix}"
    line = run(capsys, tmp_path, out)[-1]
    imgs = torch.randn(2, 3, 16, 64)
    expected = features_by_finetuning(path, VIT[1], imgs, img_size=(16, 64))
    theirs = eval(line, {"timm": timm}).eval()
    assert_close(theirs.forward_features(imgs), expected, **CLOSE)
    assert_close(trained.load(out).model.forward_features(imgs), expected, **CLOSE)
    assert not load_encoder(vit_micro_patch4(global_pool="token", img_size=(16, 64)), out).resized
    assert out.stat().st_mode == path.stat().st_mode  # the same permissions as the checkpoint
    if suffix == ".pth":
        assert list(torch.load(out, weights_only=True)) == ["model", "meta"]


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


# -------------------------------------------------------------------------------------------------------- dense tasks


@torch.no_grad()
def test_the_encoder_of_upernet(tmp_path, capsys):
    """Its head reads four blocks, which are three here."""
    segmentation_run(tmp_path / "run", in_chans=5, mean=[0.1] * 5, std=[0.2] * 5)
    run(capsys, tmp_path / "run", tmp_path / "encoder")
    backbone = trained.load(tmp_path / "run").encoder
    imgs = torch.randn(2, 5, 16, 16)
    theirs = in_timm(tmp_path / "encoder")
    maps = theirs.forward_intermediates(imgs, indices=[0, 1, 3], intermediates_only=True)
    first, second, _, last = backbone(imgs)
    for expected, found in zip((first, second, last), maps, strict=True):
        assert expected.std() > 0.1
        assert_close(found, expected, **CLOSE)
    assert theirs.pretrained_cfg["mean"] == [0.1] * 5


@torch.no_grad()
def test_the_frozen_encoder_of_a_linear_head(tmp_path, capsys):
    """Its final norm is that of the pre-trained encoder. Another run can start from the folder."""
    segmentation_run(tmp_path / "run", "--head", "linear")
    run(capsys, tmp_path / "run", tmp_path / "encoder")
    imgs = torch.randn(2, 3, 16, 16)
    (expected,) = trained.load(tmp_path / "run").encoder(imgs)
    tokens = in_timm(tmp_path / "encoder").forward_features(imgs)[:, 1:]
    assert_close(tokens, expected.flatten(2).transpose(1, 2), **CLOSE)
    again = DenseViT(final_norm=True, **{**MICRO, "img_size": 16}).eval()
    load_encoder(again, tmp_path / "encoder")
    assert_close(again(imgs)[0], expected, **CLOSE)


@torch.no_grad()
def test_the_encoder_of_a_detector(tmp_path, capsys):
    """Two of its six blocks have windows, which are padded. In float64: rounding is larger in float32."""
    detection_run(tmp_path / "run")
    run(capsys, tmp_path / "run", tmp_path / "encoder")
    imgs = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    _, maps = in_timm(tmp_path / "encoder").double().forward_intermediates(imgs, indices=[5])
    expected = trained.load(tmp_path / "run").encoder.double()(imgs)
    assert expected.std() > 0.1
    assert_close(maps[0], expected, **CLOSE)


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("name", "options", "out", "flags", "named"),
    [
        (SIMMIM_SWIN[0], {"img_size": (32, 64)}, "e", (), "differ from ours"),  # timm shifts a row of windows
        (SWIN[0], {}, "e.pth", (), "--out"),
        (VIT[0], {}, "e.v2", (), "--out"),
        (VIT[0], {}, "e.pt2", (), "--out"),
        (VIT[0], {}, "e.pth", ("--format", "torch"), "--out"),
        (VIT[0], {}, "run", (), "--overwrite"),
        (VIT[0], {}, "run/checkpoint-3.pth", ("--overwrite",), "--out"),
    ],
)
def test_what_is_refused(tmp_path, capsys, name, options, out, flags, named):
    pretrained(tmp_path / "run", name, **options)
    assert named in refused(capsys, tmp_path / "run", tmp_path / out, *flags)


@pytest.mark.parametrize(("name", "code"), [(VIT[0], 2), (SWIN[0], 4)])
def test_weights_without_what_their_kind_needs_are_refused(tmp_path, capsys, name, code):
    """Of five channels the statistics, of a Swin the image size."""
    content = torch.load(pretrained(tmp_path, name, in_chans=5), weights_only=True)
    torch.save({"model": content["model"]}, tmp_path / "bare.pth")
    assert "bare.pth" in refused(capsys, tmp_path / "bare.pth", tmp_path / "encoder", code=code)


def test_other_files_in_an_existing_folder_stay(tmp_path, capsys):
    out = tmp_path / "encoder"
    run(capsys, pretrained(tmp_path / "run", VIT[0]), out)
    (out / "notes.txt").write_text("mine")
    run(capsys, pretrained(tmp_path / "other", VIT[0], img_size=64), out, "--overwrite")
    assert in_timm(out).patch_embed.img_size == (64, 64)
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["encoder", "other", "run"]  # no temporary folder is left


@pytest.mark.parametrize("name", ["encoder", "encoder.safetensors"])
def test_what_timm_reads_otherwise_is_not_put_in_place(tmp_path, capsys, monkeypatch, name):
    path = pretrained(tmp_path / "run", VIT[0])
    create_model = timm.create_model

    def damaged(name, **options):
        model = create_model(name, **options)
        model.norm.bias.data += 1e-3
        return model

    monkeypatch.replace_in(export, "timm.create_model", damaged)
    assert "differ from ours by up to 1.0e-03" in refused(capsys, path, tmp_path / name)
    assert os.listdir(tmp_path) == ["run"]


def test_sigterm_leaves_nothing_beside_out(tmp_path):
    pretrained(tmp_path / "run", VIT[0])
    code = """
import os, signal, sys
from scripts import export
def stop(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
export.check_loads = stop
export.main(sys.argv[1:])
"""
    out = tmp_path / "encoder"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "run", "--out", out], cwd=ROOT, capture_output=True)
    assert done.returncode == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == ["run"]
