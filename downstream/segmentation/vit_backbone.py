"""The ViT of dense tasks: features of several blocks as maps, and pre-trained encoders that fit into it.

Every block has a table of relative-position biases, which begins at 0, and layer scales, which begin at 1. So the
network begins as the plain ViT that was pre-trained (Bao et al., ICLR 2022; He et al., CVPR 2022).
"""

import torch
from torch import Tensor, nn

from encoders.models_relative_vit import RelativeBlock
from encoders.names import Tensors, rename, split_key_bias
from models_vit import ViTEncoder, drop_path_rates, init_weights
from models_vit import layer_norm as make_layer_norm
from util.pos_embed import sincos_pos_embed


class DenseViT(ViTEncoder):
    """A ViT with a trainable position table, relative-position biases and layer scales.

    img_size, ..., registers: see `models_vit.ViTEncoder`.
    out_blocks: numbers of the blocks, from 0, whose tokens are returned (default: the last one).
    final_norm: apply the encoder's final norm to the returned tokens.

    Keys have no bias here: it would add the same number to all logits of a query, which the softmax ignores.
    """

    new_keys = ("relative_position_bias_table", "gamma_1", "gamma_2")

    def __init__(
        self,
        img_size: int | tuple[int, int] = 512,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        num_cls_tokens: int = 1,
        registers: bool = False,
        out_blocks: tuple[int, ...] | None = None,
        final_norm: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.add_embedding(img_size, patch_size, in_chans, embed_dim, mlp_ratio, num_cls_tokens)
        self.registers = registers
        self.out_blocks = out_blocks or (depth - 1,)
        table = sincos_pos_embed(embed_dim, self.grid_size, num_prefix=num_cls_tokens).float()
        self.pos_embed = nn.Parameter(table.unsqueeze(0))  # [1, P + N, D]
        self.blocks = nn.ModuleList()
        for rate in drop_path_rates(drop_path_rate, depth):
            block = RelativeBlock(
                embed_dim,
                num_heads,
                mlp_ratio,
                rate,
                init_values=1.0,
                grid_size=self.grid_size,
                num_cls_tokens=num_cls_tokens,
            )
            self.blocks.append(block)
        self.norm: nn.Module = nn.Identity()
        self.unused_keys: tuple[str, ...] = ("norm.",)
        if final_norm:
            self.norm = make_layer_norm(embed_dim)
            self.unused_keys = ()
        init_weights(self)
        nn.init.normal_(self.cls_token, std=0.02)

    def adapt_weights(self, tensors: Tensors) -> Tensors:
        """Returns an encoder's weights under the names here: no bias of keys. SimMIM's positions become 0."""
        adapted = rename(split_key_bias(tensors), [(r"\.ls([12])\.gamma$", r".gamma_\1")])
        if "pos_embed" not in adapted and any(name.endswith("relative_position_bias_table") for name in adapted):
            adapted["pos_embed"] = torch.zeros_like(self.pos_embed)
        return adapted

    def forward(self, imgs: Tensor) -> list[Tensor]:
        """Returns a map [B, D, rows, columns] for each of `out_blocks`. imgs: normalised images [B, C, H, W]."""
        x = self.prepend_cls_token(self.embed(imgs))
        maps = {}
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in self.out_blocks:
                tokens = self.norm(x)[:, self.num_cls_tokens :].transpose(1, 2)
                maps[number] = tokens.unflatten(2, self.grid_size).contiguous()
        return [maps[number] for number in self.out_blocks]


def pyramid_blocks(depth: int) -> tuple[int, int, int, int]:
    """Returns the blocks after 1/3, 1/2, 2/3 and all of the depth, counted from 0: 3, 5, 7 and 11 of ViT-B."""
    return depth // 3 - 1, depth // 2 - 1, 2 * depth // 3 - 1, depth - 1
