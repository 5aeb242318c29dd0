"""CUDA's autocast in the forward pass of all frameworks, by tests/cuda_autocast.py."""

import json

import pytest
import torch

from tests.test_framework_contract import CLASSES
from tests.warm import ROOT, Python

MIXED = {"CrossMaskedAutoencoderViT": {"torch.float32"}}  # mixes levels in float32


@pytest.fixture(scope="module")
def found():
    if not torch.backends.cuda.is_built():
        pytest.skip("this torch is built without CUDA, where tensors on a fake GPU end the interpreter")
    if not hasattr(torch.cuda.amp.common, "amp_definitely_not_available"):
        pytest.skip("this torch decides otherwise whether autocast is possible")
    out, _ = Python(ROOT / "tests" / "cuda_autocast.py", *CLASSES).communicate(timeout=300)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [line["name"] for line in lines] == [*CLASSES], out[-2000:]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", CLASSES)
def test_products_are_bfloat16_and_norms_and_losses_float32(name, found):
    types = found[name]
    assert types["norms"] == types["losses"] == types["result"] == ["torch.float32"]
    assert set(types["products"]) - MIXED.get(name, set()) == {"torch.bfloat16"}
