"""Reconstructions of a pre-trained model: pictures of them, and their errors on retained and thrown tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from framework import Framework
from prmim import TokenOrder
from util.data.datasets import AddressedDataset
from util.data.images import Images
from util.data.statistics import normalizer
from util.data.transforms import Normalize, ResizeCenterCrop
from util.pictures import panel_grid

Indices = Sequence[int] | np.ndarray


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
        imgs, order = normalize(imgs), TokenOrder(ids_shuffle, model.counts)
        _, predicted = model.reconstruct(imgs, ids_shuffle)
        for name, error in model.token_errors(imgs, ids_shuffle, normalize.undo).items():
            for kind, tokens in (("retained", order.mask & ~order.thrown), ("thrown", order.thrown & predicted)):
                total, count = sums.setdefault(name, {}).get(kind, (0.0, 0))
                sums[name][kind] = total + error[tokens].sum().item(), count + int(tokens.sum())
    means = {}
    for name, of_kinds in sums.items():
        means[name] = {kind: total / count for kind, (total, count) in of_kinds.items() if count}
    return means


def reconstruction_picture(
    model: Framework, normalize: Normalize, imgs: torch.Tensor, ids_shuffle: torch.Tensor
) -> np.ndarray:
    """Draw each image, its tokens, and what the framework predicts side by side.

    imgs: [B, C, H, W]; ids_shuffle: [B, N]. Returns uint8 [H', W', 3]. For other pixels than uint8, black and white are
    the mean -+ 2 standard deviations.
    """
    device = normalize.mean.device
    was_training = model.training
    model.eval()
    normalized = normalize(imgs.to(device))
    panels = model.panels(normalized, ids_shuffle.to(device), normalize.undo)
    if imgs.dtype != torch.uint8:
        imgs = (normalize.undo(normalized) * 255).round().byte()
    model.train(was_training)
    order = TokenOrder(ids_shuffle, model.counts)
    states = order.mask.int() + order.thrown.int()  # 0 visible, 1 retained, 2 thrown
    return panel_grid(imgs, states.view(-1, *model.grid_size), panels)
