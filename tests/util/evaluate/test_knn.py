"""kNN and RankMe against slow re-derivations in float64."""

import math

import numpy as np
import pytest
import torch

from util.evaluate.knn import best_of, nearest, rank_of_label, unit_rows, votes_of
from util.evaluate.moments import Moments

NUM_CLASSES = 6


def slow_ranking(
    bank,
    labels,
    query,
    num_classes,
    k,
    moments=None,
    without=None,
    temperature=0.07,
):
    """The classes in the order of their votes, by loops over rows: of equal votes the lowest class comes first.

    moments: mean and deviation of the channels, for z-scores. without: a row of the bank that does not vote.
    """
    bank = np.asarray(bank, dtype=np.float64)
    query = np.asarray(query, dtype=np.float64)
    if moments is not None:
        mean, std = moments
        bank = (bank - mean) / (std + 1e-6)
        query = (query - mean) / (std + 1e-6)
    neighbours = []
    for number, row in enumerate(bank):
        if number != without:
            lengths = np.linalg.norm(row) * np.linalg.norm(query)
            neighbours.append((-(row @ query) / lengths, number))
    votes = [0.0] * num_classes
    for minus_similarity, number in sorted(neighbours)[:k]:
        votes[labels[number]] += math.exp(-minus_similarity / temperature)
    return sorted(range(num_classes), key=lambda label: (-votes[label], label))


def mean_and_std(bank):
    bank = np.asarray(bank, dtype=np.float64)
    return bank.mean(axis=0), bank.std(axis=0)


def ranks(bank, labels, queries, targets, k, z=False, query_indices=None):
    """The true class's rank for each query, by the functions under test."""
    moments = None
    if z:
        moments = Moments.of(bank)
    numbers = torch.arange(len(bank))
    similarities, positions = nearest(
        unit_rows(queries, moments),
        unit_rows(bank, moments),
        numbers,
        k,
        query_indices,
    )
    similarities, neighbour_labels = best_of(similarities, positions, labels[positions], k)
    votes = votes_of(similarities, neighbour_labels, NUM_CLASSES)
    return rank_of_label(votes, targets)


def clusters(number=60, seed=0):
    """Features [number, 7] around the centres of their classes, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, NUM_CLASSES, (number,), generator=generator)
    centres = torch.randn(NUM_CLASSES, 7, generator=torch.Generator().manual_seed(9))
    offsets = torch.randn(number, 7, generator=generator) + 2
    return centres[labels] + offsets, labels


@pytest.mark.parametrize("k", [1, 5, 20, 100])
@pytest.mark.parametrize("z", [False, True])
def test_knn_equals_a_loop(k, z):
    bank, labels = clusters()
    queries, targets = clusters(25, seed=1)
    moments = None
    if z:
        moments = mean_and_std(bank)
    expected = []
    for query, target in zip(queries, targets.tolist(), strict=True):
        ranking = slow_ranking(bank, labels, query, NUM_CLASSES, k, moments)
        expected.append(ranking.index(target))
    assert ranks(bank, labels, queries, targets, k, z).tolist() == expected
    assert len(set(expected)) > 2


@pytest.mark.parametrize("k", [5, 20])
def test_leave_one_out_equals_a_loop(k):
    bank, labels = clusters()
    chosen = torch.tensor([3, 7, 20, 59])
    expected = []
    for i in chosen.tolist():
        ranking = slow_ranking(bank, labels, bank[i], NUM_CLASSES, k, without=i)
        expected.append(ranking.index(labels[i]))
    found = ranks(bank, labels, bank[chosen], labels[chosen], k, query_indices=chosen)
    assert found.tolist() == expected


def test_a_row_is_never_its_own_neighbour():
    """The only other one is less similar than none."""
    bank = torch.tensor([[1.0, 0.0], [-0.6, 0.8]])
    numbers = torch.arange(2)
    similarities, positions = nearest(bank[:1], bank, numbers, 1, numbers[:1])
    assert positions.tolist() == [[1]]
    assert similarities[0].tolist() == pytest.approx([-0.6])


def test_of_equal_similarities_the_lowest_numbers_are_taken():
    """Twelve equal rows, of which three are taken, and one that is nearer."""
    row = torch.tensor([0.6, 0.8])
    near = torch.tensor([1.0, 0.0])
    bank = torch.stack([row] * 6 + [near] + [row] * 6)
    similarities, positions = nearest(near[None], bank, torch.arange(13), 4)
    similarities, numbers = best_of(similarities, positions, positions, 4)
    assert numbers.tolist() == [[6, 0, 1, 2]]
    assert similarities[0].tolist() == pytest.approx([1, 0.6, 0.6, 0.6])


def test_queries_with_a_neighbour_that_is_not_finite_are_errors():
    bank, labels = clusters()
    queries, targets = clusters(25, seed=1)
    bank[7, 3] = torch.nan
    assert (ranks(bank, labels, queries, targets, 20) >= 5).all()


# ------------------------------------------------------------------------------------------------------------- RankMe


def slow_rankme(features, centred=False):
    """The definition, by a singular value decomposition in float64."""
    z = np.asarray(features, dtype=np.float64)
    if centred:
        z = z - z.mean(axis=0)
    values = np.linalg.svd(z, compute_uv=False)
    shares = values / values.sum() + 1e-7
    entropy = -(shares * np.log(shares)).sum()
    return min(math.exp(entropy), min(z.shape))


def features_of(number, dim=40):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(number, dim, generator=generator)
    return features * torch.linspace(0.01, 3, dim) + 1.5


@pytest.mark.parametrize(
    ("number", "centred", "tolerance"),
    [
        (500, False, 1e-9),
        (30, False, 1e-9),
        (40, False, 1e-9),
        (500, True, 1e-9),
        # One singular value is zero in exact arithmetic, whose share of 1e-7 is below rounding.
        (30, True, 1e-4),
        (40, True, 1e-4),
    ],
)
def test_rankme_equals_its_definition(number, centred, tolerance):
    features = features_of(number)
    expected = slow_rankme(features, centred)
    assert Moments.of(features).rankme(centred) == pytest.approx(expected, rel=tolerance)


def test_rankme_never_exceeds_the_number_of_channels_and_of_equal_features_is_one():
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(64, 64, generator=generator)
    orthogonal, _ = torch.linalg.qr(square.double())
    assert Moments.of(orthogonal).rankme() == 64
    equal = square[:1].expand(1000, 64)
    assert Moments.of(equal).rankme(centred=True) == 1
