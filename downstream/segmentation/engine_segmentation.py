"""The training loop of segmentation, slide inference and evaluation. It knows batches and logits, but no model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from downstream.pictures import default_colors
from downstream.segmentation.data import IGNORE, ResizeForEvaluation, SegmentationImages, stack_pairs
from downstream.segmentation.metrics import count_pixels, segmentation_scores
from engine_finetune import update
from util import collectives
from util.data.datasets import AddressedDataset
from util.data.invalid_pixels import invalid_everywhere
from util.data.pictures import as_picture, panel
from util.data.transforms import Size
from util.evaluate.context import EvalContext, evaluation_batches, share_of_rank
from util.evaluate.results import Evaluation
from util.pictures import table, write_lines
from util.run.train.loop import TrainLoop

LOSS_WEIGHTS = {"decode": 1.0, "aux": 0.4}
MAX_WINDOWS = 8  # of an image in one batch; they lie side by side
WINDOW_WEIGHTS = ("equal", "gaussian")


class ClassList(NamedTuple):
    """The classes of the labels."""

    names: list[str]
    colors: np.ndarray  # uint8 [K, 3]


@dataclass(frozen=True)
class SlidingWindows:
    """How an image is shown to the model: scaled to `image_scale` (long, short), window by window."""

    image_scale: Sequence[int]
    stride: int  # pixels from one window to the next
    weights: str = "equal"  # one of WINDOW_WEIGHTS


class Prediction(NamedTuple):
    """An image of a picture."""

    img: np.ndarray  # uint8 [h, w, 3]
    truth: np.ndarray  # uint8 [H, W]
    predicted: np.ndarray  # int64 [H, W]; IGNORE where the image is invalid in all channels


def segmentation_losses(logits: Mapping[str, Tensor], labels: Tensor, mean_over_valid: bool) -> dict[str, Tensor]:
    """Returns the weighted cross-entropy of each head, at the resolution of the labels.

    logits: {name: [B, K, h, w]}. labels: [B, H, W]; IGNORE counts as no error. mean_over_valid: the mean is over the
    labelled pixels of all processes, instead of over all pixels, as in mmsegmentation.
    """
    labels = labels.long()
    count = torch.full((), float(labels.numel()), device=labels.device)
    if mean_over_valid:
        _, world_size = collectives.rank_and_world_size()
        num_labelled = (labels != IGNORE).sum().float()
        count = collectives.all_reduce_sum(num_labelled) / world_size
    losses = {}
    for name, values in logits.items():
        upsampled = F.interpolate(values.float(), size=labels.shape[1:], mode="bilinear", align_corners=False)
        total = F.cross_entropy(upsampled, labels, ignore_index=IGNORE, reduction="sum")
        losses[name] = LOSS_WEIGHTS[name] * total / count.clamp(min=1)
    return losses


def forward_backward(
    model: nn.Module, batch: Sequence[Tensor], micro: int, loop: TrainLoop, mean_over_valid: bool
) -> None:
    """Computes the losses of micro-batch number `micro` of a step, and adds its share of the gradient."""
    imgs, labels = batch
    with loop.no_sync_before_last(model, micro):
        with loop.autocast():
            logits = model(loop.normalize(imgs))
        losses = segmentation_losses(logits, labels, mean_over_valid)
        loop.scaled_loss(losses).backward()


def train_one_epoch(
    model: nn.Module, batches: Iterator[Sequence[Tensor]], steps: range, loop: TrainLoop, mean_over_valid: bool
) -> None:
    """Makes the optimizer steps `steps`. A signal ends them earlier.

    model: `model(imgs) -> {name: logits}`. batches: (imgs [B, C, H, W] as stored, labels uint8 [B, H, W]),
    `loop.accum_iter` per step, from `steps.start` on. mean_over_valid: see `segmentation_losses`.
    """
    model.train()
    for step in steps:
        loop.set_rates(step)
        for micro in range(loop.accum_iter):
            batch = loop.next_batch(batches, micro)
            forward_backward(model, batch, micro, loop, mean_over_valid)
        values = update(loop)
        loop.optimizer.zero_grad(set_to_none=True)
        loop.log_step(values)  # with the losses, every `print_freq` steps
        if loop.should_stop():  # all ranks have agreed
            return


# -------------------------------------------------------------------------------------------------------- inference


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Returns where the windows along one axis begin. They cover the axis, and the last one ends at its end."""
    last = max(length - window, 0)
    return [*range(0, last, stride), last]


class RowsOfLogits(NamedTuple):
    """Rows of an image that no further window covers. logits: the mean of all windows, [K, h, W]."""

    rows: slice
    logits: Tensor


