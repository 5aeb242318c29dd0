"""The share of the peak in the reports, by hand."""

import pytest
import torch

from tests.runs import pretrain, reports
from util import costs
from util.costs import peak_flops

BF16 = ("--precision", "bf16", "--picture_every", 0, "--max_steps", 2)


def block(tokens, width):
    """Multiply-adds of a transformer block: four projections, scores and their sums, an MLP of four times the width."""
    return 4 * tokens * width * width + 2 * tokens * tokens * width + 2 * tokens * width * 4 * width


def test_reports_have_the_share_of_the_peak(photos, tmp_path, monkeypatch):
    """The peak is a fake one, of this CPU. 32 x 32 pixels are 64 tokens: 16 visible, 16 retained, 32 thrown."""
    monkeypatch.setitem(costs.PEAKS, "cpu", 1e13)
    pretrain(photos, tmp_path, *BF16)
    multiply_adds = 16 * 48 * 96 + 4 * block(1 + 16, 96) + (1 + 16) * 96 * 64
    multiply_adds += 4 * block(1 + 32, 64) + 64 * 7 * 7 * 64 + 48 * 64 * 48
    for report in reports(tmp_path):
        expected = 3 * 2 * multiply_adds * report["images_per_s"] / 1e13
        assert report["mfu"] == pytest.approx(expected, rel=0.01)
    assert f"MFU {report['mfu']:.0%}" in (tmp_path / "log.txt").read_text()


def test_a_frozen_teacher_and_all_processes_count(monkeypatch):
    monkeypatch.setitem(costs.PEAKS, "cpu", 1e12)
    monkeypatch.setattr(costs, "rank_and_world_size", lambda: (0, 4))
    (measure,) = costs.utilization(torch.device("cpu"), "bf16", lambda: (2.0, 0.5))
    assert measure({"images_per_s": 100}) == {"mfu": pytest.approx((6 * 2e9 + 2 * 0.5e9) * 100 / 4e12)}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu (2 threads)", None),
    ],
)
def test_peaks_by_the_names_that_drivers_give(name, peak):
    assert peak_flops(name, "bf16") == peak
    assert peak_flops(name, "fp32") is None
