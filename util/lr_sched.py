"""Learning-rate schedules as pure functions of the step, without a state that would have to be saved.

The releases of the frameworks differ in three points: where the cosine begins, from which rate the warm-up starts, and
whether the floor and the start are scaled by layer in fine-tuning. Each is implemented as its release has it. `wsd` is
of none: it serves runs whose length is not known.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """`schedule(step, lr_scale)` returns the learning rate of an optimizer step, counted from 0.

    lr_scale: the factor of a parameter group under layer-wise learning-rate decay. name: one of SCHEDULES. lr: the
    peak. min_lr: the floor of the decay. warmup_lr: the start of the warm-up. lr_steps: for `simmim_steps`, the epochs
    at which the rate falls tenfold. decay_epochs: for `wsd`, how many epochs the decay takes.
    """

    name: str
    steps_per_epoch: int
    epochs: float
    warmup_epochs: float
    lr: float
    min_lr: float = 0.0
    warmup_lr: float = 0.0
    lr_steps: tuple[float, ...] = ()
    decay_epochs: int = 0

    def __call__(self, step: int, lr_scale: float = 1.0) -> float:
        return SCHEDULES[self.name](self, step, lr_scale)


def _line(x: float, length: float, start: float, end: float) -> float:
    """Returns the value of a line from `start`, at x = 0, to `end`, at x = `length`."""
    return start + (end - start) * x / length


def _half_cosine(progress: float, top: float, bottom: float) -> float:
    """Returns the value of a half cosine from `top`, at progress 0, to `bottom`, at progress 1."""
    return bottom + (top - bottom) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _mae(s: Schedule, step: int, lr_scale: float) -> float:
    """A linear warm-up, then a half cosine over the remaining epochs. All rates are scaled by layer."""
    epoch = step / s.steps_per_epoch
    if epoch < s.warmup_epochs:
        return lr_scale * _line(epoch, s.warmup_epochs, s.warmup_lr, s.lr)
    progress = (epoch - s.warmup_epochs) / (s.epochs - s.warmup_epochs)
    return lr_scale * _half_cosine(progress, s.lr, s.min_lr)


def _mff(s: Schedule, step: int, lr_scale: float) -> float:
    """Like MAE's, but the last step of the warm-up has the peak rate, and the floor is the same for all layers."""
    warmup = round(s.warmup_epochs * s.steps_per_epoch)
    total = round(s.epochs * s.steps_per_epoch)
    if step < warmup:
        return lr_scale * _line(step, max(1, warmup - 1), s.warmup_lr, s.lr)
    progress = (step - warmup) / (total - warmup)
    return _half_cosine(progress, lr_scale * s.lr, s.min_lr)


def _simmim(s: Schedule, step: int, lr_scale: float) -> float:
    """A cosine over the whole run, of which the warm-up replaces the first part: the rate drops when the warm-up ends.

    The release sets the rate after each step, from that step's number. So the first two steps have the same rate. The
    start and the floor are the same for all layers.
    """
    step = max(step - 1, 0)
    warmup = s.warmup_epochs * s.steps_per_epoch
    total = s.epochs * s.steps_per_epoch
    if step < warmup:
        return _line(step, warmup, s.warmup_lr, lr_scale * s.lr)
    return _half_cosine(step / total, lr_scale * s.lr, s.min_lr)


def _simmim_steps(s: Schedule, step: int, lr_scale: float) -> float:
    """The same warm-up, then a constant rate that falls tenfold at each of `lr_steps`."""
    previous_step = max(step - 1, 0)
    if previous_step < s.warmup_epochs * s.steps_per_epoch:
        return _simmim(s, step, lr_scale)
    num_falls = sum(epoch * s.steps_per_epoch <= previous_step for epoch in s.lr_steps)
    return lr_scale * s.lr * 0.1**num_falls


def _wsd(s: Schedule, step: int, lr_scale: float) -> float:
    """Warm-up, stable, decay: MAE's warm-up, a constant rate, and a fall as 1 - sqrt(x) over the last epochs.

    The form is that of arXiv:2405.18392 and timm. Until the decay begins, no rate depends on `epochs`.
    """
    epoch = step / s.steps_per_epoch
    if epoch < s.warmup_epochs:
        return _mae(s, step, lr_scale)
    decayed_epochs = epoch - (s.epochs - s.decay_epochs)
    if decayed_epochs <= 0:
        return lr_scale * s.lr
    return lr_scale * _line(math.sqrt(decayed_epochs / s.decay_epochs), 1.0, s.lr, s.min_lr)


SCHEDULES = {
    "mae": _mae,
    "mff": _mff,
    "simmim": _simmim,
    "simmim_steps": _simmim_steps,
    "wsd": _wsd,
}
