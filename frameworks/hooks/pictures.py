"""Pictures of reconstructions during a training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frameworks.hooks.reconstruction import crops, reconstruction_picture
from frameworks.views import is_drawable
from util.data.images import evenly_spaced
from util.run.train.loop import TrainLoop

BEFORE = "before_training.png"
AFTER = "reconstruction.png"


@dataclass
class Pictures:
    """Draws a fixed set of training images and their reconstructions, every `--picture_every` epochs.

    The pictures go to TensorBoard and to the output folder: the first one, of the untrained model, as BEFORE, all later
    ones as AFTER, where the newest stays.
    """

    loop: TrainLoop
    images: Any
    settings: Mapping[str, Any]  # of the run, resolved

    def is_due(self) -> bool:
        """Whether the run begins, or the current step ends an epoch with a picture, or this start."""
        loop = self.loop
        every = loop.run.args.picture_every
        ends_start = every > 0 and loop.step == loop.last_step
        return (ends_start or loop.ends_epoch(every)) and is_drawable(loop.model)

    def is_done(self) -> bool:
        """Whether this start continues from here. A missed picture is not drawn later."""
        return 0 < self.loop.step == self.loop.first_step

    def perform(self) -> None:
        """Draws the picture on rank 0."""
        loop = self.loop
        model: Any = loop.model
        if not loop.run.process.is_main:
            return
        indices = evenly_spaced(len(self.images), 8)
        [(imgs, ids_shuffle)] = crops(model, self.settings, self.images, indices, replace=True)
        picture = reconstruction_picture(model, loop.normalize, imgs, ids_shuffle)
        name = AFTER
        if loop.step == 0:
            name = BEFORE
        loop.log.picture(name, picture, loop.step)
