"""Predictions that can be looked at and measured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from framework import Framework, PixelFramework
from models_vit import patchify, unpatchify
from util.tokens import fill_invalid, patch_statistics, valid_mean


@dataclass(frozen=True)
class View:
    """A prediction that can be looked at and measured. `frameworks.hooks.reconstruction` composes pictures of views."""

    title: str  # of the prediction in a picture
    truth_title: str | None  # of the truth; None if it is the images themselves, which every picture shows
    truth: Tensor  # images [B, C, H, W] in [0, 1]
    prediction: Tensor  # likewise; read at predicted tokens only
    measure: str  # name of the errors in a table
    errors: Tensor  # of each token in raster order, [B, N]; read at predicted tokens only


def is_drawable(model: Framework) -> bool:
    """Returns whether something says how to draw the predictions: the model's own `views`, or that they are pixels."""
    return hasattr(model, "views") or predicts_pixels(model)


def predicts_pixels(model: Framework) -> bool:
    """Returns whether the targets are pixels: whether `target_tokens` returns those that it gets."""
    if not isinstance(model, PixelFramework):
        return False
    parameter = next(model.parameters())
    imgs = torch.zeros(1, model.in_chans, *model.img_size, device=parameter.device, dtype=parameter.dtype)
    pixels = model.token_pixels(imgs)
    return model.target_tokens(imgs, pixels) is pixels


def views_of(
    model: Framework,
    imgs: Tensor,
    ids_shuffle: Tensor,
    undo: Callable[[Tensor], Tensor],
) -> list[View]:
    """Returns the predictions as images and errors: those of the model's own `views`, or of pixels.

    imgs, ids_shuffle: what the model takes. undo: turns normalised images into images in [0, 1].
    """
    if hasattr(model, "views"):
        return model.views(imgs, ids_shuffle, undo)
    if isinstance(model, PixelFramework) and predicts_pixels(model):
        return [view_pixels(model, imgs, ids_shuffle, undo)]
    raise ValueError(f"the targets of {type(model).__name__} are no pixels: to draw them, give it a method `views`")


@torch.no_grad()
def view_pixels(
    model: PixelFramework,
    imgs: Tensor,
    ids_shuffle: Tensor,
    undo: Callable[[Tensor], Tensor],
) -> View:
    """Returns the view of pixels. Its errors are squared errors of pixels in [0, 1], averaged over those of each token.

    Invalid pixels have none.

    The normalisation of targets is undone with the mean and variance of the true patch, which no model predicts.
    """
    pred, _ = model.reconstruct(imgs, ids_shuffle)
    pixels = model.token_pixels(imgs)
    valid = model.valid_pixels(imgs)
    if model.norm_pix_loss:
        mean, std = patch_statistics(pixels, valid)
        pred = pred * std + mean
    prediction = undo(unpatchify(pred.to(pixels.dtype), model.token_side, model.grid_size))
    truth = undo(fill_invalid(imgs))
    error = patchify((truth - prediction).square(), model.token_side)
    errors = valid_mean(error, valid).squeeze(-1)
    return View("reconstruction", None, truth, prediction, "masked MSE", errors)


def enlarge(tokens: Tensor, model: Framework) -> Tensor:
    """Turns values of tokens [B, N, C] in raster order into images of the model's size [B, C, H, W]."""
    grid = tokens.transpose(1, 2).unflatten(2, model.grid_size)
    return F.interpolate(grid, size=model.img_size)
