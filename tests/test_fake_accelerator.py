"""Whole optimizer steps of all models on a device that is not the CPU, by tests/fake_accelerator.py."""

import json

import pytest

from tests.loops import CLASSIFIERS
from tests.test_framework_contract import CLASSES
from tests.warm import ROOT, Python

MODELS = [*CLASSES, *CLASSIFIERS, "UPerNet", "probe"]


@pytest.fixture(scope="module")
def found():
    out, _ = Python(ROOT / "tests" / "fake_accelerator.py", *MODELS).communicate(timeout=900)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')]
    assert [line["name"] for line in lines] == MODELS, out[-2000:]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_stays_on_the_device_and_nothing_is_read(name, found):
    assert found[name] == {"name": name, "reads": [], "devices": ["fakegpu:0"], "error": None}
