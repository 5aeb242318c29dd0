"""Folders of --format transformers, read by the library and by this project."""

import numpy as np
import pytest
import torch
from PIL import Image

from encoders import classifiers
from encoders.load import load_encoder, load_model, read
from models_vit import vit_micro_patch4
from tests.scripts.test_export import pretrained_run, refused, run
from tests.scripts.test_export_folder import NORMLESS, RELATIVE, SWIN, VIT, finetuned, pretrained
from util.data.pixel_format import PixelFormat
from util.data.statistics import normalizer
from util.data.transforms import ResizeCenterCrop
from util.run.checkpoint import save_checkpoint

transformers = pytest.importorskip("transformers")  # the exporter does not need it

FORMAT = "--format", "transformers"
FILES = {"config.json", "model.safetensors", "preprocessor_config.json", "README.md", "export.json"}
CLOSE = dict(rtol=1e-10, atol=1e-10)  # in float64


def load(name, folder, **options):
    """Loads a folder in float64. All of its weights are used, except the decoder in a ViTModel."""
    kind = getattr(transformers, name)
    model, report = kind.from_pretrained(folder, output_loading_info=True, local_files_only=True, **options)
    unused = [key for key in report.pop("unexpected_keys") if name != "ViTModel" or not key.startswith("decoder.")]
    assert not unused and not any(report.values()), (unused, report)
    return model.eval().double()


def load_features(folder):
    return load("ViTModel", folder, add_pooling_layer=False)


# ------------------------------------------------------------------------------------------------------- pre-trained


@torch.no_grad()
@pytest.mark.parametrize(
    ("flags", "in_chans", "size"),
    [
        ((), 3, 32),
        (("--norm_pix_loss", "--mask_ratio", "0.6"), 3, 32),
        (("--input_size", "48", "--decoder_embed_dim", "48", "--decoder_num_heads", "4"), 3, 48),
        (("--in_chans", "5", "--mean", *["0.4"] * 5, "--std", *["0.2"] * 5), 5, 32),
        (("--throw_ratio", "0.5", "--no-progressive"), 3, 32),
    ],
)
def test_a_masked_autoencoder(tmp_path, capsys, flags, in_chans, size):
    """The same mask gives the same loss and reconstruction; `noise` is what the library sorts the tokens by."""
    path, model = pretrained_run(tmp_path, "--throw_ratio", "0", *flags)
    lines = run(capsys, path, tmp_path / "mae", *FORMAT)
    assert "from transformers import AutoImageProcessor, ViTMAEForPreTraining" in lines
    assert {file.name for file in (tmp_path / "mae").iterdir()} == FILES
    theirs = load("ViTMAEForPreTraining", tmp_path / "mae")
    imgs = torch.randn(2, in_chans, size, size, dtype=torch.float64)
    assert not torch.equal(model.decoder.pred.bias, torch.zeros_like(model.decoder.pred.bias))
    features = load_features(tmp_path / "mae")(imgs).last_hidden_state
    torch.testing.assert_close(features, model.double().forward_features(imgs), **CLOSE)
    if "--no-progressive" in flags:
        assert any("the decoder has seen fewer tokens than MAE gives it" in line for line in lines)
        return
    ids_shuffle = torch.rand(2, model.num_tokens).argsort(dim=1)
    output = theirs(imgs, noise=ids_shuffle.argsort(dim=1).double())
    pred, mask = model.reconstruct(imgs, ids_shuffle)
    assert torch.equal(output.mask.bool(), mask)
    torch.testing.assert_close(output.loss, model(imgs, ids_shuffle)["pixel"], **CLOSE)
    torch.testing.assert_close(output.logits[mask], pred[mask], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ((), "was trained with --throw_ratio 0.5: its decoder reconstructs thrown tokens by an aggregation"),
        (("--throw_ratio", "0", "--input_size", "16", "64"), "is for images of (16, 64) pixels, and MAE's are square"),
        (("--model", NORMLESS[0], "--in_chans", "1", "--mean", "0.5", "--std", "0.2"), "another framework than MAE"),
    ],
)
def test_other_encoders(tmp_path, capsys, flags, note):
    path, _ = pretrained_run(tmp_path, *flags)
    lines = run(capsys, path, tmp_path / "vit", *FORMAT)
    assert any(line.startswith("note: the decoder is left out: ") and note in line for line in lines)
    ours, theirs = load_model(path).double(), load_features(tmp_path / "vit")
    imgs = torch.randn(2, ours.in_chans, *ours.img_size, dtype=torch.float64)
    torch.testing.assert_close(theirs(imgs).last_hidden_state, ours.forward_features(imgs), **CLOSE)


@torch.no_grad()
def test_an_encoder_without_a_decoder(tmp_path, capsys):
    run(capsys, pretrained(tmp_path, VIT[0]), tmp_path / "encoder.pth")
    lines = run(capsys, tmp_path / "encoder.pth", tmp_path / "vit", *FORMAT)
    assert not any("decoder" in line for line in lines)
    imgs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = load_model(tmp_path / "encoder.pth").double().forward_features(imgs)
    torch.testing.assert_close(load_features(tmp_path / "vit")(imgs).last_hidden_state, expected, **CLOSE)