def slide_logits(
    predict: Callable[[Tensor], Tensor], img: Tensor, window: Size, stride: int, weights: str = "equal"
) -> Tensor:
    """Returns the mean logits [K, H, W] of all windows that cover each pixel of a normalised image [C, H, W].

    predict, window, stride, weights: see `slide_rows`.
    """
    height, width = img.shape[-2:]
    logits: Tensor | None = None

    def read(rows: slice, columns: slice) -> Tensor:
        return img[:, rows, columns]

    for finished in slide_rows(predict, read, (height, width), window, stride, weights):
        if logits is None:
            logits = finished.logits.new_empty(len(finished.logits), height, width)
        logits[:, finished.rows] = finished.logits
    assert logits is not None
    return logits


def slide_rows(
    predict: Callable[[Tensor], Tensor],
    read: Callable[[slice, slice], Tensor],
    size: Size,
    window: Size,
    stride: int,
    weights: str = "equal",
) -> Iterator[RowsOfLogits]:
    """Yields the mean logits of an image from top to bottom. The sums of as many rows as a window has are held.

    predict: `predict(imgs [n, C, *window]) -> logits [n, K, h, w]`, which are resized to the window; n is at most
    MAX_WINDOWS. read: `read(rows, columns)` returns that part of the normalised image, [C, h, w]. size: (height, width)
    of the image. One smaller than the window is padded with zeros at the bottom and the right. weights: of the pixels
    of a window in the mean, see `window_profile`.
    """
    height, width = size
    window_height, window_width = window
    tops = window_starts(height, window_height, stride)
    lefts = window_starts(width, window_width, stride)
    row_profile = window_profile(window_height, weights)
    column_profile = window_profile(window_width, weights)
    row_totals = sum_profiles(tops, row_profile)
    column_totals = sum_profiles(lefts, column_profile)
    profile = row_profile[:, None] * column_profile
    sums: Tensor | None = None  # [K, window_height, W] of the rows that begin where the current windows do
    for top, next_top in pairwise([*tops, tops[-1] + window_height]):
        rows = slice(top, min(top + window_height, height))
        for first in range(0, len(lefts), MAX_WINDOWS):
            lefts_of_batch = lefts[first : first + MAX_WINDOWS]
            parts = [read(rows, slice(left, min(left + window_width, width))) for left in lefts_of_batch]
            logits = predict(pad_and_stack(parts, window)).float()
            if sums is None:
                sums = logits.new_zeros(logits.shape[1], window_height, len(column_totals))
                row_totals = row_totals.to(sums.device)
                column_totals = column_totals.to(sums.device)
                profile = profile.to(sums.device)
            for left, values in zip(lefts_of_batch, logits, strict=True):
                sums[:, :, left : left + window_width] += resize_logits(values, window) * profile
        assert sums is not None
        num_rows = next_top - top
        mean = sums[:, :num_rows] / (row_totals[top:next_top, None] * column_totals)
        yield RowsOfLogits(slice(top, min(next_top, height)), mean[:, : height - top, :width])
        sums = torch.cat([sums[:, num_rows:], torch.zeros_like(sums[:, :num_rows])], dim=1)


def pad_and_stack(parts: Sequence[Tensor], size: Size) -> Tensor:
    """Returns images [C, h, w] as a batch [n, C, *size], with zeros at the bottom and the right."""
    imgs = parts[0].new_zeros(len(parts), len(parts[0]), *size)
    for img, part in zip(imgs, parts, strict=True):
        img[:, : part.shape[1], : part.shape[2]] = part
    return imgs


def window_profile(length: int, weights: str) -> Tensor:
    """Returns the weights of a window along one axis.

    gaussian: they fall to the borders, with a deviation of an eighth of the window, as in nnU-Net and MONAI.
    """
    if weights != "gaussian":
        return torch.ones(length)
    places = torch.arange(length) - (length - 1) / 2
    return torch.exp(-((8 * places / length) ** 2) / 2)


def sum_profiles(starts: Sequence[int], profile: Tensor) -> Tensor:
    """Returns the sum of the weights of all windows at each place of an axis. starts: of the windows."""
    window = len(profile)
    totals = torch.zeros(starts[-1] + window)
    for start in starts:
        totals[start : start + window] += profile
    return totals


