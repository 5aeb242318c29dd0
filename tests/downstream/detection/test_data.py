"""COCO files, large-scale jitter and average precision against slow derivations."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from tests.downstream.bands import write_bands
from tests.downstream.detection.coco import BAR, WEDGE, open_split, uncompressed, write_coco

pytest.importorskip("faster_coco_eval")

from downstream.detection.data import (
    FlipResizeCrop,
    LargeScaleJitter,
    PadAndStack,
    ResizeForDetection,
    boxes_of_masks,
)
from downstream.detection.engine_detection import pad_with_zeros, split_targets
from downstream.detection.masks import decode_mask, encode_mask
from downstream.detection.metrics import average_precision
from downstream.detection.objects import detections_in_image, paste_masks
from util.data.datasets import AddressedDataset
from util.data.images import ImageError

JSON = "instances_train2017.json"

# ------------------------------------------------------------------------------------------------------- annotations


def test_a_file_of_coco_is_read(tmp_path):
    root = write_coco(tmp_path, "train", 5)
    images = open_split(root)
    images.check()
    assert images.categories == [(WEDGE, "wedge"), (BAR, "bar")]
    assert images.num_masks == images.num_objects == 7
    assert images.ids.tolist() == [96, 97, 98, 99, 100]
    content = json.loads((root / "annotations" / JSON).read_text())
    found = {image_id: images.annotations(i) for i, image_id in enumerate(images.ids.tolist())}
    for entry in content["annotations"]:
        annotation = found[entry["image_id"]].pop(0)
        x, y, w, h = entry["bbox"]
        assert annotation.box == [x, y, x + w, y + h]
        assert images.categories[annotation.label - 1][0] == entry["category_id"]
        assert annotation.segmentation == entry["segmentation"]
    assert not any(found.values())


def test_training_leaves_out_what_detectron2_leaves_out(tmp_path):
    """Crowds, boxes without area in the image, then images without objects. Boxes are clipped to the image."""

    def edit(content):
        annotations = content["annotations"]
        annotations[0]["iscrowd"] = 1  # the only object of the first image
        annotations[1]["bbox"] = [70, 5, 10, 10]  # outside of 40 x 56 pixels
        annotations[2]["bbox"] = [-5, 50, 20, 20]
        annotations[3]["bbox"] = [4, 4, 0, 7]  # the only object of the third image

    root = write_coco(tmp_path, "train", 4, edit=edit)
    images = open_split(root)
    assert images.ids.tolist() == [97, 99]
    assert images.annotations(1)[0].box == [0.0, 50.0, 15.0, 56.0]
    (left_out,) = images.notes
    assert "3 objects, 2 images" in left_out
    everything = open_split(root, training=False)
    assert everything.ids.tolist() == [97, 98, 99, 100]
    assert everything.annotations(3) == []
    assert everything.num_objects == 3


def scale_boxes(content, factor):
    for annotation in content["annotations"]:
        annotation["bbox"] = [value * factor for value in annotation["bbox"]]


def make_corners(content):
    for annotation in content["annotations"]:
        x, y, w, h = annotation["bbox"]
        annotation["bbox"] = [x + 20, y + 20, x + 20 + w, y + 20 + h]


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content.pop("annotations"),
        lambda content: content["annotations"].clear(),
        lambda content: content["images"][1].update(id=100),
        lambda content: content["images"][1].pop("width"),
        lambda content: content["annotations"][0].update(image_id=5),
        lambda content: content["annotations"][0].update(category_id=9),
        lambda content: scale_boxes(content, 1 / 56),
        make_corners,
    ],
)
def test_bad_files_are_refused(tmp_path, edit):
    root = write_coco(tmp_path, "train", 3, edit=edit)
    with pytest.raises(ValueError, match=JSON):
        open_split(root)


def test_missing_files_and_other_sizes_are_refused(tmp_path):
    def edit(content):
        content["images"][2] |= {"height": 41, "width": 40}

    root = write_coco(tmp_path, "val", 5, masks=False, edit=edit)
    with pytest.raises(FileNotFoundError, match=JSON):
        open_split(root)
    (root / "annotations" / JSON).write_text("[]")  # as detections are
    with pytest.raises(ValueError, match=JSON):
        open_split(root)
    images = open_split(root, "val", training=False)
    with pytest.raises(ImageError, match="002.png"):  # of validation images, all headers are read
        images.check()
    with pytest.raises(ImageError, match="002.png"):
        images.load(2)
    (root / "val2017" / "001.png").unlink()
    with pytest.raises(ImageError, match="2 of 5 checked"):
        images.check()


def test_polygons_and_codes_are_the_same_mask():
    mask = np.zeros((9, 12), np.uint8)
    mask[2:7, 3:11] = 1
    compressed = encode_mask(mask.astype(bool))
    polygon = [[3, 2, 11, 2, 11, 7, 3, 7]]
    for segmentation in (polygon, uncompressed(mask), compressed):
        assert np.array_equal(decode_mask(segmentation, 9, 12), mask)
    json.dumps(compressed)  # it can be written


# ------------------------------------------------------------------------------------------------------------ jitter


def grow(mask, pixels):
    """The mask [H, W], and all places up to so many pixels from it."""
    (grown,) = F.max_pool2d(mask[None].float(), 2 * pixels + 1, 1, pixels)
    return grown > 0


def jittered_samples(tmp_path, masks):
    images = open_split(write_coco(tmp_path, "train", 6))
    jitter = LargeScaleJitter(images, 64, seed=0, scale_range=(0.5, 2.0), masks=masks)
    dataset = AddressedDataset(images, jitter)
    for epoch in range(8):
        for index in range(len(images)):
            sample, _, _ = dataset[epoch, index]
            again, _, _ = dataset[epoch, index]
            for once, twice in zip(sample, again, strict=True):
                assert torch.equal(once, twice)
            yield sample


def is_object(img):
    """Noise has less than 200 in red and green together, the objects 290 and 270."""
    return img[:2].float().sum(dim=0) > 245


def test_jitter_keeps_pixels_and_masks_together(tmp_path):
    """At edges, which the resize mixes, and where a polygon is a pixel wider or narrower, they may differ."""
    shapes = set()
    for img, boxes, labels, masks in jittered_samples(tmp_path, masks=True):
        shapes.add(tuple(img.shape))
        assert max(img.shape[1:]) <= 64
        assert masks.shape == (len(labels), *img.shape[1:])
        assert_close(boxes, boxes_of_masks(masks), rtol=0, atol=0)
        union = masks.any(dim=0)
        inner = ~grow(~union, 4)
        assert not (is_object(img) & ~grow(union, 4)).any()
        assert (inner & ~is_object(img)).sum() <= 0.05 * inner.sum()  # gaps between two objects
    assert len(shapes) > 10


@pytest.mark.parametrize("flip", [False, True])
def test_boxes_of_a_crop_by_hand(flip):
    """Twice as large; then 56 columns from 10 on, and 50 rows from 20 on."""
    crop = FlipResizeCrop((40, 60), (80, 120), flip, rows=range(20, 70), columns=range(10, 66))
    boxes = torch.tensor([[3.0, 12.0, 20.0, 31.0], [8.0, 30.0, 25.0, 39.0]])
    x1, y1, x2, y2 = crop.move_boxes(boxes).T
    assert y1.tolist() == [2 * 12 - 20, 2 * 30 - 20]
    assert y2.tolist() == [2 * 31 - 20, 50]
    if flip:  # x becomes 60 - x, which is beyond the crop
        assert x1.tolist() == [56, 56]
        assert x2.tolist() == [56, 56]
    else:
        assert x1.tolist() == [0, 2 * 8 - 10]
        assert x2.tolist() == [2 * 20 - 10, 2 * 25 - 10]


def test_batches_are_padded_and_split_again(tmp_path):
    images = open_split(write_coco(tmp_path, "train", 4))
    dataset = AddressedDataset(images, LargeScaleJitter(images, 48, 0, (0.9, 1.1)))
    samples = [dataset[0, i] for i in range(4)]
    batch = PadAndStack(48)(samples)
    sizes, targets = split_targets(batch)
    imgs, *_ = batch
    num_pixels = 0
    for i, (height, width) in enumerate(sizes):
        sample, *_ = samples[i]
        target = targets[i]
        masks = target["masks"]
        assert torch.equal(imgs[i, :, :height, :width], sample.img)
        assert torch.equal(target["boxes"], sample.boxes)
        assert torch.equal(target["labels"], sample.labels)
        assert torch.equal(masks[:, :height, :width], sample.masks)
        assert masks.sum() == sample.masks.sum()
        num_pixels += height * width
    assert len(targets) == len(imgs) == 4
    padded = pad_with_zeros(torch.ones(4, 3, 48, 48), sizes)
    assert padded.sum() == 3 * num_pixels


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_five_bands_keep_their_type(tmp_path, dtype):
    """A flip and a crop of the same scale change no value."""
    images = open_split(write_bands(write_coco(tmp_path, "val", 5), ".npy", dtype), "val", in_chans=5)
    images.check()
    array, _ = images.load(0)
    img = torch.from_numpy(array).permute(2, 0, 1)
    jitter = LargeScaleJitter(images, 56, 0, (1, 1))
    never = LargeScaleJitter(images, 56, 0, (1, 1), hflip=False)
    moved = [jitter(img, epoch, 0).img for epoch in range(8)]
    assert all(other.dtype == img.dtype for other in moved)
    found = [other.tolist() for other in moved]
    assert all(other in (img.tolist(), img.flip(-1).tolist()) for other in found)
    assert img.flip(-1).tolist() in found
    assert all(never(img, epoch, 0).img.tolist() == img.tolist() for epoch in range(8))
    same, size = ResizeForDetection(56)(img)
    assert same.tolist() == img.tolist()
    assert size == img.shape[1:]
    enlarged, _ = ResizeForDetection(84)(img)
    assert enlarged.shape[1:] in ((60, 84), (84, 60))


# --------------------------------------------------------------------------------------------------------- detections


def test_masks_are_pasted_pixel_by_pixel():
    """Bilinear values at the centres of the image's pixels; 0 outside of the mask."""
    masks = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0))
    boxes = torch.tensor([[2.5, 1.0, 11.0, 8.0], [-1.0, 6.5, 4.0, 14.0]])
    pasted = paste_masks(masks, boxes, (12, 15))
    for n, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
        for row in range(12):
            for column in range(15):
                u = 4 * (column + 0.5 - x1) / (x2 - x1) - 0.5
                v = 4 * (row + 0.5 - y1) / (y2 - y1) - 0.5
                value = 0.0
                for i in range(4):
                    for j in range(4):
                        weight = max(0, 1 - abs(u - j)) * max(0, 1 - abs(v - i))
                        value += weight * masks[n, i, j].item()
                if abs(value - 0.5) > 1e-5:
                    assert pasted[n, row, column] == (value >= 0.5)
    assert pasted.any()
    nothing = paste_masks(masks[:0], boxes[:0], (12, 15))
    assert nothing.shape == (0, 12, 15)


