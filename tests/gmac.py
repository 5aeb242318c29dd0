"""Multiply-adds of full-size models. Each model is counted once in a session: a count takes a second."""

import json

import torch

from frameworks.registry import build_model
from util import costs

# Settings that do not change the count. With one that is missing here a model is counted again.
SCHEDULE = {"recipe", "epochs", "warmup_epochs", "total_batch_size", "batch_size", "accum_iter", "blr", "min_lr"}
SCHEDULE |= {"warmup_lr", "lr_schedule", "lr_steps", "weight_decay", "betas", "clip_grad", "drop_path"}
SCHEDULE |= {"crop", "crop_scale", "interpolation", "teacher", "norm_pix_loss"}
_counted = {}


def forward_gmac(settings):
    """Returns (model, frozen teacher) as `util.costs.forward_gmac`."""
    key = json.dumps({name: value for name, value in settings.items() if name not in SCHEDULE}, sort_keys=True)
    if key not in _counted:
        with torch.no_grad():  # counting calls hooks on every tensor that needs a gradient
            _counted[key] = costs.forward_gmac(settings, build_model)
    return _counted[key]
