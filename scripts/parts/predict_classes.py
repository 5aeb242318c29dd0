"""Class probabilities of images without labels: OUT/predictions.csv."""

import csv
from pathlib import Path

import torch

from encoders.trained import Trained
from util.atomic import replaced_file
from util.data.datasets import stack
from util.data.images import EncodedImages
from util.data.transforms import ResizeCenterCrop
from util.evaluate.context import EvalContext
from util.evaluate.predictions import Results, readable_batches

CSV = "predictions.csv"


class Probabilities:
    """Predicts and writes the probabilities of images."""

    def __init__(self, trained: Trained, images: EncodedImages, out: Path, context: EvalContext) -> None:
        settings = trained.settings
        self.model = trained.model.to(context.device)
        self.classes = trained.weights.info.classes or [str(k) for k in range(settings["nb_classes"])]
        self.images = images
        self.path = out / CSV
        self.context = context
        self.crop = ResizeCenterCrop(settings["input_size"], settings["crop_pct"], images.use_pillow)
        self.results = Results(out, images)

    def missing(self) -> list[int]:
        return self.results.missing()

    @torch.no_grad()
    def write_missing(self) -> None:
        """Predicts the images that are missing, and writes the file. FloatingPointError if logits are not finite."""
        batches = readable_batches(self.images, self.crop, self.missing(), self.context, stack, self.crop.size)
        for indices, (stored, _) in batches:
            imgs = stored.to(self.context.device, non_blocking=True)
            with self.context.autocast():
                logits = self.model(self.context.normalize(imgs)).float()
            if not logits.isfinite().all():
                raise FloatingPointError("the logits are not finite: try --precision fp32, and check --mean and --std")
            for i, row in zip(indices, logits.softmax(dim=1).tolist(), strict=True):
                self.results.add(i, [f"{value:.6g}" for value in row])
        # Names of files need not be UTF-8.
        with (
            replaced_file(self.path) as temporary,
            open(temporary, "w", newline="", encoding="utf-8", errors="surrogateescape") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(["image", *self.classes])
            for i, probabilities in sorted(self.results.by_index.items()):
                writer.writerow([self.images.path(i), *probabilities])
