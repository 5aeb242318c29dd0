"""MFF (Liu et al., ICCV 2023) with PR-MIM: MAE whose decoder reads a learned mixture of several blocks' outputs.

Low-level features reach the decoder directly, so the encoder's last blocks need not carry pixels to it. Decoder,
target, loss and throwing are those of MAE with PR-MIM. Fine-tuning drops the fusion, and the encoder is a plain ViT.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from encoders.names import from_mmpretrain
from framework import check_blocks
from models_mae_pr import MaskedAutoencoderViT
from models_vit import BASE, MICRO, MINI, init_weights, run_block

__all__ = ["MFFMaskedAutoencoderViT", "mff_vit_micro_patch4", "mff_vit_mini_patch4", "mff_vit_base_patch16"]


class MFFMaskedAutoencoderViT(MaskedAutoencoderViT):
    """MAE with PR-MIM and fused levels.

    fused_blocks: numbers of the blocks (from 0) whose outputs are mixed. They increase and include the last block. The
        default is every second block and the last, for ViT-B 0, 2, 4, 6, 8 and 11 as in the release.
    arguments: those of `MaskedAutoencoderViT`.
    """

    release = "MFF"
    compiled_methods = (*MaskedAutoencoderViT.compiled_methods, "mix")

    def __init__(
        self,
        fused_blocks: Sequence[int] | None = None,
        **arguments: Any,
    ) -> None:
        self.given_blocks = fused_blocks  # for `add_layers`, which MAE's constructor calls
        super().__init__(**arguments)

    def add_layers(self) -> None:
        """Adds the projections of all fused levels but the last, which enters the mixture as it is, and the mixture."""
        last = len(self.blocks) - 1
        blocks = self.given_blocks
        if blocks is None:
            blocks = [*range(0, last - 1, 2), last]
        self.fused_blocks = check_blocks("fused_blocks", blocks, len(self.blocks))
        self.proj_layers = nn.ModuleList()
        for _ in self.fused_blocks[:-1]:
            self.proj_layers.append(nn.Linear(self.embed_dim, self.embed_dim))
        self.proj_weights = nn.Parameter(torch.ones(len(self.fused_blocks), 1, 1, 1))
        init_weights(self.proj_layers)

    def encode(self, tokens: Tensor, rotation: Tensor | None = None) -> Tensor:
        """Runs the blocks on embedded tokens with positions [B, n, D], and mixes the levels to [B, 1 + n, D]."""
        x = self.prepend_cls_token(tokens)
        projections = iter(self.proj_layers)
        levels: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x = run_block(block, x, rotation)
            if i == len(self.blocks) - 1:
                levels.append(x)
            elif i in self.fused_blocks:
                project = next(projections)
                levels.append(project(x))
        return self.mix(levels)

    def mix(self, levels: list[Tensor]) -> Tensor:
        """Returns the learned mixture of the levels, [B, T, D] each."""
        weights = self.proj_weights.softmax(dim=0)  # [levels, 1, 1, 1]
        return (weights * torch.stack(levels)).sum(dim=0)

    def forward_features(self, imgs: Tensor) -> Tensor:
        """Returns the features of the last block alone, as the encoder is fine-tuned, [B, 1 + N, D] after the norm."""
        return self.norm(super().encode(self.embed(imgs), self.rotation(size=imgs.shape[-2:])))

    def no_weight_decay(self) -> set[str]:
        return {"cls_token", "decoder.mask_token"}  # as in the release: `proj_weights` decay

    def official_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns MFF's weights under the names here.

        The position tables are the release's, too: MFF's encode the row first, those here the column first.
        """
        renamed = from_mmpretrain(weights)
        known = ("backbone.", "neck.", "data_preprocessor.")  # the last are mean and std of the images
        for name, value in weights.items():
            if not name.startswith(known):
                renamed[name] = value
        return renamed


mff_vit_micro_patch4 = partial(MFFMaskedAutoencoderViT, **MICRO, decoder_embed_dim=64, decoder_depth=4)
mff_vit_mini_patch4 = partial(MFFMaskedAutoencoderViT, **MINI, decoder_embed_dim=128, decoder_depth=4)
mff_vit_base_patch16 = partial(MFFMaskedAutoencoderViT, **BASE)
