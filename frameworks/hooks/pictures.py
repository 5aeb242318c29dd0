"""Pictures of reconstructions during a training."""

from dataclasses import dataclass
from typing import Any

from framework import Framework
from frameworks.hooks.reconstruction import crops, reconstruction_picture
from frameworks.views import NoPixels
from util.data.images import evenly_spaced
from util.run.train.training import Training

BEFORE = "before_training.png"
AFTER = "reconstruction.png"


@dataclass
class Pictures:
    """Draws a fixed set of training images and their reconstructions, every `--picture_every` epochs.

    The pictures go to TensorBoard and to the output folder: the first one, of the untrained model, as BEFORE, all later
    ones as AFTER, where the newest stays.
    """

    training: Training
    model: Framework
    images: Any
    is_refused: bool = False  # and the log says so

    def is_due(self) -> bool:
        """Whether the run begins, or the current step ends an epoch with a picture, or this start."""
        every = self.training.args.picture_every
        loop = self.training.loop
        ends_start = every > 0 and loop.step == loop.last_step
        return ends_start or self.training.ends_epoch(every)

    def is_done(self) -> bool:
        """Whether this start continues from here. A missed picture is not drawn later."""
        return 0 < self.training.loop.step == self.training.saver.first_step

    def perform(self) -> None:
        """Draws the picture on rank 0."""
        training = self.training
        loop = training.loop
        if not training.process.is_main:
            return
        indices = evenly_spaced(len(self.images), 8)
        [(imgs, ids_shuffle)] = crops(self.model, training.info.settings, self.images, indices, replace=True)
        try:
            picture = reconstruction_picture(self.model, loop.normalize, imgs, ids_shuffle)
        except NoPixels as error:
            if not self.is_refused:
                training.note(f"note: there are no pictures of reconstructions: {error}")
            self.is_refused = True
            return
        name = AFTER
        if loop.step == 0:
            name = BEFORE
        training.log.picture(name, picture, loop.step)
