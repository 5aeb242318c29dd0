"""The training loop of detection and its evaluation. It knows batches and losses, but no model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont
from torch import nn
from torch.nn import functional as F

from downstream.common import each_image
from downstream.detection.annotations import read_coco
from downstream.detection.data import Batch, CocoImages, PadAndStack, ResizeForDetection
from downstream.detection.masks import decode_mask, encode_mask
from downstream.detection.metrics import average_precision
from downstream.pictures import as_picture, default_colors, panel
from util import collectives
from util.data.transforms import Normalize, Size
from util.pictures import table
from util.run.evaluation import Evaluation
from util.run.loop import TrainLoop

SHOWN_SCORE = 0.5  # least score of a detection in a picture
PASTED = 16  # masks that are pasted together
PANEL = 384  # side of an image in a picture, in pixels

Objects = list[tuple[list[float], int, float, np.ndarray | None]]  # (box, label, score, mask bool [H, W]) of an image
Plate = tuple[float, float, float, float]  # (left, top, right, bottom), in pixels of a panel
Picture = tuple[np.ndarray, Objects, Objects]  # (image uint8 [H, W, 3], truth, detections)


def pad_with_zeros(imgs: torch.Tensor, sizes: Sequence[Size]) -> torch.Tensor:
    """Sets the padded pixels of normalised images [B, C, H, W] to 0. sizes: (height, width) without the padding."""
    for img, (height, width) in zip(imgs, sizes, strict=True):
        img[:, height:], img[:, :, width:] = 0, 0
    return imgs


def split_targets(batch: Batch) -> tuple[list[Size], list[dict[str, torch.Tensor]]]:
    """Returns (sizes, targets) of the images of a batch. Targets have masks if the batch has one for each object."""
    _, sizes, counts, boxes, labels, masks = batch
    values = {"boxes": boxes, "labels": labels} | ({"masks": masks} if len(masks) == len(labels) else {})
    parts = zip(*(value.split(counts) for value in values.values()), strict=True)
    return sizes, [dict(zip(values, part, strict=True)) for part in parts]


def train_iterations(model: nn.Module, batches: Iterator[Batch], steps: range, loop: TrainLoop) -> None:
    """Makes the optimizer steps `steps`. A signal ends them earlier.

    model: `model(imgs, sizes, targets) -> {name: loss}`. batches: micro-batches from `steps.start` on.
    """
    model.train()
    for step in steps:
        loop.begin_step(step)
        for micro in range(loop.accum_iter):
            batch = loop.next_batch(batches, micro)
            sizes, targets = split_targets(batch)
            with loop.no_sync_before_last(model, micro):
                with loop.autocast():
                    losses = model(pad_with_zeros(loop.normalize(batch[0]), sizes), sizes, targets)
                del batch, targets  # frees their memory for the backward pass
                loop.scaled_loss(losses, micro).backward()
        grad_norm = loop.update_weights()
        loop.end_step(grad_norm)  # logs every `print_freq` steps
        if loop.should_stop():  # all ranks have agreed
            return


# ------------------------------------------------------------------------------------------------------- evaluation


def paste_masks(masks: torch.Tensor, boxes: torch.Tensor, size: Size) -> np.ndarray:
    """Returns masks [n, s, s] of probabilities inside their boxes [n, 4] as masks of the image, bool [n, *size].

    Pixels take the bilinear value at their centre, and are set from 0.5 on, as in detectron2.
    """
    parts = [np.zeros((0, *size), bool)]
    rows, columns = (torch.arange(side, device=boxes.device) + 0.5 for side in size)
    for some, box in zip(masks.split(PASTED), boxes.split(PASTED), strict=True):
        x1, y1, x2, y2 = box[:, :, None].unbind(1)  # each [n, 1]
        x, y = (columns - x1) / (x2 - x1) * 2 - 1, (rows - y1) / (y2 - y1) * 2 - 1
        places = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), dim=3)
        values = F.grid_sample(some[:, None].float(), places, align_corners=False)
        parts.append((values[:, 0] >= 0.5).cpu().numpy())
    return np.concatenate(parts)


def detections_in_image(found: dict[str, torch.Tensor], resized: Size, size: Size) -> Objects:
    """Returns a model's detections in an image that was resized from `size` to `resized`, in its own pixels."""
    scale = torch.tensor([size[1] / resized[1], size[0] / resized[0]] * 2, device=found["boxes"].device)
    boxes = found["boxes"] * scale
    masks: Sequence[np.ndarray | None] = [None] * len(boxes)
    if "masks" in found:
        masks = list(paste_masks(found["masks"], boxes, size))
    return list(zip(boxes.tolist(), found["labels"].tolist(), found["scores"].tolist(), masks, strict=True))


