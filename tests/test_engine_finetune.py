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
        self.linear, self.dropout = nn.Linear(48, CLASSES), nn.Dropout(dropout)

    def forward(self, imgs):
        return self.linear(self.dropout(imgs.flatten(1)))


def a_loop(
    model=None, accum_iter=1, device="cpu", precision_name="fp32", lr_scales=(1.0,), clip_grad=None, seed=0, **options
):
    """A Driver with the learning rate .001 (step + 1) times the layer's scale. `options` are BatchAugmentation's."""
    model = (model or Classifier()).to(device)
    groups = [{"params": [p], "lr_scale": s} for p, s in zip(model.parameters(), lr_scales * 2, strict=False)]
    optimizer = torch.optim.AdamW(groups, lr=1.0, fused=True)
    more = dict(
        augment=BatchAugmentation(**options), accum_iter=accum_iter, clip_grad=clip_grad, seed=seed, print_freq=1000
    )
    rate = lambda step, lr_scale=1.0: lr_scale * 1e-3 * (step + 1)  # noqa: E731
    return a_driver(model, optimizer, rate, precision_name, device, **more)


def a_batch(size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    imgs = torch.randint(0, 256, (size, 3, 4, 4), dtype=torch.uint8, generator=generator)
    return imgs, torch.randint(0, CLASSES, (size,), generator=generator)


def mixup():
    return Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)


def test_smoothed_cross_entropy_without_mixup():
    """(1 - s) -log p_y + s mean_c(-log p_c), written out."""
    imgs, labels = a_batch()
    engine = a_loop(label_smoothing=0.1)
    loss = engine.losses_of((imgs, labels), 0, 0)["cross_entropy"]
    logits = engine.model(Normalize()(imgs)).double()
    logp = logits - logits.exp().sum(dim=1, keepdim=True).log()
    expected = sum(-0.9 * logp[i, y] - 0.1 * logp[i].mean() for i, y in enumerate(labels)) / len(labels)
    torch.testing.assert_close(loss.double(), expected)


def test_soft_targets_with_mixup_against_a_loop():
    """The batch is mixed with itself in reverse; both labels are smoothed once, not twice."""
    imgs, labels = a_batch()
    engine = a_loop(mixup=Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=CLASSES), label_smoothing=0.1)
    loss = engine.losses_of((imgs, labels), 5, 0)["cross_entropy"]
    engine.loop.seed_draws(5, 0)
    assert np.random.rand() < 1.0  # the draw of mixup_prob
    lam, x = float(np.random.beta(0.8, 0.8)), Normalize()(imgs)
    expected = 0.0
    for i in range(8):
        logp = torch.log_softmax(engine.model(lam * x[i : i + 1] + (1 - lam) * x[7 - i : 8 - i])[0], dim=0)
        for weight, y in ((lam, labels[i]), (1 - lam, labels[7 - i])):
            target = torch.full((CLASSES,), 0.1 / CLASSES)
            target[y] += 0.9
            expected -= weight * (target * logp).sum() / 8
    torch.testing.assert_close(loss, expected)


def test_learning_rates_follow_the_layer_scales():
    engine = a_loop(lr_scales=(0.5, 1.0))
    engine.step(iter([a_batch()]), 3)
    assert [group["lr"] for group in engine.loop.optimizer.param_groups] == pytest.approx([0.5 * 4e-3, 4e-3])


def test_clipping_bounds_the_norm_of_the_whole_gradient():
    """AdamW would hide the gradient's size; plain gradient descent shows it."""
    for bound in (None, 0.05, 1e3):
        engine = a_loop(lr_scales=(1.0,), clip_grad=bound)
        engine.loop.optimizer = torch.optim.SGD(engine.model.parameters(), lr=1.0)
        before = [p.detach().clone() for p in engine.loop.parameters]
        engine.step(iter([a_batch()]), 0)
        moved = (
            torch.cat([(a - b).flatten() for a, b in zip(engine.loop.parameters, before, strict=True)]).norm().item()
            / 1e-3
        )
        means, _ = engine.loop.meter.read()
        assert means["grad_norm"] > 0.1  # as it was before
        assert moved == pytest.approx(0.05 if bound == 0.05 else means["grad_norm"], rel=1e-3)


def losses(engine, steps, batch):
    return [engine.losses_of(batch, step, micro)["cross_entropy"].item() for step in steps for micro in range(2)]


