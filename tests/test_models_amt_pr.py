import numpy as np
import pytest
import torch

import models_amt_pr
from models_amt_pr import AMTOrderSampler, AMTViT, count_amt
from models_mae_pr import MaskedAutoencoderViT
from prmim import TokenCounts, addressed_noise
from tests.slow_mae import slow_loss
from tests.test_models_mae_pr import SIZES, official_state_dict, perturbed, segments


def counts_of(counts):
    return counts.num_visible, counts.num_retained, counts.num_thrown


def orders(model, batch, weights=None):
    noise = addressed_noise(0, 0, np.arange(batch), model.counts.num_tokens)
    return torch.from_numpy(model.sampler("attention")(noise, weights=weights))


# ---------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("num_tokens", "mask_ratio", "throw_ratio", "expected"),
    [
        (196, 0.85, 0.40, (30, 88, 78)),  # AMT's mask ratio .45 and throw ratio .40
        (196, 0.75, 0.0, (49, 147, 0)),  # masking only
        (100, 0.85, 0.40, (15, 45, 40)),  # 100 * (.85 - .4) is 44.999999999999993
        (20, 0.85, 0.40, (3, 9, 8)),
        (64, 0.85, 0.40, (10, 28, 26)),
    ],
)
def test_counts(num_tokens, mask_ratio, throw_ratio, expected):
    assert counts_of(count_amt(num_tokens, mask_ratio, throw_ratio)) == expected


def test_impossible_ratios_are_refused():
    with pytest.raises(ValueError, match="throw_ratio 0.4 and mask_ratio 0.4"):
        count_amt(196, 0.4, 0.4)
    with pytest.raises(ValueError, match="throw_ratio 0.4 and mask_ratio 0.3"):
        AMTViT(**SIZES, mask_ratio=0.3)


def test_the_random_phase_masks_three_quarters_and_throws_nothing():
    with torch.device("meta"):
        model = models_amt_pr.amt_vit_base_patch16()
    assert counts_of(model.counts) == (30, 88, 78)
    model.set_attention_phase(False)
    assert counts_of(model.counts) == (49, 147, 0) and model.decoder.counts is model.counts
    assert model.sampler("attention").counts is model.counts
    model.set_attention_phase(True)
    assert counts_of(model.counts) == (30, 88, 78) and model.decoder.counts is model.counts


# --------------------------------------------------------------------------------------------------------- sampler


@pytest.mark.parametrize("unit", [1, 2])
def test_the_first_drawn_are_retained_the_next_thrown_the_last_visible(unit):
    """Weights so unequal that the order of the draws is certain."""
    counts, cells = TokenCounts(4 * unit**2, 8 * unit**2, 4 * unit**2), 4 * unit
    sampler = AMTOrderSampler(cells, counts, "attention", unit)
    rng = np.random.default_rng(0)
    ranks = np.stack([rng.permutation(16) for _ in range(30)])  # 0 is drawn first
    unit_weights = 10.0 ** (6 * (15 - ranks))
    weights = unit_weights.reshape(-1, 4, 1, 4, 1).repeat(unit, axis=2).repeat(unit, axis=4).reshape(30, -1)
    ids = sampler(addressed_noise(0, 0, np.arange(30), cells**2), weights=weights)
    expected = {"visible": range(12, 16), "retained": range(8), "thrown": range(8, 12)}
    for row, rank in zip(ids, ranks, strict=True):
        parts = np.split(row, [counts.num_visible, counts.num_kept])
        for part, name in zip(parts, expected, strict=True):
            assert (np.diff(part) > 0).all()
            units = {(token // cells // unit) * 4 + token % cells // unit for token in part.tolist()}
            assert {int(rank[u]) for u in units} == set(expected[name]) and len(part) == len(units) * unit**2


@pytest.mark.parametrize("unit", [1, 2])
def test_a_unit_is_retained_with_the_probability_of_its_weight(unit):
    """One of 4 units is retained: the first draw. Only the sum over a unit's tokens counts."""
    cells = 2 * unit
    sampler = AMTOrderSampler(cells, TokenCounts(unit**2, unit**2, 2 * unit**2), "attention", unit)
    weights = np.zeros((2, unit, 2, unit))
    weights[:, 0, :, -1] = [[1, 2], [3, 4]]  # one token of each unit has it all
    num = 20_000
    ids = sampler(addressed_noise(0, 0, np.arange(num), cells**2), weights=np.tile(weights.reshape(1, -1), (num, 1)))
    first = ids[:, unit**2]  # the first retained token
    units = first // cells // unit * 2 + first % cells // unit
    assert np.bincount(units, minlength=4) / num == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.015)


def test_without_weights_all_sets_are_random():
    sampler = AMTOrderSampler(8, count_amt(64, 0.85, 0.4))
    ids = sampler(addressed_noise(0, 0, np.arange(4000), 64))
    assert np.array_equal(np.sort(ids, axis=1), np.tile(np.arange(64), (4000, 1)))
    for part in np.split(ids, [10, 38], axis=1):
        share = np.bincount(part.ravel(), minlength=64) / 4000
        assert share == pytest.approx(part.shape[1] / 64, abs=0.04)


# ------------------------------------------------------------------------------------------------------------ model


@pytest.mark.parametrize("has_maps", [True, False])
@pytest.mark.parametrize("norm_pix_loss", [True, False])
def test_loss_and_predictions_against_the_slow_derivation(has_maps, norm_pix_loss):
    torch.manual_seed(0)
    model = perturbed(AMTViT(**SIZES, progressive=False, norm_pix_loss=norm_pix_loss))
    model.set_attention_phase(has_maps)
    assert counts_of(model.counts) == ((3, 7, 6) if has_maps else (4, 12, 0))
    imgs, ids = torch.randn(2, 3, *model.img_size, dtype=torch.float64), orders(model, 2)
    losses, (pred, mask) = [], model.reconstruct(imgs, ids)
    for b in range(2):
        args = (official_state_dict(model), imgs[b], *segments(ids[b], model.counts), 8, 3, 2, norm_pix_loss)
        loss, predictions = slow_loss(*args)
        losses.append(loss)
        assert mask[b].nonzero().flatten().tolist() == sorted(predictions)
        for token, value in predictions.items():
            torch.testing.assert_close(pred[b, token], value, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(imgs, ids)["pixel"], torch.stack(losses).mean(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("applies_to", ["thrown", "all"])
def test_with_the_aggregation_both_phases_use_every_parameter(applies_to):
    """DDP with a static graph needs that."""
    model = AMTViT(**SIZES, applies_to=applies_to)
    for has_maps in (False, True):
        model.set_attention_phase(has_maps)
        ids = orders(model, 2)
        losses = model(torch.randn(2, 3, 32, 32), ids)
        losses["pixel"].backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        mask = model.reconstruct(torch.randn(2, 3, 32, 32), ids)[1]
        assert mask.sum(dim=1).tolist() == [model.counts.num_masked] * 2
        model.zero_grad(set_to_none=True)


def test_weights_are_mae_s():
    source = perturbed(MaskedAutoencoderViT(**SIZES, throw_ratio=0.0)).float()
    model = AMTViT(**SIZES, progressive=False)
    model.load_official({"model": official_state_dict(source)})
    assert model.state_dict().keys() == source.state_dict().keys()
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.state_dict().items())
