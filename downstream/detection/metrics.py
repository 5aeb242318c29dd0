"""Average precision of COCO, by faster-coco-eval."""

from collections.abc import Mapping, Sequence
from typing import Any

from downstream.detection.masks import coco_masks, mask_code

# The first six numbers of COCO's summary, in percent. Small, medium and large are areas with bounds 32^2 and 96^2.
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


def average_precision(
    truth: Mapping[str, Any],
    detections: Sequence[Mapping[str, Any]],
    kind: str,
) -> dict[str, float | None]:
    """Returns the value of each of NAMES in percent, None where there are no objects.

    truth: the content of a COCO-style JSON file. detections: COCO's results of all images, with image_id, category_id,
    score, bbox [x, y, width, height] and, for masks, segmentation. kind: "bbox" or "segm".
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
    scores: dict[str, float | None] = {}
    for name, value in zip(NAMES, evaluation.stats, strict=False):
        scores[name] = None
        if value >= 0:
            scores[name] = 100 * float(value)
    return scores


def complete_truth(truth: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a truth whose annotations have unique ids from 1 on, an area and `iscrowd`. COCO's own areas are kept.

    A crowd without a segmentation gets its box, inside which detections are ignored.
    """
    sizes = {image["id"]: (image["height"], image["width"]) for image in truth["images"]}
    annotations = []
    for number, annotation in enumerate(truth["annotations"], 1):
        completed = {"iscrowd": 0, **annotation, "id": number}
        segmentation = annotation.get("segmentation")
        x, y, width, height = annotation["bbox"]
        right = x + width
        bottom = y + height
        if completed.get("area") is None:
            completed["area"] = width * height
            if segmentation:
                rows, columns = sizes[annotation["image_id"]]
                code = mask_code(segmentation, rows, columns)
                completed["area"] = float(coco_masks().area(code))
        if completed["iscrowd"] and not segmentation:
            completed["segmentation"] = [[x, y, right, y, right, bottom, x, bottom]]
        annotations.append(completed)
    # The evaluator writes into images and categories: it gets copies.
    images = [dict(image) for image in truth["images"]]
    categories = [dict(category) for category in truth["categories"]]
    return {"images": images, "categories": categories, "annotations": annotations}
