"""The training loop of segmentation, slide inference and evaluation. It knows batches and logits, but no model."""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from downstream.common import each_image
from downstream.pictures import as_picture, default_colors, panel
from downstream.segmentation.data import IGNORE, ResizeForEvaluation, SegmentationImages, stack_pairs
from downstream.segmentation.metrics import count_pixels, segmentation_scores
from util import collectives
from util.data.transforms import Normalize, Size
from util.pictures import table
from util.run.evaluation import Evaluation
from util.run.loop import TrainLoop

Batch = Sequence[torch.Tensor]  # (imgs uint8 [B, C, H, W], labels uint8 [B, H, W])
LOSS_WEIGHTS = {"decode": 1.0, "aux": 0.4}
MAX_WINDOWS = 8  # of an image in one batch


def segmentation_losses(
    logits: Mapping[str, torch.Tensor], labels: torch.Tensor, mean_over_valid: bool
) -> dict[str, torch.Tensor]:
    """Returns the weighted cross-entropy of each head, at the resolution of the labels.

    logits: {name: [B, K, h, w]}. labels: [B, H, W]; IGNORE counts as no error. mean_over_valid: the mean is over the
    labelled pixels of all processes, instead of over all pixels, as in mmsegmentation.
    """
    labels = labels.long()
    count = torch.full((), float(labels.numel()), device=labels.device)
    if mean_over_valid:
        count = collectives.all_reduce_sum((labels != IGNORE).sum().float()) / collectives.rank_and_world_size()[1]
    losses = {}
    for name, values in logits.items():
        upsampled = F.interpolate(values.float(), size=labels.shape[1:], mode="bilinear", align_corners=False)
        total = F.cross_entropy(upsampled, labels, ignore_index=IGNORE, reduction="sum")
        losses[name] = LOSS_WEIGHTS[name] * total / count.clamp(min=1)
    return losses


def train_iterations(
    model: nn.Module, batches: Iterator[Batch], steps: range, loop: TrainLoop, mean_over_valid: bool = False
) -> None:
    """Makes the optimizer steps `steps`. A signal ends them earlier.

    model: `model(imgs) -> {name: logits}`. batches: iterator over micro-batches that stands at `steps.start`.
    """
    model.train()
    for step in steps:
        loop.begin_step(step)
        for micro in range(loop.accum_iter):
            imgs, labels = loop.next_batch(batches, micro)
            with loop.no_sync_before_last(model, micro):
                with loop.autocast():
                    logits = model(loop.normalize(imgs))
                losses = segmentation_losses(logits, labels, mean_over_valid)
                del imgs, labels, logits  # frees their memory for the backward pass
                loop.scaled_loss(losses, micro).backward()
        grad_norm = loop.update_weights()
        loop.end_step(grad_norm)  # logs every `print_freq` steps
        if loop.should_stop():  # all ranks have agreed
            return


