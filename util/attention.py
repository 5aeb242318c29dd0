"""Which of torch's fused attention kernels a process tries first."""

from contextlib import ExitStack

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

    Where it cannot serve a call (flash attention takes no bias, say), the others follow in torch's order; "math", three
    operations that serve any call, is the last of them.
    """
    _preferred.close()
    if name != "auto":
        others = [kernel for other, kernel in KERNELS.items() if other not in (name, "math")]
        order = [KERNELS[name], *others, SDPBackend.MATH] if name != "math" else [SDPBackend.MATH]
        _preferred.enter_context(sdpa_kernel(order, set_priority=True))
