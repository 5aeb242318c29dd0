"""Class probabilities of images without labels: OUT/predictions.csv.

It is the file that `main_finetune.py --predictions` writes, without the column `class`.
"""

import os
from pathlib import Path

import torch

from encoders.trained import Trained
from engine_finetune import format_probabilities, write_rows
from util.data.images import EncodedImages
from util.data.invalid_pixels import transform_valid
from util.data.transforms import ResizeCenterCrop
from util.evaluate.loop import EvalContext
from util.evaluate.predictions import PartFiles, Progress, prepared_batches

RESULTS = "predictions.csv"


class View:
    """Crops images as the evaluation does."""

    def __init__(self, crop: ResizeCenterCrop, has_invalid: bool) -> None:
        self.crop = crop
        self.has_invalid = has_invalid

    def __call__(self, img: torch.Tensor) -> torch.Tensor:
        """Crops [C, H, W] as stored."""
        if self.has_invalid:
            return transform_valid(self.crop, img, 0, 0)
        return self.crop(img)


class Probabilities:
    """Predicts and writes the probabilities of images."""

    def __init__(
        self, classifier: Trained, images: EncodedImages, out: Path, context: EvalContext, use_pillow: bool
    ) -> None:
        settings = classifier.settings
        self.model = classifier.model.to(context.device)
        self.classes = class_names(classifier)
        self.images = images
        self.path = out / RESULTS
        self.context = context
        crop = ResizeCenterCrop(settings["input_size"], settings["crop_pct"], use_pillow)
        self.view = View(crop, images.pixel_format.has_invalid)
        self.parts = PartFiles(out)

    def missing(self) -> list[int]:
        """Returns the images without results."""
        return [i for i in range(len(self.images)) if self.name_in_parts(i) not in self.parts.results]

    def name_in_parts(self, i: int) -> str:
        """Returns the path of an image, whatever folder the program is started in."""
        return os.path.abspath(self.images.path(i))

    def write_missing(self, progress: Progress) -> None:
        """Predicts the images that are missing, and writes the file. FloatingPointError if logits are not finite."""
        try:
            self.predict(self.missing(), progress)
        finally:
            self.parts.save()
        rows = []
        for i in range(len(self.images)):
            probabilities = self.parts.results.get(self.name_in_parts(i))
            if probabilities is not None:
                rows.append([self.images.path(i), *probabilities])
        write_rows(self.path, ["image", *self.classes], rows)

    @torch.no_grad()
    def predict(self, indices: list[int], progress: Progress) -> None:
        """Adds the probabilities of images to the parts."""
        size = self.view.crop.size
        for batch in prepared_batches(self.images, indices, self.view, self.context, progress, size):
            imgs = torch.stack([img for _, img in batch]).to(self.context.device, non_blocking=True)
            with self.context.autocast():
                logits = self.model(self.context.normalize(imgs)).float()
            if not logits.isfinite().all():
                raise FloatingPointError("the logits are not finite: try --precision fp32, and check --mean and --std")
            probabilities = logits.softmax(dim=1).cpu()
            for (i, _), row in zip(batch, probabilities, strict=True):
                self.parts.add(self.name_in_parts(i), format_probabilities(row))


def class_names(classifier: Trained) -> list[str]:
    """Returns the names of the classes; their numbers, if the file has none."""
    if classifier.weights.info.classes:
        return classifier.weights.info.classes
    return [str(k) for k in range(classifier.settings["nb_classes"])]
