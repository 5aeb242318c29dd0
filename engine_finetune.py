"""The training loop of fine-tuning and linear probing, and evaluation. It knows batches and logits, but no model."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from util import collectives
from util.accuracy import accuracies
from util.data.datasets import AddressedDataset
from util.data.transforms import Normalize, ResizeCenterCrop
from util.run.evaluation import evaluation_batches
from util.run.loop import TrainLoop

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
        loop.begin_step(step)
        for micro in range(loop.accum_iter):
            imgs, labels = loop.next_batch(batches, micro)
            imgs, targets, smoothing = augment(loop.normalize(imgs), labels)
            with loop.no_sync_before_last(model, micro):
                with loop.autocast():
                    loss = F.cross_entropy(model(imgs).float(), targets, label_smoothing=smoothing)
                del imgs, labels, targets  # frees their memory for the backward pass
                loop.scaled_loss({"cross_entropy": loss}, micro).backward()
        grad_norm = loop.update_weights()
        loop.end_step(grad_norm)  # logs every `print_freq` steps
        if loop.should_stop():  # all ranks have agreed
            return


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    num_images: int,
    normalize: Normalize,
    autocast: Callable[[], AbstractContextManager],
    columns: Sequence[int] | None = None,
) -> dict[str, float]:
    """Returns `accuracies` in percent, "loss" and "num_images" of `num_images` images over all ranks.

    batches: this rank's share of the images. columns: evaluate on these logits only. A label is then a position in this
    list. `top1_unrestricted` is the accuracy among all logits. RuntimeError if the number of images seen is not
    `num_images`. FloatingPointError if the logits are not finite.
    """
    device = normalize.mean.device
    sums, own_count, was_training = torch.zeros(6, dtype=torch.float64, device=device), 0, model.training
    ids = None if columns is None else torch.as_tensor(columns, device=device)
    model.eval()
    for imgs, labels in batches:
        imgs, labels = imgs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with autocast():
            logits = model(normalize(imgs)).float()
        chosen = logits if ids is None else logits[:, ids]
        top5 = chosen.topk(min(5, chosen.shape[1])).indices
        counts = [
            (chosen.argmax(dim=1) == labels).sum(),
            (top5 == labels[:, None]).sum(),
            (logits.argmax(dim=1) == (labels if ids is None else ids[labels])).sum(),
            F.cross_entropy(chosen, labels, reduction="sum"),
        ]
        sums[:4] += torch.stack([c.double() for c in counts])
        own_count += len(labels)
        sums[5] += chosen.shape[1] * len(labels)  # as a sum over images: a rank without images does not know it
    model.train(was_training)
    sums[4] = own_count
    top1, top5, unrestricted, loss, count, classes = collectives.all_reduce_sum(sums).tolist()
    if count != num_images:
        raise RuntimeError(f"{count:.0f} images were evaluated instead of {num_images}")
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the logits are not finite (loss {loss}): try --precision fp32, and check --mean and --std"
        )
    result = accuracies(100 * top1 / count, 100 * top5 / count, num_classes=round(classes / count))
    result |= {"loss": loss / count, "num_images": num_images}
    return result if ids is None else result | {"top1_unrestricted": 100 * unrestricted / count}


def evaluate_images(
    model: nn.Module,
    images: Any,
    transform: ResizeCenterCrop,
    normalize: Normalize,
    autocast: Callable[[], AbstractContextManager],
    batch_size: int,
    num_workers: int,
    columns: Sequence[int] | None = None,
    on_batch: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Calls `evaluate` on all of `images`, which the ranks share. `on_batch` is called before each batch."""
    dataset, everything = AddressedDataset(images, transform), range(len(images))
    sizes = batch_size, num_workers
    shown = evaluation_batches(
        dataset, everything, model, model, autocast, normalize.mean.device, *sizes, on_batch=on_batch
    )
    return evaluate(model, shown, len(images), normalize, autocast, columns)
