"""Images that grow over training: `--grow_size 128:0.5 160:0.8 224`.

Each size is a *stage*, a sequence of whole epochs: 128 px for the first half of the schedule, 160 px up to eight
tenths, then 224 px, the model's own size. Small images have fewer tokens, so most of the steps cost less. The weights
are the same in all stages. Positions are interpolated from the tables of the model's own size. DataLoader workers
prepare batches ahead, so each stage opens a loader of its own.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from framework import Framework
from models_mae_pr import MaskedAutoencoderViT
from util.run.cli import FlagGroup
from util.run.loader import Batches, TrainLoader
from util.run.training import Training


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
        except ValueError as error:
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
    """Returns the stage to which an epoch of the schedule belongs, whole or not, counted from 0."""
    return next(stage for stage in parse_stages(words, epochs) if epoch < stage.end)


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


@dataclass
class GrowingSize:
    """The batches of a run whose images grow, and, between two stages, what opens those of the next one.

    loader: of images of the model's own size. augmentation_for: returns the augmentation for an image size.
    """

    training: Training
    model: MaskedAutoencoderViT
    loader: TrainLoader
    augmentation_for: Callable[[tuple[int, int]], Any]
    batches: Batches | None = field(init=False, default=None)  # of the open stage
    open_until: int = field(init=False, default=0)  # the step after the last one of the open stage

    def open(self, steps: range) -> "GrowingSize":
        """Returns the batches: those of each stage begin when `perform` has opened it."""
        return self

    def __iter__(self) -> "GrowingSize":
        return self

    def __next__(self) -> Any:
        assert self.batches is not None
        return next(self.batches)

    def close(self) -> None:
        """Ends the workers of the open stage."""
        if self.batches is not None:
            self.batches.close()

    def is_due(self) -> bool:
        """Whether the next step belongs to a stage that is not open."""
        loop = self.training.loop
        return self.open_until <= loop.step < loop.last_step

    def is_done(self) -> bool:
        """Never: each start opens its own batches."""
        return False

    def perform(self) -> None:
        """Gives model and batches the size of the stage that begins now, or in which the run is resumed."""
        args = self.training.args
        loop = self.training.loop
        self.close()
        epoch = loop.step // loop.steps_per_epoch
        stage = stage_of(args.grow_size, args.epochs, epoch)
        size = (stage.side, stage.side)
        self.model.set_image_size(size)
        loader = replace(
            self.loader,
            dataset=self.loader.dataset.seen_by(self.augmentation_for(size)),
            collate=self.model.collator(args.sampling, args.seed),
            img_size=size,
        )
        self.open_until = stage.end * loop.steps_per_epoch
        self.batches = loader.open(range(loop.step, min(self.open_until, loop.last_step)))
        loop.num_reports = 0  # the next report includes the start of the workers, as a run's first one does
        loop.log.info(f"epochs {epoch} to {stage.end - 1}: images of {stage.side} px, {self.model.counts}")
