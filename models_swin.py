"""The Swin Transformer (Liu et al., ICCV 2021): the encoder, dense or on visible tokens alone, and the model that is fine-tuned.

State-dict names are those of Swin's and SimMIM's releases: a stage ends with its `downsample`. Dense tokens stay on their
grid, [B, rows, columns, C], from the patches to the last norm. Visible ones (GreenMIM, Huang et al., NeurIPS 2022) are those
of whole units, the cells of the last stage, [B, units, side, side, C] with a side that halves from stage to stage: merging
patches is the same on units as on images, and windows, which units do not line up with, become groups of tokens.
"""

import numpy as np
import torch
from timm.layers import DropPath, Mlp
from torch import nn
from torch.nn import functional as F

from models_relative_vit import lookup_bias
from models_vit import PatchEmbed, drop_path_rates, patchify, split_heads
from util.window_groups import plan_groups

__all__ = ["SwinTransformer", "swin_micro_patch4_window4", "swin_base_patch4_window7", "swin_large_patch4_window14"]

MICRO = dict(img_size=32, embed_dim=48, depths=(2, 4), num_heads=(2, 4), window_size=4)  # ours, for 32-px images
BASE = dict(embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32))
LARGE = dict(embed_dim=192, depths=(2, 2, 18, 2), num_heads=(6, 12, 24, 48))


class SwinPatchEmbed(PatchEmbed):
    """Patches [B, N, p*p*C] -> [B, N, D], normalised."""

    def __init__(self, patch_size, in_chans, embed_dim):
        super().__init__(patch_size, in_chans, embed_dim)
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, patches):
        return self.norm(super().forward(patches))


def window_offsets(window):
    """Rows of the bias table for each (query, key) of a window: int64 [w*w, w*w], by the offset query less key."""
    y, x = torch.arange(window).repeat_interleave(window), torch.arange(window).repeat(window)
    return (y[:, None] - y + window - 1) * (2 * window - 1) + (x[:, None] - x + window - 1)


class WindowAttention(nn.Module):
    """Attention inside windows, with a learned bias for each offset."""

    def __init__(self, dim, window, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, num_heads))
        self.register_buffer("relative_position_index", window_offsets(window), persistent=False)

    def forward(self, x, mask=None):
        """x [B, W, L, C] of W windows, mask [W, L, L], added to the logits -> [B, W, L, C]."""
        return self.proj(self.attend(self.qkv(x), self.relative_position_index, mask))

    def among_visible(self, x, groups):
        """Visible tokens [B, T, C] -> [B, T, C]; only what lies between the two projections runs on padded groups."""
        x = self.attend(groups.gather(self.qkv(x)), groups.bias_index, groups.mask)
        return self.proj(groups.scatter(x))

    def attend(self, qkv, index, mask):
        """[B, G, L, 3 C] of G groups, index [L, L] or [G, L, L] into the bias table, mask None or [G, L, L] -> [B, G, L, C]."""
        B, G, L, _ = qkv.shape
        bias = lookup_bias(index, self.relative_position_bias_table)  # [heads, L, L] or [G, heads, L, L]
        if mask is not None:
            bias = bias + mask.unsqueeze(1).to(bias.dtype)
        q, k, v = split_heads(qkv, self.num_heads)  # [B, G, heads, L, d] each
        # The bias has one row for all images: groups are taken for heads, or for images where all have the same bias.
        if bias.ndim == 4:
            (q, k, v), bias = (x.flatten(1, 2) for x in (q, k, v)), bias.flatten(0, 1).unsqueeze(0)
        else:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        return x.reshape(B, G, self.num_heads, L, -1).transpose(2, 3).flatten(3)


