"""MAE (He et al., CVPR 2022) with PR-MIM: an asymmetric encoder-decoder that reconstructs the pixels of masked patches.

`throw_ratio=0` is MAE itself. `progressive=False` is MAE with plain partial reconstruction.
"""

from functools import partial
from typing import ClassVar

from torch import Tensor

from framework import DECODER_FLAGS, PixelFramework, decoder_heads, rename_prefixes
from models_vit import BASE, HUGE, LARGE, MICRO, MINI, NANO, SMALL, TINY, ViTEncoder
from prmim import Method, ProgressiveDecoder, TokenOrder
from util.flag import Flag

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
    """A ViT encoder that owns a progressive decoder. Without sizes it is MAE's ViT-L. `forward_loss` is inherited.

    decoder_embed_dim, decoder_depth, decoder_num_heads: the decoder's blocks, by default with one head per 32 channels.
        `mlp_ratio` is the same as the encoder's.
    img_size, ..., layer_scale: of the encoder, see `models_vit.ViTEncoder`. norm_pix_loss, ..., has_invalid: see
        `framework.Framework.use_method`. mask_ratio, ..., applies_to: see `prmim.Method`.
    """

    release = "MAE"
    flags: tuple[Flag, ...] = (
        *DECODER_FLAGS,
        Flag("num_cls_tokens", int, help="class tokens of encoder and decoder (default: 1)"),
        Flag(
            "learned_pos_embed",
            bool,
            help="train the positions of encoder and decoder (default: frozen sine-cosine tables)",
        ),
    )
    compiled_methods: ClassVar[tuple[str, ...]] = ("embed_visible", "forward_loss")

    def __init__(
        self,
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
        )
        method = Method(mask_ratio, throw_ratio, progressive, kernel_size, aggregation, applies_to)
        self.use_method(method, norm_pix_loss, mask_unit, has_invalid)
        self.decoder_embed_dim = decoder_embed_dim  # flags, whose values are recorded
        self.decoder_depth = decoder_depth
        self.decoder_num_heads = decoder_heads(decoder_embed_dim, decoder_num_heads)
        self.decoder = ProgressiveDecoder(
            self.grid_size,
            self.embed_dim,
            head=patch_size**2 * in_chans,
            make_aggregation=self.make_aggregation,
            decoder_embed_dim=decoder_embed_dim,
            decoder_depth=decoder_depth,
            decoder_num_heads=self.decoder_num_heads,
            mlp_ratio=mlp_ratio,
            num_prefix=num_cls_tokens,
            learned_pos_embed=learned_pos_embed,
        )

    def forward(self, imgs: Tensor, ids_shuffle: Tensor) -> dict[str, Tensor]:
        """Returns {"pixel": scalar loss} of normalised images [B, C, H, W] with ids_shuffle int64 [B, N]."""
        order = TokenOrder(ids_shuffle, self.counts)
        patches = self.token_pixels(imgs)  # [B, N, p*p*C]
        latent = self.forward_encoder(patches, order)  # [B, P + num_visible, D]
        pred = self.forward_decoder(latent, order)  # [B, num_supervised, p*p*C]
        return {"pixel": self.forward_loss(pred, imgs, patches, order)}

    def forward_encoder(self, patches: Tensor, order: TokenOrder) -> Tensor:
        """Encodes the visible ones of all patches [B, N, p*p*C]. Returns [B, P + num_visible, D], class token first."""
        tokens = self.embed_visible(patches, order.ids_visible)
        return self.norm(self.encode(tokens, self.relative_positions(order.ids_visible)))

    def forward_decoder(self, latent: Tensor, order: TokenOrder, all_tokens: bool = False) -> Tensor:
        """Predicts the supervised tokens, or all, from the latent. Returns [B, n, p*p*C] in token order."""
        return self.decoder(latent, order, all_tokens)

    def official_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights of MAE's `mae_pretrain_vit_*_full`, or of Transformers' ViTMAE, under the names here."""
        from encoders.names import find_origin  # here, because a model needs no other names to be trained

        return self.adapt_weights(find_origin(weights).rename(weights))

    def adapt_weights(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns weights with the names of MAE's releases under the names here, see `encoders.load`."""
        return rename_prefixes(tensors, OFFICIAL_NAMES)


mae_vit_nano_patch4 = partial(MaskedAutoencoderViT, **NANO, decoder_embed_dim=64, decoder_depth=2)
mae_vit_micro_patch4 = partial(MaskedAutoencoderViT, **MICRO, decoder_embed_dim=64, decoder_depth=4)
mae_vit_mini_patch4 = partial(MaskedAutoencoderViT, **MINI, decoder_embed_dim=128, decoder_depth=4)
mae_vit_tiny_patch16 = partial(MaskedAutoencoderViT, **TINY)
mae_vit_small_patch16 = partial(MaskedAutoencoderViT, **SMALL)
mae_vit_base_patch16 = partial(MaskedAutoencoderViT, **BASE)
mae_vit_large_patch16 = partial(MaskedAutoencoderViT, **LARGE)
mae_vit_huge_patch14 = partial(MaskedAutoencoderViT, **HUGE)
