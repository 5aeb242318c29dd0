"""Steps of optimizers that cannot skip by themselves: their values, and what they hold meanwhile."""

import pytest
import torch
from timm.optim import Adan, Lamb, Lion, Muon
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.test_engine_pretrain import assert_same_tensors
from util.run.train.skipping import SEPARABLE, step_if

OPTIMIZERS = {
    "Muon": lambda groups: Muon(groups, lr=1e-2, weight_decay=0.05),
    "Lion": lambda groups: Lion(groups, lr=1e-2, weight_decay=0.05),
    "Lamb": lambda groups: Lamb(groups, lr=1e-2, max_grad_norm=0.1),  # of all gradients together
    "Adan": lambda groups: Adan(groups, lr=1e-2),  # counts its steps in each group
}


def a_model(depth=3, width=8):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])


def an_optimizer(name, model):
    """With matrices and vectors in groups of their own."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return OPTIMIZERS[name]([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])


def set_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_finite_steps_are_those_of_the_optimizer_bit_for_bit(name):
    ours = a_model()
    theirs = a_model()
    optimizer = an_optimizer(name, ours)
    plain = an_optimizer(name, theirs)
    groups = optimizer.param_groups
    for seed in range(3):
        for model in (ours, theirs):
            set_gradients(model, seed)
        step_if(torch.tensor(True), optimizer)
        plain.step()
    assert optimizer.param_groups is groups
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(parameter, expected)
        assert_same_tensors(optimizer.state[parameter], plain.state[expected])


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, and that are alive at once."""

    def __init__(self):
        super().__init__()
        self.storages = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {leaf.untyped_storage()._cdata for leaf in args if torch.is_tensor(leaf)}
        results = func(*args, **(kwargs or {}))
        for result in torch.utils._pytree.tree_leaves(results):
            if torch.is_tensor(result) and result.untyped_storage()._cdata not in inputs:
                storage = result.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        self.storages = {storage: size for storage, size in self.storages.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.storages.values()))
        return results


@pytest.mark.parametrize("name", SEPARABLE)
def test_a_step_holds_copies_of_few_parameters_at_a_time(name):
    """Beside what the step itself needs: of one matrix of 16 or as many values, its moment, and a selection."""
    model = a_model(depth=16, width=64)
    optimizer = an_optimizer(name, model)
    set_gradients(model, 0)
    optimizer.step()
    with PeakBytes() as alone:
        optimizer.step()
    with PeakBytes() as kept:
        step_if(torch.tensor(True), optimizer)
    matrix = 4 * 64 * 64
    assert kept.peak <= alone.peak + 3 * matrix
