"""Whole runs on images of any channels and depth: pre-training, fine-tuning, evaluation, pictures, and rectangles."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models import adapt_input_conv

import main_finetune
import main_pretrain
from downstream.probe import main_probe
from downstream.probe import models as models_probe
from scripts import visualize
from scripts.export import export
from tests import runs
from tests.conftest import write_photo
from tests.runs import PLAIN, assert_same_state, contents, evaluate, evaluation, refused, reports
from tests.util.data.test_pixel_format import pixels, write_tiff
from util.data.datasets import open_images
from util.data.pixel_format import PixelFormat
from util.data.statistics import measure_statistics
from util.run.checkpoint import (
    find_checkpoint_file,
    newest_checkpoint,
    read_info,
    save_checkpoint,
)

pretrain, finetune = runs.pretrain.also("--batch_size 4"), runs.finetune.also("--batch_size 4")
SIZES = dict(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3)  # of the micro models


def make_data(root, dtype, channels=5):
    """8 training images of two classes, and 4 to evaluate on: TIFFs of 16 bits, or arrays of floats."""
    for split, count in (("train", 4), ("val", 2)):
        for label, name in enumerate("ab"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                array = pixels(channels, dtype, size=(36 + i, 40), seed=100 * label + 10 * len(split) + i)
                if dtype == "float32":
                    np.save(root / split / name / f"{i}.npy", array)
                else:
                    write_tiff(root / split / name / f"{i}.tif", array)
    return root


@pytest.fixture(scope="module", params=["uint16", "float32"])
def bands(request, tmp_path_factory):
    """(folder of images with five bands, their format)"""
    return make_data(tmp_path_factory.mktemp(request.param), request.param), PixelFormat(5, request.param)


@pytest.fixture(scope="module")
def encoder(bands, tmp_path_factory):
    """The folder of a pre-training on `bands`."""
    folder = tmp_path_factory.mktemp("encoder")
    pretrain(bands[0], folder, "--in_chans", 5)
    return folder


def test_pre_training_on_five_bands(bands, encoder, tmp_path, capsys):
    data_path, pixel_format = bands
    content = contents(newest_checkpoint(encoder)[0])
    settings, own = content["meta"]["settings"], measure_statistics(open_images("folder", data_path, in_chans=5))[0]
    assert [settings["mean"], settings["std"]] == [*own] and settings["in_chans"] == 5
    assert content["meta"]["pixels"] == pixel_format.dtype
    assert content["model"]["patch_embed.proj.weight"].shape == (96, 5, 4, 4)
    assert content["model"]["decoder.pred.weight"].shape[0] == 5 * 4 * 4
    pretrain(data_path, tmp_path / "parts", "--in_chans", 5, "--max_steps", 3)
    assert f"measured on 8 images, {pixel_format}" in capsys.readouterr().out
    resumed = pretrain(data_path, tmp_path / "parts", "--in_chans", 5)
    assert "measured on" not in capsys.readouterr().out  # they are the checkpoint's
    assert_same_state(resumed, content)


def test_pictures_of_five_bands(bands, encoder, tmp_path, capsys):
    out = tmp_path / "p.png"
    visualize.main([str(encoder), "--images", str(bands[0] / "val"), "--out", str(out), "--rows", "2"])
    assert np.asarray(Image.open(out)).std() > 10 and "masked MSE" in capsys.readouterr().out


def test_frozen_evaluation_of_five_bands(bands, encoder, tmp_path):
    rows = probe(encoder, bands[0], tmp_path / "probe", "linear")["results"]
    k = min(20, max(row.get("k", 0) for row in rows))  # the bank may be smaller
    offline = {(row.get("scaling"), row["feature"]): row["top1"] for row in rows if row.get("k") == k}
    pretrain(bands[0], tmp_path / "run", "--in_chans", 5, "--knn_every", 2)
    *_, last = (report for report in reports(tmp_path / "run") if "rankme" in report)
    # The run on the way and the program afterwards see the same weights and the same normalised images.
    assert last["knn_top1"] == offline["z", "mean"] and last["knn_cls_raw_top1"] == offline["raw", "cls"]


def test_fine_tuning_on_five_bands(bands, encoder, tmp_path, capsys):
    data_path, pixel_format = bands
    flags = ["--in_chans", 5, "--finetune", encoder]
    content = finetune(data_path, tmp_path / "whole", *flags)
    out = capsys.readouterr().out
    assert "pixel mean and deviation are those of the encoder" in out and "measured on" not in out
    assert f"note: --aa rand-m9-mstd0.5-inc1 is not applied, because the images have {pixel_format}" in out
    base = contents(newest_checkpoint(encoder)[0])["meta"]["settings"]
    assert all(content["meta"]["settings"][name] == base[name] for name in ("mean", "std", "in_chans"))
    finetune(data_path, tmp_path / "parts", *flags, "--max_steps", 3)
    assert_same_state(finetune(data_path, tmp_path / "parts", *flags), content)
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert evaluate(data_path, tmp_path / "whole")["loss"] == pytest.approx(results["last"]["val_loss"], rel=1e-5)
    message = refused(capsys, main_finetune.main, *evaluation(tmp_path / "whole", data_path, "--in_chans", 4))
    assert "--in_chans 4, but the classifier at" in message and "has 5" in message


PROBE = ["--steps", "2", "--total_batch_size", "4", "--num_workers", "0", "--device", "cpu", "--probes", "knn"]


def probe(path, data_path, output_dir, *further):
    main_probe.main([str(path), *PROBE, *further, "--data_path", str(data_path), "--output_dir", str(output_dir)])
    return json.loads((output_dir / "probe.json").read_text())


def test_exported_files_have_the_pixels_of_the_run(bands, encoder, tmp_path, capsys):
    data_path, pixel_format = bands
    own = read_info(newest_checkpoint(encoder)[0]).pixel_settings
    unit = {"uint16": "pixels of uint16, divided by 65535", "float32": "pixels of float32 in the unit of the data"}
    expected = probe(encoder, data_path, tmp_path / "p")
    for name in ("e", "e.safetensors", "e.pth"):
        lines = export(encoder, tmp_path / name)
        path = find_checkpoint_file(tmp_path / name)
        assert path.suffix in (".safetensors", ".pth")
        assert read_info(path).pixel_settings == own and own["pixels"] == pixel_format.dtype
        found = probe(tmp_path / name, data_path, tmp_path / f"p_{name}")
        assert found["results"] == expected["results"] and found["settings"] == expected["settings"]
        assert name == "e" or f"{unit[pixel_format.dtype]}, normalised with mean {own['mean']}" in lines[0]
        export(tmp_path / name, tmp_path / f"again_{path.suffix[1:]}", overwrite=True)
        for folder in ("e", f"again_{path.suffix[1:]}"):
            card = (tmp_path / folder / "README.md").read_text()
            assert f"| input | {unit[pixel_format.dtype]} |" in card and "image-feature-extraction" in card
    capsys.readouterr()
    torch.save({"model": contents(tmp_path / "e.pth")["model"]}, tmp_path / "bare.pth")
    found = probe(tmp_path / "bare.pth", data_path, tmp_path / "p_bare")
    assert f"measured on 8 images, {pixel_format}" in capsys.readouterr().out  # the same data, so the same statistics
    assert found["results"] == expected["results"]


def test_an_exported_classifier_is_evaluated_as_the_run_is(bands, tmp_path):
    data_path, _ = bands
    finetune(data_path, tmp_path / "run", "--in_chans", 5, "--max_steps", 1)
    expected = evaluate(data_path, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "mae.pth", layout="mae")
    export(tmp_path / "run", tmp_path / "folder")
    for path in (tmp_path / "mae.pth", tmp_path / "folder" / "model.safetensors"):
        assert evaluate(data_path, path)["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    torch.save({"model": contents(tmp_path / "mae.pth")["model"]}, tmp_path / "bare.pth")
    settings = contents(newest_checkpoint(tmp_path / "run")[0])["meta"]["settings"]
    given = ["--mean", *settings["mean"], "--std", *settings["std"]]
    assert evaluate(data_path, tmp_path / "bare.pth", *given)["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_statistics_of_an_exported_rgb_encoder(photos, labelled, tmp_path, capsys):
    pretrain(photos, tmp_path / "run", "--mean", 0.5, 0.25, 0.75, "--max_steps", 1)
    export(tmp_path / "run", tmp_path / "e")
    content = finetune(labelled, tmp_path / "f", "--finetune", tmp_path / "e", "--max_steps", 1)
    assert content["meta"]["settings"]["mean"] == [0.5, 0.25, 0.75]
    assert "note: pixel mean and deviation are those of the encoder" in capsys.readouterr().out
    assert models_probe.open_encoder(tmp_path / "e").pixel_settings["mean"] == [0.5, 0.25, 0.75]


def test_what_cannot_work_is_refused_before_the_first_step(bands, encoder, photos, tmp_path, capsys):
    data_path, pixel_format = bands
    out, name = tmp_path / "out", "0.npy" if pixel_format.is_float else "0.tif"
    files = f"{str(data_path / 'train' / 'a' / name)!r} has {pixel_format}, but the model takes"
    assert f"{files} 3 channels (--in_chans in training)" in pretrain.refused(capsys, data_path, out)
    assert f"{files} 4 channels (--in_chans in training)" in finetune.refused(capsys, data_path, out, "--in_chans", 4)
    flags = ["--in_chans", 5, "--mean", 0.5, 0.5]
    message = "--mean must have a value for each of 5 channels, got [0.5, 0.5]"
    assert message in pretrain.refused(capsys, data_path, out, *flags)
    assert message in finetune.refused(capsys, data_path, out, *flags)
    assert "--in_chans must be at least 1, got 0" in pretrain.refused(capsys, data_path, out, "--in_chans", 0)
    message = finetune.refused(capsys, data_path, out, "--in_chans", 5, "--aa", "rand-m9-mstd0.5-inc1")
    assert f"--aa rand-m9-mstd0.5-inc1 is for RGB images of 8 bits, the data has {pixel_format}" in message
    message = "holds an encoder of 5 channels, this {} is for 3: only encoders of 3 channels can be adapted"
    (tmp_path / "labelled" / "val" / "cat").mkdir(parents=True)
    (tmp_path / "labelled" / "train").symlink_to(photos / "train")
    for name in ("cat", "dog"):
        (tmp_path / "labelled" / "val" / name).mkdir(exist_ok=True)
        write_photo(tmp_path / "labelled" / "val" / name / "0.png")
    wanted = message.format("VisionTransformer")
    assert wanted in finetune.refused(capsys, tmp_path / "labelled", out, "--finetune", encoder, code=4)
    assert message.format("MaskedAutoencoderViT") in pretrain.refused(
        capsys, photos, out, "--pretrained", encoder, code=4
    )
    if pixel_format.is_float:  # a run does not go on with images of another kind
        other = make_data(tmp_path / "other", "uint16")
        message = pretrain.refused(capsys, other, encoder, "--in_chans", 5)
        assert "the images of the run had 5 channels of float32 and now have 5 channels of uint16" in message
        message = refused(capsys, visualize.main, *[str(encoder), "--images", str(other / "val")])
        assert "trained on pixels of float32, but the images have 5 channels of uint16" in message


def test_channels_of_a_trained_model_are_no_flag(bands, encoder, photos, labelled, tmp_path, capsys):
    data_path, pixel_format = bands
    message = "' has 3 channels of uint8, but the model takes 5 channels"
    probing = [str(encoder), *PROBE, "--data_path", str(labelled), "--output_dir", str(tmp_path / "p")]
    finetune(data_path, tmp_path / "run", "--in_chans", 5, "--max_steps", 1)
    for error in (
        refused(capsys, main_probe.main, *probing),
        refused(capsys, visualize.main, *[str(encoder), "--images", str(photos)]),
        refused(capsys, main_finetune.main, *evaluation(tmp_path / "run", labelled)),
    ):
        assert f"{message} (--in_chans in training)" in error
    # Programs that take the channels from the model have no such flag.
    assert "unrecognized arguments: --in_chans 3" in refused(capsys, main_probe.main, *[*probing, "--in_chans", "3"])
    with pytest.raises(ValueError, match="--dataset cifar10 has images of 3 channels, but the model takes 5 channels"):
        open_images("cifar10", tmp_path, in_chans=5)


def test_one_grey_channel_of_8_bits(tmp_path):
    for i in range(4):
        (tmp_path / "grey").mkdir(exist_ok=True)
        Image.fromarray(pixels(1, "uint8", seed=i)[:, :, 0]).save(tmp_path / "grey" / f"{i}.png")
    content = pretrain(tmp_path / "grey", tmp_path / "out", "--in_chans", 1, "--max_steps", 1)
    (mean,), (std,) = (content["meta"]["settings"][name] for name in ("mean", "std"))
    values = np.concatenate([pixels(1, "uint8", seed=i).ravel() for i in range(4)]) / 255
    assert mean == pytest.approx(values.mean(), rel=1e-12) and std == pytest.approx(values.std(), rel=1e-9)


# ------------------------------------------------------------------------------------------------- from other weights


def first_weights(content_of):
    return {key: value for key, value in content_of["model"].items() if torch.is_tensor(value)}


FREEZE = ["--lr", 0, "--min_lr", 0, "--weight_decay", 0, "--max_steps", 1]


@pytest.fixture(scope="module")
def rgb_encoder(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rgb")
    pretrain(photos, folder, "--max_steps", 1)
    return folder


@pytest.mark.parametrize("channels", [1, 2, 5, 7])
def test_rgb_weights_start_other_channels(rgb_encoder, tmp_path, capsys, channels):
    data_path = make_data(tmp_path / "data", "uint16", channels)
    theirs = first_weights(contents(newest_checkpoint(rgb_encoder)[0]))
    kernel = theirs["patch_embed.proj.weight"]
    slow = torch.zeros(96, channels, 4, 4, dtype=torch.float64)
    for c in range(channels):  # repeated in order; one channel is the sum
        slow[:, c] = kernel[:, c % 3].double() * 3 / channels if channels > 1 else kernel.double().sum(dim=1)
    tuned = finetune(data_path, tmp_path / "tuned", "--in_chans", channels, "--finetune", rgb_encoder, *FREEZE)
    out = capsys.readouterr().out
    flags = ["--in_chans", channels, "--pretrained", rgb_encoder, *FREEZE]
    again = pretrain(data_path, tmp_path / "again", *flags)
    out = [out, capsys.readouterr().out]
    for content, printed in zip((tuned, again), out, strict=True):
        ours = first_weights(content)
        assert f"patch_embed.proj.weight adapted from 3 channels to {channels}" in printed
        assert torch.equal(ours["patch_embed.proj.weight"], adapt_input_conv(channels, kernel))
        torch.testing.assert_close(ours["patch_embed.proj.weight"].double(), slow, rtol=1e-5, atol=1e-6)
        shared = ours.keys() & theirs.keys() - {"patch_embed.proj.weight", "decoder.pred.weight", "decoder.pred.bias"}
        assert len(shared) > 50 and all(torch.equal(ours[key], theirs[key]) for key in shared)
    assert any(key.startswith("decoder.blocks") for key in shared)
    assert "2 missing (decoder.pred.weight, decoder.pred.bias)" in out[1]


def test_first_weights_of_another_kind_of_encoder_are_refused(photos, rgb_encoder, tmp_path, capsys):
    model = contents(newest_checkpoint(rgb_encoder)[0])["model"]
    torch.save({"model": model | {"blocks.0.ls1.gamma": torch.ones(96)}}, tmp_path / "scaled.pth")
    message = pretrain.refused(capsys, photos, tmp_path / "out", "--pretrained", tmp_path / "scaled.pth", code=4)
    assert (
        "holds another kind of encoder" in message
        and "scaled.pth" in message
        and "has no blocks.0.ls1.gamma" in message
    )


def test_a_pre_training_remembers_its_first_weights(photos, rgb_encoder, tmp_path, capsys):
    """A resumed run does not read them again, and refuses others."""
    base = tmp_path / "base"
    base.mkdir()
    content = contents(newest_checkpoint(rgb_encoder)[0])
    path = save_checkpoint(base, 1, {"model": content["model"]}, content["meta"])
    other = save_checkpoint(tmp_path, 1, {"model": {**content["model"], "norm.bias": torch.ones(96)}}, content["meta"])
    flags = ["--pretrained", path]
    whole = pretrain(photos, tmp_path / "whole", *flags)
    assert whole["meta"]["encoder"]["path"] == str(path) and whole["meta"]["step"] == 12
    assert "0 missing" in capsys.readouterr().out
    pretrain(photos, tmp_path / "parts", *flags, "--max_steps", 5)
    message = pretrain.refused(capsys, photos, tmp_path / "parts", "--pretrained", other)
    assert str(path) in message and "choose another --output_dir" in message
    path.unlink()
    resumed = pretrain(photos, tmp_path / "parts", *flags)
    assert_same_state(resumed, whole)
    assert resumed["meta"]["encoder"] == whole["meta"]["encoder"]
    assert "does not exist" in pretrain.refused(capsys, photos, tmp_path / "new", *flags)


def test_first_weights_and_resume_exclude_each_other(photos, rgb_encoder, tmp_path, capsys, monkeypatch):
    """A run in a new folder that continues another run has the weights of that run."""
    begun = newest_checkpoint(rgb_encoder)[0]
    base = tmp_path / "base"
    base.mkdir()
    content = contents(begun)
    path = save_checkpoint(base, 1, {"model": {**content["model"], "norm.bias": torch.ones(96)}}, content["meta"])
    flags = ["--resume", begun, "--pretrained", path]
    with monkeypatch.context() as patch:
        patch.setattr(main_pretrain, "open_everywhere", lambda *_, **__: pytest.fail("the data is read"))
        message = pretrain.refused(capsys, photos, tmp_path / "new", *flags)
    expected = (
        f"error: --resume {str(begun)!r} holds a run of training from scratch, not of {str(path)!r}; --resume and "
    )
    assert expected in message
    assert message.endswith("--pretrained exclude each other unless the run began with that encoder: leave one out\n")
    pretrain(photos, tmp_path / "first", "--pretrained", path, "--max_steps", 5)
    flags = ["--resume", newest_checkpoint(tmp_path / "first")[0], "--pretrained", path]
    again = pretrain(photos, tmp_path / "again", *flags)  # the same weights are no contradiction
    assert_same_state(again, pretrain(photos, tmp_path / "first", "--pretrained", path))


@pytest.mark.parametrize("model", ["localmim_vit_micro_patch4", "mff_vit_micro_patch4", "crossmae_vit_micro_patch4"])
def test_another_framework_takes_the_encoder(photos, rgb_encoder, tmp_path, capsys, model):
    content = pretrain(photos, tmp_path / "out", "--pretrained", rgb_encoder, *FREEZE, "--model", model)
    theirs, ours = first_weights(contents(newest_checkpoint(rgb_encoder)[0])), first_weights(content)
    encoder_keys = [key for key in theirs if key.startswith(("blocks.", "patch_embed.", "cls_token", "pos_embed"))]
    assert len(encoder_keys) > 40 and all(torch.equal(ours[key], theirs[key]) for key in encoder_keys)
    again = pretrain(
        photos, tmp_path / "again", "--pretrained", tmp_path / "out", *FREEZE, "--seed", 7, "--model", model
    )
    assert all(torch.equal(value, ours[key]) for key, value in first_weights(again).items())


def test_weights_of_another_size_are_refused(photos, rgb_encoder, tmp_path, capsys):
    flags = ["--pretrained", rgb_encoder]
    message = pretrain.refused(capsys, photos, tmp_path / "out", *flags, "--model", "mae_vit_mini_patch4", code=4)
    assert "holds an encoder of width 96, this MaskedAutoencoderViT has width 192" in message
    message = pretrain.refused(capsys, photos, tmp_path / "out", *flags, "--patch_size", 8, code=4)
    assert "MaskedAutoencoderViT: patch_embed.proj.weight is [96, 3, 4, 4], the model's [96, 3, 8, 8]" in message


# ---------------------------------------------------------------------------------------------------------- rectangles


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    root = tmp_path_factory.mktemp("labelled")
    for split, count in (("train", 4), ("val", 3)):
        for label, name in enumerate("ab"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                write_photo(root / split / name / f"{i}.png", seed=100 * label + 10 * len(split) + i)
    return root


@pytest.mark.parametrize(
    ("framework", "model"),
    [
        ("mae_vit_micro_patch4", "vit_micro_patch4"),
        ("simmim_vit_micro_patch4", "relative_vit_micro_patch4"),
        ("amt_simmim_vit_micro_patch4", "absolute_vit_micro_patch4"),
        ("greenmim_swin_micro_patch4_window4", "swin_micro_patch4_window4"),
    ],
)
def test_rectangles_in_fine_tuning(labelled, tmp_path, capsys, framework, model):
    """The encoder of squares is resized; what the run logs is what an evaluation of its file finds."""
    few, width = ["--max_steps", 1], 64 if "swin" in model else 48  # windows of 4 must divide Swin's stages
    sampling = "--sampling attention --attention_start 0 --attention_every 1 --epochs 3" if "amt" in framework else ""
    pretrain(labelled, tmp_path / "encoder", *sampling.split(), *few, "--model", framework)
    flags = ["--finetune", tmp_path / "encoder", "--input_size", 32, width, *PLAIN]
    content = finetune(labelled, tmp_path / "out", *flags, "--model", model)
    assert content["meta"]["settings"]["input_size"] == [32, width]
    tables = {key: value.shape for key, value in content["model"].items() if key.endswith(("pos_embed", "bias_table"))}
    resized = {"vit": (1, 97, 96), "abs": (1, 97, 96), "rel": (15 * 23 + 3, 3), "swi": (7 * 7, 2)}[model[:3]]
    assert resized in tables.values()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert evaluate(labelled, tmp_path / "out")["loss"] == pytest.approx(results["last"]["val_loss"], rel=1e-5)
    assert evaluate(labelled, tmp_path / "out", "--input_size", 32, width)["num_images"] == 6
    message = refused(capsys, main_finetune.main, *evaluation(tmp_path / "out", labelled, "--input_size", 32))
    assert "--input_size 32, but the classifier at" in message and f"has [32, {width}]" in message


def test_squares_are_recorded_as_one_number(labelled, tmp_path, capsys):
    for size in ([], ["--input_size", 32], ["--input_size", 32, 32]):
        content = finetune(labelled, tmp_path / "out", *PLAIN, *size, "--max_steps", 1)  # a resume of the same run
        assert content["meta"]["settings"]["input_size"] == 32
    message = finetune.refused(capsys, labelled, tmp_path / "new", "--input_size", 32, 48, 64)
    assert "--input_size takes one or two numbers, got [32, 48, 64]" in message
    message = finetune.refused(capsys, labelled, tmp_path / "new", "--input_size", 32, 50)
    assert "img_size 32 x 50 is not divisible by --patch_size 4" in message
