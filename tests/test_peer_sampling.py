import itertools

import numpy as np
import pytest

from peer_sampling import attention_sampling, running_cell_sampling, weighted_permutation
from prmim import SAMPLING, TokenCounts, TokenOrderSampler, addressed_noise


def shuffled_lists(side, num_masked, batch, seed=0):
    """Returns coords [batch, num_masked, 2] of random tokens of a square grid in random order."""
    order = np.random.default_rng(seed).random((batch, side * side)).argsort(axis=1)[:, :num_masked]
    return np.stack(np.divmod(order, side), axis=-1)


# --------------------------------------------------------------------------------------------------- running cell


def slow_running_cell(cells, num_retained):
    """The retained positions of one list [(row, column)], ring by ring, and the pointer."""
    pointer = int(tuple(cells[-1]) < tuple(cells[-2])) + 2 * int(tuple(cells[-3]) < tuple(cells[-4]))
    rings = {0: [], 1: [], 2: [], 3: []}
    for position, (row, column) in enumerate(cells):
        slot = {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3}[row % 2, column % 2]
        rings[(slot + pointer) % 4].append(position)
    return (rings[3] + rings[2] + rings[1] + rings[0])[:num_retained], pointer


@pytest.mark.parametrize(
    ("side", "num_masked", "num_retained"), [(14, 147, 49), (14, 147, 98), (7, 30, 15), (8, 48, 1), (7, 49, 49)]
)
def test_running_cell_fills_its_rings_in_turn(side, num_masked, num_retained):
    lists = shuffled_lists(side, num_masked, 60)
    picks = running_cell_sampling(lists, num_retained)
    assert picks.tolist() == [slow_running_cell(cells, num_retained)[0] for cells in lists.tolist()]


def test_the_pointer_is_uniform():
    """With 49 of 196 tokens retained of a whole 14x14 grid, the pointer's ring 3 is retained and shows the pointer."""
    lists = shuffled_lists(14, 196, 4000)
    first = np.take_along_axis(lists, running_cell_sampling(lists, 49)[..., None], axis=1)
    slots = 2 * (first[..., 0] % 2) + first[..., 1] % 2
    assert (slots == slots[:, :1]).all()  # a lattice: one slot of every cell
    counts = np.bincount(slots[:, 0], minlength=4)
    assert ((counts - 1000) ** 2 / 1000).sum() < 21  # chi-squared, 3 degrees: P(> 21) is 1e-4


@pytest.mark.parametrize("m", [1, 2, 3])
def test_where_counts_coincide_the_share_m_of_4_is_thrown_by_pattern(m):
    """On the whole grid the thrown tokens are those with (slot + pointer) mod 4 < m, as in VideoMAE V2."""
    lists = shuffled_lists(8, 64, 200)
    picks = running_cell_sampling(lists, 64 - 16 * m)
    patterns = set()
    for cells, retained in zip(lists.tolist(), picks.tolist(), strict=True):
        _, pointer = slow_running_cell(cells, 1)
        thrown = {tuple(cells[i]) for i in set(range(64)) - set(retained)}
        assert thrown == {
            (row, column) for row in range(8) for column in range(8) if (2 * (row % 2) + column % 2 + pointer) % 4 < m
        }
        patterns.add(frozenset(thrown))
    assert len(patterns) == 4
    kept = sum(np.array([[(r, c) not in pattern for c in range(8)] for r in range(8)]) for pattern in patterns)
    assert (kept == 4 - m).all()  # over the four pointers, each position is kept 4 - m times


def test_running_cell_lies_between_random_and_furthest():
    """Mean distance of a retained token to the nearest other one at rho_e .75 and rho_d .5."""
    counts, noise, spread = TokenCounts.from_ratios(196, 0.75, 0.5), addressed_noise(0, 0, np.arange(200), 196), {}
    for name in ("random", "running_cell", "furthest"):
        ids = TokenOrderSampler(14, counts, name)(noise)[:, counts.num_visible : counts.num_kept]
        cells = np.stack(np.divmod(ids, 14), -1)
        distances = np.sqrt(((cells[:, :, None] - cells[:, None]) ** 2).sum(-1)) + 99 * np.eye(counts.num_retained)
        spread[name] = distances.min(axis=2).mean()
    assert spread == pytest.approx({"random": 1.25, "running_cell": 1.53, "furthest": 1.76}, abs=0.03)


