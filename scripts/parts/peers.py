"""MAE in the code of others, for a comparison of steps: both are called as a framework, and draw their own tokens."""

from functools import partial
from typing import Any

import torch
from timm.models.vision_transformer import Block, PatchEmbed
from torch import Tensor, nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from models_mae_pr import MaskedAutoencoderViT
from models_vit import patchify


class TimmMAE(nn.Module):
    """A stand-in for MAE's release: its network with timm's layers. It takes over the weights of `mae`.

    As in the release: the layers and their order; all patches are embedded, and the visible ones gathered; the noise is
    drawn and sorted on the device; the decoder has all tokens, in raster order; targets are normalised and losses made
    for all tokens, and those of masked tokens averaged.

    Not as in the release: no line is from there; the blocks are those of today's timm, with fused attention; data,
    precision, gradient norm and optimizer are those of the step here.
    """

    def __init__(self, mae: MaskedAutoencoderViT) -> None:
        super().__init__()
        self.num_visible = mae.counts.num_visible
        self.patch_embed = PatchEmbed(mae.img_size, mae.patch_size, mae.in_chans, mae.embed_dim)
        self.patch_embed.load_state_dict(mae.patch_embed.state_dict())
        self.blocks = timm_blocks(mae.blocks)
        self.decoder_blocks = timm_blocks(mae.decoder.blocks)
        del mae.patch_embed, mae.blocks, mae.decoder.blocks
        self.mae = mae  # single tokens, positions, norms and linear layers

    def forward(self, imgs: Tensor, ids_shuffle: Tensor) -> dict[str, Tensor]:
        noise = torch.rand(ids_shuffle.shape, device=imgs.device)
        return {"pixel": self.forward_loss(imgs, noise)}

    def forward_loss(self, imgs: Tensor, noise: Tensor) -> Tensor:
        """Returns the loss, if the tokens with the least noise [B, N] are visible."""
        ids_shuffle = noise.argsort(dim=1).unsqueeze(-1)
        ids_restore = ids_shuffle.argsort(dim=1)
        positions: Any = self.mae.pos_embed
        x = self.patch_embed(imgs) + positions[:, 1:]
        x = x.take_along_dim(ids_shuffle[:, : self.num_visible], dim=1)
        cls_token = self.mae.cls_token + positions[:, :1]
        x = torch.cat([cls_token.expand(len(x), -1, -1), x], dim=1)
        x = self.mae.norm(self.blocks(x))

        decoder = self.mae.decoder
        x = decoder.embed(x)
        mask_tokens = decoder.mask_token.expand(len(x), noise.shape[1] - self.num_visible, -1)
        tokens = torch.cat([x[:, 1:], mask_tokens], dim=1).take_along_dim(ids_restore, dim=1)
        x = torch.cat([x[:, :1], tokens], dim=1) + decoder.pos_embed
        x = decoder.pred(decoder.norm(self.decoder_blocks(x)))

        target = patchify(imgs, self.mae.patch_size)
        var, mean = torch.var_mean(target, dim=-1, keepdim=True)
        target = (target - mean) / (var + 1e-6) ** 0.5
        loss = ((x[:, 1:] - target) ** 2).mean(dim=-1, keepdim=True)  # [B, N, 1]
        mask = (ids_restore >= self.num_visible).float()
        return (loss * mask).sum() / mask.sum()


def timm_blocks(blocks: nn.ModuleList) -> nn.Sequential:
    """Returns timm's blocks with the weights of these."""
    made = nn.Sequential()
    for block in blocks:
        norm_layer = partial(nn.LayerNorm, eps=1e-6)
        attention = block.attn
        made.append(Block(attention.qkv.in_features, attention.num_heads, qkv_bias=True, norm_layer=norm_layer))
    made.load_state_dict(blocks.state_dict())
    return made


class TransformersMAE(ViTMAEForPreTraining):
    """Transformers' MAE with its own weights and the sizes of `mae`."""

    def __init__(self, mae: MaskedAutoencoderViT) -> None:
        config = ViTMAEConfig(
            hidden_size=mae.embed_dim,
            num_hidden_layers=len(mae.blocks),
            num_attention_heads=mae.blocks[0].attn.num_heads,
            intermediate_size=4 * mae.embed_dim,
            image_size=mae.img_size[0],
            patch_size=mae.patch_size,
            decoder_num_attention_heads=mae.decoder_num_heads,
            decoder_hidden_size=mae.decoder_embed_dim,
            decoder_num_hidden_layers=mae.decoder_depth,
            decoder_intermediate_size=4 * mae.decoder_embed_dim,
            mask_ratio=mae.method.mask_ratio,
            norm_pix_loss=True,
            attn_implementation="sdpa",
        )
        super().__init__(config)

    def forward(self, imgs: Tensor, ids_shuffle: Tensor) -> dict[str, Tensor]:
        return {"pixel": super().forward(imgs).loss}


PEERS: dict[str, Any] = {"timm": TimmMAE, "transformers": TransformersMAE}
