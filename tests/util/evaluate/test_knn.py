"""kNN and RankMe against slow re-derivations in float64."""

import math

import numpy as np
import pytest
import torch

from util.evaluate.knn import best_of, nearest, rank_of_label, unit_rows, votes_of
from util.evaluate.moments import Moments


def slow_ranking(bank, labels, query, num_classes, k, moments=None, without=None):
    """The classes in the order of their votes, by loops over rows: of equal votes the lowest class comes first."""
    bank, query = (np.asarray(x, dtype=np.float64) for x in (bank, query))
    if moments is not None:
        bank, query = ((x - moments[0]) / (moments[1] + 1e-6) for x in (bank, query))
    scored = []
    for number, row in enumerate(bank):
        if number != without:
            scored.append((-(row @ query) / np.linalg.norm(row) / np.linalg.norm(query), number))
    votes = [0.0] * num_classes
    for minus_similarity, number in sorted(scored)[:k]:
        votes[labels[number]] += math.exp(-minus_similarity / 0.07)
    return sorted(range(num_classes), key=lambda c: (-votes[c], c))


def mean_and_std(bank):
    bank = np.asarray(bank, dtype=np.float64)
    return bank.mean(axis=0), bank.std(axis=0)


def ranks(bank, labels, queries, targets, num_classes, k, z=False, numbers=None):
    """The true class's rank for each query, by the functions under test."""
    moments = Moments.of(bank) if z else None
    x, q = unit_rows(bank, moments), unit_rows(queries, moments)
    similarities, positions = nearest(q, x, torch.arange(len(x)), k, numbers)
    similarities, found = best_of(similarities, positions, labels[positions], k)
    return rank_of_label(votes_of(similarities, found, num_classes), targets)


def clusters(n=60, dim=7, num_classes=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, num_classes, (n,), generator=generator)
    centres = torch.randn(num_classes, dim, generator=torch.Generator().manual_seed(9))
    return centres[labels] + torch.randn(n, dim, generator=generator) + 2, labels


@pytest.mark.parametrize("k", [1, 5, 20, 100])
@pytest.mark.parametrize("z", [False, True])
def test_knn_equals_a_loop(k, z):
    (bank, labels), (queries, targets) = clusters(), clusters(25, seed=1)
    found = ranks(bank, labels, queries, targets, 6, k, z)
    moments = mean_and_std(bank) if z else None
    expected = [
        slow_ranking(bank, labels, query, 6, k, moments).index(target)
        for query, target in zip(queries, targets.tolist(), strict=True)
    ]
    assert found.tolist() == expected and len(set(expected)) > 2


@pytest.mark.parametrize("k", [5, 20])
def test_leave_one_out_equals_a_loop(k):
    bank, labels = clusters()
    chosen = torch.tensor([3, 7, 20, 59])
    found = ranks(bank, labels, bank[chosen], labels[chosen], 6, k, numbers=chosen)
    expected = [slow_ranking(bank, labels, bank[i], 6, k, without=i).index(labels[i]) for i in chosen.tolist()]
    assert found.tolist() == expected


def test_a_row_is_never_its_own_neighbour():
    """The only other one is less similar than none."""
    bank = torch.tensor([[1.0, 0.0], [-0.6, 0.8]])
    similarities, positions = nearest(bank[:1], bank, torch.arange(2), 1, torch.tensor([0]))
    assert positions.tolist() == [[1]] and similarities[0].tolist() == pytest.approx([-0.6])


def test_equal_similarities_take_the_lowest_numbers_and_equal_votes_the_lowest_class():
    """Twelve equal rows, of which three are taken, and one that is nearer."""
    row, near = torch.tensor([0.6, 0.8]), torch.tensor([1.0, 0.0])
    bank = torch.stack([row] * 6 + [near] + [row] * 6)
    labels = torch.tensor([4, 3, 4, 0, 0, 0, 1, *[0] * 6])
    similarities, positions = nearest(near[None], bank, torch.arange(13), 4)
    similarities, numbers = best_of(similarities, positions, positions, 4)
    assert numbers.tolist() == [[6, 0, 1, 2]] and similarities[0].tolist() == pytest.approx([1, 0.6, 0.6, 0.6])
    votes = votes_of(similarities, labels[numbers], 5)
    small = math.exp(-0.4 / 0.07)
    assert votes[0].tolist() == pytest.approx([0, 1, 0, small, 2 * small])
    assert [rank_of_label(votes, torch.tensor([c])).item() for c in range(5)] == [3, 0, 4, 2, 1]
    equal = torch.tensor([[0.0, 2.0, 2.0]])
    assert [rank_of_label(equal, torch.tensor([c])).item() for c in range(3)] == [2, 0, 1]


def test_queries_with_a_neighbour_that_is_not_finite_are_errors():
    (bank, labels), (queries, targets) = clusters(), clusters(25, seed=1)
    assert (ranks(bank, labels, queries, targets, 6, 20) == 0).any()
    bank[7, 3] = torch.nan
    assert (ranks(bank, labels, queries, targets, 6, 20) >= 5).all()


