"""Images that cannot be read, counted over all ranks."""

from collections.abc import Sequence

from util import collectives
from util.data.datasets import AddressedDataset
from util.data.images import ImageError, find_storage_error
from util.run.train.loop import TrainLoop
from util.run.train.saving import CheckpointSaver
from util.text import count_of

MAX_NAMED = 10  # bad images in one message


class BadImages:
    """Between steps, reports the images that the workers of all processes have marked as bad since the last time.

    More than `--max_bad_fraction` end the run; a single bad image is always accepted.
    """

    def __init__(self, loop: TrainLoop, saver: CheckpointSaver, dataset: AddressedDataset) -> None:
        self.loop = loop
        self.saver = saver
        self.max_fraction: float = loop.run.args.max_bad_fraction
        self.images = dataset.images
        self.flags = dataset.bad
        self.num_known = 0  # flags of all ranks
        self.max_bad = max(1, int(self.max_fraction * len(dataset)))
        self.known: set[int] = set()

    def is_due(self) -> bool:
        """Whether a report has found further ones. All ranks know what it has found."""
        return self.loop.reports.num_bad_images != self.num_known

    def is_done(self) -> bool:
        return False

    def perform(self) -> None:
        """Logs the new ones. ImageError on all ranks if there are too many, after a save.

        They raise OSError instead if on one of them no image can be opened any more.
        """
        assert self.flags is not None
        self.num_known = self.loop.reports.num_bad_images
        bad: set[int] = set()
        for bad_on_rank in collectives.gather_objects(self.flags.nonzero().flatten().tolist()):
            bad.update(bad_on_rank)
        new = sorted(bad - self.known)
        self.known = bad
        if not new:
            return
        message = f"{len(bad)} of {count_of(len(self.images), 'image')} cannot be read"
        if len(bad) <= self.max_bad:
            self.loop.log.info(f"warning: {message} and are replaced by the next ones. New: {self._reasons(new)}")
            return
        self.saver.save(final=True)
        for error in collectives.gather_objects(find_storage_error(self.images)):
            if error is not None:
                raise error
        reasons = self._reasons(sorted(bad))
        limit = f"more than --max_bad_fraction {self.max_fraction:g}"
        raise ImageError(f"{message}, {limit}: {reasons}. Repair the data, or raise the flag")

    def _reasons(self, bad: Sequence[int]) -> str:
        """Reads the first of these images again. Returns why they are bad."""
        reasons = []
        for i in bad[:MAX_NAMED]:
            try:
                self.images.load_sample(i)
                reasons.append(f"{self.images.path(i)!r} could not be read before, but can be read now")
            except ImageError as error:
                reasons.append(str(error))
        return "; ".join(reasons)
