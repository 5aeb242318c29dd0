"""Features of a frozen encoder over all processes, and their k-nearest-neighbour accuracy. It knows no model.

Each process encodes its share of the images. The bank of training features stays split: each process finds the
neighbours among its own share, and the results are merged by similarity and image number.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from util import collectives
from util.accuracy import accuracies
from util.data.datasets import AddressedDataset
from util.data.transforms import Normalize
from util.knn import MOST_SIMILARITIES, Moments, best_of, nearest, rank_of_label, unit_rows, votes_of
from util.run.evaluation import evaluation_batches

Encode = Callable[[torch.Tensor], dict[str, torch.Tensor]]


class Features(NamedTuple):
    """This rank's share of the features of some images, on the device."""

    values: dict[str, torch.Tensor]  # {name of a feature: float32 [n, D]}
    labels: torch.Tensor  # int64 [n]
    numbers: torch.Tensor  # of the images in the data, int64 [n], ascending

    def take(self, rows: torch.Tensor) -> "Features":
        """Returns the features of the images at `rows`, a mask [n]."""
        values = {name: x[rows] for name, x in self.values.items()}
        return Features(values, self.labels[rows], self.numbers[rows])


@torch.no_grad()
def extract_features(
    encode: Encode,
    dataset: AddressedDataset,
    indices: Sequence[int] | np.ndarray,
    model: nn.Module,
    normalize: Normalize,
    autocast: Callable[[], AbstractContextManager],
    batch_size: int,
    num_workers: int,
    on_batch: Callable[[], None] | None = None,
) -> Features:
    """Encodes this rank's share of the images `indices`, which ascend. All ranks must call it.

    encode: turns normalised images [B, C, H, W] into {name: features [B, D]}. model: its network, which is put into
    eval mode for the time being. on_batch: called before each batch. A rank without images has features [0, D].
    """
    rank, world_size = collectives.rank_and_world_size()
    device, was_training = normalize.mean.device, model.training
    found: dict[str, list[torch.Tensor]] = {}
    labels = [torch.empty(0, dtype=torch.int64, device=device)]
    model.eval()
    sizes = batch_size, num_workers
    for imgs, targets in evaluation_batches(
        dataset, indices, model, encode, autocast, device, *sizes, on_batch=on_batch
    ):
        with autocast():
            features = encode(normalize(imgs.to(device, non_blocking=True)))
        for name, x in features.items():
            found.setdefault(name, []).append(x.float())
        labels.append(targets.to(device, non_blocking=True))
    model.train(was_training)
    numbers = torch.as_tensor(np.asarray(indices)[rank::world_size], device=device)
    # A rank without images learns the names and sizes of the features from the others.
    sizes_of_ranks = collectives.gather_objects({name: parts[0].shape[1] for name, parts in found.items()})
    dims = next(filter(None, sizes_of_ranks), {})
    values = {name: torch.cat([torch.empty(0, dim, device=device), *found.get(name, [])]) for name, dim in dims.items()}
    return Features(values, torch.cat(labels), numbers)


def forward_blocks(
    network: nn.Module, imgs: torch.Tensor, blocks: Sequence[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Returns (`network.forward_features(imgs)`, {block: its output before the final norm}). Blocks count from 1."""
    outputs: dict[int, torch.Tensor] = {}

    def keep(block: int) -> Callable[..., None]:
        return lambda module, args, output: outputs.update({block: output})

    hooks = [network.blocks[block - 1].register_forward_hook(keep(block)) for block in blocks]
    try:
        return network.forward_features(imgs), outputs
    finally:
        for hook in hooks:
            hook.remove()


def class_feature(x: torch.Tensor, before_norm: torch.Tensor | None, num_cls_tokens: int) -> torch.Tensor:
    """Returns the class feature of each image [B, D]: one token after the norm, or the mean of several before the norm.

    The latter is Pixio's (arXiv 2512.15715).

    x, before_norm: tokens [B, T, D] after and before the final norm. The latter may be None for a single class token;
    otherwise None means that the network has no such output, and `x` is read.
    """
    if num_cls_tokens == 1:
        return x[:, 0]
    return (x if before_norm is None else before_norm)[:, :num_cls_tokens].to(x.dtype).mean(dim=1)


def moments_of_all(features: torch.Tensor) -> Moments:
    """Returns the moments of the features of all ranks. features: this rank's share [n, D]."""
    own = Moments.of(features)
    return Moments(*(collectives.all_reduce_sum(x) for x in (own.count, own.total, own.gram)))


@torch.no_grad()
def knn_accuracy(
    bank: Features,
    queries: Features,
    name: str,
    num_classes: int,
    ks: Sequence[int] = (20,),
    moments: Moments | None = None,
    leave_one_out: bool = False,
    on_chunk: Callable[[], None] | None = None,
) -> dict[int, dict[str, float]]:
    """Returns {k: `accuracies`} in percent, of the queries of all ranks against the bank of all ranks.

    name: of the feature. moments: of the bank, to standardise each channel. leave_one_out: queries are images of the
    bank and are not their own neighbours. on_chunk: called now and then. All ranks must call it.
    """
    own = unit_rows(bank.values[name], moments)
    wanted = unit_rows(collectives.gather_rows(queries.values[name]), moments)
    labels, numbers = (collectives.gather_rows(x) for x in (queries.labels, queries.numbers))
    rows = max(1, MOST_SIMILARITIES // max(collectives.gather_objects(len(own))))
    hits = {k: torch.zeros(2, dtype=torch.int64, device=own.device) for k in ks}
    for first in range(0, len(wanted), rows):
        part = slice(first, first + rows)
        if on_chunk is not None:
            on_chunk()
        excluded = numbers[part] if leave_one_out else None
        similarities, positions = nearest(wanted[part], own, bank.numbers, max(ks), excluded)
        found = similarities, bank.numbers[positions], bank.labels[positions]
        all_similarities, all_numbers, all_labels = (collectives.gather_rows(x.T.contiguous()).T for x in found)
        similarities, their_labels = best_of(all_similarities, all_numbers, all_labels, max(ks))
        for k in ks:
            ranks = rank_of_label(votes_of(similarities[:, :k], their_labels[:, :k], num_classes), labels[part])
            hits[k] += torch.stack([(ranks < 1).sum(), (ranks < 5).sum()])
    scores = {}
    for k, counts in hits.items():
        top1, top5 = (100 * counts.double() / len(wanted)).tolist()
        scores[k] = accuracies(top1, top5, num_classes)
    return scores
