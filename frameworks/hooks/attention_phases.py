"""Sampling by attention: when a run makes attention maps, how, and which of its epochs draw tokens with which maps.

A map is the attention of the class token to all patches of a whole training image (Liu et al., "Good helper is around
you: Attention-driven Masked Image Modeling"). The maps are made after certain epochs. A *phase* is a sequence of epochs
that use the same maps. The first phase has none and draws tokens at random. DataLoader workers prepare batches ahead,
so each phase opens a loader of its own when its maps are written.
"""

import argparse
import shutil
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from framework import Framework
from frameworks.models_amt_pr import AMTMasking, AMTOrderSampler
from frameworks.valid_tokens import ValidTokenCollator
from models_vit import ViTEncoder
from prmim import TokenOrderSampler
from util.atomic import replaced_file
from util.attention import split_heads
from util.collectives import all_reduce_sum, gather_rows, rank_and_world_size, run_on_rank0
from util.data.attention_maps import CROPS, AttentionMaps, BoxedDataset, Squash, maps_path, write_maps
from util.data.datasets import AddressedDataset, StepBatchSampler, stack
from util.data.loader import Loader
from util.data.repeats import with_repeats
from util.flag import Flag
from util.peer_sampling import attention_sampling
from util.run.processes.supervise import BatchesAhead
from util.run.train.loop import TrainLoop
from util.run.train.training import OpenLoader

FLAGS = (
    Flag("attention_start", int, 40, "no maps are made before the end of this epoch (epochs count from 0)", at_least=0),
    Flag("attention_every", int, 40, "maps are made after every epoch whose number is a multiple of this", at_least=1),
    Flag(
        "attention_crop",
        str,
        "view",
        "part of a map that gives the weights: what the view shows, or what AMT's public code reads",
        choices=CROPS,
    ),
)


def refresh_epochs(epochs: int, start: int, every: int) -> list[int]:
    """Returns the epochs, counted from 0, after which maps are made: multiples of `every` from `start`, not the last.

    For example, 400 epochs with start 40 and every 40 give 40, 80, ..., 360.
    """
    return [epoch for epoch in range(start, epochs - 1) if epoch % every == 0]


def check_sampling(args: argparse.Namespace, model: Framework) -> None:
    """Raises ValueError if the flags of sampling by attention do not fit each other or the model."""
    if args.vflip:
        raise ValueError("--vflip does not go with --sampling attention, whose maps are mirrored left to right alone")
    if not isinstance(model, ViTEncoder):
        raise ValueError(
            f"--sampling attention needs a class token that attends to all patches, which {args.model} does not have: "
            "choose a model on ViT, or another --sampling"
        )
    if args.throw_ratio == 0 and not model.needs_attention:
        raise ValueError("--sampling attention chooses the tokens that are thrown, but --throw_ratio is 0: raise it")
    if not refresh_epochs(args.epochs, args.attention_start, args.attention_every):
        raise ValueError(
            f"--attention_start {args.attention_start} and --attention_every {args.attention_every} leave none of "
            f"{args.epochs} epochs for sampling by attention: lower them"
        )


def cls_attention(encoder: ViTEncoder, imgs: torch.Tensor) -> torch.Tensor:
    """Returns how much the first class token attends to the patches in the last block, float [B, heads, N].

    imgs: normalised images [B, C, H, W], of which all patches are visible.
    """
    from encoders.models_relative_vit import RelativeAttention

    x = encoder.prepend_cls_token(encoder.embed(imgs))
    relative = encoder.relative_positions(size=imgs.shape[-2:])
    for block in encoder.blocks[:-1]:
        x = block(x, relative)
    x = encoder.blocks[-1].norm1(x)
    last = encoder.blocks[-1].attn
    bias = None
    if isinstance(last, RelativeAttention):
        q, k, _, bias = last.project(x, relative)
    else:
        q, k, _ = split_heads(last.rotated_qkv(x, relative), last.num_heads)
    first = q[..., :1, :] * q.shape[-1] ** -0.5
    logits = first @ k.transpose(-2, -1)  # [B, heads, 1, P + N]
    if bias is not None:
        logits = logits + bias[..., :1, :]
    attention = logits.float().softmax(dim=-1)
    return attention[..., 0, encoder.num_cls_tokens :]


def mean_over_heads(attention: torch.Tensor) -> torch.Tensor:
    """Scales each head's attention [B, heads, N] to [0, 1] over the tokens. Returns the mean over heads [B, N].

    A head that attends to all tokens alike becomes 0.
    """
    attention = attention - attention.amin(dim=-1, keepdim=True)
    return (attention / (attention.amax(dim=-1, keepdim=True) + 1e-12)).mean(dim=1)


