"""PR-MIM, the method: partial reconstruction that also reconstructs what it throws ("Delving Deeper into Partial
Reconstruction in Masked Image Modeling").

The file follows Sec. 3 of the paper:

    3.1 Preliminary                 `TokenCounts`, `TokenOrder`: how many tokens are visible, retained and thrown, and
                                    which ones, as one permutation [visible | retained | thrown]
    3.2 Progressive reconstruction  `ProgressiveDecoder`: a decoder on the visible and retained tokens only
                                    `SpatialAggregation`: a convolution that reconstructs the thrown tokens
    3.3 Furthest sampling           `furthest_sampling`: Algorithm 1 of the supplementary
                                    `TokenOrderSampler`, `MaskCollator`: token orders, drawn in the DataLoader workers

Vocabulary: a token is *visible* (the encoder sees it) or *masked*. A masked token is *retained* (the decoder
reconstructs it) or *thrown* (only the aggregation does). *Kept* means visible or retained. True in a mask means masked.

Where the paper can be read in two ways, this file does the following. The numbers are of small models, in docs/studies:
of `applies_to` eight seeds (study_grid14.csv), of the others two (study_cpu.csv).

    `throw_ratio` is a share of all N tokens.
    Algorithm 1, a greedy max-min, picks the retained tokens. It does not maximise the sum of distances in Eq. 1.
    Only the thrown cells take the aggregation's output (`applies_to`). If all cells do, top-1 accuracy is 2.0 points
        lower.
    The aggregation comes before the norm, at decoder width. On the predictions, the masked error is 16 % higher.
    The convolution keeps PyTorch's initialisation. Two others gave no measurable difference.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor, nn

from models_vit import Block, init_weights, layer_norm
from util.addressed import MASK, addressed_uniform
from util.peer_sampling import attention_sampling, check_num_retained, random_sampling, running_cell_sampling
from util.pos_embed import height_and_width, position_table, sincos_pos_embed
from util.tokens import RETAINED, THROWN, VISIBLE, put_tokens, take_tokens


@dataclass(frozen=True)
class Method:
    """The arguments of the method, which the constructor of every framework takes by name.

    mask_ratio, throw_ratio: shares of all tokens that are masked and thrown.
    progressive: reconstruct the thrown tokens by an aggregation. False is plain partial reconstruction: they are not
        supervised.
    kernel_size, aggregation, applies_to: arguments of `SpatialAggregation`. `aggregation` is its `kind`.
    """

    mask_ratio: float = 0.75
    throw_ratio: float = 0.5
    progressive: bool = True
    kernel_size: int = 7
    aggregation: str = "dwconv"
    applies_to: str = "thrown"


METHOD_ARGUMENTS = tuple(field.name for field in fields(Method))


# ------------------------------------------------------------------------------- 3.1 Preliminary: the state of a token


@dataclass(frozen=True)
class TokenCounts:
    """How many tokens of each kind an image has. They are the same for every image, so all shapes are static."""

    num_visible: int
    num_retained: int
    num_thrown: int

    def __post_init__(self) -> None:
        if self.num_visible < 0 or self.num_thrown < 0 or self.num_retained < 1:
            raise ValueError(f"visible and thrown must be >= 0 and retained >= 1, got {self}")

    def __str__(self) -> str:
        return f"{self.num_visible} visible + {self.num_retained} retained + {self.num_thrown} thrown"

    @classmethod
    def from_ratios(
        cls,
        num_tokens: int,
        mask_ratio: float,
        throw_ratio: float,
        num_visible: int | None = None,
    ) -> "TokenCounts":
        """Returns the counts for `num_tokens` tokens. Both ratios are shares of all tokens.

        For example, 196 tokens with ratios 0.75 and 0.5 give 49 visible, 49 retained and 98 thrown tokens.
        num_visible: rounded down by default, as in MAE. Frameworks that mask units of tokens round in their own way.
        ValueError unless 0 <= throw_ratio < mask_ratio < 1 and at least one token is retained.
        """
        if not 0 <= throw_ratio < mask_ratio < 1:
            raise ValueError(
                f"ratios must satisfy 0 <= throw_ratio < mask_ratio < 1 (both are shares of all tokens), "
                f"got throw_ratio {throw_ratio} and mask_ratio {mask_ratio}"
            )
        if num_visible is None:
            num_visible = count_visible(num_tokens, mask_ratio)
        num_thrown = int(num_tokens * throw_ratio)
        num_retained = num_tokens - num_visible - num_thrown
        return cls(num_visible, num_retained, num_thrown)

    @property
    def num_tokens(self) -> int:
        return self.num_visible + self.num_retained + self.num_thrown

    @property
    def num_masked(self) -> int:
        return self.num_retained + self.num_thrown

    @property
    def num_kept(self) -> int:
        return self.num_visible + self.num_retained


def count_visible(num: int, mask_ratio: float) -> int:
    """Returns how many of `num` tokens or units of tokens are visible: rounded down, as in MAE."""
    return int(num * (1 - mask_ratio))


class TokenOrder:
    """A batch's `ids_shuffle` [B, N] on the device, with gathers and scatters of static shape and no boolean indexing.

    Each row of `ids_shuffle` lists the raster ids of an image's tokens as [visible | retained | thrown]. It is the one
    representation of token state. Below, "token order" means this order. "Raster order" means row by row.
    """

    def __init__(self, ids_shuffle: Tensor, counts: TokenCounts) -> None:
        ids_shuffle = torch.as_tensor(ids_shuffle)
        if ids_shuffle.shape[-1] != counts.num_tokens:
            raise ValueError(f"ids_shuffle must have {counts.num_tokens} columns, got {list(ids_shuffle.shape)}")
        self.counts = counts
        self.ids_shuffle = ids_shuffle
        self.ids_visible = ids_shuffle[:, : counts.num_visible]
        self.ids_kept = ids_shuffle[:, : counts.num_kept]
        self.ids_thrown = ids_shuffle[:, counts.num_kept :]
        places = torch.arange(counts.num_tokens, device=ids_shuffle.device)
        places = places.expand_as(ids_shuffle)
        self.ids_restore = torch.empty_like(ids_shuffle).scatter_(1, ids_shuffle, places)

    @property
    def mask(self) -> Tensor:
        """Bool [B, N] in raster order: True at masked tokens, retained or thrown."""
        return self.ids_restore >= self.counts.num_visible

    @property
    def thrown(self) -> Tensor:
        """Bool [B, N] in raster order: True at thrown tokens."""
        return self.ids_restore >= self.counts.num_kept

    @staticmethod
    def take(x: Tensor, ids: Tensor) -> Tensor:
        """Gathers the rows of `x` [B or 1, N, C] at `ids` [B, n], which differ within a row. Returns [B, n, C]."""
        return take_tokens(x, ids)

    def take_visible(self, x: Tensor) -> Tensor:
        """Gathers the visible ones of tokens in raster order: [B or 1, N, C] to [B, num_visible, C]."""
        return self.take(x, self.ids_visible)

    def take_kept(self, x: Tensor) -> Tensor:
        """Gathers the kept ones of tokens in raster order: [B or 1, N, C] to [B, num_kept, C] in token order."""
        return self.take(x, self.ids_kept)

    def append_mask_tokens(self, x: Tensor, mask_token: Tensor) -> Tensor:
        """Appends one mask token [1, 1, C] per retained token to the visible tokens `x` [B, num_visible, C].

        Thrown tokens get none. Returns [B, num_kept, C] in token order.
        """
        mask_tokens = mask_token.expand(len(x), self.counts.num_retained, -1)
        return torch.cat([x, mask_tokens], dim=1)

    def restore(self, x: Tensor) -> Tensor:
        """Puts the order's first n tokens `x` [B, n, C] back into raster order. All other tokens are zero.

        With n = num_kept the zeros are the thrown tokens. Returns [B, N, C].
        """
        ids = self.ids_shuffle[:, : x.shape[1]]
        return put_tokens(x, ids, self.counts.num_tokens)


# ------------------------------------------------------------------------------ 3.2 Progressive reconstruction scheme


class ProgressiveDecoder(nn.Module):
    """MAE's decoder on the kept tokens, followed by the aggregation of the thrown ones (Fig. 2c of the paper).

    grid_size: (rows, columns) of the tokens.
    embed_dim: width of the encoder's output.
    head: the last layer, either a module that takes features [B, n, C] or the output width of a linear layer.
    make_aggregation: returns what reconstructs the thrown tokens from features of a width, or None
        (`Framework.make_aggregation`). With None this is MAE's decoder (Fig. 2a), or plain partial reconstruction if
        tokens are thrown (Fig. 2b).
    decoder_embed_dim, decoder_depth, decoder_num_heads, mlp_ratio: sizes of the Transformer blocks.
    num_prefix: P, the number of class tokens with which the encoder's output begins.
    learned_pos_embed: train the table of positions. By default it is a frozen sine-cosine table.
    """

    compiled_methods: tuple[str, ...] = ("embed_tokens", "predict")  # by --compile, beside the blocks

    def __init__(
        self,
        grid_size: tuple[int, int],
        embed_dim: int,
        head: int | nn.Module,
        make_aggregation: Callable[[int], "SpatialAggregation | None"],
        decoder_embed_dim: int = 512,
        decoder_depth: int = 8,
        decoder_num_heads: int = 16,
        mlp_ratio: float = 4.0,
        num_prefix: int = 1,
        learned_pos_embed: bool = False,
    ) -> None:
        super().__init__()
        self.grid_size = grid_size
        self.num_prefix = num_prefix
        self.embed = nn.Linear(embed_dim, decoder_embed_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_embed_dim))
        self.pos_embed = position_table(decoder_embed_dim, grid_size, num_prefix, learned_pos_embed)
        self.blocks = nn.ModuleList()
        for _ in range(decoder_depth):
            self.blocks.append(Block(decoder_embed_dim, decoder_num_heads, mlp_ratio))
        self.norm = layer_norm(decoder_embed_dim)
        if isinstance(head, int):
            head = nn.Linear(decoder_embed_dim, head)
        self.pred = head
        init_weights(self)
        nn.init.normal_(self.mask_token, std=0.02)
        self.aggregation = make_aggregation(decoder_embed_dim)

    def forward(self, x: Tensor, order: TokenOrder, all_tokens: bool = False) -> Tensor:
        """Predicts the supervised tokens from the latent `x` [B, P + num_visible, D], class tokens first.

        Returns [B, num_supervised, out_dim] in token order. all_tokens: predict the visible tokens, too.
        """
        x = self.features(x, order)
        if not all_tokens:
            x = x[:, order.counts.num_visible :]
        return self.predict(x)

    def features(self, x: Tensor, order: TokenOrder) -> Tensor:
        """Turns the latent [B, P + num_visible, D] into features of all tokens [B, N, C] in token order.

        Plain partial reconstruction returns the features of the kept tokens [B, num_kept, C].
        """
        x = self.embed_tokens(x, order)
        for block in self.blocks:
            x = block(x)
        return self.aggregate(x[:, self.num_prefix :], order)

    def embed_tokens(self, x: Tensor, order: TokenOrder) -> Tensor:
        """Makes the input of the blocks from the latent [B, P + num_visible, D].

        Returns [B, P + num_kept, C]: the class tokens, then the kept tokens in token order, all with positions.
        """
        x = self.embed(x)
        P = self.num_prefix
        prefix = x[:, :P] + self.pos_embed[:, :P]
        tokens = order.append_mask_tokens(x[:, P:], self.mask_token)
        tokens = tokens + order.take_kept(self.pos_embed[:, P:])
        return torch.cat([prefix, tokens], dim=1)

    def aggregate(self, x: Tensor, order: TokenOrder) -> Tensor:
        """Adds the thrown tokens to the blocks' output on the kept ones [B, num_kept, C].

        Returns [B, N, C] in token order. Plain partial reconstruction returns `x` unchanged.
        """
        if self.aggregation is None:
            return x
        return self.aggregation(x, order, self.grid_size)

    def predict(self, x: Tensor) -> Tensor:
        """Applies norm and head to features [B, n, C], token by token. Returns [B, n, out_dim]."""
        return self.pred(self.norm(x))


class SpatialAggregation(nn.Module):
    """Reconstructs the thrown tokens from the kept ones. This class alone decides which tokens are read and replaced.

    It reads the grid of kept tokens, with zeros in the thrown cells.

    dim, kernel_size: number of channels, and odd side of the window. The `transformer` kind has no window.
    kind: name in `AGGREGATION` of the operator: `dwconv`, the paper's depth-wise convolution, or another one.
    applies_to: `thrown` replaces the thrown cells only, so retained tokens keep the decoder's output; or `all`.
    """

    APPLIES_TO = ("thrown", "all")
    compiled_methods = ("forward",)

    def __init__(
        self,
        dim: int,
        kernel_size: int = 7,
        kind: str = "dwconv",
        applies_to: str = "thrown",
    ) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, so that the window has a centre, got {kernel_size}")
        if applies_to not in self.APPLIES_TO:
            raise ValueError(f"unknown applies_to {applies_to!r}, choose from {', '.join(self.APPLIES_TO)}")
        if kind not in AGGREGATION:
            raise ValueError(f"unknown aggregation {kind!r}, choose from {', '.join(AGGREGATION)}")
        self.applies_to = applies_to
        self.operator = AGGREGATION[kind](dim, kernel_size)

    def forward(self, x: Tensor, order: TokenOrder, grid_size: tuple[int, int]) -> Tensor:
        """Adds the thrown tokens to the kept ones `x` [B, num_kept, C]. Returns [B, N, C]. Both are in token order."""
        grid = order.restore(x).unflatten(1, grid_size)  # [B, rows, columns, C], zeros at thrown
        filled = self.filled_cells(order).unflatten(1, grid_size)  # [B, rows, columns]
        grid = self.operator(grid, filled).flatten(1, 2)  # [B, N, C], raster
        if self.applies_to == "all":
            return order.take(grid, order.ids_shuffle)
        thrown = order.take(grid, order.ids_thrown)
        return torch.cat([x, thrown], dim=1)

    def filled_cells(self, order: TokenOrder) -> Tensor:
        """Returns the cells that hold a value, bool [B, N] in raster order: those of the kept tokens."""
        return ~order.thrown


# An operator of an aggregation is a module that is made from (dim, kernel_size). It takes the grid of kept tokens
# [B, rows, columns, C], with zeros in the thrown cells, and which cells hold a value, bool [B, rows, columns]: the kept
# ones, unless a framework leaves some of them empty. It returns a grid of the same shape. One that does not read
# kernel_size says `has_window = False`.


class DepthwiseConv(nn.Conv2d):
    """The paper's operator. It keeps PyTorch's default initialisation."""

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        self.to(memory_format=torch.channels_last)  # the layout of its gradient, which DDP's buckets follow

    def forward(self, grid: Tensor, filled: Tensor) -> Tensor:
        grid = super().forward(grid.permute(0, 3, 1, 2))
        return grid.permute(0, 2, 3, 1)


class AveragePool(nn.AvgPool2d):
    """A depth-wise convolution with a fixed uniform kernel. The zeros of thrown cells and of the border are counted."""

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__(kernel_size, stride=1, padding=kernel_size // 2)

    def forward(self, grid: Tensor, filled: Tensor) -> Tensor:
        grid = super().forward(grid.permute(0, 3, 1, 2))
        return grid.permute(0, 2, 3, 1)


class TransformerLayer(nn.Module):
    """One pre-norm block with heads of at most 32 channels. Positions are added first, as thrown cells are zero."""

    has_window = False

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        head_width = int(np.gcd(dim, 32))
        self.block = Block(dim, num_heads=dim // head_width)

    def forward(self, grid: Tensor, filled: Tensor) -> Tensor:
        _, rows, columns, dim = grid.shape
        positions = sincos_pos_embed(dim, (rows, columns), device=grid.device)
        tokens = grid.flatten(1, 2) + positions.to(grid.dtype)
        return self.block(tokens).view_as(grid)


class ConvNeXtLayer(nn.Module):
    """One ConvNeXt block (Liu et al., CVPR 2022) without layer scale: depth-wise convolution, norm, MLP, residual."""

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        self.dwconv = DepthwiseConv(dim, kernel_size)
        self.norm = layer_norm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim),
            nn.GELU(),
            nn.Linear(4 * dim, dim),
        )

    def forward(self, grid: Tensor, filled: Tensor) -> Tensor:
        x = self.norm(self.dwconv(grid, filled))
        return grid + self.mlp(x)


AGGREGATION: dict[str, Callable[[int, int], nn.Module]] = {
    "dwconv": DepthwiseConv,
    "avgpool": AveragePool,
    "transformer": TransformerLayer,
    "convnext": ConvNeXtLayer,
}


# ------------------------------------------------------------------------------------------- 3.3 Furthest sampling


def furthest_sampling(coords: np.ndarray, num_retained: int) -> np.ndarray:
    """Algorithm 1 for a batch of lists: each pick is the token furthest from all tokens picked before it.

    coords: [B, M, 2], the cells of M masked tokens in *shuffled* order. Returns positions in that list, int64
    [B, num_retained], in the order picked. Raises ValueError unless 1 <= num_retained <= M.

    The first pick is position 0, and ties go to the lowest position. The shuffled order makes both unbiased. In raster
    order, the upper half of a 14x14 grid would retain twice as many tokens as the lower half at throw_ratio 0.25.

    Algorithm 1 recomputes all distances at each step. A running minimum gives the same picks, and so do squared
    distances. As integers, equal distances are exactly equal.
    """
    check_num_retained(coords, num_retained)
    coords = np.moveaxis(np.asarray(coords), -1, 0)  # [2, B, M]
    largest = np.inf
    if np.issubdtype(coords.dtype, np.integer):
        coords = as_small_integers(coords)
        largest = np.iinfo(coords.dtype).max
    coords = np.ascontiguousarray(coords)
    _, batch_size, num_masked = coords.shape
    images = np.arange(batch_size)
    nearest = np.full((batch_size, num_masked), largest, coords.dtype)  # squared distance to the nearest pick
    picks = np.empty((batch_size, num_retained), np.int64)
    pick = np.zeros(batch_size, np.int64)
    for k in range(num_retained):
        picks[:, k] = pick
        picked = coords[:, images, pick]  # [2, B]
        difference = coords - picked[..., None]  # [2, B, M]
        difference *= difference
        distance = difference[0] + difference[1]
        np.minimum(nearest, distance, out=nearest)
        pick = nearest.argmax(axis=1)
    return picks


def as_small_integers(coords: np.ndarray) -> np.ndarray:
    """Shifts integer coordinates to begin at 0. They become int16, which is fastest, if squared distances fit."""
    coords = coords - coords.min()
    if coords.max() <= 127:  # 2 * 127^2 < 2^15
        return coords.astype(np.int16)
    return coords.astype(np.int64)


# A sampling takes lists of masked tokens, coords [B, M, 2] in shuffled order, which is its only randomness, and
# num_retained. It returns positions in the lists, int64 [B, num_retained].
SAMPLING: dict[str, Callable[..., np.ndarray]] = {
    "furthest": furthest_sampling,
    "random": random_sampling,
    "running_cell": running_cell_sampling,
    "attention": attention_sampling,
}


def addressed_noise(
    seed: int,
    epoch: int | np.ndarray,
    indices: Sequence[int] | np.ndarray,
    num_tokens: int,
) -> np.ndarray:
    """Returns uniform noise in [0, 1), float64 [B, num_tokens]. It is the only source of masking randomness.

    Row b depends on `(seed, epoch, indices[b])` alone, not on batch or worker. `epoch` is an integer or an array [B].
    """
    return addressed_uniform(MASK, seed, epoch, indices, num_tokens)


class TokenOrderSampler:
    """A pure function from noise to token orders: `sampler(noise [B, N])` returns `ids_shuffle`, int64 [B, N].

    Each row lists the raster ids of an image's tokens as [visible | retained | thrown], ascending inside each segment.
    Sorting the noise shuffles the tokens. The first are visible, as in MAE. The sampling function gets the others.

    grid_size, counts: (rows, columns) of the tokens or one side of a square, and how many tokens of each kind.
    sampling: name in `SAMPLING` of the function that picks the retained tokens.
    mask_unit: side, in tokens, of the units, the squares that are masked as a whole (SimMIM). Throwing stays per token.
    """

    def __init__(
        self,
        grid_size: int | tuple[int, int],
        counts: TokenCounts,
        sampling: str = "furthest",
        mask_unit: int = 1,
    ) -> None:
        rows, columns = height_and_width(grid_size)
        if rows * columns != counts.num_tokens:
            raise ValueError(f"the grid must have the {counts.num_tokens} tokens of {counts}, got {rows} x {columns}")
        if sampling not in SAMPLING:
            raise ValueError(f"unknown sampling {sampling!r}, choose from {', '.join(SAMPLING)}")
        if mask_unit < 1 or rows % mask_unit or columns % mask_unit or counts.num_visible % mask_unit**2:
            raise ValueError(
                f"mask_unit {mask_unit} must divide the grid {rows} x {columns}, "
                f"and its square the {counts.num_visible} visible tokens"
            )
        self.grid_size = (rows, columns)
        self.counts = counts
        self.sampling = sampling
        self.mask_unit = mask_unit
        cells = np.divmod(np.arange(rows * columns), columns)
        self.coords = np.stack(cells, axis=-1).astype(np.int16)  # (row, column) of each token, [N, 2]

    def __call__(self, noise: np.ndarray, visible: np.ndarray | None = None) -> np.ndarray:
        """Returns ids_shuffle [B, N] for noise [B, N]. `visible`, bool [B or 1, N], overrides the noise's choice."""
        shuffled = self.shuffle(noise, visible)
        retained = self.choose_retained(shuffled[:, self.counts.num_visible :])
        return self.sort(shuffled, retained)

    def shuffle(self, noise: np.ndarray, visible: np.ndarray | None = None) -> np.ndarray:
        """Returns the tokens of each image in random order, raster ids int64 [B, N]: the visible ones come first."""
        noise = np.asarray(noise)
        if noise.ndim != 2 or noise.shape[1] != self.counts.num_tokens:
            raise ValueError(f"noise must have shape [B, {self.counts.num_tokens}], got {list(noise.shape)}")
        if visible is None and self.mask_unit > 1:
            visible = self.visible_tokens(noise)
        if visible is not None:  # visible tokens become negative and come first; masked ones keep their order
            noise = noise - visible
        return noise.argsort(axis=1)

    def choose_retained(self, masked: np.ndarray) -> np.ndarray:
        """Returns those of the masked tokens [B, n], raster ids in shuffled order, that are retained."""
        if self.counts.num_thrown == 0:
            return masked
        choose = SAMPLING[self.sampling]
        picks = choose(self.coords[masked], self.counts.num_retained)
        return np.take_along_axis(masked, picks, axis=1)

    def sort(self, shuffled: np.ndarray, retained: np.ndarray) -> np.ndarray:
        """Returns ids_shuffle [B, N] of shuffled tokens [B, N], of which these [B, num_retained] are retained."""
        state = np.full(shuffled.shape, THROWN, np.int8)
        np.put_along_axis(state, shuffled[:, : self.counts.num_visible], VISIBLE, axis=1)
        np.put_along_axis(state, retained, RETAINED, axis=1)
        return sort_by_state(state)

    def split_units(self, values: np.ndarray) -> np.ndarray:
        """Splits values of tokens [B, N] by units. Returns [B, rows / side, side, columns / side, side]."""
        rows, columns = self.grid_size
        side = self.mask_unit
        return values.reshape(-1, rows // side, side, columns // side, side)

    def spread_units(self, values: np.ndarray) -> np.ndarray:
        """Gives the values of units [B, units] to all tokens inside them. Returns [B, N]."""
        rows, columns = self.grid_size
        side = self.mask_unit
        grid = values.reshape(-1, rows // side, columns // side)
        tokens = grid.repeat(side, axis=1).repeat(side, axis=2)
        return tokens.reshape(len(values), -1)

    def visible_tokens(self, noise: np.ndarray) -> np.ndarray:
        """Chooses the visible tokens by noise [B, N]. Returns bool [B, N] with `num_visible` True per row."""
        # A sum of uniform numbers modulo 1 is uniform and independent of each of its terms. If it chooses the units,
        # the shuffled order of the tokens inside them stays unbiased. For unit 1 it is the noise itself.
        unit_noise = self.split_units(noise).sum(axis=(2, 4)) % 1
        unit_noise = unit_noise.reshape(len(noise), -1)  # [B, units]
        num_units = self.counts.num_visible // self.mask_unit**2
        visible_units = unit_noise.argsort(axis=1)[:, :num_units]
        visible = np.zeros(unit_noise.shape, bool)
        np.put_along_axis(visible, visible_units, True, axis=1)
        return self.spread_units(visible)


def sort_by_state(state: np.ndarray) -> np.ndarray:
    """Returns ids_shuffle [B, N] of tokens whose state [B, N] is VISIBLE, RETAINED or THROWN."""
    return state.argsort(axis=1, kind="stable")  # stable = raster-ascending inside each segment


class MaskCollator:
    """Collates samples and draws their token orders, once per batch and in the DataLoader worker.

    A sample is `(img [C, H, W], label, (epoch, index))`. A batch is
    `(imgs [B, C, H, W] as stored: uint8, uint16 or float32, labels [B], ids_shuffle int64 [B, N])`.

    sampler, seed: the token order of a sample depends on `(seed, epoch, index)` alone.
    shared_visible: all images share the visible tokens of the first one (GreenMIM), but throw tokens of their own.
    """

    def __init__(self, sampler: TokenOrderSampler, seed: int, shared_visible: bool = False) -> None:
        self.sampler = sampler
        self.seed = seed
        self.shared_visible = shared_visible

    def __call__(self, samples: Iterable[tuple]) -> tuple[Tensor, ...]:
        imgs, labels, addresses = zip(*samples, strict=True)
        imgs = torch.stack(imgs)
        epochs, indices = np.asarray(addresses).T
        noise = addressed_noise(self.seed, epochs, indices, self.sampler.counts.num_tokens)
        ids_shuffle = self.draw(noise, imgs)
        return imgs, torch.as_tensor(labels), torch.from_numpy(ids_shuffle)

    def draw(self, noise: np.ndarray, imgs: Tensor) -> np.ndarray:
        """Returns ids_shuffle [B, N] for noise [B, N]. Subclasses read the images, too."""
        return self.sampler(noise, self.shared_tokens(noise))

    def shared_tokens(self, noise: np.ndarray) -> np.ndarray | None:
        """Returns the visible tokens that all images share, bool [1, N], or None if each has its own."""
        if self.shared_visible:
            return self.sampler.visible_tokens(noise[:1])
        return None
