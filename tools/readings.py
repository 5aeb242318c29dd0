"""Readings of the paper that the core does not follow, as changes to a model that is already built.

Each function of READINGS changes the aggregation of one model. docs/study.md compares them.
"""

import torch
from torch import nn
from torch.nn import functional as F

from framework import Framework
from prmim import ProgressiveDecoder, SpatialAggregation, TokenOrder


class AggregatesPredictions(ProgressiveDecoder):
    """Norm and head on the kept tokens come first; the convolution reconstructs predictions from predictions."""

    def features(self, x: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        assert self.aggregation is not None  # all arms with this reading throw tokens
        return self.aggregation(super().predict(self.decode(x, order)), order, self.grid_size)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return x


def predictions(model: Framework) -> None:
    """Apply the convolution to the predictions."""
    kernel_size = model.decoder.aggregation.operator.kernel_size[0]
    model.decoder.__class__ = AggregatesPredictions  # the same parameters, another order of operations
    model.decoder.aggregation = SpatialAggregation(model.decoder.pred.out_features, kernel_size)


def init_average(model: Framework) -> None:
    """Initialise the convolution as the mean of its window."""
    convolution = model.decoder.aggregation.operator
    nn.init.constant_(convolution.weight, 1 / convolution.weight[0].numel())
    nn.init.zeros_(convolution.bias)


def init_normal(model: Framework) -> None:
    """Initialise the convolution as in ConvNeXt."""
    convolution = model.decoder.aggregation.operator
    nn.init.trunc_normal_(convolution.weight, std=0.02)
    nn.init.zeros_(convolution.bias)


class MaskNormalised(SpatialAggregation):
    """Divides the convolution's sum, without its bias, by the share of kept cells under the window.

    As in partial convolutions (Liu et al., ECCV 2018), cells outside the grid are not kept. The weights thus see the
    same scale however many cells are kept. Without any kept cell the output is the bias.
    """

    def forward(self, x: torch.Tensor, order: TokenOrder, grid_size: tuple[int, int]) -> torch.Tensor:
        filled, num_kept, size = super().forward(x, order, grid_size), x.shape[1], self.operator.kernel_size[0]
        kept = (~order.thrown).to(x.dtype).view(-1, 1, *grid_size)  # [B, 1, rows, columns]
        share = F.avg_pool2d(kept, size, stride=1, padding=size // 2).flatten(1).unsqueeze(-1)  # [B, N, 1]
        share = order.take(share, order.ids_thrown).clamp(min=size**-2)
        bias = self.operator.bias
        return torch.cat([filled[:, :num_kept], (filled[:, num_kept:] - bias) / share + bias], dim=1)


class GaussianResidual(SpatialAggregation):
    """Adds the mean of all kept cells, weighted by a fixed Gaussian of their distance, to the convolution's output.

    So a thrown cell starts from a value on the scale of the kept ones, and the convolution learns the rest.
    """

    SIGMA = 1.0  # cells; about the distance to the nearest kept cell

    def forward(self, x: torch.Tensor, order: TokenOrder, grid_size: tuple[int, int]) -> torch.Tensor:
        filled, num_kept = super().forward(x, order, grid_size), x.shape[1]
        rows, columns = (self.weights(side, x) for side in grid_size)
        kept = (~order.thrown).to(x.dtype).view(-1, *grid_size, 1)
        total, weight = (
            torch.einsum("ri,bijc,sj->brsc", rows, grid, columns).flatten(1, 2)
            for grid in (order.restore(x).unflatten(1, grid_size), kept)
        )  # [B, N, C], [B, N, 1]
        mean = order.take(total, order.ids_thrown) / order.take(weight, order.ids_thrown)
        return torch.cat([filled[:, :num_kept], filled[:, num_kept:] + mean], dim=1)

    def weights(self, side: int, like: torch.Tensor) -> torch.Tensor:
        """The Gaussian of the distance between any two of `side` cells in a row, [side, side]."""
        cells = torch.arange(side, device=like.device, dtype=like.dtype)
        return (-0.5 * ((cells[:, None] - cells) / self.SIGMA).square()).exp()


def mask_normalised(model: Framework) -> None:
    """Normalise the convolution by the share of kept cells."""
    model.decoder.aggregation.__class__ = MaskNormalised  # the same parameters, another sum


def gaussian(model: Framework) -> None:
    """Let the convolution correct a Gaussian mean of the kept cells."""
    model.decoder.aggregation.__class__ = GaussianResidual


READINGS = {f.__name__: f for f in (predictions, init_average, init_normal, mask_normalised, gaussian)}
