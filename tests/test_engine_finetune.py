import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch import nn

from engine_finetune import BatchAugmentation, evaluate
from tests.loops import a_driver
from tests.reads import reads
from tests.two_processes import run_in_two_processes
from util.data.transforms import Normalize
from util.evaluate.loop import EvalContext

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


def rate(step, lr_scale=1.0):
    return lr_scale * 1e-3 * (step + 1)


def a_loop(model=None, device="cpu", precision_name="fp32", lr_scales=(1.0, 1.0), augment=None, **options):
    """A Driver with the learning rate `rate`. lr_scales: of weight and bias. `options` are TrainLoop's."""
    if model is None:
        model = Classifier()
    model = model.to(device)
    groups = []
    for parameter, lr_scale in zip(model.parameters(), lr_scales, strict=True):
        groups.append({"params": [parameter], "lr_scale": lr_scale})
    optimizer = torch.optim.AdamW(groups, lr=1.0, fused=True)
    if augment is None:
        augment = BatchAugmentation()
    return a_driver(model, optimizer, rate, precision_name, device, augment=augment, print_freq=1000, **options)


def a_batch(size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    imgs = torch.randint(0, 256, (size, 3, 4, 4), dtype=torch.uint8, generator=generator)
    return imgs, torch.randint(0, CLASSES, (size,), generator=generator)


def all_augmentations(device="cpu"):
    return BatchAugmentation(
        erase=RandomErasing(0.5, mode="pixel", device=device),
        mixup=Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES),
    )


def test_smoothed_cross_entropy_without_mixup():
    """(1 - s) -log p_y + s mean_c(-log p_c), written out."""
    imgs, labels = a_batch()
    engine = a_loop(augment=BatchAugmentation(label_smoothing=0.1))
    loss = engine.losses_of((imgs, labels), step=0)["cross_entropy"]
    logits = engine.model(Normalize()(imgs)).double()
    logp = logits - logits.exp().sum(dim=1, keepdim=True).log()
    expected = 0.0
    for i, y in enumerate(labels):
        expected -= 0.9 * logp[i, y] + 0.1 * logp[i].mean()
    torch.testing.assert_close(loss.double(), expected / len(labels))


def test_soft_targets_with_mixup_against_a_loop():
    """The batch is mixed with itself in reverse; both labels are smoothed once, not twice."""
    imgs, labels = a_batch()
    mixup = Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=CLASSES)
    engine = a_loop(augment=BatchAugmentation(mixup=mixup, label_smoothing=0.1))
    loss = engine.losses_of((imgs, labels), step=5)["cross_entropy"]
    engine.loop.seed_draws(5, 0)
    np.random.rand()  # the draw of mixup_prob
    lam = float(np.random.beta(0.8, 0.8))
    x = Normalize()(imgs)
    expected = 0.0
    for i in range(8):
        mixed = lam * x[i : i + 1] + (1 - lam) * x[7 - i : 8 - i]
        logp = torch.log_softmax(engine.model(mixed)[0], dim=0)
        for weight, y in ((lam, labels[i]), (1 - lam, labels[7 - i])):
            target = torch.full((CLASSES,), 0.1 / CLASSES)
            target[y] += 0.9
            expected -= weight * (target * logp).sum() / 8
    torch.testing.assert_close(loss, expected)


def test_learning_rates_follow_the_layer_scales():
    engine = a_loop(lr_scales=(0.5, 1.0))
    engine.step(iter([a_batch()]), 3)
    weight, bias = engine.loop.optimizer.param_groups
    assert weight["lr"] == pytest.approx(0.5 * 4e-3)
    assert bias["lr"] == pytest.approx(4e-3)


@pytest.mark.parametrize("bound", [None, 0.05, 1e3])
def test_clipping_bounds_the_norm_of_the_whole_gradient(bound):
    """AdamW would hide the gradient's size; plain gradient descent shows it."""
    engine = a_loop(clip_grad=bound)
    engine.loop.optimizer = torch.optim.SGD(engine.model.parameters(), lr=1.0)
    before = engine.weights()
    engine.step(iter([a_batch()]), 0)
    clipped_norm = (engine.weights() - before).norm().item() / rate(0)
    means, _ = engine.loop.meter.read()
    norm = means["grad_norm"]
    assert norm > 0.1  # as it was before
    assert clipped_norm == pytest.approx(0.05 if bound == 0.05 else norm, rel=1e-3)


def losses_of(step, seed=0):
    """The losses of the two micro-batches of a step with all augmentations and dropout."""
    engine = a_loop(Classifier(0.5), augment=all_augmentations(), seed=seed)
    return [engine.losses_of(a_batch(), step, micro)["cross_entropy"].item() for micro in range(2)]


