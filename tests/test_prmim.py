import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from prmim import (
    AGGREGATION,
    SAMPLING,
    MaskCollator,
    SpatialAggregation,
    TokenCounts,
    TokenOrder,
    TokenOrderSampler,
    addressed_noise,
    furthest_sampling,
)

# ---------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("throw_ratio", "visible", "retained", "thrown"),
    [
        (0, 49, 147, 0),
        (0.25, 49, 98, 49),
        (0.5, 49, 49, 98),
        (0.65, 49, 20, 127),
    ],
)
def test_counts_of_the_paper(throw_ratio, visible, retained, thrown):
    counts = TokenCounts.from_ratios(196, 0.75, throw_ratio)
    assert counts == TokenCounts(visible, retained, thrown)
    assert counts.num_tokens == 196
    assert counts.num_masked == 147
    assert counts.num_kept == visible + retained
    assert str(counts) == f"49 visible + {retained} retained + {thrown} thrown"


def test_counts_are_cut_off_and_not_rounded():
    """7 of 10 visible at 7.5, 1 thrown at 1.6: as int() in MAE."""
    assert TokenCounts.from_ratios(10, 0.25, 0.16) == TokenCounts(7, 2, 1)


@pytest.mark.parametrize(
    ("mask_ratio", "throw_ratio"),
    [
        (0.75, 0.75),
        (0.75, 0.8),
        (0.75, -0.1),
        (1.0, 0.5),
        (0.0, 0.0),
        (1.2, 0.5),
    ],
)
def test_impossible_ratios_are_refused_by_name(mask_ratio, throw_ratio):
    with pytest.raises(ValueError, match=f"throw_ratio {throw_ratio} and mask_ratio {mask_ratio}"):
        TokenCounts.from_ratios(196, mask_ratio, throw_ratio)


def test_nothing_retained_is_refused():
    with pytest.raises(ValueError, match="retained >= 1"):
        TokenCounts(4, 0, 12)


# ----------------------------------------------------------------------------------------------------------- noise


def test_noise_is_uniform_and_uncorrelated():
    noise = addressed_noise(3, 5, np.arange(4000), 196)
    assert noise.shape == (4000, 196)
    assert noise.min() >= 0
    assert noise.max() < 1
    frequencies, _ = np.histogram(noise, bins=64, range=(0, 1))
    expected = noise.size / 64
    chi_squared = ((frequencies - expected) ** 2 / expected).sum()
    assert chi_squared < 120  # with 63 degrees of freedom, P(> 120) is 2e-5
    limit = 5 / 12 / noise.size**0.5
    for other in (
        np.roll(noise, 1, axis=1),  # the next token
        np.roll(noise, 1, axis=0),  # the next sample
        addressed_noise(3, 6, np.arange(4000), 196),  # the next epoch
    ):
        covariance = ((noise - 0.5) * (other - 0.5)).mean()
        assert abs(covariance) < limit


def test_the_stream_of_masks_stays_the_same():
    """If these numbers change, every user's seed gives another run."""
    assert addressed_noise(0, 0, [0], 2)[0].tolist() == [0.7177539261763675, 0.35372306989588875]


# -------------------------------------------------------------------------------------------------------- sampling


def literal_algorithm_1(coords, num_retained):
    """Algorithm 1 of the supplementary on one shuffled list: slice the distance matrix, minimum, first arg max."""
    coords = coords.astype(np.float64)
    differences = coords[:, None] - coords[None]
    distances = np.sqrt((differences**2).sum(axis=-1))
    tokens = [0]
    while len(tokens) < num_retained:
        nearest = distances[:, tokens].min(axis=1)
        tokens.append(int(nearest.argmax()))
    return tokens


def cells_of(tokens, columns):
    """Returns the (row, column) of raster ids."""
    return np.stack(np.divmod(tokens, columns), axis=-1)


def shuffled_cells(side, num_masked, batch):
    """Returns the cells of random tokens of a square grid in random order, [batch, num_masked, 2]."""
    rng = np.random.default_rng(side + num_masked)
    lists = [rng.choice(side * side, num_masked, replace=False) for _ in range(batch)]
    return cells_of(np.array(lists), side)


