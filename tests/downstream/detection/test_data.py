"""Images of COCO files, large-scale jitter and average precision against slow derivations."""

import json
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from tests.downstream.bands import bands, write_array, write_bands
from tests.downstream.detection.coco import open_split, write_coco

pytest.importorskip("faster_coco_eval")

from downstream.detection.data import (
    CocoImages,
    LargeScaleJitter,
    PadAndStack,
    ResizeForDetection,
    boxes_of_masks,
    clip_box,
    crop_mask,
)
from downstream.detection.engine_detection import (
    detect_all,
    pad_with_zeros,
    split_targets,
)
from downstream.detection.masks import decode_mask, encode_mask
from downstream.detection.metrics import average_precision
from downstream.detection.objects import DetectedObject, detections_in_image, paste_masks
from downstream.detection.pictures import PANEL, draw_objects
from util import collectives
from util.data.datasets import AddressedDataset
from util.data.images import ImageError
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalize
from util.evaluate.loop import EvalContext

# ------------------------------------------------------------------------------------------------------- annotations


def test_a_file_of_coco_is_read(tmp_path):
    images = open_split(write_coco(tmp_path, "train", 5))
    assert images.categories == [(3, "wedge"), (7, "bar")] and images.num_masks == images.num_objects == 7
    assert images.ids.tolist() == [96, 97, 98, 99, 100] and images.path(4).endswith("000.png")
    content = json.loads((tmp_path / "annotations" / "instances_train2017.json").read_text())
    for i, image_id in enumerate(images.ids.tolist()):
        wanted = [a for a in content["annotations"] if a["image_id"] == image_id]
        found = images.annotations(i)
        assert [a["label"] for a in found] == [{3: 1, 7: 2}[a["category_id"]] for a in wanted]
        for a, b in zip(found, wanted, strict=True):
            x, y, w, h = b["bbox"]
            assert a["box"] == [x, y, x + w, y + h] and a["segmentation"] == b["segmentation"]


def test_training_leaves_out_what_detectron2_leaves_out(tmp_path):
    """Crowds, boxes without area in the image, then images without objects. Boxes are clipped to the image."""

    def edit(content):
        a = content["annotations"]
        a[0]["iscrowd"] = 1  # the only object of the first image
        a[1]["bbox"] = [70, 5, 10, 10]  # outside of 40 x 56 pixels
        a[2]["bbox"] = [-5, 50, 20, 20]
        a[3]["bbox"] = [4, 4, 0, 7]  # the only object of the third image

    root = write_coco(tmp_path, "train", 4, edit=edit)
    images = open_split(root)
    assert images.ids.tolist() == [97, 99]
    assert images.annotations(1)[0]["box"] == [0.0, 50.0, 15.0, 56.0]
    notes = ["1 annotations of crowds ignored", "2 boxes without area inside their image ignored"]
    assert images.notes == [*notes, "2 images without objects ignored"]
    everything = open_split(root, training=False)
    assert everything.ids.tolist() == [97, 98, 99, 100]
    assert [a["crowd"] for a in everything.annotations(3)] == [1]
    assert clip_box([5, 5, 3, 3], (8, 8)) == [5, 5, 8, 8] and clip_box([8, 0, 3, 3], (8, 8)) is None


def test_objects_without_segmentation_are_counted(tmp_path):
    """Crowds are no objects."""

    def edit(content):
        del content["annotations"][0]["segmentation"]
        content["annotations"][1] |= {"iscrowd": 1, "segmentation": None}

    images = open_split(write_coco(tmp_path, "val", 3, edit=edit), "val", False)
    assert (images.num_objects, images.num_masks) == (3, 2)


