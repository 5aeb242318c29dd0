"""SimMIM's ViT with learned absolute positions instead of relative biases, as AMT has it: encoder and fine-tune model.

Tokens can then be left out of a sequence without a bias for each pair of the rest. State-dict names are those of
SimMIM's code.
"""

from functools import partial

from encoders.models_relative_vit import SimMIMClassifier, SimMIMEncoder
from models_vit import BASE, MICRO, MINI

__all__ = [
    "AbsoluteVisionTransformer",
    "absolute_vit_micro_patch4",
    "absolute_vit_mini_patch4",
    "absolute_vit_base_patch16",
]


class AbsoluteViTEncoder(SimMIMEncoder):
    """The blocks of `models_relative_vit` without biases of the logits, and a learned position table."""

    has_table = True

    def no_weight_decay(self) -> set[str]:
        """Returns the parameters without weight decay, beside the 1-D ones."""
        return {"cls_token", "pos_embed"}


class AbsoluteVisionTransformer(SimMIMClassifier, AbsoluteViTEncoder):
    """The encoder with a classification head, as AMT fine-tunes it."""


absolute_vit_micro_patch4 = partial(AbsoluteVisionTransformer, **MICRO)
absolute_vit_mini_patch4 = partial(AbsoluteVisionTransformer, **MINI)
absolute_vit_base_patch16 = partial(AbsoluteVisionTransformer, **BASE)