@pytest.mark.parametrize("num_masked", [1, 2, 3])
def test_running_cell_takes_lists_that_lack_bits(num_masked):
    picks = running_cell_sampling(shuffled_lists(4, num_masked, 20), num_masked)
    assert (np.sort(picks, axis=1) == np.arange(num_masked)).all()


# ------------------------------------------------------------------------------------------------------- attention


def test_first_draws_are_proportional_to_the_weights():
    weights = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 1.0])
    noise = np.random.default_rng(0).random((40_000, 6))
    drawn = np.bincount(weighted_permutation(weights[None], noise)[:, 0], minlength=6) / 40_000
    assert drawn[0] == 0 and drawn == pytest.approx(weights / 2, abs=0.01)


def test_the_whole_permutation_of_three_tokens_has_the_exact_probabilities():
    w = np.array([0.2, 0.5, 1.0])
    draws = weighted_permutation(w[None], np.random.default_rng(1).random((60_000, 3)))
    for a, b, c in itertools.permutations(range(3)):
        probability = w[a] / w.sum() * w[b] / (w[b] + w[c])
        assert (draws == (a, b, c)).all(axis=1).mean() == pytest.approx(probability, abs=0.008)


def test_zero_weights_are_drawn_last_and_equal_ones_at_random():
    noise = np.random.default_rng(2).random((3000, 8))
    draws = weighted_permutation(np.array([[0, 0, 0, 0, 1, 1, 1, 1.0]]), noise)
    assert (np.sort(draws[:, :4], axis=1) == [4, 5, 6, 7]).mean() > 0.999
    assert np.bincount(draws[:, 4], minlength=8) / 3000 == pytest.approx([0.25] * 4 + [0] * 4, abs=0.05)
    noise[:, 3] = 0.0  # the smallest value that the noise can have
    uniform = weighted_permutation(np.zeros((1, 8)), noise)
    assert np.array_equal(uniform, noise.argsort(axis=1))


def test_the_sampler_draws_the_retained_tokens_by_their_weights_independently_of_the_mask():
    """One token has 10 times the weight. Given that it is masked, it is retained as often as the weights say.

    Its place in the shuffled list must not matter: the draw is independent of the order of the noise.
    """
    counts, hot, num = TokenCounts(4, 4, 8), 5, 20_000
    sampler = TokenOrderSampler(4, counts, "attention")
    weights = np.ones((num, 16))
    weights[:, hot] = 10
    noise = addressed_noise(0, 0, np.arange(num), 16)
    ids = sampler(noise, weights=weights)
    place = (noise.argsort(axis=1) == hot).argmax(axis=1)  # 0 to 3: visible
    is_retained = (ids[:, 4:8] == hot).any(axis=1)
    assert np.array_equal((ids[:, :4] == hot).any(axis=1), place < 4)
    others, missed = 11.0, 1.0  # of the 12 masked tokens, 4 are drawn; at each draw 10 / (10 + others left)
    for _ in range(4):
        missed *= others / (10 + others)
        others -= 1
    for low, high in ((4, 8), (8, 12), (12, 16)):
        chosen = (place >= low) & (place < high)
        assert is_retained[chosen].mean() == pytest.approx(1 - missed, abs=0.025)


def test_without_weights_attention_is_random_sampling():
    counts, noise = TokenCounts.from_ratios(196, 0.75, 0.5), addressed_noise(0, 0, np.arange(20), 196)
    ids = [TokenOrderSampler(14, counts, name)(noise) for name in ("attention", "random")]
    assert np.array_equal(*ids)
    equal = TokenOrderSampler(14, counts, "attention")(noise, weights=np.ones((20, 196)))
    assert not np.array_equal(equal, ids[0])


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("num_retained", [0, 13])
def test_impossible_counts_are_refused(sampling, num_retained):
    more = (np.ones((1, 12)), np.zeros((1, 12))) if sampling == "attention" else ()
    with pytest.raises(ValueError, match=f"between 1 and the 12 listed tokens, got {num_retained}"):
        SAMPLING[sampling](np.zeros((1, 12, 2), int), num_retained, *more)


def test_attention_sampling_returns_positions_in_the_list():
    lists = shuffled_lists(14, 147, 5)
    weights = np.zeros((5, 147))
    weights[:, 100:110] = 1
    picks = attention_sampling(lists, 10, weights, np.random.default_rng(0).random((5, 147)))
    assert (np.sort(picks, axis=1) == np.arange(100, 110)).all()
