"""Which share of the GPUs' peak a training reaches: model FLOPs utilisation, MFU.

It counts what the model needs: three times the multiply-adds of a forward pass, and none that are recomputed.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from util.collectives import rank_and_world_size
from util.costs import device_name
from util.run.train.loop import TrainLoop

# FLOP/s in bfloat16 or float16, without sparsity, of the datasheets; the first pattern that fits a device's name.
PEAKS = {
    r"\bH100 PCIe\b": 756e12,
    r"\bH[12]00 NVL\b": 835e12,
    r"\b(H100|H200|GH200)\b": 989e12,
    r"\bA100\b": 312e12,
    r"\bL40S\b": 362e12,
    r"\bRTX 4090\b": 165.2e12,
}


def peak_flops(name: str, precision: str) -> float | None:
    """Returns the peak of a device by its name, or None if it is unknown, for a part of a GPU, and for fp32."""
    if precision == "fp32" or re.search(r"\bMIG\b", name):
        return None
    for pattern, peak in PEAKS.items():
        if re.search(pattern, name):
            return peak
    return None


def report_utilization(loop: TrainLoop, count_multiply_adds: Callable[[], tuple[float, float]]) -> None:
    """Adds `mfu` to the reports if the GPU's peak is known.

    count_multiply_adds: returns those of an image's forward pass, in 10^9: (trained model, frozen teacher).
    """
    peak = peak_flops(device_name(loop.device), loop.precision.name)
    if peak is None:
        return
    trained, frozen = count_multiply_adds()
    flops = 2e9 * (3 * trained + frozen)  # of an image
    _, world_size = rank_and_world_size()

    def measure(scalars: Mapping[str, Any]) -> dict[str, float]:
        return {"mfu": flops * scalars["images_per_s"] / (world_size * peak)}

    loop.measures.append(measure)
