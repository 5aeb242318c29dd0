"""The kernels of `util.short_attention` in Triton's interpreter, on a CPU: `python tests/interpreted_attention.py`.

Triton reads TRITON_INTERPRET when it is imported, so this is a program of its own. It prints lines of JSON. Numbers are
in float32, because the interpreter multiplies no matrices in bfloat16.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models_vit import Block
from util import attention, short_attention
from util.run.train.wrap import recompute_blocks

CPU = torch.device("cpu")
# (tokens, heads, width)
SHAPES = [(1, 3, 16), (2, 1, 64), (17, 2, 32), (50, 3, 64), (65, 1, 80), (99, 2, 32), (128, 2, 24)]
BATCH_SIZES = (3, 1, 2)


def show(**line):
    print(json.dumps(line), flush=True)


def slow(qkv, num_heads, grad):
    """Output and gradients of queries, keys and values in float64, query by query and by hand."""
    qkv = qkv.double()
    B, T, channels = qkv.shape
    width = channels // (3 * num_heads)
    out = torch.zeros(B, T, channels // 3, dtype=torch.float64)
    gradient = torch.zeros_like(qkv)
    for image in range(B):
        for head in range(num_heads):
            of_q = slice(head * width, (head + 1) * width)
            of_k = slice(channels // 3 + of_q.start, channels // 3 + of_q.stop)
            of_v = slice(2 * channels // 3 + of_q.start, 2 * channels // 3 + of_q.stop)
            k = qkv[image, :, of_k]
            v = qkv[image, :, of_v]
            for token in range(T):
                q = qkv[image, token, of_q]
                weights = (k @ q / width**0.5).exp()
                weights = weights / weights.sum()
                out[image, token, of_q] = weights @ v
                of_out = grad[image, token, of_q].double()
                gradient[image, :, of_v] += weights[:, None] * of_out
                of_weights = v @ of_out
                of_scores = weights * (of_weights - weights @ of_weights) / width**0.5
                gradient[image, token, of_q] = of_scores @ k
                gradient[image, :, of_k] += of_scores[:, None] * q
    return out, gradient


def run(function, qkv, num_heads, grad):
    qkv = qkv.detach().requires_grad_()
    out = function(qkv, num_heads)
    out.backward(grad)
    return out.detach(), qkv.grad


def show_numbers():
    for i, (tokens, heads, width) in enumerate(SHAPES):
        batch = BATCH_SIZES[i % len(BATCH_SIZES)]
        torch.manual_seed(i)
        qkv = torch.randn(batch, tokens, 3 * heads * width)
        grad = torch.randn(batch, tokens, heads * width)
        found = run(short_attention.short_attention, qkv, heads, grad)
        again = run(short_attention.short_attention, qkv, heads, grad)
        expected = slow(qkv, heads, grad)
        errors = [(x - y).abs().max().item() for x, y in zip(found, expected, strict=True)]
        plain = run(short_attention.reference, qkv.double(), heads, grad.double())
        show(
            case=f"{tokens} tokens, {heads} x {width}",
            errors=errors,
            repeats=all(torch.equal(x, y) for x, y in zip(found, again, strict=True)),
            reference_errors=[(x - y).abs().max().item() for x, y in zip(plain, expected, strict=True)],
        )


def show_operator():
    qkv = torch.randn(2, 5, 3 * 32, requires_grad=True)
    grad = torch.randn(2, 5, 32)
    operators = torch.ops.prmim
    show(case="opcheck", result=torch.library.opcheck(operators.short_attention.default, (qkv, 2)))
    backward = operators.short_attention_backward.default
    show(case="opcheck of the gradient", result=torch.library.opcheck(backward, (qkv.detach(), grad, 2)))
    strided = torch.randn(5, 2, 3 * 32).transpose(0, 1)
    for name, given in (("strided", strided), ("half", strided.contiguous().half())):
        out, gradient = run(short_attention.short_attention, given, 2, grad.to(given.dtype))
        expected = run(short_attention.reference, given.double(), 2, grad.double())
        errors = [(x - y).abs().max().item() for x, y in zip((out, gradient), expected, strict=True)]
        show(case=name, errors=errors, dtypes=[str(out.dtype), str(gradient.dtype)])
    show(case="test before use", fault=attention.find_fault(torch.float16, {(1, 16)}, CPU))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(32, 2), Block(32, 2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def gradients(model, wrapped=None):
    """The output, and the gradients of all parameters, in one vector each."""
    x = torch.linspace(-1, 1, 2 * 17 * 32).sin().view(2, 17, 32)
    if wrapped is None:
        wrapped = model
    model.zero_grad()
    out = wrapped(x)
    out.square().sum().backward()
    grads = [p.grad.flatten() for p in model.parameters()]
    return out.detach().flatten(), torch.cat(grads)


def differs(found, expected):
    return max((x - y).abs().max().item() for x, y in zip(found, expected, strict=True))


def show_model():
    """The kernel inside models: whatever wraps these computes the same bits."""
    torch_kernels = gradients(Blocks())
    attention.use_short(torch.float32, [(2, 16)])
    attention.is_short = lambda qkv, num_heads: True  # as on a GPU
    model = Blocks()
    eager = gradients(model)
    show(case="torch's kernels", difference=differs(eager, torch_kernels))
    with torch.autocast("cpu", torch.float16):
        show(
            case="autocast",
            dtype=str(attention.self_attention(model.blocks[0].attn.qkv(torch.ones(1, 3, 32)), 2).dtype),
        )

    launches = []
    start = short_attention.run

    def count(launch, tensors):
        launches.append(launch.kernel.__name__)
        start(launch, tensors)

    short_attention.run = count
    for name, pointwise_only in (("recompute", False), ("recompute_pointwise", True)):
        model = Blocks()
        recompute_blocks(model, pointwise_only)
        launches.clear()
        difference = differs(gradients(model), eager)
        show(case=name, difference=difference, forward_launches=launches.count("forward_kernel"))
        model = Blocks()
        recompute_blocks(model, pointwise_only)
        launches.clear()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
        difference = differs(gradients(model, compiled), eager)
        show(case=f"{name}, compiled", difference=difference, forward_launches=launches.count("forward_kernel"))
    model = Blocks()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    show(case="compiled", difference=differs(gradients(model, compiled), eager))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Blocks()
    show(case="DDP", difference=differs(gradients(model, DistributedDataParallel(model)), eager))
    dist.destroy_process_group()


if __name__ == "__main__":
    show_numbers()
    show_operator()
    show_model()
