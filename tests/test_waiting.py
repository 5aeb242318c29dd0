"""Nothing in a step of any framework makes the host wait for the device."""

import pytest
import torch

from encoders import window_groups
from frameworks import models_greenmim_pr
from tests.reads import reads
from tests.test_engine_pretrain import a_loop
from tests.test_framework_contract import a_batch, build, frameworks, gradients, total
from tests.util.run.test_shard import batches_of

CHECKS_ON_CPU = {"GreenMIMSwin"}  # reads what the batch and its plans hold, where that costs nothing
READS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "index": lambda x: x[: x[1].long()],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to a device": lambda x: x.to(device=torch.device("cpu")),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: torch.nonzero(x),
    "tensor": lambda x: torch.tensor(2.0, device=x.device),
    "as_tensor": lambda x: torch.as_tensor([1, 2], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "where": lambda x: torch.where(x > 1),
    "mask": lambda x: x[x > 1],
    "set by a mask": lambda x: x.__setitem__(x > 1, x[0]),
    "repeats": lambda x: x.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("name", READS)
def test_the_spy_sees_each_way_to_read(name):
    with reads() as found:
        READS[name](torch.arange(4.0))
    assert len(found) == 1


def test_the_spy_lets_pass_what_nobody_waits_for():
    x = torch.arange(4.0)
    with reads() as found:
        (
            x.to("cpu", non_blocking=True),
            x.to(torch.float64),
            x[x.long()],
            torch.full((), 2.0, device=x.device),
            x.masked_fill_(x > 1, 0.0),
            x.__setitem__(x > 1, 0.0),
            torch.tensor(2.0),
            torch.nn.utils.get_total_norm([x]),
        )
    assert found == []


def step(name, precision_name, monkeypatch):
    """An engine after its first step, in which state is made; and a batch for the second."""
    model = build(name)
    if name in CHECKS_ON_CPU:
        forward = model.forward

        def unchecked(*batch):
            with monkeypatch.context() as patch:
                for module in (models_greenmim_pr, window_groups):  # compiled, they do without, on any device
                    patch.replace_in(module, "torch.compiler.is_compiling", lambda: True)
                return forward(*batch)

        model.forward = unchecked
    driver, batches = a_loop(precision_name, model=model, print_freq=1000), [*batches_of(name, model, 0, 2)]
    driver.step(iter(batches[:1]), 0)
    return driver, batches[1]


@frameworks
@pytest.mark.parametrize("precision_name", ["fp32", "bf16"])
def test_a_step_of_every_framework_reads_nothing(name, precision_name, monkeypatch):
    """On the CPU, forward and backward pass, update and meter."""
    engine, batch = step(name, precision_name, monkeypatch)
    with reads() as found:
        engine.step(iter([batch]), 1)
    assert found == []


@pytest.mark.gpu
@frameworks
def test_a_step_of_every_framework_never_waits_for_the_gpu(name):
    engine = a_loop("bf16", model=(model := build(name)), device="cuda", print_freq=1000)
    batches = iter([[t.pin_memory() for t in batch] for batch in batches_of(name, model, 0, 3)])
    for warm_up in range(2):
        engine.step(batches, warm_up)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step(batches, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
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
        assert (found[parameter].cpu() - gradient).norm() <= 1e-3 * (gradient.norm() + 0.2 * largest), parameter
