"""PR-MIM, the method: partial reconstruction that reconstructs what it throws ("Delving Deeper into Partial
Reconstruction in Masked Image Modeling").

The file follows Sec. 3 of the paper:

    counts      how many of an image's N tokens are visible, retained and thrown
    sampling    which masked tokens are retained (furthest sampling, Algorithm 1 of the supplementary)
    order       the outcome as one permutation of the tokens, [visible | retained | thrown]
    decode      a decoder on visible + retained tokens only
    aggregate   a depth-wise convolution reconstructs the thrown tokens from the others
    predict     norm and head on every masked token

Vocabulary: a token is *visible* (the encoder sees it) or *masked*; a masked token is *retained* (the decoder
reconstructs it) or *thrown* (only the aggregation does). *Kept* = visible + retained. True in a mask means masked.

Where the paper can be read in two ways: `throw_ratio` is a share of all N tokens; the retained tokens are picked by the
greedy max-min of Algorithm 1, which does not solve Eq. 1 (a maximal sum of distances) but is what the paper runs. Measured
at small scale (docs/study.md, CIFAR-10, two seeds): only the thrown cells take the aggregation's output (`applies_to`), since
all cells cost 0.62 +- 0.33 points of top-1, though average pooling does badly only there, as the paper has it; the
aggregation stands before the norm, at decoder width, since on the predictions the masked error is 16 % higher; the
convolution keeps the framework's initialisation, from which two others could not be told apart.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from models_vit import Block, init_weights, layer_norm
from util.addressed import MASK, addressed_uniform
from util.pos_embed import sincos_pos_embed

# ---------------------------------------------------------------------------------------------------------- counts


@dataclass(frozen=True)
class TokenCounts:
    """How many tokens of each kind an image has; the same for every image, so that every shape is static."""

    num_visible: int
    num_retained: int
    num_thrown: int

    def __post_init__(self):
        if min(self.num_visible, self.num_thrown) < 0 or self.num_retained < 1:
            raise ValueError(f"visible and thrown must be >= 0 and retained >= 1, got {self}")

    @classmethod
    def from_ratios(cls, num_tokens, mask_ratio, throw_ratio):
        """Both ratios are shares of all `num_tokens`: at 196 tokens, 0.75 and 0.5 give 49 visible, 49 retained, 98 thrown."""
        if not 0 <= throw_ratio < mask_ratio < 1:
            raise ValueError(
                f"ratios must satisfy 0 <= throw_ratio < mask_ratio < 1 (both are shares of all tokens), "
                f"got throw_ratio {throw_ratio} and mask_ratio {mask_ratio}"
            )
        num_visible, num_thrown = int(num_tokens * (1 - mask_ratio)), int(num_tokens * throw_ratio)
        return cls(num_visible, num_tokens - num_visible - num_thrown, num_thrown)

    @property
    def num_tokens(self):
        return self.num_visible + self.num_retained + self.num_thrown

    @property
    def num_masked(self):
        return self.num_retained + self.num_thrown

    @property
    def num_kept(self):
        return self.num_visible + self.num_retained


# -------------------------------------------------------------------------------------------------------- sampling


def addressed_noise(seed, epoch, indices, num_tokens):
    """Uniform noise in [0, 1), float64 [B, num_tokens]: the only source of masking randomness.

    Row b depends on `(seed, epoch, indices[b])` alone: not on the batch, the worker or the process that asks.
    `epoch` may be an integer or an array [B].
    """
    return addressed_uniform(MASK, seed, epoch, indices, num_tokens)


def furthest_sampling(coords, num_retained):
    """Algorithm 1 for a batch of lists: each pick is the token furthest from all tokens picked before it.

    coords: [B, M, 2], the cells of M masked tokens in *shuffled* order; returns positions in that list, int64
    [B, num_retained], in the order picked. The first pick is list position 0 and ties go to the lowest position, so
    the shuffled order alone makes the first pick random and the ties unbiased. (In raster order every tie would fall
    to the top left: on a 14x14 grid twice as many retained tokens in the upper half as in the lower at rho_d .25.)

    Algorithm 1 recomputes the distances to all picks each time; a running minimum gives the same picks. So do squared
    distances, and integers keep equal distances exactly equal.
    """
    _check_num_retained(coords, num_retained)
    coords = np.moveaxis(np.asarray(coords), -1, 0)  # [2, B, M]
    if np.issubdtype(coords.dtype, np.integer):
        coords = coords - coords.min()
        coords = coords.astype(np.int16 if coords.max() <= 127 else np.int64)  # 2 * 127^2 < 2^15; int16 is fastest
    coords = np.ascontiguousarray(coords)
    rows = np.arange(coords.shape[1])
    largest = np.iinfo(coords.dtype).max if coords.dtype.kind == "i" else np.inf
    nearest = np.full(coords.shape[1:], largest, coords.dtype)  # [B, M], squared distance to the nearest pick
    picks = np.empty((len(rows), num_retained), np.int64)
    pick = np.zeros(len(rows), np.int64)
    for k in range(num_retained):
        picks[:, k] = pick
        difference = coords - coords[:, rows, pick][..., None]  # [2, B, M]
        difference *= difference
        np.minimum(nearest, difference[0] + difference[1], out=nearest)
        pick = nearest.argmax(axis=1)
    return picks


def random_sampling(coords, num_retained):
    """The paper's baseline, same shape as `furthest_sampling`: the head of a shuffled list is a random subset."""
    _check_num_retained(coords, num_retained)
    return np.broadcast_to(np.arange(num_retained), (len(coords), num_retained))


