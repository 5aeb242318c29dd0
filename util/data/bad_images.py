"""Images that cannot be read: replaced, counted, named in the log; too many of them end the run."""

import torch

from util.data.images import ImageError
from util.run.distributed import gather_objects

NAMED = 10  # so many with their names at a time


class BadImages:
    """What the loading processes of all trainers have marked in their `flags` (uint8 [n], in shared memory).

    `report` is called by all processes alike; it tells of new ones through `say(sentence)`, and raises ImageError in every
    process once more than `max_fraction` of all images is bad. A single one never is too many.
    """

    def __init__(self, images, flags, max_fraction, say):
        self.images, self.flags, self.say = images, flags, say
        self.max_fraction, self.most = max_fraction, max(1, int(max_fraction * len(images)))
        self.known = {}  # number -> why (None beyond the first), of all processes

    def report(self):
        if self.flags is None:
            return
        found = [i for i in self.flags.nonzero().flatten().tolist() if i not in self.known]
        new = {i: self._reason(i) for i in found[:NAMED]} | dict.fromkeys(found[NAMED:])
        for others in gather_objects(new):
            new |= others
        if not new:
            return
        self.known |= new
        what = f"{len(self.known)} of {len(self.images)} images cannot be read"
        if len(self.known) > self.most:
            raise ImageError(
                f"{what}, more than --max_bad_fraction {self.max_fraction:g}: {_list(self.known)}. Mend the data, or raise the flag"
            )
        self.say(f"warning: {what}; the next ones take their places. New: {_list(new)}")

    def _reason(self, i):
        try:
            self.images.load(i)
        except ImageError as error:
            return str(error)
        return f"{self.images.path(i)!r} could not be read, but now can"


def _list(reasons):
    named = [reasons[i] for i in sorted(reasons) if reasons[i]][:NAMED]
    return "; ".join(named) + (f"; and {len(reasons) - len(named)} more" if len(reasons) > len(named) else "")


def shared_flags(length):
    """Zeros, uint8 [length], that workers write and their trainer reads."""
    return torch.zeros(length, dtype=torch.uint8).share_memory_()
