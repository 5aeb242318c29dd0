import pytest
import torch

from util.lars import LARS


def norm(values):
    return sum(x * x for x in values) ** 0.5


def closed_form(parameter, grads, lr, weight_decay=0.0, momentum=0.9, trust=0.001):
    """Applies the rule of the docstring step by step, in plain Python on flat lists of float64."""
    weights = parameter.flatten().tolist()
    velocity = [0.0] * len(weights)
    for grad in grads:
        step = grad.flatten().tolist()
        if parameter.ndim > 1:
            for i, weight in enumerate(weights):
                step[i] += weight_decay * weight
            scale = 1.0
            if norm(weights) > 0 and norm(step) > 0:
                scale = trust * norm(weights) / norm(step)
            step = [scale * x for x in step]
        for i, x in enumerate(step):
            velocity[i] = momentum * velocity[i] + x
            weights[i] -= lr * velocity[i]
    return weights


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(4, 3), (5,)])
def test_against_the_closed_form(shape, weight_decay):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    grads = [torch.randn(shape, dtype=torch.float64) for _ in range(4)]
    expected = closed_form(parameter.detach(), grads, 6.4, weight_decay)
    optimizer = LARS([parameter], lr=6.4, weight_decay=weight_decay)
    for grad in grads:
        parameter.grad = grad
        optimizer.step()
    assert parameter.flatten().tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("weight", "gradient"), [(0.0, 1.0), (1.0, 0.0)])
def test_a_zero_norm_gives_a_plain_step(weight, gradient):
    parameter = torch.nn.Parameter(torch.full((2, 2), weight))
    parameter.grad = torch.full((2, 2), gradient)
    LARS([parameter], lr=0.5).step()
    assert torch.equal(parameter.detach(), torch.full((2, 2), weight - 0.5 * gradient))


def a_matrix():
    return torch.nn.Parameter(torch.ones(2, 2))


def test_a_step_that_is_not_finite_is_skipped():
    ours = a_matrix()
    skipping = LARS([ours], lr=0.5)
    for gradient in (1.0, float("nan"), 2.0):
        ours.grad = torch.full((2, 2), gradient)
        skipping.found_inf = (~ours.grad.norm().isfinite()).float()
        skipping.step()
    theirs = a_matrix()
    optimizer = LARS([theirs], lr=0.5)
    for gradient in (1.0, 2.0):
        theirs.grad = torch.full((2, 2), gradient)
        optimizer.step()
    assert torch.equal(ours, theirs)
