"""The Swin Transformer (Liu et al., ICCV 2021): an encoder for dense or visible tokens, and the fine-tune model.

State-dict names are those of Swin's and SimMIM's releases, in which a stage ends with its `downsample`.

Dense tokens stay on their grid, [B, rows, columns, C], from the patches to the final norm. Visible tokens (GreenMIM,
Huang et al., NeurIPS 2022) belong to whole units, the squares of tokens that become one cell of the last stage. Their
shape is [B, units, side, side, C], and the side halves from stage to stage. Patch merging on a unit is the same as on
an image. Windows do not line up with units, so they become groups of tokens.
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from encoders.rel_pos import grid_coords, lookup_bias, relative_offset_index
from encoders.window_groups import GroupedWindows, WindowGroups, unit_coords
from models_vit import (
    PatchEmbed,
    Sizes,
    check_image_size,
    check_pool,
    drop_path_rates,
    make_drop_path,
    patchify,
)
from util.attention import biased_attention, split_heads
from util.pos_embed import height_and_width

__all__ = ["SwinTransformer", "swin_micro_patch4_window4", "swin_base_patch4_window7", "swin_large_patch4_window14"]


# Micro is ours, for 32-px images.
MICRO: Sizes = dict(img_size=32, embed_dim=48, depths=(2, 4), num_heads=(2, 4), window_size=4)
BASE: Sizes = dict(embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32))
LARGE: Sizes = dict(embed_dim=192, depths=(2, 2, 18, 2), num_heads=(6, 12, 24, 48))


class SwinPatchEmbed(PatchEmbed):
    """Patch embedding with a norm: patches [B, N, p*p*C] become tokens [B, N, D]."""

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__(patch_size, in_chans, embed_dim)
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, patches: Tensor) -> Tensor:
        return self.norm(super().forward(patches))


class WindowAttention(nn.Module):
    """Attention inside windows, with a learned bias for each offset between two tokens."""

    def __init__(self, dim: int, window: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, num_heads))
        index = relative_offset_index(grid_coords(window, window), (window, window))  # [L, L]
        self.register_buffer("relative_position_index", index, persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attends inside W windows of L tokens, [B, W, L, C]. The mask [W, L, L] is added to the logits."""
        return self.proj(self.attend(self.qkv(x), self.relative_position_index, mask))

    def among_visible(self, x: Tensor, groups: WindowGroups) -> Tensor:
        """Attends among visible tokens [B, T, C]. The projections do not run on the padding of the groups."""
        x = self.attend(groups.gather(self.qkv(x)), groups.bias_index, groups.mask)
        return self.proj(groups.scatter(x))

    def attend(self, qkv: Tensor, index: Tensor, mask: Tensor | None) -> Tensor:
        """Attends inside G groups of L tokens, given their queries, keys and values [B, G, L, 3 C].

        index: row of the bias table for each pair, [L, L] or [G, L, L]. mask: None, or [G, L, L], added to the logits.
        Returns [B, G, L, C].
        """
        B, G, L, _ = qkv.shape
        bias = lookup_bias(index, self.relative_position_bias_table, mask)  # [heads, L, L] or [G, heads, L, L]
        q, k, v = split_heads(qkv, self.num_heads)  # [B, G, heads, L, d] each
        first = 0  # all groups of all images share the bias: join images and groups
        if bias.ndim == 4:  # each group has its own bias, which all images share: join groups and heads
            first = 1
            bias = bias.flatten(0, 1).unsqueeze(0)
        q = q.flatten(first, first + 1)
        k = k.flatten(first, first + 1)
        v = v.flatten(first, first + 1)
        x = biased_attention(q, k, v, bias.to(q.dtype))
        x = x.reshape(B, G, self.num_heads, L, -1)
        return x.transpose(2, 3).flatten(3)


