"""The training loop of fine-tuning and linear probing, and evaluation. It knows batches and logits, but no model."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from util import collectives
from util.data.datasets import AddressedDataset
from util.data.transforms import ResizeCenterCrop
from util.evaluate.context import EvalContext, evaluation_batches
from util.evaluate.results import accuracies
from util.run.train.loop import TrainLoop

Batch = Sequence[torch.Tensor]  # (imgs [B, C, H, W], labels int64 [B])


@dataclass(frozen=True)
class BatchAugmentation:
    """What is drawn per batch on the device, in timm's order: random erasing, then mixup or cutmix.

    erase(imgs) -> imgs and mixup(imgs, labels) -> (imgs, soft targets) act on normalised images; either may be None.
    label_smoothing applies only without mixup, which smooths its own targets.
    """

    erase: Callable[[torch.Tensor], torch.Tensor] | None = None
    mixup: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    label_smoothing: float = 0.0

    def __call__(self, imgs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Returns (imgs, targets, label smoothing to apply to them)."""
        if self.erase is not None:
            imgs = self.erase(imgs)
        if self.mixup is None:
            return imgs, labels, self.label_smoothing
        imgs, targets = self.mixup(imgs, labels)
        return imgs, targets, 0.0


def forward_backward(
    model: nn.Module, batch: list[torch.Tensor], micro: int, loop: TrainLoop, augment: BatchAugmentation
) -> None:
    """Computes the loss of micro-batch number `micro` of a step, and adds its share of the gradient.

    It empties `batch`, so that the memory is free for the backward pass.
    """
    imgs, labels = batch
    batch.clear()
    imgs, targets, smoothing = augment(loop.normalize(imgs), labels)
    with loop.no_sync_before_last(model, micro):
        with loop.autocast():
            loss = F.cross_entropy(model(imgs).float(), targets, label_smoothing=smoothing)
        del imgs, labels, targets
        loop.scaled_loss({"cross_entropy": loss}).backward()


def update(loop: TrainLoop) -> dict[str, torch.Tensor]:
    """Steps the optimizer unless the gradient is not finite. Returns scalars, whose means are logged like the loss."""
    loop.scaler.unscale_(loop.optimizer)
    values = {"grad_norm": loop.total_norm(loop.parameters)}
    if loop.clip_grad is not None:
        nn.utils.clip_grads_with_norm_(loop.parameters, loop.clip_grad, values["grad_norm"])
    loop.step_if_finite(values["grad_norm"])
    return values


def train_one_epoch(
    model: nn.Module, batches: Iterator[Batch], steps: range, loop: TrainLoop, augment: BatchAugmentation
) -> None:
    """Makes the optimizer steps `steps`, which belong to one epoch. A signal ends them earlier.

    model: `model(imgs) -> logits [B, num_classes]`.
    batches: iterator over micro-batches, `loop.accum_iter` per step, that stands at `steps.start`.
    steps: numbers of optimizer steps, counted from 0 over the whole run.
    """
    model.train()
    for step in steps:
        loop.set_rates(step)
        for micro in range(loop.accum_iter):
            batch = loop.next_batch(batches, micro)
            forward_backward(model, batch, micro, loop, augment)
        values = update(loop)
        loop.optimizer.zero_grad(set_to_none=True)
        loop.log_step(values)  # with the loss, every `print_freq` steps
        if loop.should_stop():  # all ranks have agreed
            return


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    num_images: int,
    context: EvalContext,
    columns: Sequence[int] | None = None,
) -> dict[str, float]:
    """Returns `accuracies` in percent, "loss" and "num_images" of `num_images` images over all ranks.

    batches: this rank's share of the images. columns: evaluate on these logits only. A label is then a position in this
    list. RuntimeError if the number of images seen is not `num_images`. FloatingPointError if the logits are not
    finite.
    """
    device = context.device
    column_ids = None if columns is None else torch.as_tensor(columns, device=device)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # hits among 1 and 5, loss
    num_seen = 0
    num_logits = 0  # of all images: a rank without images does not know the number of classes
    was_training = model.training
    model.eval()
    for imgs, labels in batches:
        imgs = imgs.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with context.autocast():
            logits = model(context.normalize(imgs)).float()
        if column_ids is not None:
            logits = logits[:, column_ids]
        top5 = logits.topk(min(5, logits.shape[1])).indices
        batch_sums = [
            (logits.argmax(dim=1) == labels).sum(),
            (top5 == labels[:, None]).sum(),
            F.cross_entropy(logits, labels, reduction="sum"),
        ]
        sums += torch.stack([value.double() for value in batch_sums])
        num_seen += len(labels)
        num_logits += logits.numel()
    model.train(was_training)
    sums = torch.cat([sums, sums.new_tensor([num_seen, num_logits])])
    top1, top5, loss, num_seen, num_logits = collectives.all_reduce_sum(sums).tolist()
    if num_seen != num_images:
        raise RuntimeError(f"{num_seen:.0f} images were evaluated instead of {num_images}")
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the logits are not finite (loss {loss}): try --precision fp32, and check --mean and --std"
        )
    scores = accuracies(100 * top1 / num_seen, 100 * top5 / num_seen, num_classes=round(num_logits / num_seen))
    scores["loss"] = loss / num_seen
    scores["num_images"] = num_images
    return scores


def evaluate_images(
    model: nn.Module,
    images: Any,
    transform: ResizeCenterCrop,
    context: EvalContext,
    columns: Sequence[int] | None = None,
) -> dict[str, float]:
    """Calls `evaluate` on all of `images`, which the ranks share."""
    dataset = AddressedDataset(images, transform)
    loaded = evaluation_batches(dataset, range(len(images)), context)
    return evaluate(model, loaded, len(images), context, columns)
