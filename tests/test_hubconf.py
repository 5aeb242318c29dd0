"""torch.hub loads the models from another folder, in a process that knows nothing of this project."""

import pytest
import torch

import models_vit
from encoders import models_swin
from encoders.load import load_encoder
from frameworks import registry
from tests.scripts.programs import ROOT, run_file
from util.run.checkpoint import save_checkpoint

PROGRAM = """
import sys, torch
repo, kind, out, *arguments = sys.argv[1:]
options = dict(argument.split("=") for argument in arguments)
model = torch.hub.load(repo, kind, source="local", **options)
assert not (kind in ("encoder", "classifier") and model.training)
with torch.inference_mode():
    torch.save(model.eval()(torch.load("imgs.pt")), out)
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
    arguments = [f"{name}={value}" for name, value in options.items()]
    done = run_file(str(place / "program.py"), ROOT, kind, place / "out.pt", *arguments, cwd=place)
    return done, torch.load(place / "out.pt") if done.returncode == 0 else None


@torch.inference_mode()
def test_encoders_and_classifiers(place):
    imgs = torch.load(place / "imgs.pt")
    vit = models_vit.vit_micro_patch4(global_pool="token").eval()
    load_encoder(vit, place / "mae")
    done, features = by_hub(place, "encoder", path=place / "mae")
    assert done.stderr == "" and torch.equal(features, vit.forward_features(imgs))
    swin = models_swin.swin_micro_patch4_window4().eval()
    load_encoder(swin, place / "green")
    assert torch.equal(by_hub(place, "encoder", path="green/checkpoint-1.pth")[1], swin.forward_features(imgs))
    classifier = models_vit.vit_micro_patch4(num_classes=5).eval()
    classifier.load_state_dict(torch.load(place / "tuned" / "checkpoint-1.pth")["model"])
    assert torch.equal(by_hub(place, "classifier", path="tuned")[1], classifier(imgs))


def test_factories(place):
    done, logits = by_hub(place, "relative_vit_micro_patch4", pretrained="simmim")
    assert logits.shape == (2, 1000) and "2 missing (head.weight, head.bias)" not in done.stdout
    assert "4 missing (fc_norm.weight, fc_norm.bias, head.weight, head.bias)" in done.stdout
    assert by_hub(place, "swin_micro_patch4_window4")[1].shape == (2, 1000)


def test_wrong_entry_points_are_named(place):
    error = by_hub(place, "encoder", path="tuned")[0].stderr
    assert "'tuned' holds a classifier: load it with the entry point 'classifier'" in error
    error = by_hub(place, "classifier", path="mae")[0].stderr
    assert "'mae' holds an encoder without a head: load it with the entry point 'encoder'" in error
