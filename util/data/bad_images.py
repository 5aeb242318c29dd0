"""Images that cannot be read, counted over all ranks."""

from collections.abc import Callable, Sequence

import torch

from util import collectives
from util.data.images import ImageError, Images, find_storage_error
from util.text import count_of

MAX_NAMED = 10  # bad images in one message


class TooManyBadImages(ImageError):
    """More images than --max_bad_fraction cannot be read. All ranks raise it at the same step."""


class BadImages:
    """Reports the images that the workers of all processes have marked as bad.

    flags: `AddressedDataset.bad`, uint8 [n]. max_fraction: of all images; a single bad image is always accepted.
    before_error: is called before an error on all ranks, to save their steps.
    """

    def __init__(
        self,
        images: Images,
        flags: torch.Tensor | None,
        max_fraction: float,
        log: Callable[[str], None],
        before_error: Callable[[], None],
    ) -> None:
        self.images = images
        self.before_error = before_error
        self.flags = flags
        self.num_known = 0.0  # flags of all ranks
        self.max_bad = max(1, int(max_fraction * len(images)))
        self.limit = f"more than --max_bad_fraction {max_fraction:g}"
        self.log = log
        self.known: set[int] = set()

    def count(self) -> int:
        """Returns how many images this process has found bad."""
        if self.flags is None:
            return 0
        return int(self.flags.count_nonzero())

    def report(self, num_flags: float) -> None:
        """Logs the newly bad images. Collective: all ranks raise TooManyBadImages if there are too many.

        num_flags: the sum of all ranks' `count`. They raise OSError instead if on one of them no image can be opened
        any more.
        """
        if self.flags is None or num_flags == self.num_known:  # as almost always; to gather lists takes long
            return
        self.num_known = num_flags
        bad: set[int] = set()
        for bad_on_rank in collectives.gather_objects(self.flags.nonzero().flatten().tolist()):
            bad.update(bad_on_rank)
        new = sorted(bad - self.known)
        self.known = bad
        if not new:
            return
        message = f"{len(bad)} of {count_of(len(self.images), 'image')} cannot be read"
        if len(bad) <= self.max_bad:
            self.log(f"warning: {message} and are replaced by the next ones. New: {self._reasons(new)}")
            return
        self.before_error()
        for error in collectives.gather_objects(find_storage_error(self.images)):
            if error is not None:
                raise error
        reasons = self._reasons(sorted(bad))
        raise TooManyBadImages(f"{message}, {self.limit}: {reasons}. Repair the data, or raise the flag")

    def _reasons(self, bad: Sequence[int]) -> str:
        """Reads the first of these images again. Returns why they are bad."""
        reasons = []
        for i in bad[:MAX_NAMED]:
            try:
                self.images.load_sample(i)
                reasons.append(f"{self.images.path(i)!r} could not be read before, but can be read now")
            except ImageError as error:
                reasons.append(str(error))
        if len(bad) > MAX_NAMED:
            reasons.append(f"and {len(bad) - MAX_NAMED} more")
        return "; ".join(reasons)