@pytest.mark.parametrize(
    ("side", "num_masked", "num_retained", "batch"),
    [
        (14, 147, 98, 40),
        (14, 147, 49, 40),
        (14, 147, 20, 40),
        (8, 48, 16, 40),
        (4, 12, 12, 40),
        (32, 768, 256, 3),
        (160, 300, 40, 3),
    ],
)
def test_furthest_sampling_is_algorithm_1_pick_by_pick(side, num_masked, num_retained, batch):
    coords = shuffled_cells(side, num_masked, batch)
    picks = furthest_sampling(coords, num_retained)
    assert picks.tolist() == [literal_algorithm_1(c, num_retained) for c in coords]


# ----------------------------------------------------------------------------------------------------------- order


HALF = TokenCounts(16, 16, 32)  # of 8 x 8 tokens


def segments(ids, counts):
    return np.split(np.asarray(ids), [counts.num_visible, counts.num_kept], axis=1)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(("rows", "columns"), [(14, 14), (6, 10)])
def test_an_order_is_the_head_of_the_sorted_noise_then_what_the_sampling_picks_from_the_rest(sampling, rows, columns):
    """The head is visible, as in MAE. The rest is passed in its shuffled order. Segments are ascending."""
    num_tokens = rows * columns
    counts = TokenCounts.from_ratios(num_tokens, 0.75, 0.5)
    noise = addressed_noise(0, 0, np.arange(20), num_tokens)
    ids = TokenOrderSampler((rows, columns), counts, sampling)(noise)
    assert ids.dtype == np.int64
    assert (np.sort(ids, axis=1) == np.arange(num_tokens)).all()
    visible, retained, thrown = segments(ids, counts)
    for segment in (visible, retained, thrown):
        assert (np.diff(segment, axis=1) > 0).all()
    for b in range(20):
        shuffled = noise[b].argsort()
        head = shuffled[: counts.num_visible]
        rest = shuffled[counts.num_visible :]
        assert set(visible[b]) == set(head)
        picks = SAMPLING[sampling](cells_of(rest, columns)[None], counts.num_retained)[0]
        assert set(retained[b]) == set(rest[picks])


SIMMIM = TokenCounts(76, 62, 58)  # at 224 px: 19 of 49 units of 2 x 2 tokens are visible, and .30 are thrown


def order_of_units(sampling):
    sampler = TokenOrderSampler(14, SIMMIM, sampling, mask_unit=2)
    ids = sampler(addressed_noise(0, 0, np.arange(500), 196))
    return TokenOrder(torch.from_numpy(ids), SIMMIM)


def by_units(tokens):
    """Returns bool [500, 196] as float [500, 7, 7, 4], the tokens of each unit."""
    grid = tokens.view(500, 7, 2, 7, 2).transpose(2, 3)
    return grid.flatten(3).float()


def test_mask_units_are_masked_whole_and_thrown_by_token():
    order = order_of_units("furthest")
    masked = by_units(order.mask).mean(dim=3)
    assert masked.unique().tolist() == [0.0, 1.0]
    assert masked.sum(dim=(1, 2)).eq(30).all()
    thrown = by_units(order.thrown)
    share_of_unit = thrown.mean(dim=3)
    assert ((share_of_unit > 0) & (share_of_unit < 1)).any()
    share_of_corner = thrown.mean(dim=(0, 1, 2))
    ratio = share_of_corner / share_of_corner.mean()
    assert (ratio - 1).abs().max() < 0.06  # no corner of a unit is thrown more than another


def test_tokens_of_a_unit_are_thrown_independently_of_each_other():
    """The number of thrown tokens in a masked unit has the variance of 4 draws out of 58 thrown and 62 retained."""
    order = order_of_units("random")
    masked = by_units(order.mask).sum(dim=3)
    thrown = by_units(order.thrown).sum(dim=3)
    share = 58 / 120
    expected = 4 * share * (1 - share) * 116 / 119
    assert thrown[masked == 4].var() == pytest.approx(expected, rel=0.05)


def test_order_sampler_refuses_noise_of_another_length():
    with pytest.raises(ValueError, match=r"\[B, 64\]"):
        TokenOrderSampler(8, HALF)(np.zeros((2, 196)))


