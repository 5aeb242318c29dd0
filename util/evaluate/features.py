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


class Tokens(NamedTuple):
    """What an encoder makes of a batch of images at one block, after the final norm."""

    cls: Tensor | None  # [B, D]; None without a class token
    patches: Tensor  # [B, N, D]

    def vectors(self) -> dict[str, Tensor]:
        """Returns {"mean": mean of the patch tokens [B, D], "cls": class token [B, D], if there is one}."""
        vectors = {"mean": self.patches.mean(dim=1)}
        if self.cls is not None:
            vectors["cls"] = self.cls
        return vectors


def encode_blocks(
    network: nn.Module, imgs: Tensor, blocks: Sequence[int], depth: int, num_prefix: int, num_cls: int
) -> dict[int, Tokens]:
    """Returns {block: its Tokens, in float32 or wider} of normalised images [B, C, H, W].

    network: has `forward_features(imgs)`, which returns tokens [B, P + N, D] or a map [B, D, H, W] or [B, H, W, D].
    blocks: counted from 1; number `depth` is the last one. num_prefix: leading tokens that are not patches. num_cls:
    how many of these are class tokens. Of several, the mean before the norm is read, as Pixio's (arXiv 2512.15715).
    """
    outputs: dict[int, Tensor] = {}  # before the final norm

    def keep(block: int, module: nn.Module, args: Any, output: Tensor) -> None:
        outputs[block] = output

    hooks = []
    for block in blocks:
        if block != depth or num_cls > 1:
            hooks.append(network.blocks[block - 1].register_forward_hook(partial(keep, block)))
    try:
        last = network.forward_features(imgs)
    finally:
        for hook in hooks:
            hook.remove()
    tokens = {}
    for block in blocks:
        x = last
        if block != depth:
            x = network.norm(outputs[block])
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if x.ndim == 4:
            if x.shape[-1] != network.num_features:
                x = x.permute(0, 2, 3, 1)
            x = x.flatten(1, 2)
        cls = None
        if num_cls == 1:
            cls = x[:, 0]
        elif num_cls > 1:
            cls = outputs[block][:, :num_cls].to(x.dtype).mean(dim=1)
        tokens[block] = Tokens(cls, x[:, num_prefix:])
    return tokens


def num_class_tokens(network: nn.Module) -> int:
    """Returns how many class tokens `encode_blocks` reads: without registers. 0: the network has no class token."""
    if getattr(network, "registers", False):
        return 1
    return getattr(network, "num_cls_tokens", 0)
