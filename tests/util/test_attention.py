import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from downstream.segmentation.models import UPerNet
from encoders.models_relative_vit import relative_vit_micro_patch4
from encoders.models_swin import swin_micro_patch4_window4
from models_vit import Block
from tests.test_framework_contract import a_batch, build
from util import attention
from util.attention import CHOICES, KERNELS, biased_attention, prefer, self_attention
from util.costs import saved_bytes
from util.run.processes.distributed import PRECISIONS
from util.run.train import wrap

CPU = torch.device("cpu")
GPU = torch.device("cuda")


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


@pytest.mark.parametrize("name", CHOICES)
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

    def watched(q, k, v, attn_mask=None):
        if attn_mask is not None:
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


@pytest.mark.parametrize("name", ["auto", "short", "math"])
def test_biased_attention_keeps_the_users_kernel_and_torchs_numbers(name):
    q, bias = a_query_and_a_bias()
    prefer(name, CPU)
    order = torch._C._get_sdp_priority_order()
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    assert torch.equal(biased_attention(q, q, q, bias), expected)
    assert torch._C._get_sdp_priority_order() == order


class Run:
    """`choose_attention` on two ranks that have GPUs of a capability. faults: what is wrong on each."""

    def __init__(self, monkeypatch, capability=(9, 0), faults=(None, None)):
        self.tested = []
        self.notes = []
        self.gathered = []
        self.faults = faults
        monkeypatch.replace_in(wrap, "torch.cuda.get_device_capability", lambda device: capability)
        monkeypatch.setattr(attention, "find_fault", self.find_fault)
        monkeypatch.setattr(wrap, "gather_objects", self.gather)

    def find_fault(self, dtype, heads, device):
        self.tested.append((dtype, heads, device))
        return self.faults[0]

    def gather(self, value):
        self.gathered.append(value)
        if isinstance(value, bool):  # whether a rank's GPU is one that the kernel is for
            return [value, value]
        return list(self.faults)

    def choose(self, name="auto", precision="bf16", device=GPU, model=None):
        model = model or build("MaskedAutoencoderViT")
        wrap.choose_attention(model, name, precision, device, self.notes.append)
        return attention._short


@pytest.mark.parametrize("name", ["auto", "short"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_short_attention_is_tested_for_the_heads_of_the_model_and_then_used(name, precision, monkeypatch):
    run = Run(monkeypatch)
    dtype = PRECISIONS[precision]
    used = run.choose(name, precision)
    [(tested_dtype, heads, device)] = run.tested
    assert (tested_dtype, device, run.notes) == (dtype, GPU, [])
    model = build("MaskedAutoencoderViT")
    encoder = (model.blocks[0].attn.num_heads, model.embed_dim // model.blocks[0].attn.num_heads)
    decoder = model.decoder.blocks[0].attn
    assert heads == {encoder, (decoder.num_heads, decoder.proj.in_features // decoder.num_heads)}
    assert used == {(dtype, *shape) for shape in heads}
    prefer("auto", CPU)
    assert not attention._short


def test_the_heads_of_a_teacher_count(monkeypatch):
    run = Run(monkeypatch)
    model = build("TECViT")
    teacher = model.teacher.blocks[0].attn
    assert teacher.plain_heads in wrap.plain_heads(model)
    assert (torch.bfloat16, *teacher.plain_heads) in run.choose(model=model)


@pytest.mark.parametrize(
    ("name", "precision", "device", "capability"),
    [
        ("auto", "bf16", CPU, (9, 0)),
        ("auto", "fp32", GPU, (9, 0)),
        ("auto", "bf16", GPU, (8, 0)),
        ("flash", "bf16", GPU, (9, 0)),
        ("math", "bf16", GPU, (9, 0)),
    ],
)
def test_elsewhere_torchs_kernels_are_used_without_a_word(name, precision, device, capability, monkeypatch):
    run = Run(monkeypatch, capability)
    assert not run.choose(name, precision, device)
    assert run.tested == run.notes == []
    assert len(run.gathered) == int(capability == (8, 0))


@pytest.mark.parametrize("name", ["SimMIMSwin", "GreenMIMSwin", "SimMIMViT"])
def test_what_short_attention_cannot_serve_is_not_tested(name, monkeypatch):
    """GreenMIM's decoder has no biases."""
    run = Run(monkeypatch)
    run.choose("short", model=build(name))
    assert len(run.tested) == int(name == "GreenMIMSwin")


@pytest.mark.parametrize("faults", [("it is wrong", None), (None, "it is wrong"), ("it is wrong", "so here")])
def test_a_fault_on_any_rank_makes_all_use_torchs_kernels(faults, monkeypatch):
    run = Run(monkeypatch, faults=faults)
    assert not run.choose()
    rank = faults.index("it is wrong")
    [note] = run.notes
    assert note == f"note: torch's attention kernels are used: --attention short fails on rank {rank}: it is wrong"


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch is built without CUDA")
@pytest.mark.parametrize(
    ("tokens", "heads", "dtype", "is_served"),
    [
        (50, 2, torch.bfloat16, True),
        (128, 2, torch.bfloat16, True),
        (129, 2, torch.bfloat16, False),
        (50, 4, torch.bfloat16, False),
        (50, 2, torch.float16, False),
        (50, 2, torch.float32, False),
    ],
)
def test_calls_of_tested_heads_and_few_tokens_are_served_in_one_graph(tokens, heads, dtype, is_served):
    pytest.importorskip("util.short_attention", reason="this torch has no Triton")
    attention.use_short(torch.bfloat16, {(2, 16)})
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(self_attention, fullgraph=True, dynamic=False, backend=keep)
    with FakeTensorMode():
        qkv = torch.empty(3, tokens, 96, device="cuda", dtype=dtype)
        out = compiled(qkv, heads)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((3, tokens, 32), dtype, True)
    [graph] = graphs
    called = {str(node.target) for node in graph.graph.nodes}
    assert ("prmim.short_attention" in called) == is_served