def test_token_order_knows_the_state_of_each_token():
    order = an_order(side=8, batch=3)
    for b, ids in enumerate(order.ids_shuffle.tolist()):
        for token in range(64):
            place = ids.index(token)
            assert order.mask[b, token] == (place >= 16)
            assert order.thrown[b, token] == (place >= 32)
            assert order.ids_restore[b, token] == place


def test_token_order_takes_and_restores():
    order = an_order(side=8, batch=3)
    x = torch.randn(3, 64, 5)
    visible = order.take_visible(x)
    kept = order.take_kept(x)
    for b, ids in enumerate(order.ids_shuffle):
        assert torch.equal(visible[b], x[b, ids[:16]])
        assert torch.equal(kept[b], x[b, ids[:32]])
    same = x[:1].expand(3, -1, -1)
    assert torch.equal(order.take_visible(x[:1]), order.take_visible(same))
    everything = order.take(x, order.ids_shuffle)
    assert torch.equal(order.restore(everything), x)
    expected = x.masked_fill(order.thrown.unsqueeze(-1), 0)
    assert torch.equal(order.restore(kept), expected)


def test_token_order_refuses_another_grid():
    with pytest.raises(ValueError, match="64 columns"):
        TokenOrder(torch.arange(196).view(1, -1), HALF)


# -------------------------------------------------------------------------------------------------------- collator


def sample(epoch, index):
    img = torch.full((3, 8, 8), index, dtype=torch.uint8)
    return img, index % 10, (epoch, index)


def test_collator_addresses_each_sample():
    sampler = TokenOrderSampler(8, HALF)
    collate = MaskCollator(sampler, seed=3)
    imgs, labels, ids = collate([sample(2, 5), sample(2, 9), sample(2, 40)])
    assert imgs.dtype == torch.uint8
    assert imgs.shape == (3, 3, 8, 8)
    assert imgs[:, 0, 0, 0].tolist() == [5, 9, 40]
    assert labels.tolist() == [5, 9, 0]
    expected = sampler(addressed_noise(3, 2, [5, 9, 40], 64))
    assert torch.equal(ids, torch.from_numpy(expected))
    _, _, alone = collate([sample(2, 9)])
    assert torch.equal(alone[0], ids[1])
    _, _, later = collate([sample(3, 9)])
    assert not torch.equal(later[0], ids[1])


def test_collator_shares_the_visible_set_but_not_the_thrown():
    collate = MaskCollator(TokenOrderSampler(8, HALF), seed=0, shared_visible=True)
    _, _, ids = collate([sample(0, index) for index in range(6)])
    visible, retained, _ = segments(ids, HALF)
    assert (visible == visible[0]).all()
    for row in ids.tolist():
        assert sorted(row) == list(range(64))
    assert len(np.unique(retained, axis=0)) == 6


# ----------------------------------------------------------------------------------------------------- aggregation


def an_order(side=6, batch=2):
    """Of which half of the tokens are thrown."""
    counts = TokenCounts.from_ratios(side * side, 0.75, 0.5)
    noise = addressed_noise(0, 0, np.arange(batch), side * side)
    ids = TokenOrderSampler(side, counts)(noise)
    return TokenOrder(torch.from_numpy(ids), counts)


@pytest.mark.parametrize("applies_to", SpatialAggregation.APPLIES_TO)
def test_dwconv_against_a_loop_over_cells(applies_to):
    """A thrown cell (or any cell) is the bias plus the weighted sum of the kept tokens in its window, per channel."""
    order = an_order()
    aggregate = SpatialAggregation(4, 3, "dwconv", applies_to).double()
    kept = torch.randn(2, 18, 4, dtype=torch.float64)
    out = aggregate(kept, order, (6, 6))
    weight = aggregate.operator.weight  # [4, 1, 3, 3]
    for b in range(2):
        kept_at = {}
        for rank, token in enumerate(order.ids_kept[b].tolist()):
            kept_at[divmod(token, 6)] = kept[b, rank]
        for rank, token in enumerate(order.ids_shuffle[b].tolist()):
            row, column = divmod(token, 6)
            if applies_to == "thrown" and (row, column) in kept_at:
                expected = kept_at[row, column]
            else:
                expected = aggregate.operator.bias.clone()
                for down in (-1, 0, 1):
                    for across in (-1, 0, 1):
                        neighbour = kept_at.get((row + down, column + across))
                        if neighbour is not None:
                            expected += weight[:, 0, down + 1, across + 1] * neighbour
            assert_close(out[b, rank], expected)


