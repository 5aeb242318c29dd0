"""Random numbers that are addressed by (stream, seed, epoch, index)."""

import numpy as np
import pytest

from util.addressed import AUGMENT, MASK, addressed_numbers, addressed_seed, addressed_uniform


def test_addressed_seeds_differ():
    seeds = set()
    for stream in (4, 5):
        for epoch in range(5):
            seeds |= {addressed_seed(stream, 0, epoch, index) for index in range(100)}
    assert len(seeds) == 1000
    assert min(seeds) >= 0
    assert max(seeds) < 2**32


STEP = 0x9E3779B97F4A7C15


def finalise(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def splitmix64(state, count):
    """The published generator in plain Python integers, as uniform numbers of 53 bits."""
    numbers = []
    for _ in range(count):
        state = (state + STEP) % 2**64
        numbers.append((finalise(state) >> 11) / 2**53)
    return numbers


@pytest.mark.parametrize("address", [(MASK, 0, 0, 0), (AUGMENT, 7, 3, 123_456_789)])
def test_numbers_are_those_of_splitmix64_started_at_a_hash_of_the_address(address):
    state = 0
    for part in address:
        state = finalise(((state ^ part) + STEP) % 2**64)
    expected = splitmix64(state, 5)
    stream, seed, epoch, index = address
    assert addressed_uniform(stream, seed, epoch, [index], 5)[0].tolist() == expected
    assert addressed_numbers(stream, seed, epoch, index, 5) == expected


def test_a_sample_has_the_same_numbers_in_any_batch():
    batch = addressed_uniform(MASK, 1, np.array([0, 5, 5]), np.array([3, 3, 4]), 7)
    assert np.array_equal(batch[1], addressed_uniform(MASK, 1, 5, 3, 7)[0])
    assert len(np.unique(batch, axis=0)) == 3
