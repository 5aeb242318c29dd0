"""Self-attention of at most 128 tokens in Triton: the encoder of a masked autoencoder sees 50 tokens of an image.

Queries, keys and values are read from the tensor that the projection writes, and their gradient is written in the same
layout, so nothing is copied. Nothing but qkv is kept for the backward pass, in which a program holds all keys of a
head. There are no atomics: results repeat bit for bit. For more tokens the registers of one program do not suffice, and
a backward pass of two kernels was slower on an H100 than torch's (docs/costs.md).

`util.operators` declares the operator `prmim::short_attention`, and `util.attention` decides where it is used.
Importing this file imports Triton, and adds the implementation.

In the kernels T is the number of tokens. H heads have D channels each, padded to W, a power of two, and C = H D
channels together. KEYS is T padded. ROWS queries are processed at a time. In the backward pass, scores have a row for
each key, [KEYS, ROWS]: then the products for keys and values need no transposition. The softmax uses powers of 2.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from util import operators  # noqa: F401  (declares torch.ops.prmim)

LENGTHS = (2, 64, 65, 128)  # the least and the greatest T of each value of KEYS


@triton.jit
def _load(
    first: tl.tensor, rows: tl.tensor, T: tl.tensor, STRIDE: tl.constexpr, D: tl.constexpr, W: tl.constexpr
) -> tl.tensor:
    """Loads rows of D channels as [rows, W], zeros outside. first: address of row 0."""
    columns = tl.arange(0, W)
    inside = rows[:, None] < T
    if W > D:
        inside &= columns[None, :] < D
    return tl.load(first + rows[:, None] * STRIDE + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store(
    first: tl.tensor,
    x: tl.tensor,
    rows: tl.tensor,
    T: tl.tensor,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
) -> None:
    """Stores x [rows, W] as rows of D channels."""
    columns = tl.arange(0, W)
    inside = rows[:, None] < T
    if W > D:
        inside &= columns[None, :] < D
    tl.store(first + rows[:, None] * STRIDE + columns[None, :], x.to(first.dtype.element_ty), mask=inside)


@triton.jit
def _scores(x: tl.tensor, y: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The products of all rows of x with all rows of y, as exponents of 2."""
    log2_of_e = 1.4426950408889634
    return tl.dot(x, tl.trans(y)) * (scale * log2_of_e)


