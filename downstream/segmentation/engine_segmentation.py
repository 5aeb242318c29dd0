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
from downstream.segmentation.data import (
    IGNORE,
    ResizeForEvaluation,
    SegmentationImages,
    resize_bilinear,
    stack_pairs,
)
from downstream.segmentation.metrics import count_pixels, segmentation_scores
from engine_finetune import update
from util import collectives
from util.data.datasets import AddressedDataset
from util.data.pictures import as_picture, panel
from util.data.transforms import Size
from util.evaluate.context import EvalContext, evaluation_batches
from util.evaluate.results import Evaluation
from util.pictures import table, write_lines
from util.run.files.record import CheckpointInfo
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


def slide_logits(
    predict: Callable[[Tensor], Tensor], img: Tensor, window: Size, stride: int, weights: str = "equal"
) -> Tensor:
    """Returns the mean logits [K, H, W] of all windows that cover each pixel of a normalised image [C, H, W].

    predict, window, stride, weights: see `slide_rows`.
    """

    def read(rows: slice) -> Tensor:
        return img[:, rows]

    size = (img.shape[1], img.shape[2])
    return torch.cat(list(slide_rows(predict, read, size, window, stride, weights)), dim=1)


def slide_rows(
    predict: Callable[[Tensor], Tensor],
    read: Callable[[slice], Tensor],
    size: Size,
    window: Size,
    stride: int,
    weights: str = "equal",
) -> Iterator[Tensor]:
    """Yields the mean logits of an image from top to bottom, some rows [K, h, W] at a time.

    The sums of as many rows as a window has are held.

    predict: `predict(imgs [n, C, *window]) -> logits [n, K, h, w]`, which are resized to the window; n is at most
    MAX_WINDOWS. read: `read(rows)` returns these rows of the normalised image, [C, h, W]. size: (height, width) of the
    image. One smaller than the window is padded with zeros at the bottom and the right. weights: of the pixels of a
    window in the mean, see `window_profile`.
    """
    height, width = size
    window_height, window_width = window
    tops = window_starts(height, window_height, stride)
    lefts = window_starts(width, window_width, stride)
    padded_width = lefts[-1] + window_width
    profile = window_profile(window_height, weights)[:, None] * window_profile(window_width, weights)
    sums: Tensor | None = None  # [K + 1, window_height, W] from row `top` on: weighted logits, and their weights
    for top, next_top in pairwise([*tops, tops[-1] + window_height]):
        rows = read(slice(top, min(top + window_height, height)))
        rows = F.pad(rows, (0, padded_width - width, 0, window_height - rows.shape[1]))
        for first in range(0, len(lefts), MAX_WINDOWS):
            lefts_of_batch = lefts[first : first + MAX_WINDOWS]
            imgs = torch.stack([rows[:, :, left : left + window_width] for left in lefts_of_batch])
            logits = predict(imgs).float()
            if sums is None:
                sums = logits.new_zeros(logits.shape[1] + 1, window_height, padded_width)
                profile = profile.to(sums.device)
            for left, values in zip(lefts_of_batch, logits, strict=True):
                sums_of_window = sums[:, :, left : left + window_width]
                sums_of_window[:-1] += resize_bilinear(values, window) * profile
                sums_of_window[-1] += profile
        assert sums is not None
        num_rows = next_top - top
        mean = sums[:-1, :num_rows] / sums[-1, :num_rows]
        yield mean[:, : height - top, :width]
        sums = F.pad(sums[:, num_rows:], (0, 0, 0, num_rows))


def window_profile(length: int, weights: str) -> Tensor:
    """Returns the weights of a window along one axis.

    gaussian: they fall to the borders, with a deviation of an eighth of the window, as in nnU-Net and MONAI.
    """
    if weights != "gaussian":
        return torch.ones(length)
    places = torch.arange(length) - (length - 1) / 2
    return torch.exp(-((8 * places / length) ** 2) / 2)


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
    that its picture shows. The model stays in eval mode. FloatingPointError if logits are not finite.
    """
    device = context.device
    num_classes = len(classes.names)
    counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
    num_bad = torch.zeros((), dtype=torch.int64, device=device)
    shown: list[list[np.ndarray]] = []

    def predict(parts: Tensor) -> Tensor:
        with context.autocast():
            return model(parts)["decode"]

    dataset = AddressedDataset(images, ResizeForEvaluation(windows.image_scale))
    largest = (windows.image_scale[0], windows.image_scale[1])
    model.eval()
    indices = range(len(images))
    loaded = evaluation_batches(dataset, indices, context.one_by_one(), stack_pairs, largest=largest)
    for stored, labels in loaded:
        truth = labels[0].to(device, non_blocking=True)
        imgs = context.normalize(stored.to(device, non_blocking=True))
        img = imgs[0]
        logits = slide_logits(predict, img, model.img_size, windows.stride, windows.weights)
        num_bad += ~logits.isfinite().all()
        predicted = resize_bilinear(logits, tuple(truth.shape)).argmax(dim=0)
        counts += count_pixels(predicted, truth, num_classes)
        if len(shown) < num_pictures:
            picture_of_img = as_picture(stored[0], context.normalize)
            is_invalid = stored.isnan().all(dim=1, keepdim=True).byte()
            is_invalid = F.interpolate(is_invalid, size=truth.shape)[0, 0].bool()
            label_map = predicted.cpu().masked_fill(is_invalid, IGNORE)
            shown.append(draw_prediction(picture_of_img, labels[0].numpy(), label_map.numpy(), classes.colors))
    if collectives.all_reduce_sum(num_bad) > 0:
        raise FloatingPointError("the logits of some images are not finite: try --precision fp32, and check --std")
    measures = segmentation_scores(collectives.all_reduce_sum(counts))
    scores = {name: measures[name] for name in ("miou", "macc", "aacc")}
    scores["num_images"] = len(images)
    picture = None
    if shown:
        picture = table(shown, ["image", "truth", "prediction"])
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


def classes_of(info: CheckpointInfo) -> ClassList:
    """Returns the classes of a trained model, from what its checkpoint says."""
    assert info.classes is not None
    return ClassList(info.classes, np.array(info.class_colors, np.uint8))


def draw_labels(picture: np.ndarray, sample: Sequence[Tensor], classes: ClassList) -> np.ndarray:
    """Draws the labels of a training sample (img, labels) over its picture, and the names of its classes."""
    labels = sample[1].numpy()
    blended = blend(picture, labels, classes.colors, IGNORE)
    present = np.unique(labels[labels != IGNORE]).tolist()
    return write_lines(panel(blended), {classes.names[k]: tuple(classes.colors[k]) for k in present})


def blend(picture: np.ndarray, labels: np.ndarray, colors: np.ndarray, no_class: int) -> np.ndarray:
    """Returns a picture uint8 [H, W, 3] under the colours of its labels [H, W], of which `no_class` has none."""
    has_class = labels != no_class
    blended = picture.copy()
    blended[has_class] = picture[has_class] // 2 + colors[labels[has_class]] // 2
    return blended


def draw_prediction(
    picture: np.ndarray, truth: np.ndarray, predicted: np.ndarray, colors: np.ndarray
) -> list[np.ndarray]:
    """Returns panels of an image uint8 [h, w, 3], its labels [H, W] and their prediction. IGNORE is black in both."""
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(colors)] = colors
    return [panel(picture), panel(palette[truth]), panel(palette[predicted])]
