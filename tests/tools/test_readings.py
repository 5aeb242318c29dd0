"""Readings of the paper that the core does not follow: each against a loop, and what it leaves unchanged."""

import math
from pathlib import Path

import pytest
import torch

from main_pretrain import MODELS, build_model, get_args_parser
from prmim import TokenOrder, TokenOrderSampler, addressed_noise
from tools import readings, study
from util.costs import forward_gmac


def reading_model(name):
    model = MODELS["mae_vit_micro_patch4"](throw_ratio=0.5, norm_pix_loss=True).double().eval()
    readings.READINGS[name](model)
    return model.double()


def test_convolution_on_predictions_against_a_loop():
    model = reading_model("predictions")
    ids = torch.from_numpy(TokenOrderSampler((8, 8), model.counts)(addressed_noise(0, 0, [3], 64)))
    order = TokenOrder(ids, model.counts)
    imgs = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    decoder, first, kept = model.decoder, model.counts.num_visible, model.counts.num_kept
    with torch.no_grad():
        predicted = decoder.pred(
            decoder.norm(decoder.decode(model.forward_encoder(model.patchify(imgs), order), order))
        )[0]
    pred = model.reconstruct(imgs, ids)[0][0]  # raster
    cells = {divmod(token, 8): value for token, value in zip(ids[0, :kept].tolist(), predicted, strict=True)}
    weight, bias = decoder.aggregation.operator.weight.detach(), decoder.aggregation.operator.bias.detach()
    for rank, token in enumerate(ids[0].tolist()):
        if first <= rank < kept:
            assert torch.allclose(pred[token], predicted[rank], atol=1e-10)
        elif rank >= kept:
            row, column = divmod(token, 8)
            value = bias.clone()
            for (r, c), neighbour in cells.items():
                if max(abs(r - row), abs(c - column)) <= 3:
                    value += weight[:, 0, r - row + 3, c - column + 3] * neighbour
            assert torch.allclose(pred[token], value, atol=1e-10)


@pytest.mark.parametrize("name", ["init_average", "init_normal"])
def test_initialisations_change_the_convolution_alone(name):
    torch.manual_seed(0)
    plain = MODELS["mae_vit_micro_patch4"](throw_ratio=0.5)
    torch.manual_seed(0)
    model = MODELS["mae_vit_micro_patch4"](throw_ratio=0.5)
    readings.READINGS[name](model)
    other = plain.state_dict()
    changed = [k for k, v in model.state_dict().items() if not torch.equal(v, other[k])]
    assert changed == ["decoder.aggregation.operator.weight", "decoder.aggregation.operator.bias"]
    weight = model.decoder.aggregation.operator.weight
    if name == "init_average":
        assert torch.allclose(weight.sum(dim=(1, 2, 3)), torch.ones(64)) and weight.min() == weight.max()
    else:
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("name", ["mask_normalised", "gaussian"])
def test_aggregations_that_know_the_mask_against_a_loop(name):
    """Both keep the retained tokens and the parameters of the default. A window may be empty."""
    model = reading_model(name)
    decoder, counts = model.decoder, model.counts
    ids = torch.from_numpy(TokenOrderSampler((8, 8), counts)(addressed_noise(0, 0, [3], 64)))
    # An order whose thrown cells fill the lower half: no kept cell is near the lowest row.
    ids = torch.stack([ids[0], torch.arange(64)])
    order = TokenOrder(ids, counts)
    torch.manual_seed(0)
    x = torch.randn(2, counts.num_kept, 64, dtype=torch.float64)
    with torch.no_grad():
        filled = decoder.aggregation(x, order, (8, 8))
    weight, bias = decoder.aggregation.operator.weight.detach(), decoder.aggregation.operator.bias.detach()
    empty = 0
    for image in range(2):
        cells = {divmod(token, 8): value for token, value in zip(ids[image].tolist(), x[image], strict=False)}
        for rank, token in enumerate(ids[image].tolist()):
            if rank < counts.num_kept:
                assert torch.equal(filled[image, rank], x[image, rank])
                continue
            row, column = divmod(token, 8)
            total, mean, mass, number = torch.zeros(64).double(), torch.zeros(64).double(), 0.0, 0
            for (r, c), neighbour in cells.items():
                gauss = math.exp(-((r - row) ** 2 + (c - column) ** 2) / 2)
                mean, mass = mean + gauss * neighbour, mass + gauss
                if max(abs(r - row), abs(c - column)) <= 3:
                    total, number = total + weight[:, 0, r - row + 3, c - column + 3] * neighbour, number + 1
            empty += number == 0
            if name == "gaussian":
                value = total + bias + mean / mass
            else:
                value = total / (number / 49) + bias if number else bias
            assert torch.allclose(filled[image, rank], value, atol=1e-10)
    assert empty == 8


@pytest.mark.parametrize("name", ["mask_normalised", "gaussian"])
def test_aggregations_that_know_the_mask_cost_little(name):
    """At most 1.02 times the multiply-adds of the default, at the size of the second study. Parameters are equal."""
    preset = study.PRESETS["grid14"]
    (run,) = study.plan(preset, ["prmim50"], [0], Path("x"), {})
    settings = vars(get_args_parser().parse_args(run.job["pretrain"]))

    def build(changed):
        def model(settings, **options):
            built = build_model(settings, **options)
            if changed:
                readings.READINGS[name](built)
            return built

        return model

    default, ours = (forward_gmac(settings, build(changed))[0] for changed in (False, True))
    assert default < ours <= 1.02 * default or (name == "mask_normalised" and ours == default)
    torch.manual_seed(0)
    plain = build(False)(settings).state_dict()
    torch.manual_seed(0)
    other = build(True)(settings).state_dict()
    assert plain.keys() == other.keys() and all(torch.equal(plain[key], other[key]) for key in plain)
