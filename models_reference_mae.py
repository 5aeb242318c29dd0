"""MAE's training step with the maths of the reference, which `profile_pretrain.py --against reference` times beside ours.

Written from the paper and from what is known of the reference: timm's blocks with the attention as three explicit operations
(as in the timm 0.3.2 that it pins), all patches embedded by a convolution and three quarters of them dropped, masks drawn on
the device, all tokens predicted, normalised float32 images as input, AdamW in a loop over parameters as torch runs it by default,
and a loss that is read after each step. Parameter names are MAE's: `load_official` takes its weights.
"""

import torch
from timm.models.vision_transformer import Block
from torch import nn

from models_vit import BASE, HUGE, LARGE, layer_norm, patchify

SIZES = {"mae_vit_base_patch16": BASE, "mae_vit_large_patch16": LARGE, "mae_vit_huge_patch14": HUGE}


def blocks(dim, depth, num_heads):
    made = nn.ModuleList(Block(dim, num_heads, qkv_bias=True, norm_layer=nn.LayerNorm) for _ in range(depth))
    for block in made:
        block.attn.fused_attn = False
        block.norm1.eps = block.norm2.eps = 1e-6
    return made


class ReferenceMAE(nn.Module):
    """`model(imgs, ids_shuffle) -> loss`; without ids_shuffle it draws them."""

    def __init__(self, img_size=224, patch_size=16, embed_dim=768, depth=12, num_heads=12, mask_ratio=0.75):
        super().__init__()
        self.patch_size, self.num_tokens = patch_size, (img_size // patch_size) ** 2
        self.num_visible = int(self.num_tokens * (1 - mask_ratio))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, embed_dim, patch_size, patch_size)})
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + self.num_tokens, embed_dim), requires_grad=False)
        self.blocks, self.norm = blocks(embed_dim, depth, num_heads), layer_norm(embed_dim)
        self.decoder_embed = nn.Linear(embed_dim, 512)
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, 512))
        self.decoder_pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + self.num_tokens, 512), requires_grad=False)
        self.decoder_blocks, self.decoder_norm = blocks(512, 8, 16), layer_norm(512)
        self.decoder_pred = nn.Linear(512, 3 * patch_size**2)

    def forward(self, imgs, ids_shuffle=None):
        """imgs [B, 3, H, W] float32, normalised -> scalar: the mean squared error over masked, normalised patches."""
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


def take(x, ids):
    return x.gather(1, ids[..., None].expand(-1, -1, x.shape[-1]))
