"""MAE (He et al., CVPR 2022) with PR-MIM: an asymmetric encoder-decoder that reconstructs the pixels of masked patches.

`throw_ratio=0` is MAE itself. `progressive=False` is MAE with plain partial reconstruction.
"""

from collections.abc import Mapping
from typing import Any

import torch

from encoders.names import rename_prefixes
from framework import PixelFramework, add_decoder_flags, decoder_heads, token_counts
from models_vit import BASE, HUGE, LARGE, MICRO, MINI, NANO, SMALL, TINY, ViTEncoder
from prmim import ProgressiveDecoder, TokenOrder
from util.run.checkpoint import load_strict

__all__ = [
    "MaskedAutoencoderViT",
    "mae_vit_nano_patch4",
    "mae_vit_micro_patch4",
    "mae_vit_mini_patch4",
    "mae_vit_tiny_patch16",
    "mae_vit_small_patch16",
    "mae_vit_base_patch16",
    "mae_vit_large_patch16",
    "mae_vit_huge_patch14",
]

add_flags = add_decoder_flags

# Prefixes of parameter names in MAE's releases, and the ones here.
OFFICIAL_NAMES = {
    "mask_token": "decoder.mask_token",
    "decoder_pos_embed": "decoder.pos_embed",
    "decoder_embed.": "decoder.embed.",
    "decoder_blocks.": "decoder.blocks.",
    "decoder_norm.": "decoder.norm.",
    "decoder_pred.": "decoder.pred.",
}


class MaskedAutoencoderViT(PixelFramework, ViTEncoder):
    """A ViT encoder that owns a progressive decoder. The arguments are MAE's, followed by PR-MIM's.

    img_size, patch_size, in_chans, embed_dim, depth, num_heads, mlp_ratio: the encoder, see `models_vit.ViTEncoder`.
    decoder_embed_dim, decoder_depth, decoder_num_heads: the decoder's blocks, by default with one head per 32 channels.
        `mlp_ratio` is the same as the encoder's.
    norm_pix_loss: normalise the target pixels of each patch by their mean and variance.
    mask_ratio, throw_ratio: shares of all tokens that are masked and thrown.
    progressive, kernel_size, aggregation, applies_to: see `prmim.ProgressiveDecoder`.
    mask_unit: side, in tokens, of the squares that are masked as a whole. Throwing stays per token.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 1024,
        depth: int = 24,
        num_heads: int = 16,
        decoder_embed_dim: int = 512,
        decoder_depth: int = 8,
        decoder_num_heads: int | None = None,
        mlp_ratio: float = 4.0,
        norm_pix_loss: bool = False,
        mask_ratio: float = 0.75,
        throw_ratio: float = 0.5,
        progressive: bool = True,
        kernel_size: int = 7,
        aggregation: str = "dwconv",
        applies_to: str = "thrown",
        mask_unit: int = 1,
    ) -> None:
        super().__init__(img_size, patch_size, in_chans, embed_dim, depth, num_heads, mlp_ratio)
        self.norm_pix_loss, self.mask_unit = norm_pix_loss, mask_unit
        self.counts = token_counts(self.grid_size, mask_ratio, throw_ratio, mask_unit)
        self.decoder = ProgressiveDecoder(
            self.grid_size,
            self.counts,
            embed_dim,
            head=patch_size**2 * in_chans,
            decoder_embed_dim=decoder_embed_dim,
            decoder_depth=decoder_depth,
            decoder_num_heads=decoder_heads(decoder_embed_dim, decoder_depth, decoder_num_heads),
            mlp_ratio=mlp_ratio,
            progressive=progressive,
            kernel_size=kernel_size,
            aggregation=aggregation,
            applies_to=applies_to,
        )

    def own_settings(self) -> dict[str, Any]:
        """Returns the sizes of the decoder and of the masked squares, resolved, by the names of their flags."""
        return {
            "decoder_depth": len(self.decoder.blocks),
            "decoder_embed_dim": self.decoder.embed.out_features,
            "decoder_num_heads": self.decoder.blocks[0].attn.num_heads,
            "mask_unit": self.mask_unit,
        }

    def forward(self, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns {"pixel": scalar loss} of normalised images [B, C, H, W] with ids_shuffle int64 [B, N]."""
        order = TokenOrder(ids_shuffle, self.counts)
        patches = self.cut(imgs)  # [B, N, p*p*C]
        pred = self.decoder(self.forward_encoder(patches, order), order)  # [B, num_supervised, p*p*C]
        return {"pixel": self.error(pred, patches, order).square().mean()}

    def forward_encoder(self, patches: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Encodes the visible ones of all patches [B, N, p*p*C]. Returns [B, 1 + num_visible, D], class token first."""
        tokens = self.patch_embed(order.take_visible(patches)) + order.take_visible(self.pos_embed[:, 1:])
        return self.norm(self.encode(tokens))

    def predict_all(self, imgs: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Predicts all tokens [B, N, p*p*C] in token order. Plain partial reconstruction predicts the kept ones."""
        latent = self.forward_encoder(self.cut(imgs), order)
        return self.decoder.predict(self.decoder.reconstruct(latent, order))

    def load_official(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the weights of MAE's `mae_pretrain_vit_*_full` files.

        state_dict: the content of a file, or its `model` dict.

        All keys must match, except that MAE has no aggregation. Raises ValueError, which names missing, unexpected and
        mis-shaped keys, for example for the encoder-only files, which lack the decoder.
        """
        renamed = rename_prefixes(state_dict.get("model", state_dict), OFFICIAL_NAMES)
        load_strict(self, renamed, "MAE weights", optional="aggregation.")


def mae_vit_nano_patch4(**kwargs: Any) -> MaskedAutoencoderViT:
    decoder = dict(decoder_embed_dim=64, decoder_depth=2)
    return MaskedAutoencoderViT(**{**NANO, **decoder, **kwargs})


def mae_vit_micro_patch4(**kwargs: Any) -> MaskedAutoencoderViT:
    decoder = dict(decoder_embed_dim=64, decoder_depth=4)
    return MaskedAutoencoderViT(**{**MICRO, **decoder, **kwargs})


def mae_vit_mini_patch4(**kwargs: Any) -> MaskedAutoencoderViT:
    decoder = dict(decoder_embed_dim=128, decoder_depth=4)
    return MaskedAutoencoderViT(**{**MINI, **decoder, **kwargs})


def mae_vit_tiny_patch16(**kwargs: Any) -> MaskedAutoencoderViT:
    return MaskedAutoencoderViT(**{**TINY, **kwargs})


def mae_vit_small_patch16(**kwargs: Any) -> MaskedAutoencoderViT:
    return MaskedAutoencoderViT(**{**SMALL, **kwargs})


def mae_vit_base_patch16(**kwargs: Any) -> MaskedAutoencoderViT:
    return MaskedAutoencoderViT(**{**BASE, **kwargs})


def mae_vit_large_patch16(**kwargs: Any) -> MaskedAutoencoderViT:
    return MaskedAutoencoderViT(**{**LARGE, **kwargs})


def mae_vit_huge_patch14(**kwargs: Any) -> MaskedAutoencoderViT:
    return MaskedAutoencoderViT(**{**HUGE, **kwargs})
