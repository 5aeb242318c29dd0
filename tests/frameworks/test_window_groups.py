"""Windows are packed into groups of a limited number of tokens."""

import itertools

import numpy as np
import pytest

from frameworks.window_groups import group_tokens, group_windows


def best_sum(counts, limit):
    """Returns the largest sum of a subset that is at most `limit`, by trying every subset."""
    best = 0
    for size in range(len(counts) + 1):
        for subset in itertools.combinations(counts, size):
            if best < sum(subset) <= limit:
                best = sum(subset)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_each_group_is_the_fullest_of_the_remaining_windows(seed):
    counts = np.random.default_rng(seed).integers(1, 13, size=10)
    remaining = list(range(10))
    for group in group_windows(counts.tolist(), 12):
        assert counts[group].sum() == best_sum(counts[remaining].tolist(), 12)
        for window in group:
            remaining.remove(window)
    assert not remaining


def test_among_equal_sums_the_last_windows_are_left_out():
    assert group_windows([3, 2, 1, 3, 3], 6) == [[0, 1, 2], [3, 4]]
    assert group_windows([4, 4, 4], 4) == [[0], [1], [2]]
    assert group_windows([], 5) == []


def test_a_plan_is_a_partition_of_the_tokens_with_whole_windows():
    windows = 7 * np.random.default_rng(0).integers(0, 9, size=40)  # windows may have any numbers
    grouping = group_tokens(windows, 12, capacity=9)
    assert grouping.shape == (9, 12)
    groups = [row[row >= 0] for row in grouping]
    assert sorted(np.concatenate(groups)) == list(range(40))
    lengths = [len(group) for group in groups]
    assert lengths == sorted(lengths, reverse=True)  # fullest first, empty ones at the end
    seen = set()
    for group in groups:
        windows_of_group = set(windows[group])
        assert not seen & windows_of_group
        seen |= windows_of_group
