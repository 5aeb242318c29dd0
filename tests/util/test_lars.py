import copy

import pytest
import torch

from util.lars import LARS


def closed_form(p, grads, lr, weight_decay=0.0, momentum=0.9, trust=0.001):
    """Applies the rule of the docstring step by step, in plain Python on flat lists of float64."""
    norm = lambda v: sum(x * x for x in v) ** 0.5  # noqa: E731
    matrix, p = p.ndim > 1, p.double().flatten().tolist()
    mu = [0.0] * len(p)
    for grad in grads:
        g = grad.double().flatten().tolist()
        if matrix:
            g = [x + weight_decay * w for x, w in zip(g, p, strict=True)]
            scale = trust * norm(p) / norm(g) if norm(p) > 0 and norm(g) > 0 else 1.0
            g = [scale * x for x in g]
        mu = [momentum * m + x for m, x in zip(mu, g, strict=True)]
        p = [w - lr * m for w, m in zip(p, mu, strict=True)]
    return p


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(4, 3), (5,)])
def test_against_the_closed_form(shape, weight_decay):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    grads = [torch.randn(shape, dtype=torch.float64) for _ in range(4)]
    expected = closed_form(p.detach(), grads, 6.4, weight_decay)
    optimizer = LARS([p], lr=6.4, weight_decay=weight_decay)
    for grad in grads:
        p.grad = grad
        optimizer.step()
    assert p.detach().flatten().tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_a_zero_norm_gives_a_plain_step(zero):
    p = torch.nn.Parameter(torch.zeros(2, 2) if zero == "weight" else torch.ones(2, 2))
    p.grad = torch.zeros(2, 2) if zero == "gradient" else torch.ones(2, 2)
    before = p.detach().clone()
    LARS([p], lr=0.5).step()
    assert torch.equal(p.detach(), before - 0.5 * p.grad)


def test_a_step_that_is_not_finite_is_skipped():
    p, q = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    skipping, other = LARS([p], lr=0.5), LARS([q], lr=0.5)
    for gradient in (1.0, float("nan"), 2.0):
        p.grad = torch.full((2, 2), gradient)
        skipping.found_inf = (~p.grad.norm().isfinite()).float()
        skipping.step()
        if p.grad.isfinite().all():
            q.grad = p.grad
            other.step()
    assert torch.equal(p, q) and torch.equal(skipping.state[p]["mu"], other.state[q]["mu"])


def test_its_state_survives_a_checkpoint():
    p, q = (torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    ours, theirs = LARS([p], lr=0.1), LARS([q], lr=0.1)
    p.grad = q.grad = torch.eye(3)
    ours.step()
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    q.data.copy_(p.data)
    ours.step()
    theirs.step()
    assert torch.equal(p, q)
