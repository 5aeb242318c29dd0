"""Moments of features, and their effective rank (RankMe)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from util import collectives

RANK_EPS = 1e-7
ROWS = 1 << 16  # that are converted to float64 at once


@dataclass
class Moments:
    """Number, sum and Gram matrix of feature vectors, in float64. They are additive over batches and processes."""

    count: Tensor  # scalar
    total: Tensor  # [D]
    gram: Tensor  # [D, D]

    @classmethod
    def of(cls, features: Tensor) -> "Moments":
        """Returns the moments of features [n, D]."""
        dim = features.shape[1]
        count = torch.tensor(float(len(features)), dtype=torch.float64, device=features.device)
        total = count.new_zeros(dim)
        gram = count.new_zeros(dim, dim)
        for chunk in features.split(ROWS):
            chunk = chunk.double()
            total += chunk.sum(dim=0)
            gram += chunk.T @ chunk
        return cls(count, total, gram)

    @property
    def mean(self) -> Tensor:
        """Mean of each channel [D]."""
        return self.total / self.count

    @property
    def std(self) -> Tensor:
        """Standard deviation of each channel [D], of the whole population."""
        variance = self.gram.diagonal() / self.count - self.mean.square()
        return variance.clamp_min(0).sqrt()

    @property
    def is_finite(self) -> bool:
        """Whether all features are finite. Those whose squares overflow in float32 have no cosine similarity."""
        return bool(self.gram.trace().float().isfinite())

    def rankme(self, centred: bool = False) -> float:
        """Returns RankMe (Garrido et al., ICML 2023): the exponential of the entropy of the singular values' shares.

        It lies between 1 and min(n, D). The features are not normalised. centred: subtract their mean first, because a
        large mean hides all other directions. The squared singular values are the eigenvalues of the Gram matrix.
        """
        gram = self.gram
        if centred:
            gram = gram - self.count * self.mean.outer(self.mean)
            if gram.trace() <= 1e-12 * self.gram.trace():  # equal features: what is left is rounding
                return 1.0
        max_rank = min(int(self.count), len(gram))
        singular_values = torch.linalg.eigvalsh(gram)[-max_rank:].clamp_min(0).sqrt()
        shares = singular_values / singular_values.sum() + RANK_EPS
        entropy = -(shares * shares.log()).sum()
        return min(float(max_rank), torch.exp(entropy).item())  # RANK_EPS lifts it a little


def moments_of_all(features: Tensor) -> Moments:
    """Returns the moments of the features of all ranks. features: this rank's share [n, D]."""
    moments = Moments.of(features)
    collectives.all_reduce_sum(moments.count)  # in place
    collectives.all_reduce_sum(moments.total)
    collectives.all_reduce_sum(moments.gram)
    return moments
