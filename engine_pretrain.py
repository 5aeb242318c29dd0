"""The training loop of pre-training. It knows batches, losses and steps, but no framework."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from util.run.train.loop import TrainLoop

Batch = Sequence[torch.Tensor]  # what `MaskCollator` makes


def forward_backward(model: nn.Module, batch: list[torch.Tensor], micro: int, loop: "TrainLoop") -> None:
    """Computes the losses of micro-batch number `micro` of a step, and adds its share of the gradient.

    It empties `batch`, so that the memory is free for the backward pass.
    """
    imgs, _, *orders = batch  # the token orders; with windows, their groupings follow
    batch.clear()
    with loop.no_sync_before_last(model, micro):
        with loop.autocast():
            losses = model(loop.normalize(imgs, fill=False), *orders)  # invalid pixels are NaN
        del imgs, orders
        loop.scaled_loss(losses).backward()


def update(loop: "TrainLoop") -> dict[str, torch.Tensor]:
    """Steps the optimizer unless the gradient is not finite. Returns scalars that are averaged and logged, too.

    A step counts as skipped if its "grad_norm" is not finite. With --cuda_graph it is captured: no value may go to the
    host.
    """
    loop.scaler.unscale_(loop.optimizer)
    values = {"grad_norm": loop.total_norm(loop.parameters)}
    # Yours go to log.jsonl and TensorBoard. For example, where the model has a `decoder`:
    # values["grad_norm_decoder"] = loop.total_norm(loop.model.decoder.parameters())
    if loop.clip_grad is not None:
        nn.utils.clip_grads_with_norm_(loop.parameters, loop.clip_grad, values["grad_norm"])
    loop.step_if_finite(values["grad_norm"])
    return values


def train_one_epoch(
    model: nn.Module,
    batches: Iterator[Batch],
    steps: range,
    loop: "TrainLoop",
    forward_backward: Callable[..., None] = forward_backward,
    update: Callable[..., dict[str, torch.Tensor]] = update,
) -> None:
    """Makes the optimizer steps `steps` of an epoch, up to its next report or checkpoint. A signal ends them earlier.

    model: a framework, `model(imgs, ids_shuffle, *groupings) -> {name: scalar loss}`, or a wrapper of one.
    batches: iterator over `MaskCollator`'s batches, `loop.accum_iter` per step, that stands at `steps.start`.
    steps: numbers of optimizer steps, counted from 0 over the whole run.
    forward_backward, update: the functions above, or their CUDA graphs.
    """
    model.train()
    for step in steps:
        loop.set_rates(step)
        for micro in range(loop.accum_iter):
            batch = loop.next_batch(batches, micro)
            forward_backward(model, batch, micro, loop)
        values = update(loop)
        if loop.graphs is None or loop.graphs.replay_update is None:  # which overwrite the gradients
            loop.optimizer.zero_grad(set_to_none=True)
        loop.log_step(values)  # with the losses, every `print_freq` steps
        if loop.should_stop():  # all ranks have agreed
            return
