import numpy as np
import pytest
import torch

from encoders.load import load_encoder
from encoders.models_absolute_vit import AbsoluteVisionTransformer, absolute_vit_base_patch16
from frameworks import models_amt_pr
from frameworks.models_amt_pr import AMTOrderSampler, AMTSimMIMViT, AMTViT, count_amt, count_amt_units
from frameworks.models_simmim_pr import SimMIMViT
from models_mae_pr import MaskedAutoencoderViT
from prmim import TokenCounts, addressed_noise
from tests.frameworks.test_models_simmim_pr import assert_is_slow_simmim, table_row
from tests.test_models_mae_pr import SIZES, assert_is_slow_mae, official_state_dict, perturbed
from util.run.checkpoint import save_checkpoint

# 36 tokens, which are 9 units.
SIMMIM = dict(img_size=24, patch_size=4, embed_dim=24, depth=2, num_heads=3)


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


@pytest.mark.parametrize(
    ("units", "mask_ratio", "throw_ratio", "expected"),
    [
        (49, 0.70, 0.26, (14, 22, 13)),  # AMT's mask ratio .44 and throw ratio .26
        (49, 0.68, 0.24, (15, 22, 12)),  # the throw ratio that PR-MIM's paper prints
        (49, 0.44, 0.0, (27, 22, 0)),
        (100, 0.7, 0.26, (30, 44, 26)),  # .7 - .26 is not exactly .44
        (16, 0.7, 0.26, (3, 8, 5)),
    ],
)
def test_counts_of_units(units, mask_ratio, throw_ratio, expected):
    assert counts_of(count_amt_units(4 * units, mask_ratio, throw_ratio, 2)) == tuple(4 * n for n in expected)


@pytest.mark.parametrize(("mask_ratio", "throw_ratio"), [(0.4, 0.4), (0.95, 0.3), (0.7, -0.1)])
def test_impossible_ratios_of_units_are_refused(mask_ratio, throw_ratio):
    with pytest.raises(ValueError, match=f"9 units visible, got throw_ratio {throw_ratio} and mask_ratio {mask_ratio}"):
        AMTSimMIMViT(**SIMMIM, mask_ratio=mask_ratio, throw_ratio=throw_ratio)


def test_impossible_ratios_are_refused():
    with pytest.raises(ValueError, match="throw_ratio 0.4 and mask_ratio 0.4"):
        count_amt(196, 0.4, 0.4)
    with pytest.raises(ValueError, match="throw_ratio 0.4 and mask_ratio 0.3"):
        AMTViT(**SIZES, mask_ratio=0.3)


def test_the_random_phase_masks_three_quarters_and_throws_nothing():
    with torch.device("meta"):
        model = models_amt_pr.amt_vit_base_patch16()
    assert counts_of(model.counts) == (30, 88, 78)
    model.set_phase(has_maps=False)
    assert counts_of(model.counts) == (49, 147, 0)
    assert model.sampler("attention").counts is model.counts
    model.set_phase(has_maps=True)
    assert counts_of(model.counts) == (30, 88, 78)


def test_the_random_phase_of_simmim_masks_as_many_units_and_throws_none():
    with torch.device("meta"):
        model = models_amt_pr.amt_simmim_vit_base_patch16()
    assert counts_of(model.counts) == (56, 88, 52)
    model.set_phase(has_maps=False)
    assert counts_of(model.counts) == (108, 88, 0) and model.sampler("attention").counts is model.counts
    model.set_phase(has_maps=True)
    assert counts_of(model.counts) == (56, 88, 52)


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
    model.set_phase(has_maps=has_maps)
    assert counts_of(model.counts) == ((3, 7, 6) if has_maps else (4, 12, 0))
    assert_is_slow_mae(model, orders(model, 2))


@pytest.mark.parametrize("applies_to", ["thrown", "all"])
def test_with_the_aggregation_both_phases_use_every_parameter(applies_to):
    """DDP with a static graph needs that."""
    model = AMTViT(**SIZES, applies_to=applies_to)
    for has_maps in (False, True):
        model.set_phase(has_maps=has_maps)
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


# ---------------------------------------------------------------------------------------------------------- SimMIM


@pytest.mark.parametrize(("has_maps", "progressive"), [(True, False), (False, False), (True, True)])
def test_simmim_against_the_slow_derivation(has_maps, progressive):
    torch.manual_seed(0)
    model = perturbed(AMTSimMIMViT(**SIMMIM, progressive=progressive, kernel_size=3))
    model.set_phase(has_maps=has_maps)
    assert counts_of(model.counts) == ((8, 16, 12) if has_maps else (20, 16, 0))
    assert_is_slow_simmim(model, orders(model, 2))


