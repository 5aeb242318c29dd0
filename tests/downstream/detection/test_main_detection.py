"""Runs of the detection program: categories, masks, several processes, boxes alone, bad input."""

import json
from dataclasses import replace

import pytest
import torch

from downstream.detection import main_detection
from downstream.detection.backbone import DecomposedAttention
from downstream.detection.main_detection import SPLITS
from downstream.detection.models import Detector
from tests.downstream.dense import detect
from tests.downstream.detection.coco import write_coco
from tests.runs import assert_same_state, reports, state
from util.evaluate.results import RESULTS
from util.run.files.reports import read_json
from util.run.files.search import read_sidecar
from util.run.start.resume import find_changes

pytest.importorskip("faster_coco_eval")


def test_boxes_and_masks_have_scores(shapes, detected):
    last = read_json(detected / RESULTS)["last"]
    assert {"val_box_ap_small", "val_box_ap50", "val_mask_ap", "val_mask_ap75"} <= last.keys()
    settings = state(detected)["meta"]["settings"]
    assert settings["categories"] == [[3, "wedge"], [7, "bar"]]
    of_boxes = detect.evaluate(shapes, detected, "--no-masks")
    assert not any("mask" in name for name in of_boxes)


def test_a_micro_batch_keeps_its_size_on_resume(shapes, tmp_path, capsys):
    """Losses are averaged over its boxes. The number of processes may change, which the default follows."""
    short = detect.also("--num_iters 2 --num_pictures 0")
    short(shapes, tmp_path, "--max_steps", 1)
    before = read_sidecar(tmp_path / "checkpoint-1.pth")
    for flags in (("--batch_size", 2), ("--accum_iter", 2)):
        assert "--batch_size was 4 and now is 2" in short.refused(capsys, shapes, tmp_path, *flags)
    settings = {**before.settings, "accum_iter": 2}
    run = replace(before.run, world_size=2)
    now = replace(before, settings=settings, run=run)
    assert not find_changes(before, now, main_detection.get_args_parser().changes)


def test_recomputed_activations_change_nothing(shapes, tmp_path, monkeypatch):
    """The four blocks of two steps run again in the backward pass."""
    attend = DecomposedAttention.forward
    calls = []

    def count(self, x):
        calls.append(1)
        return attend(self, x)

    monkeypatch.setattr(DecomposedAttention, "forward", count)
    flags = ("--num_iters", 2, "--num_pictures", 0)
    plain = detect(shapes, tmp_path / "plain", *flags)
    num_plain = len(calls)
    recomputed = detect(shapes, tmp_path / "recomputed", *flags, "--recompute")
    assert_same_state(plain, recomputed)
    assert len(calls) - num_plain == num_plain + 2 * 4


def test_padded_pixels_are_zeros_wherever_the_model_runs(shapes, tmp_path, monkeypatch):
    forward = Detector.forward
    modes = set()

    def look(self, imgs, sizes, *targets):
        for img, (height, width) in zip(imgs, sizes, strict=True):
            if height * width < img[0].numel():
                modes.add(self.training)
            assert not img[:, height:].any()
            assert not img[:, :, width:].any()
            assert img[:, height - 1, width - 1].any()
        return forward(self, imgs, sizes, *targets)

    monkeypatch.setattr(Detector, "forward", look)
    detect(shapes, tmp_path, "--num_iters", 2)
    assert modes == {True, False}


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
    assert "6 of 6 objects of " in detect.refused(capsys, root, tmp_path / "other", "--masks")
    assert "has no mask head" in detect.refuses_to_evaluate(capsys, root, tmp_path / "out", "--masks")


@pytest.fixture
def partly_segmented(tmp_path):
    """Training and validation images, of which one object each has no segmentation."""

    def remove(content):
        del content["annotations"][0]["segmentation"]

    def empty(content):
        content["annotations"][1]["segmentation"] = []

    root = write_coco(tmp_path / "data", "train", 4, edit=remove)
    return write_coco(root, "val", 2, edit=empty)


@pytest.mark.parametrize("flags", [(), ("--masks",)])
def test_objects_without_segmentation_are_refused_for_masks(partly_segmented, tmp_path, capsys, flags):
    message = detect.refused(capsys, partly_segmented, tmp_path / "out", *flags)
    assert "1 of 6 objects of " in message
    assert "use boxes alone with --no-masks" in message


def test_objects_without_segmentation_need_no_masks(partly_segmented, tmp_path):
    content = detect(partly_segmented, tmp_path / "out", "--num_iters", 2, "--no-masks")
    assert content["meta"]["settings"]["masks"] is False
    assert "val_mask_ap" not in read_json(tmp_path / "out" / RESULTS)["last"]


def test_validation_images_need_segmentations_for_masks_too(shapes, partly_segmented, tmp_path, capsys):
    flags = ["--train_json", shapes / SPLITS["train"][0], "--train_images", shapes / "train2017"]
    assert "1 of 3 objects of " in detect.refused(capsys, partly_segmented, tmp_path / "new", *flags)


def test_other_categories_are_refused(shapes, detected, encoder, tmp_path, capsys):
    def rename(content):
        content["categories"] = [{"id": 7, "name": "bar"}, {"id": 3, "name": "cone"}]

    root = write_coco(tmp_path / "other", "val", 5, edit=rename)
    message = detect.refuses_to_evaluate(capsys, root, detected)
    assert "has 2 categories that are not the 2 of the model at" in message
    assert "missing 3 wedge; not expected 3 cone" in message
    write_coco(root, "train", 9)
    assert "categories that are not" in detect.refused(capsys, root, tmp_path / "new")
    flags = ["--train_json", root / SPLITS["val"][0], "--train_images", root / "val2017", "--allow_changes"]
    message = detect.refused(capsys, root, detected, "--finetune", encoder, "--drop_path", 0.3, *flags)
    assert "has 2 categories that are not the 2 of the run in" in message


def test_a_damaged_model_has_no_scores(shapes, detected, tmp_path, capsys):
    content = state(detected)
    content["model"]["pyramid.stages.0.0.bias"].fill_(3e38)
    content["meta"] = json.dumps(content["meta"])
    torch.save(content, tmp_path / "bad.pth")
    message = detect.refuses_to_evaluate(capsys, shapes, tmp_path / "bad.pth", code=3)
    assert "outputs of the model are not finite" in message


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--input_size 40", "--input_size 40 must be a multiple of 16, with patches of 4 pixels"),
        ("--pretrain_size 31", "--pretrain_size 31 must be a multiple of 4"),
        ("--max_bad_fraction 0.1", "--max_bad_fraction is not for detection"),
        ("--lr_drops 0.5 2", "--lr_drops must be shares in (0, 1], got [0.5, 2.0]"),
        ("--scale_range 2 1", "--scale_range must be two factors 0 < low <= high, got [2.0, 1.0]"),
        ("--data_path nowhere", "instances_train2017.json' does not exist"),
    ],
)
def test_bad_flags_are_refused_before_training(shapes, tmp_path, capsys, flags, message):
    assert message in detect.refused(capsys, shapes, tmp_path / "out", *flags.split())
    assert not list(tmp_path.rglob("checkpoint*"))
