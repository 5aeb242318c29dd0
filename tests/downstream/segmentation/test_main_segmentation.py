"""Runs of the segmentation program: names of classes, several processes, damaged images, bad flags."""

import numpy as np
import pytest
import torch
from PIL import Image

from scripts import predict
from tests.downstream.bands import bands, replace_images
from tests.downstream.dense import segment, segment_linear
from tests.downstream.segmentation.pairs import write_pairs
from tests.runs import assert_same_state, reports, state
from util.run.files.json_files import read_json

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


def test_a_run_from_scratch_measures_the_images_without_their_labels(tmp_path):
    """Values of images with labels as a further channel could be cut into pixels, too."""
    root = tmp_path / "data"
    for split in SPLITS:
        write_pairs(root, 4, split, size=(40, 40))
    replace_images(root, lambda number, size: bands(number, "uint16", size))
    segment(root, tmp_path / "run", "--in_chans", 5, "--num_iters", 2, "--warmup_iters", 0)
    settings = read_json(tmp_path / "run" / "settings.json")
    arrays = [np.load(path) for path in sorted((root / "images" / "training").iterdir())]
    values = np.stack(arrays).reshape(-1, 5).astype(np.float64) / 65535
    np.testing.assert_allclose(settings["mean"], values.mean(axis=0))
    np.testing.assert_allclose(settings["std"], values.std(axis=0))


def test_label_values_equal_rewritten_files(tmp_path):
    """In a training, its evaluation and its predictions, which have the values of the label files."""
    values = {"listed": (30, 255, 10, 99), "rewritten": (0, 1, 2, 255)}
    flags = {"listed": ["--label_values", 30, 255, 10, "--ignore_index", 99], "rewritten": []}
    short = segment.also("--num_iters 3")
    scores = {}
    for name in values:
        root = tmp_path / name
        for split in SPLITS:
            write_pairs(root / "data", 4, split, values=values[name])
        short(root / "data", root / "run", *flags[name])
        scores[name] = segment.evaluate(root / "data", root / "run")
        images = root / "data" / "images" / "validation"
        words = [root / "run", images, "--output_dir", root / "maps", "--device", "cpu", "--num_workers", 0]
        predict.main([str(word) for word in words])
    assert scores["listed"] == scores["rewritten"]
    assert_same_state(state(tmp_path / "listed" / "run"), state(tmp_path / "rewritten" / "run"))
    table = np.array(values["listed"][:3])
    for path in sorted((tmp_path / "rewritten" / "maps" / "labels").iterdir()):
        expected = table[np.array(Image.open(path))]
        found = np.array(Image.open(tmp_path / "listed" / "maps" / "labels" / path.name))
        assert np.array_equal(found, expected)
    record = read_json(tmp_path / "listed" / "maps" / "predict.json")
    assert record["classes"] == {"30": "0", "255": "1", "10": "2"}


def test_some_training_images_may_be_unreadable(tmp_path, capsys):
    root = tmp_path / "data"
    for split in SPLITS:
        write_pairs(root, 5, split)
    (root / "images/training/1.jpg").write_bytes(b"no image")
    short = segment.also("--num_iters 2 --num_pictures 0")
    assert "1.jpg" in short.refused(capsys, root, tmp_path / "out")
    short(root, tmp_path / "out", "--max_bad_fraction", 0.3)
    assert not (tmp_path / "out" / "predictions.png").exists()
    (root / "images/validation/1.jpg").write_bytes(b"no image")
    assert "1.jpg" in short.refused(capsys, root, tmp_path / "other", "--max_bad_fraction", 0.3)


def test_two_processes_train_and_count_as_one(striped, encoder, tmp_path):
    """The linear head has BatchNorm and no dropout. Six validation images; the loss counts labelled pixels."""
    segment_linear.in_two_processes(*segment_linear.command(striped, tmp_path / "two", "--finetune", encoder))
    segment_linear(striped, tmp_path / "one", "--finetune", encoder)
    for ours, theirs in zip(reports(tmp_path / "two"), reports(tmp_path / "one"), strict=True):
        for name in ("step", "val_num_images", "loss", "grad_norm", "val_miou", "val_aacc"):
            assert (name in ours) == (name in theirs)
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    one = state(tmp_path / "one")["model"]
    two = state(tmp_path / "two")["model"]
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        "--layer_decay 1 --head linear",
        "--head linear --recipe ade20k_upernet_vit_base",
        "--stride 17",
        "--input_size 18",
        "--cat_max_ratio 0",
        "--image_scale 24 64",
        "--batch_size 1 --total_batch_size 1",
        "--num_classes 300",
        "--class_names nowhere",
    ],
)
def test_bad_flags_are_refused_before_training(striped, tmp_path, capsys, flags):
    message = segment.refused(capsys, striped, tmp_path / "out", *flags.split())
    assert flags.split()[0].strip("-") in message
    assert not list(tmp_path.rglob("checkpoint*"))


def test_a_frozen_encoder_must_be_pre_trained(striped, tmp_path, capsys):
    assert "--finetune" in segment_linear.refused(capsys, striped, tmp_path)
