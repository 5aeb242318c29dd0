"""The loop of fine-tuning, what it draws for each batch, and evaluation."""

import random
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch import nn
from torch._dynamo.utils import counters
from torch.testing import assert_close

from engine_finetune import BatchAugmentation, evaluate
from models_vit import VisionTransformer
from tests.loops import a_driver, forbidden_waits
from util.data.transforms import Normalize
from util.evaluate.context import EvalContext
from util.run.train import wrap

CLASSES = 6


class Classifier(nn.Module):
    """Linear on the pixels, with a dropout where a ViT has drop path."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(48, CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, imgs):
        return self.linear(self.dropout(imgs.flatten(1)))


def learning_rate(step, lr_scale=1.0):
    return lr_scale * 1e-3 * (step + 1)


def a_loop(augment=None, dropout=0.0, device="cpu", precision_name="fp32", lr_scales=(1.0, 1.0), **options):
    """A Driver with the learning rate .001 (step + 1) times the scale of weight or bias."""
    model = Classifier(dropout).to(device)
    groups = []
    for parameter, scale in zip(model.parameters(), lr_scales, strict=True):
        groups.append({"params": [parameter], "lr_scale": scale})
    optimizer = torch.optim.AdamW(groups, lr=1.0, fused=True)
    augment = augment or BatchAugmentation()
    return a_driver(model, optimizer, learning_rate, precision_name, device, augment, print_freq=1000, **options)


def a_batch(size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    imgs = torch.randint(0, 256, (size, 3, 4, 4), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, CLASSES, (size,), generator=generator)
    return imgs, labels


def all_augmentations(device="cpu"):
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    return BatchAugmentation(RandomErasing(0.5, mode="pixel", device=device), mixup)


def test_smoothed_cross_entropy_without_mixup():
    """(1 - s) -log p_y + s mean_c(-log p_c), written out."""
    imgs, labels = a_batch()
    engine = a_loop(BatchAugmentation(label_smoothing=0.1))
    loss = engine.losses_of((imgs, labels), 0)["cross_entropy"]
    logits = engine.model(Normalize()(imgs)).double()
    expected = 0.0
    for row, label in zip(logits, labels, strict=True):
        log_probabilities = row - row.exp().sum().log()
        smoothed = 0.9 * log_probabilities[label] + 0.1 * log_probabilities.mean()
        expected -= smoothed / 8
    assert_close(loss.double(), expected)


def test_soft_targets_with_mixup_against_a_loop():
    """The batch is mixed with itself in reverse; both labels are smoothed once, not twice."""
    imgs, labels = a_batch()
    mixup = Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=CLASSES)
    engine = a_loop(BatchAugmentation(mixup=mixup, label_smoothing=0.1))
    loss = engine.losses_of((imgs, labels), 5)["cross_entropy"]
    engine.loop.seed_draws(5, 0)
    assert np.random.rand() < 1.0  # the draw of mixup_prob
    share = float(np.random.beta(0.8, 0.8))
    x = Normalize()(imgs)
    expected = 0.0
    for i in range(8):
        mixed = share * x[i] + (1 - share) * x[7 - i]
        (logits,) = engine.model(mixed[None])
        target = torch.full((CLASSES,), 0.1 / CLASSES)
        target[labels[i]] += 0.9 * share
        target[labels[7 - i]] += 0.9 * (1 - share)
        expected -= target @ logits.log_softmax(dim=0) / 8
    assert_close(loss, expected)


def test_learning_rates_follow_the_layer_scales():
    engine = a_loop(lr_scales=(0.5, 1.0))
    engine.step(iter([a_batch()]), 3)
    rates = [group["lr"] for group in engine.loop.optimizer.param_groups]
    assert rates == pytest.approx([0.5 * 4e-3, 4e-3])


@pytest.mark.parametrize(
    ("bound", "is_clipped"),
    [
        (None, False),
        (0.05, True),
        (1e3, False),
    ],
)
def test_clipping_bounds_the_norm_of_the_whole_gradient(bound, is_clipped):
    """AdamW would hide the gradient's size; plain gradient descent shows it."""
    engine = a_loop(clip_grad=bound)
    engine.loop.optimizer = torch.optim.SGD(engine.model.parameters(), lr=1.0, fused=True)
    before = engine.weights()
    engine.step(iter([a_batch()]), 0)
    means = engine.loop.meter.means(engine.loop.meter.since_report)
    norm = means["grad_norm"]
    assert norm > 0.1  # as it was before clipping
    expected = norm
    if is_clipped:
        expected = bound
    moved = (engine.weights() - before).norm().item()
    assert moved == pytest.approx(learning_rate(0) * expected, rel=1e-3)


