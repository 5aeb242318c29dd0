"""Folders of --format transformers, read by the library and by this project."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from encoders import trained
from encoders.load import load_encoder, read
from models_vit import vit_micro_patch4
from tests.scripts.exports import NORMLESS, RELATIVE, VIT, finetuned, pretrained, pretrained_run, refused, run
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import normalizer
from util.data.transforms import ResizeCenterCrop

transformers = pytest.importorskip("transformers")  # the exporter does not need it

FORMAT = ("--format", "transformers")
FILES = {"config.json", "model.safetensors", "preprocessor_config.json", "README.md"}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # in float64


def load(name, folder, **options):
    """Loads a folder in float64. All of its weights are used, except the decoder in a ViTModel."""
    kind = getattr(transformers, name)
    model, report = kind.from_pretrained(folder, output_loading_info=True, local_files_only=True, **options)
    unused = report.pop("unexpected_keys")
    if name == "ViTModel":
        unused = [key for key in unused if not key.startswith("decoder.")]
    assert not unused
    assert not any(report.values()), report
    return model.eval().double()


def load_features(folder):
    return load("ViTModel", folder, add_pooling_layer=False)


# ------------------------------------------------------------------------------------------------------- pre-trained


@torch.no_grad()
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--norm_pix_loss --mask_ratio 0.6",
        "--input_size 48 --decoder_embed_dim 48 --decoder_num_heads 4",
        "--in_chans 5 --mean 0.4 0.4 0.4 0.4 0.4 --std 0.2 0.2 0.2 0.2 0.2",
    ],
)
def test_a_masked_autoencoder(tmp_path, capsys, flags):
    """The same mask gives the same loss and reconstruction; `noise` is what the library sorts the tokens by."""
    path, model = pretrained_run(tmp_path, "--throw_ratio", "0", *flags.split())
    run(capsys, path, tmp_path / "mae", *FORMAT)
    assert {file.name for file in (tmp_path / "mae").iterdir()} == FILES
    theirs = load("ViTMAEForPreTraining", tmp_path / "mae")
    model.double()
    imgs = torch.randn(2, model.in_chans, *model.img_size, dtype=torch.float64)
    ids_shuffle = torch.rand(2, model.num_tokens).argsort(dim=1)
    output = theirs(imgs, noise=ids_shuffle.argsort(dim=1).double())
    pred, mask = model.reconstruct(imgs, ids_shuffle)
    assert torch.equal(output.mask.bool(), mask)
    assert_close(output.loss, model(imgs, ids_shuffle)["pixel"], **CLOSE)
    assert_close(output.logits[mask], pred[mask], **CLOSE)
    features = load_features(tmp_path / "mae")(imgs).last_hidden_state
    assert_close(features, model.forward_features(imgs), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("", "was trained with --throw_ratio 0.5: its decoder reconstructs thrown tokens by an aggregation"),
        ("--throw_ratio 0 --input_size 16 64", "is for images of (16, 64) pixels, and MAE's are square"),
        (f"--model {NORMLESS[0]} --in_chans 1 --mean 0.5 --std 0.2", "another framework than MAE"),
    ],
)
def test_decoders_that_the_library_lacks_are_left_out(tmp_path, capsys, flags, note):
    path, _ = pretrained_run(tmp_path, *flags.split())
    lines = run(capsys, path, tmp_path / "vit", *FORMAT)
    assert any(line.startswith("note: the decoder is left out: ") and note in line for line in lines)
    ours = trained.load(path).model.double()
    imgs = torch.randn(2, ours.in_chans, *ours.img_size, dtype=torch.float64)
    features = load_features(tmp_path / "vit")(imgs).last_hidden_state
    assert_close(features, ours.forward_features(imgs), **CLOSE)


# ------------------------------------------------------------------------------------------------------- classifiers


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "close"),
    [
        ({}, CLOSE),
        ({"img_size": 48}, CLOSE),
        ({"probe": True, "in_chans": 5}, {"rtol": 1e-5, "atol": 1e-6}),  # the folded head is stored in float32
    ],
)
def test_classifiers(tmp_path, capsys, options, close):
    path, ours = finetuned(tmp_path, VIT[1], global_pool="token", **options)
    run(capsys, path, tmp_path / "vit", *FORMAT)
    theirs = load("ViTForImageClassification", tmp_path / "vit")
    assert theirs.config.id2label == {0: "a", 1: "b", 2: "c", 3: "d", 4: "e"}
    assert theirs.config.label2id["e"] == 4
    imgs = torch.randn(2, ours.in_chans, *ours.img_size, dtype=torch.float64)
    assert_close(theirs(imgs).logits, ours.double()(imgs), **close)


def test_a_classifier_without_names_of_classes(tmp_path, capsys):
    _, ours = finetuned(tmp_path, VIT[1], global_pool="token")
    torch.save(ours.state_dict(), tmp_path / "bare.pth")
    run(capsys, tmp_path / "bare.pth", tmp_path / "vit", *FORMAT)
    assert load("ViTForImageClassification", tmp_path / "vit").config.num_labels == 5
    assert read(tmp_path / "vit").classes is None


def test_what_the_library_saves_is_read_back(tmp_path, capsys):
    """It lacks our metadata; its two .json files say the same."""
    path, _ = finetuned(tmp_path, VIT[1], global_pool="token", in_chans=5, pixels="uint16")
    run(capsys, path, tmp_path / "vit", *FORMAT)
    load("ViTForImageClassification", tmp_path / "vit").float().save_pretrained(tmp_path / "again")
    transformers.AutoImageProcessor.from_pretrained(tmp_path / "vit").save_pretrained(tmp_path / "again")
    written = read(path)
    for folder in (tmp_path / "vit", tmp_path / "again"):
        weights = read(folder)
        assert weights.classes == list("abcde")
        assert weights.pixels == written.pixels
        for name, value in weights.tensors.items():
            assert torch.equal(value, written.raw[name])
        model = vit_micro_patch4(global_pool="token", in_chans=5, num_classes=5)
        remarks = load_encoder(model, folder, classes=list("abcde")).remarks
        assert remarks == ["the head is loaded, as its 5 classes are the same"]


def test_a_classifier_keeps_its_evaluation_view(tmp_path, capsys):
    path, _ = finetuned(tmp_path, VIT[1], global_pool="token", crop_pct=0.95)
    run(capsys, path, tmp_path / "vit", *FORMAT)
    settings = trained.load(tmp_path / "vit").settings
    assert settings["crop_pct"] == 0.95


# -------------------------------------------------------------------------------------------------------- the images


@pytest.mark.parametrize(
    ("dtype", "channels", "size", "crop_pct", "image_size"),
    [
        ("uint8", 3, 32, None, (160, 180)),
        ("uint8", 3, (16, 64), 0.8, (80, 320)),  # a rectangle is resized without its aspect ratio
        ("uint8", 1, 32, 1.0, (160, 180)),
        ("uint16", 5, 32, None, (160, 180)),
        ("float32", 4, 32, None, (160, 180)),
    ],
)
def test_the_processor_is_the_evaluation_view(tmp_path, capsys, dtype, channels, size, crop_pct, image_size):
    options = {
        "in_chans": channels,
        "img_size": size,
        "crop_pct": crop_pct,
        "pixels": dtype,
    }
    path, model = finetuned(tmp_path, VIT[1], global_pool="token", **options)
    run(capsys, path, tmp_path / "vit", *FORMAT)
    array = np.random.default_rng(0).random((*image_size, channels))
    if dtype != "float32":
        array = array * np.iinfo(dtype).max
    array = array.astype(dtype)
    view = ResizeCenterCrop(model.img_size, crop_pct)
    normalize = normalizer(read(path).settings, PixelFormat(channels, dtype))
    img = view(torch.from_numpy(array).permute(2, 0, 1))
    expected = normalize(img[None])
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "vit")
    if channels == 3:
        output = processor(Image.fromarray(array), return_tensors="pt")["pixel_values"]
    else:
        output = processor(array, input_data_format="channels_last", return_tensors="pt")["pixel_values"]
    tolerance = 2e-6
    if dtype == "uint16":
        tolerance = 2.02 / 65535 / 0.3  # the library resizes in float32
    assert_close(output, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("crop_pct", "shift"),
    [
        (0.95, 0),  # a margin of 1 pixel
        (0.875, 0),  # of 4
        (0.9, 1),  # of 3
    ],
)
def test_a_crop_of_transformers_one_pixel_beside_ours_is_said(tmp_path, capsys, crop_pct, shift):
    path, _ = finetuned(tmp_path, VIT[1], global_pool="token", crop_pct=crop_pct)
    lines = run(capsys, path, tmp_path / "vit", *FORMAT)
    array = np.random.default_rng(0).integers(0, 256, (70, 70, 3), dtype=np.uint8)
    whole = int(32 / crop_pct)
    margin = round((whole - 32) / 2) - shift
    img = torch.from_numpy(array).permute(2, 0, 1)
    resized = ResizeCenterCrop(whole, 1.0)(img)
    inside = slice(margin, margin + 32)
    normalize = normalizer(read(path).settings, RGB8)
    expected = normalize(resized[None, :, inside, inside])
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "vit")
    output = processor(Image.fromarray(array), return_tensors="pt")["pixel_values"]
    assert_close(output, expected, rtol=0, atol=2e-6)
    note = f"note: the image processor resizes to {whole} pixels and crops 32: its crop starts one pixel before"
    assert any(line.startswith(note) for line in lines) == bool(shift)


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "out", "message"),
    [
        (RELATIVE[0], "e", "holds a ViT with relative positions: only plain ViTs can be exported for Transformers"),
        (VIT[0], "e.safetensors", "--format transformers writes a folder: give --out without a suffix"),
    ],
)
def test_what_transformers_cannot_hold(tmp_path, capsys, name, out, message):
    path = pretrained(tmp_path / "run", name)
    assert message in refused(capsys, path, tmp_path / out, *FORMAT)


def test_mean_pooling_is_refused(tmp_path, capsys):
    path, _ = finetuned(tmp_path, VIT[1], global_pool="avg")
    error = refused(capsys, path, tmp_path / "e", *FORMAT)
    assert "pools the mean of all patches, and Transformers' classifier reads the class token" in error
