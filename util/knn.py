"""Weighted k-nearest-neighbour classification of frozen features, and the effective rank of features (RankMe).

The protocol is that of DINO (Caron et al., ICCV 2021): cosine similarity, votes exp(similarity / 0.07). The functions
are pure. `util.features` applies them to features that are spread over processes.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

TEMPERATURE = 0.07
MOST_SIMILARITIES = 2**26  # in memory at once
RANK_EPS = 1e-7


@dataclass
class Moments:
    """Number, sum and Gram matrix of feature vectors, in float64. They are additive over batches and processes."""

    count: torch.Tensor  # scalar
    total: torch.Tensor  # [D]
    gram: torch.Tensor  # [D, D]

    @classmethod
    def of(cls, features: torch.Tensor, rows: int = 1 << 16) -> "Moments":
        """Returns the moments of features [n, D]. `rows` of them are converted to float64 at once."""
        dim, device = features.shape[1], features.device
        total = torch.zeros(dim, dtype=torch.float64, device=device)
        gram = torch.zeros(dim, dim, dtype=torch.float64, device=device)
        for part in features.split(rows):
            part = part.double()
            total += part.sum(dim=0)
            gram += part.T @ part
        return cls(torch.tensor(float(len(features)), dtype=torch.float64, device=device), total, gram)

    @property
    def mean(self) -> torch.Tensor:
        """Mean of each channel [D]."""
        return self.total / self.count

    @property
    def std(self) -> torch.Tensor:
        """Standard deviation of each channel [D], of the whole population."""
        return (self.gram.diagonal() / self.count - self.mean.square()).clamp_min(0).sqrt()

    def rankme(self, centred: bool = False) -> float:
        """Returns RankMe (Garrido et al., ICML 2023): the exponential of the entropy of the singular values' shares.

        It lies between 1 and min(n, D). The features are not normalised. centred: subtract their mean first, because a
        large mean hides all other directions. The squared singular values are the eigenvalues of the Gram matrix.
        """
        gram = self.gram - self.count * self.mean.outer(self.mean) if centred else self.gram
        most = min(int(self.count), len(gram))
        values = torch.linalg.eigvalsh(gram)[-most:].clamp_min(0).sqrt()
        shares = values / values.sum() + RANK_EPS
        return min(float(most), torch.exp(-(shares * shares.log()).sum()).item())  # RANK_EPS lifts it a little


def unit_rows(features: torch.Tensor, moments: Moments | None = None) -> torch.Tensor:
    """Scales features [n, D] to unit length. With `moments` each channel is first standardised by them (z-scores)."""
    if moments is not None:
        mean, std = (x.to(features.dtype) for x in (moments.mean, moments.std))
        features = (features - mean) / (std + 1e-6)
    return F.normalize(features, dim=1, eps=1e-12)


def nearest(
    queries: torch.Tensor,
    bank: torch.Tensor,
    numbers: torch.Tensor,
    k: int,
    query_numbers: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the k most similar rows of `bank` [n, D] for each of `queries` [Q, D], both of unit length.

    Returns (similarities [Q, m], positions in the bank [Q, m]) with m = min(k, n), in descending order of similarity.
    If more than one row has the k-th similarity, those of the lowest number are taken. numbers: of the bank's rows [n],
    ascending. query_numbers: each query is the row of this number [Q] itself, which is left out: its similarity is
    -inf.
    """
    similarities = queries @ bank.T  # [Q, n]
    if query_numbers is not None:
        similarities.masked_fill_(query_numbers[:, None] == numbers, -torch.inf)
    top, positions = similarities.topk(min(k, len(bank)), dim=1)
    ambiguous = (similarities >= top[:, -1:]).sum(dim=1) > top.shape[1]
    if ambiguous.any():
        order = similarities[ambiguous].argsort(dim=1, descending=True, stable=True)[:, : top.shape[1]]
        positions[ambiguous] = order
        top[ambiguous] = similarities[ambiguous].gather(1, order)
    return top, positions


def best_of(
    similarities: torch.Tensor, numbers: torch.Tensor, labels: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (similarities, labels) of the k best of m neighbours, each [Q, min(k, m)], best first.

    similarities, numbers, labels: of all neighbours, [Q, m]. Of equal similarities the lowest number comes first.
    """
    order = numbers.argsort(dim=1)
    similarities, labels = similarities.gather(1, order), labels.gather(1, order)
    order = similarities.argsort(dim=1, descending=True, stable=True)[:, :k]
    return similarities.gather(1, order), labels.gather(1, order)


def votes_of(similarities: torch.Tensor, labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Returns the votes [Q, num_classes] of neighbours with `similarities` and `labels` [Q, k], the best one first.

    A vote is exp((s - s_1) / 0.07), which gives the same ranking as exp(s / 0.07) and does not overflow.
    """
    weights = ((similarities - similarities[:, :1]) / TEMPERATURE).exp()
    return weights.new_zeros(len(weights), num_classes).scatter_add_(1, labels, weights)


def rank_of_label(votes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns how many classes come before the true one, int64 [Q]. Of equal votes the lowest class comes first.

    votes: [Q, C]. labels: [Q]. A rank of 0 counts for top-1, a rank below 5 for top-5. If a vote is NaN, the rank is C
    or 5, whichever is larger: the query counts as an error.
    """
    own, classes = votes.gather(1, labels[:, None]), torch.arange(votes.shape[1], device=votes.device)
    before = (votes > own) | ((votes == own) & (classes < labels[:, None]))
    return before.sum(dim=1).masked_fill(votes.isnan().any(dim=1), max(5, votes.shape[1]))
