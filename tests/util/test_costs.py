"""Counted costs against a count by hand."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from main_pretrain import parse_args
from tests.gmac import forward_gmac
from util.costs import saved_bytes

ROOT = Path(__file__).resolve().parents[2]
# {model: (tokens, width, depth, pixel values of a patch)}
ENCODERS = {
    "mae_vit_base_patch16": (196, 768, 12, 768),
    "mae_vit_large_patch16": (196, 1024, 24, 768),
    "mae_vit_huge_patch14": (256, 1280, 32, 588),
}


def by_hand(model, decoder_depth, throw_ratio):
    """Adds up the matrix products of the blocks, embeddings, convolution and head, in 10^9."""
    tokens, width, depth, pixels = ENCODERS[model]
    visible = tokens // 4
    thrown = int(tokens * throw_ratio)
    seen = 1 + visible  # with the class token
    decoded = 1 + tokens - thrown
    encoder = visible * pixels * width + depth * (12 * seen * width**2 + 2 * seen**2 * width)
    decoder = seen * width * 512 + decoder_depth * (12 * decoded * 512**2 + 2 * decoded**2 * 512)
    head = (tokens - visible) * 512 * pixels
    convolution = 0
    if thrown:
        convolution = 49 * 512 * tokens
    return (encoder + decoder + head + convolution) / 1e9


@pytest.mark.parametrize("throw_ratio", [0.0, 0.5])
@pytest.mark.parametrize(
    ("model", "depth"),
    [
        ("mae_vit_base_patch16", 8),
        ("mae_vit_huge_patch14", 16),
    ],
)
def test_counted_costs_are_those_by_hand(model, depth, throw_ratio):
    flags = ["--model", model, "--decoder_depth", str(depth), "--throw_ratio", str(throw_ratio)]
    counted, _ = forward_gmac(vars(parse_args(flags)[1]))
    assert counted == pytest.approx(by_hand(model, depth, throw_ratio), rel=1e-9)


def test_a_teacher_is_counted_apart():
    """The student's ratio is the published one. With the teacher, whose cost is constant, the saving is smaller."""
    full, full_teacher = forward_gmac(vars(parse_args(["--recipe", "tec_vit_base_300ep"])[1]))
    ours, teacher = forward_gmac(vars(parse_args(["--recipe", "tec_prmim50_vit_base_300ep"])[1]))
    assert teacher == full_teacher
    assert ours / full == pytest.approx(0.835, abs=1e-3)
    assert (ours + teacher) / (full + teacher) == pytest.approx(0.948, abs=1e-3)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_saved_bytes_of_a_known_module(needs_grad):
    """The layer saves its input, and its weight for the input's gradient; ReLU and square save the same output."""
    layer = nn.Linear(3, 5)
    x = torch.randn(7, 3, requires_grad=needs_grad)
    expected = 7 * 3 + 7 * 5
    if needs_grad:
        expected += 5 * 3
    assert saved_bytes(lambda: layer(x).relu().square()) == 4 * expected


def test_counting_saved_bytes_leaves_nothing_behind():
    """Remaining tensors would count in the peak memory that is measured next."""
    layer = nn.Linear(3, 5)
    outputs = []

    def forward():
        y = layer(torch.randn(7, 3)).relu()
        outputs.append(weakref.ref(y))
        return y.square()

    saved_bytes(forward)
    assert outputs[0]() is None
