"""Taking and putting tokens, against loops over single tokens."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from util.tokens import put_tokens, take_tokens

B = 3
N = 7
C = 4


def random_ids(num):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(B, N, generator=generator).argsort(dim=1)[:, :num]


def take_slowly(x, ids):
    images = []
    for b in range(len(ids)):
        image = x[b] if len(x) > 1 else x[0]
        images.append(torch.stack([image[i] for i in ids[b].tolist()]))
    return torch.stack(images)


@pytest.mark.parametrize("images", [B, 1])  # one: the same tokens for all images, such as positions
@pytest.mark.parametrize("num", [N, 3])
@pytest.mark.parametrize("way", ["plain", "twice", "recomputed", "compiled"])
def test_takes_tokens_and_their_gradient(images, num, way):
    x = torch.randn(images, N, C, dtype=torch.float64, requires_grad=True)
    ids = random_ids(num)
    weights = torch.randn(B, num, C, dtype=torch.float64)
    expected = take_slowly(x, ids)
    (gradient,) = torch.autograd.grad((weights * expected).sum(), x)
    take = take_tokens
    if way == "compiled":
        take = torch.compile(take_tokens, fullgraph=True, backend="aot_eager")
    if way == "recomputed":
        taken = checkpoint(take, x, ids, use_reentrant=False)
    else:
        taken = take(x, ids)
    if way == "twice":
        taken = taken + take(x, ids)
        expected = 2 * expected
        gradient = 2 * gradient
    assert torch.equal(taken, expected)
    (weights * taken).sum().backward()
    torch.testing.assert_close(x.grad, gradient)


def test_put_is_the_inverse_and_the_rest_is_zero():
    x = torch.randn(B, N, C, requires_grad=True)
    ids = random_ids(3)
    taken = take_tokens(x, ids)
    placed = put_tokens(taken, ids, N)
    for b in range(B):
        for i in range(N):
            expected = x[b, i] if i in ids[b].tolist() else torch.zeros(C)
            assert torch.equal(placed[b, i], expected)
    assert torch.equal(take_tokens(placed, ids), taken)


@pytest.mark.parametrize("function", [take_tokens, lambda x, ids: put_tokens(x[:, :3], ids, N)])
def test_first_and_second_derivatives_against_differences(function):
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    ids = random_ids(3)
    assert torch.autograd.gradcheck(lambda x: function(x, ids), x)
    assert torch.autograd.gradgradcheck(lambda x: function(x, ids), x)


def test_half_precision_stays():
    """Under autocast the features are half precision, and so is what is added to them."""
    x = torch.randn(B, N, C, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        taken = take_tokens(x, random_ids(3))
    assert taken.dtype == torch.bfloat16
    taken.sum().backward()
    assert x.grad.dtype == torch.bfloat16
