"""Images of any channels and depth in whole runs: pre-training, fine-tuning, evaluation, pictures, and rectangles."""

import json

import numpy as np
import pytest
import torch

import main_finetune
from downstream.probe import main_probe
from encoders.load import load_blocks
from frameworks import registry
from tests import runs
from tests.runs import PLAIN, contents, evaluate, evaluation, refused, state
from tests.util.data.test_pixel_format import pixels, write_tiff
from util.data.open import open_images
from util.data.pixel_format import PixelFormat
from util.data.statistics import measure_statistics
from util.run.files.checkpoint import newest_checkpoint, read_info, save_checkpoint

pretrain = runs.pretrain.also("--batch_size 4")
finetune = runs.finetune.also("--batch_size 4")


def write_images(root, dtype, channels=5):
    """Writes 8 training images of two classes, and 4 to evaluate on: TIFFs of 16 bits, or arrays of floats."""
    seed = 0
    for split, count in (("train", 4), ("val", 2)):
        for name in ("a", "b"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                seed += 1
                array = pixels(channels, dtype, (36 + i, 40), seed)
                if dtype == "float32":
                    np.save(folder / f"{i}.npy", array)
                else:
                    write_tiff(folder / f"{i}.tif", array)
    return root


@pytest.fixture(scope="module", params=["uint16", "float32"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def bands(dtype, tmp_path_factory):
    """A folder of images with five bands."""
    return write_images(tmp_path_factory.mktemp(dtype), dtype)


@pytest.fixture(scope="module")
def encoder(bands, tmp_path_factory):
    """The folder of a pre-training on `bands` that has been stopped and resumed."""
    folder = tmp_path_factory.mktemp("encoder")
    flags = ["--in_chans", 5, "--knn_every", 2]
    pretrain(bands, folder, *flags, "--max_steps", 3, "--num_workers", 1)
    pretrain(bands, folder, *flags)
    return folder


@pytest.fixture(scope="module")
def classifier(bands, encoder, tmp_path_factory):
    """The folder of a fine-tuning of `encoder` on `bands`."""
    folder = tmp_path_factory.mktemp("classifier")
    finetune(bands, folder, "--in_chans", 5, "--finetune", encoder)
    return folder


def pixels_of(folder):
    return read_info(newest_checkpoint(folder)[0]).pixel_settings


def test_pre_training_measures_five_bands_once(bands, encoder, dtype):
    content = state(encoder)
    images = open_images("folder", bands, in_chans=5)
    (mean, std), _ = measure_statistics(images)
    assert pixels_of(encoder) == {"mean": mean, "std": std, "pixels": dtype}
    assert content["meta"]["settings"]["in_chans"] == 5
    assert content["model"]["patch_embed.proj.weight"].shape == (96, 5, 4, 4)
    assert content["model"]["decoder.pred.weight"].shape[0] == 5 * 4 * 4
    log = (encoder / "log.txt").read_text()
    assert "resuming" in log
    assert log.count(f"measured on 8 images, {PixelFormat(5, dtype)}") == 1


PROBE = ["--steps", "2", "--total_batch_size", "4", "--num_workers", "0", "--device", "cpu", "--probes", "knn"]


def test_other_images_and_models_are_refused(bands, encoder, classifier, dtype, photos, labelled, tmp_path, capsys):
    other_dtype = "uint16" if dtype == "float32" else "float32"
    other = write_images(tmp_path / "other", other_dtype)
    new = tmp_path / "new"
    assert "--in_chans" in pretrain.refused(capsys, bands, new)
    assert "--in_chans 5" in pretrain.refused(capsys, photos, new, "--pretrained", encoder, code=4)
    assert "--aa" in finetune.refused(capsys, bands, new, "--in_chans", 5, "--aa", "rand-m9")
    assert other_dtype in pretrain.refused(capsys, other, encoder, "--in_chans", 5)
    assert "5 channels" in refused(
        capsys, main_probe.main, encoder, *PROBE, "--data_path", labelled, "--output_dir", new
    )
    assert "5 channels" in refused(capsys, main_finetune.main, *evaluation(classifier, labelled))
    assert "--in_chans 4" in refused(capsys, main_finetune.main, *evaluation(classifier, bands, "--in_chans", 4))


# ------------------------------------------------------------------------------------------------- from other weights

FREEZE = ["--lr", 0, "--min_lr", 0, "--weight_decay", 0, "--max_steps", 1]


@pytest.fixture(scope="module")
def rgb_encoder(photos, tmp_path_factory):
    """A checkpoint of a pre-training on photos."""
    folder = tmp_path_factory.mktemp("rgb")
    pretrain(photos, folder, "--mean", 0.5, 0.25, 0.75, "--max_steps", 1)
    return newest_checkpoint(folder)[0]


@pytest.fixture
def other_encoder(rgb_encoder, tmp_path):
    """A checkpoint that differs from `rgb_encoder` in one tensor."""
    folder = tmp_path / "other"
    folder.mkdir()
    content = contents(rgb_encoder)
    weights = content["model"] | {"norm.bias": torch.ones(96)}
    return save_checkpoint(folder, 1, {"model": weights}, content["meta"])


@pytest.mark.parametrize("name", ["localmim_vit_micro_patch4", "mff_vit_micro_patch4", "crossmae_vit_micro_patch4"])
def test_another_framework_takes_the_encoder(rgb_encoder, name):
    model = registry.MODELS[name]()
    load_blocks(model, rgb_encoder)
    ours = model.state_dict()
    for key, value in contents(rgb_encoder)["model"].items():
        if key.startswith(("blocks.", "patch_embed.", "cls_token", "pos_embed")):
            assert torch.equal(ours[key], value), key


def test_a_pre_training_goes_on_with_its_own_first_weights_only(photos, rgb_encoder, other_encoder, tmp_path, capsys):
    begun = pretrain(photos, tmp_path / "run", "--pretrained", rgb_encoder, "--max_steps", 1)
    said = pretrain.refused(capsys, photos, tmp_path / "run", "--pretrained", other_encoder)
    assert str(rgb_encoder) in said
    # A run in a new folder that continues this one has the weights of this one.
    resume = ["--resume", newest_checkpoint(tmp_path / "run")[0]]
    again = pretrain(photos, tmp_path / "again", *resume, "--pretrained", rgb_encoder, "--max_steps", 2)
    assert again["meta"]["step"] == 2
    assert again["meta"]["encoder"] == begun["meta"]["encoder"]
    assert "nowhere" in pretrain.refused(capsys, photos, tmp_path / "new", "--pretrained", tmp_path / "nowhere.pth")
    both = ["--resume", rgb_encoder, "--pretrained", other_encoder]
    assert "--pretrained" in pretrain.refused(capsys, photos, tmp_path / "new", *both)


# ---------------------------------------------------------------------------------------------------------- rectangles


@pytest.mark.parametrize(
    ("framework", "model", "width", "table"),
    [
        ("mae_vit_micro_patch4", "vit_micro_patch4", 48, (1, 97, 96)),
        ("simmim_vit_micro_patch4", "relative_vit_micro_patch4", 48, (15 * 23 + 3, 3)),
        ("amt_simmim_vit_micro_patch4", "absolute_vit_micro_patch4", 48, (1, 97, 96)),
        ("greenmim_swin_micro_patch4_window4", "swin_micro_patch4_window4", 64, (7 * 7, 2)),
    ],
)
def test_rectangles_in_fine_tuning(labelled, tmp_path, capsys, framework, model, width, table):
    """The encoder of squares is resized; what the run logs is what an evaluation of its file finds."""
    torch.save({"model": registry.MODELS[framework]().state_dict()}, tmp_path / "encoder.pth")
    flags = ["--finetune", tmp_path / "encoder.pth", "--input_size", 32, width, *PLAIN]
    whole_epoch = ["--batch_size", 24, "--epochs", 1, "--warmup_epochs", 0]
    content = finetune(labelled, tmp_path / "out", *flags, *whole_epoch, "--model", model)
    assert content["meta"]["settings"]["input_size"] == [32, width]
    shapes = {value.shape for key, value in content["model"].items() if key.endswith(("pos_embed", "bias_table"))}
    assert table in shapes
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    found = evaluate(labelled, tmp_path / "out", "--input_size", 32, width)
    assert found["loss"] == pytest.approx(results["last"]["val_loss"], rel=1e-5)
    assert found["num_images"] == 7
    said = refused(capsys, main_finetune.main, *evaluation(tmp_path / "out", labelled, "--input_size", 32))
    assert "--input_size" in said