def test_neighbours_of_parts_merge_to_those_of_the_whole():
    (bank, _), (queries, _) = clusters(), clusters(9, seed=1)
    bank[10:20] = bank[:10]  # ties between the parts
    x, q, numbers = unit_rows(bank), unit_rows(queries), torch.arange(60)
    whole, positions = nearest(q, x, numbers, 8)
    expected = best_of(whole, positions, positions, 8)
    found = []
    for rank in range(3):
        own = numbers[rank::3]
        similarities, positions = nearest(q, x[own], own, 8)
        found.append((similarities, own[positions]))
    similarities, merged = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    best = best_of(similarities, merged, merged, 8)
    torch.testing.assert_close(best[0], expected[0])
    assert torch.equal(best[1], expected[1])


def test_a_channel_of_large_variance_rules_raw_distances_and_leaves_z_unchanged():
    (bank, labels), (queries, targets) = clusters(200), clusters(50, seed=1)
    scale = torch.ones(7)
    scale[3] = 1000.0
    z, scaled = (ranks(bank * s, labels, queries * s, targets, 6, 20, z=True) for s in (1, scale))
    assert torch.equal(z, scaled)
    raw, ruled = (ranks(bank * s, labels, queries * s, targets, 6, 20) for s in (1, scale))
    assert (ruled == 0).float().mean() < (raw == 0).float().mean() - 0.1


def test_perfect_clusters_and_random_labels():
    labels = torch.arange(6).repeat(50)
    bank = torch.eye(6)[labels] + 0.01 * torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    assert (ranks(bank, labels, bank, labels, 6, 20, numbers=torch.arange(300)) == 0).all()
    generator = torch.Generator().manual_seed(1)
    bank, queries = (torch.randn(2000, 8, generator=generator) for _ in range(2))
    labels, targets = (torch.randint(0, 6, (2000,), generator=generator) for _ in range(2))
    hits = (ranks(bank, labels, queries, targets, 6, 20) == 0).double().mean().item()
    assert hits == pytest.approx(1 / 6, abs=4 * (5 / 36 / 2000) ** 0.5)


def test_knn_equals_scikit_learn_s():
    neighbors = pytest.importorskip("sklearn.neighbors")
    (bank, labels), (queries, targets) = clusters(300), clusters(80, seed=1)
    x, q = (unit_rows(features).double().numpy() for features in (bank, queries))

    def weights(distances):
        return np.exp((1 - distances) / 0.07)

    model = neighbors.KNeighborsClassifier(20, weights=weights, metric="cosine", algorithm="brute")
    expected = model.fit(x, labels.numpy()).predict(q) == targets.numpy()
    assert (ranks(bank, labels, queries, targets, 6, 20) == 0).tolist() == expected.tolist()


# ------------------------------------------------------------------------------------------------------------- RankMe


def slow_rankme(features, centred=False):
    """The definition, by a singular value decomposition in float64."""
    z = np.asarray(features, dtype=np.float64)
    values = np.linalg.svd(z - z.mean(axis=0) if centred else z, compute_uv=False)
    shares = values / values.sum() + 1e-7
    return min(math.exp(-(shares * np.log(shares)).sum()), min(z.shape))


@pytest.mark.parametrize(("n", "dim"), [(500, 40), (30, 40), (40, 40)])
@pytest.mark.parametrize("centred", [False, True])
def test_rankme_equals_its_definition(n, dim, centred):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(n, dim, generator=generator) * torch.linspace(0.01, 3, dim) + 1.5
    parts = features.split(11)
    moments = [Moments.of(part, rows=4) for part in parts]
    whole = Moments(*(sum(getattr(m, name) for m in moments) for name in ("count", "total", "gram")))
    expected = slow_rankme(features, centred)
    if centred and n <= dim:  # one singular value is zero in exact arithmetic, whose share of 1e-7 is below rounding
        assert whole.rankme(centred) == pytest.approx(expected, rel=1e-4)
    else:
        assert whole.rankme(centred) == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(whole.mean, mean_and_std(features)[0], rtol=1e-9)
    np.testing.assert_allclose(whole.std, mean_and_std(features)[1], rtol=1e-9)


def test_rankme_of_known_spectra():
    orthogonal = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).double())[0]
    assert Moments.of(orthogonal).rankme() == 64  # never above D
    one = torch.randn(100, 1, generator=torch.Generator().manual_seed(1)) @ torch.ones(1, 64)
    assert Moments.of(one).rankme() == pytest.approx(1, abs=1e-3)
    assert Moments.of(10 * orthogonal[:32].float()).rankme() == pytest.approx(32, rel=1e-5)


def test_a_large_mean_hides_the_other_directions():
    features = torch.randn(2000, 32, generator=torch.Generator().manual_seed(0)) + 50
    moments = Moments.of(features)
    assert moments.rankme() < 4 and moments.rankme(centred=True) > 31