def test_missing_files_and_other_sizes_are_refused(tmp_path):
    root = write_coco(tmp_path, "train", 2, edit=lambda c: c["images"][0].update(height=41), masks=False)
    with pytest.raises(ValueError, match="instances_val2017.json' does not exist"):
        open_split(root, "val")
    with pytest.raises(ValueError, match="folder of the images of .* does not exist"):
        CocoImages(root / "annotations" / "instances_train2017.json", root / "nowhere", True)
    with pytest.raises(ImageError, match="has 56 x 40 pixels, but 56 x 41 in"):
        open_split(root).load(1)
    path = root / "annotations" / "instances_train2017.json"
    for content, message in (
        ("[1]", "it holds a list instead of an object with images,"),
        ("{", "COCO's format: Expect"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            open_split(root)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match="cannot be read .Is a directory.; expected is a JSON file in COCO's format"):
        open_split(root)


def test_all_headers_of_validation_images_are_read(tmp_path):
    """By all ranks together; of training images `num_checked` are read. Names are compared with the folder."""
    root = write_coco(tmp_path, "val", 5, edit=lambda c: c["images"][2].update(height=56, width=40), masks=False)
    images = open_split(root, "val", False)
    failed = []
    for rank in range(2):
        try:
            images.check(0.0, True, rank, 2)
        except ImageError as error:
            failed.append((rank, str(error)))
    ((rank, message),) = failed
    assert rank == 0  # the image is the third of five
    assert "1 of 3 checked images are bad" in message and "has 56 x 40 pixels, but 40 x 56 in" in message
    assert "EXIF orientation, if it has one, is ignored" in message
    images.num_checked = 2
    images.check()  # the first and the last one
    (root / "val2017" / "001.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match="2 of 5 checked images are bad: .*001.png' cannot be read"):
        images.check(0.0, True)
    (root / "val2017" / "001.png").unlink()
    with pytest.raises(ImageError, match="1 of 5 images of .*instances_val2017.json' are not in .*val2017': 001.png"):
        images.check()


# ------------------------------------------------------------------------------------------------------------ jitter


@pytest.mark.parametrize("masks", [True, False])
def test_jitter_keeps_pixels_boxes_and_masks_together(tmp_path, masks):
    """The objects are brighter than the noise, so they are seen in the augmented pixels themselves."""
    images = open_split(write_coco(tmp_path, "train", 6))
    jitter = LargeScaleJitter(images, 64, seed=0, scale_range=(0.5, 2.0), masks=masks)
    dataset, shapes, shown = AddressedDataset(images, jitter), set(), 0
    for epoch in range(8):
        for index in range(len(images)):
            (img, boxes, labels, found), _, _ = dataset[epoch, index]
            height, width = img.shape[1:]
            assert max(height, width) <= 64 and img.dtype == torch.uint8
            assert len(boxes) == len(labels) and (boxes[:, 2:] > boxes[:, :2]).all() and (boxes >= 0).all()
            bright = img[:2].float().sum(dim=0) > 245  # noise has less than 200, objects 290 and 270
            if masks:
                assert found.shape == (len(boxes), height, width)
                union = found.any(dim=0) if len(found) else torch.zeros(height, width, dtype=torch.bool)
                # At edges, which the resize mixes, and where a polygon is a pixel wider or narrower, they may differ.
                edge = torch.nn.functional.max_pool2d(union[None].float(), 9, 1, 4)[0] > 0
                inner = -torch.nn.functional.max_pool2d(-union[None].float(), 9, 1, 4)[0] > 0
                assert not (bright & ~edge).any() and (inner & ~bright).sum() <= 0.05 * inner.sum()  # gaps between two
                torch.testing.assert_close(boxes, boxes_of_masks(found), rtol=0, atol=0)
            else:
                covered = torch.zeros(height, width, dtype=torch.bool)
                for x1, y1, x2, y2 in boxes.round().long().tolist():
                    covered[max(0, y1 - 3) : y2 + 3, max(0, x1 - 3) : x2 + 3] = True
                assert not (bright & ~covered).any()
            for label, (x1, y1, x2, y2) in zip(labels.tolist(), boxes.tolist(), strict=True):
                part = img[:, round(y1) : max(round(y1) + 1, round(y2)), round(x1) : max(round(x1) + 1, round(x2))]
                if part[0].numel() > 60 and len(labels) == 1:
                    assert part[2 - label].float().mean() > part[label - 1].float().mean()  # red bars, green wedges
                    shown += 1
            shapes.add(tuple(img.shape))
            again = dataset[epoch, index][0]
            assert all(torch.equal(a, b) for a, b in zip((img, boxes, labels, found), again, strict=True))
    assert shown > 10 and len(shapes) > 10


def test_a_flip_and_a_scale_by_hand(tmp_path, monkeypatch):
    images = open_split(write_coco(tmp_path, "train", 1))
    (box,) = [a["box"] for a in images.annotations(0)]
    img = torch.from_numpy(images.load(0)[0]).permute(2, 0, 1)
    for flip in (0.4, 0.6):
        monkeypatch.setattr("downstream.detection.data.addressed_numbers", lambda *_, u=flip: [u, 0.5, 0.0, 0.0])
        sample = LargeScaleJitter(images, 56, 0, (1.5, 2.5), masks=False)(img, 0, 0)  # twice as large
        x1, y1, x2, y2 = [2 * value for value in box]
        x1, x2 = (112 - x2, 112 - x1) if flip < 0.5 else (x1, x2)
        expected = torch.tensor([[x1, y1, x2, y2]]).float().clamp(max=56)  # the crop begins at the corner
        inside = bool(expected[0, 0] < expected[0, 2] and expected[0, 1] < expected[0, 3])
        torch.testing.assert_close(sample[1], expected if inside else torch.zeros(0, 4))
        with_masks = LargeScaleJitter(images, 56, 0, (1.5, 2.5))(img, 0, 0)
        torch.testing.assert_close(with_masks[1], sample[1])


@pytest.mark.parametrize("flip", [False, True])
def test_polygons_are_drawn_at_the_size_of_the_crop(flip):
    """Against pixel centres of the crop that are inside the moved polygon. A code has the pixels that it had before."""
    before, size, rows, columns = (20, 30), (70, 99), range(11, 60), range(5, 80)
    polygon = [4.3, 2.2, 26.1, 5.9, 21.4, 17.7, 9.2, 15.1]  # convex
    moved = [
        ((30 - x if flip else x) * 99 / 30 - 5, y * 70 / 20 - 11)
        for x, y in zip(polygon[::2], polygon[1::2], strict=True)
    ]
    mask = crop_mask([polygon, [0, 0, 1, 0, 0, 1]], before, size, flip, rows, columns)  # the second one is outside
    assert mask.shape == (49, 75) and mask.dtype == torch.uint8
    compared = [0, 0]
    for row in range(49):
        for column in range(75):
            sides = []  # signed distances to the sides, positive inside
            for (x1, y1), (x2, y2) in zip(moved, moved[1:] + moved[:1], strict=True):
                cross = (x2 - x1) * (row + 0.5 - y1) - (y2 - y1) * (column + 0.5 - x1)
                sides.append((-cross if flip else cross) / math.hypot(x2 - x1, y2 - y1))
            if abs(min(sides)) > 0.75:  # the library rounds corners
                assert mask[row, column] == (min(sides) > 0)
                compared[min(sides) > 0] += 1
    assert min(compared) > 1000
    whole = decode_mask([polygon], *before)
    code = crop_mask(encode_mask(whole.astype(bool)), before, size, flip, rows, columns)
    for row in range(0, 49, 5):
        for column in range(0, 75, 5):
            x, y = int((column + 5 + 0.5) * 30 / 99), int((row + 11 + 0.5) * 20 / 70)
            assert code[row, column] == whole[y, 29 - x if flip else x]


def test_batches_are_padded_and_split_again(tmp_path):
    images = open_split(write_coco(tmp_path, "train", 4))
    dataset = AddressedDataset(images, LargeScaleJitter(images, 48, 0, (0.9, 1.1)))
    samples = [dataset[0, i] for i in range(4)]
    batch = PadAndStack(48)(samples)
    sizes, targets = split_targets(batch)
    for (sample, *_), size, padded, target in zip(samples, sizes, batch[0], targets, strict=True):
        img, boxes, labels, masks = sample
        assert size == tuple(img.shape[1:]) and torch.equal(padded[:, : size[0], : size[1]], img)
        assert torch.equal(target["boxes"], boxes) and torch.equal(target["labels"], labels)
        assert torch.equal(target["masks"][:, : size[0], : size[1]], masks) and target["masks"].sum() == masks.sum()
    imgs = pad_with_zeros(torch.ones(4, 3, 48, 48), sizes)
    assert imgs.sum() == 3 * sum(height * width for height, width in sizes)


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_five_bands_keep_their_type(tmp_path, dtype):
    """A flip and a crop of the same scale change no value. A band is missed in all validation images, however many."""
    root = write_bands(write_coco(tmp_path, "val", 5), ".npy", dtype)
    images = CocoImages(root / "annotations" / "instances_val2017.json", root / "val2017", True, in_chans=5)
    images.check()
    assert str(images.pixel_format) == f"5 channels of {dtype}"
    img, jitter = torch.from_numpy(images.load(0)[0]).permute(2, 0, 1), LargeScaleJitter(images, 56, 0, (1, 1))
    samples = [(jitter(img, epoch, 0),) for epoch in range(8)] + [(ResizeForDetection(56)(img),)]
    padded, sizes, *_ = PadAndStack(64)(samples)
    assert padded.dtype == img.dtype and padded.shape == (9, 5, 64, 64) and set(sizes) == {tuple(img.shape[1:])}
    whole = padded.float()[:, :, : img.shape[1], : img.shape[2]]
    flips = [torch.equal(part, img.float().flip(-1)) for part in whole]
    assert all(flip or torch.equal(part, img.float()) for part, flip in zip(whole, flips, strict=True)) and any(flips)
    images.num_checked = 2
    write_array(root / "val2017" / "003.npy", bands(3, dtype, (40, 56))[..., :4])
    images.check()
    with pytest.raises(ImageError, match=f"003.npy' has 4 channels of {dtype}, .* '.*.npy' has: a band is missing"):
        images.check(all_sizes=True)


def test_images_are_resized_to_the_longer_side():
    img = torch.randint(0, 256, (3, 40, 60), dtype=torch.uint8)
    out, *_ = ResizeForDetection(90)(img)
    assert out.shape == (3, 60, 90)
    assert torch.equal(ResizeForDetection(60)(img)[0], img)


# --------------------------------------------------------------------------------------------------------- detections


def test_masks_are_pasted_pixel_by_pixel():
    rng = np.random.default_rng(0)
    masks = torch.from_numpy(rng.random((2, 4, 4))).float()
    boxes = torch.tensor([[2.5, 1.0, 11.0, 8.0], [-1.0, 6.5, 4.0, 14.0]])
    pasted = paste_masks(masks, boxes, (12, 15))
    for n, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
        for row in range(12):
            for column in range(15):
                u, v = (4 * (column + 0.5 - x1) / (x2 - x1) - 0.5, 4 * (row + 0.5 - y1) / (y2 - y1) - 0.5)
                value = 0.0
                for i in range(4):
                    for j in range(4):
                        value += float(masks[n, i, j]) * max(0, 1 - abs(u - j)) * max(0, 1 - abs(v - i))
                assert abs(value - 0.5) < 1e-5 or pasted[n, row, column] == (value >= 0.5)
    assert pasted.any() and paste_masks(masks[:0], boxes[:0], (12, 15)).shape == (0, 12, 15)


def test_detections_are_scaled_to_the_image():
    found = {"boxes": torch.tensor([[8.0, 6.0, 32.0, 24.0]]), "labels": torch.tensor([2])}
    found |= {"scores": torch.tensor([0.75]), "masks": torch.ones(1, 28, 28)}
    ((box, label, score, mask),) = detections_in_image(found, (48, 64), (96, 192))
    assert (box, label, score) == ([24.0, 12.0, 96.0, 48.0], 2, 0.75)
    expected = np.zeros((96, 192), bool)
    expected[12:48, 24:96] = True
    assert np.array_equal(mask, expected)


# ------------------------------------------------------------------------------------------------------------ metrics


@pytest.fixture
def truth(tmp_path):
    root = write_coco(tmp_path, "val", 8, size=(60, 120))
    return json.loads((root / "annotations" / "instances_val2017.json").read_text())


def detections_of(truth, shift=0.0, score=0.9):
    sizes = {image["id"]: (image["height"], image["width"]) for image in truth["images"]}
    results = []
    for a in truth["annotations"]:
        x, y, w, h = a["bbox"]
        mask = decode_mask(a["segmentation"], *sizes[a["image_id"]])
        result = {"image_id": a["image_id"], "category_id": a["category_id"], "score": score}
        results.append(result | {"bbox": [x + shift * w, y, w, h], "segmentation": encode_mask(mask.astype(bool))})
    return results


def test_perfect_detections_have_an_ap_of_100(truth):
    for kind in ("bbox", "segm"):
        scores = average_precision(truth, detections_of(truth), kind)
        assert scores["ap"] == scores["ap50"] == scores["ap75"] == pytest.approx(100)
        assert scores["ap_large"] is None  # no object is that large
    assert average_precision(truth, [], "bbox")["ap"] == 0


def test_shifted_detections_count_up_to_their_overlap(truth):
    """A shift by a quarter of the width leaves an IoU of 0.6: right at the thresholds 0.5, 0.55 and 0.6 alone."""
    scores = average_precision(truth, detections_of(truth, shift=0.25 - 1e-3), "bbox")
    assert scores["ap"] == pytest.approx(30) and scores["ap50"] == pytest.approx(100) and scores["ap75"] == 0


def test_duplicates_are_errors(truth):
    """Each object twice, the copies after all others: the precision is 1 up to the full recall."""
    late = average_precision(truth, detections_of(truth) + detections_of(truth, score=0.1), "bbox")
    assert late["ap"] == pytest.approx(100)
    # One object of each class, found twice. False detections of other places come first: the precision is 1/2.
    some = {**truth, "annotations": [truth["annotations"][0], truth["annotations"][1]]}
    assert {a["category_id"] for a in some["annotations"]} == {3, 7}
    wrong = [{**d, "bbox": [0, 0, 2, 2], "score": 0.95} for d in detections_of(some)]
    assert average_precision(some, wrong + detections_of(some), "bbox")["ap"] == pytest.approx(50)


def test_average_precision_equals_the_reference_evaluator(truth):
    coco = pytest.importorskip("pycocotools.coco")
    evaluator = pytest.importorskip("pycocotools.cocoeval")
    rng = np.random.default_rng(0)
    detections = []
    for shift in (0.0, 0.1, 0.2, 0.4):
        detections += [{**d, "score": float(rng.random())} for d in detections_of(truth, shift) if rng.random() < 0.8]
    reference = coco.COCO()
    reference.dataset = truth
    reference.createIndex()
    for kind in ("bbox", "segm"):
        left_out = "bbox" if kind == "segm" else "segmentation"
        results = reference.loadRes([{k: v for k, v in d.items() if k != left_out} for d in detections])
        evaluation = evaluator.COCOeval(reference, results, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        expected = [100 * value for value in evaluation.stats[:6]]
        found = [-100 if value is None else value for value in average_precision(truth, detections, kind).values()]
        assert found == pytest.approx(expected, rel=1e-9) and 0 < expected[0] < 100 and min(expected[:5]) > 0


def test_crowds_are_ignored_and_missing_fields_are_filled_in(truth):
    detections = detections_of(truth)
    truth["annotations"][0]["iscrowd"] = 1
    for a in truth["annotations"]:
        a["id"] = 0  # which the evaluators take for "not matched"
        del a["area"]
        if not a["iscrowd"]:
            del a["iscrowd"]
    assert average_precision(truth, detections, "bbox")["ap"] == pytest.approx(100)
    assert average_precision(truth, detections[1:], "bbox")["ap"] == pytest.approx(100)
    assert average_precision(truth, detections[:-1], "bbox")["ap"] < 100
    del truth["annotations"][0]["segmentation"]  # detections inside its box are ignored
    inside = {**detections[0], "score": 0.99, "segmentation": detections[0]["segmentation"]}
    assert average_precision(truth, [inside, *detections[1:]], "segm")["ap"] == pytest.approx(100)
    outside = {**inside, "image_id": truth["annotations"][-1]["image_id"]}
    assert average_precision(truth, [outside, *detections[1:]], "segm")["ap"] < 100


class Recogniser(torch.nn.Module):
    """Finds one box in each image, whose place and score follow from the pixels."""

    img_size = (32, 32)

    def forward(self, imgs, sizes):
        means = imgs.mean(dim=(1, 2, 3)).sigmoid()
        return [
            {"boxes": torch.tensor([[4 * m, 2, 9, 20]]), "labels": torch.tensor([1]), "scores": m[None]} for m in means
        ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_the_images_of_an_evaluation(tmp_path, monkeypatch, world_size):
    """What all ranks find together are the detections of one process, in its order."""
    images = open_split(write_coco(tmp_path, "val", 5), "val", False)
    context = EvalContext(Normalize(IMAGENET_MEAN, IMAGENET_STD), nullcontext, batch_size=1, num_workers=0)
    expected, pictures = detect_all(Recogniser(), images, 2, context)
    assert len({(r["score"], r["bbox"][0]) for r in expected}) == len(expected) == 5 and len(pictures) == 2
    parts = []
    monkeypatch.setattr(collectives, "run_everywhere", lambda check: check())
    for last in (False, True):  # the second time, each rank knows what all have found
        for rank in range(world_size):
            monkeypatch.setattr(collectives, "rank_and_world_size", lambda rank=rank: (rank, world_size))
            monkeypatch.setattr(collectives, "gather_objects", lambda part, last=last: collect(parts, part, last))
            found, _ = detect_all(Recogniser(), images, 0, context)
            assert (found == expected) == last


def test_a_picture_shows_the_objects_and_their_names():
    """Outlines hide no pixel inside an object, and names stand outside of its box and of each other."""
    img, mask, scale = np.full((64, 64, 3), 128, np.uint8), np.zeros((64, 64), bool), PANEL // 64
    mask[20:40, 20:40] = True
    objects = [
        DetectedObject([20, 20, 40, 40], 1, 0.75, mask),
        DetectedObject([20, 46, 40, 60], 2, 0.5, None),
        DetectedObject([0, 0, 10, 10], 2, None, None),
    ]
    drawn = draw_objects(img, objects, ["cup", "rocket"])
    assert drawn.shape == (PANEL, PANEL, 3)
    changed = (drawn != 128).any(axis=2)
    inside = slice(20 * scale + 4, 40 * scale - 3)
    assert not changed[inside, inside].any() and not changed[47 * scale : 59 * scale, inside].any()
    assert not changed[10 * scale + 19 : 20 * scale - 19].any()  # between the name below one box and above the next
    assert changed[20 * scale - 10, 20 * scale + 2] and changed[46 * scale - 10, 20 * scale + 2]
    narrow = draw_objects(img[:, :48], [DetectedObject([20, 20, 40, 40], 1, 0.75, mask[:, :48])], ["cup"])
    assert (narrow[:, 48 * scale :] == 255).all() and (narrow[20 * scale + 1, 20 * scale : 40 * scale] != 128).any()


def collect(parts, part, complete):
    """Stands in for the collective: all parts if they are complete, otherwise this rank's own."""
    if complete:
        return parts
    parts.append(part)
    return [part]
