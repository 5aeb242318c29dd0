"""Moves tokens to other places, and counts those with invalid pixels.

Moves in both directions only copy, forward and backward: no place has two sources. NaN marks invalid pixels of float
images (`util.data.invalid_pixels`).
"""

from typing import Any

import torch
from torch import Tensor

# The states of a token.
VISIBLE = 0
RETAINED = 1
THROWN = 2


def take_tokens(x: Tensor, ids: Tensor) -> Tensor:
    """Gathers the tokens of `x` [B or 1, N, C] at `ids` [B, n], which differ within an image. Returns [B, n, C].

    Its backward pass puts gradients. That of `Tensor.gather` adds them up, on a GPU by atomic operations.
    """
    return _Take.apply(x, ids)


def put_tokens(x: Tensor, ids: Tensor, num_tokens: int) -> Tensor:
    """Puts the tokens `x` [B, n, C] to the places `ids` [B, n], which differ within an image, among zeros.

    Returns [B, num_tokens, C]. Its backward pass takes gradients.
    """
    table = x.new_zeros(len(x) * num_tokens, x.shape[-1])
    rows = rows_of(ids, num_tokens)
    table = table.index_copy_(0, rows, x.flatten(0, 1))
    return table.unflatten(0, (-1, num_tokens))


def rows_of(ids: Tensor, num_tokens: int) -> Tensor:
    """Returns the rows of tokens `ids` [B, n] in a table of all images' tokens [B * num_tokens, C], as [B * n]."""
    first = num_tokens * torch.arange(len(ids), device=ids.device)
    rows = ids + first.unsqueeze(1)
    return rows.flatten()


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = x.shape
        rows = ids.flatten()
        if len(x) > 1:
            rows = rows_of(ids, x.shape[1])
        tokens = x.flatten(0, 1).index_select(0, rows)
        return tokens.unflatten(0, ids.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        num_tokens = ctx.shape[1]
        grad = put_tokens(grad, ids, num_tokens)
        return grad.sum_to_size(ctx.shape), None


# -------------------------------------------------------------------------------------------------- invalid pixels


COUNTED_SHARE = 4  # a token counts if at least one of this many of its values is valid


def fill_invalid(x: Tensor) -> Tensor:
    """Returns normalised values with 0, the mean of their band, where a pixel is invalid."""
    return torch.where(x.isnan(), 0.0, x)


def counted_tokens(valid: Tensor) -> Tensor:
    """Returns which tokens count in losses, bool [B, n]: a quarter of their values [B, n, P] or more are valid."""
    num_valid = valid.sum(dim=-1)
    return COUNTED_SHARE * num_valid >= valid.shape[-1]


def patch_statistics(patches: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of each patch of [B, n, P], two of [B, n, 1].

    They are those of `norm_pix_loss`: the variance is unbiased, and 1e-6 is added to it. valid: the values that count,
    bool [B, n, P]; by default all. The statistics of a patch whose values all count are the same with and without it.
    """
    mean = patches.mean(-1, keepdim=True)
    variance = patches.var(-1, keepdim=True)
    if valid is not None:
        number = valid.sum(-1, keepdim=True)
        is_whole = number == patches.shape[-1]
        mean = torch.where(is_whole, mean, valid_mean(patches, valid))
        squares = valid_mean((patches - mean).square(), valid) * number
        variance = torch.where(is_whole, variance, squares / (number - 1).clamp(min=1))
    return mean, (variance + 1e-6).sqrt()


def valid_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Returns the mean of the `valid` values of each row of [B, n, P], [B, n, 1]; 0 if none is."""
    number = valid.sum(-1, keepdim=True)
    return torch.where(valid, x, 0.0).sum(-1, keepdim=True) / number.clamp(min=1)