def test_erasing_mixing_and_dropping_are_drawn_anew_for_each_step_and_no_other_state():
    losses = losses_of(1) + losses_of(2)
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    assert losses_of(2) == losses[2:]
    assert losses_of(1) == losses[:2]
    assert len(set(losses)) == 4  # steps and micro-batches differ
    assert not set(losses) & set(losses_of(1, seed=1) + losses_of(2, seed=1))


def test_a_step_never_reads_from_the_device():
    engine = a_loop(Classifier(0.5), accum_iter=2, augment=all_augmentations())
    batches = iter([a_batch(seed=i) for i in range(4)])
    engine.step(batches, 0)
    with reads() as found:
        engine.step(batches, 1)
    assert found == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_step_never_waits_for_the_gpu(name):
    device = torch.device("cuda")
    engine = a_loop(Classifier(0.5), "cuda", name, accum_iter=2, augment=all_augmentations(device))
    batches = iter([[tensor.pin_memory() for tensor in a_batch(seed=i)] for i in range(4)])
    engine.step(batches, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step(batches, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------------------ evaluation


CONTEXT = EvalContext(Normalize(), nullcontext, batch_size=2, num_workers=0)


class KnownLogits(nn.Module):
    """Logits by the value of an image's first pixel."""

    def __init__(self, table):
        super().__init__()
        self.register_buffer("table", torch.tensor(table))

    def forward(self, imgs):
        return self.table[Normalize().undo(imgs)[:, 0, 0, 0].mul(255).round().long()]


def score(table, labels, indices=None, batch_size=2, **options):
    """Evaluates on the images `indices` (default: all), whose logits are rows of `table`."""
    if indices is None:
        indices = range(len(labels))
    batches = []
    for first in range(0, len(indices), batch_size):
        chosen = indices[first : first + batch_size]
        imgs = [torch.full((3, 4, 4), i, dtype=torch.uint8) for i in chosen]
        batches.append((torch.stack(imgs), torch.tensor([labels[i] for i in chosen])))
    return evaluate(KnownLogits(table), batches, len(labels), CONTEXT, **options)


# Image 0 is right, 1 is second best, 2 is worst of six (not in the top 5), 3 is right.
TABLE = [[9.0, 0, 1, 2, 3, 4], [9.0, 8, 1, 2, 3, 4], [9.0, 8, 0, 2, 3, 4], [0.0, 1, 2, 9, 3, 4]]


def test_top_1_top_5_and_loss_by_hand():
    labels = [0, 3, 2, 3]  # of image 1 the fifth best
    result = score(TABLE, labels, batch_size=3)
    assert result["top1"] == 50.0
    assert result["top5"] == 75.0
    assert result["num_images"] == 4
    expected = 0.0
    for row, label in zip(TABLE, labels, strict=True):
        expected -= torch.log_softmax(torch.tensor(row), 0)[label].item()
    assert result["loss"] == pytest.approx(expected / 4)


@pytest.mark.parametrize("classes", [2, 5, 6])
def test_top_5_of_five_classes_says_nothing_and_is_left_out(classes):
    assert ("top5" in score([[1.0] * classes] * 3, [0, 1, 0])) == (classes > 5)


def test_columns_restrict_the_choice():
    """Among the columns 1, 3, 5 the best of the images are 5, 1, 1, 3, which are ranks 2, 0, 0, 1."""
    result = score(TABLE, [2, 0, 1, 1], columns=[1, 3, 5])
    assert result["top1"] == 75.0
    assert result["top1_unrestricted"] == 25.0
    assert "top1_unrestricted" not in score(TABLE, [0, 1, 2, 3])


def test_a_wrong_count_is_an_error():
    with pytest.raises(RuntimeError, match="3 images were evaluated instead of 4"):
        score(TABLE, [0, 1, 2, 3], indices=[0, 1, 2])


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_scored_in_eval_mode_and_given_back_as_it_was(training):
    model = Classifier(0.5).train(training)
    first = evaluate(model, [a_batch()], 8, CONTEXT)
    assert evaluate(model, [a_batch()], 8, CONTEXT) == first
    assert model.training is training
    assert model.dropout.training is training


def _score_share(rank, world_size):
    table = torch.randn(7, CLASSES, generator=torch.Generator().manual_seed(0)).tolist()
    labels = [0, 1, 2, 3, 4, 5, 0]
    return score(table, labels, indices=range(rank, 7, world_size))


def test_two_processes_count_each_image_once():
    """Seven images on two processes: none is padded, none is left out."""
    first, second = run_in_two_processes(_score_share, 2)
    assert first == second
    assert first["num_images"] == 7
    assert first == pytest.approx(_score_share(0, 1))
