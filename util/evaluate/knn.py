"""Weighted k-nearest-neighbour classification of frozen features, which the processes share.

The protocol is that of DINO (Caron et al., ICCV 2021): cosine similarity, votes exp(similarity / temperature). The bank
of training features stays split: each process finds the neighbours among its own share, and the results are merged by
similarity and index of the image.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from util import collectives
from util.evaluate.context import nothing
from util.evaluate.features import Features
from util.evaluate.moments import Moments
from util.evaluate.results import accuracies

TEMPERATURE = 0.07  # DINO's
MAX_SIMILARITIES = 2**26  # in memory at once


@dataclass(frozen=True)
class KnnProtocol:
    """How queries are classified: ks are the numbers of neighbours, a vote is exp(similarity / temperature).

    leave_one_out: queries are images of the bank and are not their own neighbours.
    """

    num_classes: int
    ks: tuple[int, ...] = (20,)
    leave_one_out: bool = False
    temperature: float = TEMPERATURE


@torch.no_grad()
def knn_accuracy(
    bank: Features,
    queries: Features,
    name: str,
    protocol: KnnProtocol,
    moments: Moments | None = None,
    between_chunks: Callable[[], None] = nothing,
) -> dict[int, dict[str, float]]:
    """Returns {k: `accuracies`} in percent, of the queries of all ranks against the bank of all ranks.

    name: of the feature. moments: of the bank, to standardise each channel. between_chunks: called now and then,
    equally often on all ranks. All ranks must call this.
    """
    own_rows = unit_rows(bank.values[name], moments)
    query_rows = unit_rows(collectives.gather_rows(queries.values[name]), moments)
    labels = collectives.gather_rows(queries.labels)
    indices = collectives.gather_rows(queries.indices)
    chunk_size = max(1, MAX_SIMILARITIES // max(collectives.gather_objects(len(own_rows))))
    k_max = max(protocol.ks)
    hits = {k: torch.zeros(2, dtype=torch.int64, device=own_rows.device) for k in protocol.ks}
    for first in range(0, len(query_rows), chunk_size):
        between_chunks()
        chunk = slice(first, first + chunk_size)
        excluded = None
        if protocol.leave_one_out:
            excluded = indices[chunk]
        similarities, positions = nearest(query_rows[chunk], own_rows, bank.indices, k_max, excluded)
        similarities, neighbour_labels = best_of(
            gather_columns(similarities),
            gather_columns(bank.indices[positions]),
            gather_columns(bank.labels[positions]),
            k_max,
        )
        for k in protocol.ks:
            votes = votes_of(
                similarities[:, :k],
                neighbour_labels[:, :k],
                protocol.num_classes,
                protocol.temperature,
            )
            ranks = rank_of_label(votes, labels[chunk])
            hits[k] += torch.stack([(ranks < 1).sum(), (ranks < 5).sum()])
    scores = {}
    for k, counts in hits.items():
        top1, top5 = (100 * counts.double() / len(query_rows)).tolist()
        scores[k] = accuracies(top1, top5, protocol.num_classes)
    return scores


def gather_columns(values: Tensor) -> Tensor:
    """Returns the columns of all ranks' values [Q, m], which may differ in m."""
    return collectives.gather_rows(values.T.contiguous()).T


def unit_rows(features: Tensor, moments: Moments | None = None) -> Tensor:
    """Scales features [n, D] to unit length. With `moments` each channel is first standardised by them (z-scores)."""
    if moments is not None:
        mean = moments.mean.to(features.dtype)
        std = moments.std.to(features.dtype)
        features = (features - mean) / (std + 1e-6)
    return F.normalize(features, dim=1, eps=1e-12)


def nearest(
    queries: Tensor,
    bank: Tensor,
    indices: Tensor,
    k: int,
    query_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Finds the k most similar rows of `bank` [n, D] for each of `queries` [Q, D], both of unit length.

    Returns (similarities [Q, m], positions in the bank [Q, m]) with m = min(k, n), in descending order of similarity.
    If more than one row has the k-th similarity, those of the lowest index are taken. indices: of the images of the
    bank's rows [n], ascending. query_indices: each query is the row of this index [Q] itself, which is left out: its
    similarity is -inf.
    """
    similarities = queries @ bank.T  # [Q, n]
    if query_indices is not None:
        similarities.masked_fill_(query_indices[:, None] == indices, -torch.inf)
    top, positions = similarities.topk(min(k, len(bank)), dim=1)
    num_taken = top.shape[1]
    num_candidates = (similarities >= top[:, -1:]).sum(dim=1)
    ambiguous = num_candidates > num_taken
    if ambiguous.any():
        candidates = similarities[ambiguous]
        order = candidates.argsort(dim=1, descending=True, stable=True)[:, :num_taken]
        positions[ambiguous] = order
        top[ambiguous] = candidates.gather(1, order)
    return top, positions


def best_of(similarities: Tensor, indices: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns (similarities, labels) of the k best of m neighbours, each [Q, min(k, m)], best first.

    similarities, indices, labels: of all neighbours, [Q, m]. Of equal similarities the lowest index comes first.
    """
    by_index = indices.argsort(dim=1)
    similarities = similarities.gather(1, by_index)
    labels = labels.gather(1, by_index)
    by_similarity = similarities.argsort(dim=1, descending=True, stable=True)[:, :k]
    return similarities.gather(1, by_similarity), labels.gather(1, by_similarity)


def votes_of(similarities: Tensor, labels: Tensor, num_classes: int, temperature: float = TEMPERATURE) -> Tensor:
    """Returns the votes [Q, num_classes] of neighbours with `similarities` and `labels` [Q, k], the best one first.

    A vote is exp((s - s_1) / temperature), which gives the same ranking as exp(s / temperature) and does not overflow.
    """
    differences = similarities - similarities[:, :1]
    weights = (differences / temperature).exp()
    votes = weights.new_zeros(len(weights), num_classes)
    return votes.scatter_add_(1, labels, weights)


def rank_of_label(votes: Tensor, labels: Tensor) -> Tensor:
    """Returns how many classes come before the true one, int64 [Q]. Of equal votes the lowest class comes first.

    votes: [Q, C]. labels: [Q]. A rank of 0 counts for top-1, a rank below 5 for top-5. If a vote is NaN, the rank is C
    or 5, whichever is larger: the query counts as an error.
    """
    true_votes = votes.gather(1, labels[:, None])
    classes = torch.arange(votes.shape[1], device=votes.device)
    has_more = votes > true_votes
    wins_tie = (votes == true_votes) & (classes < labels[:, None])
    num_before = (has_more | wins_tie).sum(dim=1)
    has_nan = votes.isnan().any(dim=1)
    return num_before.masked_fill(has_nan, max(5, votes.shape[1]))
