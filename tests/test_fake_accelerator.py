"""Whole optimizer steps of all models on a device that is not the CPU, by tests/fake_accelerator.py."""

import json

import pytest

from tests.test_framework_contract import CLASSES
from tests.util.run.test_shard import CLASSIFIERS
from tests.warm import ROOT, Python

MODELS = [*CLASSES, *CLASSIFIERS, "UPerNet"]
FAULTS = ["a number is read", "a number is copied", "a mask is an index", "a tensor is on the host"]


@pytest.fixture(scope="module")
def found():
    names = [*MODELS, *(f"MaskedAutoencoderViT:{fault}" for fault in FAULTS)]
    out, _ = Python(ROOT / "tests" / "fake_accelerator.py", *names).communicate(timeout=250)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')]
    assert [line["name"] for line in lines] == names, out[-2000:]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_stays_on_the_device_and_nothing_is_read(name, found):
    assert found[name] == {"name": name, "reads": [], "devices": ["fakegpu:0"], "error": None}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, found):
    result = found[f"MaskedAutoencoderViT:{fault}"]
    assert result["reads"] or result["error"]
