"""COCO-style JSON files and their masks: what is read, and what is refused before training."""

import json

import numpy as np
import pytest

from tests.downstream.detection.coco import open_split, uncompressed, write_coco

pytest.importorskip("faster_coco_eval")

from downstream.detection.masks import decode_mask, encode_mask


def test_polygons_and_codes_are_the_same_mask():
    mask = np.zeros((9, 12), np.uint8)
    mask[2:7, 3:11] = 1
    polygon = [[3, 2, 11, 2, 11, 7, 3, 7]]
    for code in (polygon, uncompressed(mask), encode_mask(mask.astype(bool))):
        assert np.array_equal(decode_mask(code, 9, 12), mask)
    json.dumps(encode_mask(mask.astype(bool)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("annotations"), "it has no annotations: a file of test images cannot be used"),
        (lambda c: c.pop("categories"), "is not a JSON file in COCO's format: it has no list 'categories'"),
        (lambda c: c.update(images={}), "it has no list 'images'"),
        (
            lambda c: c["annotations"][1].update(image_id=5),
            "has 1 bad annotation: annotation 11: no image has the id 5",
        ),
        (lambda c: c["annotations"][1].update(image_id="99"), "annotation 11: no image has the id '99'"),
        (lambda c: c["images"][1].update(id="im1"), "image 'im1': its id 'im1' is no integer .file_name '001.png'"),
        (lambda c: c["categories"][0].update(id="7"), "category '7': its id '7' is no integer .name 'bar'"),
        (lambda c: c["annotations"][0].pop("bbox"), "annotation 1: it has no bbox"),
        (lambda c: c["annotations"][0].update(bbox=["a", 1, 2, 3]), r"annotation 1: bbox \['a', 1, 2, 3\] is not"),
        (lambda c: c["annotations"][0].update(bbox=[0, 0, 1e9, 1]), r"annotation 1: bbox .* is not \[x, y, width"),
        (lambda c: c["annotations"][0].update(area="9"), "annotation 1: its area '9' is no number"),
        (lambda c: c["annotations"][0].update(iscrowd=None), "annotation 1: its iscrowd None is neither 0 nor 1"),
        (lambda c: c["annotations"].insert(2, 5), "annotation at position 2 of its list: it is 5 instead of an object"),
        (lambda c: c["annotations"][0].update(category_id=9), "annotation 1: no category has the id 9"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3]), r"bbox \[1, 2, 3\] is not \[x, y, width, height\]"),
        (lambda c: c["annotations"][0].update(segmentation=[[1, 2, 3, 4]]), "a polygon needs at least 3 points"),
        (lambda c: c["annotations"][0].update(segmentation={"counts": 3}), "is no run-length code of size and counts"),
        (lambda c: c["images"][1].update(id=100), "has several images with the id 100"),
        (lambda c: c["images"][1].update(file_name="000.png"), "has several images with the file_name '000.png'"),
        (lambda c: c["categories"][1].update(id=7), "has several categories with the id 7"),
        (lambda c: c["images"][1].update(file_name=7), "image 99: its file_name 7 is no path inside the folder"),
        (lambda c: c["images"][1].update(file_name="a/../../x.jpg"), "file_name .a/../../x.jpg. is no path inside"),
        (lambda c: c["images"][1].update(file_name="/x.jpg"), "file_name ./x.jpg. is no path inside the folder"),
        (lambda c: c["images"][1].update(height=0), "image 99: its height and width are .0, 40. instead of integers"),
        (lambda c: c["images"][1].update(height=56.0), "image 99: its height and width are .56.0, 40. instead of"),
        (lambda c: c["annotations"].clear(), "has no image with an object"),
    ],
)
@pytest.mark.parametrize("split", ["train", "val"])
def test_bad_files_are_refused(tmp_path, edit, message, split):
    with pytest.raises(ValueError, match=message):
        open_split(write_coco(tmp_path, split, 3, edit=edit), split, split == "train")


SEGMENTATIONS = {
    "a polygon has coordinates that are no numbers between -5600 and 5600": [
        *([[1, 2, "3", 4, 5, 6]], [[1, 2, None, 4, 5, 6]], [[1, 2, float("nan"), 4, 5, 6]]),
        *([[1, 2, float("inf"), 4, 5, 6]], [[1, 2, 1e8, 4, 5, 6]], [[1, 2, [3], 4, 5, 6]]),
    ],
    r"its code has the .height, width. \[56, 40\], but its image has \[40, 56\]": [
        {"size": [56, 40], "counts": [2240]}
    ],
    r"its code has the .height, width. \[40.0, 56.0\]": [{"size": [40.0, 56.0], "counts": [2240]}],
    "the counts of its code add up to 30 pixels, but its image has 40 x 56": [{"size": [40, 56], "counts": [10, 20]}],
    "its code holds counts that are no integers from 0 on": [
        *({"size": [40, 56], "counts": counts} for counts in ([-2, 2242], [2240.0], ["a", 20], [None]))
    ],
}


@pytest.mark.parametrize(("message", "codes"), SEGMENTATIONS.items())
def test_bad_segmentations_are_refused_before_training(tmp_path, message, codes):
    """Also where the image has a bad segmentation beside others. The largest ones would take the whole memory."""
    for i, code in enumerate(codes):
        root = write_coco(
            tmp_path / str(i), "val", 2, edit=lambda c, code=code: c["annotations"][0].update(segmentation=code)
        )
        with pytest.raises(ValueError, match="annotation 1: " + message):
            open_split(root, "val", False)
