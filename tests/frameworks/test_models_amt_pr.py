"""AMT on MAE and on SimMIM: counts of both phases, draws by attention, slow derivations, and the release's names."""

import numpy as np
import pytest
import torch

from frameworks import models_amt_pr
from frameworks.hooks.attention_phases import cls_attention
from frameworks.models_amt_pr import (
    ON_MAE,
    ON_SIMMIM,
    AMTOrderSampler,
    AMTSimMIMViT,
    AMTViT,
    count_amt,
    count_amt_units,
)
from frameworks.models_simmim_pr import SimMIMViT
from models_mae_pr import MaskedAutoencoderViT
from prmim import TokenCounts, addressed_noise
from tests.frameworks.test_models_simmim_pr import assert_is_slow_simmim, release, table_row
from tests.test_models_mae_pr import SIZES, assert_is_slow_mae, assert_same_weights, official_state_dict, perturbed

# 36 tokens, which are 9 units.
SIMMIM = dict(img_size=24, patch_size=4, embed_dim=24, depth=2, num_heads=3)


def noise_of(batch, num_tokens):
    return addressed_noise(0, 0, np.arange(batch), num_tokens)


def orders(model, batch):
    sampler = model.sampler("attention")
    return torch.from_numpy(sampler(noise_of(batch, model.counts.num_tokens)))


# ---------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("num_tokens", "mask_ratio", "throw_ratio", "counts"),
    [
        (196, 0.85, 0.40, TokenCounts(30, 88, 78)),  # AMT's mask ratio .45 and throw ratio .40
        (100, 0.85, 0.40, TokenCounts(15, 45, 40)),  # 100 * (.85 - .4) is 44.999999999999993
    ],
)
def test_counts(num_tokens, mask_ratio, throw_ratio, counts):
    assert count_amt(num_tokens, mask_ratio, throw_ratio) == counts


@pytest.mark.parametrize(
    ("num_units", "mask_ratio", "throw_ratio", "units"),
    [
        (49, 0.70, 0.26, (14, 22, 13)),  # AMT's mask ratio .44 and throw ratio .26
        (49, 0.44, 0.0, (27, 22, 0)),
        (100, 0.7, 0.26, (30, 44, 26)),  # .7 - .26 is not exactly .44
    ],
)
def test_counts_of_units(num_units, mask_ratio, throw_ratio, units):
    """A unit has four tokens."""
    visible, retained, thrown = units
    expected = TokenCounts(4 * visible, 4 * retained, 4 * thrown)
    assert count_amt_units(4 * num_units, mask_ratio, throw_ratio, 2) == expected


@pytest.mark.parametrize(
    ("make", "random_phase", "attention_phase"),
    [
        (models_amt_pr.amt_vit_base_patch16, TokenCounts(49, 147, 0), TokenCounts(30, 88, 78)),
        (models_amt_pr.amt_simmim_vit_base_patch16, TokenCounts(108, 88, 0), TokenCounts(56, 88, 52)),
    ],
)
def test_the_random_phase_throws_nothing(make, random_phase, attention_phase):
    with torch.device("meta"):
        model = make()
    assert model.counts == attention_phase
    model.set_phase(has_maps=False)
    assert model.counts == random_phase
    assert model.sampler("attention").counts == random_phase
    model.set_phase(has_maps=True)
    assert model.counts == attention_phase


# --------------------------------------------------------------------------------------------------------- sampler


def of_tokens(units, side):
    """Gives the values of 4 x 4 units [B, 16] to their side x side tokens. Returns [B, N]."""
    grid = units.reshape(-1, 4, 4)
    tokens = grid.repeat(side, axis=1).repeat(side, axis=2)
    return tokens.reshape(len(units), -1)


@pytest.mark.parametrize("unit", [1, 2])
def test_the_first_drawn_are_retained_the_next_thrown_the_last_visible(unit):
    """Weights so unequal that the order of the draws is certain. A unit has unit x unit tokens, an image 16 units."""
    counts = TokenCounts(4 * unit**2, 8 * unit**2, 4 * unit**2)
    sampler = AMTOrderSampler(4 * unit, counts, "attention", unit)
    rng = np.random.default_rng(0)
    drawn = rng.random((30, 16)).argsort(axis=1)  # by units: 0 is drawn first
    weights = of_tokens(1e6 ** (15 - drawn), unit)
    ids = sampler(noise_of(30, counts.num_tokens), weights=weights)
    draws = np.take_along_axis(of_tokens(drawn, unit), ids, axis=1)
    visible, retained, thrown = np.split(draws, [counts.num_visible, counts.num_kept], axis=1)
    assert (visible >= 12).all()
    assert (retained < 8).all()
    assert ((thrown >= 8) & (thrown < 12)).all()
    for segment in np.split(ids, [counts.num_visible, counts.num_kept], axis=1):
        assert (np.diff(segment, axis=1) > 0).all()


