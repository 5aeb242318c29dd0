"""kNN and the training of the heads on a frozen encoder, and their scores."""

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from downstream.probe.models import AttentiveProbe, FrozenEncoder, HeadGrid, LinearProbe
from util import collectives
from util.collectives import print_on_rank0
from util.data.datasets import AddressedDataset, StepBatchSampler, permutation, stack, steps_per_epoch
from util.data.images import Images
from util.data.loader import Loader
from util.data.transforms import Normalize, RandomResizedCropFlip, ResizeCenterCrop, with_vflip
from util.evaluate.context import context_of_flags, evaluation_batches
from util.evaluate.features import Features, Tokens, extract_features
from util.evaluate.knn import KnnProtocol, knn_accuracy
from util.evaluate.moments import moments_of_all
from util.evaluate.results import accuracies
from util.run.processes.distributed import Process
from util.run.start.plan import split_batch
from util.text import duration

NEIGHBOURS = (10, 20, 100, 200)
LEARNING_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)  # for 256 images
WEIGHT_DECAYS = (5e-4, 1e-3, 5e-2)
GRID = tuple((lr, weight_decay) for lr in LEARNING_RATES for weight_decay in WEIGHT_DECAYS)
HELD_OUT = 0.1  # share of the training images
HELD_OUT_SEED = 42
WARMUP = 0.1  # share of the steps
MAX_BATCH_SIZE = 128  # of a process, if no flag gives another

Row = dict[str, Any]  # of the results


class ImageSubset:
    """Some of the images, renumbered from 0."""

    def __init__(self, images: Images, indices: np.ndarray) -> None:
        self.images = images
        self.indices = indices
        self.pixel_format = images.pixel_format

    def __len__(self) -> int:
        return len(self.indices)

    def load_sample(self, i: int) -> tuple[np.ndarray, int]:
        """Returns ([H, W, C], label)."""
        return self.images.load(int(self.indices[i]))

    def prepare(self, indices: Sequence[int]) -> None:
        """As of `Images`."""
        self.images.prepare(self.indices[list(indices)].tolist())


