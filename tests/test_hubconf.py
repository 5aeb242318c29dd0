"""torch.hub loads the models from another folder, in a process that knows nothing of this project."""

import pytest
import torch
from torch.testing import assert_close

import models_vit
from encoders import models_swin
from encoders.load import load_encoder
from frameworks import registry
from tests.scripts.exports import detection_run, segmentation_run
from tests.scripts.programs import ROOT, run_file
from util.run.files.checkpoint import save_checkpoint

PROGRAM = """
import sys, torch
repo, kind, out, *arguments = sys.argv[1:]
options = dict(argument.split("=") for argument in arguments)
model = torch.hub.load(repo, kind, source="local", **options)
assert not (kind in ("encoder", "classifier", "segmenter", "detector") and model.training)
imgs = torch.load("imgs.pt")
if "dense" in options.get("path", ""):
    imgs = torch.zeros(2, 3, *model.img_size)
inputs = [imgs]
if kind == "detector":
    inputs.append([(40, 48), (48, 30)])  # the size of each image
with torch.inference_mode():
    torch.save(model.eval()(*inputs), out)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a program, images, a run of MAE, one of GreenMIM, and a classifier."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "program.py").write_text(PROGRAM)
    torch.save(torch.randn(2, 3, 32, 32), folder / "imgs.pt")
    for name, model in (
        ("mae", "mae_vit_micro_patch4"),
        ("simmim", "simmim_vit_micro_patch4"),
        ("green", "greenmim_swin_micro_patch4_window4"),
    ):
        (folder / name).mkdir()
        meta = {"settings": {"model": model, "input_size": [32, 32], "patch_size": 4}}
        save_checkpoint(folder / name, 1, {"model": registry.MODELS[model]().state_dict()}, meta)
    (folder / "tuned").mkdir()
    model = models_vit.vit_micro_patch4(num_classes=5)
    torch.nn.init.normal_(model.head.weight)
    save_checkpoint(folder / "tuned", 1, {"model": model.state_dict()}, {"settings": {"input_size": 32}})
    return folder


def by_hub(place, kind, **options):
    """Returns the finished process."""
    arguments = [f"{name}={value}" for name, value in options.items()]
    (place / "out.pt").unlink(missing_ok=True)
    return run_file(str(place / "program.py"), ROOT, kind, place / "out.pt", *arguments, cwd=place)


@torch.inference_mode()
def test_an_encoder_of_a_run(place):
    done = by_hub(place, "encoder", path=place / "mae")
    assert done.stderr == ""
    model = models_vit.vit_micro_patch4(global_pool="token").eval()
    load_encoder(model, place / "mae")
    imgs = torch.load(place / "imgs.pt")
    assert torch.equal(torch.load(place / "out.pt"), model.forward_features(imgs))


@torch.inference_mode()
def test_an_encoder_of_a_file(place):
    by_hub(place, "encoder", path="green/checkpoint-1.pth")
    model = models_swin.swin_micro_patch4_window4().eval()
    load_encoder(model, place / "green")
    imgs = torch.load(place / "imgs.pt")
    assert torch.equal(torch.load(place / "out.pt"), model.forward_features(imgs))


@torch.inference_mode()
def test_a_classifier(place):
    by_hub(place, "classifier", path="tuned")
    model = models_vit.vit_micro_patch4(num_classes=5).eval()
    model.load_state_dict(torch.load(place / "tuned" / "checkpoint-1.pth")["model"])
    imgs = torch.load(place / "imgs.pt")
    assert torch.equal(torch.load(place / "out.pt"), model(imgs))


@pytest.fixture(scope="module")
def dense(place):
    """(a segmentation model, a detector), whose checkpoints lie in dense/."""
    (place / "dense").mkdir()
    return segmentation_run(place / "dense" / "segmentation"), detection_run(place / "dense" / "detection")


@torch.inference_mode()
def test_a_segmentation_model(place, dense):
    model, _ = dense
    by_hub(place, "segmenter", path="dense/segmentation")
    assert_close(torch.load(place / "out.pt"), model(torch.zeros(2, 3, 16, 16)))


@torch.inference_mode()
def test_a_detector(place, dense):
    _, model = dense
    by_hub(place, "detector", path="dense/detection")
    expected = model(torch.zeros(2, 3, 48, 48), [(40, 48), (48, 30)])
    for found, ours in zip(torch.load(place / "out.pt"), expected, strict=True):
        assert set(found) == {"boxes", "labels", "scores", "masks"}
        assert_close(found, ours)


@torch.inference_mode()
def test_encoders_of_dense_tasks(place, dense):
    segmenter, detector = dense
    by_hub(place, "encoder", path="dense/segmentation")
    tokens = torch.load(place / "out.pt")[:, 1:]  # class token first
    (*_, last) = segmenter.backbone(torch.zeros(2, 3, 16, 16))
    assert_close(tokens, last.flatten(2).transpose(1, 2))
    by_hub(place, "encoder", path="dense/detection")
    tokens = torch.load(place / "out.pt")
    last = detector.backbone(torch.zeros(2, 3, 48, 48))
    assert_close(tokens, last.flatten(2).transpose(1, 2))


def test_factories(place):
    done = by_hub(place, "relative_vit_micro_patch4", pretrained="simmim")
    assert "4 missing (fc_norm.weight, fc_norm.bias, head.weight, head.bias)" in done.stdout
    assert torch.load(place / "out.pt").shape == (2, 1000)


@pytest.mark.parametrize(
    ("kind", "path"), [("encoder", "tuned"), ("classifier", "mae"), ("segmenter", "mae"), ("detector", "tuned")]
)
def test_entry_points_refuse_models_of_other_tasks(place, kind, path):
    assert f"ValueError: '{path}' holds" in by_hub(place, kind, path=path).stderr