def _check_num_retained(coords, num_retained):
    if not 1 <= num_retained <= np.shape(coords)[1]:
        raise ValueError(f"num_retained must be between 1 and the {np.shape(coords)[1]} listed tokens, got {num_retained}")


SAMPLING = {"furthest": furthest_sampling, "random": random_sampling}


# ----------------------------------------------------------------------------------------------------------- order


class TokenOrderSampler:
    """Noise in, token order out: `sampler(noise [B, N]) -> ids_shuffle int64 [B, N]`, a pure function.

    `ids_shuffle` is the one representation of token state: the raster ids of an image's tokens in the order
    [visible | retained | thrown], ascending inside each segment. One permutation is one tensor to ship and one
    partition that cannot contradict itself; masks are derived from it on the device (`TokenOrder`).

    Sorting the noise shuffles the tokens; the head of the shuffled list is visible, as in MAE, and its tail is the
    masked list that the sampling function sees. `mask_unit` u > 1 masks whole squares of u x u tokens (SimMIM), while
    throwing stays per token. `visible_order="noise"` leaves the visible tokens as they were shuffled, which only the
    reference's GreenMIM asks for.
    """

    def __init__(self, grid_size, counts, sampling="furthest", mask_unit=1, visible_order="raster"):
        rows, columns = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        if rows * columns != counts.num_tokens:
            raise ValueError(f"a grid of {rows} x {columns} tokens does not hold the {counts.num_tokens} of {counts}")
        if sampling not in SAMPLING:
            raise ValueError(f"unknown sampling {sampling!r}, choose from {', '.join(SAMPLING)}")
        if visible_order not in ("raster", "noise"):
            raise ValueError(f"unknown visible_order {visible_order!r}, choose from raster, noise")
        if rows % mask_unit or columns % mask_unit or counts.num_visible % mask_unit**2:
            raise ValueError(
                f"mask_unit {mask_unit} must divide the grid {rows} x {columns}, "
                f"and its square the {counts.num_visible} visible tokens"
            )
        self.grid_size, self.counts, self.sampling, self.mask_unit = (rows, columns), counts, sampling, mask_unit
        self.visible_order = visible_order
        self.coords = np.stack(np.divmod(np.arange(rows * columns), columns), axis=-1).astype(np.int16)  # [N, 2]

    def visible_tokens(self, noise):
        """Bool [B, N], exactly `num_visible` True in each row."""
        unit, (rows, columns) = self.mask_unit, self.grid_size
        # A sum of uniform numbers modulo 1 is uniform and independent of each of its terms, so choosing units by it
        # leaves the shuffled order of the tokens inside them unbiased. For unit 1 it is the noise itself.
        unit_noise = noise.reshape(-1, rows // unit, unit, columns // unit, unit).sum(axis=(2, 4)) % 1
        unit_noise = unit_noise.reshape(len(noise), -1)  # [B, units]
        num_units = self.counts.num_visible // unit**2
        visible = np.zeros(unit_noise.shape, bool)
        np.put_along_axis(visible, unit_noise.argsort(axis=1)[:, :num_units], True, axis=1)
        visible = visible.reshape(-1, rows // unit, 1, columns // unit, 1)
        return np.broadcast_to(visible, (len(noise), rows // unit, unit, columns // unit, unit)).reshape(noise.shape)

    def __call__(self, noise, visible=None):
        """noise [B, N] -> ids_shuffle [B, N]. `visible`, bool [B, N] or [1, N], overrides the choice of the noise."""
        noise, counts = np.asarray(noise), self.counts
        if noise.ndim != 2 or noise.shape[1] != counts.num_tokens:
            raise ValueError(f"noise must have shape [B, {counts.num_tokens}], got {list(noise.shape)}")
        if visible is None and self.mask_unit > 1:
            visible = self.visible_tokens(noise)
        # Visible tokens sort below 0 and come first; the masked ones keep the order of their noise.
        shuffled = np.argsort(noise if visible is None else noise - visible, axis=1)
        masked = shuffled[:, counts.num_visible :]  # [B, num_masked]
        retained = masked
        if counts.num_thrown:
            picks = SAMPLING[self.sampling](self.coords[masked], counts.num_retained)
            retained = np.take_along_axis(masked, picks, axis=1)
        state = np.full(noise.shape, 2, np.int8)  # 0 visible, 1 retained, 2 thrown
        np.put_along_axis(state, shuffled[:, : counts.num_visible], 0, axis=1)
        np.put_along_axis(state, retained, 1, axis=1)
        ids_shuffle = state.argsort(axis=1, kind="stable")  # stable = raster-ascending inside each segment
        if self.visible_order == "noise":
            ids_shuffle[:, : counts.num_visible] = shuffled[:, : counts.num_visible]
        return ids_shuffle


class MaskCollator:
    """Collates samples and draws their token orders, in the DataLoader worker and once per batch.

    A sample is `(img uint8 [3, H, W], label, (epoch, index))`; a batch is `(imgs uint8 [B, 3, H, W], labels [B],
    ids_shuffle int64 [B, N])`. With `shared_visible` the whole batch shares the visible set of its first sample (GreenMIM),
    and each image still draws its own thrown tokens. `planner(ids_visible [V])` -> tensors that the model takes beside: they
    follow in the batch.
    """

    def __init__(self, sampler, seed, shared_visible=False, planner=None):
        self.sampler, self.seed, self.shared_visible, self.planner = sampler, seed, shared_visible, planner

    def __call__(self, samples):
        imgs, labels, addresses = zip(*samples, strict=True)
        epochs, indices = np.asarray(addresses).T
        noise = addressed_noise(self.seed, epochs, indices, self.sampler.counts.num_tokens)
        visible = self.sampler.visible_tokens(noise[:1]) if self.shared_visible else None
        ids_shuffle = torch.from_numpy(self.sampler(noise, visible))
        ids_visible = ids_shuffle[:, : self.sampler.counts.num_visible]
        if self.shared_visible:
            ids_visible[:] = ids_visible[:1].clone()  # one set already, and now one order
        plans = self.planner(ids_visible[0]) if self.planner else ()
        # default_collate stacks straight into shared memory when it runs in a worker.
        return torch.utils.data.default_collate(imgs), torch.as_tensor(labels), ids_shuffle, *plans


class TokenOrder:
    """A view of `ids_shuffle` [B, N] on the device: gathers and scatters of static shape, no boolean indexing.

    "Token order" below is the order of `ids_shuffle`, [visible | retained | thrown]; "raster" is the image's own.
    """

    def __init__(self, ids_shuffle, counts):
        self.ids_shuffle, self.counts = torch.as_tensor(ids_shuffle), counts
        if self.ids_shuffle.shape[-1] != counts.num_tokens:
            raise ValueError(f"ids_shuffle must have {counts.num_tokens} columns, got {list(self.ids_shuffle.shape)}")
        self.ids_visible = self.ids_shuffle[:, : counts.num_visible]
        self.ids_kept = self.ids_shuffle[:, : counts.num_kept]
        self.ids_thrown = self.ids_shuffle[:, counts.num_kept :]
        ranks = torch.arange(counts.num_tokens, device=self.ids_shuffle.device).expand_as(self.ids_shuffle)
        self.ids_restore = torch.empty_like(self.ids_shuffle).scatter_(1, self.ids_shuffle, ranks)

    @property
    def mask(self):
        """Bool [B, N], raster: True at masked tokens, retained or thrown."""
        return self.ids_restore >= self.counts.num_visible

    @property
    def thrown(self):
        """Bool [B, N], raster: True at thrown tokens."""
        return self.ids_restore >= self.counts.num_kept

    def masked_of_first(self, num_tokens):
        """Bool [B, N], raster: True at the masked ones of the order's first `num_tokens`; N: all, num_kept: the retained."""
        return self.mask & (self.ids_restore < num_tokens)

    @staticmethod
    def take(x, ids):
        """Raster x [B or 1, N, C] at ids [B, n] -> [B, n, C]."""
        return x.expand(len(ids), -1, -1).gather(1, ids.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def take_visible(self, x):
        """Raster [B or 1, N, C] -> [B, num_visible, C]."""
        return self.take(x, self.ids_visible)

    def take_kept(self, x):
        """Raster [B or 1, N, C] -> [B, num_kept, C], token order."""
        return self.take(x, self.ids_kept)

    def append_mask_tokens(self, x, mask_token):
        """[B, num_visible, C] and [1, 1, C] -> [B, num_kept, C]: one mask token for each retained token, none for the thrown."""
        return torch.cat([x, mask_token.expand(len(x), self.counts.num_retained, -1)], dim=1)

    def restore(self, x):
        """Token order [B, n, C], the first n of the order -> raster [B, N, C] with zeros where the rest belongs.

        For n = num_kept the thrown cells are the zeros. A scatter, because its backward is a plain gather.
        """
        ids = self.ids_shuffle[:, : x.shape[1]].unsqueeze(-1).expand_as(x)
        return x.new_zeros(x.shape[0], self.counts.num_tokens, x.shape[2]).scatter(1, ids, x)


# ------------------------------------------------------------------------------------------------------- aggregate


class SpatialAggregation(nn.Module):
    """Reconstructs the thrown tokens from the kept ones; the only place that decides what is read and replaced.

    Reads the grid of kept tokens with zeros in the thrown cells. Replaces the thrown cells only (`applies_to="thrown"`:
    retained tokens keep the decoder's output) or every cell (`"all"`). `kind`: the paper's depth-wise convolution
    `dwconv`, or the alternatives of its ablation: `avgpool`, `transformer`, `convnext` (`kernel_size` is odd; the
    transformer has none).
    """

    KINDS = ("dwconv", "avgpool", "transformer", "convnext")
    APPLIES_TO = ("thrown", "all")

    def __init__(self, dim, kernel_size=7, kind="dwconv", applies_to="thrown"):
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, so that the window has a centre, got {kernel_size}")
        if applies_to not in self.APPLIES_TO:
            raise ValueError(f"unknown applies_to {applies_to!r}, choose from {', '.join(self.APPLIES_TO)}")
        self.applies_to = applies_to
        if kind == "dwconv":
            self.operator = _DepthwiseConv(dim, kernel_size)
        elif kind == "avgpool":
            self.operator = _AveragePool(kernel_size)
        elif kind == "transformer":
            self.operator = _TransformerLayer(dim)
        elif kind == "convnext":
            self.operator = _ConvNeXtLayer(dim, kernel_size)
        else:
            raise ValueError(f"unknown aggregation {kind!r}, choose from {', '.join(self.KINDS)}")

    def forward(self, x, order, grid_size):
        """x [B, num_kept, C] -> [B, N, C], both in token order."""
        grid = order.restore(x).unflatten(1, grid_size)  # [B, rows, columns, C], zeros at thrown
        grid = self.operator(grid).flatten(1, 2)  # [B, N, C], raster
        if self.applies_to == "all":
            return order.take(grid, order.ids_shuffle)
        return torch.cat([x, order.take(grid, order.ids_thrown)], dim=1)


class _DepthwiseConv(nn.Conv2d):
    """The paper's operator on [B, rows, columns, C]; the framework's default initialisation, as in a convolution
    added to MAE's code."""

    def __init__(self, dim, kernel_size):
        super().__init__(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        self.to(memory_format=torch.channels_last)  # the layout of its gradient, which DDP's buckets follow

    def forward(self, x):
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class _AveragePool(nn.AvgPool2d):
    """The depth-wise convolution with a fixed uniform kernel: zeros of thrown cells and of the border count."""

    def __init__(self, kernel_size):
        super().__init__(kernel_size, stride=1, padding=kernel_size // 2)

    def forward(self, x):
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class _TransformerLayer(nn.Module):
    """One pre-norm block with heads of 32 channels. Thrown cells are all zero, so positions are added first."""

    def __init__(self, dim):
        super().__init__()
        self.block = Block(dim, num_heads=max(1, dim // 32))

    def forward(self, x):
        positions = sincos_pos_embed(x.shape[3], x.shape[1:3], device=x.device).to(x.dtype)
        return self.block(x.flatten(1, 2) + positions).view_as(x)


class _ConvNeXtLayer(nn.Module):
    """One ConvNeXt block (Liu et al., CVPR 2022), without layer scale: depth-wise convolution, norm, MLP, residual."""

    def __init__(self, dim, kernel_size):
        super().__init__()
        self.dwconv = _DepthwiseConv(dim, kernel_size)
        self.norm = layer_norm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        return x + self.mlp(self.norm(self.dwconv(x)))


# ---------------------------------------------------------------------------------------------- decode and predict


class ProgressiveDecoder(nn.Module):
    """MAE's decoder on the kept tokens, then the aggregation on the thrown ones (Fig. 2c).

    `progressive=False` is plain partial reconstruction (Fig. 2b): thrown tokens are neither reconstructed nor
    supervised. Without thrown tokens there is no aggregator and this is MAE's decoder (Fig. 2a).

    head: the last layer, a module that takes features [B, n, C], or the width of a linear one. cls_token: one comes before
    the visible tokens; P below is 1 then, else 0.
    """

    def __init__(
        self,
        grid_size,
        counts,
        embed_dim,
        head,
        decoder_embed_dim=512,
        decoder_depth=8,
        decoder_num_heads=16,
        mlp_ratio=4.0,
        progressive=True,
        kernel_size=7,
        aggregation="dwconv",
        applies_to="thrown",
        cls_token=True,
    ):
        super().__init__()
        self.grid_size, self.counts, self.num_prefix = grid_size, counts, int(cls_token)
        self.embed = nn.Linear(embed_dim, decoder_embed_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_embed_dim))
        table = sincos_pos_embed(decoder_embed_dim, grid_size, cls_token).float()
        self.pos_embed = nn.Parameter(table.unsqueeze(0), requires_grad=False)
        self.blocks = nn.ModuleList(Block(decoder_embed_dim, decoder_num_heads, mlp_ratio) for _ in range(decoder_depth))
        self.norm = layer_norm(decoder_embed_dim)
        self.pred = head if isinstance(head, nn.Module) else nn.Linear(decoder_embed_dim, head)
        init_weights(self)
        nn.init.normal_(self.mask_token, std=0.02)
        self.aggregation = None
        if progressive:
            self.add_aggregation(kernel_size, aggregation, applies_to)

    def add_aggregation(self, kernel_size=7, kind="dwconv", applies_to="thrown"):
        """Where tokens are thrown. It is the last to be made, of all decoders of a framework: the same seed then gives every
        arm of an ablation the same first weights."""
        if self.counts.num_thrown:
            self.aggregation = SpatialAggregation(self.embed.out_features, kernel_size, kind, applies_to)

    @property
    def num_supervised(self):
        """How many tokens are predicted and supervised: all masked ones, or the retained ones if plain."""
        return self.counts.num_retained if self.aggregation is None else self.counts.num_masked

    def forward(self, x, order):
        """Latent [B, P + num_visible, D], class token first -> predictions [B, num_supervised, out_dim] in token order."""
        return self.predict(self.reconstruct(x, order)[:, self.counts.num_visible :])

    def reconstruct(self, x, order):
        """Latent [B, P + num_visible, D] -> features of all tokens [B, N, C] (plain: of the kept ones), token order."""
        return self.aggregate(self.decode(x, order), order)

    def decode(self, x, order):
        """Latent [B, P + num_visible, D] -> the blocks' output on the kept tokens [B, num_kept, C], token order."""
        x = self.embed_tokens(x, order)
        for block in self.blocks:
            x = block(x)
        return x[:, self.num_prefix :]

    def embed_tokens(self, x, order):
        """Latent [B, P + num_visible, D] -> what the blocks see [B, P + num_kept, C]: class token first, then token order."""
        x, P = self.embed(x), self.num_prefix
        tokens = order.append_mask_tokens(x[:, P:], self.mask_token)  # [B, num_kept, C]
        tokens = tokens + order.take_kept(self.pos_embed[:, P:])
        return torch.cat([x[:, :P] + self.pos_embed[:, :P], tokens], dim=1)

    def aggregate(self, x, order):
        """The blocks' output on the kept tokens [B, num_kept, C] -> of all tokens [B, N, C] (plain: as it is), token order."""
        return x if self.aggregation is None else self.aggregation(x, order, self.grid_size)

    def predict(self, x):
        """Features [B, n, C] -> predictions [B, n, out_dim]; token by token, so it runs only where it is needed."""
        return self.pred(self.norm(x))
