"""Exports to a single file, for timm and for MAE's scripts."""

import argparse
import os
import re
import resource

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close

import models_mae_pr
from downstream.probe.models import open_encoder
from encoders.load import load_encoder
from encoders.trained import load
from models_vit import ViTEncoder, vit_micro_patch4
from tests.scripts.exports import (
    CLOSE,
    VIT,
    features_by_finetuning,
    finetuned,
    pretrained,
    pretrained_run,
    refused,
    run,
    shake,
)
from util.run.files.checkpoint import save_checkpoint

SUFFIXES = (".safetensors", ".pth")
MICRO_IN_TIMM = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 96,
    "depth": 4,
    "num_heads": 3,
}


def weights_in(path):
    """The weights in an exported file."""
    if path.suffix == ".safetensors":
        return load_file(path)
    content = torch.load(path, weights_only=True)
    assert list(content) == ["model", "meta"]  # MAE's scripts read "model"
    return content["model"]


def in_timm(path, **options):
    return timm.create_model("vit_base_patch16_224", checkpoint_path=str(path), **MICRO_IN_TIMM, **options).eval()


# ---------------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_encoder_of_a_run_s_folder(tmp_path, capsys, suffix):
    path = pretrained(tmp_path, VIT[0])
    out = tmp_path / f"encoder{suffix}"
    run(capsys, tmp_path, out)
    imgs = torch.randn(1, 3, 32, 32)
    expected = features_by_finetuning(path, VIT[1], imgs)
    with torch.no_grad():
        assert_close(in_timm(out, num_classes=0).forward_features(imgs), expected, **CLOSE)
    parts = {name.split(".")[0] for name in weights_in(out)}
    assert parts == {"cls_token", "pos_embed", "patch_embed", "blocks", "norm"}
    assert set(os.listdir(tmp_path)) == {"checkpoint-3.pth", "checkpoint-3.json", out.name}  # no temporary file is left
    assert out.stat().st_mode == path.stat().st_mode  # the same permissions as the checkpoint


@pytest.mark.parametrize("options", [{"global_pool": "avg"}, {"global_pool": "token"}])
@torch.no_grad()
def test_classifier(tmp_path, capsys, options):
    path, ours = finetuned(tmp_path, VIT[1], **options)
    out = tmp_path / "classifier.safetensors"
    run(capsys, path, out)
    imgs = torch.randn(3, 3, 32, 32)
    assert ours(imgs).std() > 0.1
    assert_close(in_timm(out, num_classes=5, **options)(imgs), ours(imgs), **CLOSE)
    with safe_open(out, "pt") as file:
        assert file.metadata()["classes"] == '["a", "b", "c", "d", "e"]'


def test_a_release_of_mae_with_a_pickled_namespace(tmp_path, capsys):
    """The number of heads follows from the published sizes. The decoder has MAE's key names."""
    model = shake(models_mae_pr.mae_vit_tiny_patch16(img_size=64))
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("decoder.")}
    weights["mask_token"] = torch.zeros(1, 1, 8)
    weights["decoder_blocks.0.norm1.weight"] = torch.zeros(8)
    torch.save({"model": weights, "args": argparse.Namespace(lr=0.1)}, tmp_path / "mae.pth")
    out = tmp_path / "encoder.safetensors"
    run(capsys, tmp_path / "mae.pth", out)
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=0, checkpoint_path=str(out)).eval()
    imgs = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert_close(theirs.forward_features(imgs), model.forward_features(imgs), **CLOSE)


def test_rounding_is_told_from_a_mistake(tmp_path, capsys, monkeypatch):
    """If float32 rounds by more than the tolerance, float64 is compared. Here the outputs are rounded on purpose."""
    path = pretrained(tmp_path, VIT[0])
    exact = ViTEncoder.forward_features

    def rounded(self, imgs):
        x = exact(self, imgs)
        if x.dtype == torch.float32:
            x = x.bfloat16().float()
        return x

    monkeypatch.setattr(ViTEncoder, "forward_features", rounded)
    lines = run(capsys, path, tmp_path / "encoder.pth")
    assert " in float32, which is rounding: in float64 " in lines[1]
    assert float(lines[1].split()[-1]) < 1e-9


