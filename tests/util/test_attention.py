import pytest
import torch
from torch.nn import functional as F

from downstream.segmentation.models import UPerNet
from encoders.models_relative_vit import relative_vit_micro_patch4
from encoders.models_swin import swin_micro_patch4_window4
from models_vit import Block
from tests.test_framework_contract import a_batch, build
from util import attention
from util.attention import KERNELS, biased_attention, prefer
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


BIASED = ["SimMIMViT", "SimMIMSwin", "GreenMIMSwin"]
CLASSIFIERS = {"ViT": relative_vit_micro_patch4, "Swin": swin_micro_patch4_window4}
UPERNET = dict(num_classes=5, channels=8, img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2)


@pytest.mark.parametrize("name", [*BIASED, *CLASSIFIERS, "UPerNet"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_bias_is_aligned_for_the_memory_efficient_kernel(name, precision, monkeypatch):
    """Also in a forward pass without gradients. cuDNN, torch's first choice on some cards, comes after that kernel."""
    calls, fused = [], F.scaled_dot_product_attention

    def watched(q, k, v, attn_mask):
        calls.append((attn_mask, torch._C._get_sdp_priority_order()))
        return fused(q, k, v, attn_mask=attn_mask)

    monkeypatch.replace_in(attention, "F.scaled_dot_product_attention", watched)
    make = CLASSIFIERS.get(name, lambda **_: UPerNet(**UPERNET)) if name not in BIASED else None
    model = build(name) if make is None else make(num_classes=5).eval()
    batch = a_batch(model) if make is None else (torch.randn(2, 3, *model.img_size),)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        model(*batch)
    order = [kernel.value for kernel in attention.BIASED]
    assert calls and {bias.dtype for bias, _ in calls} == {getattr(torch, precision)}
    for bias, priority in calls:
        assert bias.stride(-1) == 1 and not any(stride % 8 for stride in bias.stride()[:-1])
        assert list(priority)[: len(order)] == order


@pytest.mark.parametrize("name", ["auto", "math"])
def test_biased_attention_keeps_the_users_kernel_and_torchs_numbers(name):
    q, bias = torch.randn(2, 2, 7, 8), torch.randn(1, 2, 7, 7)
    prefer(name)
    order = torch._C._get_sdp_priority_order()
    assert torch.equal(biased_attention(q, q, q, bias), F.scaled_dot_product_attention(q, q, q, attn_mask=bias))
    assert torch._C._get_sdp_priority_order() == order


def test_biased_attention_compiles_without_graph_breaks():
    q, bias = torch.randn(2, 2, 7, 8), torch.randn(1, 2, 7, 7)
    compiled = torch.compile(biased_attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, q, q, bias), biased_attention(q, q, q, bias))
