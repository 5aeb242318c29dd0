"""MAE (He et al., CVPR 2022) with PR-MIM: an asymmetric encoder-decoder that reconstructs the pixels of masked patches.

`throw_ratio=0` is MAE; with `progressive=False` it is MAE with plain partial reconstruction.
"""

from framework import PixelFramework
from models_vit import BASE, HUGE, LARGE, MICRO, MINI, SMALL, TINY, ViTEncoder
from prmim import ProgressiveDecoder, TokenCounts, TokenOrder
from util.run.checkpoint import load_strict

__all__ = [
    "MaskedAutoencoderViT",
    "mae_vit_micro_patch4",
    "mae_vit_mini_patch4",
    "mae_vit_tiny_patch16",
    "mae_vit_small_patch16",
    "mae_vit_base_patch16",
    "mae_vit_large_patch16",
    "mae_vit_huge_patch14",
]

# Parameter names of MAE's releases -> ours.
OFFICIAL_NAMES = {
    "mask_token": "decoder.mask_token",
    "decoder_pos_embed": "decoder.pos_embed",
    "decoder_embed.": "decoder.embed.",
    "decoder_blocks.": "decoder.blocks.",
    "decoder_norm.": "decoder.norm.",
    "decoder_pred.": "decoder.pred.",
}


class MaskedAutoencoderViT(PixelFramework, ViTEncoder):
    """A ViT encoder that owns a progressive decoder. Arguments are MAE's, then PR-MIM's (see `prmim`)."""

    def __init__(
        self,
        img_size=224,
        patch_size=16,
        in_chans=3,
        embed_dim=1024,
        depth=24,
        num_heads=16,
        decoder_embed_dim=512,
        decoder_depth=8,
        decoder_num_heads=16,
        mlp_ratio=4.0,
        norm_pix_loss=False,
        mask_ratio=0.75,
        throw_ratio=0.5,
        progressive=True,
        kernel_size=7,
        aggregation="dwconv",
        applies_to="thrown",
    ):
        super().__init__(img_size, patch_size, in_chans, embed_dim, depth, num_heads, mlp_ratio)
        self.norm_pix_loss = norm_pix_loss
        self.counts = TokenCounts.from_ratios(self.num_tokens, mask_ratio, throw_ratio)
        self.decoder = ProgressiveDecoder(
            self.grid_size,
            self.counts,
            embed_dim,
            head=patch_size**2 * in_chans,
            decoder_embed_dim=decoder_embed_dim,
            decoder_depth=decoder_depth,
            decoder_num_heads=decoder_num_heads,
            mlp_ratio=mlp_ratio,
            progressive=progressive,
            kernel_size=kernel_size,
            aggregation=aggregation,
            applies_to=applies_to,
        )

    def forward(self, imgs, ids_shuffle):
        """imgs [B, C, H, W], normalised, and ids_shuffle int64 [B, N] -> {"pixel": scalar loss}."""
        order = TokenOrder(ids_shuffle, self.counts)
        patches = self.cut(imgs)  # [B, N, p*p*C]
        pred = self.decoder(self.forward_encoder(patches, order), order)  # [B, num_supervised, p*p*C]
        return {"pixel": self.error(pred, patches, order).square().mean()}

    def forward_encoder(self, patches, order):
        """All patches [B, N, p*p*C] -> latent of the visible ones [B, 1 + num_visible, D], class token first."""
        tokens = self.patch_embed(order.take_visible(patches)) + order.take_visible(self.pos_embed[:, 1:])
        return self.norm(self.encode(tokens))

    def predict_all(self, imgs, order):
        latent = self.forward_encoder(self.cut(imgs), order)
        return self.decoder.predict(self.decoder.reconstruct(latent, order))

    def load_official(self, state_dict):
        """Loads the weights of MAE's `mae_pretrain_vit_*_full` releases: their content, or its `model` dict.

        Strict, apart from the aggregator, which MAE does not have. ValueError names missing, unexpected and mis-shaped
        keys: the encoder-only files, for instance, lack the decoder.
        """
        renamed = {}
        for name, value in state_dict.get("model", state_dict).items():
            prefix = next((old for old in OFFICIAL_NAMES if name.startswith(old)), "")
            renamed[OFFICIAL_NAMES.get(prefix, "") + name[len(prefix) :]] = value
        load_strict(self, renamed, "MAE weights", optional="aggregation.")


def mae_vit_micro_patch4(**kwargs):
    decoder = dict(decoder_embed_dim=64, decoder_depth=4, decoder_num_heads=2)
    return MaskedAutoencoderViT(**{**MICRO, **decoder, **kwargs})


def mae_vit_mini_patch4(**kwargs):
    decoder = dict(decoder_embed_dim=128, decoder_depth=4, decoder_num_heads=4)
    return MaskedAutoencoderViT(**{**MINI, **decoder, **kwargs})


def mae_vit_tiny_patch16(**kwargs):
    return MaskedAutoencoderViT(**{**TINY, **kwargs})


def mae_vit_small_patch16(**kwargs):
    return MaskedAutoencoderViT(**{**SMALL, **kwargs})


def mae_vit_base_patch16(**kwargs):
    return MaskedAutoencoderViT(**{**BASE, **kwargs})


def mae_vit_large_patch16(**kwargs):
    return MaskedAutoencoderViT(**{**LARGE, **kwargs})


def mae_vit_huge_patch14(**kwargs):
    return MaskedAutoencoderViT(**{**HUGE, **kwargs})