@pytest.mark.parametrize(
    ("model", "options", "arguments"),
    [
        ("mae_vit_mini_patch4", {}, '"vit_tiny_patch16_224", img_size=32, patch_size=4, depth=6, num_classes=0, '),
        (
            "mae_vit_mini_patch4",
            {"img_size": (16, 64)},
            '"vit_tiny_patch16_224", img_size=(16, 64), patch_size=4, depth=6',
        ),
        ("mae_vit_tiny_patch16", {"img_size": 64}, '"vit_tiny_patch16_224", img_size=64, num_classes=0, '),
        (
            "mae_vit_small_patch16",
            {"img_size": 32, "patch_size": 8},
            '"vit_small_patch8_224", img_size=32, num_classes=0, ',
        ),
    ],
)
@torch.no_grad()
def test_the_printed_line_loads_the_file(tmp_path, capsys, monkeypatch, model, options, arguments):
    path = pretrained(tmp_path, model, **options)
    monkeypatch.chdir(tmp_path)
    *_, line = run(capsys, path, 'my "own".safetensors')
    assert line.startswith(f"timm.create_model({arguments}")
    theirs = eval(line, {"timm": timm}).eval()
    ours = load(path).model
    imgs = torch.randn(1, 3, *ours.img_size)
    assert_close(theirs.forward_features(imgs), ours.forward_features(imgs), **CLOSE)


@pytest.fixture
def full_disk():
    """No file can become larger than 300 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def mae_run(tmp_path):
    """The folder of a run of plain MAE, which every format can hold."""
    pretrained_run(tmp_path, "--throw_ratio", "0")
    return tmp_path


@pytest.mark.parametrize(
    ("out", "layout"),
    [
        ("e", "timm"),
        ("e.safetensors", "timm"),
        ("e.pth", "timm"),
        ("e", "transformers"),
        ("e.pth", "mae"),
        ("e.pt2", "torch"),
    ],
)
def test_a_full_disk_may_pass(mae_run, full_disk, capsys, out, layout):
    before = os.listdir(mae_run)
    message = refused(capsys, mae_run, mae_run / out, "--format", layout, code=75)
    assert message == f"export.py: error: {str(mae_run / out)!r}: File too large; start the same command again\n"
    assert os.listdir(mae_run) == before


def test_an_existing_file_is_kept_without_overwrite(tmp_path, capsys):
    path = pretrained(tmp_path, VIT[0])
    out = tmp_path / "encoder.pth"
    out.write_text("older")
    assert "exists; give another name, or --overwrite" in refused(capsys, path, out)
    assert out.read_text() == "older"
    run(capsys, path, out, "--overwrite")
    assert "cls_token" in weights_in(out)
    assert "is the checkpoint itself" in refused(capsys, path, path, "--overwrite")


# ---------------------------------------------------------------------------------------- what our programs read


@pytest.mark.parametrize("suffix", SUFFIXES)
@torch.no_grad()
def test_a_rectangle_keeps_its_grid(tmp_path, capsys, suffix):
    """4 x 16 tokens have a table of the shape of 8 x 8 tokens."""
    path = pretrained(tmp_path, VIT[0], img_size=(16, 64))
    out = tmp_path / f"encoder{suffix}"
    run(capsys, path, out)
    imgs = torch.randn(2, 3, 16, 64)
    expected = features_by_finetuning(path, VIT[1], imgs, img_size=(16, 64))
    for encoder in (load(out).model, open_encoder(out).network):
        assert_close(encoder.forward_features(imgs), expected, **CLOSE)
    assert not load_encoder(vit_micro_patch4(global_pool="token", img_size=(16, 64)), out).resized
    assert load_encoder(vit_micro_patch4(global_pool="token", img_size=32), out).resized == ["pos_embed"]


@pytest.mark.parametrize("name", ["folder", "file.safetensors", "file.pth"])
def test_a_classifier_keeps_its_evaluation_view(tmp_path, capsys, name):
    path, _ = finetuned(tmp_path, VIT[1], img_size=(16, 64), crop_pct=0.95)
    run(capsys, path, tmp_path / name)
    classifier = load(tmp_path / name)
    assert classifier.settings["crop_pct"] == 0.95
    assert classifier.settings["input_size"] == [16, 64]
    assert classifier.weights.info.classes == list("abcde")


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("pos_embed", (1, 3, 96), "positions for 2 tokens, which is no square"),
        ("head.weight", (5, 96), "1 missing: head.bias"),
    ],
)
def test_weights_of_other_models_are_refused(tmp_path, capsys, name, shape, message):
    weights = vit_micro_patch4(global_pool="token").state_dict()
    weights = {key: value for key, value in weights.items() if not key.startswith("head.")}
    weights[name] = torch.zeros(shape)
    torch.save({"model": weights}, tmp_path / "weights.pth")
    assert message in refused(capsys, tmp_path / "weights.pth", tmp_path / "encoder.pth")


def test_a_model_of_another_version_is_refused(tmp_path, capsys):
    """Its weights have the names of a known kind."""
    model = models_mae_pr.mae_vit_micro_patch4()
    path = save_checkpoint(tmp_path, 1, {"model": model.state_dict()}, {"settings": {"model": "mae_vit_micro_patch"}})
    message = refused(capsys, path, tmp_path / "e")
    assert "was made as 'mae_vit_micro_patch', which this code does not know; close to it: mae_vit_micro_pat" in message
    assert "made as mae_vit_micro_patch" in str(load_encoder(vit_micro_patch4(), path))


def test_a_path_without_a_checkpoint_is_refused(tmp_path, capsys):
    assert "no checkpoint at" in refused(capsys, tmp_path / "nowhere.pth", tmp_path / "encoder.pth")


def test_a_missing_final_norm_is_said(tmp_path, capsys):
    """As in TEC's published encoders and in CrossMAE's."""
    weights = vit_micro_patch4(global_pool="token").state_dict()
    weights = {name: value for name, value in weights.items() if not name.startswith(("head.", "norm."))}
    torch.save(weights, tmp_path / "normless.pth")
    lines = run(capsys, tmp_path / "normless.pth", tmp_path / "encoder.pth")
    assert any("holds no final norm: norm starts with weight 1" in line for line in lines)


# ---------------------------------------------------------------------------------------------- MAE's own names

FOR_MAE = ("--format", "mae")


def names_of_mae():
    """The names of the tensors in MAE's releases, with N for the number of a block."""
    layers = ["patch_embed.proj", "norm", "decoder_embed", "decoder_norm", "decoder_pred"]
    for layer in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"):
        layers += [f"blocks.N.{layer}", f"decoder_blocks.N.{layer}"]
    names = {"cls_token", "pos_embed", "mask_token", "decoder_pos_embed"}
    for layer in layers:
        names |= {f"{layer}.weight", f"{layer}.bias"}
    return names