class SwinBlock(nn.Module):
    """Pre-norm block with attention in windows of `window` x `window` tokens, which are shifted by `shift` tokens."""

    def __init__(
        self,
        dim: int,
        grid_size: tuple[int, int],
        num_heads: int,
        window: int,
        shift: int,
        mlp_ratio: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.window = window
        self.shift = shift
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, window, num_heads)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = make_drop_path(drop_path)
        mask = shifted_mask(grid_size, window, shift) if shift else None
        self.register_buffer("attn_mask", mask, persistent=False)

    def forward(self, x: Tensor, groups: WindowGroups | None = None) -> Tensor:
        """Runs the block on dense tokens [B, rows, columns, C] or, with `groups`, on visible tokens [B, T, C]."""
        normed = self.norm1(x)
        if groups is None:
            attended = self.attend(normed)
        else:
            attended = self.attn.among_visible(normed, groups)
        x = x + self.drop_path(attended)
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def attend(self, x: Tensor) -> Tensor:
        """Rolls dense tokens [B, rows, columns, C] by the shift, attends inside windows, and rolls them back."""
        _, rows, columns, _ = x.shape
        if self.shift:
            x = x.roll((-self.shift, -self.shift), dims=(1, 2))
        windows = self.attn(cut_windows(x, self.window), self.attn_mask)
        x = join_windows(windows, self.window, (rows, columns))
        if self.shift:
            x = x.roll((self.shift, self.shift), dims=(1, 2))
        return x


