"""Runs of the segmentation program: classes, BatchNorm, several processes, published files, bad flags, the demo."""

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

import main_pretrain
from downstream.segmentation import demo, main_segmentation
from downstream.segmentation.models import UPerNet
from downstream.segmentation.released import infer_settings
from models_vit import MICRO
from tests.downstream.bands import bands
from tests.downstream.dense import segment, segment_linear
from tests.downstream.segmentation.pairs import write_pairs
from tests.downstream.segmentation.test_models import randomise
from tests.runs import reports, state
from util.evaluate.results import RESULTS
from util.run.checkpoint import read_sidecar
from util.run.folder import read_json
from util.run.resume import find_changes


def test_each_class_has_its_scores(striped, segmented):
    results = read_json(segmented / RESULTS)
    iou = [value for value in results["details"]["iou"].values() if value is not None]
    assert results["last"]["val_miou"] == pytest.approx(np.mean(iou))
    assert segment.evaluate(striped, segmented)["iou"] == results["details"]["iou"]
    assert "; 12 missing (" in (segmented / "log.txt").read_text()  # of each block a bias table and two scales


def test_evaluation_takes_the_names_of_the_run(striped, tmp_path):
    """The file of names may be gone."""
    names = tmp_path / "names.txt"
    names.write_text("sky\n1 2 3 tree\nsea\n")
    meta = segment(striped, tmp_path / "run", "--class_names", names, "--num_iters", 2)["meta"]
    assert meta["classes"] == ["sky", "tree", "sea"] and meta["class_colors"][1] == [1, 2, 3]
    names.unlink()
    assert set(segment.evaluate(striped, tmp_path / "run")["iou"]) == {"sky", "tree", "sea"}
    names.write_text("a\nb\nc\n")
    assert set(segment.evaluate(striped, tmp_path / "run", "--class_names", names)["acc"]) == {"a", "b", "c"}


def test_batch_norm_keeps_its_batch_on_resume(striped, tmp_path, capsys):
    segment(striped, tmp_path, "--num_iters", 2, "--max_steps", 1)
    flags = ["--num_iters", 2, "--batch_size", 2]
    assert "--accum_iter was 1 and now is 2" in segment.refused(capsys, striped, tmp_path, *flags)
    segment(striped, tmp_path, *flags, "--allow_changes", "--num_pictures", 0)
    before = read_sidecar(tmp_path / "checkpoint-2.pth")
    assert "  pictures  " not in capsys.readouterr().out and not (tmp_path / "predictions.png").exists()
    # Two processes of half the micro-batch see the same images at once.
    now = replace(before, settings=before.settings | {"batch_size": 1})
    assert not find_changes(before, now, main_segmentation.get_args_parser().changes)


@pytest.mark.parametrize(("split", "name"), [("training", "train"), ("validation", "val")])
def test_a_split_without_labelled_pixels_is_refused(tmp_path, capsys, split, name):
    for other in ("training", "validation"):
        write_pairs(tmp_path / "data", 5, other, values=(255,) if other == split else (0, 1))
    message = segment.refused(capsys, tmp_path / "data", tmp_path / "out")
    assert f"no labelled pixel in the {name} split: check its label files, --ignore_index and" in message
    assert not list(tmp_path.rglob("checkpoint*"))


def replace_photographs(root, split, array_of):
    """Replaces the photographs of a split by arrays, `array_of(number, size)`. Returns the arrays."""
    arrays = []
    for path in sorted((root / "images" / split).glob("*.jpg")):
        arrays.append(array_of(int(path.stem), Image.open(path).size))
        np.save(path.with_suffix(".npy"), arrays[-1])
        path.unlink()
    return arrays


