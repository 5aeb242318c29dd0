"""The kernels for short sequences, by tests/interpreted_attention.py, and on a GPU if there is one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from models_vit import Block
from tests.warm import ROOT
from util import attention
from util.run.processes.distributed import PRECISIONS
from util.run.train import wrap

short_attention = pytest.importorskip("util.short_attention", reason="this torch has no Triton")
triton = pytest.importorskip("triton")

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def interpreted():
    command = [sys.executable, ROOT / "tests" / "interpreted_attention.py"]  # no fork of a process with Triton
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["case"]: line for line in lines}


def test_numbers_are_those_of_a_slow_derivation_and_repeat(interpreted):
    cases = [line for case, line in interpreted.items() if "tokens" in case]
    assert len(cases) == 7
    for line in cases:
        assert max(line["errors"]) < 3e-6, line
        assert max(line["reference_errors"]) < 1e-13, line
        assert line["repeats"], line


@pytest.mark.parametrize(("case", "tolerance"), [("strided", 3e-6), ("half", 4e-3)])
def test_other_inputs(case, tolerance, interpreted):
    assert max(interpreted[case]["errors"]) < tolerance
    assert len(set(interpreted[case]["dtypes"])) == 1


@pytest.mark.parametrize("case", ["opcheck", "opcheck of the gradient"])
def test_the_operators_are_registered_as_torch_wants_them(case, interpreted):
    assert set(interpreted[case]["result"].values()) == {"SUCCESS"}


def test_the_test_before_use_finds_no_fault(interpreted):
    assert interpreted["test before use"]["fault"] is None


def test_a_model_gets_the_numbers_of_torchs_kernels(interpreted):
    assert interpreted["torch's kernels"]["difference"] < 2e-4  # sums of squares, of 1,000 values
    assert interpreted["autocast"]["dtype"] == "torch.float16"


WRAPPED = ["compiled", "recompute", "recompute, compiled", "recompute_pointwise", "recompute_pointwise, compiled"]


@pytest.mark.parametrize("case", [*WRAPPED, "DDP"])
def test_a_wrapped_model_computes_the_same_bits(case, interpreted):
    assert interpreted[case]["difference"] == 0


@pytest.mark.parametrize("suffix", ["", ", compiled"])
def test_selective_recomputation_keeps_its_output(suffix, interpreted):
    blocks = 2
    assert interpreted[f"recompute{suffix}"]["forward_launches"] == 2 * blocks
    assert interpreted[f"recompute_pointwise{suffix}"]["forward_launches"] == blocks


def launches_of(num_tokens, num_heads, width):
    forward = short_attention.forward_launch(num_tokens, num_heads, width)
    return [forward, short_attention.backward_launch(num_tokens, num_heads, width)]


def test_every_length_is_served_by_a_kernel_that_is_tested_before_use():
    def compiled_for(num_tokens):
        return [launch._replace(programs=0) for launch in launches_of(num_tokens, 2, 32)]

    tested = [compiled_for(num_tokens) for num_tokens in short_attention.LENGTHS]
    for num_tokens in range(1, attention.MAX_SHORT + 1):
        assert compiled_for(num_tokens) in tested
    with pytest.raises(ValueError, match="at most 128 tokens, got 129"):
        launches_of(129, 2, 32)


def test_an_operator_that_raises_is_a_fault():
    """Here the kernels find no GPU."""
    fault = attention.find_fault(torch.bfloat16, {(2, 16)}, CPU)
    assert "Error: " in fault
    assert "\n" not in fault


def larger_output(qkv, num_heads):
    return 1.02 * short_attention.reference(qkv, num_heads)


def larger_gradient(qkv, num_heads):
    out = short_attention.reference(qkv, num_heads)
    return out + 0.02 * (out - out.detach())


def wrong_last_token(qkv, num_heads):
    out = short_attention.reference(qkv, num_heads)
    if qkv.shape[1] < 128:
        return out
    return torch.cat([out[:, :-1], out[:, :1]], dim=1)


def not_a_number(qkv, num_heads):
    return float("nan") * qkv[..., : qkv.shape[-1] // 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("operator", "fault"),
    [
        (larger_output, "output for 2 tokens: relative error "),
        (larger_gradient, "gradient of queries for 2 tokens: relative error "),
        (wrong_last_token, "output for 128 tokens: relative error "),
        (not_a_number, "output for 2 tokens: relative error nan"),
    ],
)
def test_wrong_numbers_are_a_fault(operator, fault, dtype, monkeypatch):
    monkeypatch.setattr(short_attention, "short_attention", short_attention.reference)
    assert short_attention.find_fault(2, 16, dtype, CPU) is None
    monkeypatch.setattr(short_attention, "short_attention", operator)
    assert short_attention.find_fault(2, 16, dtype, CPU).startswith(fault)


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton has no cuobjdump")
def test_kernels_compile_for_an_absent_gpu_and_spill_nothing(tmp_path):
    """At the sizes of ViT-B, in bfloat16 for capability 9.0: its encoder, and its decoder at throw ratio 0.5."""
    for tokens, heads, width in ((64, 12, 64), (128, 16, 32)):
        for launch in launches_of(tokens, heads, width):
            names = launch.kernel.arg_names
            signature = dict.fromkeys(names, "*bf16") | {"T": "i32", "scale": "fp32"}
            signature |= dict.fromkeys(launch.constants, "constexpr")
            aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name] == "*bf16"}
            source = triton.compiler.ASTSource(launch.kernel, signature, constexprs=launch.constants, attrs=aligned)
            target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
            options = {"num_warps": launch.warps, "num_stages": launch.stages}
            cubin = triton.compile(source, target=target, options=options).asm["cubin"]
            (tmp_path / "kernel.cubin").write_bytes(cubin)
            command = [CUOBJDUMP, "--dump-resource-usage", tmp_path / "kernel.cubin"]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert re.search(r"STACK:(\d+)", usage)[1] == "0"
            assert 0 < int(re.search(r"REG:(\d+)", usage)[1]) <= 255


GPU = torch.device("cuda")


def relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 32, 48, 64, 80])
def test_on_a_gpu_errors_are_those_of_torchs_kernels(width, dtype):
    torch.manual_seed(0)
    heads = 3
    for tokens in (1, 17, 50, 64, 65, 99, 128):
        qkv = torch.randn(5, tokens, 3 * heads * width, device=GPU, dtype=dtype)
        grad = torch.randn(5, tokens, heads * width, device=GPU, dtype=dtype)

        def outputs(function, qkv=qkv, grad=grad):
            return short_attention.output_and_gradients(function, qkv, grad.to(qkv.dtype), heads)

        found = outputs(short_attention.short_attention)
        again = outputs(short_attention.short_attention)
        by_torch = outputs(attention.self_attention)
        expected = outputs(short_attention.reference, qkv.double())
        for name, right in expected.items():
            assert torch.equal(found[name], again[name])
            if right.norm() > 1e-6:  # a single token's queries and keys have no gradient
                error = relative_error(found[name], right)
                assert error < 1.5 * relative_error(by_torch[name], right) + 1e-5, (tokens, name)


@pytest.fixture
def restore_torchs_order():
    yield
    attention.prefer("auto", GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "compiled", "recomputed"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_on_a_gpu_a_model_gets_the_numbers_of_torchs_kernels(precision, how, monkeypatch, restore_torchs_order):
    launches = []
    notes = []
    start = short_attention.run

    def count(launch, tensors):
        launches.append(launch.kernel)
        start(launch, tensors)

    def output_and_gradient(name):
        torch.manual_seed(0)
        model = nn.ModuleDict({"blocks": nn.ModuleList([Block(64, 2)])}).to(GPU)
        attention.prefer(name, GPU)
        wrap.choose_attention(model, name, precision, GPU, notes.append)
        if how == "recomputed":
            wrap.recompute_blocks(model, pointwise_only=True)
        if how == "compiled":
            wrap.compile_parts(model)
        monkeypatch.setattr(short_attention, "run", count)
        with torch.autocast("cuda", PRECISIONS[precision]):
            out = model["blocks"][0](torch.linspace(-9, 9, 4 * 50 * 64, device=GPU).sin().view(4, 50, 64))
        out.float().square().sum().backward()
        monkeypatch.setattr(short_attention, "run", start)
        return out.detach(), model["blocks"][0].attn.qkv.weight.grad

    expected = output_and_gradient("flash")
    assert launches == []
    found = output_and_gradient("short")
    assert notes == []
    assert launches == [short_attention.forward_kernel, short_attention.backward_kernel]
    for tensor, right in zip(found, expected, strict=True):
        assert relative_error(tensor, right.double()) < 1e-2
