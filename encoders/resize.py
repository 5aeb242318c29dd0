"""Fits the tensors of a file to a model of another size: the patch embedding, and tables of positions and biases.

In all functions, `fitting` are the tensors of the file whose names the model has, and `model_state` is the model's
state dict. `label` names the file in messages.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from encoders.kinds import square_of_biases
from encoders.names import Tensors
from util.pos_embed import BIAS_TABLE, grid_from_settings, grid_of, resize_pos_embed
from util.run.errors import CheckpointError


def choose_rgb_bands(given: Sequence[int] | None, channels: int | None, model_channels: int) -> Sequence[int] | None:
    """Returns which channels of a model hold red, green and blue for weights of RGB; None: nothing changes.

    given: --rgb_bands; a single channel is all three by default. channels: of the weights, None without weights.
    ValueError if `given` is missing, does not fit, or has no effect.
    """
    if given is None:
        if channels != 3 or model_channels == 3:
            return None
        if model_channels == 1:
            return [0, 0, 0]
        raise ValueError(
            f"the first weights are for RGB, and the images have {model_channels} bands: give --rgb_bands, the numbers "
            f"of red, green and blue from 0 to {model_channels - 1}"
        )
    values = " ".join(map(str, given))
    if channels != 3 or (model_channels == 3 and list(given) == [0, 1, 2]):
        raise ValueError(
            f"--rgb_bands {values} has no effect: it turns first weights for RGB into those of other bands"
        )
    if max(given) >= model_channels:
        raise ValueError(f"--rgb_bands {values}: the images have the bands from 0 to {model_channels - 1}")
    return given


def fit_patch_embed(
    fitting: Tensors,
    model_state: Tensors,
    label: str,
    given_bands: Sequence[int] | None,
    pixels: Mapping[str, Any],
) -> list[str]:
    """Adapts a patch embedding of RGB, in place, to the channels of the model. Returns a remark, or nothing.

    given_bands: see `choose_rgb_bands`. Channels that hold no colour begin with 0: they change no feature. pixels:
    of the file's model, see `CheckpointInfo.pixel_settings`.

    Raises CheckpointError for another width or patch size, or for other channels than those of RGB or of the model.
    """
    key = "patch_embed.proj.weight"
    if key not in fitting:
        return []
    shape = list(fitting[key].shape)
    model_shape = list(model_state[key].shape)
    channels = shape[1]
    model_channels = model_shape[1]
    is_of_model = [shape[0], *shape[2:]] == [model_shape[0], *model_shape[2:]]
    if not is_of_model or channels not in (3, model_channels):
        raise CheckpointError(
            f"{label} holds an encoder of --in_chans {channels}, --patch_size {shape[-1]} and width {shape[0]}; the "
            f"model has {model_channels}, {model_shape[-1]} and {model_shape[0]}"
        )
    rgb_bands = choose_rgb_bands(given_bands, channels, model_channels)
    if rgb_bands is None:
        return []
    bias_key = "patch_embed.proj.bias"
    fitting[key], fitting[bias_key] = spread_colors(fitting[key], fitting[bias_key], rgb_bands, model_channels, pixels)
    return [f"red, green and blue are the bands {', '.join(map(str, rgb_bands))}, and the others begin without effect"]


def spread_colors(
    kernel: Tensor,
    bias: Tensor,
    rgb_bands: Sequence[int],
    num_bands: int,
    pixels: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """Returns a kernel [D, 3, p, p] of RGB, and its bias, for images of `num_bands` bands.

    A band of several colours is normalised by the mean of their means and of their deviations, see `keep_colors`. The
    difference from their own, which is in `pixels`, is folded into kernel and bias.
    """
    from util.data.pixel_format import RGB8  # here, because most files are for the same bands
    from util.data.statistics import IMAGENET, find_statistics, keep_colors

    mean, std = find_statistics(pixels, RGB8) or IMAGENET
    band_mean, band_std = keep_colors((mean, std), ([0.0] * num_bands, [1.0] * num_bands), rgb_bands)
    spread = kernel.new_zeros(len(kernel), num_bands, *kernel.shape[2:], dtype=torch.float64)
    moved = bias.double()
    for color, band in enumerate(rgb_bands):
        part = kernel[:, color].double()
        spread[:, band] += part * (band_std[band] / std[color])
        moved = moved + part.sum(dim=(1, 2)) * ((band_mean[band] - mean[color]) / std[color])
    return spread.to(kernel.dtype), moved.to(bias.dtype)


def fit_tables(
    fitting: Tensors,
    settings: Mapping[str, Any],
    model_state: Tensors,
    model: nn.Module,
    label: str,
) -> list[str]:
    """Resizes the tables of positions and of relative-position biases, in place. Returns the keys of those resized."""
    grid = grid_from_settings(settings, model.patch_size)
    resized = []
    for key, table in fitting.items():
        if key == "pos_embed":
            antialias = settings.get("registers", False)
            fitting[key] = _fit_pos_embed(table, grid, model_state[key], tuple(model.grid_size), label, antialias)
        elif key.endswith(BIAS_TABLE):
            fitting[key] = _fit_bias_table(table, grid, model_state[key], model)
        if fitting[key] is not table:
            resized.append(key)
    return resized


def _fit_pos_embed(
    table: Tensor,
    grid: tuple[int, int] | None,
    model_table: Tensor,
    grid_size: tuple[int, int],
    label: str,
    antialias: bool,
) -> Tensor:
    """Returns a position table [1, P + n, D] resized to the model's `grid_size`; the same tensor if it fits already.

    grid: that of the table, from the settings of its run. antialias: see `resize_pos_embed`. For DINOv2 without
    registers the rules of Meta, timm and Transformers differ; Transformers' is taken, which is MAE's.
    """
    num_cls_rows = model_table.shape[1] - math.prod(grid_size)
    source = grid_of(table.shape[1] - num_cls_rows, grid)
    if source == grid_size:
        return table
    if source is None:
        raise CheckpointError(
            f"pos_embed {list(table.shape)} of {label} cannot be resized to {list(model_table.shape)}"
        )
    return resize_pos_embed(table, source, grid_size, antialias)


def _fit_bias_table(
    table: Tensor,
    grid: tuple[int, int] | None,
    model_table: Tensor,
    model: nn.Module,
) -> Tensor:
    """Returns a table of relative-position biases resized to the model's grid (ViT) or window (Swin).

    The table of a ViT has three more rows, for the class token. Returns the same tensor if it fits already. grid: that
    of a ViT's table, which is assumed to be square if it is None.
    """
    if hasattr(model, "cls_token"):
        num_extra = 3
        source = grid or square_of_biases(len(table) - num_extra)
        target = tuple(model.grid_size)
    else:
        num_extra = 0
        source = square_of_biases(len(table))
        target = square_of_biases(len(model_table))
    if source == target:
        return table
    from encoders.rel_pos import resize_bias_table

    return resize_bias_table(table, source, target, num_extra)
