"""Reconstructions of a pre-trained model: pictures of them, and their errors on retained and thrown tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from framework import Framework
from frameworks.views import View, enlarge, views_of
from models_vit import ViTEncoder
from prmim import TokenOrder
from util.data.datasets import AddressedDataset
from util.data.images import Images
from util.data.statistics import normalizer
from util.data.transforms import Normalize, ResizeCenterCrop
from util.pictures import panel_grid, principal_colors
from util.tokens import counted_tokens, fill_invalid

Indices = Sequence[int] | np.ndarray
GREY = 0.5  # of tokens that are neither visible nor predicted


def crops(
    model: Framework,
    settings: Mapping[str, Any],
    images: Images,
    indices: Indices,
    batch_size: int = 64,
    replace: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of centre crops with their token orders: (imgs [B, C, H, W], ids_shuffle [B, N]).

    settings: the run's; its `sampling` and `seed` are used. replace: use another image instead of an unreadable one.
    """
    dataset = AddressedDataset(images, ResizeCenterCrop(model.img_size), replace=replace)
    collator = model.collator(settings["sampling"], settings["seed"])
    for first in range(0, len(indices), batch_size):
        samples = [dataset[(0, int(i))] for i in indices[first : first + batch_size]]
        imgs, _, ids_shuffle, *_ = collator(samples)
        yield imgs, ids_shuffle


@torch.no_grad()
def measure(
    model: Framework,
    settings: Mapping[str, Any],
    images: Images,
    indices: Indices,
) -> dict[str, dict[str, float]]:
    """Measure the errors of the reconstructions of centre crops, as {name of the error: {kind of token: mean}}.

    The kinds are "retained" and "thrown". A kind without predicted tokens is missing.
    """
    normalize = normalizer(settings, images.pixel_format)
    errors: dict[str, dict[str, list[Tensor]]] = {}
    for imgs, ids_shuffle in crops(model, settings, images, indices):
        order = TokenOrder(ids_shuffle, model.counts)
        normalized = normalize(imgs, fill=False)
        predicted = model.supervised(order)
        if model.has_invalid:
            predicted = predicted & counted_tokens(model.valid_pixels(normalized))
        for view in views_of(model, normalized, ids_shuffle, normalize.undo):
            errors_of_view = errors.setdefault(view.measure, {"retained": [], "thrown": []})
            errors_of_view["retained"].append(view.errors[predicted & ~order.thrown])
            errors_of_view["thrown"].append(view.errors[predicted & order.thrown])
    means: dict[str, dict[str, float]] = {}
    for name in errors:
        means[name] = {}
        for kind, errors_of_batches in errors[name].items():
            values = torch.cat(errors_of_batches)
            if len(values):
                means[name][kind] = values.mean().item()
    return means


def compose(view: View, visible: Tensor, predicted: Tensor, model: Framework) -> Tensor:
    """Returns images [B, C, H, W] with the truth at visible tokens, predictions at predicted ones, and grey elsewhere.

    visible, predicted: bool [B, N] in raster order.
    """
    is_visible = enlarge(visible.unsqueeze(-1).float(), model).bool()
    is_predicted = enlarge(predicted.unsqueeze(-1).float(), model).bool()
    picture = torch.where(is_visible, view.truth, GREY)
    return torch.where(is_predicted, view.prediction, picture)


def reconstruction_picture(
    model: Framework,
    normalize: Normalize,
    imgs: Tensor,
    ids_shuffle: Tensor,
) -> np.ndarray:
    """Draw each image, its tokens, what the framework predicts, and the features of a ViT's encoder side by side.

    imgs: [B, C, H, W]; ids_shuffle: [B, N]. Returns uint8 [H', W', 3]. For other pixels than uint8, black and white are
    the mean -+ 2 standard deviations. Invalid pixels have a flat colour.
    """
    device = normalize.mean.device
    normalized = normalize(imgs.to(device), fill=False)
    order = TokenOrder(ids_shuffle.to(device), model.counts)
    features: Tensor | None = None
    was_training = model.training
    model.eval()
    try:
        views = views_of(model, normalized, order.ids_shuffle, normalize.undo)
        if isinstance(model, ViTEncoder):
            features = feature_colors(model, fill_invalid(normalized))
    finally:
        model.train(was_training)
    predicted = model.supervised(order)
    panels: dict[str, Tensor] = {}
    for view in views:
        if view.truth_title is not None:
            panels[view.truth_title] = view.truth
        panels[view.title] = compose(view, ~order.mask, predicted, model)
    if features is not None:
        panels["features (PCA)"] = features
    if imgs.dtype != torch.uint8:
        imgs = (normalize.undo(fill_invalid(normalized)) * 255).round().byte()
    states = order.mask.int() + order.thrown.int()  # 0 visible, 1 retained, 2 thrown
    return panel_grid(imgs, states.unflatten(1, model.grid_size), panels, normalized.isnan())


@torch.no_grad()
def feature_colors(model: ViTEncoder, imgs: Tensor) -> Tensor | None:
    """Returns the encoder's features of whole images [B, C, H, W] as colours in [0, 1], float [B, 3, H, W] on the CPU.

    None if they are not finite.

    Red, green and blue are the first three principal components of the tokens of all images. The sign of each is the
    one with which it grows with the brightness of the tokens, so that pictures of two encoders can be compared.
    """
    tokens = model.forward_features(imgs)[:, model.num_cls_tokens :].cpu()  # [B, N, D]
    if not tokens.isfinite().all():
        return None
    (colors,) = principal_colors(tokens, tokens)
    brightness = F.adaptive_avg_pool2d(imgs.mean(dim=1, keepdim=True), model.grid_size).flatten(1).cpu()  # [B, N]
    deviation = (brightness - brightness.mean()).unsqueeze(-1)
    falls = (colors * deviation).sum(dim=(0, 1)) < 0  # [3]
    colors = torch.where(falls, 1 - colors, colors)
    return enlarge(colors, model)
