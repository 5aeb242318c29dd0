"""Invalid pixels on their way to the model: NaN marks them in float images. See `util.data.invalid_pixels`."""

import torch
from torch import Tensor

COUNTED_SHARE = 4  # a token counts if at least one of this many of its values is valid


def fill_invalid(x: Tensor) -> Tensor:
    """Returns normalised values with 0, the mean of their band, where a pixel is invalid."""
    return torch.where(x.isnan(), 0.0, x)


def counted_tokens(valid: Tensor) -> Tensor:
    """Returns which tokens count in losses, bool [B, n]: a quarter of their values [B, n, P] or more are valid."""
    return COUNTED_SHARE * valid.sum(dim=-1) >= valid.shape[-1]