@triton.jit(do_not_specialize=["T"])
def forward_kernel(
    QKV: tl.tensor,
    OUT: tl.tensor,
    T: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Attention of ROWS queries, with BLOCK keys at a time. The first block always has a key."""
    C: tl.constexpr = H * D
    STRIDE: tl.constexpr = 3 * C
    image = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    Q = QKV + image * T * STRIDE + head * D
    K = Q + C
    V = K + C
    OUT += image * T * C + head * D
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    q = _load(Q, rows, T, STRIDE, D, W)
    top = tl.full([ROWS], float("-inf"), tl.float32)  # the largest score so far
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, W], tl.float32)
    for start in range(0, KEYS, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        k = _load(K, keys, T, STRIDE, D, W)
        v = _load(V, keys, T, STRIDE, D, W)
        scores = _scores(q, k, scale)
        scores = tl.where(keys[None, :] < T, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        rescale = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * rescale + tl.sum(p, 1)
        out = out * rescale[:, None] + tl.dot(p.to(v.dtype), v)
        top = new_top
    _store(OUT, out / total[:, None], rows, T, C, D, W)


@triton.jit
def _softmax(q: tl.tensor, k: tl.tensor, keys: tl.tensor, T: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The weights of the keys for each query, [KEYS, ROWS]."""
    scores = _scores(k, q, scale)
    scores = tl.where(keys[:, None] < T, scores, float("-inf"))
    p = tl.exp2(scores - tl.max(scores, 0)[None, :])
    return p / tl.sum(p, 0)[None, :]


@triton.jit(do_not_specialize=["T"])
def backward_kernel(
    QKV: tl.tensor,
    GRAD: tl.tensor,
    DQKV: tl.tensor,
    T: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """All gradients of one head of an image."""
    C: tl.constexpr = H * D
    STRIDE: tl.constexpr = 3 * C
    image = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    Q = QKV + image * T * STRIDE + head * D
    K = Q + C
    V = K + C
    DQ = DQKV + image * T * STRIDE + head * D
    DK = DQ + C
    DV = DK + C
    GRAD += image * T * C + head * D
    keys = tl.arange(0, KEYS)
    k = _load(K, keys, T, STRIDE, D, W)
    v = _load(V, keys, T, STRIDE, D, W)
    dk = tl.zeros([KEYS, W], tl.float32)
    dv = tl.zeros([KEYS, W], tl.float32)
    for start in range(0, KEYS, ROWS):
        rows = start + tl.arange(0, ROWS)
        q = _load(Q, rows, T, STRIDE, D, W)
        grad = _load(GRAD, rows, T, C, D, W)
        p = _softmax(q, k, keys, T, scale)
        dv += tl.dot(p.to(grad.dtype), grad)
        dp = tl.dot(v, tl.trans(grad))
        ds = (p * (dp - tl.sum(p * dp, 0)[None, :])).to(q.dtype)
        dk += tl.dot(ds, q)
        dq = tl.dot(tl.trans(ds), k) * scale
        _store(DQ, dq, rows, T, STRIDE, D, W)
    _store(DK, dk * scale, keys, T, STRIDE, D, W)
    _store(DV, dv, keys, T, STRIDE, D, W)


class Launch(NamedTuple):
    """A kernel with its constants.

    programs: for each head of an image. warps: of a program, of 32 threads each. stages: of the loads in its loop.
    """

    kernel: Any
    constants: dict[str, int]
    programs: int
    warps: int
    stages: int


# By these rules no register is spilled on GPUs of capability 8.0, 8.9 and 9.0: see docs/attention_kernels.csv.


@functools.cache
def forward_launch(num_tokens: int, num_heads: int, width: int) -> Launch:
    """Returns how the forward pass runs."""
    constants = padded_sizes(num_tokens, num_heads, width)
    constants |= {"ROWS": 64, "BLOCK": 64}
    return Launch(forward_kernel, constants, triton.cdiv(num_tokens, 64), warps=4, stages=2)


@functools.cache
def backward_launch(num_tokens: int, num_heads: int, width: int) -> Launch:
    """Returns how the backward pass runs."""
    constants = padded_sizes(num_tokens, num_heads, width)
    if num_tokens > 64:
        return Launch(backward_kernel, {**constants, "ROWS": 32}, 1, warps=8, stages=1)
    warps = 4
    if width > 64:
        warps = 8
    return Launch(backward_kernel, {**constants, "ROWS": 64}, 1, warps, stages=1)


def padded_sizes(num_tokens: int, num_heads: int, width: int) -> dict[str, int]:
    """Returns the constants that all kernels have. ValueError if there are too many tokens."""
    if num_tokens > LENGTHS[-1]:
        raise ValueError(f"short attention takes at most {LENGTHS[-1]} tokens, got {num_tokens}")
    return {
        "H": num_heads,
        "D": width,
        "W": max(16, triton.next_power_of_2(width)),
        "KEYS": max(64, triton.next_power_of_2(num_tokens)),
    }


def run(launch: Launch, tensors: Sequence[Tensor]) -> None:
    """Starts a kernel for all images. The first of the tensors is qkv, [B, T, 3 C]."""
    B, T, _ = tensors[0].shape
    constants = launch.constants
    grid = (B * constants["H"], launch.programs)
    scale = constants["D"] ** -0.5
    launch.kernel[grid](*tensors, T, scale, **constants, num_warps=launch.warps, num_stages=launch.stages)


def short_attention(qkv: Tensor, num_heads: int) -> Tensor:
    """Returns attention among the T tokens of each image, [B, T, C], from qkv [B, T, 3 C]: queries, keys and values."""
    return torch.ops.prmim.short_attention(qkv, num_heads)


def forward(qkv: Tensor, num_heads: int) -> Tensor:
    """Computes `short_attention`."""
    qkv = qkv.contiguous()
    _, T, channels = qkv.shape
    out = empty_output(qkv, num_heads)
    run(forward_launch(T, num_heads, channels // (3 * num_heads)), [qkv, out])
    return out


def backward(qkv: Tensor, grad: Tensor, num_heads: int) -> Tensor:
    """Computes the gradient of qkv [B, T, 3 C] from that of the output [B, T, C]."""
    qkv = qkv.contiguous()
    grad = grad.contiguous()
    _, T, channels = qkv.shape
    gradient = empty_gradient(qkv, grad, num_heads)
    run(backward_launch(T, num_heads, channels // (3 * num_heads)), [qkv, grad, gradient])
    return gradient


def empty_output(qkv: Tensor, num_heads: int) -> Tensor:
    """Returns an output without values. As the fake implementation, it tells the compiler the shape."""
    B, T, channels = qkv.shape
    return qkv.new_empty(B, T, channels // 3)


def empty_gradient(qkv: Tensor, grad: Tensor, num_heads: int) -> Tensor:
    """Returns a gradient of qkv without values, likewise."""
    return qkv.new_empty(qkv.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    qkv, num_heads = inputs
    ctx.save_for_backward(qkv)
    ctx.num_heads = num_heads


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (qkv,) = ctx.saved_tensors
    return torch.ops.prmim.short_attention_backward(qkv, grad, ctx.num_heads), None


with suppress(RuntimeError):  # another copy of this project in the process has implemented them: see `util.attention`
    torch.library.impl("prmim::short_attention", "default", forward)
    torch.library.impl("prmim::short_attention_backward", "default", backward)
    torch.library.register_fake("prmim::short_attention", empty_output)
    torch.library.register_fake("prmim::short_attention_backward", empty_gradient)
    torch.library.register_autograd("prmim::short_attention", _gradients, setup_context=_keep_inputs)


def reference(qkv: Tensor, num_heads: int) -> Tensor:
    """The same in plain operations."""
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, T, d]
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def find_fault(num_heads: int, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns what is wrong with outputs and gradients on random numbers, or None. Compiles all kernels of these heads.

    The relative error of a tensor must not be above the precision of `dtype`. That of torch's kernels is a third of it.
    """
    generator = torch.Generator().manual_seed(0)
    for num_tokens in LENGTHS:
        qkv = torch.randn(2, num_tokens, 3 * num_heads * width, generator=generator).to(device, dtype)
        grad = torch.randn(2, num_tokens, num_heads * width, generator=generator).to(device, dtype)
        found = output_and_gradients(short_attention, qkv, grad, num_heads)
        expected = output_and_gradients(reference, qkv.double(), grad.double(), num_heads)
        for name, tensor in found.items():
            error = (tensor.double() - expected[name]).norm() / expected[name].norm()
            if not error <= torch.finfo(dtype).eps:
                return f"{name} for {num_tokens} tokens: relative error {error:.1e}"
    return None


def output_and_gradients(
    attention: Callable[[Tensor, int], Tensor], qkv: Tensor, grad: Tensor, num_heads: int
) -> dict[str, Tensor]:
    """Returns the output of `attention`, and the gradients of queries, keys and values for the output's `grad`."""
    qkv = qkv.detach().requires_grad_()
    out = attention(qkv, num_heads)
    out.backward(grad)
    queries, keys, values = qkv.grad.chunk(3, dim=-1)
    return {
        "output": out.detach(),
        "gradient of queries": queries,
        "gradient of keys": keys,
        "gradient of values": values,
    }
