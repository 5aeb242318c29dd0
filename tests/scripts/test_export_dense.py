"""Encoders of dense tasks go back to timm, with the outputs of their blocks."""

import pytest
import timm
import torch
from torch.testing import assert_close

from downstream.segmentation.vit_backbone import DenseViT
from encoders.load import load_encoder
from encoders.trained import load
from models_vit import MICRO
from tests.scripts.exports import CLOSE, detection_run, refused, run, segmentation_run

NOTE = "note: the heads read blocks, and the run has no final norm"


def in_timm(folder):
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


@torch.no_grad()
def test_the_encoder_of_upernet(tmp_path, capsys):
    """Its head reads four blocks, which are three here."""
    segmentation_run(tmp_path / "run", in_chans=5, mean=[0.1] * 5, std=[0.2] * 5)
    lines = run(capsys, tmp_path / "run", tmp_path / "encoder")
    assert lines[2].startswith(NOTE)
    backbone = load(tmp_path / "run").model.backbone
    assert backbone.out_blocks == (0, 1, 1, 3)
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
    lines = run(capsys, tmp_path / "run", tmp_path / "encoder")
    assert not any(line.startswith("note") for line in lines)
    backbone = load(tmp_path / "run").model.backbone
    imgs = torch.randn(2, 3, 16, 16)
    (expected,) = backbone(imgs)
    tokens = in_timm(tmp_path / "encoder").forward_features(imgs)[:, 1:]
    assert_close(tokens, expected.flatten(2).transpose(1, 2), **CLOSE)
    again = DenseViT(final_norm=True, **{**MICRO, "img_size": 16}).eval()
    load_encoder(again, tmp_path / "encoder")
    assert_close(again(imgs)[0], expected, **CLOSE)


@torch.no_grad()
def test_the_encoder_of_a_detector(tmp_path, capsys):
    """Two of its six blocks have windows, which are padded. In float64: rounding is larger in float32."""
    detection_run(tmp_path / "run")
    lines = run(capsys, tmp_path / "run", tmp_path / "encoder")
    assert lines[2].startswith(NOTE)
    backbone = load(tmp_path / "run").model.backbone
    assert [block.window_size for block in backbone.blocks] == [0, 5, 0, 0, 5, 0]
    assert (backbone.map_size, backbone.grid_size) == ((12, 12), (8, 8))
    imgs = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    _, maps = in_timm(tmp_path / "encoder").double().forward_intermediates(imgs, indices=[5])
    expected = backbone.double()(imgs)
    assert expected.std() > 0.1
    assert_close(maps[0], expected, **CLOSE)


@pytest.mark.parametrize(("out", "layout"), [("e.pth", "timm"), ("e", "transformers"), ("e.pth", "mae")])
def test_other_formats_name_what_can_be_done(tmp_path, capsys, out, layout):
    segmentation_run(tmp_path / "run")
    message = refused(capsys, tmp_path / "run", tmp_path / out, "--format", layout)
    assert "scripts/export.py writes it as a folder for timm, and torch.hub's 'encoder' loads it" in message
