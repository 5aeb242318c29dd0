"""One epoch of fine-tuning or probing, and evaluation. Knows images, labels and logits, but no model."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from util.run.distributed import all_reduce_sum
from util.run.train_engine import TrainEngine


@dataclass
class FinetuneEngine(TrainEngine):
    """model(imgs) -> logits [B, num_classes]; the batches are (imgs uint8, labels).

    erase(imgs) -> imgs and mixup(imgs, labels) -> (imgs, soft targets) act on the normalised batch, as in timm; either may
    be None. label_smoothing applies where mixup, which smooths its own targets, does not.
    """

    erase: Callable | None = None
    mixup: Callable | None = None
    label_smoothing: float = 0.0

    def losses_of(self, batch, step, micro):
        imgs, labels = (t.to(self.device, non_blocking=True) for t in batch)
        self.reseed(step, micro)
        imgs, targets, smoothing = self.normalize(imgs), labels, self.label_smoothing
        if self.erase:
            imgs = self.erase(imgs)
        if self.mixup:
            (imgs, targets), smoothing = self.mixup(imgs, labels), 0.0
        return {"cross_entropy": F.cross_entropy(self.model(imgs).float(), targets, label_smoothing=smoothing)}


@torch.no_grad()
def evaluate(model, batches, num_images, normalize, autocast, columns=None):
    """Scores `num_images` images, each once; -> {"top1", "top5", "loss", "num_images"}, in percent, over all processes.

    batches: this process's share of (imgs uint8, labels). columns: the logits to choose among, where the labels are
    positions in that list; `top1_unrestricted` then counts the choice among all logits. RuntimeError if the images
    counted are not `num_images`, FloatingPointError if the logits are not finite.
    """
    device = normalize.mean.device
    sums, own_count, was_training = torch.zeros(5, dtype=torch.float64, device=device), 0, model.training
    columns = None if columns is None else torch.as_tensor(columns, device=device)
    model.eval()
    for imgs, labels in batches:
        imgs, labels = imgs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with autocast():
            logits = model(normalize(imgs)).float()
        chosen = logits if columns is None else logits[:, columns]
        top5 = chosen.topk(min(5, chosen.shape[1])).indices
        counts = [
            (chosen.argmax(dim=1) == labels).sum(),
            (top5 == labels[:, None]).sum(),
            (logits.argmax(dim=1) == (labels if columns is None else columns[labels])).sum(),
            F.cross_entropy(chosen, labels, reduction="sum"),
        ]
        sums[:4] += torch.stack([c.double() for c in counts])
        own_count += len(labels)
    model.train(was_training)
    sums[4] = own_count
    top1, top5, unrestricted, loss, count = all_reduce_sum(sums).tolist()
    if count != num_images:
        raise RuntimeError(f"{count:.0f} images were scored instead of {num_images}")
    if not math.isfinite(loss):
        raise FloatingPointError(f"the logits are not finite (loss {loss}): try --precision fp32, and check --mean and --std")
    result = {"top1": 100 * top1 / count, "top5": 100 * top5 / count, "loss": loss / count, "num_images": num_images}
    return result if columns is None else result | {"top1_unrestricted": 100 * unrestricted / count}
