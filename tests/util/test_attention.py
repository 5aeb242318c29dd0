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

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def restore_torchs_order():
    yield
    prefer("auto", CPU)


def test_the_preferred_kernel_is_the_one_that_runs():
    """For the backward pass "math" saves a softmax [B, heads, T, T], fused kernels save one number per query."""
    block = Block(16, 2)
    x = torch.randn(2, 64, 16, requires_grad=True)
    saved = {}
    outputs = {}
    for name in ("flash", "math", "auto"):
        prefer(name, CPU)
        saved[name] = saved_bytes(lambda: block(x))
        outputs[name] = block(x)
    softmax = 4 * 2 * 2 * 64 * 64
    statistics = 4 * 2 * 2 * 64
    assert saved["math"] == saved["flash"] + softmax - statistics
    assert saved["auto"] == saved["flash"]
    torch.testing.assert_close(outputs["math"], outputs["auto"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_on_a_gpu_torch_chooses_the_preferred_kernel(name):
    q = torch.randn(2, 2, 128, 32, device="cuda", dtype=torch.float16)  # cuDNN may refuse 64 keys
    prefer(name, q.device)
    assert torch._fused_sdp_choice(q, q, q) == KERNELS[name].value


def is_cudnn_used():
    return torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("name", ["auto", *KERNELS])
def test_cudnns_kernel_is_off_unless_it_is_preferred(name, monkeypatch):
    used_with_bias = []
    monkeypatch.replace_in(
        attention, "F.scaled_dot_product_attention", lambda q, *_, **__: used_with_bias.append(is_cudnn_used())
    )
    prefer("cudnn", CPU)
    prefer(name, CPU)
    q = torch.zeros(1, 1, 2, 8)
    biased_attention(q, q, q, torch.zeros(1, 1, 2, 2))
    assert is_cudnn_used() == (name == "cudnn")
    assert used_with_bias[-1] == (name == "cudnn")


def a_query_and_a_bias():
    return torch.randn(2, 2, 7, 8), torch.randn(1, 2, 7, 7)


@pytest.mark.parametrize("name", KERNELS)
def test_another_kernel_serves_the_calls_that_the_preferred_one_cannot(name):
    """For example a bias, which flash attention does not take, and a CPU, which lacks some kernels."""
    q, bias = a_query_and_a_bias()
    scores = q @ q.mT / 8**0.5
    prefer(name, CPU)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), scores.softmax(dim=-1) @ q)
    expected = (scores + bias).softmax(dim=-1) @ q
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, attn_mask=bias), expected)


def model_with_biases(name):
    if name == "UPerNet":
        return UPerNet(num_classes=5, channels=8, img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2).eval()
    if name == "ViT":
        return relative_vit_micro_patch4(num_classes=5).eval()
    if name == "Swin":
        return swin_micro_patch4_window4(num_classes=5).eval()
    return build(name)


@pytest.mark.parametrize("name", ["SimMIMViT", "SimMIMSwin", "GreenMIMSwin", "ViT", "Swin", "UPerNet"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bias_is_aligned_for_the_memory_efficient_kernel(name, dtype, monkeypatch):
    """Also in a forward pass without gradients."""
    model = model_with_biases(name)
    batch = a_batch(model) if hasattr(model, "collator") else [torch.randn(2, 3, *model.img_size)]
    calls = []

    def watched(q, k, v, attn_mask):
        calls.append((attn_mask, torch._C._get_sdp_priority_order()))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)

    monkeypatch.replace_in(attention, "F.scaled_dot_product_attention", watched)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        model(*batch)
    assert calls
    expected_order = [kernel.value for kernel in attention.BIASED]
    for bias, order in calls:
        assert bias.dtype == dtype
        assert bias.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in bias.stride()[:-1])
        assert list(order)[: len(expected_order)] == expected_order


@pytest.mark.parametrize("name", ["auto", "math"])
def test_biased_attention_keeps_the_users_kernel_and_torchs_numbers(name):
    q, bias = a_query_and_a_bias()
    prefer(name, CPU)
    order = torch._C._get_sdp_priority_order()
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    assert torch.equal(biased_attention(q, q, q, bias), expected)
    assert torch._C._get_sdp_priority_order() == order


def test_biased_attention_compiles_without_graph_breaks():
    q, bias = a_query_and_a_bias()
    compiled = torch.compile(biased_attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, q, q, bias), biased_attention(q, q, q, bias))