def split_held_out(num_images: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (images to train on, images that select the head), both ascending: nine tenths and one tenth."""
    order = permutation(HELD_OUT_SEED, 0, num_images)
    num_held_out = max(1, int(num_images * HELD_OUT))
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])


def rate_at(step: int, num_steps: int) -> float:
    """Returns the factor on the learning rates: linear warm-up over a tenth of the steps, then half a cosine to 0."""
    warmup = WARMUP * num_steps
    if step < warmup:
        return step / warmup
    angle = math.pi * (step - warmup) / (num_steps - warmup)
    return 0.5 * (1 + math.cos(angle))


class Probes(nn.Module):
    """The grids of heads of all features, by their names: "<block> <feature> <probe>"."""

    def __init__(self, encoder: FrozenEncoder, probes: Sequence[str], num_classes: int) -> None:
        super().__init__()
        features = ("mean", "cls") if encoder.num_cls else ("mean",)
        self.grids = nn.ModuleDict()
        for block in encoder.blocks:
            if "linear" in probes:
                for feature in features:
                    self.grids[f"{block} {feature} linear"] = HeadGrid(LinearProbe, encoder.dim, num_classes, GRID)
            if "attentive" in probes:
                self.grids[f"{block} patches attentive"] = HeadGrid(AttentiveProbe, encoder.dim, num_classes, GRID)

    def forward(self, tokens: Mapping[int, Tokens]) -> dict[str, Tensor]:
        """Returns {name: logits [G, B, C]} of what the encoder returns."""
        logits = {}
        for name, grid in self.grids.items():
            block, feature, _ = name.split()
            tokens_of_block = tokens[int(block)]
            if feature == "patches":
                logits[name] = grid(tokens_of_block.patches)
            else:
                logits[name] = grid(tokens_of_block.vectors()[feature])
        return logits


class Probing:
    """One frozen encoder, the images it is evaluated on, and how."""

    def __init__(
        self,
        args: argparse.Namespace,
        process: Process,
        encoder: FrozenEncoder,
        images: Images,
        val_images: Images,
        normalize: Normalize,
    ) -> None:
        self.args = args
        self.process = process
        self.encoder = encoder.to(process.device)
        self.images = images
        self.val_images = val_images
        self.training, self.held_out = split_held_out(len(images))
        batch_size = args.batch_size or MAX_BATCH_SIZE
        self.accum_iter = 1
        if set(args.probes) - {"knn"}:
            steps_per_epoch(len(self.training), args.total_batch_size)  # ValueError if there is no whole batch
            batch_size, self.accum_iter, _ = split_batch(
                args.batch_size,
                None,
                args.total_batch_size,
                process.world_size,
                MAX_BATCH_SIZE,
            )
        self.context = context_of_flags(args, process, normalize, batch_size)

    # -------------------------------------------------------------------------------------------------------- kNN

    def knn(self) -> list[Row]:
        """Returns the accuracies of all blocks, features, scalings and numbers of neighbours.

        FloatingPointError on all ranks if a feature of the training images is not finite.
        """
        ks = sorted({min(k, len(self.images)) for k in NEIGHBOURS})
        protocol = KnnProtocol(len(self.images.classes), tuple(ks), temperature=self.args.knn_temperature)
        bank = self.extract(self.images)
        queries = self.extract(self.val_images)
        rows = []
        for name, features in bank.values.items():
            block, feature = name.split()
            moments_of_bank = moments_of_all(features)
            if not moments_of_bank.is_finite:
                raise FloatingPointError(f"the encoder's features ({name}) are not finite: try --precision fp32")
            scalings = {"raw": None, "z": moments_of_bank}
            for scaling, moments in scalings.items():
                for k, scores in knn_accuracy(bank, queries, name, protocol, moments).items():
                    row = {
                        "probe": "knn",
                        "block": int(block),
                        "feature": feature,
                        "scaling": scaling,
                        "k": k,
                        **scores,
                    }
                    rows.append(row)
        return rows

    def extract(self, images: Images) -> Features:
        """Encodes this rank's share of the images."""
        dataset = self.whole_images(images)
        return extract_features(self.encoder.vectors, self.encoder, dataset, np.arange(len(images)), self.context)

    def whole_images(self, images: Images) -> AddressedDataset:
        """Returns images in the evaluation view. Of the training images, those that cannot be read are replaced."""
        view = ResizeCenterCrop(self.encoder.img_size, reference=self.args.loader == "reference")
        may_be_bad = images is self.images and self.args.max_bad_fraction > 0
        return AddressedDataset(images, view, replace=may_be_bad)

    # ------------------------------------------------------------------------------------------------------ heads

    def heads(self) -> dict[str, list[Row]]:
        """Trains the grids of heads. Returns the chosen ones on val/, and all of them on the held-out images."""
        torch.manual_seed(self.args.seed)
        kinds = [name for name in self.args.probes if name != "knn"]
        probes = Probes(self.encoder, kinds, len(self.images.classes)).to(self.context.device)
        self.train_heads(probes)
        selection = self.score_heads(probes, self.images, self.held_out)
        scores = self.score_heads(probes, self.val_images, range(len(self.val_images)))
        chosen = []
        held_out = []
        for name, grid in probes.grids.items():
            rows = held_out_rows(name, grid, selection[name])
            held_out += rows
            best = int(selection[name][:, 0].argmax())  # the first of equals
            top1, top5 = scores[name][best].tolist()
            chosen.append({**rows[best], **accuracies(top1, top5, len(self.images.classes))})
        return {"chosen": chosen, "held_out": held_out}

    def train_heads(self, probes: Probes) -> None:
        """Trains all heads. Since no step is skipped, this is no `Run`."""
        args = self.args
        model: nn.Module = probes
        if self.process.world_size > 1:
            model = DistributedDataParallel(probes)
        groups = []
        for grid in probes.grids.values():
            groups += grid.parameter_groups(args.total_batch_size / 256)
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        epochs = args.steps * args.total_batch_size / len(self.training)
        print_on_rank0(f"heads: {args.steps} steps of {args.total_batch_size} images, {epochs:,.1f} epochs")
        begin = time.monotonic()
        with closing(self.training_batches()) as batches:
            for step in range(args.steps):
                loss = self.train_step(model, optimizer, batches, step)
                if (step + 1) % max(1, args.steps // 20) == 0:
                    seconds_per_step = (time.monotonic() - begin) / (step + 1)
                    eta = duration((args.steps - step - 1) * seconds_per_step)
                    print_on_rank0(f"step {step + 1}/{args.steps}: mean loss of all heads {loss.item():.4f}, eta {eta}")

    def train_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any], step: int
    ) -> Tensor:
        """Makes an optimizer step of all heads. Returns the mean loss of the last micro-batch. model: as below."""
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * rate_at(step, self.args.steps)
        for micro in range(self.accum_iter):
            loss = self.forward_backward(model, next(batches), is_last=micro == self.accum_iter - 1)
        optimizer.step()  # none is skipped: a head that diverges does not disturb the others
        optimizer.zero_grad(set_to_none=True)
        return loss

    def forward_backward(self, model: nn.Module, batch: Sequence[Tensor], is_last: bool) -> Tensor:
        """Adds a micro-batch's share of the gradient of all heads. Returns their mean loss.

        model: Probes, as they are or in DDP. is_last: of a step; only then the gradients are all-reduced.
        """
        tokens, labels = self.encode(batch)
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = is_last
        losses = []
        for logits in model(tokens).values():  # [G, B, C]
            labels_of_heads = labels.repeat(len(logits))
            losses.append(F.cross_entropy(logits.flatten(0, 1), labels_of_heads))
        loss_of_grids = torch.stack(losses)
        (loss_of_grids.sum() / self.accum_iter).backward()
        return loss_of_grids.detach().mean()

    def encode(self, batch: Sequence[Tensor]) -> tuple[dict[int, Tokens], Tensor]:
        """Returns (the encoder's tokens by block, labels). batch: images as they are stored, and labels."""
        imgs, labels = batch
        imgs = imgs.to(self.context.device, non_blocking=True)
        labels = labels.to(self.context.device, non_blocking=True)
        with self.context.autocast():
            return self.encoder(self.context.normalize(imgs)), labels

    def training_batches(self) -> Any:
        """Returns this rank's batches of all steps: augmented images of the nine tenths. `close()` ends the workers."""
        args = self.args
        process = self.process
        img_size = self.encoder.img_size
        training: Any = ImageSubset(self.images, self.training)
        use_pillow = args.loader == "reference"
        crop = RandomResizedCropFlip(
            img_size,
            args.seed,
            args.crop_scale,
            reference=use_pillow,
            hflip=args.hflip,
        )
        augmentation = with_vflip(crop, args.vflip, args.seed)
        sampler = StepBatchSampler(
            num_samples=len(training),
            batch_size=self.context.batch_size,
            accum_iter=self.accum_iter,
            rank=process.rank,
            world_size=process.world_size,
            seed=args.seed,
        )
        return Loader(
            AddressedDataset(training, augmentation, replace=args.max_bad_fraction > 0),
            sampler.batches(range(args.steps)),
            stack,
            num_workers=self.context.num_workers,
            for_gpu=self.context.device.type == "cuda",
            batch_bytes=self.images.pixel_format.pixel_bytes * math.prod(img_size) * self.context.batch_size,
        )

    @torch.no_grad()
    def score_heads(self, probes: Probes, images: Images, indices: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """Returns {name: top-1 and top-5 of each head in percent [G, 2]} of these images in the evaluation view.

        An image counts as an error of the heads whose logits of it are not finite. FloatingPointError on all ranks if
        there is such an image for each head of a grid.
        """
        counts = {}  # {name: hits among 1 and 5, images with logits that are not finite [G, 3]}
        for name in probes.grids:
            counts[name] = torch.zeros(len(GRID), 3, dtype=torch.float64, device=self.context.device)
        for batch in evaluation_batches(self.whole_images(images), indices, self.context):
            tokens, labels = self.encode(batch)
            for name, logits in probes(tokens).items():
                is_finite = logits.isfinite().all(dim=2)  # [G, B]
                top5 = logits.topk(min(5, logits.shape[2])).indices
                is_hit = (top5 == labels[:, None]) & is_finite[..., None]  # [G, B, 5]
                hits1 = is_hit[..., 0].sum(dim=1)
                hits5 = is_hit.any(dim=2).sum(dim=1)
                num_bad = (~is_finite).sum(dim=1)
                counts[name] += torch.stack([hits1, hits5, num_bad], dim=1)
        scores = {}
        for name, counts_of_grid in counts.items():
            collectives.all_reduce_sum(counts_of_grid)  # in place
            if counts_of_grid[:, 2].all():
                raise FloatingPointError(
                    f"the logits of all heads ({name}) are not finite: the encoder's features may not be finite, try "
                    "--precision fp32"
                )
            scores[name] = 100 * counts_of_grid[:, :2] / len(indices)
        return scores


def held_out_rows(name: str, grid: HeadGrid, scores: Tensor) -> list[Row]:
    """Returns a row for each head of a grid. name: of the grid. scores: on the held-out images, in percent [G, 2]."""
    block, feature, probe = name.split()
    rows = []
    for (lr, weight_decay), top1 in zip(grid.grid, scores[:, 0].tolist(), strict=True):
        row = {
            "probe": probe,
            "block": int(block),
            "feature": feature,
            "lr": lr,
            "weight_decay": weight_decay,
            "held_out_top1": top1,
        }
        rows.append(row)
    return rows
