"""Images that cannot be read: counted over all processes and named in the log. Too many of them end the run."""

from collections.abc import Callable, Sequence

import torch

from util.collectives import gather_objects
from util.data.images import ImageError, Images, find_storage_error
from util.text import count_of

MOST_NAMED = 10  # in one message


class TooManyBadImages(ImageError):
    """More images than --max_bad_fraction cannot be read. All ranks raise it at the same step."""


class BadImages:
    """Reports the images that the workers of all processes have marked as bad.

    flags: `AddressedDataset.bad`, uint8 [n]. max_fraction: of all images; a single bad image is always accepted.
    """

    def __init__(
        self, images: Images, flags: torch.Tensor | None, max_fraction: float, log: Callable[[str], None]
    ) -> None:
        self.images, self.flags, self.max_fraction, self.log = images, flags, max_fraction, log
        self.known: set[int] = set()

    def report(self) -> None:
        """Logs the newly bad images. Collective: all ranks raise TooManyBadImages if there are too many.

        They raise OSError instead if on one of them no image can be opened any more.
        """
        if self.flags is None:
            return
        bad = set[int]().union(*gather_objects(self.flags.nonzero().flatten().tolist()))
        new, self.known = sorted(bad - self.known), bad
        message = f"{len(bad)} of {count_of(len(self.images), 'image')} cannot be read"
        if new and len(bad) > max(1, int(self.max_fraction * len(self.images))):
            for error in gather_objects(find_storage_error(self.images)):
                if error is not None:
                    raise error
            limit = f"more than --max_bad_fraction {self.max_fraction:g}"
            raise TooManyBadImages(
                f"{message}, {limit}: {self._reasons(sorted(bad))}. Repair the data, or raise the flag"
            )
        if new:
            self.log(f"warning: {message} and are replaced by the next ones. New: {self._reasons(new)}")

    def _reasons(self, bad: Sequence[int]) -> str:
        """Reads the first of these images again. Returns why they are bad."""
        reasons = []
        for i in bad[:MOST_NAMED]:
            try:
                self.images.load_sample(i)
                reasons.append(f"{self.images.path(i)!r} could not be read before, but can be read now")
            except ImageError as error:
                reasons.append(str(error))
        if len(bad) > MOST_NAMED:
            reasons.append(f"and {len(bad) - MOST_NAMED} more")
        return "; ".join(reasons)