# -------------------------------------------------------------------------------------------------------- inference


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Returns where the windows along one axis begin. They cover the axis, and the last one ends at its end."""
    number = -(-max(length - window, 0) // stride) + 1
    return [max(0, min(i * stride, length - window)) for i in range(number)]


def slide_logits(
    predict: Callable[[torch.Tensor], torch.Tensor], img: torch.Tensor, window: Size, stride: int
) -> torch.Tensor:
    """Returns the mean logits [K, H, W] of all windows that cover each pixel of a normalised image [C, H, W].

    predict: `predict(imgs [n, C, *window]) -> logits [n, K, h, w]`, which are resized to the window; n is at most
    MAX_WINDOWS. An image smaller than the window is padded with zeros at the bottom and the right.
    """
    height, width = img.shape[-2:]
    img = F.pad(img, (0, max(0, window[1] - width), 0, max(0, window[0] - height)))
    boxes = [
        (slice(top, top + window[0]), slice(left, left + window[1]))
        for top in window_starts(img.shape[-2], window[0], stride)
        for left in window_starts(img.shape[-1], window[1], stride)
    ]
    total = count = torch.zeros(img.shape[-2:], device=img.device)
    for first in range(0, len(boxes), MAX_WINDOWS):
        batch = boxes[first : first + MAX_WINDOWS]
        logits = predict(torch.stack([img[:, rows, columns] for rows, columns in batch])).float()
        if first == 0:
            total = count.new_zeros(logits.shape[1], *img.shape[-2:])
        for (rows, columns), values in zip(batch, logits, strict=True):
            total[:, rows, columns] += resize_logits(values, window)
            count[rows, columns] += 1
    return (total / count)[:, :height, :width]


def resize_logits(logits: torch.Tensor, size: Size) -> torch.Tensor:
    """Resizes logits [K, h, w] bilinearly to [K, *size]."""
    return F.interpolate(logits[None], size=size, mode="bilinear", align_corners=False)[0]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    images: SegmentationImages,
    args: argparse.Namespace,
    classes: tuple[list[str], np.ndarray],
    normalize: Normalize,
    autocast: Callable[[], AbstractContextManager],
    num_workers: int,
    alive: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluates a model on the images, which the ranks share, with the flags' classes, scale and stride.

    classes: (names, colours uint8 [K, 3]). `alive` is called before each image. Logits are resized to the labels, so
    that each pixel of a label file counts once. FloatingPointError if logits are not finite.
    """
    device, was_training = normalize.mean.device, model.training
    counts = torch.zeros(args.num_classes, args.num_classes, dtype=torch.int64, device=device)
    num_bad = torch.zeros((), dtype=torch.int64, device=device)
    pictures: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def predict(windows: torch.Tensor) -> torch.Tensor:
        with autocast():
            return model(windows)["decode"]

    model.eval()
    transform, is_gpu = ResizeForEvaluation(args.image_scale), device.type == "cuda"
    most_bytes = images.pixel_format.pixel_bytes * math.prod(args.image_scale)
    for _, (imgs, labels) in each_image(images, transform, stack_pairs, num_workers, is_gpu, alive, most_bytes):
        truth = labels[0].to(device, non_blocking=True)
        img = normalize(imgs.to(device, non_blocking=True))[0]
        logits = slide_logits(predict, img, model.img_size, args.stride)
        num_bad += ~logits.isfinite().all()
        predicted = resize_logits(logits, tuple(truth.shape)).argmax(dim=0)
        counts += count_pixels(predicted, truth, args.num_classes)
        if len(pictures) < args.num_pictures:
            pictures.append((as_picture(img, normalize), labels[0].numpy(), predicted.cpu().numpy()))
    model.train(was_training)
    if bad := collectives.all_reduce_sum(num_bad).item():
        raise FloatingPointError(f"the logits of {bad} images are not finite: try --precision fp32, and check --std")
    found = segmentation_scores(collectives.all_reduce_sum(counts))
    scores = {name: found[name] for name in ("miou", "macc", "aacc")} | {"num_images": len(images)}
    is_main = collectives.rank_and_world_size()[0] == 0
    picture = draw_predictions(pictures, classes[1]) if pictures and is_main else None
    return Evaluation(scores, name_scores(found, classes[0]), picture)


def name_scores(scores: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns {"iou": {class: value}, "acc": {class: value}}. Classes of one name are told apart by their number."""
    unique = [name if names.count(name) == 1 else f"{name} ({k})" for k, name in enumerate(names)]
    return {key: dict(zip(unique, scores[key], strict=True)) for key in ("iou", "acc")}


# --------------------------------------------------------------------------------------------------------- pictures


def read_classes(path: str | Path | None, num_classes: int) -> tuple[list[str], np.ndarray]:
    """Returns (names, colours uint8 [K, 3]) of the classes from a text file; numbers and default colours without one.

    A line is `name`, or `R G B name`, in the order of the classes. ValueError if the file has another number of lines.
    """
    names, colors = [str(k) for k in range(num_classes)], default_colors(num_classes)
    if path is None:
        return names, colors
    if not Path(path).is_file():
        raise ValueError(f"--class_names {str(path)!r} does not exist: give a text file with a line for each class")
    lines = [line.split() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(lines) != num_classes:
        raise ValueError(f"--class_names {str(path)!r} names {len(lines)} classes, but there are {num_classes}")
    for k, words in enumerate(lines):
        if len(words) > 3 and all(word.isdigit() and int(word) < 256 for word in words[:3]):
            colors[k], words = [int(word) for word in words[:3]], words[3:]
        names[k] = " ".join(words)
    return names, colors


def draw_predictions(pictures: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], colors: np.ndarray) -> np.ndarray:
    """Draws a row of image, truth (black: ignored) and prediction for each picture. Returns uint8 [H, W, 3]."""
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(colors)] = colors
    rows = [[panel(img), panel(palette[truth]), panel(palette[predicted])] for img, truth, predicted in pictures]
    return table(rows, ["image", "truth", "prediction"])
