"""A step of several micro-batches reduces its gradients over the processes once, after the last."""

from functools import partial

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from engine_pretrain import train_one_epoch
from tests.loops import a_driver, batches_of, make
from tests.two_processes import run_in_two_processes

NAME = "MaskedAutoencoderViT"


class CountBuckets:
    count = 0

    def hook(self, state, bucket):
        self.count += 1
        return allreduce_hook(state, bucket)


def micro_batches(model, rank, size):
    (batch,) = batches_of(NAME, model, rank, 1, size=8)
    for start in range(0, 8, size):
        yield [tensor[start : start + size] for tensor in batch]


def _step(rank, accum_iter):
    """Returns how often one step reduced, and the gradient that its optimizer would have got."""
    model = make(NAME)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    driver = a_driver(wrapped, optimizer, lambda step, lr_scale=1.0: 1e-3, accum_iter=accum_iter)
    gradients = []

    def keep_gradients(loop):
        gradients.extend(p.grad.clone() for p in loop.parameters)
        return {"grad_norm": torch.zeros(())}

    driver.train = partial(train_one_epoch, update=keep_gradients)
    buckets = CountBuckets()
    wrapped.register_comm_hook(None, buckets.hook)  # all gradients fit one bucket
    driver.step(micro_batches(model, rank, 8 // accum_iter), 0)
    return buckets.count, torch.cat([gradient.flatten() for gradient in gradients])


def _steps(rank):
    found = {}
    for accum_iter in (1, 4):
        found["count", accum_iter], found["gradient", accum_iter] = _step(rank, accum_iter)
    return found


def test_four_micro_batches_reduce_as_often_as_one():
    """And the gradient is that of the whole batch."""
    for found in run_in_two_processes(_steps):
        assert found["count", 1] == found["count", 4] == 1
        expected = found["gradient", 1]
        assert abs(expected).max() > 1e-3
        assert found["gradient", 4] == pytest.approx(expected, rel=1e-4, abs=1e-6)
