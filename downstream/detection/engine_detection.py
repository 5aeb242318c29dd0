"""The training loop of detection and its evaluation. It knows batches and losses, but no model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from downstream.detection.annotations import read_coco
from downstream.detection.data import CocoImages, DetectionBatch, ResizeForDetection, pad_to_side
from downstream.detection.metrics import average_precision
from downstream.detection.objects import DetectedObject, annotated_objects, coco_results, detections_in_image
from downstream.detection.pictures import TITLES, draw_objects
from engine_finetune import update
from util import collectives
from util.data.datasets import AddressedDataset
from util.data.pictures import as_picture
from util.data.transforms import Size, to_tensor
from util.evaluate.context import EvalContext, evaluation_batches, share_of_rank
from util.evaluate.predictions import view_of_one
from util.evaluate.results import Evaluation
from util.pictures import table
from util.run.train.loop import TrainLoop

# Of the heads: of proposals, boxes and masks.
LAST_LAYERS = (".cls_logits", ".bbox_pred", ".cls_score", ".mask_fcn_logits")


def pad_with_zeros(imgs: Tensor, sizes: Sequence[Size]) -> Tensor:
    """Sets the padded pixels of normalised images [B, C, H, W] to 0. sizes: (height, width) without the padding."""
    for img, (height, width) in zip(imgs, sizes, strict=True):
        img[:, height:] = 0
        img[:, :, width:] = 0
    return imgs


def split_targets(batch: DetectionBatch) -> tuple[list[Size], list[dict[str, Tensor]]]:
    """Returns (sizes, targets) of the images of a batch. Without masks in the batch, those of targets are empty."""
    _, sizes, counts, boxes, labels, masks = batch
    targets = []
    first = 0
    for count in counts:
        objects = slice(first, first + count)
        targets.append({"boxes": boxes[objects], "labels": labels[objects], "masks": masks[objects]})
        first += count
    return sizes, targets


def forward_backward(model: nn.Module, batch: DetectionBatch, micro: int, loop: TrainLoop) -> None:
    """Computes the losses of micro-batch number `micro` of a step, and adds its share of the gradient."""
    sizes, targets = split_targets(batch)
    with loop.no_sync_before_last(model, micro):
        with loop.autocast():
            imgs = pad_with_zeros(loop.normalize(batch[0]), sizes)
            losses = model(imgs, sizes, targets)
        loop.scaled_loss(losses).backward()


def train_one_epoch(model: nn.Module, batches: Iterator[DetectionBatch], steps: range, loop: TrainLoop) -> None:
    """Makes the optimizer steps `steps`. A signal ends them earlier.

    model: `model(imgs, sizes, targets) -> {name: loss}`. batches: `loop.accum_iter` per step, from `steps.start` on.
    """
    model.train()
    for step in steps:
        loop.set_rates(step)
        for micro in range(loop.accum_iter):
            batch = loop.next_batch(batches, micro)
            forward_backward(model, batch, micro, loop)
        values = update(loop)
        loop.optimizer.zero_grad(set_to_none=True)
        loop.log_step(values)  # with the losses, every `print_freq` steps
        if loop.should_stop():  # all ranks have agreed
            return


# ------------------------------------------------------------------------------------------------------- evaluation


@contextmanager
def finite_outputs(model: nn.Module, device: torch.device) -> Iterator[None]:
    """At the end, FloatingPointError on all ranks if outputs of the heads were not finite: they pass for no objects."""
    num_bad = torch.zeros((), dtype=torch.int64, device=device)

    def count(module: nn.Module, args: Any, outputs: Tensor) -> None:
        num_bad.add_(~outputs.isfinite().all())

    layers = [module for name, module in model.named_modules() if name.endswith(LAST_LAYERS)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if collectives.all_reduce_sum(num_bad) > 0:
        raise FloatingPointError("the outputs of the model are not finite: try --precision fp32, and check --std")


def detect(model: nn.Module, img: Tensor, size: Size, context: EvalContext) -> list[DetectedObject]:
    """Returns the objects that a model in eval mode detects in an image, in pixels of that image.

    img, size: of `ResizeForDetection`.
    """
    resized = (img.shape[1], img.shape[2])
    imgs = context.normalize(img[None].to(context.device, non_blocking=True))
    with context.autocast():
        (detections,) = model(pad_to_side(imgs, model.img_size[0]), [resized])
    return detections_in_image(detections, resized, size)


@torch.no_grad()
def detect_all(
    model: nn.Module,
    images: CocoImages,
    num_pictures: int,
    context: EvalContext,
) -> tuple[list[dict[str, Any]], list[list[np.ndarray]]]:
    """Returns (COCO's results of all images, which the ranks share; panels of TITLES of this rank's first images)."""
    side = model.img_size[0]
    dataset = AddressedDataset(images, ResizeForDetection(side))
    indices = range(len(images))
    loaded = evaluation_batches(dataset, indices, context.one_by_one(), view_of_one, (side, side))
    results: list[dict[str, Any]] = []
    rows: list[list[np.ndarray]] = []
    model.eval()
    with finite_outputs(model, context.device):
        for index, (img, size) in zip(share_of_rank(indices).tolist(), loaded, strict=True):
            objects = detect(model, img, size, context)
            results += coco_results(objects, int(images.ids[index]), images.categories)
            if len(rows) < num_pictures:
                pixels, _ = images.load(index)
                picture = as_picture(to_tensor(pixels), context.normalize)
                truth = annotated_objects(images, index)
                rows.append([draw_objects(picture, shown, images.categories) for shown in (truth, objects)])
    results_of_all = chain.from_iterable(collectives.gather_objects(results))
    return sorted(results_of_all, key=itemgetter("image_id")), rows


def score_results(results: list[dict[str, Any]], images: CocoImages, masks: bool) -> Evaluation:
    """Returns COCO's average precisions in percent: box_ap, box_ap50, ..., mask_ap, ... Those without objects are left
    out. The details are the average precisions of each category."""
    truth = read_coco(images.json_path)
    kinds = {"box": "bbox"}
    if masks:
        kinds["mask"] = "segm"
    scores: dict[str, float] = {}
    details = {}
    for name, kind in kinds.items():
        precision = average_precision(truth, results, dict(images.categories), kind)
        for measure, value in precision.scores.items():
            scores[f"{name}_{measure}"] = value
        details[f"{name}_ap_of_classes"] = precision.of_classes
    scores["num_images"] = len(images)
    return Evaluation(scores, details)


def evaluate(model: nn.Module, images: CocoImages, masks: bool, num_pictures: int, context: EvalContext) -> Evaluation:
    """Evaluates a model on all ranks by COCO's average precisions, and the number of images.

    masks: score masks, too, which all objects must have. num_pictures: images that are shown.
    """
    results, rows = detect_all(model, images, num_pictures, context)
    evaluation = collectives.run_on_rank0(lambda: score_results(results, images, masks))
    rank, _ = collectives.rank_and_world_size()
    if rows and rank == 0:
        return evaluation._replace(picture=table(rows, TITLES))
    return evaluation