@pytest.mark.parametrize(
    ("flags", "notes"),
    [
        (("--throw_ratio", "0"), []),
        (
            ("--no-progressive",),
            ["note: tokens were thrown in training, so the decoder has seen fewer tokens than MAE"],
        ),
    ],
)
def test_pretrained_weights_under_mae_s_names(tmp_path, capsys, flags, notes):
    """`load_official` reads them as it reads a release."""
    path, model = pretrained_run(tmp_path, *flags)
    lines = run(capsys, path, tmp_path / "mae.pth", *FOR_MAE)
    assert [line[:80] for line in lines[1:]] == [note[:80] for note in notes]
    weights = weights_in(tmp_path / "mae.pth")
    assert {re.sub(r"\.\d+\.", ".N.", name) for name in weights} == names_of_mae()
    other = models_mae_pr.mae_vit_micro_patch4(throw_ratio=0)
    other.load_official({"model": weights})
    for name, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize("options", [{"global_pool": "avg"}, {"global_pool": "token", "probe": True}])
def test_a_classifier_for_mae_is_the_plain_state_dict(tmp_path, capsys, options):
    """A probe keeps its BatchNorm, as in MAE."""
    path, model = finetuned(tmp_path, VIT[1], **options)
    run(capsys, path, tmp_path / "classifier.pth", *FOR_MAE)
    weights = weights_in(tmp_path / "classifier.pth")
    assert list(weights) == list(model.state_dict())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "trained with --throw_ratio 0.5: its decoder reconstructs thrown tokens by an aggregation"),
        (("--aggregation", "avgpool"), "by an aggregation, which MAE's decoder lacks"),  # it has no parameters
        (("--throw_ratio", "0", "--input_size", "32", "64"), "is for images of (32, 64) pixels, and MAE's are square"),
        (("--throw_ratio", "0", "--model", "mff_vit_micro_patch4"), "of another framework than MAE"),
        (("--model", "greenmim_swin_micro_patch4_window4"), "of another framework than MAE"),
    ],
)
def test_what_mae_s_code_could_not_run_is_refused(tmp_path, capsys, flags, message):
    path, _ = pretrained_run(tmp_path, *flags)
    error = refused(capsys, path, tmp_path / "mae.pth", *FOR_MAE)
    assert message in error
    assert "export its encoder with --format timm" in error


def test_other_files_are_refused_for_mae(tmp_path, capsys):
    path, _ = pretrained_run(tmp_path, "--throw_ratio", "0")
    assert "--format mae writes a .pth" in refused(capsys, path, tmp_path / "mae.safetensors", *FOR_MAE)
    run(capsys, path, tmp_path / "encoder.pth")
    error = refused(capsys, tmp_path / "encoder.pth", tmp_path / "again.pth", *FOR_MAE)
    assert "does not hold the settings of its model" in error
