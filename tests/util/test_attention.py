import pytest
import torch
from torch.nn import functional as F

from models_vit import Block
from util.attention import KERNELS, prefer
from util.costs import saved_bytes


@pytest.fixture(autouse=True)
def restore_torchs_order():
    yield
    prefer("auto")


def test_the_preferred_kernel_is_the_one_that_runs():
    """For the backward pass "math" saves a softmax [B, heads, T, T], fused kernels save one number per query."""
    block, x = Block(16, 2), torch.randn(2, 64, 16, requires_grad=True)
    saved, outputs = {}, {}
    for name in ("auto", "flash", "math", "auto"):
        prefer(name)
        saved[name] = saved_bytes(lambda: block(x))
        outputs[name] = block(x)
    assert saved["auto"] == saved["flash"] == saved["math"] - 4 * 2 * 2 * 64 * (64 - 1)
    torch.testing.assert_close(outputs["math"], outputs["auto"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_on_a_gpu_torch_chooses_the_preferred_kernel(name):
    q = torch.randn(2, 2, 64, 32, device="cuda", dtype=torch.float16)
    prefer(name)
    assert torch._fused_sdp_choice(q, q, q) == KERNELS[name].value


@pytest.mark.parametrize("name", KERNELS)
def test_another_kernel_serves_the_calls_that_the_preferred_one_cannot(name):
    """For example a bias, which flash attention does not take, and a CPU, which lacks some kernels."""
    q, bias = torch.randn(2, 2, 7, 8), torch.randn(1, 2, 7, 7)
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    prefer(name)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, attn_mask=bias), expected)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), (q @ q.mT / 8**0.5).softmax(dim=-1) @ q)
