"""Features of an encoder over all processes. It knows no model.

Each process encodes its share of the images, and keeps what it has encoded.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from util import collectives
from util.data.datasets import AddressedDataset
from util.evaluate.context import EvalContext, evaluation_batches, share_of_rank

Encode = Callable[[Tensor], dict[str, Tensor]]


class Features(NamedTuple):
    """This rank's share of the features of some images, on the device."""

    values: dict[str, Tensor]  # {name of a feature: float32 [n, D]}
    labels: Tensor  # int64 [n]
    indices: Tensor  # of the images in the data, int64 [n], ascending

    def take(self, rows: Tensor) -> "Features":
        """Returns the features of the images at `rows`, a mask [n]."""
        values = {name: x[rows] for name, x in self.values.items()}
        return Features(values, self.labels[rows], self.indices[rows])


@torch.no_grad()
def extract_features(
    encode: Encode,
    model: nn.Module,
    dataset: AddressedDataset,
    indices: Sequence[int] | np.ndarray,
    context: EvalContext,
) -> Features:
    """Encodes this rank's share of the images `indices`, which ascend. All ranks must call it.

    encode: turns normalised images [B, C, H, W] into {name: features [B, D]}. model: its network, which is put into
    eval mode for the time being. A rank without images has features [0, D].
    """
    device = context.device
    features: dict[str, list[Tensor]] = {}
    labels = [torch.empty(0, dtype=torch.int64, device=device)]
    was_training = model.training
    model.eval()
    for imgs, targets in evaluation_batches(dataset, indices, context):
        imgs = imgs.to(device, non_blocking=True)
        with context.autocast():
            encoded = encode(context.normalize(imgs))
        for name, x in encoded.items():
            features.setdefault(name, []).append(x.float())
        labels.append(targets.to(device, non_blocking=True))
    model.train(was_training)
    share = torch.as_tensor(share_of_rank(indices), device=device)
    return Features(_join(features, device), torch.cat(labels), share)


def _join(features: Mapping[str, list[Tensor]], device: torch.device) -> dict[str, Tensor]:
    """Joins the batches of each feature. A rank without images learns names and sizes from the others."""
    dims = {name: batches[0].shape[1] for name, batches in features.items()}
    for dims_of_rank in collectives.gather_objects(dims):
        dims = dims or dims_of_rank
    joined = {}
    for name, dim in dims.items():
        no_rows = torch.empty(0, dim, device=device)
        joined[name] = torch.cat([no_rows, *features.get(name, [])])
    return joined


def forward_blocks(network: nn.Module, imgs: Tensor, blocks: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
    """Returns (`network.forward_features(imgs)`, {block: its output before the final norm}). Blocks count from 1."""
    outputs: dict[int, Tensor] = {}

    def keep(block: int, module: nn.Module, args: Any, output: Tensor) -> None:
        outputs[block] = output

    hooks = []
    for block in blocks:
        module = network.blocks[block - 1]
        hooks.append(module.register_forward_hook(partial(keep, block)))
    try:
        return network.forward_features(imgs), outputs
    finally:
        for hook in hooks:
            hook.remove()


def num_class_tokens(network: nn.Module) -> int:
    """Returns how many tokens `class_feature` reads: without registers. 0: the network has no class token."""
    if getattr(network, "registers", False):
        return 1
    return getattr(network, "num_cls_tokens", 0)


def class_feature(x: Tensor, before_norm: Tensor | None, num_cls_tokens: int) -> Tensor:
    """Returns the class feature of each image [B, D]: one token after the norm, or the mean of several before the norm.

    The latter is Pixio's (arXiv 2512.15715).

    x, before_norm: tokens [B, T, D] after and before the final norm. The latter may be None for a single class token;
    otherwise None means that the network has no such output, and `x` is read.
    """
    if num_cls_tokens == 1:
        return x[:, 0]
    tokens = x if before_norm is None else before_norm
    return tokens[:, :num_cls_tokens].to(x.dtype).mean(dim=1)
