"""MFF (Liu et al., ICCV 2023) with PR-MIM: MAE whose decoder reads a learned mixture of several blocks' outputs.

Low-level features reach the decoder directly, so the encoder's last blocks need not carry pixels to it. Decoder,
target, loss and throwing are those of MAE with PR-MIM. Fine-tuning drops the fusion, and the encoder is a plain ViT.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from encoders.names import from_mmpretrain
from models_mae_pr import MaskedAutoencoderViT
from models_vit import BASE, MICRO, MINI, init_weights

__all__ = ["MFFMaskedAutoencoderViT", "mff_vit_micro_patch4", "mff_vit_mini_patch4", "mff_vit_base_patch16"]


class MFFMaskedAutoencoderViT(MaskedAutoencoderViT):
    """MAE with PR-MIM and fused levels.

    fused_blocks: numbers of the blocks (from 0) whose outputs are mixed. They increase and include the last block. The
        default is every second block and the last, for ViT-B 0, 2, 4, 6, 8 and 11 as in the release.
    decoder_embed_dim, ..., applies_to: see `MaskedAutoencoderViT`.
    """

    release = "MFF"
    compiled_methods = (*MaskedAutoencoderViT.compiled_methods, "mix")

    def __init__(
        self,
        fused_blocks: Sequence[int] | None = None,
        decoder_embed_dim: int = 512,
        decoder_depth: int = 8,
        decoder_num_heads: int | None = None,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 1024,
        depth: int = 24,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        num_cls_tokens: int = 1,
        learned_pos_embed: bool = False,
        registers: bool = False,
        rotary: bool = False,
        layer_scale: bool = False,
        norm_pix_loss: bool = False,
        mask_unit: int = 1,
        has_invalid: bool = False,
        mask_ratio: float = 0.75,
        throw_ratio: float = 0.5,
        progressive: bool = True,
        kernel_size: int = 7,
        aggregation: str = "dwconv",
        applies_to: str = "thrown",
    ) -> None:
        super().__init__(
            decoder_embed_dim=decoder_embed_dim,
            decoder_depth=decoder_depth,
            decoder_num_heads=decoder_num_heads,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            drop_path_rate=drop_path_rate,
            num_cls_tokens=num_cls_tokens,
            learned_pos_embed=learned_pos_embed,
            registers=registers,
            rotary=rotary,
            layer_scale=layer_scale,
            norm_pix_loss=norm_pix_loss,
            mask_unit=mask_unit,
            has_invalid=has_invalid,
            mask_ratio=mask_ratio,
            throw_ratio=throw_ratio,
            progressive=progressive,
            kernel_size=kernel_size,
            aggregation=aggregation,
            applies_to=applies_to,
        )
        if fused_blocks is None:
            last = depth - 1
            fused_blocks = [*range(0, last - 1, 2), last]
        self.fused_blocks = tuple(fused_blocks)
        self.proj_layers = nn.ModuleList()  # of all fused levels but the last, which enters the mixture as it is
        for _ in self.fused_blocks[:-1]:
            self.proj_layers.append(nn.Linear(embed_dim, embed_dim))
        self.proj_weights = nn.Parameter(torch.ones(len(self.fused_blocks), 1, 1, 1))
        init_weights(self.proj_layers)

    def encode(self, tokens: Tensor, relative: Tensor | None = None) -> Tensor:
        """Runs the blocks on embedded tokens with positions [B, n, D], and mixes the levels to [B, 1 + n, D]."""
        x = self.prepend_cls_token(tokens)
        projections = iter(self.proj_layers)
        levels: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x = block(x, relative)
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
        return self.norm(super().encode(self.embed(imgs), self.relative_positions(size=imgs.shape[-2:])))

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
