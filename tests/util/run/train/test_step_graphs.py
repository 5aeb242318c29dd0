"""The captured step gives the bits of the step that is launched kernel by kernel.

Without a GPU, a tape stands for a CUDA graph: it holds the operators of a capture with the very tensors that they read
and wrote, so that Python's values are frozen, and memory stays. Tests marked `gpu` capture real graphs.
"""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_pretrain import forward_backward, train_one_epoch
from models_mae_pr import mae_vit_micro_patch4
from tests.loops import a_driver, update_with_part
from util.run.train import step_graphs
from util.run.train.step_graphs import WARM_UP

CPU = torch.device("cpu")


class Tape(TorchDispatchMode):
    """Records operators. What they have overwritten is restored afterwards, since a capture computes nothing."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.overwritten = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    self.overwritten.setdefault(tensor.data_ptr(), (tensor, tensor.clone()))
        output = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, output))
        return output

    @torch.no_grad()
    def restore(self):
        for tensor, before in self.overwritten.values():
            tensor.copy_(before)

    @torch.no_grad()
    def replay(self):
        for operator, args, kwargs, output in self.calls:
            again = operator(*args, **kwargs)
            for place, value in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if torch.is_tensor(place) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)


def capture_on_tape(work):
    random_state = torch.get_rng_state()
    with Tape() as tape:
        work()
    tape.restore()
    torch.set_rng_state(random_state)
    return tape.replay


@pytest.fixture
def taped(monkeypatch):
    monkeypatch.setattr(step_graphs, "make_capture", lambda device: capture_on_tape)


def rate(step, scale=1.0):
    """Each is a float32, as a graph holds it."""
    return scale * 2.0**-8 * (1 + step % 4)


def a_run(has_graphs, device=CPU, **options):
    torch.manual_seed(0)
    model = mae_vit_micro_patch4(throw_ratio=0.5, drop_path_rate=0.2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = a_driver(model, optimizer, rate, device=str(device), clip_grad=0.5, **options)
    run.train = partial(train_one_epoch, update=update_with_part)
    if has_graphs:
        graphs = run.loop.capture_steps(forward_backward, update_with_part)
        run.train = partial(train_one_epoch, forward_backward=graphs.forward_backward, update=graphs.update)
    return run


def assert_same(ours, theirs):
    assert torch.equal(ours.weights(), theirs.weights())
    for parameter, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        for name, moment in theirs.loop.optimizer.state[other].items():
            assert torch.equal(ours.loop.optimizer.state[parameter][name], moment), name
    for report, expected in zip(ours.loop.log.reports, theirs.loop.log.reports, strict=True):
        for name in ("step", "loss", "grad_norm", "part_norm", "lr", "skipped_steps"):
            assert report[name] == expected[name], (report["step"], name)


def batches(steps, accum_iter=1):
    """Of the steps, each with images and masks of its own."""
    model = mae_vit_micro_patch4(throw_ratio=0.5)
    collator = model.collator("furthest", seed=0)
    for step in steps:
        for micro in range(accum_iter):
            generator = torch.Generator().manual_seed(100 * step + micro)
            imgs = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=generator)
            yield collator([(img, 0, (step, 4 * micro + i)) for i, img in enumerate(imgs)])


@pytest.mark.parametrize("accum_iter", [1, 3])
def test_a_captured_step_gives_the_same_bits(taped, accum_iter):
    """Drop path draws random numbers in each step, the gradient is clipped, and the rate changes."""
    ours = a_run(True, accum_iter=accum_iter)
    theirs = a_run(False, accum_iter=accum_iter)
    steps = range(WARM_UP + 8)
    ours.steps(steps, batches(steps, accum_iter))
    theirs.steps(steps, batches(steps, accum_iter))
    assert len(ours.loop.graphs.passes) == min(2, accum_iter)
    assert all(p.grad is not None for p in ours.loop.parameters)  # the graphs write to this memory
    assert_same(ours, theirs)
    assert len({report["loss"] for report in ours.loop.log.reports}) == len(ours.loop.log.reports)


def test_a_captured_step_skips_what_is_not_finite(taped):
    """It was decided at the capture if the host looked at the loss."""
    ours = a_run(True, print_freq=1)
    good = range(WARM_UP + 2)
    ours.steps(good, batches(good))
    before = ours.weights().clone()
    ((imgs, labels, ids),) = batches([50])
    ours.loop.normalize.mean.fill_(torch.nan)
    ours.step(iter([(imgs, labels, ids)]), len(good))
    assert torch.equal(ours.weights(), before)
    assert ours.loop.log.reports[-1]["skipped_steps"] == 1
    ours.loop.normalize.mean.fill_(100.0)
    ours.step(iter([(imgs, labels, ids)]), len(good) + 1)
    assert not torch.equal(ours.weights(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("accum_iter", [1, 3])
@pytest.mark.parametrize("precision_name", ["fp32", "bf16"])
def test_twenty_captured_steps_on_a_gpu_give_the_same_bits(accum_iter, precision_name):
    device = torch.device("cuda", 0)
    before = torch.cuda.current_stream()
    runs = []
    for has_graphs in (True, False):
        run = a_run(has_graphs, device, accum_iter=accum_iter, precision_name=precision_name)
        run.steps(range(20), ([part.pin_memory() for part in batch] for batch in batches(range(20), accum_iter)))
        runs.append(run)
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)
    assert_same(*runs)