def coco_results(objects: Objects, image_id: int, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the detections of an image in COCO's format of results."""
    results = []
    for (x1, y1, x2, y2), label, score, mask in objects:
        result: dict[str, Any] = {"image_id": image_id, "category_id": category_ids[label - 1], "score": score}
        result["bbox"] = [x1, y1, x2 - x1, y2 - y1]
        if mask is not None:
            result["segmentation"] = encode_mask(mask)
        results.append(result)
    return results


@contextmanager
def count_non_finite(model: nn.Module, device: torch.device) -> Iterator[torch.Tensor]:
    """Yields the number, so far, of outputs of the heads that are not finite: they would pass for no detections."""
    bad = torch.zeros((), dtype=torch.int64, device=device)

    def count(module: nn.Module, args: Any, outputs: Any) -> None:
        for part in outputs if isinstance(outputs, tuple) else (outputs,):
            for values in part if isinstance(part, list) else (part,):
                bad.add_(~values.isfinite().all())

    heads = [module for name, module in model.named_modules() if name.endswith((".head", "_predictor"))]
    hooks = [head.register_forward_hook(count) for head in heads]
    try:
        yield bad
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def detect_all(
    model: nn.Module,
    images: CocoImages,
    num_pictures: int,
    normalize: Normalize,
    autocast: Callable[[], AbstractContextManager],
    num_workers: int,
    alive: Callable[[], None] = lambda: None,
) -> tuple[list[dict[str, Any]], list[Picture]]:
    """Returns (COCO's results of all images, which the ranks share; the first `num_pictures` pictures of this rank).

    `alive` is called before each image. FloatingPointError if outputs of the heads are not finite.
    """
    device, was_training, side = normalize.mean.device, model.training, model.img_size[0]
    results: list[dict[str, Any]] = []
    pictures: list[Picture] = []
    category_ids = [category for category, _ in images.categories]
    model.eval()
    transform, collate, is_gpu = ResizeForDetection(side), PadAndStack(side), device.type == "cuda"
    most_bytes = images.pixel_format.pixel_bytes * side**2
    with count_non_finite(model, device) as num_bad:
        for index, batch in each_image(images, transform, collate, num_workers, is_gpu, alive, most_bytes):
            sizes, _ = split_targets(batch)
            imgs = pad_with_zeros(normalize(batch[0].to(device, non_blocking=True)), sizes)
            with autocast():
                (found,) = model(imgs, sizes)
            objects = detections_in_image(found, sizes[0], tuple(images.sizes[index].tolist()))
            results += coco_results(objects, int(images.ids[index]), category_ids)
            if len(pictures) < num_pictures:
                shown = [part for part in objects if part[2] >= SHOWN_SCORE]
                whole = torch.from_numpy(images.load(index)[0]).permute(2, 0, 1).to(device)
                picture = as_picture(normalize(whole), normalize)
                pictures.append((picture, true_objects(images, index), shown))
    model.train(was_training)
    if collectives.all_reduce_sum(num_bad) > 0:
        raise FloatingPointError("the outputs of the model are not finite: try --precision fp32, and check --std")
    joined = [result for part in collectives.gather_objects(results) for result in part]
    return sorted(joined, key=lambda result: result["image_id"]), pictures


def evaluate(model: nn.Module, images: CocoImages, masks: bool, num_pictures: int, *how: Any) -> Evaluation:
    """Evaluates a model on all ranks by COCO's average precisions in percent: box_ap, box_ap50, ..., mask_ap, ...

    masks: score masks, too, which all objects must have. how: further arguments of `detect_all`. Scores without objects
    are left out.
    """
    results, pictures = detect_all(model, images, num_pictures, *how)

    def score() -> dict[str, float]:
        truth, kinds = read_coco(images.json_path), {"box": "bbox", "mask": "segm"} if masks else {"box": "bbox"}
        found = {name: average_precision(truth, results, kind) for name, kind in kinds.items()}
        return {f"{name}_{key}": v for name, part in found.items() for key, v in part.items() if v is not None}

    scores = collectives.run_on_rank0(score) | {"num_images": len(images)}
    is_main = collectives.rank_and_world_size()[0] == 0
    names = [name for _, name in images.categories]
    return Evaluation(scores, {}, draw_pictures(pictures, names) if pictures and is_main else None)


# --------------------------------------------------------------------------------------------------------- pictures


def true_objects(images: CocoImages, index: int) -> Objects:
    """Returns the annotated objects of an image. Crowds are left out."""
    objects: Objects = []
    for a in images.annotations(index):
        if a["box"] is not None and not a["crowd"]:
            code = a["segmentation"]
            mask = decode_mask(code, *images.sizes[index].tolist()).astype(bool) if code else None
            objects.append((a["box"], a["label"], 1.0, mask))
    return objects


def draw_objects(img: np.ndarray, objects: Objects, names: Sequence[str]) -> np.ndarray:
    """Draws outlines of boxes and masks on uint8 [H, W, 3], names and scores beside them. Returns a panel."""
    scale, colors = PANEL / max(img.shape[:2]), default_colors(len(names))
    picture = Image.fromarray(panel(img, PANEL))
    draw = ImageDraw.Draw(picture)
    for box, label, _, mask in objects:
        color = tuple(colors[label - 1].tolist())
        draw.rectangle([value * scale for value in box], outline=color, width=2)
        if mask is not None:
            outside = panel(np.where(mask, 0, 255).astype(np.uint8)[:, :, None].repeat(3, 2), PANEL)[:, :, 0]
            large = Image.fromarray(outside)
            picture.paste(color, mask=ImageChops.subtract(large.filter(ImageFilter.MaxFilter(5)), large))
    plates: list[Plate] = []
    for box, label, score, _ in objects:
        text = names[label - 1] if score == 1 else f"{names[label - 1]} {score:.2f}"
        plates.append(draw_plate(draw, text, [value * scale for value in box], colors[label - 1].tolist(), plates))
    return np.asarray(picture)


def draw_plate(
    draw: ImageDraw.ImageDraw, text: str, box: Sequence[float], color: Sequence[int], others: Sequence[Plate]
) -> Plate:
    """Writes `text` on a plate above a box; below or in it if the picture ends there or one of `others` is there."""
    font = ImageFont.load_default(size=14)
    width, height = font.getlength(text) + 6, 18
    x = max(0.0, min(box[0], PANEL - width))
    places = [(x, y, x + width, y + height) for y in (box[1] - height, box[3], box[1], box[3] - height)]
    free = [
        place for place in places if place[1] >= 0 and place[3] <= PANEL and not any(overlap(place, o) for o in others)
    ]
    place = (free or places[2:])[0]
    draw.rectangle(place, fill=tuple(color))
    is_light = np.dot(color, (0.299, 0.587, 0.114)) > 140
    draw.text((x + 3, place[1] + height / 2), text, (0, 0, 0) if is_light else (255, 255, 255), font, anchor="lm")
    return place


def overlap(a: Plate, b: Plate) -> bool:
    """Whether two rectangles (left, top, right, bottom) have a common area."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def draw_pictures(pictures: Sequence[Picture], names: Sequence[str]) -> np.ndarray:
    """Draws a row of truth and detections for each picture. Returns uint8 [H, W, 3]."""
    rows = [[draw_objects(img, objects, names) for objects in both] for img, *both in pictures]
    return table(rows, ["truth", f"detections with a score of at least {SHOWN_SCORE}"])