def test_detections_are_scaled_to_the_image():
    detections = {
        "boxes": torch.tensor([[8.0, 6.0, 32.0, 24.0]]),
        "labels": torch.tensor([2]),
        "scores": torch.tensor([0.75]),
        "masks": torch.ones(1, 28, 28),
    }
    (found,) = detections_in_image(detections, (48, 64), (96, 192))
    box, label, score, _ = found
    assert box == [24.0, 12.0, 96.0, 48.0]
    assert label == 2
    assert score == 0.75
    expected = np.zeros((96, 192), bool)
    expected[12:48, 24:96] = True
    assert np.array_equal(found.mask, expected)


# ------------------------------------------------------------------------------------------------------------ metrics


@pytest.fixture
def truth(tmp_path):
    root = write_coco(tmp_path, "val", 8, size=(60, 120))
    return json.loads((root / "annotations" / "instances_val2017.json").read_text())


def detections_of(truth):
    """The true boxes as detections."""
    results = []
    for annotation in truth["annotations"]:
        result = {name: annotation[name] for name in ("image_id", "category_id", "bbox")}
        results.append({**result, "score": 0.9})
    return results


NAMES_OF_CLASSES = {BAR: "bar", WEDGE: "wedge", 5: "absent"}


def test_missing_fields_are_filled_in(truth):
    detections = detections_of(truth)
    for annotation in truth["annotations"]:
        annotation["id"] = 0  # which the evaluators take for "not matched"
        del annotation["area"]
        del annotation["iscrowd"]
    scores = average_precision(truth, detections, NAMES_OF_CLASSES, "bbox").scores
    assert scores["ap"] == pytest.approx(100)
    scores = average_precision(truth, detections[1:], NAMES_OF_CLASSES, "bbox").scores
    assert scores["ap"] < 100


