"""The batches of an evaluation: the processes share the images, and each image is seen exactly once."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from util import collectives
from util.data.datasets import AddressedDataset, batches, every_image_once, stack
from util.run import shard


def evaluation_batches(
    dataset: AddressedDataset,
    indices: Sequence[int] | np.ndarray,
    model: nn.Module,
    forward: Callable[[torch.Tensor], Any],
    autocast: Callable[[], AbstractContextManager],
    device: torch.device,
    batch_size: int,
    num_workers: int,
    on_batch: Callable[[], None] | None = None,
) -> Iterator[Any]:
    """Yields this rank's share of the images: (imgs [B, C, H, W] as stored, labels int64 [B]), on the CPU.

    indices: the images, of which rank r of W takes r, r + W, r + 2 W, ... in this order. forward: what the caller runs
    once per batch. If `model` is sharded, all ranks must run it equally often, so blank images are added at the end.
    on_batch: called before each batch.
    """
    rank, world_size = collectives.rank_and_world_size()
    places = every_image_once(len(indices), batch_size, rank, world_size)
    addresses = [[(0, int(indices[i])) for _, i in batch] for batch in places]
    (height, width), pixels = dataset.transform.size, dataset.images.pixel_format
    pin_memory = device.type == "cuda"
    stored = pixels.pixel_bytes * height * width * batch_size
    loaded = batches(dataset, addresses, stack, num_workers, pin_memory, batch_bytes=stored)
    bar = tqdm(loaded, total=len(addresses), unit="batch", leave=False, disable=rank != 0 or not sys.stderr.isatty())

    def stream() -> Iterator[Any]:
        for batch in bar:
            if on_batch is not None:
                on_batch()
            yield batch

    if not shard.is_sharded(model):
        return stream()
    most = len(every_image_once(len(indices), batch_size, 0, world_size))  # rank 0 has the most
    blank = torch.zeros(1, pixels.channels, height, width, device=device)
    return shard.pad_forward_passes(stream(), most, forward, blank, autocast)