# ------------------------------------------------------------------------------------------------------- classifiers


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"probe": True, "in_chans": 5}, {"img_size": 48}])
def test_classifiers(tmp_path, capsys, options):
    path, ours = finetuned(tmp_path, VIT[1], global_pool="token", **options)
    if "probe" in options:
        ours.head[0].running_mean.normal_()
        ours.head[0].running_var.uniform_(0.5, 2)
        meta = read(path).meta
        path = save_checkpoint(tmp_path, "probe", {"model": ours.state_dict()}, meta)
    run(capsys, path, tmp_path / "vit", *FORMAT)
    theirs = load("ViTForImageClassification", tmp_path / "vit")
    assert theirs.config.id2label == dict(enumerate("abcde")) and theirs.config.label2id["e"] == 4
    imgs = torch.randn(2, ours.in_chans, *ours.img_size, dtype=torch.float64)
    # The folded head is stored in float32.
    close = dict(rtol=1e-5, atol=1e-6) if "probe" in options else CLOSE
    torch.testing.assert_close(theirs(imgs).logits, ours.double()(imgs), **close)


def test_a_classifier_without_names_of_classes(tmp_path, capsys):
    _, ours = finetuned(tmp_path, VIT[1], global_pool="token")
    torch.save(ours.state_dict(), tmp_path / "bare.pth")
    run(capsys, tmp_path / "bare.pth", tmp_path / "vit", *FORMAT)
    assert load("ViTForImageClassification", tmp_path / "vit").config.num_labels == 5
    assert read(tmp_path / "vit").classes is None


def test_a_trained_folder_comes_back(tmp_path, capsys):
    """What the library saves lacks our metadata; its two .json files say the same."""
    path, _ = finetuned(tmp_path, VIT[1], global_pool="token", in_chans=5)
    weights = read(path)
    meta = {**weights.info.to_json(), "pixels": "uint16"}
    path = save_checkpoint(tmp_path, "deep", {"model": weights.raw}, meta)
    run(capsys, path, tmp_path / "vit", *FORMAT)
    theirs = load("ViTForImageClassification", tmp_path / "vit").float()
    theirs.save_pretrained(tmp_path / "again")
    transformers.AutoImageProcessor.from_pretrained(tmp_path / "vit").save_pretrained(tmp_path / "again")
    for folder in ("vit", "again"):
        found = read(tmp_path / folder)
        assert found.classes == list("abcde") and found.pixels == weights.pixels | {"pixels": "uint16"}
        assert all(torch.equal(value, weights.raw[name]) for name, value in found.tensors.items())
        assert load_encoder(vit_micro_patch4(global_pool="token", in_chans=5), tmp_path / folder).remarks == []


def test_a_classifier_keeps_its_evaluation_view(tmp_path, capsys):
    path, _ = finetuned(tmp_path, VIT[1], global_pool="token", crop_pct=0.95)
    run(capsys, path, tmp_path / "vit", *FORMAT)
    settings = classifiers.load_classifier(tmp_path / "vit").settings
    assert settings["crop_pct"] == 0.95 and settings["model"] == VIT[1]


# -------------------------------------------------------------------------------------------------------- the images


@pytest.mark.parametrize(
    ("dtype", "channels", "size", "crop_pct"),
    [
        ("uint8", 3, 32, None),
        ("uint8", 3, (16, 64), 0.8),
        ("uint8", 1, 32, 1.0),
        ("uint16", 5, 32, None),
        ("float32", 4, 32, None),
    ],
)
def test_the_processor_is_the_evaluation_view(tmp_path, capsys, dtype, channels, size, crop_pct):
    """A rectangle is resized without its aspect ratio, so the image here has that of the model."""
    path, model = finetuned(tmp_path, VIT[1], global_pool="token", in_chans=channels, img_size=size, crop_pct=crop_pct)
    weights = read(path)
    path = save_checkpoint(tmp_path, "typed", {"model": weights.raw}, weights.info.to_json() | {"pixels": dtype})
    run(capsys, path, tmp_path / "vit", *FORMAT)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "vit")
    height, width = model.img_size
    array = np.random.default_rng(0).random((5 * height, 5 * width + 20 * (height == width), channels))
    if dtype != "float32":
        array = array * np.iinfo(dtype).max
    array, pixels = array.astype(dtype), PixelFormat(channels, dtype)
    view = ResizeCenterCrop(model.img_size, crop_pct)
    expected = normalizer(weights.settings, pixels)(view(torch.from_numpy(array).permute(2, 0, 1))[None])
    if channels == 3:
        output = processor(Image.fromarray(array), return_tensors="pt")["pixel_values"]
    else:
        output = processor(array, input_data_format="channels_last", return_tensors="pt")["pixel_values"]
    rounding = 1.01 / 65535 / 0.3 if dtype == "uint16" else 1e-6  # the library resizes in float32
    torch.testing.assert_close(output, expected, rtol=0, atol=2 * rounding)


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "out", "message"),
    [
        (RELATIVE[0], "e", "holds a ViT with relative positions: only plain ViTs can be exported for Transformers"),
        (SWIN[0], "e", "leave out --format transformers for a folder for timm"),
        (VIT[0], "e.safetensors", "--format transformers writes a folder: give --out without a suffix"),
    ],
)
def test_what_transformers_cannot_hold(tmp_path, capsys, name, out, message):
    path = pretrained(tmp_path / "run", name)
    assert message in refused(capsys, path, "--out", tmp_path / out, *FORMAT) and not (tmp_path / out).exists()


def test_mean_pooling_is_refused(tmp_path, capsys):
    path, _ = finetuned(tmp_path, VIT[1])
    error = refused(capsys, path, "--out", tmp_path / "e", *FORMAT)
    assert "pools the mean of all patches, and Transformers' classifier reads the class token" in error
    assert not (tmp_path / "e").exists()
