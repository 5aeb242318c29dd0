"""Running cells and sampling by attention, against slow loops and exact probabilities."""

import numpy as np
import pytest

from prmim import SAMPLING, TokenCounts, TokenOrderSampler, addressed_noise
from tests.orders import draw_order
from util.peer_sampling import attention_sampling, running_cell_sampling


def shuffled_lists(side, num_masked, batch):
    """Returns coords [batch, num_masked, 2] of random tokens of a square grid in random order."""
    noise = np.random.default_rng(0).random((batch, side * side))
    order = noise.argsort(axis=1)[:, :num_masked]
    return np.stack(np.divmod(order, side), axis=-1)


def noise_of(batch, num_tokens):
    return addressed_noise(0, 0, np.arange(batch), num_tokens)


# --------------------------------------------------------------------------------------------------- running cell


def slow_pointer(cells):
    """Returns two random bits of a list [[row, column]]: which of its last four cells come first in the grid."""
    pointer = 0
    if cells[-1] < cells[-2]:
        pointer += 1
    if cells[-3] < cells[-4]:
        pointer += 2
    return pointer


def slow_running_cell(cells, num_retained):
    """Returns the retained positions of one list, ring by ring from the last one."""
    pointer = slow_pointer(cells)
    rings = [[], [], [], []]
    for position, (row, column) in enumerate(cells):
        slot = 2 * (row % 2) + column % 2
        rings[(slot + pointer) % 4].append(position)
    retained = rings[3] + rings[2] + rings[1] + rings[0]
    return retained[:num_retained]


@pytest.mark.parametrize(
    ("side", "num_masked", "num_retained"),
    [
        (14, 147, 49),
        (14, 147, 98),
        (7, 30, 15),
        (8, 48, 1),
        (7, 49, 49),
        (8, 64, 32),
    ],
)
def test_running_cell_fills_its_rings_in_turn(side, num_masked, num_retained):
    lists = shuffled_lists(side, num_masked, 60)
    picks = running_cell_sampling(lists, num_retained)
    for row, cells in zip(picks.tolist(), lists.tolist(), strict=True):
        assert row == slow_running_cell(cells, num_retained)


@pytest.mark.parametrize("num_masked", [1, 2, 3])
def test_running_cell_takes_lists_that_lack_bits(num_masked):
    picks = running_cell_sampling(shuffled_lists(4, num_masked, 20), num_masked)
    for row in picks.tolist():
        assert sorted(row) == list(range(num_masked))


# ------------------------------------------------------------------------------------------------------- attention


def test_the_sampler_draws_the_retained_tokens_by_their_weights_independently_of_the_mask():
    """One token has 10 times the weight. Given that it is masked, it is retained as often as the weights say.

    Its place in the shuffled list must not matter: the draw is independent of the order of the noise.
    """
    num = 20_000
    hot = 5
    weights = np.ones((num, 16))
    weights[:, hot] = 10
    noise = noise_of(num, 16)
    sampler = TokenOrderSampler(4, TokenCounts(4, 4, 8), "attention")
    ids = draw_order(sampler, noise, weights)
    place = (noise.argsort(axis=1) == hot).argmax(axis=1)
    is_visible = (ids[:, :4] == hot).any(axis=1)
    assert np.array_equal(is_visible, place < 4)
    is_retained = (ids[:, 4:8] == hot).any(axis=1)
    missed = 1.0  # of the 12 masked tokens, 4 are drawn; each draw misses the hot one if it takes one of the others
    for others in (11, 10, 9, 8):
        missed *= others / (10 + others)
    for first in (4, 8, 12):
        chosen = (place >= first) & (place < first + 4)
        assert is_retained[chosen].mean() == pytest.approx(1 - missed, abs=0.025)


def test_without_weights_attention_is_random_sampling():
    counts = TokenCounts.from_ratios(196, 0.75, 0.5)
    noise = noise_of(20, 196)
    attention = TokenOrderSampler(14, counts, "attention")
    random = TokenOrderSampler(14, counts, "random")
    without_weights = attention(noise)
    with_weights = draw_order(attention, noise, np.ones((20, 196)))
    assert np.array_equal(without_weights, random(noise))
    assert not np.array_equal(without_weights, with_weights)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("num_retained", [0, 13])
def test_impossible_counts_are_refused(sampling, num_retained):
    coords = np.zeros((1, 12, 2), int)
    weights_and_noise = []
    if sampling == "attention":
        weights_and_noise = np.ones((2, 1, 12))
    with pytest.raises(ValueError, match=f"between 1 and the 12 listed tokens, got {num_retained}"):
        SAMPLING[sampling](coords, num_retained, *weights_and_noise)


def test_attention_sampling_returns_positions_in_the_list():
    weights = np.zeros((5, 147))
    weights[:, 100:110] = 1
    noise = np.random.default_rng(0).random((5, 147))
    picks = attention_sampling(shuffled_lists(14, 147, 5), 10, weights, noise)
    for row in picks.tolist():
        assert sorted(row) == list(range(100, 110))
