import itertools

import numpy as np
import pytest

from encoders.window_groups import group_tokens, group_windows


def best_sum(counts, limit):
    """Returns the largest sum of a subset that is at most `limit`, by trying every subset."""
    subsets = itertools.chain.from_iterable(itertools.combinations(counts, n) for n in range(len(counts) + 1))
    return max(total for total in map(sum, subsets) if total <= limit)


@pytest.mark.parametrize("seed", range(20))
def test_each_group_is_the_fullest_of_the_remaining_windows(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 13, size=10).tolist()
    groups = group_windows(counts, 12)
    assert sorted(window for group in groups for window in group) == list(range(10))
    remaining = list(range(10))
    for group in groups:
        assert sum(counts[w] for w in group) == best_sum([counts[w] for w in remaining], 12)
        remaining = [w for w in remaining if w not in group]


def test_among_equal_sums_the_last_windows_are_left_out():
    assert group_windows([3, 2, 1, 3, 3], 6) == [[0, 1, 2], [3, 4]]
    assert group_windows([4, 4, 4], 4) == [[0], [1], [2]]
    assert group_windows([], 5) == []


@pytest.mark.parametrize("counts", [[5], [0, 2]])
def test_windows_that_are_empty_or_too_large_are_refused(counts):
    with pytest.raises(ValueError, match="windows must hold from 1 to 4 tokens"):
        group_windows(counts, 4)


def test_a_plan_is_a_partition_of_the_tokens_with_whole_windows():
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 9, size=40) * 7  # windows may have any numbers
    grouping = group_tokens(windows, 12, capacity=9)
    assert grouping.shape == (9, 12)
    tokens = grouping[grouping >= 0]
    assert sorted(tokens.tolist()) == list(range(40))
    rows = [windows[row[row >= 0]] for row in grouping]
    home = {int(window): {g for g, row in enumerate(rows) if window in row} for window in windows}
    assert all(len(groups) == 1 for groups in home.values())
    assert (np.diff((grouping >= 0).sum(axis=1)) <= 0).all()  # fullest first, empty ones at the end
    assert len(group_tokens(windows, 12)) == len(group_windows(np.unique(windows, return_counts=True)[1], 12))
