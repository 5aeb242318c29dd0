"""Runs of the segmentation program: classes, BatchNorm, several processes, bad flags."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from downstream.segmentation import main_segmentation
from tests.downstream.bands import bands
from tests.downstream.dense import segment, segment_linear
from tests.downstream.segmentation.pairs import write_pairs
from tests.runs import reports, state
from util.run.files.reports import read_json
from util.run.files.search import read_sidecar
from util.run.start.resume import find_changes

SPLITS = ("training", "validation")


def test_evaluation_takes_the_names_of_the_run(striped, tmp_path):
    """The file of names may be gone."""
    names = tmp_path / "names.txt"
    names.write_text("sky\n1 2 3 tree\nsea\n")
    segment(striped, tmp_path / "run", "--class_names", names, "--num_iters", 2)
    names.unlink()
    assert set(segment.evaluate(striped, tmp_path / "run")["iou"]) == {"sky", "tree", "sea"}
    names.write_text("a\nb\nc\n")
    assert set(segment.evaluate(striped, tmp_path / "run", "--class_names", names)["iou"]) == {"a", "b", "c"}


def test_batch_norm_keeps_its_batch_on_resume(striped, tmp_path, capsys):
    """Two processes of half the micro-batch see the same images at once."""
    segment(striped, tmp_path, "--num_iters", 2, "--max_steps", 1)
    before = read_sidecar(tmp_path / "checkpoint-1.pth")
    message = segment.refused(capsys, striped, tmp_path, "--num_iters", 2, "--batch_size", 2)
    assert "--accum_iter was 1 and now is 2" in message
    now = replace(before, settings={**before.settings, "batch_size": 1})
    assert not find_changes(before, now, main_segmentation.get_args_parser().changes)


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ("--model vit_micro_patch4", 96),
        ("--model vit_small_patch16", 384),
        ("", 768),
        ("--model vit_huge_patch14", 768),
        ("--model vit_micro_patch4 --decoder_channels 8", 8),
        ("--recipe ade20k_upernet_vit_base", 768),
    ],
)
def test_the_decoder_is_as_wide_as_the_encoder_up_to_that_of_the_recipes(flags, width):
    _, args = main_segmentation.parse_args(flags.split())
    assert args.decoder_channels == width


def test_no_picture_is_drawn_if_none_is_asked_for(striped, tmp_path):
    segment(striped, tmp_path, "--num_iters", 2, "--num_pictures", 0)
    assert not (tmp_path / "predictions.png").exists()


@pytest.mark.parametrize(("split", "name"), [("training", "train"), ("validation", "val")])
def test_a_split_without_labelled_pixels_is_refused(tmp_path, capsys, split, name):
    root = write_pairs(tmp_path / "data", 5, split, values=(255,))
    for other in SPLITS:
        if other != split:
            write_pairs(root, 5, other, values=(0, 1))
    message = segment.refused(capsys, root, tmp_path / "out")
    assert f"no labelled pixel in the {name} split: check its label files, --ignore_index and" in message
    assert not list(tmp_path.rglob("checkpoint*"))


@pytest.mark.parametrize(("split", "name"), [("training", "train"), ("validation", "val")])
def test_masks_of_0_and_255_are_refused_unless_one_class_is_allowed(tmp_path, capsys, split, name):
    """255 is ignored, so a model that knows one class would have a mIoU of 100 %."""
    root = write_pairs(tmp_path / "data", 5, split, values=(0, 255))
    for other in SPLITS:
        if other != split:
            write_pairs(root, 5, other, values=(0, 1))
    short = segment.also("--num_classes 2 --num_iters 2")
    message = short.refused(capsys, root, tmp_path / "out")
    assert f"one of 2 classes was found in 5 label files of the {name} split" in message
    assert not list(tmp_path.rglob("checkpoint*"))
    short(root, tmp_path / "out", "--allow_one_class")
    assert f"{name} labels of 5 files: 1 of 2 classes found" in (tmp_path / "out" / "log.txt").read_text()


def replace_photographs(root, split, array_of):
    """Replaces the photographs of a split by arrays, `array_of(number, size)`. Returns the arrays."""
    arrays = []
    for path in sorted((root / "images" / split).glob("*.jpg")):
        array = array_of(int(path.stem), Image.open(path).size)
        np.save(path.with_suffix(".npy"), array)
        path.unlink()
        arrays.append(array)
    return arrays


def test_a_run_from_scratch_measures_the_images_without_their_labels(tmp_path):
    """Values of images with labels as a further channel could be cut into pixels, too."""
    root = tmp_path / "data"
    for split in SPLITS:
        write_pairs(root, 4, split, size=(40, 40))
    arrays = replace_photographs(root, "training", lambda i, size: bands(i, "uint16", size))
    replace_photographs(root, "validation", lambda i, size: bands(i, "uint16", size))
    segment(root, tmp_path / "run", "--in_chans", 5, "--num_iters", 2, "--warmup_iters", 0)
    settings = read_json(tmp_path / "run" / "settings.json")
    values = np.stack(arrays).reshape(-1, 5).astype(np.float64) / 65535
    np.testing.assert_allclose(settings["mean"], values.mean(axis=0))
    np.testing.assert_allclose(settings["std"], values.std(axis=0))


def test_some_training_images_may_be_unreadable(tmp_path, capsys):
    root = tmp_path / "data"
    for split in SPLITS:
        write_pairs(root, 5, split)
    (root / "images/training/1.jpg").write_bytes(b"no image")
    short = segment.also("--num_iters 2")
    assert "1 of 5 checked pairs are bad" in short.refused(capsys, root, tmp_path / "out")
    short(root, tmp_path / "out", "--max_bad_fraction", 0.3)
    assert reports(tmp_path / "out")[-1]["val_num_images"] == 5
    (root / "images/validation/1.jpg").write_bytes(b"no image")
    message = short.refused(capsys, root, tmp_path / "other", "--max_bad_fraction", 0.3)
    assert "1 of 5 checked pairs are bad" in message


def test_two_processes_train_and_count_as_one(striped, encoder, tmp_path):
    """The linear head has BatchNorm and no dropout. Six validation images; the loss counts labelled pixels."""
    segment_linear.in_two_processes(*segment_linear.command(striped, tmp_path / "two", "--finetune", encoder))
    segment_linear(striped, tmp_path / "one", "--finetune", encoder)
    for ours, theirs in zip(reports(tmp_path / "two"), reports(tmp_path / "one"), strict=True):
        for name in ("step", "val_num_images", "loss", "grad_norm", "val_miou", "val_aacc"):
            assert (name in ours) == (name in theirs)
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    for folder in ("one", "two"):
        assert "train labels of 9 files: 3 of 3 classes found" in (tmp_path / folder / "log.txt").read_text()
    one = state(tmp_path / "one")["model"]
    two = state(tmp_path / "two")["model"]
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


def write_halves(root, split):
    """Left and right halves of noise of two textures. Pixels of a third value are ignored."""
    rng = np.random.default_rng(0)
    for kind in ("images", "annotations"):
        (root / kind / split).mkdir(parents=True)
    for i in range(4):
        labels = np.zeros((16, 16), np.uint8)
        labels[:, 3 + 3 * i :] = 1
        img = np.where(labels[..., None] == 1, 150, 60) + rng.integers(-40, 40, (16, 16, 3))
        labels[:2] = 255
        Image.fromarray(img.astype(np.uint8)).save(root / "images" / split / f"{i}.png")
        Image.fromarray(labels).save(root / "annotations" / split / f"{i}.png")


def test_four_images_are_learned_by_heart(tmp_path):
    root = tmp_path / "data"
    for split in SPLITS:
        write_halves(root, split)
    flags = "--num_classes 2 --image_scale 16 16 --ratio_range 1 1 --lr 5e-3 --layer_decay 1 --num_iters 60"
    flags += " --eval_every 60 --no-photometric --print_freq 10"
    segment(root, tmp_path / "out", *flags.split())
    assert reports(tmp_path / "out")[-1]["val_miou"] > 90


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--head linear --layer_decay 1", "--head linear has no use for --decoder_channels, --layer_decay: "),
        ("--recipe ade20k_upernet_vit_base --head linear", "not go with --head linear, which has recipes of its own"),
        ("--stride 17", "--stride 17 must be at most --input_size 16"),
        (
            "--input_size 18",
            "--input_size 18 x 18 is not divisible by --patch_size 4; the nearest size that is: 16 x 16",
        ),
        ("--input_size 4 --stride 4", "at least 2 x 2 patches, got 1 x 1: raise --input_size"),
        ("--ratio_range 2 1", "--ratio_range must be two factors 0 < low <= high, got [2.0, 1.0]"),
        ("--cat_max_ratio 0", "--cat_max_ratio must lie in (0, 1], got 0.0"),
        ("--image_scale 24 64", "--image_scale must be two sides, the longer one first, got [24, 64]"),
        ("--total_batch_size 1", "UPerNet's BatchNorm needs more than one image per micro-batch"),
    ],
)
def test_bad_flags_are_refused_before_training(striped, tmp_path, capsys, flags, message):
    assert message in segment.refused(capsys, striped, tmp_path / "out", *flags.split())
    assert not list(tmp_path.rglob("checkpoint*"))


def test_a_frozen_encoder_must_be_pre_trained(striped, tmp_path, capsys):
    assert "--head linear needs --finetune" in segment_linear.refused(capsys, striped, tmp_path)