@pytest.mark.parametrize(("channels", "size"), [(1, (40, 30)), (5, (40, 40)), (5, (64, 64))])
def test_a_run_from_scratch_measures_the_images_without_their_labels(tmp_path, capsys, channels, size):
    """As many values as images with labels as a further channel would be cut into whole pixels, too, or not at all."""
    root = tmp_path / "data"
    for split in ("training", "validation"):
        write_pairs(root, 4, split, size=size)
        arrays = replace_photographs(root, split, lambda i, size: bands(i, "uint16", size)[..., -channels:])
    flags = f"--model mae_vit_nano_patch4 --in_chans {channels} --input_size 16 --batch_size 4 --epochs 1 "
    flags += "--warmup_epochs 0 --num_workers 0 --device cpu --picture_every 0"
    main_pretrain.main([*flags.split(), "--data_path", str(root / "images"), "--output_dir", str(tmp_path / "mae")])
    (expected,) = re.findall("pixel mean .*: measured on .*", capsys.readouterr().out)
    segment(root, tmp_path / "run", "--in_chans", channels, "--num_iters", 2, "--warmup_iters", 0)
    (found,) = re.findall("pixel mean .*: measured on .*", capsys.readouterr().out)
    assert found == expected
    values = np.concatenate([array.reshape(-1, channels) for array in arrays]).astype(np.float64) / 65535
    settings = read_json(tmp_path / "run" / "settings.json")
    np.testing.assert_allclose([settings["mean"], settings["std"]], [values.mean(axis=0), values.std(axis=0)])


def test_some_training_images_may_be_unreadable(tmp_path, capsys):
    for split in ("training", "validation"):
        write_pairs(tmp_path / "data", 5, split)
    (tmp_path / "data/images/training/1.jpg").write_bytes(b"no image")
    small = segment.also("--num_iters 2")
    assert "1 of 5 checked pairs are bad" in small.refused(capsys, tmp_path / "data", tmp_path / "out")
    small(tmp_path / "data", tmp_path / "out", "--max_bad_fraction", 0.3)
    assert reports(tmp_path / "out")[-1]["val_num_images"] == 5
    (tmp_path / "data/images/validation/1.jpg").write_bytes(b"no image")
    message = small.refused(capsys, tmp_path / "data", tmp_path / "other", "--max_bad_fraction", 0.3)
    assert "1 of 5 checked pairs are bad" in message


