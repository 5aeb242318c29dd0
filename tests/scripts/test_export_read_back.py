"""Exported files hold what this project's programs need to read them as their runs."""

import pytest
import torch

from encoders import classifiers
from encoders.load import load_encoder
from models_vit import vit_micro_patch4
from tests.scripts.test_export import run
from tests.scripts.test_export_folder import VIT, check_read_back, features_by_finetuning, finetuned, pretrained


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_rectangle_keeps_its_grid_in_a_single_file(tmp_path, capsys, suffix):
    """4 x 16 tokens have a table of the shape of 8 x 8 tokens."""
    options = {"img_size": (16, 64)}
    path, out = pretrained(tmp_path, VIT[0], **options), tmp_path / f"encoder{suffix}"
    run(capsys, path, out)
    imgs = torch.randn(2, 3, 16, 64)
    check_read_back(out, imgs, features_by_finetuning(path, VIT[1], imgs, options))
    model = vit_micro_patch4(global_pool="token", **options)
    assert not load_encoder(model, out).resized
    assert torch.equal(model.pos_embed, torch.load(path, weights_only=True)["model"]["pos_embed"])
    square = vit_micro_patch4(global_pool="token", img_size=32)
    assert load_encoder(square, out).resized == ["pos_embed"]


@pytest.mark.parametrize("out", ["folder", "file.safetensors", "file.pth"])
def test_a_classifier_keeps_its_evaluation_view(tmp_path, capsys, out):
    path, _ = finetuned(tmp_path, VIT[1], img_size=(16, 64), crop_pct=0.95)
    run(capsys, path, tmp_path / out)
    found = classifiers.load_classifier(tmp_path / out)
    assert found.settings["crop_pct"] == 0.95 and found.settings["input_size"] == [16, 64]
    assert found.info.classes == list("abcde")
