"""Invalid pixels and missing bands in segmentation and detection: losses, labels, transforms, scores, pictures."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from downstream.detection.data import LargeScaleJitter
from downstream.segmentation.data import (
    IGNORE,
    SegmentationAugment,
    distort,
)
from tests.downstream.bands import bands, replace_images
from tests.downstream.dense import detect, segment
from tests.downstream.detection.coco import open_split, write_coco
from tests.runs import assert_same_state, reports_without_times
from tests.util.data.test_invalid_pixels import clouds
from util.data.pixel_format import PixelFormat

HELD = (0, 2, 3, 4)  # of five bands, in every third file
CODE = -9999.0
BANDS = ("--in_chans", 5, "--bands", *HELD)


def hole(number, size):
    """The invalid pixels [H, W] of a file."""
    width, height = size
    return clouds(seed=number, size=(height, width))[:, :, 0]


def as_file(kind, number, size):
    """A file of five or four bands whose holes are marked in one of several ways.

    kind: "nan", "code", or "mask" and "other mask", a band whose holes have different values under them.
    """
    array = bands(number, "float32", size)
    invalid = hole(number, size)
    if number % 3 == 2:
        array = array[:, :, HELD]
    if kind == "nan":
        array[invalid] = np.nan
    elif kind == "code":
        array[invalid] = CODE
    else:
        if kind == "other mask":
            array[invalid] = np.random.default_rng(number).normal(size=array.shape)[invalid] * 1e4
        array = np.concatenate([array, 0.5 * ~invalid[:, :, None]], axis=2, dtype=np.float32)
    return array


MARKS = {
    "nan": ("--nodata", "nan"),
    "code": (f"--nodata={CODE}",),
    "mask": ("--mask_band", -1),
    "other mask": ("--mask_band", -1),
}


def write_holes(write, root, kind, number=6):
    """A data set with holes. Of "other mask", labels under holes differ, too."""
    replace_images(write(root, number), partial(as_file, kind))
    if kind == "other mask":
        for path in root.glob("annotations/*/*.png"):
            labels = np.array(Image.open(path))
            invalid = hole(int(path.stem), (labels.shape[1], labels.shape[0]))
            labels[invalid] = (labels[invalid].astype(int) * 5 + 1) % 3
            Image.fromarray(labels).save(path)
    return root


@pytest.fixture(params=["segmentation", "detection"])
def program(request):
    short = "--num_iters 3 --eval_every 3"
    if request.param == "segmentation":
        return segment.also(short)
    pytest.importorskip("faster_coco_eval")
    return detect.also(short)


# ---------------------------------------------------------------------------------------------------------- whole runs


def test_neither_marks_nor_what_lies_under_them_change_a_run(program, tmp_path, capsys):
    """Weights after three steps are those of the losses' gradients; scores and pictures are those of the logits."""
    outcomes = {}
    for kind, marks in MARKS.items():
        root = write_holes(program.write, tmp_path / kind / "data", kind)
        out = tmp_path / kind / "out"
        trained = program(root, out, *BANDS, *marks)
        outcomes[kind] = (trained, reports_without_times(out), (out / program.picture).read_bytes())
    trained, log, picture = outcomes.pop("nan")
    assert trained["meta"]["settings"]["bands"] == [list(HELD)]
    for other_trained, other_log, other_picture in outcomes.values():
        assert_same_state(other_trained, trained)
        assert other_log == log
        assert other_picture == picture
    message = program.refused(capsys, tmp_path / "nan" / "data", tmp_path / "nan" / "out", *BANDS, "--nodata", 1)
    assert "--nodata" in message


def test_marks_that_mark_nothing_change_no_bit(program, tmp_path):
    """8 bits, distorted. Padding of a segmentation would be the exact mean instead of the nearest value of 8 bits."""
    flags = ["--ratio_range", 1, 1] if "segmentation" in program.path else []
    root = program.write(tmp_path / "data", 6)
    plain = program(root, tmp_path / "plain", *flags)
    declared = program(root, tmp_path / "declared", *flags, "--bands", 0, 1)
    assert_same_state(declared, plain)
    assert reports_without_times(tmp_path / "declared") == reports_without_times(tmp_path / "plain")


