"""Average precision of COCO, by faster-coco-eval."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from downstream.detection.masks import coco_masks

# The first six numbers of COCO's summary, in percent. Small, medium and large are areas with bounds 32^2 and 96^2.
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


class AveragePrecision(NamedTuple):
    """Average precision in percent, where there are objects."""

    scores: dict[str, float]  # of NAMES
    of_classes: dict[str, float]  # {name of a category: "ap" of it alone}


def average_precision(
    truth: dict[str, Any],
    detections: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
    kind: str,
) -> AveragePrecision:
    """Scores detections.

    truth: the content of a COCO-style JSON file. detections: COCO's results of all images, with image_id, category_id,
    score, bbox [x, y, width, height] and, for masks, segmentation. names: of the categories, by their ids. kind: "bbox"
    or "segm".
    """
    from faster_coco_eval import COCO, COCOeval_faster

    coco = COCO(complete_truth(truth))
    left_out = "segmentation"
    if kind == "segm":
        left_out = "bbox"  # the size of a detected mask is its own area
    results = []
    for detection in detections:
        results.append({key: value for key, value in detection.items() if key != left_out})
    evaluation = COCOeval_faster(coco, coco.loadRes(results), iouType=kind)
    evaluation.run()
    measured = dict(zip(NAMES, evaluation.stats, strict=False))
    scores = {name: 100 * float(value) for name, value in measured.items() if value >= 0}
    precision = evaluation.eval["precision"]  # [IoU, recall, category, area, detections]
    of_classes = {}
    for place, number in enumerate(evaluation.params.catIds):
        values = precision[:, :, place, 0, -1]  # of all areas, with 100 detections
        if values.min() >= 0:  # -1: there is no object
            of_classes[names[number]] = 100 * float(values.mean())
    return AveragePrecision(scores, of_classes)


def complete_truth(truth: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy whose annotations have unique ids from 1 on, an area and `iscrowd`. COCO's own areas are kept.

    What has no segmentation, such as a crowd, gets its box: to score masks, the evaluator needs one of each.
    """
    completed = copy.deepcopy(truth)  # the evaluator writes into it
    mask = coco_masks()
    sizes = {image["id"]: (image["width"], image["height"]) for image in truth["images"]}
    for number, annotation in enumerate(completed["annotations"], 1):
        annotation["id"] = number
        annotation.setdefault("iscrowd", 0)
        x, y, width, height = annotation["bbox"]
        segmentation = annotation.get("segmentation")
        if "area" not in annotation:
            annotation["area"] = width * height
            if segmentation:
                code = mask.segmToRle(segmentation, *sizes[annotation["image_id"]])
                annotation["area"] = float(mask.area(code))
        if not segmentation:
            annotation["segmentation"] = [[x, y, x + width, y, x + width, y + height, x, y + height]]
    return completed