def test_erasing_mixing_and_dropping_are_drawn_anew_for_each_step_and_no_other_state():
    options = dict(mixup=mixup(), erase=RandomErasing(0.5, mode="pixel", device="cpu"))
    first = losses(a_loop(Classifier(0.5), **options), range(3), a_batch())
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert losses(a_loop(Classifier(0.5), **options), [2, 1], a_batch()) == first[4:] + first[2:4]
    assert len(set(first)) == 6  # steps and micro-batches differ
    other_seed = losses(a_loop(Classifier(0.5), seed=1, **options), range(3), a_batch())
    assert not set(first) & set(other_seed)


def test_a_step_never_reads_from_the_device():
    engine = a_loop(Classifier(0.5), accum_iter=2, mixup=mixup(), erase=RandomErasing(0.9, mode="pixel", device="cpu"))
    stream = iter([a_batch(seed=i) for i in range(4)])
    engine.step(stream, 0)
    with reads() as found:
        engine.step(stream, 1)
    assert found == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_step_never_waits_for_the_gpu(name):
    device = torch.device("cuda")
    erase = RandomErasing(0.9, mode="pixel", device=device)
    engine = a_loop(Classifier(0.5), 2, "cuda", name, mixup=mixup(), erase=erase)
    stream = iter([[t.pin_memory() for t in a_batch(seed=i)] for i in range(4)])
    engine.step(stream, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step(stream, 1)
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
    own = range(len(labels)) if indices is None else indices
    imgs = [torch.full((3, 4, 4), i, dtype=torch.uint8) for i in own]
    stream = [
        (torch.stack(imgs[i : i + batch_size]), torch.tensor([labels[j] for j in own[i : i + batch_size]]))
        for i in range(0, len(own), batch_size)
    ]
    return evaluate(KnownLogits(table), stream, len(labels), CONTEXT, **options)


# Image 0 is right, 1 is second best, 2 is worst of six (not in the top 5), 3 is right.
TABLE = [[9.0, 0, 1, 2, 3, 4], [9.0, 8, 1, 2, 3, 4], [9.0, 8, 0, 2, 3, 4], [0.0, 1, 2, 9, 3, 4]]


def test_top_1_top_5_and_loss_by_hand():
    labels = [0, 3, 2, 3]  # of image 1 the fifth best
    result = score(TABLE, labels, batch_size=3)
    assert (result["top1"], result["top5"], result["num_images"]) == (50.0, 75.0, 4)
    expected = [-torch.log_softmax(torch.tensor(row), 0)[i].item() for row, i in zip(TABLE, labels, strict=True)]
    assert result["loss"] == pytest.approx(sum(expected) / 4)


@pytest.mark.parametrize("classes", [2, 5, 6])
def test_top_5_of_five_classes_says_nothing_and_is_left_out(classes):
    assert ("top5" in score([[1.0] * classes] * 3, [0, 1, 0])) == (classes > 5)


def test_columns_restrict_the_choice():
    """Among the columns 1, 3, 5 the best of the images are 5, 1, 1, 3, which are ranks 2, 0, 0, 1."""
    result = score(TABLE, [2, 0, 1, 1], columns=[1, 3, 5])
    assert (result["top1"], result["top1_unrestricted"]) == (75.0, 25.0)
    assert "top1_unrestricted" not in score(TABLE, [0, 1, 2, 3])


def test_a_wrong_count_is_an_error():
    with pytest.raises(RuntimeError, match="3 images were evaluated instead of 4"):
        score(TABLE, [0, 1, 2, 3], indices=[0, 1, 2])


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_scored_in_eval_mode_and_given_back_as_it_was(training):
    model = Classifier(0.5).train(training)
    results = [evaluate(model, [a_batch()], 8, CONTEXT) for _ in range(2)]
    assert results[0] == results[1]
    assert model.training is training and model.dropout.training is training


def _score_share(rank):
    labels = [i % CLASSES for i in range(7)]
    table = torch.randn(7, CLASSES, generator=torch.Generator().manual_seed(0)).tolist()
    return score(table, labels, indices=range(rank, 7, 2))


def test_two_processes_count_each_image_once():
    """Seven images on two processes: none is padded, none is left out."""
    first, second = run_in_two_processes(_score_share)
    labels = [i % CLASSES for i in range(7)]
    whole = score(torch.randn(7, CLASSES, generator=torch.Generator().manual_seed(0)).tolist(), labels)
    assert first == second and first["num_images"] == 7
    assert first == pytest.approx(whole)