@pytest.mark.parametrize("kind", AGGREGATION)
def test_aggregation_kinds(kind):
    aggregate = SpatialAggregation(32, 5, kind)
    kept = torch.randn(2, 18, 32, requires_grad=True)
    out = aggregate(kept, an_order(), (6, 6))
    assert out.shape == (2, 36, 32)
    assert torch.equal(out[:, :18], kept)  # applies_to="thrown" leaves the kept tokens unchanged
    thrown = out[:, 18:]
    assert thrown.std(dim=1).min() > 1e-4  # not one value for all thrown cells
    thrown.square().sum().backward()
    assert kept.grad.abs().sum() > 0
    num_parameters = len(list(aggregate.parameters()))
    assert (num_parameters == 0) == (kind == "avgpool")


def test_the_convnext_aggregation_has_a_residual():
    order = an_order()
    kept = torch.randn(2, 18, 8)
    block = SpatialAggregation(8, 5, "convnext", applies_to="all")
    nn.init.zeros_(block.operator.mlp[2].weight)
    nn.init.zeros_(block.operator.mlp[2].bias)
    out = block(kept, order, (6, 6))
    assert torch.equal(out[:, :18], kept)
    assert not out[:, 18:].any()


def test_average_pool_is_the_convolution_with_a_uniform_kernel():
    order = an_order()
    kept = torch.randn(2, 18, 8)
    pool = SpatialAggregation(8, 5, "avgpool")
    conv = SpatialAggregation(8, 5, "dwconv")
    nn.init.constant_(conv.operator.weight, 1 / 25)
    nn.init.zeros_(conv.operator.bias)
    expected = conv(kept, order, (6, 6))
    assert_close(pool(kept, order, (6, 6)), expected)


class PartialConv(nn.Conv2d):
    """A convolution whose output is divided by the share of its window that is filled (Liu et al., ECCV 2018)."""

    def __init__(self, dim, kernel_size):
        super().__init__(
            dim,
            dim,
            kernel_size,
            padding=kernel_size // 2,
            groups=dim,
            bias=False,
        )
        self.window = (kernel_size, kernel_size)

    def forward(self, grid, filled):
        filled = filled.unsqueeze(1).to(grid.dtype)  # [B, 1, rows, columns]
        share = F.avg_pool2d(filled, self.window, stride=1, padding=self.padding)
        total = super().forward(grid.movedim(3, 1))
        mean = total / share.clamp(min=1e-6)
        return mean.movedim(1, 3)


def test_an_operator_is_told_which_cells_are_filled(monkeypatch):
    """With a uniform kernel, a partial convolution is the mean of the kept tokens in the window."""
    monkeypatch.setitem(AGGREGATION, "partialconv", PartialConv)
    order = an_order()
    kept = torch.randn(2, 18, 4)
    aggregate = SpatialAggregation(4, 5, "partialconv")
    nn.init.constant_(aggregate.operator.weight, 1 / 25)
    out = aggregate(kept, order, (6, 6))
    for b in range(2):
        ids = order.ids_kept[b]
        for rank, token in enumerate(order.ids_thrown[b]):
            down = (ids // 6 - token // 6).abs()
            across = (ids % 6 - token % 6).abs()
            is_near = torch.maximum(down, across) <= 2
            assert is_near.any()
            expected = kept[b, is_near].mean(dim=0)
            assert_close(out[b, 18 + rank], expected)


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (16, 1),
        (64, 2),
        (80, 5),
        (112, 7),
    ],
)
def test_the_transformer_aggregation_fits_every_width_of_a_decoder(width, heads):
    aggregation = SpatialAggregation(width, kind="transformer")
    assert aggregation.operator.block.attn.num_heads == heads
    ids = torch.arange(16)[None]
    order = TokenOrder(ids, TokenCounts(4, 6, 6))
    out = aggregation(torch.randn(1, 10, width), order, (4, 4))
    assert out.shape == (1, 16, width)
