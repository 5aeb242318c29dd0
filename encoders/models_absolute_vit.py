"""SimMIM's ViT with learned absolute positions instead of relative biases, as AMT has it: encoder and fine-tune model.

Tokens can then be left out of a sequence without a bias for each pair of the rest. State-dict names are those of
SimMIM's code.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from encoders.models_relative_vit import RelativeBlock, init_weights_simmim
from models_vit import BASE, MICRO, MINI, Classifier, ViTEncoder, drop_path_rates, layer_norm

__all__ = [
    "AbsoluteVisionTransformer",
    "absolute_vit_micro_patch4",
    "absolute_vit_mini_patch4",
    "absolute_vit_base_patch16",
]


class AbsoluteViTEncoder(ViTEncoder):
    """The blocks of `models_relative_vit` without biases of the logits, and a learned position table.

    img_size, ..., drop_path_rate: see `models_vit.ViTEncoder`.
    init_values: initial value of the layer scales.
    pretraining: truncate the normal distribution of the initial weights at one sigma. As in the release, this is not
        done in fine-tuning.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        init_values: float = 0.1,
        pretraining: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        self.add_embedding(img_size, patch_size, in_chans, embed_dim, mlp_ratio)
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.num_tokens, embed_dim))  # class token first
        self.blocks = nn.ModuleList()
        for drop_path in drop_path_rates(drop_path_rate, depth):
            self.blocks.append(RelativeBlock(embed_dim, num_heads, mlp_ratio, drop_path, init_values))
        self.norm = layer_norm(embed_dim)
        limit = 2.0
        if pretraining:
            limit = 0.02
        init_weights_simmim(self, limit)
        nn.init.trunc_normal_(self.pos_embed, std=0.02, a=-limit, b=limit)

    def no_weight_decay(self) -> set[str]:
        """Returns the parameters without weight decay, beside the 1-D ones."""
        return {"cls_token", "pos_embed"}


class AbsoluteVisionTransformer(Classifier, AbsoluteViTEncoder):
    """The encoder with a classification head, as AMT fine-tunes it.

    num_classes, global_pool, probe: see `models_vit.Classifier`. kwargs: arguments of `AbsoluteViTEncoder`.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        global_pool: str = "avg",
        probe: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretraining=False, **kwargs)
        self.add_head(num_classes, global_pool, probe, std=0.02 * 0.001)


absolute_vit_micro_patch4 = partial(AbsoluteVisionTransformer, **MICRO)
absolute_vit_mini_patch4 = partial(AbsoluteVisionTransformer, **MINI)
absolute_vit_base_patch16 = partial(AbsoluteVisionTransformer, **BASE)
