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
    compressed = encode_mask(mask.astype(bool))
    polygon = [[3, 2, 11, 2, 11, 7, 3, 7]]
    for segmentation in (polygon, uncompressed(mask), compressed):
        assert np.array_equal(decode_mask(segmentation, 9, 12), mask)
    json.dumps(compressed)  # it can be written


def with_image(**changes):
    return lambda content: content["images"][1].update(changes)


def with_annotation(**changes):
    return lambda content: content["annotations"][0].update(changes)


def with_category(**changes):
    return lambda content: content["categories"][0].update(changes)


def without(*path):
    def edit(content):
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without("annotations"), "it has no annotations: a file of test images cannot be used"),
        (without("categories"), "it has no list 'categories'"),
        (lambda content: content.update(images={}), "it has no list 'images'"),
        (lambda content: content["annotations"].insert(2, 5), "entry 2 of its annotations has no image_id: 5"),
        (lambda content: content["annotations"].clear(), "has no image with an object"),
        (without("annotations", 0, "bbox"), "entry 0 of its annotations has no bbox"),
        (with_image(id="im1"), "the id 'im1' in its images is no integer"),
        (with_image(id=100), "several images with the id 100"),
        (with_image(file_name="000.png"), "several images with the file_name '000.png'"),
        (with_image(height=0), "image 99: height and width .0, 40. are no integers"),
        (with_image(height=56.0), "image 99: height and width .56.0, 40. are no integers"),
        (with_category(id=3), "several categories with the id 3"),
        (with_annotation(image_id=5), "annotation 1: no image has the id 5"),
        (with_annotation(image_id=[5]), r"annotation 1: no image has the id \[5\]"),
        (with_annotation(category_id=9), "annotation 1: no category has the id 9"),
        (with_annotation(bbox=[1, 2, 3]), "annotation 1: bbox .1, 2, 3. is not .x, y, width, height."),
        (with_annotation(bbox=[0, 0, float("nan"), 1]), "annotation 1: bbox .* is not"),
        (with_annotation(segmentation=[[1, 2, 3, 4]]), "annotation 1: a polygon must be"),
        (with_annotation(segmentation=[[1, 2, None, 4, 5, 6]]), "annotation 1: a polygon must be"),
        (with_annotation(segmentation={"size": [56, 40], "counts": [2240]}), "its code has the .height, width. .56, 4"),
        (with_annotation(segmentation={"size": [40, 56], "counts": [10, 20]}), "do not add up to 40 x 56 pixels"),
        (with_annotation(segmentation={"size": [40, 56], "counts": "abc"}), "its code cannot be decoded: RLE string"),
        (with_annotation(segmentation={"size": [40, 56], "counts": [-2, 2242]}), "are no integers from 0 on"),
    ],
)
def test_bad_files_are_refused(tmp_path, edit, message):
    root = write_coco(tmp_path, "train", 3, edit=edit)
    with pytest.raises(ValueError, match=message):
        open_split(root)