def test_two_processes_train_and_count_as_one(striped, encoder, tmp_path):
    """The linear head has BatchNorm and no dropout. Six validation images; the loss counts labelled pixels."""
    segment_linear.in_two_processes(*segment_linear.command(striped, tmp_path / "two", "--finetune", encoder))
    segment_linear(striped, tmp_path / "one", "--finetune", encoder)
    for a, b in zip(reports(tmp_path / "two"), reports(tmp_path / "one"), strict=True):
        assert (a["step"], a.get("val_num_images")) == (b["step"], b.get("val_num_images"))
        for name in ("loss", "grad_norm", "val_miou", "val_aacc"):
            assert a.get(name) == (pytest.approx(b[name], rel=1e-4) if name in b else None), name
    one, two = (state(tmp_path / name)["model"] for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


def test_four_images_are_learned_by_heart(tmp_path):
    """Left and right halves of noise of two textures. Pixels of a third value are ignored."""
    root, rng = tmp_path / "data", np.random.default_rng(0)
    for split in ("training", "validation"):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for i in range(4):
            labels = np.zeros((16, 16), np.uint8)
            labels[:, 3 + 3 * i :] = 1
            img = np.where(labels[..., None] == 1, 150, 60) + rng.integers(-40, 40, (16, 16, 3))
            labels[:2] = 255
            Image.fromarray(img.astype(np.uint8)).save(root / "images" / split / f"{i}.png")
            Image.fromarray(labels).save(root / "annotations" / split / f"{i}.png")
    flags = ["--num_classes", 2, "--image_scale", 16, 16, "--ratio_range", 1, 1, "--lr", "5e-3", "--layer_decay", 1]
    flags += ["--num_iters", 60, "--eval_every", 60, "--no-photometric", "--print_freq", 10]
    segment(root, tmp_path / "out", *flags)
    assert reports(tmp_path / "out")[-1]["val_miou"] > 90


@pytest.mark.parametrize("channels", [1, 5])
def test_other_channels_from_an_rgb_encoder(tmp_path, encoder, channels):
    root = tmp_path / "data"
    for split in ("training", "validation"):
        write_pairs(root, 4, split)
        for path in (root / "images" / split).glob("*.jpg"):
            array = np.random.default_rng(0).integers(0, 256, (30, 40, channels), dtype=np.uint8)
            np.save(path.with_suffix(".npy"), array)
            path.unlink()
    content = segment(root, tmp_path / "out", "--in_chans", channels, "--finetune", encoder, "--num_iters", 2)
    assert content["model"]["backbone.patch_embed.proj.weight"].shape[1] == channels
    assert segment.evaluate(root, tmp_path / "out")["miou"] == read_json(tmp_path / "out" / RESULTS)["last"]["val_miou"]


# --------------------------------------------------------------------------------------------------- published files


def mmsegmentation_keys(name):
    """The published name of one of our keys, from the pieces of the name."""
    parts = name.split(".")
    if parts[:2] == ["backbone", "blocks"]:
        rest = ".".join(parts[3:])
        for ours, theirs in (("norm", "ln"), ("mlp.fc1", "ffn.layers.0.0"), ("mlp.fc2", "ffn.layers.1")):
            if rest.startswith(ours):
                rest = theirs + rest.removeprefix(ours)
        return f"backbone.layers.{parts[2]}.{rest}"
    return name.replace("patch_embed.proj", "patch_embed.projection")


def published_head(num_classes):
    """Classifiers of another number of classes for the model below."""
    return {
        f"{head}.conv_seg.{part}": torch.randn(num_classes, *([8, 1, 1] if part == "weight" else []))
        for head in ("decode_head", "auxiliary_head")
        for part in ("weight", "bias")
    }


def test_a_published_upernet_is_evaluated(striped, tmp_path, capsys):
    """Under mmsegmentation's names, with a bias of keys. Its scores are those of the same model in our names."""
    torch.manual_seed(0)
    model = randomise(UPerNet(3, 8, **{**MICRO, "img_size": 16}))
    model.decode_head.conv_seg.bias.data.zero_()
    weights = {mmsegmentation_keys(name): value for name, value in model.state_dict().items()}
    for i in range(4):
        q, v = (weights.pop(f"backbone.layers.{i}.attn.{part}_bias") for part in "qv")
        weights[f"backbone.layers.{i}.attn.qkv.bias"] = torch.cat([q, torch.randn_like(q), v])
        weights[f"backbone.layers.{i}.attn.relative_position_index"] = torch.zeros(17, 17, dtype=torch.long)
    published = {"meta": {"mmseg_version": "0.24", "CLASSES": ("a", "b", "c")}, "state_dict": weights}
    torch.save(published, tmp_path / "p.pth")
    flags = ["--image_scale", 64, 24, "--stride", 10]
    theirs = segment.evaluate(striped, tmp_path / "p.pth", *flags)
    settings = infer_settings(model.state_dict(), "w")
    expected = {"head": "upernet", "model": "vit_micro_patch4", "input_size": 16, "patch_size": 4}
    assert settings == expected | {"in_chans": 3, "decoder_channels": 8, "num_classes": 3}
    meta = {"settings": settings | {"image_scale": [64, 24], "stride": 10}}
    torch.save({"model": model.state_dict(), "meta": json.dumps(meta)}, tmp_path / "ours.pth")
    ours = segment.evaluate(striped, tmp_path / "ours.pth")
    assert ours == theirs and sum(value > 0 for value in ours["acc"].values()) > 1
    torch.save({"state_dict": weights | published_head(150)}, tmp_path / "ade.pth")
    message = segment.refuses_to_evaluate(capsys, striped, tmp_path / "ade.pth", *flags)
    assert "begin at 1: give --recipe ade20k_upernet_vit_base or --reduce_zero_label" in message
    found = segment.evaluate(striped, tmp_path / "ade.pth", *flags, "--no-reduce_zero_label")
    assert found["num_images"] == 6
    del weights["decode_head.fpn_convs.1.bn.running_var"]
    torch.save({"state_dict": weights}, tmp_path / "p.pth")
    message = segment.refuses_to_evaluate(capsys, striped, tmp_path / "p.pth", *flags, code=4)
    assert "do not fit this UPerNet: 1 missing: decode_head.fpn_convs.1.bn.running_var" in message


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.fault("U81", "flags of a dense task that cannot work", "exit code 2, with the value and what is right")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num_classes 2", "it holds the values 2; 0 to 1 are classes, 255 is ignored"),
        ("--num_classes 255 --reduce_zero_label", "takes the values 1 to 255"),
        (
            "--head linear --layer_decay 1",
            "--head linear has no use for --decoder_channels, --layer_decay: ",
        ),
        ("--recipe ade20k_upernet_vit_base --head linear", "not go with --head linear, which has recipes of its own"),
        ("--stride 17", "--stride 17 must be at most --input_size 16"),
        ("--input_size 18", "img_size 18 x 18 is not divisible by --patch_size 4; the nearest size that is: 16 x 16"),
        ("--input_size 4 --stride 4", "at least 2 x 2 patches, got 1 x 1: raise --input_size"),
        ("--ratio_range 2 1", "--ratio_range must be two factors 0 < low <= high, got [2.0, 1.0]"),
        ("--cat_max_ratio 0", "--cat_max_ratio must lie in (0, 1], got 0.0"),
        ("--image_scale 24 64", "--image_scale must be two sides, the longer one first, got [24, 64]"),
        ("--in_chans 4", "has 3 channels of uint8, but the model takes 4 channels"),
        ("--mean 0.5", "--mean must have a value for each of 3 channels, got [0.5]"),
        ("--std 1 1 0", "--std must be positive, got [1.0, 1.0, 0.0]"),
        ("--mean 123.7 116.3 103.5", "a fraction of their full range, got [123.7, 116.3, 103.5]: divide by 255"),
        ("--std 58.4 57.1 57.4", "a fraction of their full range, got [58.4, 57.1, 57.4]: divide by 255"),
        ("--total_batch_size 1", "UPerNet's BatchNorm needs more than one image per micro-batch"),
        ("--class_names none.txt", "--class_names 'none.txt' does not exist"),
        ("--data_path nowhere", "has no folder of the split 'train'"),
    ],
)
def test_bad_flags_are_refused_before_training(striped, tmp_path, capsys, flags, message):
    assert message in segment.refused(capsys, striped, tmp_path / "out", *flags.split())
    assert not list(tmp_path.rglob("checkpoint*"))


