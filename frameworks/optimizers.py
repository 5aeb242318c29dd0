"""The optimizers of pre-training, by name. To add one, add it to `OPTIMIZERS`: --optimizer lists it.

`util.run.train.skipping` steps those that cannot skip a step that is not finite by themselves, with copies of weights.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from framework import Framework
from util.lazy import LazyModule
from util.run.train.wrap import blocks_of

timm_optim = LazyModule("timm.optim")

Groups = list[dict[str, Any]]  # parameters with their weight decay
Betas = tuple[float, float]


def make_optimizer(model: Framework, args: argparse.Namespace, lr: float) -> torch.optim.Optimizer:
    """Returns the optimizer of --optimizer, without weight decay on biases, norms and what the model names."""
    groups = timm_optim.param_groups_weight_decay(
        model, args.weight_decay, no_weight_decay_list=model.no_weight_decay()
    )
    return OPTIMIZERS[args.optimizer](groups, model, lr, tuple(args.betas))


def adamw(groups: Groups, model: Framework, lr: float, betas: Betas) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def muon(groups: Groups, model: Framework, lr: float, betas: Betas) -> torch.optim.Optimizer:
    return timm_optim.Muon(split_matrices(groups, model), lr=lr, betas=betas)


def split_matrices(groups: Sequence[dict[str, Any]], model: nn.Module) -> Groups:
    """Splits parameter groups into the matrices of transformer blocks, for Muon, and all else, for its AdamW.

    Swin's tables of relative positions are no matrices. Muon's updates have the root mean square of AdamW's, so that
    both take the same learning rates.
    """
    matrices: set[nn.Parameter] = set()
    for block in blocks_of(model):
        matrices.update(layer.weight for layer in block.modules() if isinstance(layer, nn.Linear))
    split = []
    for group in groups:
        for is_matrix in (True, False):
            parameters = [parameter for parameter in group["params"] if (parameter in matrices) == is_matrix]
            if parameters:
                split.append({**group, "params": parameters, "use_fallback": not is_matrix})
    return split


OPTIMIZERS: dict[str, Callable[[Groups, Framework, float, Betas], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "muon": muon,
}
