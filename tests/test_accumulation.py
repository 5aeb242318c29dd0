"""A step of several micro-batches reduces its gradients over the processes once, after the last."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tests.two_processes import run_in_two_processes
from tests.util.run.test_shard import CPU, a_loop, batches_of
from util.run import shard

NAME = "MaskedAutoencoderViT"


class CountReduceScatters(TorchDispatchMode):
    """By their operator, since the function that FSDP calls has another name from one torch to the next."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls += [operator] * ("reduce_scatter" in str(operator))
        return operator(*args, **(kwargs or {}))


def _step(rank, sharded, accum_iter):
    """How often one step reduced, and the gradient that its optimizer would have got."""
    driver, model, _ = a_loop(NAME, sharded, accum_iter=accum_iter)
    calls, found = [], []

    def update_weights():
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        found.extend(shard.HostCopies(CPU).take(grads, keep=True))
        return torch.zeros(())

    driver.loop.update_weights = update_weights
    if not sharded:  # all gradients fit one bucket
        driver.model.register_comm_hook(
            None, lambda state, bucket: calls.append(bucket) or allreduce_hook(state, bucket)
        )
    (whole,) = batches_of(NAME, model, rank, 1, size=8)
    size = 8 // accum_iter
    with CountReduceScatters(calls):
        driver.step(iter([[t[i : i + size] for t in whole] for i in range(0, 8, size)]), 0)
    return len(calls), torch.cat([gradient.flatten() for gradient in found])


def _steps(rank):
    found = {}
    for sharded in (False, True):
        for accum_iter in (1, 4):
            found["calls", sharded, accum_iter], found["gradient", sharded, accum_iter] = _step(
                rank, sharded, accum_iter
            )
    return found | {"groups": len(shard.blocks_of(a_loop(NAME, False)[1])) + 1}


def test_four_micro_batches_reduce_as_often_as_one():
    """DDP its one bucket, the sharded model each of its groups; and the gradient is that of the whole batch."""
    for found in run_in_two_processes(_steps):
        assert [found["calls", False, accum_iter] for accum_iter in (1, 4)] == [1, 1]
        assert [found["calls", True, accum_iter] for accum_iter in (1, 4)] == [found["groups"]] * 2
        expected = found["gradient", False, 1]
        assert abs(expected).max() > 1e-3
        for key in (("gradient", False, 4), ("gradient", True, 1), ("gradient", True, 4)):
            assert found[key] == pytest.approx(expected, rel=1e-4, abs=1e-6), key
