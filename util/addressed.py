"""Random numbers that have an address instead of a history.

Everything random about a training sample (its place in the epoch, its crop, its flip, the order of its tokens) is a
function of `(seed, epoch, index)`. Nothing is streamed, so nothing has to be saved: any number of workers gives the
same batches, and a run resumed in mid-epoch continues bit for bit.
"""

import random
from contextlib import contextmanager

import numpy as np
import torch

# One stream per purpose, so that the crop of a sample and its mask never share a number. Part of a run's identity.
SHUFFLE, AUGMENT, MASK, LIBRARY, STEP = 1, 2, 3, 4, 5

_STEP = np.uint64(0x9E3779B97F4A7C15)


def addressed_uniform(stream, seed, epoch, indices, num):
    """Uniform float64 numbers in [0, 1) of shape [B, num], a pure function of (stream, seed, epoch, index).

    `indices` is an integer array [B]; `epoch` an integer or an integer array [B]. The j-th number of a sample is the
    j-th output of SplitMix64 (Steele et al., OOPSLA 2014) started at a hash of the address, so the whole batch is one
    vectorised expression.
    """
    indices = np.atleast_1d(np.asarray(indices))
    key = np.zeros(indices.shape, np.uint64)
    for part in (stream, seed, epoch, indices):
        key = _mix((key ^ np.asarray(part).astype(np.uint64)) + _STEP)
    counter = np.arange(1, num + 1, dtype=np.uint64) * _STEP
    return (_mix(key[:, None] + counter) >> np.uint64(11)) * 2.0**-53


def addressed_seed(stream, seed, epoch, index):
    """A seed of 32 bits for generators that cannot be addressed themselves."""
    return int(addressed_uniform(stream, seed, epoch, [index], 1)[0, 0] * 2**32)


@contextmanager
def seeded_libraries(seed):
    """Within it, what libraries draw from the global generators of Python, numpy and torch (CPU) follows from `seed`.

    Afterwards the generators are as before: where the worker is the trainer's own process, nothing leaks into the step.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach for CUDA, which a worker has none of
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _mix(z):
    """SplitMix64's finaliser: every input bit reaches every output bit. Overflow wraps, as it should."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
