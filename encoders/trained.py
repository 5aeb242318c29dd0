"""A trained model of any origin: the one way to what a run, a release or an exported file holds.

    from encoders.trained import load

    trained = load("output/finetune")  # a run, a file of a release or of timm, a folder of Transformers
    logits = trained.model(imgs)

The program that a checkpoint names says what its model is. Files of others are classifiers if they hold a head, and
encoders otherwise. `frameworks.registry.load_run` loads a pre-trained model with its decoder.
"""

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from encoders.classifiers import plain_size
from encoders.load import Weights, build, load_all, read

Task = Literal["encoder", "classification", "segmentation", "detection"]


class Builder(NamedTuple):
    """The function, by its name, that builds a model from the settings of a run."""

    task: Task
    function: str  # "module:name"


# {program: what its checkpoints hold}. Pre-trained checkpoints count as encoders, which are built from their weights.
BUILDERS = {
    "main_finetune.py": Builder("classification", "encoders.classifiers:build_classifier"),
    "main_segmentation.py": Builder("segmentation", "downstream.segmentation.models:build_segmenter"),
    "main_detection.py": Builder("detection", "downstream.detection.models:build_detector"),
}


@dataclass(frozen=True)
class Trained:
    """A trained model in eval mode.

    settings: of its run, with type, mean and deviation of the pixels; without a run, inferred from the weights.
    weights: the file, whose `info` names classes and training. remarks: on differences between file and model.
    """

    task: Task
    model: Any  # an nn.Module of the task's class
    settings: dict[str, Any]
    weights: Weights
    remarks: Sequence[str] = ()

    @property
    def encoder(self) -> nn.Module:
        """The encoder of a dense task's model. Others are encoders themselves, with a head or without."""
        return getattr(self.model, "backbone", self.model)


def load(path: str | Path, task: Task | None = None) -> Trained:
    """Loads the model at `path`, see `encoders.load.read`.

    task: raise ValueError unless the model is of this task. ValueError also if the weights are of no known kind.
    """
    weights = read(path)
    builder = None
    if weights.info.run is not None:
        builder = BUILDERS.get(weights.info.run.program)
    found: Task = "encoder"
    if builder is not None:
        found = builder.task
    elif weights.num_classes is not None:
        found = "classification"
    if task not in (None, found):
        raise ValueError(f"{str(path)!r} holds a model of the task {found!r}, and {task!r} is needed")

    settings = {"in_chans": 3, "crop_pct": None, **weights.settings, **weights.info.pixel_settings}
    if builder is None:
        model, report = build(weights)
        settings |= {
            "input_size": plain_size(model.img_size),
            "patch_size": model.patch_size,
            "in_chans": model.in_chans,
        }
        if weights.num_classes is not None:
            settings["nb_classes"] = weights.num_classes
    else:
        settings["cls_token_mlp"] = False  # it is folded into the class token
        model = pkgutil.resolve_name(builder.function)({**settings, "drop_path": 0.0})
        report = load_all(model, weights)
    return Trained(found, model.eval(), settings, weights, report.remarks)


def note_on_view(settings: Mapping[str, Any], path: str | Path) -> list[str]:
    """Returns a note if the file at `path` does not say how its model sees images. settings: those of a `Trained`."""
    if settings.get("mean"):
        return []
    return [f"note: {str(path)!r} does not say how its model sees images: they have ImageNet's mean and deviation"]
