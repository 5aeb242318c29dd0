"""Peers of furthest sampling: other ways to choose the retained tokens, in numpy.

A sampling function takes a batch of *shuffled* lists of masked tokens, `coords` [B, M, 2] with (row, column) of tokens.
It returns positions in the lists, int64 [B, num_retained]. ValueError unless 1 <= num_retained <= M.
"""

import numpy as np

LEAST_WEIGHT = 1e-6  # added to all weights, so that tokens of weight 0 are drawn last, in random order


def check_num_retained(coords: np.ndarray, num_retained: int) -> None:
    """Raises ValueError unless 1 <= num_retained <= M for coords [B, M, 2]."""
    num_masked = np.shape(coords)[1]
    if not 1 <= num_retained <= num_masked:
        raise ValueError(f"num_retained must be between 1 and the {num_masked} listed tokens, got {num_retained}")


def random_sampling(coords: np.ndarray, num_retained: int) -> np.ndarray:
    """The paper's baseline. The head of a shuffled list is a random subset."""
    check_num_retained(coords, num_retained)
    head = np.arange(num_retained)
    return np.broadcast_to(head, (len(coords), num_retained))


def running_cell_sampling(coords: np.ndarray, num_retained: int) -> np.ndarray:
    """Retains a regular lattice: the decoder masking of VideoMAE V2 (Wang et al., CVPR 2023) with an exact count.

    The grid is tiled by cells of 2x2 tokens. A pointer, uniform in 0..3, is drawn per image. It numbers the four slots
    of every cell, and ring r holds the tokens of slot number r. Rings 3, 2, 1 and 0 are retained in turn, the last of
    them only in part and at random. The video version moves the pointer from frame to frame. An image has one frame.

    All randomness comes from the order of the list. Each bit of the pointer says which of two tokens comes first in
    raster order: the last two of the list, and the two before them. A list of fewer than four tokens lacks bits, which
    are 0. Inside a ring the earlier tokens of the list come first.
    """
    check_num_retained(coords, num_retained)
    coords = np.asarray(coords).astype(np.int64)
    rows = coords[..., 0]  # [B, M]
    columns = coords[..., 1]
    raster = rows * (columns.max() + 1) + columns
    batch_size, num_masked = raster.shape
    pointer = np.zeros((batch_size, 1), np.int64)
    if num_masked >= 2:
        pointer[:, 0] += raster[:, -1] < raster[:, -2]
    if num_masked >= 4:
        pointer[:, 0] += 2 * (raster[:, -3] < raster[:, -4])
    slot = 2 * (rows % 2) + columns % 2
    ring = (slot + pointer) % 4
    order = np.argsort(-ring, axis=1, kind="stable")
    return order[:, :num_retained]


def attention_sampling(
    coords: np.ndarray,
    num_retained: int,
    weights: np.ndarray | None = None,
    noise: np.ndarray | None = None,
) -> np.ndarray:
    """Retains the first draws of a weighted permutation: tokens of high weight are likely to be retained.

    weights: of the listed tokens, [B, M], at least 0. noise: of the listed tokens, [B, M]. It may be the noise that
    shuffled the list: only its lower bits are used, which do not depend on its order. Without weights all tokens have
    the same chance, as in `random_sampling`.
    """
    if weights is None or noise is None:
        return random_sampling(coords, num_retained)
    check_num_retained(coords, num_retained)
    lower_bits = noise * 2**20 % 1
    order = weighted_permutation(weights, lower_bits)
    return order[:, :num_retained]


def weighted_permutation(weights: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Draws all items one after another without replacement, each with a probability proportional to its weight.

    weights: [B, N], at least 0. noise: uniform in [0, 1), [B, N]. Returns positions int64 [B, N] in the order drawn.

    The keys are those of Efraimidis and Spirakis (2006): log(u) / weight in descending order.
    """
    weights = np.asarray(weights) + LEAST_WEIGHT
    keys = -np.log1p(-np.asarray(noise)) / weights
    return np.argsort(keys, axis=1)