@pytest.mark.parametrize("kind", [SimMIMViT, AMTSimMIMViT])
def test_cls_attention_is_the_softmax_of_the_last_block(kind):
    torch.manual_seed(0)
    model, inputs = perturbed(kind(**SIMMIM)), {}
    model.blocks[-1].norm1.register_forward_hook(lambda _, __, out: inputs.update(normed=out))
    imgs = torch.randn(2, 3, 24, 24, dtype=torch.float64)
    with torch.no_grad():
        tokens = model.patch_embed(model.patchify(imgs))
        model.encode(tokens + model.pos_embed[:, 1:] if kind is AMTSimMIMViT else tokens)
        x, attn = inputs["normed"], model.blocks[-1].attn
        found = model.cls_attention(imgs)
    assert found.shape == (2, 3, 36)
    for head in range(3):
        rows = torch.arange(8) + 8 * head
        query = attn.qkv.weight[rows] @ x[1, 0] + attn.q_bias[rows]
        logits = [query @ attn.qkv.weight[24 + rows] @ token / 8**0.5 for token in x[1]]
        if kind is SimMIMViT:
            table = model.rel_pos_bias.relative_position_bias_table[:, head]
            logits = [z + table[table_row("cls", k, 6, 6)] for z, k in zip(logits, ["cls", *range(36)], strict=True)]
        exponentials = torch.stack(logits).exp()
        torch.testing.assert_close(found[1, head].double(), exponentials[1:] / exponentials.sum(), rtol=1e-5, atol=0)


def test_load_official_of_simmim_drops_the_unused_scale():
    """AMT's code does not apply gamma_1. With gamma_1 = 1 the model computes the same."""
    source = AMTSimMIMViT(**SIMMIM, progressive=False)
    head = {"decoder.0.weight": source.pred.weight, "decoder.0.bias": source.pred.bias}
    weights = {f"encoder.{k}": v for k, v in source.state_dict().items() if not k.startswith("pred.")}
    # The convolution's channels are (colour, row, column), those here (row, column, colour).
    head = {k: v.unflatten(0, (4, 4, 3)).movedim(2, 0).flatten(0, 2) for k, v in head.items()}
    head["decoder.0.weight"] = head["decoder.0.weight"][..., None, None]
    model = AMTSimMIMViT(**SIMMIM)
    model.load_official({"model": weights | head})
    for name, value in source.state_dict().items():
        expected = torch.ones_like(value) if name.endswith("gamma_1") else value
        assert torch.equal(model.state_dict()[name], expected), name


@pytest.mark.parametrize("global_pool", ["avg", "token"])
def test_the_fine_tune_model_computes_the_features_of_pre_training(tmp_path, global_pool):
    model = perturbed(AMTSimMIMViT(**SIMMIM)).float().eval()
    path = save_checkpoint(tmp_path, 1, {"model": model.state_dict()}, {})
    tuned = AbsoluteVisionTransformer(num_classes=5, global_pool=global_pool, **SIMMIM).eval()
    assert set(load_encoder(tuned, path).missing) <= {"head.weight", "head.bias", "fc_norm.weight", "fc_norm.bias"}
    imgs = torch.randn(2, 3, 24, 24)
    x = model.encode(model.patch_embed(model.patchify(imgs)) + model.pos_embed[:, 1:])
    expected = x[:, 1:].mean(dim=1) if global_pool == "avg" else model.norm(x)[:, 0]
    pooled = []
    tuned.head.register_forward_hook(lambda _, args, __: pooled.append(args[0]))
    assert tuned(imgs).shape == (2, 5)
    expected = tuned.fc_norm(expected) if global_pool == "avg" else expected
    torch.testing.assert_close(pooled[0], expected, rtol=1e-5, atol=1e-5)


def test_sizes_initial_weights_and_decay_of_simmim():
    with torch.device("meta"):
        model, tuned = models_amt_pr.amt_simmim_vit_base_patch16(progressive=False), absolute_vit_base_patch16()
    # SimMIM's 86,256,720 parameters without its table of biases, with a position table
    assert sum(p.numel() for p in model.parameters()) == 86_256_720 - 732 * 12 + 197 * 768
    assert [getattr(b.drop_path, "drop_prob", 0.0) for b in model.blocks] == pytest.approx(
        [0.1 * i / 11 for i in range(12)]
    )
    assert model.no_weight_decay() == tuned.no_weight_decay() == {"cls_token", "pos_embed"}
    torch.manual_seed(0)
    model, tuned = AMTSimMIMViT(**SIMMIM), AbsoluteVisionTransformer(num_classes=5, **SIMMIM)
    assert 0.019 < model.pos_embed.abs().max() <= 0.02 and tuned.pos_embed.abs().max() > 0.04
    assert model.pos_embed.requires_grad and tuned.pos_embed.requires_grad
    assert model.blocks[1].gamma_1.tolist() == model.blocks[1].gamma_2.tolist() == pytest.approx([0.1] * 24)
    with pytest.raises(ValueError, match="unknown global_pool 'max', choose from avg, token"):
        AbsoluteVisionTransformer(global_pool="max")
