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
from util.data.datasets import AddressedDataset
from util.data.transforms import Normalize, ResizeCenterCrop
from util.run import checkpoint
from util.run.evaluation import evaluation_batches
from util.run.folder import write_json
from util.run.loop import TrainLoop
from util.run.run import Run

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
) -> bool:
    """Makes the optimizer steps `steps`, which belong to one epoch. Returns whether a signal stopped it early.

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
        if loop.should_stop():
            return True
    return False


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    num_images: int,
    normalize: Normalize,
    autocast: Callable[[], AbstractContextManager],
    columns: Sequence[int] | None = None,
) -> dict[str, float]:
    """Returns {"top1", "top5", "loss", "num_images"} of `num_images` images over all ranks. Accuracies are in percent.

    batches: this rank's share of the images. columns: evaluate on these logits only. A label is then a position in this
    list. `top1_unrestricted` is the accuracy among all logits. RuntimeError if the number of images seen is not
    `num_images`. FloatingPointError if the logits are not finite.
    """
    device = normalize.mean.device
    sums, own_count, was_training = torch.zeros(5, dtype=torch.float64, device=device), 0, model.training
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
    model.train(was_training)
    sums[4] = own_count
    top1, top5, unrestricted, loss, count = collectives.all_reduce_sum(sums).tolist()
    if count != num_images:
        raise RuntimeError(f"{count:.0f} images were evaluated instead of {num_images}")
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the logits are not finite (loss {loss}): try --precision fp32, and check --mean and --std"
        )
    result = {"top1": 100 * top1 / count, "top5": 100 * top5 / count, "loss": loss / count, "num_images": num_images}
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


@dataclass
class Evaluator:
    """Evaluates a run on val/, logs it, keeps the best weights, and writes results.json."""

    run: Run
    model: nn.Module
    images: Any
    transform: ResizeCenterCrop

    def is_due(self) -> bool:
        """Whether the current step ends an epoch that is to be evaluated."""
        return self.run.loop.step > 0 and self.run.ends_epoch(self.run.args.eval_every)

    def is_done(self) -> bool:
        """Whether the log holds the evaluation of the current step."""
        return any(report["step"] == self.run.loop.step for report in self.evaluations())

    def perform(self) -> None:
        """Evaluates after an epoch."""
        run, loop, saver = self.run, self.run.loop, self.run.saver
        collectives.broadcast_buffers(self.model)
        sizes = run.plan.batch_size, run.plan.num_workers
        result = evaluate_images(
            self.model, self.images, self.transform, loop.normalize, loop.autocast, *sizes, on_batch=run.alive
        )
        # All ranks must know, because gathering takes all of them.
        is_best = collectives.run_on_rank0(lambda: result["top1"] > self.best_before())
        weights = saver.gather(self.model) if is_best else None
        if not run.process.is_main:
            return
        # The log comes last: an evaluation that is not in the log is repeated after a kill.
        if is_best:
            saver.write("best", {"model": weights}, {**run.record.meta(loop.step), "val": result}, required=False)
        scalars = {"epoch": loop.step // loop.steps_per_epoch - 1, **{f"val_{name}": v for name, v in result.items()}}
        line = f"top-1 {result['top1']:.2f} %, top-5 {result['top5']:.2f} % on {result['num_images']} images"
        loop.log.report(loop.step, scalars, f"after epoch {scalars['epoch']}: {line}", line)
        try:
            self.write_results()
        except OSError as error:  # it is written again at the end
            loop.log.info(f"warning: results.json could not be written ({error}); training goes on")

    def best_before(self) -> float:
        """Returns top-1 of the best checkpoint so far, of an earlier step than the current one, or -1."""
        meta = checkpoint.read_record(self.run.output_dir / "checkpoint-best.pth")
        return meta["val"]["top1"] if meta and meta["step"] < self.run.loop.step else -1.0

    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the reports of all evaluations so far, on rank 0."""
        return [report for report in self.run.log.history() if "val_top1" in report]

    def results(self) -> dict[str, Any]:
        """Returns the content of results.json: the last and the best evaluation, encoder and code."""
        reports = {report["step"]: report for report in self.evaluations()}
        if not reports:
            return {}
        evaluations, record = list(reports.values()), self.run.record
        best = max(evaluations, key=lambda report: report["val_top1"])
        return {
            "last": evaluations[-1],
            "best": best,
            "encoder": record.extra["encoder"],
            "code": record.origin["code"],
        }

    def write_results(self) -> None:
        """Writes results.json."""
        if self.run.process.is_main:
            write_json(self.run.output_dir / "results.json", self.results())
