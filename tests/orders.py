"""Token orders by weights of tokens, and by which of them count, without images."""

import numpy as np
import torch

from frameworks.hooks.attention_phases import AttentionCollator
from frameworks.valid_tokens import ValidTokenCollator


def draw_order(sampler, noise, weights=None, counted=None):
    """Returns ids_shuffle [B, N] for noise, weights [B, N] and bool counted [B, N]."""
    collator = ValidTokenCollator(sampler, 0)
    if weights is not None:
        collator = AttentionCollator(sampler, 0, None)
        collator.weights = np.asarray(weights)
    if counted is not None:
        collator.find_counted = lambda imgs: counted
    return collator.draw(noise, torch.zeros(len(noise), dtype=torch.uint8))
