"""Entry points of torch.hub."""

import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

import hubconf
import models_vit
from encoders.load import load_encoder
from tests.scripts.exports import CLOSE, SWIN, VIT, detection_run, finetuned, pretrained, segmentation_run
from tests.scripts.programs import ROOT

PROGRAM = """
import sys, torch
sys.path.insert(0, "own")
import data, run, train
repo, path = sys.argv[1:]
model = torch.hub.load(repo, "encoder", source="local", path=path)
assert not model.training
assert not {"frameworks", "downstream", "encoders.models_swin", "encoders.rel_pos"} & set(sys.modules)
of_runs = {name for name in sys.modules if name.startswith("util.run.") and not name.startswith("util.run.files")}
assert of_runs == {"util.run.errors"}, of_runs
assert data.OWN and run.OWN and train.OWN
with torch.inference_mode():
    torch.save(model(torch.zeros(2, 3, 32, 32)), "out.pt")
"""


@torch.inference_mode()
def test_an_encoder_in_a_process_that_knows_nothing_of_this_project(tmp_path):
    """It loads only what a ViT needs, and nothing of a run but its files. Modules of that process keep their names."""
    (tmp_path / "own").mkdir()
    for name in ("data", "run", "train"):
        (tmp_path / "own" / f"{name}.py").write_text("OWN = True")
    path = pretrained(tmp_path / "run", VIT[0])
    subprocess.run([sys.executable, "-I", "-c", PROGRAM, ROOT, "run"], cwd=tmp_path, check=True)
    model = models_vit.vit_micro_patch4(global_pool="token").eval()
    load_encoder(model, path)
    assert_close(torch.load(tmp_path / "out.pt"), model.forward_features(torch.zeros(2, 3, 32, 32)), **CLOSE)


@torch.inference_mode()
def test_classifiers_and_factories(tmp_path):
    path, ours = finetuned(tmp_path, SWIN[1])
    imgs = torch.randn(2, 3, 32, 32)
    assert_close(hubconf.classifier(path)(imgs), ours(imgs), **CLOSE)
    model = hubconf.swin_micro_patch4_window4(pretrained=path, num_classes=7)
    assert torch.equal(model.layers[0].blocks[0].norm1.weight, ours.layers[0].blocks[0].norm1.weight)
    assert model.head.out_features == 7


@torch.inference_mode()
def test_models_of_dense_tasks(tmp_path):
    segmenter = segmentation_run(tmp_path / "segmentation")
    imgs = torch.randn(2, 3, 16, 16)
    found = hubconf.segmenter(tmp_path / "segmentation")(imgs)
    assert_close(found["decode"], segmenter(imgs)["decode"])
    tokens = hubconf.encoder(tmp_path / "segmentation")(imgs)[:, 1:]  # class token first
    (*_, last) = segmenter.backbone(imgs)
    assert_close(tokens, last.flatten(2).transpose(1, 2))

    detector = detection_run(tmp_path / "detection")
    imgs = torch.randn(2, 3, 48, 48)
    sizes = [(40, 48), (48, 30)]
    found = hubconf.detector(tmp_path / "detection")(imgs, sizes)
    for objects, expected in zip(found, detector(imgs, sizes), strict=True):
        assert_close(objects, expected)
    encoder = hubconf.encoder(tmp_path / "detection")
    assert_close(encoder(imgs), detector.backbone(imgs).flatten(2).transpose(1, 2))
    with pytest.raises(ValueError, match="48"):
        encoder(torch.randn(2, 3, 24, 96))  # as many tokens


@pytest.mark.parametrize("entry_point", [hubconf.classifier, hubconf.segmenter, hubconf.detector])
def test_entry_points_refuse_models_of_other_tasks(tmp_path, entry_point):
    path = pretrained(tmp_path, VIT[0])
    with pytest.raises(ValueError, match=r"checkpoint-3\.pth"):
        entry_point(path)
