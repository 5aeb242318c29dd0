"""Images that grow over training: `--grow_size 128:0.5 160:0.8 224`.

Each size is a *stage*, a sequence of whole epochs: 128 px for the first half of the schedule, 160 px up to eight
tenths, then 224 px, the model's own size. Small images have fewer tokens, so most of the steps cost less. The weights
are the same in all stages. Positions are interpolated from the tables of the model's own size. DataLoader workers
prepare batches ahead, so each stage opens a loader of its own.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from framework import Framework
from frameworks.registry import check_visible
from models_mae_pr import MaskedAutoencoderViT
from util import collectives
from util.data.loader import check_space
from util.run.cli import FlagGroup
from util.run.train.loader import PhasedBatches, TrainLoader
from util.run.train.training import Training


@dataclass(frozen=True)
class Stage:
    """side: of the images, in pixels. end: the epoch, counted from 0, with which the next stage begins."""

    side: int
    end: int


def add_flag(group: FlagGroup) -> None:
    """Adds --grow_size."""
    group.add_argument(
        "--grow_size",
        nargs="+",
        metavar="SIDE[:SHARE]",
        help="image sides up to these shares of the schedule; the last side, without a share, is the model's",
    )


def parse_stages(words: Sequence[str], epochs: int) -> list[Stage]:
    """Returns the stages of a schedule. ValueError unless sides have increasing shares, and the last one has none."""
    stages: list[Stage] = []
    *growing, last = words
    for word in growing:
        side, _, share = word.partition(":")
        try:
            stage = Stage(int(side), round(float(share) * epochs))
        except (ValueError, OverflowError) as error:  # the latter: infinite shares
            raise ValueError(f"--grow_size takes sides with shares, such as 128:0.5 224, got {word!r}") from error
        begin = stages[-1].end if stages else 0
        if not begin < stage.end < epochs:
            raise ValueError(
                f"--grow_size {word}: epoch {stage.end} must lie behind epoch {begin} and before epoch {epochs}"
            )
        stages.append(stage)
    if not last.isdecimal():
        raise ValueError(f"the last side of --grow_size lasts to the end and has no share, got {last!r}")
    return [*stages, Stage(int(last), epochs)]


def stage_of(words: Sequence[str], epochs: int, epoch: float) -> Stage:
    """Returns the stage to which an epoch belongs, whole or not, counted from 0: the last one after the schedule."""
    stages = parse_stages(words, epochs)
    for stage in stages:
        if epoch < stage.end:
            return stage
    return stages[-1]


def check_growth(args: argparse.Namespace, model: Framework) -> None:
    """ValueError if --grow_size does not fit the model or other flags."""
    if args.grow_size is None:
        return
    if not isinstance(model, MaskedAutoencoderViT):
        raise ValueError(f"--grow_size needs a model of MAE or MFF, --model {args.model} has one image size")
    if args.sampling == "attention":
        raise ValueError("--grow_size and --sampling attention cannot be combined: attention maps have one size")
    stages = parse_stages(args.grow_size, args.epochs)
    own_size = model.img_size
    if own_size != (stages[-1].side, stages[-1].side):
        raise ValueError(
            f"--grow_size must end with the model's {own_size[0]} x {own_size[1]} px, got {stages[-1].side}"
        )
    for stage in stages:
        model.set_image_size((stage.side, stage.side))  # refuses a side that the patches do not divide
        check_visible(model, args.mask_ratio)


@dataclass
class GrowingSize:
    """Opens the batches of each stage of a run whose images grow, at its size.

    loader: of images of the model's own size. augmentation_for: returns the augmentation for an image size.
    """

    training: Training
    model: MaskedAutoencoderViT
    loader: TrainLoader
    augmentation_for: Callable[[tuple[int, int]], Any]
    batches: PhasedBatches = field(default_factory=PhasedBatches)

    def __post_init__(self) -> None:
        """Gives the model the size of the last step that was made: an evaluation after it may still be due."""
        loop = self.training.loop
        self.set_size(max(0, loop.step - 1) // loop.steps_per_epoch)

    def set_size(self, epoch: int) -> Stage:
        """Gives the model the image size of an epoch. Returns its stage."""
        args = self.training.args
        stage = stage_of(args.grow_size, args.epochs, epoch)
        self.model.set_image_size((stage.side, stage.side))
        return stage

    def is_due(self) -> bool:
        """Whether the next step belongs to a stage that is not open."""
        loop = self.training.loop
        return self.batches.open_until <= loop.step < loop.last_step

    def is_done(self) -> bool:
        """Never: each start opens its own batches."""
        return False

    def perform(self) -> None:
        """Gives model and batches the size of the stage that begins now, or in which the run is resumed."""
        args = self.training.args
        loop = self.training.loop
        self.batches.close()
        epoch = loop.step // loop.steps_per_epoch
        stage = self.set_size(epoch)
        size = self.model.img_size
        loader = replace(
            self.loader,
            dataset=self.loader.dataset.seen_by(self.augmentation_for(size)),
            collate=self.model.collator(args.sampling, args.seed),
            img_size=size,
        )
        self.batches.begin(loader, loop.step, stage.end * loop.steps_per_epoch, loop.last_step)
        loop.num_reports = 0  # the next report includes the start of the workers, as a run's first one does
        loop.log.info(f"epochs {epoch} to {stage.end - 1}: images of {stage.side} px, {self.model.counts}")

    def check_space(self) -> None:
        """TooLittleMemory on all ranks if batches of the model's own size, the last one, do not fit into /dev/shm."""
        workers = self.training.plan.num_workers
        collectives.run_everywhere(lambda: check_space(self.loader.batch_bytes, workers, num_batches=workers))

    def sizes_ahead(self) -> Iterator[tuple[int, int]]:
        """Gives the model each size of the steps from now on, yields it, and gives the model its size again."""
        args = self.training.args
        loop = self.training.loop
        size_now = self.model.img_size
        try:
            for stage in parse_stages(args.grow_size, args.epochs):
                if loop.step < stage.end * loop.steps_per_epoch:
                    self.model.set_image_size((stage.side, stage.side))
                    yield self.model.img_size
        finally:
            self.model.set_image_size(size_now)
