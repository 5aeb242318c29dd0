"""Which of torch's fused attention kernels a process tries first."""

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
_preferred = ExitStack()


def prefer(name):
    """From now on scaled_dot_product_attention tries the kernel `name` of KERNELS first; "auto" is torch's own order.

    Where it cannot serve a call (flash attention takes no bias, say), the others follow as they stand there; "math", three
    operations that serve any call, is the last of them.
    """
    _preferred.close()
    if name != "auto":
        if torch.cuda.is_available():  # the first call on some cards sets an order, over whatever was set before it
            F.scaled_dot_product_attention(*torch.zeros(3, 1, 1, 8, 8, device="cuda", dtype=torch.float16))
        others = [kernel for other, kernel in KERNELS.items() if other not in (name, "math")]
        order = [KERNELS[name], *others, SDPBackend.MATH] if name != "math" else [SDPBackend.MATH]
        _preferred.enter_context(sdpa_kernel(order, set_priority=True))
