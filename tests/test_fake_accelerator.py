"""Whole optimizer steps of all models on a device that is not the CPU, by tests/fake_accelerator.py."""

import json
from collections import Counter

import pytest

from tests.test_framework_contract import CLASSES
from tests.util.run.test_shard import CLASSIFIERS
from tests.warm import ROOT, Python

MODELS = [*CLASSES, *CLASSIFIERS, "UPerNet", "probe"]
FAULTS = ["a number is read", "a number is copied", "a mask is an index", "a tensor is on the host"]
FAULTS += ["a tensor of the host is an index"]
IMAGES, MICRO_BATCHES = 2, 2
# What the detector reads, because numbers of boxes follow from values. All but the last four are torchvision's.
READS_PER_IMAGE = {
    "nonzero in remove_small_boxes": 1,
    "nonzero in RegionProposalNetworkL1.filter_proposals": 1,
    "_to_copy in _batched_nms_coordinate_trick": 1,
    "nms in nms": 1,
    "nonzero in Matcher.set_low_quality_matches_": 1,
    "nonzero in BalancedPositiveNegativeSampler.__call__": 4,  # positive and negative ones, of anchors and of proposals
    "nonzero in RoIHeadsL1.subsample": 1,
}
READS_PER_MICRO_BATCH = {
    "tensor in BoxCoder.decode_single": 2,
    "as_tensor in BoxCoder.encode_single": 2,
    "nonzero in RegionProposalNetworkL1.compute_loss": 2,
    "tolist in AlignedRoIPool.forward": 2,  # of boxes and of masks
    "nonzero in RoIHeadsL1.forward": 1,
    "tolist in RoIHeadsL1.forward": 1,
}


@pytest.fixture(scope="module")
def found():
    names = [*MODELS, "Mask R-CNN", *(f"MaskedAutoencoderViT:{fault}" for fault in FAULTS)]
    out, _ = Python(ROOT / "tests" / "fake_accelerator.py", *names).communicate(timeout=250)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')]
    assert [line["name"] for line in lines] == names, out[-2000:]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_stays_on_the_device_and_nothing_is_read(name, found):
    assert found[name] == {"name": name, "reads": [], "devices": ["fakegpu:0"], "error": None}


def test_a_detector_reads_how_many_boxes_there_are_and_nothing_else(found):
    reads = Counter(found["Mask R-CNN"].pop("reads"))
    per_step = [{k: IMAGES * v for k, v in READS_PER_IMAGE.items()}, READS_PER_MICRO_BATCH]
    assert reads == {k: MICRO_BATCHES * v for part in per_step for k, v in part.items()}
    assert found["Mask R-CNN"] == {"name": "Mask R-CNN", "devices": ["fakegpu:0"], "error": None}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, found):
    result = found[f"MaskedAutoencoderViT:{fault}"]
    assert result["reads"] or result["error"]
