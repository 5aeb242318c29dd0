"""Reconstructions of a pre-trained model: pictures of them, and their errors on retained and thrown tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from framework import Framework, View
from prmim import TokenOrder
from util.data.datasets import AddressedDataset
from util.data.images import Images
from util.data.statistics import normalizer
from util.data.transforms import Normalize, ResizeCenterCrop
from util.pictures import panel_grid

Indices = Sequence[int] | np.ndarray
GREY = 0.5  # of tokens that are neither visible nor predicted


def crops(
    model: Framework,
    settings: Mapping[str, Any],
    images: Images,
    indices: Indices,
    batch_size: int = 64,
    replace: bool = False,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of centre crops with their token orders: (imgs [B, C, H, W], ids_shuffle [B, N]).

    settings: the run's; its `sampling` and `seed` are used. replace: use another image instead of an unreadable one.
    """
    dataset = AddressedDataset(images, ResizeCenterCrop(model.img_size), replace=replace)
    collator = model.collator(settings["sampling"], settings["seed"])
    for first in range(0, len(indices), batch_size):
        imgs, _, ids_shuffle, *_ = collator([dataset[(0, int(i))] for i in indices[first : first + batch_size]])
        yield imgs, ids_shuffle


@torch.no_grad()
def measure(
    model: Framework, settings: Mapping[str, Any], images: Images, indices: Indices
) -> dict[str, dict[str, float]]:
    """Measure the errors of the reconstructions of centre crops, as {name of the error: {kind of token: mean}}.

    The kinds are "retained" and "thrown". A kind without predicted tokens is missing.
    """
    normalize = normalizer(settings, images.pixel_format)
    sums: dict[str, dict[str, tuple[float, int]]] = {}
    for imgs, ids_shuffle in crops(model, settings, images, indices):
        order = TokenOrder(ids_shuffle, model.counts)
        predicted = model.supervised(order)
        for view in model.views(normalize(imgs), ids_shuffle, normalize.undo):
            of_kinds = sums.setdefault(view.measure, {})
            for kind, tokens in (("retained", predicted & ~order.thrown), ("thrown", predicted & order.thrown)):
                total, count = of_kinds.get(kind, (0.0, 0))
                of_kinds[kind] = total + view.errors[tokens].sum().item(), count + int(tokens.sum())
    means = {}
    for name, of_kinds in sums.items():
        means[name] = {kind: total / count for kind, (total, count) in of_kinds.items() if count}
    return means


def compose(view: View, visible: torch.Tensor, predicted: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """Returns images [B, C, H, W] with the truth at visible tokens, predictions at predicted ones, and grey elsewhere.

    visible, predicted: bool [B, N] in raster order.
    """
    shape = view.truth.shape[2:]
    visible, predicted = (
        F.interpolate(mask.view(-1, 1, *grid_size).float(), size=shape).bool() for mask in (visible, predicted)
    )
    return torch.where(predicted, view.prediction, torch.where(visible, view.truth, GREY))


def reconstruction_picture(
    model: Framework, normalize: Normalize, imgs: torch.Tensor, ids_shuffle: torch.Tensor
) -> np.ndarray:
    """Draw each image, its tokens, and what the framework predicts side by side.

    imgs: [B, C, H, W]; ids_shuffle: [B, N]. Returns uint8 [H', W', 3]. For other pixels than uint8, black and white are
    the mean -+ 2 standard deviations. NoPixels if the predictions cannot be drawn.
    """
    device, was_training = normalize.mean.device, model.training
    normalized, order = normalize(imgs.to(device)), TokenOrder(ids_shuffle.to(device), model.counts)
    model.eval()
    try:
        views = model.views(normalized, order.ids_shuffle, normalize.undo)
    finally:
        model.train(was_training)
    panels: dict[str, torch.Tensor] = {}
    for view in views:
        if view.truth_title is not None:
            panels[view.truth_title] = view.truth
        panels[view.title] = compose(view, ~order.mask, model.supervised(order), model.grid_size)
    if imgs.dtype != torch.uint8:
        imgs = (normalize.undo(normalized) * 255).round().byte()
    states = order.mask.int() + order.thrown.int()  # 0 visible, 1 retained, 2 thrown
    return panel_grid(imgs, states.view(-1, *model.grid_size), panels)
