"""Whole optimizer steps of all models on a device that is not the CPU, by tests/fake_accelerator.py."""

import json
from collections import Counter

import pytest

from tests.loops import CLASSIFIERS
from tests.test_framework_contract import CLASSES
from tests.warm import ROOT, Python

MODELS = [*CLASSES, *CLASSIFIERS, "UPerNet", "probe"]
FAULTY = "MaskedAutoencoderViT:a number is read"
MICRO_BATCHES = 2
# What the detector reads in a micro-batch, because numbers of boxes follow from values.
READS_OF_OURS = {
    "RegionProposalNetworkL1.compute_loss": 2,
    "AlignedRoIPool.forward": 2,  # of boxes and of masks
    "RoIHeadsL1.forward": 2,
}
READS_OF_TORCHVISION = {
    "remove_small_boxes",
    "RegionProposalNetworkL1.filter_proposals",
    "_batched_nms_coordinate_trick",
    "nms",
    "Matcher.set_low_quality_matches_",
    "BalancedPositiveNegativeSampler.__call__",
    "RoIHeadsL1.subsample",
    "BoxCoder.decode_single",
    "BoxCoder.encode_single",
}


@pytest.fixture(scope="module")
def found():
    names = [*MODELS, "Mask R-CNN", FAULTY]
    out, _ = Python(ROOT / "tests" / "fake_accelerator.py", *names).communicate(timeout=250)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')]
    assert [line["name"] for line in lines] == names, out[-2000:]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_stays_on_the_device_and_nothing_is_read(name, found):
    assert found[name] == {"name": name, "reads": [], "devices": ["fakegpu:0"], "error": None}


def test_a_detector_reads_how_many_boxes_there_are_and_nothing_else(found):
    detector = found["Mask R-CNN"]
    assert detector["error"] is None
    assert detector["devices"] == ["fakegpu:0"]
    reads = Counter(detector["reads"])
    for function, count in READS_OF_OURS.items():
        assert reads.pop(function) == MICRO_BATCHES * count, function
    assert reads.keys() == READS_OF_TORCHVISION


def test_a_loss_that_is_read_is_found(found):
    assert found[FAULTY]["reads"]
