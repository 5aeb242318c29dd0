"""A step of every framework on a real GPU: nothing makes the host wait, and the numbers are the CPU's."""

import pytest
import torch

from tests.loops import batches_of, forbidden_waits
from tests.test_engine_pretrain import a_loop
from tests.test_framework_contract import a_batch, build, frameworks, gradients, total


@pytest.mark.gpu
@frameworks
def test_a_step_of_every_framework_never_waits_for_the_gpu(name):
    model = build(name)
    engine = a_loop("bf16", model=model, device="cuda", print_freq=1000)
    batches = iter([[tensor.pin_memory() for tensor in batch] for batch in batches_of(name, model, 0, 3)])
    engine.step(batches, 0)
    engine.step(batches, 1)
    with forbidden_waits():
        engine.step(batches, 2)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.gpu
@frameworks
def test_the_gpu_s_gradients_are_the_cpu_s(name):
    """In float32, within a thousandth of the norm of each and of a fifth of the largest."""
    model = build(name)
    batch = a_batch(model)
    if name == "LocalMIMViT":  # orientations at a border are multiples of pi, whose bin is a matter of rounding
        targets = model.target(batch[0])
        model.target = lambda imgs: [target.to(imgs.device) for target in targets]
    expected = gradients(model, total(model(*batch)))
    model.to("cuda")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = gradients(model, total(model(*(tensor.cuda() for tensor in batch))))
    assert found.keys() == expected.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    for parameter, gradient in expected.items():
        difference = (found[parameter].cpu() - gradient).norm()
        assert difference <= 1e-3 * (gradient.norm() + 0.2 * largest), parameter
