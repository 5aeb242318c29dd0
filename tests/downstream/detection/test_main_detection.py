"""Runs of the detection program: categories, masks, several processes, boxes alone, bad input."""

import json

import pytest
import torch

from downstream.detection.main_detection import SPLITS
from tests.downstream.dense import detect
from tests.downstream.detection.coco import write_coco
from tests.runs import reports, state
from util.evaluate.results import RESULTS
from util.run.files.json_files import read_json

pytest.importorskip("faster_coco_eval")


def test_boxes_and_masks_have_scores(shapes, detected):
    results = read_json(detected / RESULTS)
    last = results["last"]
    assert {"val_box_ap_small", "val_box_ap50", "val_mask_ap", "val_mask_ap75"} <= last.keys()
    for kind in ("box", "mask"):
        of_classes = results["details"][f"{kind}_ap_of_classes"]
        assert list(of_classes) == ["wedge", "bar"]
        assert last[f"val_{kind}_ap"] == pytest.approx(sum(of_classes.values()) / 2)
    settings = state(detected)["meta"]["settings"]
    assert settings["categories"] == [[3, "wedge"], [7, "bar"]]
    of_boxes = detect.evaluate(shapes, detected, "--no-masks")
    assert not any("mask" in name for name in of_boxes)


def test_two_processes_train_as_one_that_accumulates(shapes, tmp_path):
    """Micro-batches of two images, with the same sampled boxes and drop path. Each validation image counts once."""
    flags = ["--num_iters", "3", "--eval_every", "3", "--drop_path", "0.3"]
    detect.in_two_processes(*detect.command(shapes, tmp_path / "two", *flags))
    detect(shapes, tmp_path / "one", *flags, "--batch_size", 2)
    for ours, theirs in zip(reports(tmp_path / "two"), reports(tmp_path / "one"), strict=True):
        for name in ("step", "loss", "loss_box", "loss_mask", "grad_norm", "val_num_images", "val_box_ap"):
            assert (name in ours) == (name in theirs)
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    one = state(tmp_path / "one")["model"]
    two = state(tmp_path / "two")["model"]
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


def test_four_images_are_learned_by_heart(tmp_path):
    """AP of 4 % without training. With 100 iterations it is 57 % and more, with rounding that differs by CPU."""
    root = write_coco(tmp_path / "data", "train", 4, size=(32, 32))
    write_coco(root, "val", 4, size=(32, 32))
    flags = "--scale_range 1 1 --lr 2e-3 --layer_decay 1 --decoder_channels 24 --drop_path 0 --warmup_iters 10"
    flags += " --num_iters 40 --eval_every 40 --print_freq 20 --num_pictures 0"
    detect(root, tmp_path / "out", *flags.split())
    losses = [report["loss"] for report in reports(tmp_path / "out") if "loss" in report]
    assert losses[-1] < 0.6 * losses[0]
    assert read_json(tmp_path / "out" / RESULTS)["last"]["val_box_ap50"] > 10


def test_boxes_alone_give_faster_rcnn(tmp_path, capsys):
    root = write_coco(tmp_path / "data", "train", 4, masks=False)
    write_coco(root, "val", 2, masks=False)
    content = detect(root, tmp_path / "out", "--num_iters", 2)
    assert content["meta"]["settings"]["masks"] is False
    assert not any("mask" in name for name in content["model"])
    last = read_json(tmp_path / "out" / RESULTS)["last"]
    assert "val_box_ap" in last
    assert "val_mask_ap" not in last
    assert "--no-masks" in detect.refused(capsys, root, tmp_path / "other", "--masks")
    assert "--masks" in detect.refuses_to_evaluate(capsys, root, tmp_path / "out", "--masks")


def test_masks_need_segmentations_of_all_objects(shapes, tmp_path, capsys):
    def remove(content):
        del content["annotations"][0]["segmentation"]

    root = write_coco(tmp_path / "data", "train", 4, edit=remove)
    write_coco(root, "val", 2, edit=remove)
    assert "--no-masks" in detect.refused(capsys, root, tmp_path / "out")
    flags = ["--train_json", shapes / SPLITS["train"][0], "--train_images", shapes / "train2017"]
    assert "--no-masks" in detect.refused(capsys, root, tmp_path / "out", *flags)
    detect(root, tmp_path / "out", "--num_iters", 2, "--no-masks")
    assert "val_mask_ap" not in read_json(tmp_path / "out" / RESULTS)["last"]


def test_other_categories_are_refused(detected, encoder, tmp_path, capsys):
    def rename(content):
        content["categories"] = [{"id": 7, "name": "bar"}, {"id": 3, "name": "cone"}]

    root = write_coco(tmp_path / "other", "val", 5, edit=rename)
    assert "3 cone" in detect.refuses_to_evaluate(capsys, root, detected)
    write_coco(root, "train", 9)
    assert "3 cone" in detect.refused(capsys, root, tmp_path / "new")
    flags = ["--train_json", root / SPLITS["val"][0], "--train_images", root / "val2017", "--allow_changes"]
    assert "3 cone" in detect.refused(capsys, root, detected, "--finetune", encoder, "--drop_path", 0.3, *flags)


def test_a_damaged_model_has_no_scores(shapes, detected, tmp_path, capsys):
    content = state(detected)
    content["model"]["pyramid.stages.0.0.bias"].fill_(3e38)
    content["meta"] = json.dumps(content["meta"])
    torch.save(content, tmp_path / "bad.pth")
    detect.refuses_to_evaluate(capsys, shapes, tmp_path / "bad.pth", code=3)


@pytest.mark.parametrize(
    "flags",
    [
        "--input_size 40",
        "--max_bad_fraction 0.1",
        "--lr_drops 0.5 2",
        "--data_path nowhere",
    ],
)
def test_bad_flags_are_refused_before_training(shapes, tmp_path, capsys, flags):
    flag, *values = flags.split()
    message = detect.refused(capsys, shapes, tmp_path / "out", flag, *values)
    assert flag in message or values[0] in message
    assert not list(tmp_path.rglob("checkpoint*"))