def test_masks_are_scored_beside_crowds_and_empty_boxes_without_a_segmentation():
    """Detections inside a crowd count neither way. A box without area is an object that nothing finds."""
    square = np.zeros((40, 50), bool)
    square[2:22, 2:22] = True
    part_of_crowd = np.zeros((40, 50), bool)
    part_of_crowd[5:15, 26:36] = True
    detections = []
    for score, mask in ((0.9, square), (0.95, part_of_crowd)):
        code = encode_mask(mask)
        detections.append({"image_id": 1, "category_id": WEDGE, "score": score, "segmentation": code})
    annotations = [
        {"image_id": 1, "category_id": WEDGE, "bbox": [2, 2, 20, 20], "segmentation": encode_mask(square)},
        {"image_id": 1, "category_id": WEDGE, "bbox": [25, 5, 20, 20], "iscrowd": 1},
    ]
    truth = {
        "images": [{"id": 1, "width": 50, "height": 40}],
        "categories": [{"id": WEDGE}],
        "annotations": annotations,
    }
    assert average_precision(truth, detections, NAMES_OF_CLASSES, "segm").scores["ap"] == pytest.approx(100)
    annotations.append({"image_id": 1, "category_id": WEDGE, "bbox": [4, 4, 0, 7], "segmentation": []})
    assert average_precision(truth, detections, NAMES_OF_CLASSES, "segm").scores["ap"] == pytest.approx(50.5, abs=0.1)
