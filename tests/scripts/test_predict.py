"""Predictions against real tensors, and against arithmetic by hand."""

import csv
import math
from functools import partial

import pytest
import torch
from torch import nn

from main_pretrain import MODELS, build_model, parse_args
from scripts import profile_pretrain
from scripts.parts import predict
from scripts.parts.predict import BATCHES, Costs, Device, Tally, at_batch, count_step
from util import costs
from util.data.transforms import Normalize

BUILD = partial(build_model, read_files=False)
MICRO = [name for name in MODELS if "micro" in name]


def settings_of(model):
    throw_ratio = "0" if model.startswith("simmim_swin") else "0.25"
    return vars(parse_args(["--recipe", "cifar10", "--model", model, "--throw_ratio", throw_ratio])[1])


def really_saved(settings, batch_size):
    """Bytes of the storages that autograd saves of a real forward pass in bf16, without parameters and the batch."""
    model = BUILD(settings).train()
    imgs, orders = costs.make_batch(model, settings, batch_size)
    others = [*model.state_dict(keep_vars=True).values(), imgs, *orders]
    known, sizes, alive = {x.untyped_storage().data_ptr() for x in others}, {}, []

    def keep(tensor):
        alive.append(tensor.detach())  # so that no address is used again
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(model(Normalize()(imgs), *orders).values())
    del loss
    return sum(size for address, size in sizes.items() if address not in known)


@pytest.mark.parametrize("model", MICRO)
def test_what_is_saved_is_what_autograd_saves_of_real_tensors(model):
    """Recomputing saves less and computes more. It is counted with the calls of a GPU."""
    settings = settings_of(model)
    eager, recomputed = count_step(BUILD, settings, 16, on_cuda=False), count_step(BUILD, settings, 16, recompute=True)
    assert eager.saved == pytest.approx(really_saved(settings, 16), rel=0.03)
    assert recomputed.saved < eager.saved and recomputed.peak < eager.peak
    assert sum(flops for flops, _ in recomputed.micro) > sum(flops for flops, _ in eager.micro)
    trained = sum(p.nbytes for p in BUILD(settings).parameters() if p.requires_grad)
    assert eager.gradients == pytest.approx(trained, rel=0.01) and eager.parameters >= trained


def test_flops_of_a_step_are_three_forward_passes():
    """The images need no gradient, the backward pass of fused attention recomputes its scores."""
    settings = settings_of("mae_vit_mini_patch4")
    flops = sum(flops for flops, _ in count_step(BUILD, settings, 8, on_cuda=False).micro)
    forward = 2e9 * 8 * costs.forward_gmac(settings, build_model)[0]
    assert 2.98 < flops / forward < 3.05


def test_a_depth_wise_convolution_s_backward_pass_costs_two_forward_passes():
    convolution, x = nn.Conv2d(16, 16, 7, padding=3, groups=16), torch.randn(2, 16, 8, 8, requires_grad=True)
    with Tally() as tally:
        convolution(x).sum().backward()
    assert [flops for flops, _ in tally.operators if flops] == [2 * 49 * 16 * 128, 4 * 49 * 16 * 128]


def test_bytes_and_peak_of_known_operators():
    x = torch.randn(1000)
    with Tally() as tally:
        y = x.view(10, 100).t()  # a view
        z = y * 2
        del y
        z = z + 1  # two results live side by side
        z += 1
    assert tally.operators == [(0, 8000), (0, 8000), (0, 8000)]
    assert (tally.live, tally.peak) == (4000, 8000)
    del z
    assert tally.live == 0


def test_costs_are_linear_in_the_batch_size():
    settings, device = settings_of("mae_vit_mini_patch4"), Device(1e12, 1e11, 1e9)
    low, high, far = (count_step(BUILD, settings, n) for n in (*BATCHES, 320))
    for cost in ("saved", "peak"):
        assert at_batch(320, [getattr(low, cost), getattr(high, cost)]) == pytest.approx(getattr(far, cost), rel=0.01)
    times = [c.seconds(device)[0] for c in (low, high)]
    assert at_batch(320, times) == pytest.approx(far.seconds(device)[0], rel=0.02)


def test_the_roofline_and_the_plan_by_hand(monkeypatch):
    """10 bytes of weights, 1 byte an image: 60 of 100 bytes are left for the peak, so 20 images of 3 bytes fit."""
    counted = [Costs(10, 10, n, 3 * n, 3 * n + 5, [(2e3 * n, 5), (0, 100)], [(0, 50)]) for n in BATCHES]
    monkeypatch.setitem(predict.DEVICES, "toy", Device(1e3, 10, 100 / predict.USABLE))
    settings = dict(recipe="r", model="m", throw_ratio=0.5, accum_iter=None, total_batch_size=64, epochs=2, dataset="")
    row = predict.predict(settings, counted, "toy", gpus=2)
    assert (row["largest_batch_size"], row["batch_size"], row["accum_iter"]) == (20, 16, 2)
    assert row["ms"] == pytest.approx(1e3 * (2 * (16 * 2 + 10) + 5))
    assert row["images_per_second"] == pytest.approx(64 / 89)
    assert row["days"] == pytest.approx(2 * 1_281_167 / (64 / 89) / 86400)
    assert row["peak_gb"] * 1e9 == pytest.approx(40 + 48) == 1e9 * sum(row[f"{part}_gb"] for part in predict.PARTS)
    alone = predict.predict(settings | {"total_batch_size": 8}, counted, "toy")
    assert alone["peak_gb"] * 1e9 == pytest.approx(10 + 20 + 3 * 8 + 5)  # not all gradients are held at its peak
    with pytest.raises(ValueError, match="cannot be split over 3 processes"):
        predict.predict(settings, counted, "toy", gpus=3)


def test_a_recipe_is_predicted_at_the_ratios_that_it_takes(tmp_path, capsys):
    flags = ["--model", "simmim_vit_micro_patch4", "--predict", "H200", "RTX4090", "--csv", str(tmp_path / "cost.csv")]
    profile_pretrain.main(["cifar10_simmim", *flags])
    with open(tmp_path / "cost.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    ratios = sorted({float(row["throw_ratio"]) for row in rows})
    own = profile_pretrain.RECIPES["cifar10_simmim"]["throw_ratio"]
    assert ratios == sorted({0.0, 0.25, 0.5, own}) and len(rows) == 4 * len(ratios)  # 60 % are masked: no .65
    assert {row["device"] for row in rows} == {"H200", "RTX4090"} and {row["recompute"] for row in rows} == {
        "True",
        "False",
    }
    assert all(0 < float(row["days"]) < math.inf for row in rows)
    out = capsys.readouterr().out
    assert out.startswith("*Predicted*, not measured") and "Left out: " in out and out.count("| cifar10") == len(rows)


def test_a_torch_without_fake_tensors_is_named(monkeypatch, capsys):
    monkeypatch.setattr(predict, "FakeTensorMode", None)
    with pytest.raises(SystemExit):
        profile_pretrain.main(["cifar10", "--predict", "H200"])
    assert "--predict needs FakeTensorMode" in capsys.readouterr().err