def test_all_valid_evaluates_on_whole_images(program, tmp_path, capsys):
    root = replace_images(program.write(tmp_path / "data", 6), lambda number, size: as_file("mask", 3 * number, size))
    flags = ["--in_chans", 5, "--mask_band", -1]
    assert "--all_valid" in program.refused(capsys, root, tmp_path / "no", *flags, "--all_valid")
    program(root, tmp_path / "out", *flags, "--max_steps", 1)
    whole = replace_images(program.write(tmp_path / "whole", 6), lambda number, size: bands(number, "float32", size))
    program.refuses_to_evaluate(capsys, whole, tmp_path / "out")
    assert program.evaluate(whole, tmp_path / "out", "--all_valid")["num_images"] > 0


# --------------------------------------------------------------------------------------------------- labels, transforms


def test_crops_have_no_class_where_nothing_is_valid_and_padding_is_invalid():
    """Labels follow the image: no crop has a class at a pixel without a valid band."""
    array = bands(0, "float32")
    array[clouds(size=(30, 40))[:, :, 0]] = np.nan
    array[:12, :, 1:3] = np.nan
    img = torch.from_numpy(array).permute(2, 0, 1)
    pair = torch.cat([img, torch.ones_like(img[:1])])
    augment = SegmentationAugment((24, 24), 0, [0] * 5, (40, 30), (0.6, 1.4), photometric=False, has_invalid=True)
    num_in_part = 0
    for index in range(20):
        cropped, labels = augment(pair, 0, index)
        assert cropped.shape == (5, 24, 24)
        invalid = cropped.isnan()
        assert torch.equal(labels == IGNORE, invalid.all(dim=0))
        num_in_part += (invalid.any(dim=0) & (labels != IGNORE)).sum()
        assert torch.equal(cropped.nan_to_num(-1), augment(pair, 0, index)[0].nan_to_num(-1))
    assert num_in_part > 100
    small = SegmentationAugment((64, 64), 0, [0] * 5, (40, 30), (1, 1), photometric=False, has_invalid=True)
    cropped, labels = small(pair, 0, 0)
    assert cropped[:, 30:].isnan().all()
    assert cropped[:, :, 40:].isnan().all()
    assert (labels[30:] == IGNORE).all()


def test_distortion_spreads_no_invalid_channel():
    """A pixel that lacks a channel gets brightness and contrast, and neither saturation nor hue."""
    generator = torch.Generator().manual_seed(0)
    img = torch.randint(0, 256, (3, 12, 10), generator=generator).float()
    holed = img.clone()
    holed[:, :4] = torch.nan
    holed[1, 4:8] = torch.nan
    colour = [0.9, 0.9, 0.0, 0.0, 0.5, 0.5, 0.9, 0.9, 0.9]  # saturation and hue
    light = [0.0, 0.0, 0.9, 0.9, 0.9, 0.2, 0.5, 0.5, 0.9]  # brightness and contrast
    both = [0.0, 0.0, 0.0, 0.0, 0.9, 0.2, 0.9, 0.9, 0.9]
    for draws in (colour, light, both):
        found = distort(holed, draws)
        assert torch.equal(found.isnan(), holed.isnan())
        assert torch.equal(found[:, 8:], distort(img.byte(), draws)[:, 8:].float())
    assert torch.equal(distort(holed, colour)[::2, 4:8], img[::2, 4:8])
    assert_close(distort(holed, both)[::2, 4:8], distort(img, light)[::2, 4:8])


def test_boxes_keep_their_place_beside_holes(tmp_path):
    """Objects are kept, even under a hole; pixels away from it are those of the whole image."""
    root = write_coco(tmp_path, "train", 1, size=(48, 48))
    whole = open_split(root)
    whole.check()
    images = open_split(root)
    images.check()
    images.pixel_format = PixelFormat(3, "uint8", has_invalid=True)
    img = torch.from_numpy(whole.load(0)[0].copy()).permute(2, 0, 1)
    holed = img.float()
    holed[:, :, :20] = torch.nan
    options = dict(side=32, seed=0, scale_range=(0.6, 0.9))
    for epoch in range(8):
        sample = LargeScaleJitter(images, **options)(holed, epoch, 0)
        plain = LargeScaleJitter(whole, **options)(img, epoch, 0)
        assert sample.img.dtype == torch.float32
        assert torch.equal(sample.boxes, plain.boxes)
        assert torch.equal(sample.masks, plain.masks)
        valid = ~sample.img.isnan()
        assert 0.3 < valid.float().mean() < 0.8
        assert torch.equal(LargeScaleJitter(images, **options)(img, epoch, 0).img, plain.img.float())