def cut_windows(x: Tensor, window: int) -> Tensor:
    """Cuts [B, rows, columns, C] into windows [B, W, window * window, C], both in raster order."""
    B, rows, columns, C = x.shape
    x = x.view(B, rows // window, window, columns // window, window, C)
    return x.transpose(2, 3).reshape(B, -1, window * window, C)


def join_windows(x: Tensor, window: int, grid_size: tuple[int, int]) -> Tensor:
    """Joins windows [B, W, window * window, C] into [B, rows, columns, C], the inverse of `cut_windows`."""
    rows, columns = grid_size
    B = x.shape[0]
    C = x.shape[-1]
    x = x.view(B, rows // window, columns // window, window, window, C)
    return x.transpose(2, 3).reshape(B, rows, columns, C)


def shifted_mask(grid_size: tuple[int, int], window: int, shift: int) -> Tensor:
    """Returns a mask [W, L, L] with -100 between tokens that share a window only because of the roll."""
    home_windows = []  # (row, column) of the window in which each place would be if nothing were rolled
    for side in grid_size:
        rolled = (torch.arange(side) + shift) % side
        home_windows.append((rolled - shift + window) // window)
    home_row, home_column = home_windows
    region = home_row[:, None] * (max(grid_size) + 1) + home_column  # [rows, columns]
    windows = cut_windows(region[None, :, :, None], window)
    region = windows[0, :, :, 0]  # [W, L]
    is_other = region[:, :, None] != region[:, None, :]
    return is_other * -100.0


class PatchMerging(nn.Module):
    """Merges four neighbouring tokens into one token of twice the width."""

    compiled_methods = ("forward",)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Merges [B, rows, columns, C] into [B, rows / 2, columns / 2, 2 C].

        The four neighbours (row, column) are concatenated in the order 00, 10, 01, 11.
        """
        even_rows = x[:, 0::2]
        odd_rows = x[:, 1::2]
        neighbours = [
            even_rows[:, :, 0::2],
            odd_rows[:, :, 0::2],
            even_rows[:, :, 1::2],
            odd_rows[:, :, 1::2],
        ]
        x = torch.cat(neighbours, dim=-1)
        return self.reduction(self.norm(x))


class Stage(nn.Module):
    """Blocks on one grid, of which every second one has shifted windows, and the merging into the next stage.

    dim, grid_size, num_heads, window, mlp_ratio: see `SwinBlock`. The window shrinks to the grid's shorter side.
    drop_paths: drop-path rate of each block.
    downsample: whether the stage ends with `PatchMerging`. The last stage does not.
    """

    def __init__(
        self,
        dim: int,
        grid_size: tuple[int, int],
        num_heads: int,
        window: int,
        mlp_ratio: float,
        drop_paths: Sequence[float],
        downsample: bool,
    ) -> None:
        super().__init__()
        rows, columns = grid_size
        shift_of_odd = window // 2
        if min(grid_size) <= window:  # one window, or one row of windows, is not shifted
            window = min(grid_size)
            shift_of_odd = 0
        if rows % window or columns % window:
            raise ValueError(f"windows of {window} do not divide the stage's {rows} x {columns} tokens")
        self.window = window
        self.blocks = nn.ModuleList()
        for i, drop_path in enumerate(drop_paths):
            shift = shift_of_odd if i % 2 else 0
            self.blocks.append(SwinBlock(dim, grid_size, num_heads, window, shift, mlp_ratio, drop_path))
        self.shifts = sorted({block.shift for block in self.blocks})
        self.downsample = PatchMerging(dim) if downsample else None

    def forward(self, x: Tensor) -> Tensor:
        """Runs the stage on dense tokens [B, rows, columns, C]. Merging makes them [B, rows / 2, columns / 2, 2 C]."""
        for block in self.blocks:
            x = block(x)
        if self.downsample is not None:
            x = self.downsample(x)
        return x

    def forward_visible(self, x: Tensor, groups: dict[int, WindowGroups]) -> Tensor:
        """Runs the stage on visible units [B, V, side, side, C], with the window groups of each shift.

        Merging makes them [B, V, side / 2, side / 2, 2 C].
        """
        B, V, side, _, C = x.shape
        x = x.flatten(1, 3)
        for block in self.blocks:
            x = block(x, groups[block.shift])
        x = x.view(B * V, side, side, C)  # the merging takes units for images
        if self.downsample is not None:
            x = self.downsample(x)
        return x.unflatten(0, (B, V))


class SwinEncoder(nn.Module):
    """Patch embedding, stages of windowed attention, and final norm.

    img_size, patch_size, in_chans: image side or (height, width) and side of a patch in pixels, and colour channels.
        The number of tokens per side must halve from stage to stage and divide into windows.
    embed_dim: width of the first stage. It doubles from stage to stage.
    depths, num_heads: number of blocks and of heads in each stage.
    window_size, mlp_ratio: side of a window in tokens, and hidden width of an MLP as a multiple of the stage's width.
    drop_path_rate: drop-path rate of the last block. The rates grow linearly from 0 at the first block.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        embed_dim: int = 128,
        depths: Sequence[int] = (2, 2, 18, 2),
        num_heads: Sequence[int] = (4, 8, 16, 32),
        window_size: int = 7,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.img_size = height_and_width(img_size)
        height, width = self.img_size
        last = len(depths) - 1
        self.stride = patch_size * 2**last  # side of a cell of the last stage in pixels
        if min(height, width) < self.stride or height % self.stride or width % self.stride:
            raise ValueError(f"img_size {height} x {width} must be a multiple of {self.stride} px")
        self.patch_size = patch_size
        self.in_chans = in_chans
        self.embed_dim = embed_dim
        self.depths = tuple(depths)
        self.mlp_ratio = mlp_ratio
        self.token_grid = (height // patch_size, width // patch_size)
        self.unit_grid = (height // self.stride, width // self.stride)  # the cells of the last stage
        self.patch_embed = SwinPatchEmbed(patch_size, in_chans, embed_dim)
        rates = iter(drop_path_rates(drop_path_rate, sum(depths)))
        rows, columns = self.token_grid
        self.layers = nn.ModuleList()
        for s, depth in enumerate(depths):
            self.layers.append(
                Stage(
                    dim=embed_dim * 2**s,
                    grid_size=(rows // 2**s, columns // 2**s),
                    num_heads=num_heads[s],
                    window=window_size,
                    mlp_ratio=mlp_ratio,
                    drop_paths=list(islice(rates, depth)),
                    downsample=s < last,
                )
            )
        self.num_features = embed_dim * 2**last
        self.norm = nn.LayerNorm(self.num_features)
        self.apply(init_weights)

    @property
    def grid_size(self) -> tuple[int, int]:
        """The (rows, columns) of the tokens. GreenMIM masks units, which are its tokens."""
        return self.token_grid

    @property
    def num_tokens(self) -> int:
        rows, columns = self.grid_size
        return rows * columns

    def patchify(self, imgs: Tensor) -> Tensor:
        """Cuts images [B, C, H, W] into patches [B, N, p*p*C]. Raises ValueError if their size is not the model's."""
        check_image_size(imgs, self.img_size)
        return patchify(imgs, self.patch_size)

    def encode(self, tokens: Tensor) -> Tensor:
        """Runs all stages and the norm on embedded tokens [B, N, D]. Returns [B, cells, 8 D] in raster order."""
        x = tokens.unflatten(1, self.token_grid)
        for stage in self.layers:
            x = stage(x)
        return self.norm(x.flatten(1, 2))

    def encode_visible(
        self,
        tokens: Tensor,
        units: Tensor,
        groupings: Sequence[Tensor] = (),
    ) -> Tensor:
        """Runs all stages and the norm on embedded tokens of V units [B, V, side, side, D]. Returns [B, V, 8 D].

        units: raster ids [V] of the units, the same for all images.
        groupings: made by `WindowGrouper`. Without them every stage is one group of all tokens, which gives the same
            result and is slower.
        """
        grouped = self.grouped_stages(len(units))
        grouping_of: dict[GroupedWindows, Tensor] = {}
        if groupings:
            grouping_of = dict(zip(grouped, groupings, strict=True))
        x = tokens
        for stage in self.layers:
            side = x.shape[2]
            coords = unit_coords(units, self.unit_grid[1], side)
            groups = {}
            for shift in stage.shifts:
                grouping = grouping_of.get(GroupedWindows(side, stage.window, shift))
                groups[shift] = WindowGroups(coords, stage.window, shift, grouping)
            x = stage.forward_visible(x, groups)
        return self.norm(x.flatten(1, 3))

    def grouped_stages(self, num_units: int) -> list[GroupedWindows]:
        """Returns the stages and shifts whose windows are grouped: those with more tokens than two windows have."""
        grouped: list[GroupedWindows] = []
        side = self.stride // self.patch_size  # of a unit, in tokens of the first stage
        for stage in self.layers:
            if num_units * side**2 > 2 * stage.window**2:
                grouped.extend(GroupedWindows(side, stage.window, shift) for shift in stage.shifts)
            side //= 2
        return grouped

    def forward_features(self, imgs: Tensor) -> Tensor:
        """Computes features [B, cells, 8 D] of normalised images [B, C, H, W]."""
        return self.encode(self.patch_embed(self.patchify(imgs)))


def init_weights(module: nn.Module) -> None:
    """Initialises one module as Swin does: linear layers and bias tables normal with sigma 0.02, biases zero.

    The patch convolution keeps PyTorch's default.
    """
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, WindowAttention):
        nn.init.trunc_normal_(module.relative_position_bias_table, std=0.02)


class SwinTransformer(SwinEncoder):
    """The encoder with a classification head on the mean of its tokens. All modules are trained.

    num_classes: width of the head. global_pool: `avg`. probe: False. kwargs: arguments of `SwinEncoder`.
    """

    pools = ("avg",)
    frozen: Sequence[nn.Module] = ()  # modules that stay in eval mode

    def __init__(
        self,
        num_classes: int = 1000,
        global_pool: str = "avg",
        probe: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_pool(self, global_pool)
        if probe:
            raise ValueError("Swin is fine-tuned as a whole and has no linear probe")
        self.global_pool = global_pool
        self.head = nn.Linear(self.num_features, num_classes)
        init_weights(self.head)

    @property
    def blocks(self) -> list[SwinBlock]:
        """The blocks of all stages, in order."""
        return [block for stage in self.layers for block in stage.blocks]

    def forward(self, imgs: Tensor) -> Tensor:
        """Computes logits [B, num_classes] of normalised images [B, C, H, W]."""
        x = self.forward_features(imgs).mean(dim=1)
        with torch.autocast(x.device.type, enabled=False):  # many bfloat16 logits would tie
            return self.head(x.to(self.head.weight.dtype))

    def freeze_all_but(self, trainable_blocks: int, has_new_bands: bool = False) -> None:
        raise ValueError(f"Swin is fine-tuned as a whole, got trainable_blocks {trainable_blocks}")

    def no_weight_decay(self) -> set[str]:
        """Returns the parameters without weight decay, beside the 1-D ones: the bias tables."""
        return {name for name, _ in self.named_parameters() if name.endswith("relative_position_bias_table")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Describes the layers to timm's layer-wise learning-rate decay: embedding, each block, then norm and head.

        A stage's merging belongs to its last block.
        """
        blocks: list[tuple[str, tuple[int, int] | None]] = [(r"^layers\.(\d+)\.blocks\.(\d+)", None)]
        for s, depth in enumerate(self.depths):
            blocks.append((rf"^layers\.{s}\.downsample", (s, depth - 1)))
        return {"stem": r"^patch_embed", "blocks": blocks}


swin_micro_patch4_window4 = partial(SwinTransformer, **MICRO)
swin_base_patch4_window7 = partial(SwinTransformer, **(BASE | {"window_size": 7}))
swin_large_patch4_window14 = partial(SwinTransformer, **(LARGE | {"window_size": 14}))
