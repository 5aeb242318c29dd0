"""A live signal during pre-training: k-nearest-neighbour accuracy and RankMe of the encoder, every few epochs.

The bank holds training images, the queries are images of val/, both in the evaluation view. The evaluation draws no
random numbers and leaves no state, so a run has the same weights with and without it. If the run is killed meanwhile,
the next start makes up for it.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from framework import Framework
from util.addressed import BANK, addressed_uniform
from util.data.datasets import AddressedDataset
from util.data.folders import MissingSplit
from util.data.images import Images, evenly_spaced, has_one_label, match_splits
from util.data.open import open_everywhere
from util.data.transforms import ResizeCenterCrop
from util.evaluate.context import context_of_loop
from util.evaluate.features import Features, encode_blocks, extract_features, num_class_tokens
from util.evaluate.knn import KnnProtocol, knn_accuracy
from util.evaluate.moments import Moments, moments_of_all
from util.evaluate.results import accuracy_text
from util.flag import Flag
from util.run.train.loop import TrainLoop

MAX_QUERIES = 10_000
KNN_NEIGHBOURS = 20

FLAGS = (
    Flag(
        "knn_every",
        int,
        0,
        "epochs between kNN accuracies and RankMe of the encoder; 0: none",
        everyday=True,
        changes="nothing",
        at_least=0,
    ),
    Flag(
        "knn_train",
        int,
        50_000,
        "number of training images that serve as neighbours; 0: all",
        changes="nothing",
        at_least=0,
    ),
)


def encode(model: Framework, imgs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Computes the features of whole images, by the encoder that is fine-tuned: see `Tokens.vectors`.

    imgs: normalised images [B, C, H, W].
    """
    depth = len(getattr(model, "blocks", ()))
    num_prefix = getattr(model, "num_cls_tokens", 0)
    return encode_blocks(model, imgs, [depth], depth, num_prefix, num_class_tokens(model))[depth].vectors()


def bank_images(num_images: int, num_wanted: int, seed: int) -> np.ndarray:
    """Returns the training images of the bank, int64, ascending: the same in each evaluation. num_wanted 0: all."""
    order = addressed_uniform(BANK, seed, 0, [0], num_images)[0].argsort(kind="stable")
    return np.sort(order[: num_wanted or num_images])


def can_be_classified(images: Images) -> bool:
    """Whether each of the training images has one of two classes or more."""
    if len(images.classes) < 2 or has_one_label(images):
        return False
    return bool(((images.labels >= 0) & (images.labels < len(images.classes))).all())


def open_queries(args: argparse.Namespace, images: Images) -> tuple[Images | None, list[str]]:
    """Opens the images that --knn_every classifies. Returns (validation images or None, notes).

    images: of training. ValueError if the validation images are unusable or have other classes.
    """
    if not args.knn_every:
        return None, []
    if not can_be_classified(images):
        return None, ["note: kNN needs two classes, one for each image, so --knn_every computes RankMe alone"]
    try:
        val_images = open_everywhere(args, "val", labelled=True, max_bad_fraction=args.max_bad_fraction)
    except MissingSplit:
        note = "there is no validation split, so --knn_every classifies training images by the others (leave-one-out)"
        return None, [f"note: {note}"]
    match_splits(images, val_images)
    return val_images, val_images.notes


