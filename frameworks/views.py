"""Predictions that can be looked at and measured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


class NoPixels(ValueError):
    """The predictions are no pixels, and nothing says how to draw them."""


def views_of(
    model: Framework,
    imgs: Tensor,
    ids_shuffle: Tensor,
    undo: Callable[[Tensor], Tensor],
) -> list[View]:
    """Returns the predictions as images and errors: those of the model's own `views`, or of pixels.

    imgs, ids_shuffle: what the model takes. undo: turns normalised images into images in [0, 1]. NoPixels if the
    predictions cannot be drawn.
    """
    if model.views is not None:
        return model.views(imgs, ids_shuffle, undo)
    if not isinstance(model, PixelFramework) or not model.predicts_pixels():
        raise NoPixels(
            f"the targets of {type(model).__name__} are no pixels, so its predictions cannot be drawn as images: "
            "give it a method `views`"
        )
    return [view_pixels(model, imgs, ids_shuffle, undo)]


@torch.no_grad()
def view_pixels(
    model: PixelFramework,
    imgs: Tensor,
    ids_shuffle: Tensor,
    undo: Callable[[Tensor], Tensor],
) -> View:
    """Returns the view of pixels. Its errors are squared errors of pixels in [0, 1], averaged over each token.

    With invalid pixels they are averaged over the valid ones.

    The normalisation of targets is undone with the mean and variance of the true patch, which no model predicts.
    """
    pred, _ = model.reconstruct(imgs, ids_shuffle)
    pixels = model.token_pixels(imgs)
    valid: Tensor | None = None
    if model.has_invalid:
        valid = model.valid_pixels(imgs)
    if model.norm_pix_loss:
        mean, std = patch_statistics(pixels, valid)
        pred = pred * std + mean
    prediction = undo(unpatchify(pred.to(pixels.dtype), model.token_side, model.grid_size))
    if valid is None:
        truth = undo(imgs)
        error = (truth - prediction).square().mean(dim=1, keepdim=True)
        errors = nn.functional.adaptive_avg_pool2d(error, model.grid_size).flatten(1)
    else:
        truth = undo(fill_invalid(imgs))
        error = patchify((truth - prediction).square(), model.token_side)
        errors = valid_mean(error, valid).squeeze(-1)
    return View("reconstruction", None, truth, prediction, "masked MSE", errors)
