"""MFF (Liu et al., ICCV 2023) with PR-MIM: MAE whose decoder sees a learned mixture of several blocks' outputs.

Low levels reach the decoder directly, so that the encoder's last blocks need not carry pixels to it. Decoder, target and
loss are MAE's, and so is what PR-MIM throws. Fine-tuning drops the fusion: the encoder is a plain ViT.
"""

import torch
from torch import nn

from models_mae_pr import MaskedAutoencoderViT
from models_vit import BASE, MICRO, MINI, init_weights
from util.key_names import from_mmpretrain
from util.run.checkpoint import load_strict

__all__ = ["MFFMaskedAutoencoderViT", "mff_vit_micro_patch4", "mff_vit_mini_patch4", "mff_vit_base_patch16"]


class MFFMaskedAutoencoderViT(MaskedAutoencoderViT):
    """MAE with PR-MIM and fused levels.

    fused_blocks: numbers of the blocks (from 0) whose outputs are mixed, increasing, the last block among them; by default
    every second one and the last, which are the release's 0, 2, 4, 6, 8, 11 of ViT-B.
    """

    def __init__(self, fused_blocks=None, progressive=True, kernel_size=7, aggregation="dwconv", applies_to="thrown", **kwargs):
        super().__init__(progressive=False, **kwargs)
        last = len(self.blocks) - 1
        self.fused_blocks = tuple([*range(0, last - 1, 2), last] if fused_blocks is None else fused_blocks)
        if sorted({*self.fused_blocks}) != list(self.fused_blocks) or self.fused_blocks[-1:] != (last,) or self.fused_blocks[0] < 0:
            raise ValueError(f"fused_blocks must increase from 0 or more to the last block {last}, got {self.fused_blocks}")
        # All levels but the last are projected; the last goes in as it is.
        self.proj_layers = nn.ModuleList(nn.Linear(self.embed_dim, self.embed_dim) for _ in self.fused_blocks[:-1])
        self.proj_weights = nn.Parameter(torch.ones(len(self.fused_blocks), 1, 1, 1))
        init_weights(self.proj_layers)
        if progressive:
            self.decoder.add_aggregation(kernel_size, aggregation, applies_to)

    def encode(self, tokens):
        """Embedded tokens with positions [B, n, D] -> the levels' mixture [B, 1 + n, D], class token first, before the norm."""
        x, levels = self.prepend_cls_token(tokens), []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i in self.fused_blocks:
                levels.append(self.proj_layers[len(levels)](x) if i < len(self.blocks) - 1 else x)
        return (self.proj_weights.softmax(dim=0) * torch.stack(levels)).sum(dim=0)

    def no_weight_decay(self):
        """The release's optimizer leaves the two tokens alone, but not the fusion's logits."""
        return {"cls_token", "decoder.mask_token"}

    def load_official(self, state_dict):
        """Loads the weights of MFF's releases: their content, or its `state_dict`.

        Strict, apart from the aggregator. The position tables come from the file: MFF's put rows before columns, and ours,
        like MAE's, columns before rows. ValueError names missing, unexpected and mis-shaped keys.
        """
        renamed = from_mmpretrain(state_dict.get("state_dict", state_dict))
        load_strict(self, renamed, "MFF weights", optional="aggregation.")


def mff_vit_micro_patch4(**kwargs):
    decoder = dict(decoder_embed_dim=64, decoder_depth=4, decoder_num_heads=2)
    return MFFMaskedAutoencoderViT(**{**MICRO, **decoder, **kwargs})


def mff_vit_mini_patch4(**kwargs):
    decoder = dict(decoder_embed_dim=128, decoder_depth=4, decoder_num_heads=4)
    return MFFMaskedAutoencoderViT(**{**MINI, **decoder, **kwargs})


def mff_vit_base_patch16(**kwargs):
    return MFFMaskedAutoencoderViT(**{**BASE, **kwargs})