@dataclass
class Monitor:
    """Evaluates the encoder before the first step, after every `--knn_every` epochs and at the end of the schedule.

    Unless all training images have classes, it computes RankMe alone, which needs no labels. Without validation images
    each query is an image of the bank, without itself as a neighbour.
    """

    loop: TrainLoop
    images: Images  # of training
    val_images: Images | None  # see `open_queries`

    def __post_init__(self) -> None:
        args = self.loop.run.args
        self.bank = bank_images(len(self.images), args.knn_train, args.seed)  # indices of training images
        self.has_classes = can_be_classified(self.images)

    def is_due(self) -> bool:
        """Whether the current step is to be evaluated."""
        return self.loop.ends_epoch(self.loop.run.args.knn_every)

    def is_done(self) -> bool:
        """Whether the log holds the evaluation of the current step, with finite features, on rank 0."""
        loop = self.loop
        return any(report["step"] == loop.step and report.get("rankme") is not None for report in loop.log.history())

    def perform(self) -> None:
        """Measures the encoder and logs the result. FloatingPointError if features are not finite at the end."""
        loop = self.loop
        scalars: dict[str, Any] = {"epoch": (loop.step - 1) // loop.steps_per_epoch}  # -1: before the first one
        bank = self.extract(self.images, self.bank)
        moments = {name: moments_of_all(x) for name, x in bank.values.items()}
        is_finite = all(m.is_finite for m in moments.values())
        if is_finite:
            if self.has_classes:
                scalars |= self.accuracies(bank, moments)
            scalars["rankme"] = moments["mean"].rankme()
            scalars["rankme_centred"] = moments["mean"].rankme(centred=True)
        else:
            scalars["rankme"] = None
        line = describe(scalars)
        loop.log.report(loop.step, scalars, f"{when(scalars)}: {line}")
        if loop.step == loop.last_step and not is_finite:
            raise FloatingPointError("the features of the encoder are not finite: try --precision fp32")

    def extract(self, images: Images, indices: np.ndarray) -> Features:
        """Encodes this rank's share of the images `indices`. Unreadable ones are replaced as in training."""
        args = self.loop.run.args
        model = self.loop.model
        view = ResizeCenterCrop(model.img_size, reference=args.loader == "reference")
        dataset = AddressedDataset(images, view, replace=args.max_bad_fraction > 0)
        context = context_of_loop(self.loop)
        return extract_features(partial(encode, model), model, dataset, indices, context)

    def queries(self, bank: Features) -> Features:
        """Returns the features that are classified: of val/, or of images of the bank if there is none."""
        if self.val_images is not None:
            return self.extract(self.val_images, evenly_spaced(len(self.val_images), MAX_QUERIES))
        indices = self.bank[evenly_spaced(len(self.bank), MAX_QUERIES)]
        return bank.take(torch.isin(bank.indices, bank.indices.new_tensor(indices)))

    def accuracies(self, bank: Features, moments: Mapping[str, Moments]) -> dict[str, float]:
        """Returns the kNN accuracies by their names in the log. The headline is the mean of the patch tokens, z."""
        queries = self.queries(bank)
        protocol = KnnProtocol(len(self.images.classes), (KNN_NEIGHBOURS,), leave_one_out=self.val_images is None)
        scalars: dict[str, float] = {}
        for name in bank.values:
            for scaling, statistics in (("z", moments[name]), ("raw", None)):
                of_neighbours = knn_accuracy(bank, queries, name, protocol, statistics, self.loop.stop_if_asked)
                scores = of_neighbours[KNN_NEIGHBOURS]
                if (name, scaling) == ("mean", "z"):
                    for measure, value in scores.items():
                        scalars[f"knn_{measure}"] = value
                else:
                    scalars[f"knn_{name}_{scaling}_top1"] = scores["top1"]
        return scalars


def describe(scalars: Mapping[str, Any]) -> str:
    """Returns one evaluation in words."""
    if scalars["rankme"] is None:
        return "the features of the encoder are not finite, so kNN and RankMe are missing"
    text = f"RankMe {scalars['rankme']:.1f}, centred {scalars['rankme_centred']:.1f}"
    if "knn_top1" in scalars:
        text = f"{describe_accuracies(scalars)}; {text}"
    return text


def describe_accuracies(scalars: Mapping[str, float]) -> str:
    """Returns the kNN accuracies of one evaluation in words."""
    text = f"kNN {accuracy_text(scalars, prefix='knn_')} (raw {scalars['knn_mean_raw_top1']:.2f} %"
    if "knn_cls_z_top1" in scalars:
        text += f"; class token {scalars['knn_cls_z_top1']:.2f} %, raw {scalars['knn_cls_raw_top1']:.2f} %"
    return text + ")"


def when(report: Mapping[str, Any]) -> str:
    """Returns, for example, "after epoch 3"."""
    if report["epoch"] < 0:
        return "before training"
    return f"after epoch {report['epoch']}"


def summary_lines(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines for the end of a run: the first and the last evaluation in its log."""
    evaluations = [report for report in history if report.get("rankme") is not None]
    if len(evaluations) > 2:
        evaluations = [evaluations[0], evaluations[-1]]
    return [f"  {when(report)}: {describe(report)}" for report in evaluations]
