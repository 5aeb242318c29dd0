"""Scores of semantic segmentation over a whole set: mIoU, mAcc and aAcc from one matrix of pixel counts."""

import math
from typing import Any

import torch
from torch import Tensor

from downstream.segmentation.data import IGNORE


def count_pixels(predicted: Tensor, truth: Tensor, num_classes: int) -> Tensor:
    """Returns the number of pixels of each (true class, predicted class), int64 [K, K]. IGNORE in `truth` is left out.

    predicted, truth: classes of any one shape.
    """
    is_labelled = truth != IGNORE
    rows = truth[is_labelled].long()
    columns = predicted[is_labelled].long()
    counts = torch.bincount(rows * num_classes + columns, minlength=num_classes**2)
    return counts.view(num_classes, num_classes)


def segmentation_scores(counts: Tensor) -> dict[str, Any]:
    """Returns {"miou", "macc", "aacc", "iou", "acc"} of pixel counts [K, K], in percent.

    iou, acc: of each class; None for a class without true pixels (acc), and without predicted ones either (iou). miou
    and macc are the means over all other classes.
    """
    counts = counts.double().cpu()
    right = counts.diagonal()
    true = counts.sum(dim=1)
    predicted = counts.sum(dim=0)
    iou = 100 * right / (true + predicted - right)  # 0 / 0 is nan
    acc = 100 * right / true
    aacc = 100 * right.sum() / true.sum()
    return {
        "miou": iou.nanmean().item(),
        "macc": acc.nanmean().item(),
        "aacc": aacc.item(),
        "iou": none_for_nan(iou),
        "acc": none_for_nan(acc),
    }


def none_for_nan(values: Tensor) -> list[float | None]:
    """Returns a list of the values."""
    return [None if math.isnan(value) else value for value in values.tolist()]
