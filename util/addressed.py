"""Random numbers with an address instead of a history.

Everything that is random about a training sample (its place in the epoch, its crop, its flip, the order of its tokens)
is a function of `(seed, epoch, index)`. There is no stream of numbers whose state would have to be saved. Batches are
the same for any number of workers, and a run that is resumed in mid-epoch continues bit for bit.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

# One stream per purpose, so that crop and mask of a sample never share a number. Changing a value changes all runs.
SHUFFLE = 1
AUGMENT = 2
MASK = 3
LIBRARY = 4
STEP = 5
BANK = 6
VFLIP = 7

_INCREMENT = 0x9E3779B97F4A7C15  # of SplitMix64's counter
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of its finaliser
_WORD = 2**64 - 1


def addressed_uniform(
    stream: int,
    seed: int,
    epoch: int | np.ndarray,
    indices: int | Sequence[int] | np.ndarray,
    num: int,
) -> np.ndarray:
    """Returns uniform float64 numbers in [0, 1) of shape [B, num], a pure function of (stream, seed, epoch, index).

    indices: integers [B]. epoch: an integer, or integers [B].

    The j-th number of a sample is the j-th output of SplitMix64 (Steele et al., OOPSLA 2014), started at a hash of the
    address. The whole batch is one vectorised expression.
    """
    indices = np.atleast_1d(np.asarray(indices))
    key = np.zeros(indices.shape, np.uint64)
    for part in (stream, seed, epoch, indices):
        word = np.asarray(part).astype(np.uint64)
        key = _mix((key ^ word) + np.uint64(_INCREMENT))
    counter = np.arange(1, num + 1, dtype=np.uint64)
    bits = _mix(key[:, None] + counter * np.uint64(_INCREMENT))
    return (bits >> np.uint64(11)) * 2.0**-53


def addressed_numbers(stream: int, seed: int, epoch: int, index: int, num: int) -> list[float]:
    """Returns the numbers of `addressed_uniform` for one sample, in a third of its time: they are too few for numpy."""
    key = 0
    for part in (stream, seed, epoch, index):
        word = int(part) & _WORD
        key = _mix_int((key ^ word) + _INCREMENT & _WORD)
    numbers = []
    for j in range(1, num + 1):
        bits = _mix_int(key + j * _INCREMENT & _WORD)
        numbers.append((bits >> 11) * 2.0**-53)
    return numbers


def addressed_seed(stream: int, seed: int, epoch: int, index: int) -> int:
    """Returns a 32-bit seed for a generator that cannot be addressed itself."""
    (number,) = addressed_numbers(stream, seed, epoch, index, num=1)
    return int(number * 2**32)


@contextmanager
def seeded_libraries(seed: int) -> Iterator[None]:
    """Seeds the global generators of Python, numpy and torch (CPU), from which libraries draw, inside the block.

    Their states are restored at the end: a worker may be the process of the trainer itself, whose draws must not
    change.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed CUDA, which workers must not touch
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit affects every output bit. Products wrap at 64 bits, as intended."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FACTORS[0])
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return z ^ (z >> np.uint64(31))


def _mix_int(z: int) -> int:
    """`_mix` of one number."""
    z = (z ^ z >> 30) * _FACTORS[0] & _WORD
    z = (z ^ z >> 27) * _FACTORS[1] & _WORD
    return z ^ z >> 31
