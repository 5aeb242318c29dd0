"""A step of several micro-batches reduces its gradients over the processes once, after the last."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tests.two_processes import run_in_two_processes
from tests.util.run.processes.test_shard import CPU, a_loop, batches_of
from util.run.processes import shard

NAME = "MaskedAutoencoderViT"


class CountReduceScatters(TorchDispatchMode):
    """By their operator, since the function that FSDP calls has another name from one torch to the next."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "reduce_scatter" in str(operator):
            self.count += 1
        return operator(*args, **(kwargs or {}))


class CountBuckets:
    count = 0

    def hook(self, state, bucket):
        self.count += 1
        return allreduce_hook(state, bucket)


def micro_batches(model, rank, size):
    (batch,) = batches_of(NAME, model, rank, 1, size=8)
    for start in range(0, 8, size):
        yield [tensor[start : start + size] for tensor in batch]


def _step(rank, sharded, accum_iter):
    """Returns how often one step reduced, and the gradient that its optimizer would have got."""
    driver, model, _ = a_loop(NAME, sharded, accum_iter=accum_iter)
    gradients = []

    def update_weights():
        own = [p.grad for p in model.parameters() if p.requires_grad]
        gradients.extend(shard.HostCopies(CPU).take(own, keep=True))
        return torch.zeros(())

    driver.loop.update_weights = update_weights
    buckets = CountBuckets()
    if not sharded:  # all gradients fit one bucket
        driver.model.register_comm_hook(None, buckets.hook)
    with CountReduceScatters() as scatters:
        driver.step(micro_batches(model, rank, 8 // accum_iter), 0)
    return buckets.count + scatters.count, torch.cat([gradient.flatten() for gradient in gradients])


def _steps(rank):
    found = {"groups": len(shard.blocks_of(a_loop(NAME, False)[1])) + 1}
    for sharded in (False, True):
        for accum_iter in (1, 4):
            count, gradient = _step(rank, sharded, accum_iter)
            found["count", sharded, accum_iter] = count
            found["gradient", sharded, accum_iter] = gradient
    return found


def test_four_micro_batches_reduce_as_often_as_one():
    """DDP its one bucket, the sharded model each of its groups; and the gradient is that of the whole batch."""
    for found in run_in_two_processes(_steps):
        assert found["count", False, 1] == found["count", False, 4] == 1
        assert found["count", True, 1] == found["count", True, 4] == found["groups"]
        expected = found["gradient", False, 1]
        assert abs(expected).max() > 1e-3
        for sharded, accum_iter in ((False, 4), (True, 1), (True, 4)):
            assert found["gradient", sharded, accum_iter] == pytest.approx(expected, rel=1e-4, abs=1e-6)
