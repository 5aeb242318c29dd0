"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to restore.

The frameworks' releases differ in where the cosine begins, in what their warm-up starts from, and in whether floor and
start scale with the layer in fine-tuning; a reproduction needs each as it is.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """`schedule(step, lr_scale)` -> learning rate of the optimizer step (0-based) for a group whose layer has that scale.

    name: one of SCHEDULES. min_lr: the cosine's floor; warmup_lr: the warm-up's start; lr_steps: epochs of the tenfold
    drops of `simmim_steps`.
    """

    name: str
    steps_per_epoch: int
    epochs: float
    warmup_epochs: float
    lr: float
    min_lr: float = 0.0
    warmup_lr: float = 0.0
    lr_steps: tuple = ()

    def __call__(self, step, lr_scale=1.0):
        return SCHEDULES[self.name](self, step, lr_scale)


def _half_cosine(progress, top, bottom):
    return bottom + (top - bottom) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _mae(s, step, lr_scale):
    """Linear over the warm-up, then a half cosine over the rest; everything scales with the layer."""
    epoch = step / s.steps_per_epoch
    if epoch < s.warmup_epochs:
        return lr_scale * (s.warmup_lr + (s.lr - s.warmup_lr) * epoch / s.warmup_epochs)
    return lr_scale * _half_cosine((epoch - s.warmup_epochs) / (s.epochs - s.warmup_epochs), s.lr, s.min_lr)


def _mff(s, step, lr_scale):
    """As MAE's, but the last step of the warm-up has reached the peak already, and the floor is the same for all layers."""
    warmup, total = round(s.warmup_epochs * s.steps_per_epoch), round(s.epochs * s.steps_per_epoch)
    if step < warmup:
        return lr_scale * (s.warmup_lr + (s.lr - s.warmup_lr) * step / max(1, warmup - 1))
    return _half_cosine((step - warmup) / (total - warmup), lr_scale * s.lr, s.min_lr)


def _simmim(s, step, lr_scale):
    """A cosine over the whole run, of which the warm-up hides the beginning: the rate drops where it ends.

    The release sets the rate after a step, by that step's number: the first two steps have the same. Start and floor are
    the same for all layers.
    """
    step = max(step - 1, 0)
    warmup = s.warmup_epochs * s.steps_per_epoch
    if step < warmup:
        return s.warmup_lr + (lr_scale * s.lr - s.warmup_lr) * step / warmup
    return _half_cosine(step / (s.epochs * s.steps_per_epoch), lr_scale * s.lr, s.min_lr)


def _simmim_steps(s, step, lr_scale):
    """The same warm-up, then a constant rate that falls tenfold at each of `lr_steps`."""
    if max(step - 1, 0) < s.warmup_epochs * s.steps_per_epoch:
        return _simmim(s, step, lr_scale)
    return lr_scale * s.lr * 0.1 ** sum(epoch * s.steps_per_epoch <= max(step - 1, 0) for epoch in s.lr_steps)


SCHEDULES = {"mae": _mae, "mff": _mff, "simmim": _simmim, "simmim_steps": _simmim_steps}