def resize_logits(logits: Tensor, size: Size) -> Tensor:
    """Resizes logits [K, h, w] bilinearly to [K, *size]."""
    return F.interpolate(logits[None], size=size, mode="bilinear", align_corners=False)[0]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    images: SegmentationImages,
    classes: ClassList,
    windows: SlidingWindows,
    num_pictures: int,
    context: EvalContext,
) -> Evaluation:
    """Evaluates a model on the images, which the ranks share.

    Logits are resized to the labels, so that each pixel of a label file counts once. num_pictures: images of each rank
    that may be shown; rank 0 draws its own. FloatingPointError if logits are not finite.
    """
    device = context.device
    num_classes = len(classes.names)
    counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
    num_bad = torch.zeros((), dtype=torch.int64, device=device)
    predictions: list[Prediction] = []

    def predict(parts: Tensor) -> Tensor:
        with context.autocast():
            return model(parts)["decode"]

    dataset = AddressedDataset(images, ResizeForEvaluation(windows.image_scale))
    largest = (windows.image_scale[0], windows.image_scale[1])
    was_training = model.training
    model.eval()
    indices = range(len(images))
    loaded = evaluation_batches(dataset, indices, context.one_by_one(), stack_pairs, largest=largest)
    for index, (stored, labels) in zip(share_of_rank(indices).tolist(), loaded, strict=True):
        truth = labels[0].to(device, non_blocking=True)
        imgs = context.normalize(stored.to(device, non_blocking=True))
        img = imgs[0]
        logits = slide_logits(predict, img, model.img_size, windows.stride, windows.weights)
        num_bad += ~logits.isfinite().all()
        predicted = resize_logits(logits, tuple(truth.shape)).argmax(dim=0)
        counts += count_pixels(predicted, truth, num_classes)
        if len(predictions) < num_pictures:
            label_map = predicted.cpu().numpy()
            if images.pixel_format.has_invalid:
                pixels, _ = images.load(index)  # in the size of the labels
                label_map[invalid_everywhere(pixels)] = IGNORE
            prediction = Prediction(
                as_picture(stored[0], context.normalize),
                truth=labels[0].numpy(),
                predicted=label_map,
            )
            predictions.append(prediction)
    model.train(was_training)
    if collectives.all_reduce_sum(num_bad) > 0:
        raise FloatingPointError("the logits of some images are not finite: try --precision fp32, and check --std")
    measures = segmentation_scores(collectives.all_reduce_sum(counts))
    scores = {name: measures[name] for name in ("miou", "macc", "aacc")}
    scores["num_images"] = len(images)
    rank, _ = collectives.rank_and_world_size()
    picture = None
    if predictions and rank == 0:
        picture = draw_predictions(predictions, classes.colors)
    details = {name: dict(zip(classes.names, measures[name], strict=True)) for name in ("iou", "acc")}
    return Evaluation(scores, details, picture)


# --------------------------------------------------------------------------------------------------------- pictures


def read_classes(path: str | Path | None, num_classes: int) -> ClassList:
    """Reads the classes from a text file. Without one, they have numbers for names, and default colours.

    A line is `name`, or `R G B name`, in the order of the classes. ValueError if the file has another number of lines.
    """
    names = [str(k) for k in range(num_classes)]
    colors = default_colors(num_classes)
    if path is None:
        return ClassList(names, colors)
    if not Path(path).is_file():
        raise ValueError(f"--class_names {str(path)!r} does not exist: give a text file with a line for each class")
    text = Path(path).read_text(encoding="utf-8-sig")  # Notepad writes a BOM
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if len(lines) != num_classes:
        raise ValueError(f"--class_names {str(path)!r} names {len(lines)} classes, but there are {num_classes}")
    for k, words in enumerate(lines):
        has_color = len(words) > 3 and all(word.isdigit() and int(word) < 256 for word in words[:3])
        if has_color:
            colors[k] = [int(word) for word in words[:3]]
            words = words[3:]
        names[k] = " ".join(words)
    return ClassList(names, colors)


def draw_labels(picture: np.ndarray, sample: Sequence[Tensor], classes: ClassList) -> np.ndarray:
    """Draws the labels of a training sample (img, labels) over its picture, and the names of its classes."""
    labels = sample[1].numpy()
    has_class = labels != IGNORE
    picture[has_class] = picture[has_class] // 2 + classes.colors[labels[has_class]] // 2
    present = np.unique(labels[has_class]).tolist()
    return write_lines(panel(picture), {classes.names[k]: tuple(classes.colors[k]) for k in present})


def draw_predictions(predictions: Sequence[Prediction], colors: np.ndarray) -> np.ndarray:
    """Draws a row of image, truth and prediction (black: ignored) for each image. Returns uint8 [H, W, 3]."""
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(colors)] = colors
    rows = []
    for img, truth, predicted in predictions:
        panels = [img, palette[truth], palette[predicted]]
        rows.append([panel(picture) for picture in panels])
    return table(rows, ["image", "truth", "prediction"])
