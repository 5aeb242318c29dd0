"""The order in which a process tries torch's fused attention kernels."""

from contextlib import ExitStack

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
BIASED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
_active_order = ExitStack()  # holds torch's context manager, which stays entered between calls of `prefer`
_active_name = "auto"


def prefer(name: str, device: torch.device) -> None:
    """Makes scaled_dot_product_attention try the kernel `name` of KERNELS first; "auto" restores torch's own order.

    If that kernel cannot serve a call (flash attention takes no bias, for example), the others are tried in the order
    of KERNELS. The last one is "math", three plain operations that can serve any call.

    cuDNN's kernel is off unless it is the preferred one. torch tries it first on an H100, where several of its releases
    give NaN gradients for some shapes (pytorch#196678, cudnn-frontend#1072).
    """
    global _active_name
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


def biased_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """scaled_dot_product_attention with a bias of the logits. Under "auto" the memory-efficient kernel comes first."""
    if _active_name != "auto":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    with sdpa_kernel(BIASED, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
