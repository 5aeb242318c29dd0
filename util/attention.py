"""Which attention kernel a process uses: the order in which it tries torch's, and where it uses its own.

`--attention short` is the kernel of `util.short_attention`, for self-attention of few tokens without bias on a GPU.
"""

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from util import operators  # noqa: F401  (declares torch.ops.prmim)

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CHOICES = ("auto", "short", *KERNELS)
BIASED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
_active_order = ExitStack()  # holds torch's context manager, which stays entered between calls of `prefer`
_active_name = "auto"

MAX_SHORT = 128  # tokens; with more, torch's kernels were faster on an H100
_short: frozenset[tuple[torch.dtype, int, int]] = frozenset()  # (type, heads, width of a head): tested, and in use


def prefer(name: str, device: torch.device) -> None:
    """Makes scaled_dot_product_attention try the kernel `name` of KERNELS first; "auto" restores torch's own order.

    "short" is as "auto" here: the kernel for short sequences is only used after a call of `use_short`.

    If that kernel cannot serve a call (flash attention takes no bias, for example), the others are tried in the order
    of KERNELS. The last one is "math", three plain operations that can serve any call.

    cuDNN's kernel is off unless it is the preferred one. torch tries it first on an H100, where several of its releases
    give NaN gradients for some shapes (pytorch#196678, cudnn-frontend#1072).
    """
    global _active_name, _short
    _short = frozenset()
    if name == "short":
        name = "auto"
    _active_order.close()
    _active_name = name
    if device.type == "cuda":  # on some cards the first call sets an order, which would replace those set later
        F.scaled_dot_product_attention(*torch.zeros(3, 1, 1, 8, 8, device=device, dtype=torch.float16))
    torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
    if name == "auto":
        return
    order = [KERNELS[name]]
    if name != "math":
        order += [kernel for other, kernel in KERNELS.items() if other not in (name, "cudnn")]
    _active_order.enter_context(sdpa_kernel(order, set_priority=True))


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """scaled_dot_product_attention with a bias of the logits. Under "auto" the memory-efficient kernel comes first."""
    if _active_name != "auto":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    with sdpa_kernel(BIASED, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def split_heads(qkv: Tensor, num_heads: int) -> list[Tensor]:
    """Splits the output of a qkv layer [..., T, 3 C] into queries, keys and values, three views [..., heads, T, d].

    The tensor is unbound before it is transposed, so the backward pass packs the three gradients in one copy. ViTs
    usually permute first. Their backward pass then stacks the gradients and copies the result into the layer's layout.
    """
    qkv = qkv.unflatten(-1, (3, num_heads, -1))  # [..., T, 3, heads, d]
    return [x.transpose(-3, -2) for x in qkv.unbind(-3)]


def self_attention(qkv: Tensor, num_heads: int) -> Tensor:
    """Returns attention among the T tokens of each image, [B, T, C], from queries, keys and values [B, T, 3 C]."""
    if _short and is_short(qkv, num_heads):
        return torch.ops.prmim.short_attention(qkv, num_heads)
    q, k, v = split_heads(qkv, num_heads)  # each [B, heads, T, d]
    x = F.scaled_dot_product_attention(q, k, v)
    return x.transpose(1, 2).flatten(2)


def is_short(qkv: Tensor, num_heads: int) -> bool:
    """Whether the kernel for short sequences serves queries, keys and values [B, T, 3 C]."""
    _, T, channels = qkv.shape
    width = channels // (3 * num_heads)
    return qkv.is_cuda and T <= MAX_SHORT and (qkv.dtype, num_heads, width) in _short


def use_short(dtype: torch.dtype, heads: Iterable[tuple[int, int]]) -> None:
    """Uses the kernel for short sequences for these heads, (number, width). Call it before the model is compiled."""
    global _short
    _short |= {(dtype, number, width) for number, width in heads}


def find_fault(dtype: torch.dtype, heads: Iterable[tuple[int, int]], device: torch.device) -> str | None:
    """Returns why the kernel for short sequences cannot be used for these heads, (number, width), or None.

    The kernel runs on random numbers: nothing but a run on this GPU, with this Triton, says that it works.
    """
    try:
        from util import short_attention

        for number, width in sorted(heads):
            fault = short_attention.find_fault(number, width, dtype, device)
            if fault is not None:
                return f"{number} heads of width {width}, {fault}"
    except Exception as error:  # whatever Triton, the compiler or the driver raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None
