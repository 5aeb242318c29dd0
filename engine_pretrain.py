"""The training loop of pre-training. It knows batches, losses and steps, but no framework."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from util.run.train.loop import TrainLoop

Batch = Sequence[torch.Tensor]  # what `MaskCollator` makes


def forward_backward(model: nn.Module, batch: list[torch.Tensor], micro: int, loop: "TrainLoop") -> None:
    """Computes the losses of micro-batch number `micro` of a step, and adds its share of the gradient."""
    imgs, _, *orders = batch
    batch.clear()
    with loop.no_sync_before_last(model, micro):
        with loop.autocast():
            losses = model(loop.normalize(imgs, fill=False), *orders)  # invalid pixels are NaN
        del imgs, orders  # frees their memory for the backward pass
        loop.scaled_loss(losses, micro).backward()


def train_one_epoch(
    model: nn.Module,
    batches: Iterator[Batch],
    steps: range,
    loop: "TrainLoop",
    compute: Callable[..., None] = forward_backward,
) -> None:
    """Makes the optimizer steps `steps`, which belong to one epoch. A signal ends them earlier.

    model: a framework, `model(imgs, ids_shuffle, *groupings) -> {name: scalar loss}`, or a wrapper of one.
    batches: iterator over `MaskCollator`'s batches, `loop.accum_iter` per step, that stands at `steps.start`.
    steps: numbers of optimizer steps, counted from 0 over the whole run.
    compute: `forward_backward`, or its CUDA graph.
    """
    model.train()
    for step in steps:
        loop.begin_step(step)
        for micro in range(loop.accum_iter):
            batch = loop.next_batch(batches, micro)
            compute(model, batch, micro, loop)
        grad_norm = loop.update_weights()
        loop.end_step(grad_norm)  # logs every `print_freq` steps
        if loop.should_stop():  # all ranks have agreed
            return
