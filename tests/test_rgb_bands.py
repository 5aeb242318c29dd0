"""Weights for RGB on images of other bands: --rgb_bands says which ones hold red, green and blue."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import hubconf
from encoders.load import build, read
from encoders.trained import load
from models_mae_pr import mae_vit_micro_patch4
from scripts.export import export
from tests import runs
from tests.encoders.test_dino import network_of, weights_of_meta
from tests.runs import assert_same_state, losses, state
from tests.scripts.test_predict import files_in, run
from tests.test_many_channels import FREEZE
from tests.util.data.test_pixel_format import pixels
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD

pretrain = runs.pretrain.also("--batch_size 4")
finetune = runs.finetune.also("--batch_size 4 --global_pool token")
BANDS = {1: [0, 0, 0], 4: [2, 1, 0], 5: [3, 1, 1], 13: [3, 2, 1]}


@pytest.fixture(scope="module")
def rgb_files(tmp_path_factory):
    """{kind: a file of an encoder of RGB, patches of 4 pixels}."""
    folder = tmp_path_factory.mktemp("rgb")
    paths = {}
    for kind in ("dinov2", "dinov3_qkvb"):
        paths[kind] = folder / f"{kind}.pth"
        torch.save(weights_of_meta(kind, network_of(kind, patch_size=4)), paths[kind])
    paths["mae"] = folder / "mae.pth"
    torch.save({"model": mae_vit_micro_patch4().state_dict()}, paths["mae"])
    return paths


def write_images(root, channels):
    """Writes 8 training images of 8 bits of two classes, and 4 to evaluate on."""
    seed = 0
    for split, count in (("train", 4), ("val", 2)):
        for name in ("a", "b"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                seed += 1
                np.save(folder / f"{i}.npy", pixels(channels, "uint8", (36, 40), seed))
    return root


def normalized(imgs, mean, std):
    mean = torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1)
    std = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
    return (imgs - mean) / std


@torch.no_grad()
def assert_features_of_rgb(folder, file, bands):
    """The encoder of a run computes on its images what the encoder of RGB computes on red, green and blue alone."""
    trained = load(folder)
    imgs = torch.rand(2, trained.model.in_chans, 32, 32, dtype=torch.float64)
    theirs, _ = build(read(file), img_size=32)
    expected = theirs.double().forward_features(normalized(imgs[:, bands], IMAGENET_MEAN, IMAGENET_STD))
    settings = trained.settings
    found = trained.model.double().forward_features(normalized(imgs, settings["mean"], settings["std"]))
    exact = 1e-12 if len(set(bands)) == 3 else 1e-5  # kernels that add up are rounded to float32
    assert_close(found, expected, rtol=exact, atol=exact)


@pytest.mark.parametrize(
    ("kind", "channels", "layout"),
    [("dinov2", 1, "timm"), ("mae", 4, "timm"), ("dinov3_qkvb", 5, "timm"), ("dinov2", 13, "torch")],
)
def test_from_rgb_to_predictions(kind, channels, layout, rgb_files, tmp_path):
    """It begins as the model of RGB, and the kernels of all bands train, although blocks are frozen."""
    data = write_images(tmp_path / "data", channels)
    file = rgb_files[kind]
    flags = ["--in_chans", channels, "--pretrained", file]
    if channels > 1:
        flags += ["--rgb_bands", *BANDS[channels]]
    pretrain(data, tmp_path / "begun", *flags, *FREEZE)
    assert_features_of_rgb(tmp_path / "begun", file, BANDS[channels])

    flags += ["--trainable_blocks", 1, "--lr", 1e-2]
    content = pretrain(data, tmp_path / "whole", *flags)
    pretrain(data, tmp_path / "parts", *flags, "--max_steps", 2)
    pretrain(data, tmp_path / "parts", *flags)
    assert_same_state(state(tmp_path / "parts"), content)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    begun = state(tmp_path / "begun")["model"]
    changed = content["model"]["patch_embed.proj.weight"] - begun["patch_embed.proj.weight"]
    assert (changed.abs().amax(dim=(0, 2, 3)) > 1e-4).all()
    assert torch.equal(content["model"]["blocks.2.mlp.fc1.weight"], begun["blocks.2.mlp.fc1.weight"])

    tuning = ["--in_chans", channels, "--finetune", tmp_path / "whole", "--trainable_blocks", 1]
    tuned = finetune(data, tmp_path / "tuned", *tuning)["model"]  # the weights are for these bands already
    assert torch.equal(tuned["patch_embed.proj.weight"], content["model"]["patch_embed.proj.weight"])
    suffix = ".pt2" if layout == "torch" else ""
    export(tmp_path / "tuned", tmp_path / f"exported{suffix}", layout=layout)  # compares the logits
    assert run(tmp_path / "tuned", data / "val", tmp_path / "predicted") == 0
    assert "predictions.csv" in files_in(tmp_path / "predicted")


def test_fine_tuning_starts_from_rgb_too(rgb_files, tmp_path):
    """The bands train with the last blocks, also after a stop. A linear probe trains its head alone."""
    data = write_images(tmp_path / "data", 4)
    flags = ["--in_chans", 4, "--finetune", rgb_files["dinov2"], "--rgb_bands", 2, 1, 0]
    finetune(data, tmp_path / "begun", *flags, *FREEZE)
    begun = state(tmp_path / "begun")["model"]["patch_embed.proj.weight"]
    for blocks, trains in ((1, True), (0, False)):
        flags += ["--trainable_blocks", blocks]
        content = finetune(data, tmp_path / f"whole{blocks}", *flags)
        finetune(data, tmp_path / f"parts{blocks}", *flags, "--max_steps", 2)
        finetune(data, tmp_path / f"parts{blocks}", *flags)
        assert_same_state(state(tmp_path / f"parts{blocks}"), content)
        assert torch.equal(content["model"]["patch_embed.proj.weight"], begun) != trains
    model = hubconf.vit_micro_patch4(pretrained=rgb_files["dinov2"], rgb_bands=[2, 1, 0], in_chans=4)
    assert torch.equal(model.patch_embed.proj.weight, begun)


def test_bands_are_asked_for_and_refused_without_use(rgb_files, tmp_path, capsys):
    data = write_images(tmp_path / "data", 4)
    out = tmp_path / "out"
    of_rgb = ["--in_chans", 4, "--pretrained", rgb_files["mae"]]
    assert "--rgb_bands" in pretrain.refused(capsys, data, out, *of_rgb)
    assert "--rgb_bands 0 1 4" in pretrain.refused(capsys, data, out, *of_rgb, "--rgb_bands", 0, 1, 4)
    assert "--rgb_bands" in pretrain.refused(capsys, data, out, *of_rgb, "--rgb_bands", 0, -1, 2)
    bands = ["--rgb_bands", 0, 1, 2]
    assert "--rgb_bands 0 1 2" in pretrain.refused(capsys, data, out, "--in_chans", 4, *bands)
    assert "--rgb_bands 0 1 2" in pretrain.refused(capsys, data, out, "--pretrained", rgb_files["mae"], *bands)
    tuning = ["--in_chans", 4, "--finetune", rgb_files["mae"]]
    assert "--rgb_bands" in finetune.refused(capsys, data, out, *tuning)
    pretrain(data, tmp_path / "run", *of_rgb, *bands, "--max_steps", 1)
    assert "--rgb_bands was [0, 1, 2]" in pretrain.refused(
        capsys, data, tmp_path / "run", *of_rgb, "--rgb_bands", 2, 1, 0
    )
    of_four = ["--in_chans", 4, "--finetune", tmp_path / "run", *bands]
    assert "--rgb_bands 0 1 2" in finetune.refused(capsys, data, out, *of_four)