class SwinBlock(nn.Module):
    """Pre-norm block; attention in windows, which `shift` moves by half a window."""

    def __init__(self, dim, grid_size, num_heads, window, shift, mlp_ratio, drop_path):
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, window, num_heads)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.register_buffer("attn_mask", shifted_mask(grid_size, window, shift) if shift else None, persistent=False)

    def forward(self, x, groups=None):
        """[B, rows, columns, C] -> the same; with `groups` visible tokens [B, T, C]."""
        y = self.norm1(x)
        x = x + self.drop_path(self.attend(y) if groups is None else self.attn.among_visible(y, groups))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def attend(self, x):
        if self.shift:
            x = x.roll((-self.shift, -self.shift), dims=(1, 2))
        x = join_windows(self.attn(cut_windows(x, self.window), self.attn_mask), self.window, x.shape[1:3])
        return x.roll((self.shift, self.shift), dims=(1, 2)) if self.shift else x


def cut_windows(x, window):
    """[B, rows, columns, C] -> [B, W, window * window, C], windows and what is in them in raster order."""
    B, rows, columns, C = x.shape
    x = x.view(B, rows // window, window, columns // window, window, C)
    return x.transpose(2, 3).reshape(B, -1, window * window, C)


def join_windows(x, window, grid_size):
    """The inverse of `cut_windows`."""
    rows, columns = grid_size
    x = x.view(len(x), rows // window, columns // window, window, window, x.shape[-1])
    return x.transpose(2, 3).reshape(len(x), rows, columns, -1)


def shifted_mask(grid_size, window, shift):
    """[W, L, L]: -100 between tokens that only the roll has brought into one window."""
    parts = []
    for side in grid_size:
        rolled = (torch.arange(side) + shift) % side
        parts.append((rolled - shift + window) // window)  # the window that a place belongs to without any roll
    region = parts[0][:, None] * (max(grid_size) + 1) + parts[1]
    region = cut_windows(region.view(1, *grid_size, 1), window)[0, :, :, 0]  # [W, L]
    return (region[:, :, None] != region[:, None, :]) * -100.0


class PatchMerging(nn.Module):
    """Four neighbours become one token of twice the width."""

    def __init__(self, dim):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x):
        """[B, rows, columns, C] -> [B, rows / 2, columns / 2, 2 C]; neighbours (row, column) in the order 00, 10, 01, 11."""
        x = torch.cat([x[:, i::2, j::2] for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))], dim=-1)
        return self.reduction(self.norm(x))


class WindowGroups:
    """Which of T visible tokens see each other, in windows that `shift` moves: groups of whole windows, padded to one size.

    coords: int64 [T, 2], row and column of each token. groups: int64 [G, g], the tokens of each group, -1 where padded; None
    is one group of all. Only the cost depends on them.
    """

    def __init__(self, coords, window, shift, groups=None):
        self.ids = self.slots = None
        if groups is None:
            coords, present = coords.unsqueeze(0), None  # [1, T, 2]
        else:
            present, T = groups >= 0, len(coords)
            if groups.device.type == "cpu" and not torch.compiler.is_compiling() and int(present.sum()) != T:
                raise ValueError(f"the plan groups {int(present.sum())} tokens, but {T} are visible")
            self.ids = groups.clamp(min=0)
            ranks = torch.arange(groups.numel(), device=groups.device)
            home = torch.where(present, groups, T).flatten()  # padding goes to a place beyond the last token
            self.slots = torch.full((T + 1,), -1, device=groups.device).scatter_(0, home, ranks)[:T]
            coords = coords[self.ids]  # [G, g, 2]
        homes = window_of(coords, window, shift)
        same = (homes[:, :, None] == homes[:, None]).all(dim=-1)
        if present is not None:
            same = same & present[:, :, None] & present[:, None]
        offsets = coords[:, :, None] - coords[:, None] + window - 1  # query less key
        self.bias_index = torch.where(same, offsets[..., 0] * (2 * window - 1) + offsets[..., 1], 0)  # [G, g, g]
        self.mask = torch.where(same, 0.0, -100.0)

    def gather(self, x):
        """[B, T, C] -> [B, G, g, C]"""
        if self.ids is None:
            return x.unsqueeze(1)
        return _Gather.apply(x, self.ids.flatten(), self.slots).unflatten(1, self.ids.shape)

    def scatter(self, x):
        """[B, G, g, C] -> [B, T, C]"""
        return x.squeeze(1) if self.ids is None else x.flatten(1, 2).index_select(1, self.slots)


