"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to restore."""

import math


def warmup_cosine(step, steps_per_epoch, epochs, warmup_epochs, lr, min_lr=0.0):
    """MAE's schedule, per optimizer step (0-based): linear from 0 over the warm-up, then a half cosine to `min_lr`."""
    epoch = step / steps_per_epoch
    if epoch < warmup_epochs:
        return lr * epoch / warmup_epochs
    progress = (epoch - warmup_epochs) / (epochs - warmup_epochs)
    return min_lr + (lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