def test_a_frozen_encoder_must_be_pre_trained(striped, tmp_path, capsys):
    assert "--head linear needs --finetune" in segment_linear.refused(capsys, striped, tmp_path)


def test_a_model_keeps_its_classes(striped, segmented, capsys):
    message = segment.refuses_to_evaluate(capsys, striped, segmented, "--num_classes", 5)
    assert "--num_classes 5, but the model at" in message and "has 3: leave it out" in message


# ------------------------------------------------------------------------------------------------------ demonstration


def test_the_demonstration_writes_what_it_says(tmp_path, capsys, monkeypatch):
    pytest.importorskip("skimage")
    monkeypatch.setattr(demo, "write_mosaics", partial(demo.write_mosaics, num_train=40, num_val=8))
    demo.main([str(tmp_path), "--num_iters", "20"])
    out = capsys.readouterr().out
    assert re.search(r"baseline +most frequent class: mIoU \d+\.\d\d %\n", out) and "this run" in out
    photos = demo.read_photos(demo.PHOTOS)
    train, val = (demo.make_mosaic(photos, s, np.random.default_rng(0)) for s in ("training", "validation"))
    assert set(np.unique(train[1])) <= set(range(6)) and 3 <= len(np.unique(train[1])) <= 5
    assert not np.array_equal(train[0], val[0]) and np.array_equal(train[1], val[1])
    scores = {name: row["miou"] for name, row in demo.baselines(tmp_path / "data").items()}
    assert all(0 < miou < 40 for miou in scores.values())
    results = read_json(tmp_path / "run" / RESULTS)
    assert results["last"]["val_miou"] > scores["most frequent class"] and "brick" in results["details"]["iou"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_demonstration_beats_its_baselines(tmp_path):
    pytest.importorskip("skimage")
    assert demo.main([str(tmp_path)])
    scores = demo.baselines(tmp_path / "data")
    assert set(scores) == {"most frequent class", "nearest mean colour"}
    assert read_json(tmp_path / "run" / RESULTS)["last"]["val_miou"] > 2 * max(row["miou"] for row in scores.values())