@pytest.mark.parametrize("unit", [1, 2])
def test_a_unit_is_retained_with_the_probability_of_its_weight(unit):
    """One of 4 units is retained: the first draw. Only the sum over a unit's tokens counts."""
    num = 20_000
    side = 2 * unit
    counts = TokenCounts(unit**2, unit**2, 2 * unit**2)
    sampler = AMTOrderSampler(side, counts, "attention", unit)
    weights = np.zeros((side, side))
    weights[::unit, unit - 1 :: unit] = [[1, 2], [3, 4]]  # one token of each unit has it all
    of_images = np.tile(weights.ravel(), (num, 1))
    ids = sampler(noise_of(num, side**2), weights=of_images)
    row, column = np.divmod(ids[:, counts.num_visible], side)  # of the first retained token
    first_drawn = 2 * (row // unit) + column // unit
    shares = np.bincount(first_drawn, minlength=4) / num
    assert shares == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.015)


# ------------------------------------------------------------------------------------------------------------ model


@torch.no_grad()
@pytest.mark.parametrize(
    ("has_maps", "counts"),
    [
        (True, TokenCounts(3, 7, 6)),
        (False, TokenCounts(4, 12, 0)),
    ],
)
def test_loss_and_predictions_against_the_slow_derivation(has_maps, counts):
    torch.manual_seed(0)
    model = perturbed(AMTViT(**SIZES, **ON_MAE, progressive=False, norm_pix_loss=True))
    model.set_phase(has_maps=has_maps)
    assert model.counts == counts
    assert_is_slow_mae(model, orders(model, 2))


@pytest.mark.parametrize("applies_to", ["thrown", "all"])
@pytest.mark.parametrize("has_maps", [True, False])
def test_with_the_aggregation_both_phases_use_every_parameter(applies_to, has_maps):
    """DDP with a static graph needs that."""
    model = AMTViT(**SIZES, **ON_MAE, applies_to=applies_to)
    model.set_phase(has_maps=has_maps)
    ids = orders(model, 2)
    imgs = torch.randn(2, 3, 32, 32)
    model(imgs, ids)["pixel"].backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
    _, mask = model.reconstruct(imgs, ids)
    assert (mask.sum(dim=1) == model.counts.num_masked).all()


def test_weights_are_mae_s():
    source = perturbed(MaskedAutoencoderViT(**SIZES, throw_ratio=0.0)).float()
    model = AMTViT(**SIZES, **ON_MAE, progressive=False)
    model.load_official({"model": official_state_dict(source)})
    assert_same_weights(model, source)
    assert model.state_dict().keys() == source.state_dict().keys()


# ---------------------------------------------------------------------------------------------------------- SimMIM


@torch.no_grad()
@pytest.mark.parametrize(
    ("has_maps", "progressive", "counts"),
    [
        (True, False, TokenCounts(8, 16, 12)),
        (False, False, TokenCounts(20, 16, 0)),
        (True, True, TokenCounts(8, 16, 12)),
    ],
)
def test_simmim_against_the_slow_derivation(has_maps, progressive, counts):
    torch.manual_seed(0)
    model = perturbed(AMTSimMIMViT(**SIMMIM, **ON_SIMMIM, progressive=progressive, kernel_size=3))
    model.set_phase(has_maps=has_maps)
    assert model.counts == counts
    assert_is_slow_simmim(model, orders(model, 2))


@torch.no_grad()
@pytest.mark.parametrize("kind", [SimMIMViT, AMTSimMIMViT])
def test_cls_attention_is_the_softmax_of_the_last_block(kind):
    torch.manual_seed(0)
    model = perturbed(kind(**SIMMIM))
    attention = model.blocks[-1].attn
    inputs = []
    model.blocks[-1].norm1.register_forward_hook(lambda module, args, output: inputs.extend(output))
    imgs = torch.randn(2, 3, 24, 24, dtype=torch.float64)
    found = cls_attention(model, imgs)
    assert found.shape == (2, 3, 36)
    tokens = inputs[1]  # of the second image, [T, D]
    q_weight, k_weight, _ = attention.qkv.weight.chunk(3)
    q = q_weight @ tokens[0] + attention.q_bias
    k = tokens @ k_weight.T
    for head in range(3):
        span = slice(8 * head, 8 * head + 8)
        logits = k[:, span] @ q[span] / 8**0.5
        if kind is SimMIMViT:
            rows = [table_row("cls", key, 6, 6) for key in ("cls", *range(36))]
            table = model.rel_pos_bias.relative_position_bias_table
            logits = logits + table[rows, head]
        expected = logits.softmax(dim=0)[1:]
        shares = found[1, head].double()
        torch.testing.assert_close(shares, expected, rtol=1e-5, atol=0)


def test_load_official_of_simmim_drops_the_unused_scale():
    """AMT's code does not apply gamma_1. With gamma_1 = 1 the model computes the same."""
    source = AMTSimMIMViT(**SIMMIM, **ON_SIMMIM, progressive=False)
    model = AMTSimMIMViT(**SIMMIM, **ON_SIMMIM)
    weights = release(source, 4)
    del weights["encoder.rel_pos_bias.relative_position_index"]
    model.load_official({"model": weights})
    for block in source.blocks:
        torch.nn.init.ones_(block.gamma_1)
    assert_same_weights(model, source)