def test_erasing_mixing_and_dropping_are_drawn_anew_for_each_step_and_no_other_state():
    def losses_of(steps, seed=0):
        engine = a_loop(all_augmentations(), dropout=0.5, seed=seed)
        losses = []
        for step in steps:
            for micro in range(2):
                loss = engine.losses_of(a_batch(), step, micro)["cross_entropy"]
                losses.append(loss.item())
        return losses

    first = losses_of([0, 1, 2])
    assert len(set(first)) == 6  # steps and micro-batches differ
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    assert losses_of([2, 1]) == first[4:] + first[2:4]
    others = losses_of([0, 1, 2], seed=1)
    assert not set(first) & set(others)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_step_never_waits_for_the_gpu(name):
    augment = all_augmentations(torch.device("cuda"))
    engine = a_loop(augment, dropout=0.5, device="cuda", precision_name=name, accum_iter=2)
    pinned = []
    for seed in range(4):
        imgs, labels = a_batch(seed=seed)
        pinned.append((imgs.pin_memory(), labels.pin_memory()))
    batches = iter(pinned)
    engine.step(batches, 0)
    with forbidden_waits():
        engine.step(batches, 1)


# ------------------------------------------------------------------------------------------------------ evaluation


CONTEXT = EvalContext(Normalize(), nullcontext, batch_size=2, num_workers=0)


class KnownLogits(nn.Module):
    """Logits by the value of an image's first pixel."""

    def __init__(self, table):
        super().__init__()
        self.register_buffer("table", torch.tensor(table))

    def forward(self, imgs):
        shown = Normalize().undo(imgs)[:, 0, 0, 0]
        return self.table[(255 * shown).round().long()]


def score(table, labels, indices=slice(None), batch_size=2, **options):
    """Evaluates images of the given indices (default: all) whose logits are the rows of the table."""
    batches = []
    numbers = torch.arange(len(labels))
    for own in numbers[indices].split(batch_size):
        imgs = own.byte().view(-1, 1, 1, 1).expand(-1, 3, 4, 4)
        batches.append((imgs, torch.tensor(labels)[own]))
    return evaluate(KnownLogits(table), batches, len(labels), CONTEXT, **options)


# Image 0 is right, 1 is second best, 2 is worst of six (not in the top 5), 3 is right.
TABLE = [
    [9.0, 0, 1, 2, 3, 4],
    [9.0, 8, 1, 2, 3, 4],
    [9.0, 8, 0, 2, 3, 4],
    [0.0, 1, 2, 9, 3, 4],
]


def test_top_1_top_5_and_loss_by_hand():
    labels = [0, 3, 2, 3]  # of image 1 the fifth best
    result = score(TABLE, labels, batch_size=3)
    assert result["top1"] == 50.0
    assert result["top5"] == 75.0
    assert result["num_images"] == 4
    total = 0.0
    for row, label in zip(TABLE, labels, strict=True):
        total -= torch.tensor(row).log_softmax(dim=0)[label].item()
    assert result["loss"] == pytest.approx(total / 4)


def test_columns_restrict_the_choice():
    """Among the columns 1, 3, 5 the best of the images are 5, 1, 1, 3, which are ranks 2, 0, 0, 1."""
    result = score(TABLE, [2, 1, 1, 1], columns=[1, 3, 5])
    assert result["top1"] == 50.0


def test_a_wrong_count_is_an_error():
    with pytest.raises(RuntimeError, match="3 images were evaluated instead of 4"):
        score(TABLE, [0, 1, 2, 3], indices=slice(3))


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_scored_in_eval_mode_and_given_back_as_it_was(training):
    model = Classifier(0.5).train(training)
    first = evaluate(model, [a_batch()], 8, CONTEXT)
    assert evaluate(model, [a_batch()], 8, CONTEXT) == first
    assert model.training is training
    assert model.dropout.training is training


def test_evaluation_compiles_nothing(monkeypatch):
    """Its batches, of which the last is smaller, have other shapes than those of training."""
    monkeypatch.replace_in(wrap, "torch.compile", partial(torch.compile, backend="aot_eager"))
    model = VisionTransformer(
        img_size=4,
        patch_size=2,
        embed_dim=8,
        depth=2,
        num_heads=1,
        num_classes=CLASSES,
    )
    batches = [a_batch(3), a_batch(2)]
    plain = evaluate(model, batches, 5, CONTEXT)
    wrap.compile_parts(model)
    torch._dynamo.reset()
    counters.clear()
    assert evaluate(model, batches, 5, CONTEXT) == plain
    assert counters["stats"]["unique_graphs"] == 0
    imgs, _ = a_batch()
    model.train()(Normalize()(imgs))
    assert counters["stats"]["unique_graphs"] > 0
