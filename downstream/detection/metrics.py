"""Average precision of COCO, by faster-coco-eval."""

from collections.abc import Mapping, Sequence
from typing import Any

from downstream.detection.masks import INSTALL, coco_masks, mask_code

# The first six numbers of COCO's summary, in percent. Small, medium and large are areas with bounds 32^2 and 96^2.
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


def average_precision(
    truth: Mapping[str, Any], detections: Sequence[Mapping[str, Any]], kind: str
) -> dict[str, float | None]:
    """Returns the value of each of NAMES in percent, None where there are no objects.

    truth: the content of a COCO-style JSON file. detections: COCO's results of all images, with image_id, category_id,
    score, bbox [x, y, width, height] and, for masks, segmentation. kind: "bbox" or "segm". ValueError if
    faster-coco-eval is not installed.
    """
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError as error:
        raise ValueError(f"average precision needs faster-coco-eval, which is not installed: {INSTALL}") from error

    coco = COCO(complete_truth(truth))
    left_out = "bbox" if kind == "segm" else "segmentation"  # the size of a detected mask is its own area
    found = coco.loadRes([{key: value for key, value in d.items() if key != left_out} for d in detections])
    evaluation = COCOeval_faster(coco, found, iouType=kind)
    evaluation.run()
    values = [float(value) for value in evaluation.stats[: len(NAMES)]]
    return {name: 100 * value if value >= 0 else None for name, value in zip(NAMES, values, strict=True)}


def complete_truth(truth: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a truth whose annotations have unique ids from 1 on, an area and `iscrowd`. COCO's own areas are kept.

    A crowd without a segmentation gets its box, inside which detections are ignored.
    """
    sizes = {image["id"]: (image["height"], image["width"]) for image in truth["images"]}
    annotations = []
    for number, a in enumerate(truth["annotations"], 1):
        area = a.get("area")
        if area is None and a.get("segmentation"):
            area = float(coco_masks().area(mask_code(a["segmentation"], *sizes[a["image_id"]])))
        elif area is None:
            area = a["bbox"][2] * a["bbox"][3]
        filled_in: dict[str, Any] = {"id": number, "area": area, "iscrowd": a.get("iscrowd", 0)}
        if filled_in["iscrowd"] and not a.get("segmentation"):
            x, y, w, h = a["bbox"]
            filled_in["segmentation"] = [[x, y, x + w, y, x + w, y + h, x, y + h]]
        annotations.append({**a, **filled_in})
    images, categories = ([dict(item) for item in truth[name]] for name in ("images", "categories"))
    return {"images": images, "categories": categories, "annotations": annotations}
