"""The augmentation of fine-tuning: every operation of timm's policies, over every argument that it can draw."""

import random
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment as timm_ops
from timm.data import create_transform

from recipes import FINETUNE_RECIPES
from util.data.finetune_augment import FinetuneAugment, augment_ops, posterize

PAPER = "rand-m9-mstd0.5-inc1"
# Every kind of policy that timm has, with fixed, Gaussian and uniform magnitudes.
POLICIES = sorted({recipe["aa"] for recipe in FINETUNE_RECIPES.values() if recipe["aa"]})
POLICIES += ["rand-m15-mmax30-mstd101-inc1", "rand-m9-inc1-t3a", "original-mstd0.5", "originalr-mstd1", "v0r-mstd0.5"]
POLICIES += ["3a", "augmix-m5-w4-d2"]


def noise_images(count, side=32):
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, 3, side, side), dtype=np.uint8))


def to_picture(img):
    return Image.fromarray(img.permute(1, 2, 0).numpy())


@pytest.fixture(autouse=True)
def deprecations_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        warnings.simplefilter("error", PendingDeprecationWarning)
        warnings.simplefilter("error", FutureWarning)
        yield


def ops_inside(value):
    """All AugmentOps that can be reached from a transform, whatever attributes hold them."""
    if isinstance(value, timm_ops.AugmentOp):
        return [value]
    parts = []
    if isinstance(value, (list, tuple)):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    ops = []
    for part in parts:
        ops += ops_inside(part)
    return ops


@pytest.mark.parametrize("policy", POLICIES)
def test_all_posterize_ops_are_replaced_and_timm_stays_as_it_is(policy):
    augment = FinetuneAugment(32, seed=0, auto_augment=policy).augment
    ops = ops_inside(augment)
    assert ops
    assert [id(op) for op in ops] == [id(op) for op in augment_ops(augment)]
    for op in ops:
        if op.name.startswith("Posterize"):
            assert op.aug_fn is posterize
        else:
            assert op.aug_fn is timm_ops.NAME_TO_OP[op.name]
    assert posterize not in timm_ops.NAME_TO_OP.values()


def arguments(op, magnitude):
    """All arguments that the op may get at a magnitude: signed ones in both signs."""
    if op.level_fn is None:
        return [()]
    return sorted({op.level_fn(magnitude, op.hparams) for _ in range(20)})


@pytest.mark.parametrize("policy", POLICIES)
def test_every_operation_takes_every_argument(policy):
    """Magnitudes from 0 to the policy's upper bound in steps of 0.1, in both signs."""
    picture = to_picture(noise_images(1, side=8)[0])
    ops = {op.name: op for op in augment_ops(FinetuneAugment(8, seed=0, auto_augment=policy).augment)}
    for name, op in ops.items():
        drawn = set()
        for tenths in range(10 * (op.magnitude_max or 10) + 1):
            drawn.update(arguments(op, tenths / 10))
        for argument in drawn:
            changed = op.aug_fn(picture, *argument, **op.kwargs)
            assert (changed.mode, changed.size) == ("RGB", (8, 8)), (name, argument)
            if name.startswith("Posterize") and argument[0] <= 0:
                assert not np.array(changed).any()


@pytest.mark.parametrize("strength", [0.4, 1.0, 3.0])
def test_colour_jitter_augments(strength):
    augment = FinetuneAugment(32, seed=1, color_jitter=strength)
    num_changed = 0
    for img in noise_images(16):
        num_changed += not torch.equal(augment(img, 0, 0), augment.crop(img, 0, 0))
    assert num_changed >= 14


def apply_seeded(augment, picture, seed):
    """Returns (pixels, states of the generators after the draws)."""
    random.seed(seed)
    np.random.seed(seed)
    pixels = np.array(augment(picture))
    return pixels, (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("policy", [PAPER, "v0r-mstd0.5", "augmix-m5-w4-d2"])
def test_draws_and_pixels_are_timm_s(policy):
    """The ops that were replaced draw nothing: pixels are timm's own wherever Pillow takes the number of bits."""
    augment = FinetuneAugment(32, seed=0, auto_augment=policy).augment
    _, timm_augment, _ = create_transform(
        32, is_training=True, separate=True, auto_augment=policy, color_jitter=None, interpolation="bicubic"
    )
    num_compared = 0
    for seed, img in enumerate(noise_images(16).repeat(20, 1, 1, 1)):
        pixels, states = apply_seeded(augment, to_picture(img), seed)
        try:
            expected, expected_states = apply_seeded(timm_augment, to_picture(img), seed)
        except ValueError:  # 0 bits
            continue
        assert np.array_equal(pixels, expected)
        assert states == expected_states
        num_compared += 1
    assert num_compared > 290


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(auto_augment="rnd"), r"policy 'rnd' \(Unknown AA policy rnd\)"),
        (dict(auto_augment="rand-m9x"), "policy 'rand-m9x'"),
        (dict(auto_augment="rand-n20-tweights"), "policy 'rand-n20-tweights'"),  # timm notices with the first image
        (dict(auto_augment="augmix-a0"), "policy 'augmix-a0'"),
        (dict(color_jitter=-1.0), "colour jitter of -1.0"),
    ],
)
def test_what_timm_cannot_apply_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=f"timm does not know .*{message}"):
        FinetuneAugment(32, seed=0, **options)
