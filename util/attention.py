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
_active_order = ExitStack()  # holds torch's context manager, which stays entered between calls of `prefer`


def prefer(name: str) -> None:
    """Makes scaled_dot_product_attention try the kernel `name` of KERNELS first; "auto" restores torch's own order.

    If that kernel cannot serve a call (flash attention takes no bias, for example), the others are tried in the order
    of KERNELS. The last one is "math", three plain operations that can serve any call.
    """
    _active_order.close()
    if name == "auto":
        return
    if torch.cuda.is_available():  # on some cards the first call sets an order, which would replace the one set here
        F.scaled_dot_product_attention(*torch.zeros(3, 1, 1, 8, 8, device="cuda", dtype=torch.float16))
    order = [KERNELS[name]]
    if name != "math":
        order += [kernel for other, kernel in KERNELS.items() if other != name]
    _active_order.enter_context(sdpa_kernel(order, set_priority=True))
