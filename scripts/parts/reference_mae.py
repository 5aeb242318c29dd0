"""MAE as its reference implementation computes it, for timing (`scripts/profile_pretrain.py --against reference`).

It is written from the paper and from what is known of the reference. The blocks are timm's, with attention as three
explicit operations, as in timm 0.3.2. A convolution embeds all patches, and the masked ones are then dropped. Masks are
drawn on the device. All tokens are predicted. Parameter names are MAE's, so this model and
`models_mae_pr.MaskedAutoencoderViT.load_official` exchange weights. The script's `ReferenceStep` is the rest of the
reference's training step.
"""

from typing import Any

import torch
from timm.models.vision_transformer import Block
from torch import nn

from models_vit import BASE, HUGE, LARGE, layer_norm, patchify

SIZES: dict[str, Any] = {"mae_vit_base_patch16": BASE, "mae_vit_large_patch16": LARGE, "mae_vit_huge_patch14": HUGE}


def make_blocks(dim: int, depth: int, num_heads: int) -> nn.ModuleList:
    """Returns timm's blocks with unfused attention and MAE's epsilon."""
    blocks = nn.ModuleList(Block(dim, num_heads, qkv_bias=True, norm_layer=nn.LayerNorm) for _ in range(depth))
    for block in blocks:
        block.attn.fused_attn = False
        block.norm1.eps = block.norm2.eps = 1e-6
    return blocks


class ReferenceMAE(nn.Module):
    """MAE for square RGB images: `model(imgs)` draws the masks and returns the loss.

    img_size, patch_size, embed_dim, depth, num_heads: the encoder, see `models_vit.ViTEncoder`. The decoder is MAE's
        default: 8 blocks of width 512 with 16 heads.
    mask_ratio: share of all tokens that are masked.
    """

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mask_ratio: float = 0.75,
    ) -> None:
        super().__init__()
        self.patch_size, self.num_tokens = patch_size, (img_size // patch_size) ** 2
        self.num_visible = int(self.num_tokens * (1 - mask_ratio))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, embed_dim, patch_size, patch_size)})
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + self.num_tokens, embed_dim), requires_grad=False)
        self.blocks, self.norm = make_blocks(embed_dim, depth, num_heads), layer_norm(embed_dim)
        self.decoder_embed = nn.Linear(embed_dim, 512)
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, 512))
        self.decoder_pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + self.num_tokens, 512), requires_grad=False)
        self.decoder_blocks, self.decoder_norm = make_blocks(512, 8, 16), layer_norm(512)
        self.decoder_pred = nn.Linear(512, 3 * patch_size**2)

    def forward(self, imgs: torch.Tensor, ids_shuffle: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the mean squared error over masked patches of normalised images [B, 3, H, W], float32.

        Targets are normalised per patch. ids_shuffle, int64 [B, N], is drawn at random if it is not given.
        """
        if ids_shuffle is None:
            ids_shuffle = torch.rand(len(imgs), self.num_tokens, device=imgs.device).argsort(dim=1)
        ids_restore = ids_shuffle.argsort(dim=1)
        tokens = self.patch_embed["proj"](imgs).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:]  # all [B, N, D]
        x = take(tokens, ids_shuffle[:, : self.num_visible])
        x = torch.cat([(self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(self.norm(x))
        masked = self.mask_token.expand(len(x), self.num_tokens - self.num_visible, -1)
        restored = take(torch.cat([x[:, 1:], masked.to(x.dtype)], dim=1), ids_restore)
        x = torch.cat([x[:, :1], restored], dim=1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            x = block(x)
        pred = self.decoder_pred(self.decoder_norm(x))[:, 1:]  # [B, N, p*p*3]
        target = patchify(imgs, self.patch_size)
        target = (target - target.mean(dim=-1, keepdim=True)) / (target.var(dim=-1, keepdim=True) + 1e-6).sqrt()
        mask = (ids_restore >= self.num_visible).float()
        return (((pred - target) ** 2).mean(dim=-1) * mask).sum() / mask.sum()


def take(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gathers tokens [B, N, C] at ids [B, n]. Returns [B, n, C]."""
    return x.gather(1, ids[..., None].expand(-1, -1, x.shape[-1]))