@torch.no_grad()
def compute_maps(
    model: Framework, dataset: AddressedDataset, loop: TrainLoop, batch_size: int, num_workers: int
) -> np.ndarray | None:
    """Computes the attention maps of all images. Returns float16 [M, rows, columns] on rank 0, None on others.

    A signal ends it by `Stopped`. All ranks must call it. Each has a contiguous share of the images. The
    last image is repeated where a share is too long, so all ranks make the same number of forward passes. The model
    sees whole images, squashed to its size, in eval mode. FloatingPointError if a map is not finite.
    """
    rank, world_size = rank_and_world_size()
    rows, columns = model.grid_size
    device = loop.device
    was_training = model.training
    share = -(-len(dataset) // world_size)
    last = len(dataset) - 1
    numbers = range(rank * share, (rank + 1) * share)
    addresses = []
    for first in range(0, share, batch_size):
        addresses.append([(0, min(i, last)) for i in numbers[first : first + batch_size]])
    maps: np.ndarray | None = None
    if rank == 0:
        maps = np.empty((world_size, share, rows, columns), np.float16)
    stored = loop.normalize.pixels.pixel_bytes * model.img_size[0] * model.img_size[1] * batch_size
    for_gpu = device.type == "cuda"
    loader = Loader(dataset, addresses, stack, num_workers=num_workers, for_gpu=for_gpu, batch_bytes=stored)
    bad = torch.zeros((), device=device)
    model.eval()
    with closing(loader):
        batches = BatchesAhead(loader, loop.stop)
        for _ in range(2):
            batches.load()
        loop.stop_if_asked()
        for first in range(0, share, batch_size):
            loop.stop_if_asked()
            imgs = next(batches)[0].to(device, non_blocking=True)
            with loop.autocast():
                attention = cls_attention(model, loop.normalize(imgs))
            gathered = gather_rows(mean_over_heads(attention).half())
            bad += (~attention.isfinite()).sum()
            if maps is not None:
                maps[:, first : first + len(imgs)] = gathered.view(world_size, len(imgs), rows, columns).cpu().numpy()
    model.train(was_training)
    if all_reduce_sum(bad) > 0:
        raise FloatingPointError("the attention of the class token is not finite: try --precision fp32")
    if maps is None:
        return None
    return maps.reshape(-1, rows, columns)[: len(dataset)]


class AttentionCollator(ValidTokenCollator):
    """Draws token orders by attention, for samples of a `BoxedDataset`."""

    def __init__(self, sampler: TokenOrderSampler, seed: int, maps: AttentionMaps) -> None:
        super().__init__(sampler, seed)
        self.maps = maps

    def __call__(self, samples: Iterable[tuple]) -> tuple[torch.Tensor, ...]:
        plain = []
        boxes = []
        for *sample, box in samples:
            plain.append(tuple(sample))
            boxes.append(box)
        self.weights = self.maps.token_weights(boxes)
        return super().__call__(plain)

    def draw(self, noise: np.ndarray, imgs: torch.Tensor) -> np.ndarray:
        self.noise = noise
        if isinstance(self.sampler, AMTOrderSampler):
            return self.sampler(noise, weights=self.weights)
        return super().draw(noise, imgs)

    def choose_retained(self, masked: np.ndarray, images: np.ndarray) -> np.ndarray:
        weights = np.take_along_axis(self.weights[images], masked, axis=1)
        noise = np.take_along_axis(self.noise[images], masked, axis=1)
        picks = attention_sampling(self.sampler.coords[masked], self.sampler.counts.num_retained, weights, noise)
        return np.take_along_axis(masked, picks, axis=1)


@dataclass
class Phases:
    """Between steps, makes the maps of each phase of a run that samples by attention. Then the loader opens anew.

    When a run is resumed inside a phase, it uses the maps beside the checkpoint that it resumes from. If that is in
    another folder, they are copied into the output folder first. At the first step of a phase the maps are always made,
    so a file that an earlier run has left there is never used.
    """

    loop: TrainLoop
    dataset: AddressedDataset
    sampler: StepBatchSampler
    open_until: int = field(init=False, default=0)  # the step after the last one of the open phase
    resumed_maps: AttentionMaps | None = field(init=False, default=None)  # of the phase in which the run is resumed

    def __post_init__(self) -> None:
        args = self.loop.run.args
        self.model: Any = self.loop.model
        self.images = self.dataset.images
        self.refreshes = refresh_epochs(args.epochs, args.attention_start, args.attention_every)
        refresh = self.refresh_before(self.loop.step)
        if refresh is not None and self.loop.step > (refresh + 1) * self.loop.steps_per_epoch:
            self.resumed_maps = self.find_maps(refresh)

    def is_due(self) -> bool:
        """Whether the next step belongs to a phase that is not open."""
        return self.open_until <= self.loop.step < self.loop.last_step

    def is_done(self) -> bool:
        """Never: each start opens its own batches."""
        return False

    def perform(self) -> OpenLoader:
        """Makes the maps of the phase that begins now. Returns what opens its batches."""
        loop = self.loop
        args = loop.run.args
        refresh = self.refresh_before(loop.step)
        maps = self.resumed_maps
        self.resumed_maps = None
        if refresh is not None and maps is None:
            maps = self.make_maps(refresh)
        if isinstance(self.model, AMTMasking):
            self.model.set_phase(has_maps=maps is not None)
        collator = self.model.collator(args.sampling, args.seed)
        dataset = self.dataset
        if maps is not None:
            dataset = BoxedDataset(self.dataset)
            collator = AttentionCollator(self.model.sampler(args.sampling), args.seed, maps)

        epoch = loop.step // loop.steps_per_epoch
        last_epoch = self.last_epoch_of_phase(epoch)
        self.open_until = (last_epoch + 1) * loop.steps_per_epoch
        first_epoch = 0 if refresh is None else refresh + 1
        # Groups of --repeat_aug end with the phase: all crops of an image are drawn with the same maps.
        sampler = with_repeats(self.sampler, args.repeat_aug, range(first_epoch, last_epoch + 1))

        drawn = "at random"
        if maps is not None:
            drawn = f"by the attention after epoch {refresh}"
        loop.log.info(f"epochs {epoch} to {last_epoch}: tokens are drawn {drawn}, {self.model.counts}")

        def open_phase(steps: range) -> Loader:
            steps_of_phase = range(steps.start, min(self.open_until, steps.stop))
            return loop.run.open_loader(dataset, sampler, collator, self.model.img_size, steps_of_phase)

        return open_phase

    def last_epoch_of_phase(self, epoch: int) -> int:
        """Returns the last epoch of the phase to which `epoch` belongs."""
        for refresh in self.refreshes:
            if refresh >= epoch:
                return refresh
        return self.loop.run.args.epochs - 1

    def refresh_before(self, step: int) -> int | None:
        """Returns the epoch after which the maps that `step` uses are made, or None before the first maps."""
        epoch = step // self.loop.steps_per_epoch
        return max((e for e in self.refreshes if e < epoch), default=None)

    def find_maps(self, refresh: int) -> AttentionMaps | None:
        """Returns the maps that the resumed run has made after the epoch `refresh`, or None if there is no file."""
        maps = self.maps_of(refresh)

        def look() -> bool:
            run = self.loop.run
            if run.began_elsewhere and run.resume_path is not None:
                source = maps_path(run.resume_path.parent, refresh)
                if not source.is_file():
                    return False
                maps.path.parent.mkdir(exist_ok=True)
                with replaced_file(maps.path, durable=True) as temporary:
                    shutil.copyfile(source, temporary)
            return maps.path.is_file()

        if not run_on_rank0(look):
            return None
        return maps

    def make_maps(self, refresh: int) -> AttentionMaps:
        """Computes and writes the maps with the weights of now. A signal ends it by `Stopped`."""
        loop = self.loop
        maps = self.maps_of(refresh)
        if loop.step != (refresh + 1) * loop.steps_per_epoch:
            loop.log.info(
                f"warning: {str(maps.path)!r} is missing, so maps are made with the weights of step {loop.step}: the "
                f"run will differ from an undisturbed one"
            )
        loop.log.info(f"making attention maps of {len(self.images)} images: {maps.path}")
        whole = Squash(self.model.img_size, self.loop.run.args.loader == "reference")
        dataset = AddressedDataset(self.images, whole, replace=self.loop.run.args.max_bad_fraction > 0)
        plan = self.loop.run.plan
        found = compute_maps(self.model, dataset, loop, plan.batch_size, plan.num_workers)
        run_on_rank0(lambda: write_maps(maps.path, found))
        return maps

    def maps_of(self, refresh: int) -> AttentionMaps:
        """Returns the maps of this run that are made after the epoch `refresh`, whether they exist or not."""
        path = maps_path(self.loop.run.output_dir, refresh)
        return AttentionMaps(path, self.model.patch_size, self.loop.run.args.attention_crop)
