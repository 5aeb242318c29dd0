"""Programs of torch.export: they run without this project, on pixels as files hold them."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from downstream.segmentation.engine_segmentation import slide_logits
from encoders import trained
from tests.scripts.exports import (
    CLOSE,
    RELATIVE,
    SWIN,
    VIT,
    detection_run,
    finetuned,
    pretrained,
    run,
    segmentation_run,
)
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD

FOR_TORCH = ("--format", "torch")
ALONE = """
import sys, torch
program = torch.export.load(sys.argv[1]).module()
assert not {"models_vit", "encoders", "util", "timm"} & set(sys.modules)
torch.save([program(imgs) for imgs in torch.load("imgs.pt")], "outputs.pt")
"""
HOLES = {"mean": [0.1 + 0.02 * i for i in range(13)], "std": [0.2 + 0.01 * i for i in range(13)], "in_chans": 13}


def load(path):
    """Returns (the program, the facts in the file)."""
    extra = {"facts.json": ""}
    program = torch.export.load(path, extra_files=extra).module()
    return program, json.loads(extra["facts.json"])


def photos(count, size=32):
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)


def normalised(imgs, mean=IMAGENET_MEAN, std=IMAGENET_STD, full_range=255, nodata=None):
    """By hand, channel by channel, in float64."""
    arrays = imgs.numpy().astype(np.float64)
    out = np.zeros(arrays.shape)
    for c in range(arrays.shape[1]):
        values = (arrays[:, c] / full_range - mean[c]) / std[c]
        invalid = np.isnan(arrays[:, c])
        if nodata is not None:
            invalid |= arrays[:, c] == nodata
        out[:, c] = np.where(invalid, 0, values)
    return torch.from_numpy(out).float()


def logits_by_windows(model, imgs):
    """As the run evaluates, image by image, each of which is one window."""
    logits = []
    for img in imgs:
        logits.append(slide_logits(lambda windows: model(windows)["decode"], img, model.img_size, stride=10))
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (VIT[1], {"global_pool": "avg"}),
        (VIT[1], {"global_pool": "token", "probe": True}),
        (RELATIVE[1], {}),
        (SWIN[1], {}),
    ],
)
@torch.no_grad()
def test_classifiers(tmp_path, capsys, name, options):
    path, ours = finetuned(tmp_path, name, **options)
    run(capsys, path, tmp_path / "model.pt2", *FOR_TORCH)
    program, facts = load(tmp_path / "model.pt2")
    for count in (1, 3):
        imgs = photos(count)
        expected = ours(normalised(imgs))
        assert expected.std() > 0.05
        assert_close(program(imgs), expected, **CLOSE)
    assert facts == {
        "mean": list(IMAGENET_MEAN),
        "std": list(IMAGENET_STD),
        "pixels": "uint8",
        "input_dtype": "uint8",
        "input_size": [32, 32],
        "crop_pct": 0.875,
        "classes": list("abcde"),
        "outputs": "logits of images",
        "interpolation": "bicubic",
        "antialias": True,
    }


@pytest.mark.parametrize(("nodata", "dtype"), [(None, "uint16"), (0, "float32")])
@torch.no_grad()
def test_thirteen_bands_of_16_bits(tmp_path, capsys, nodata, dtype):
    path, ours = finetuned(tmp_path, VIT[1], pixels="uint16", marks={"nodata": nodata}, in_chans=13)
    run(capsys, path, tmp_path / "model.pt2", *FOR_TORCH)
    program, facts = load(tmp_path / "model.pt2")
    assert (facts["input_dtype"], facts.get("nodata")) == (dtype, nodata)
    for count in (1, 3):
        imgs = torch.randint(0, 65536, (count, 13, 32, 32))
        imgs[:, 4:, :9] = 0
        imgs = imgs.to(getattr(torch, dtype))
        x = normalised(imgs, facts["mean"], facts["std"], 65535, nodata)
        assert_close(program(imgs), ours(x), **CLOSE)


@pytest.mark.parametrize("flags", [(), ("--head", "linear")])
@torch.no_grad()
def test_segmentation(tmp_path, capsys, flags):
    model = segmentation_run(tmp_path, *flags)
    run(capsys, tmp_path, tmp_path / "model.pt2", *FOR_TORCH)
    program, facts = load(tmp_path / "model.pt2")
    for count in (1, 3):
        imgs = photos(count, 16)
        expected = logits_by_windows(model, normalised(imgs))
        assert expected.shape == (count, 3, 16, 16)
        assert expected.std() > 0.01
        assert_close(program(imgs), expected, **CLOSE)
    assert facts["classes"] == list("abc")
    assert facts["class_colors"] == [[0, 0, 0], [255, 0, 0], [0, 0, 255]]
    assert (facts["ignore_index"], facts["reduce_zero_label"], facts["stride"]) == (255, False, 10)
    assert (facts["input_size"], facts["outputs"]) == ([16, 16], "logits of pixels")
    assert (facts["interpolation"], facts["antialias"]) == ("bilinear", False)


@torch.no_grad()
def test_a_file_runs_without_this_project(tmp_path, capsys):
    """Bands of 16 bits with holes: NaN, and the value of --nodata."""
    model = segmentation_run(tmp_path / "run", pixels="uint16", nodata=7, mask_band=None, bands=None, **HOLES)
    out = tmp_path / "model.pt2"
    run(capsys, tmp_path / "run", out, *FOR_TORCH)
    _, facts = load(out)
    assert (facts["pixels"], facts["input_dtype"], facts["nodata"]) == ("uint16", "float32", 7)

    batches = []
    for count in (1, 3):
        imgs = torch.randint(0, 65536, (count, 13, 16, 16)).float()
        imgs[:, 2, :5] = torch.nan
        imgs[:, 3:, :, 8:] = 7
        batches.append(imgs)
    torch.save(batches, tmp_path / "imgs.pt")
    subprocess.run([sys.executable, "-I", "-c", ALONE, out], cwd=tmp_path, check=True)
    for imgs, outputs in zip(batches, torch.load(tmp_path / "outputs.pt"), strict=True):
        x = normalised(imgs, HOLES["mean"], HOLES["std"], 65535, nodata=7)
        assert_close(outputs, logits_by_windows(model, x), **CLOSE)


@torch.no_grad()
def test_an_encoder_returns_its_features(tmp_path, capsys):
    path = pretrained(tmp_path, VIT[0])
    run(capsys, path, tmp_path / "encoder.pt2", *FOR_TORCH)
    program, facts = load(tmp_path / "encoder.pt2")
    imgs = photos(3)
    assert_close(program(imgs), trained.load(path).model.forward_features(normalised(imgs)), **CLOSE)
    assert facts["outputs"] == "tokens"


# ------------------------------------------------------------------------------------------------------- detectors

DETECTS_ALONE = """
import sys, torch, torchvision
program = torch.export.load(sys.argv[1]).module()
assert not {"models_vit", "downstream", "encoders", "util", "timm"} & set(sys.modules)
torch.save([program(imgs) for imgs in torch.load("imgs.pt")], "outputs.pt")
"""


@pytest.mark.parametrize("masks", [True, False])
@torch.no_grad()
def test_a_detector_runs_without_this_project(tmp_path, capsys, masks):
    """It finds what the run's model finds in images that are padded by hand, whatever their size is."""
    model = detection_run(tmp_path / "run", masks=masks)
    out = tmp_path / "model.pt2"
    assert "[1, 3, " in run(capsys, tmp_path / "run", out, *FOR_TORCH)[-1]
    torch.manual_seed(0)
    imgs = [torch.randint(0, 256, (1, 3, *size), dtype=torch.uint8) for size in ((48, 48), (31, 48), (48, 2), (1, 1))]
    torch.save(imgs, tmp_path / "imgs.pt")
    subprocess.run([sys.executable, "-I", "-c", DETECTS_ALONE, out], cwd=tmp_path, check=True)
    counts = []
    for img, outputs in zip(imgs, torch.load(tmp_path / "outputs.pt"), strict=True):
        height, width = img.shape[2:]
        padded = torch.zeros(1, 3, 48, 48)
        padded[:, :, :height, :width] = normalised(img)
        (expected,) = model(padded, [(height, width)])
        is_found = outputs["scores"] > 0
        counts.append(int(is_found.sum()))
        assert set(outputs) == set(expected)
        for name, values in expected.items():
            assert_close(outputs[name][is_found], values, rtol=0, atol=1e-3)  # of 48 pixels, and of probabilities
    assert counts[0] == 100  # the most that are kept
    assert 0 < counts[2] < 100
    _, facts = load(out)
    assert facts["categories"] == [[1, "a"], [7, "b"]]
    assert (facts["input_size"], facts["interpolation"], facts["antialias"]) == ([48, 48], "bilinear", True)
