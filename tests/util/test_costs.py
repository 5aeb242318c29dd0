"""Counted costs against a count by hand."""

import weakref
from functools import partial

import pytest
import torch
from torch import nn

from main_pretrain import parse_args
from tests.gmac import forward_gmac
from util import costs
from util.costs import saved_bytes

# {model: (tokens, width, depth, pixel values of a patch)}
ENCODERS = {
    "mae_vit_base_patch16": (196, 768, 12, 768),
    "mae_vit_large_patch16": (196, 1024, 24, 768),
    "mae_vit_huge_patch14": (256, 1280, 32, 588),
}
# {(model, decoder blocks): GMAC at rho_d 0, at .5, and the ratios at .25, .5, .65}
FIGURES = {
    ("mae_vit_base_patch16", 8): (9.67, 6.98, 0.859, 0.721, 0.641),
    ("mae_vit_base_patch16", 16): (14.95, 9.55, 0.817, 0.639, 0.536),
    ("mae_vit_base_patch16", 32): (25.50, 14.69, 0.785, 0.576, 0.455),
    ("mae_vit_large_patch16", 8): (20.62, 17.92, 0.934, 0.869, 0.832),
    ("mae_vit_large_patch16", 16): (25.90, 20.49, 0.894, 0.791, 0.732),
    ("mae_vit_large_patch16", 32): (36.45, 25.64, 0.850, 0.703, 0.619),
    ("mae_vit_huge_patch14", 8): (48.40, 44.78, 0.962, 0.925, 0.904),
    ("mae_vit_huge_patch14", 16): (55.41, 48.16, 0.933, 0.869, 0.832),
    ("mae_vit_huge_patch14", 32): (69.42, 54.93, 0.894, 0.791, 0.732),
}


def by_hand(model, decoder_depth, throw_ratio):
    """Adds up the matrix products of the blocks, embeddings, convolution and head, in 10^9."""
    tokens, width, depth, pixels = ENCODERS[model]
    visible, thrown = tokens // 4, int(tokens * throw_ratio)
    seen, decoded = 1 + visible, 1 + tokens - thrown  # with the class token
    encoder = visible * pixels * width + depth * (12 * seen * width**2 + 2 * seen**2 * width)
    decoder = seen * width * 512 + decoder_depth * (12 * decoded * 512**2 + 2 * decoded**2 * 512)
    convolution = 49 * 512 * tokens if thrown else 0
    return (encoder + decoder + convolution + (tokens - visible) * 512 * pixels) / 1e9


@pytest.mark.parametrize(("model", "depth"), FIGURES)
def test_costs_of_deep_decoders(model, depth):
    full, half, *ratios = FIGURES[model, depth]
    for ratio in (0.0, 0.5):
        argv = ["--model", model, "--decoder_depth", str(depth), "--throw_ratio", str(ratio)]
        counted = forward_gmac(vars(parse_args(argv)[1]))[0]
        assert counted == pytest.approx(by_hand(model, depth, ratio), rel=1e-9)
    assert [by_hand(model, depth, ratio) for ratio in (0.0, 0.5)] == pytest.approx([full, half], abs=0.005)
    found = [by_hand(model, depth, ratio) / by_hand(model, depth, 0.0) for ratio in (0.25, 0.5, 0.65)]
    assert found == pytest.approx(ratios, abs=6e-4)


def test_a_decoder_twice_as_deep_costs_what_mae_s_does():
    ratios = [by_hand(model, 16, 0.5) / by_hand(model, 8, 0.0) for model in ENCODERS]
    assert ratios == pytest.approx([0.987, 0.994, 0.995], abs=5e-4)


def test_a_teacher_is_counted_apart():
    """The student's ratio is the published one. With the teacher, whose cost is constant, the saving is smaller."""
    recipes = ("tec_vit_base_300ep", "tec_plain50_vit_base_300ep", "tec_prmim50_vit_base_300ep")
    full, plain, ours = (forward_gmac(vars(parse_args(["--recipe", name])[1])) for name in recipes)
    assert plain[0] / full[0] == pytest.approx(0.824, abs=1e-3) and ours[0] / full[0] == pytest.approx(0.835, abs=1e-3)
    assert sum(ours) / sum(full) == pytest.approx(0.948, abs=1e-3)


def test_saved_bytes_of_a_known_module():
    linear, x = nn.Linear(3, 5), torch.randn(7, 3)
    # linear saves x and its weight, ReLU its output, and square the same output
    forward = lambda: linear(x).relu().square()  # noqa: E731
    assert saved_bytes(forward) == 4 * (7 * 3 + 7 * 5)  # x needs no gradient, so the weight is not saved
    x.requires_grad_(True)
    assert saved_bytes(forward) == 4 * (7 * 3 + 7 * 5 + 5 * 3)


def test_counting_saved_bytes_leaves_nothing_behind():
    """Remaining tensors would count in the peak memory that is measured next."""
    linear, kept = nn.Linear(3, 5), []

    def forward():
        y = linear(torch.randn(7, 3)).relu()
        kept.append(weakref.ref(y))
        return y.square()

    saved_bytes(forward)
    assert kept[0]() is None


def test_time_is_taken_from_sync_to_sync(monkeypatch):
    events = []
    monkeypatch.setattr(costs, "synchronize", lambda device: events.append("sync"))
    monkeypatch.replace_in(costs, "time.perf_counter", lambda: events.append("clock") or len(events))
    assert costs.seconds_of(lambda: events.append("work"), torch.device("cpu")) == 3
    assert events == ["sync", "clock", "work", "sync", "clock"]


def test_each_round_times_every_step_and_another_one_first():
    calls = []
    steps = [partial(calls.append, name) for name in "abc"]
    for i in range(2):
        assert len(costs.time_round(steps, torch.device("cpu"), i)) == 3
    assert calls == ["a", "b", "c", "b", "c", "a"]