class _Gather(torch.autograd.Function):
    """Tokens [B, T, C] -> slots [B, S, C]. Padding, which reads token 0, gets no gradient, so the backward is a gather, too:
    a scatter would add up in no fixed order on a GPU."""

    @staticmethod
    def forward(ctx, x, ids, slots):
        ctx.save_for_backward(slots)
        return x.index_select(1, ids)

    @staticmethod
    def backward(ctx, gradient):
        (slots,) = ctx.saved_tensors
        return gradient.index_select(1, slots), None, None


def window_of(coords, window, shift):
    """Row and column of each token [..., 2] -> row and column of its window, numbered without any roll."""
    return (coords + (window - shift) % window) // window


def unit_coords(units, columns, side):
    """Raster ids of units [V], on a grid so many columns wide -> coordinates of their side * side tokens [V * side * side, 2]."""
    y, x = units // columns, units % columns
    corner = side * torch.stack([y, x], dim=-1)  # [V, 2]
    inside = torch.stack(torch.meshgrid(*[torch.arange(side, device=units.device)] * 2, indexing="ij"), dim=-1)
    return (corner[:, None, None] + inside).flatten(0, 2)


class GroupPlanner:
    """Plans the groups of every stage for a set of visible units: in a DataLoader worker, since the search is a loop.

    `planner(units)`, raster ids int64 [V] -> int64 [G, window * window] each, for `SwinEncoder.encode_visible` on sorted
    units. A group is as large as a full window, whatever the mask, so that shapes are static; nothing but the attention itself
    runs on the padding. The number of groups depends on the mask. Plans are padded to what `samples` random masks needed at
    most; if one stage needs more, all are padded to what no mask can exceed: there are two shapes in all.
    """

    def __init__(self, encoder, num_visible, samples=64):
        self.columns, self.stages = encoder.unit_grid[1], encoder.grouped_stages(num_visible)
        # Two groups hold more than one group's tokens together, or they would be one.
        tokens = [num_visible * side**2 for side, _, _ in self.stages]
        self.ceilings = [2 * (T // (window**2 + 1)) + 1 for T, (_, window, _) in zip(tokens, self.stages, strict=True)]
        rng, num_units = np.random.default_rng(0), encoder.unit_grid[0] * encoder.unit_grid[1]
        masks = (rng.permutation(num_units)[:num_visible] for _ in range(samples if self.stages else 0))
        plans = [self.plan(torch.from_numpy(np.sort(units)), [0] * len(self.stages)) for units in masks]
        self.capacities = [max(len(plan) for plan in of_stage) for of_stage in zip(*plans, strict=True)]

    def __call__(self, units):
        plans = self.plan(units, self.capacities)
        if any(len(plan) > capacity for plan, capacity in zip(plans, self.capacities, strict=True)):
            plans = self.plan(units, self.ceilings)
        return plans

    def shapes(self, units):
        """A plan of each of the shapes that there are; the smaller may lack tokens."""
        largest = self.plan(units, self.ceilings)
        return [[plan[:n] for plan, n in zip(largest, self.capacities, strict=True)], largest] if self.stages else []

    def plan(self, units, capacities):
        """At least so many groups a stage."""
        plans, units = [], units.sort().values  # tokens are numbered as the encoder takes them
        for (side, window, shift), capacity in zip(self.stages, capacities, strict=True):
            y, x = window_of(unit_coords(units, self.columns, side), window, shift).T.numpy()
            plans.append(torch.from_numpy(plan_groups(y * (x.max() + 1) + x, window**2, capacity)))
        return plans


class Stage(nn.Module):
    def __init__(self, dim, grid_size, num_heads, window, mlp_ratio, drop_paths, downsample):
        super().__init__()
        whole = min(grid_size) <= window  # one window then, or a row of them: nothing to shift
        window = min(window, *grid_size)
        if any(side % window for side in grid_size):
            raise ValueError(f"windows of {window} do not divide the stage's {grid_size[0]} x {grid_size[1]} tokens")
        self.blocks = nn.ModuleList(
            SwinBlock(dim, grid_size, num_heads, window, 0 if whole or i % 2 == 0 else window // 2, mlp_ratio, rate)
            for i, rate in enumerate(drop_paths)
        )
        self.window, self.shifts = window, sorted({block.shift for block in self.blocks})
        self.downsample = PatchMerging(dim) if downsample else None

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x if self.downsample is None else self.downsample(x)

    def forward_visible(self, x, groups):
        """Visible units [B, V, side, side, C], {shift: WindowGroups} -> [B, V, side / 2, side / 2, 2 C], or as large if last."""
        shape, x = x.shape, x.flatten(1, 3)
        for block in self.blocks:
            x = block(x, groups[block.shift])
        x = x.view(-1, *shape[2:])  # units are images to the merging
        x = x if self.downsample is None else self.downsample(x)
        return x.unflatten(0, shape[:2])


class SwinEncoder(nn.Module):
    """img_size: pixels, an integer or (height, width); its tokens must halve from stage to stage and divide into windows."""

    def __init__(
        self,
        img_size=224,
        patch_size=4,
        in_chans=3,
        embed_dim=128,
        depths=(2, 2, 18, 2),
        num_heads=(4, 8, 16, 32),
        window_size=7,
        mlp_ratio=4.0,
        drop_path_rate=0.0,
    ):
        super().__init__()
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        self.stride = patch_size * 2 ** (len(depths) - 1)
        if any(side < self.stride or side % self.stride for side in self.img_size):
            raise ValueError(f"img_size {self.img_size[0]} x {self.img_size[1]} must be a multiple of {self.stride} px")
        self.patch_size, self.embed_dim, self.depths = patch_size, embed_dim, tuple(depths)
        self.grid_size = self.token_grid = tuple(side // patch_size for side in self.img_size)
        self.unit_grid = tuple(side // self.stride for side in self.img_size)  # of the last stage's cells
        self.patch_embed = SwinPatchEmbed(patch_size, in_chans, embed_dim)
        rates = drop_path_rates(drop_path_rate, sum(depths))
        self.layers = nn.ModuleList()
        for s, depth in enumerate(depths):
            grid_size, rates_here = tuple(side >> s for side in self.token_grid), [rates.pop(0) for _ in range(depth)]
            downsample = s < len(depths) - 1
            self.layers.append(Stage(embed_dim << s, grid_size, num_heads[s], window_size, mlp_ratio, rates_here, downsample))
        self.num_features = embed_dim << (len(depths) - 1)
        self.norm = nn.LayerNorm(self.num_features)
        self.apply(init_weights)

    @property
    def num_tokens(self):
        return self.grid_size[0] * self.grid_size[1]

    def cut(self, imgs):
        """imgs [B, C, H, W] of the model's size -> patches [B, N, p*p*C]."""
        self.check_size(imgs)
        return patchify(imgs, self.patch_size)

    def check_size(self, imgs):
        if tuple(imgs.shape[-2:]) != self.img_size:
            raise ValueError(f"the model is built for images of {self.img_size} px, got {tuple(imgs.shape[-2:])}")

    def encode(self, tokens):
        """Embedded tokens [B, N, D] -> features [B, cells, 8 D] of the last stage, raster order, after the norm."""
        x = tokens.unflatten(1, self.token_grid)
        for stage in self.layers:
            x = stage(x)
        return self.norm(x.flatten(1, 2))

    def encode_visible(self, tokens, units, plans=()):
        """Embedded tokens of V units [B, V, side, side, D] at raster ids `units` [V], the same for all images -> [B, V, 8 D].

        plans: groups as `GroupPlanner` makes them. Without them every stage is one group of all tokens: equal, and slower.
        """
        grouped = self.grouped_stages(len(units))
        if len(plans) not in (0, len(grouped)):
            raise ValueError(f"{len(grouped)} plans are needed, or none, got {len(plans)}")
        x, plans = tokens, iter(plans)
        for stage in self.layers:
            side = x.shape[2]
            coords, groups = unit_coords(units, self.unit_grid[1], side), {}
            for shift in stage.shifts:
                plan = next(plans, None) if (side, stage.window, shift) in grouped else None
                groups[shift] = WindowGroups(coords, stage.window, shift, plan)
            x = stage.forward_visible(x, groups)
        return self.norm(x.flatten(1, 3))

    def grouped_stages(self, num_units):
        """[(tokens a side of a unit, window, shift)] where grouping pays: more visible tokens than two windows hold."""
        sides = [self.stride // self.patch_size >> s for s in range(len(self.layers))]
        stages = zip(sides, self.layers, strict=True)
        many = [(side, stage) for side, stage in stages if num_units * side**2 > 2 * stage.window**2]
        return [(side, stage.window, shift) for side, stage in many for shift in stage.shifts]

    def forward_features(self, imgs):
        """Images [B, C, H, W], normalised -> [B, cells, 8 D]."""
        return self.encode(self.patch_embed(self.cut(imgs)))


def init_weights(module):
    """Linear and bias tables normal, sigma .02, biases zero; the patch convolution keeps the framework's default."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, WindowAttention):
        nn.init.trunc_normal_(module.relative_position_bias_table, std=0.02)


class SwinTransformer(SwinEncoder):
    """The encoder with a classification head on the mean of its tokens."""

    def __init__(self, num_classes=1000, global_pool="avg", probe=False, **kwargs):
        super().__init__(**kwargs)
        if global_pool != "avg" or probe:
            raise ValueError(f"Swin pools its tokens (global_pool 'avg') and has no probe, got {global_pool!r}")
        self.global_pool, self.head = global_pool, nn.Linear(self.num_features, num_classes)
        init_weights(self.head)

    @property
    def blocks(self):
        return [block for stage in self.layers for block in stage.blocks]

    def forward(self, imgs):
        """Images [B, C, H, W], normalised -> logits [B, num_classes]."""
        x = self.forward_features(imgs).mean(dim=1)
        with torch.autocast(x.device.type, enabled=False):  # logits of 8 bits would tie
            return self.head(x.to(self.head.weight.dtype))

    def freeze_all_but(self, trainable_blocks):
        raise ValueError(f"Swin is fine-tuned as a whole, got trainable_blocks {trainable_blocks}")

    frozen = ()

    def no_weight_decay(self):
        """The bias tables do not decay."""
        return {name for name, _ in self.named_parameters() if name.endswith("relative_position_bias_table")}

    def group_matcher(self, coarse=False):
        """timm's description of the layers: the embedding, each block, then norm and head; merging counts to the block before."""
        merging = [(rf"^layers\.{s}\.downsample", (s, depth - 1)) for s, depth in enumerate(self.depths)]
        return {"stem": r"^patch_embed", "blocks": [(r"^layers\.(\d+)\.blocks\.(\d+)", None), *merging]}


def swin_micro_patch4_window4(**kwargs):
    return SwinTransformer(**{**MICRO, **kwargs})


def swin_base_patch4_window7(**kwargs):
    return SwinTransformer(**{**BASE, "window_size": 7, **kwargs})


def swin_large_patch4_window14(**kwargs):
    return SwinTransformer(**{**LARGE, "window_size": 14, **kwargs})
