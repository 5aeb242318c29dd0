"""What reports are made of: sums of losses on the device, the time that a process has waited, the share of the peak."""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from util.collectives import all_reduce_sum, rank_and_world_size
from util.costs import device_name
from util.run.processes.supervise import StopSignal


class Meter:
    """Sums on the device over the finite steps, since the last report and since the epoch began.

    Both are [names + 2]: the sum of each loss and of the gradient norm, the number of finite steps, and of all steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: list[str] = []  # known from the first step on
        self.since_report = torch.zeros(0, device=device)
        self.since_epoch = torch.zeros(0, device=device)
        self.bad_streak = torch.zeros((), device=device)  # non-finite steps in a row

    def add(self, losses: dict[str, torch.Tensor], grad_norm: torch.Tensor) -> None:
        """Adds the scalar losses and the gradient norm of one step."""
        if not self.names:
            self._start([*losses, "grad_norm"])
        finite = torch.isfinite(grad_norm)
        one = torch.ones_like(grad_norm)
        values = torch.where(finite, torch.stack([*losses.values(), grad_norm, one]), 0.0)
        for sums in (self.since_report, self.since_epoch):
            sums[:-1] += values
            sums[-1] += 1
        self.bad_streak = torch.where(finite, 0.0, self.bad_streak + 1)

    def means(self, sums: Sequence[float]) -> tuple[dict[str, float | None], int]:
        """Returns (means over ranks and finite steps, number of skipped steps).

        sums: `since_report` or `since_epoch`, averaged over the ranks. A mean is None if no step was finite, or if its
        sum is not.
        """
        *totals, finite, steps = sums
        means: dict[str, float | None] = {}
        for name, total in zip(self.names, totals, strict=True):
            means[name] = None
            if finite > 0 and math.isfinite(total):
                means[name] = total / finite
        return means, round(steps - finite)

    def _start(self, names: list[str]) -> None:
        self.names = names
        self.since_report = torch.zeros(len(names) + 2, device=self.device)
        self.since_epoch = torch.zeros(len(names) + 2, device=self.device)

    def state_dict(self) -> dict[str, Any]:
        """All ranks must call it, because each has its own sums."""
        rank, world_size = rank_and_world_size()
        own_sums = torch.stack([self.since_report, self.since_epoch])
        sums = own_sums.new_zeros(world_size, *own_sums.shape)
        sums[rank] = own_sums
        return {"names": self.names, "sums": all_reduce_sum(sums).cpu(), "bad_streak": self.bad_streak.cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the sums; if the world size has changed, each rank gets the mean."""
        rank, world_size = rank_and_world_size()
        self._start(state["names"])
        sums = state["sums"]  # of each rank
        if len(sums) == world_size:
            own_sums = sums[rank]
        else:
            own_sums = sums.mean(dim=0)
        self.since_report.copy_(own_sums[0])
        self.since_epoch.copy_(own_sums[1])
        self.bad_streak.copy_(state["bad_streak"])


class Clock:
    """Measures wall time since the last lap, and how much of it this process has waited for data and for the device."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.start = time.perf_counter()
        self.data_seconds = 0.0
        self.device_seconds = 0.0
        self.num_steps = 0

    def next(self, batches: Iterator[Any]) -> Any:
        """Returns `next(batches)` and counts the time it took."""
        before = time.perf_counter()
        batch = next(batches)
        self.data_seconds += time.perf_counter() - before
        return batch

    def agreed(self, stop: StopSignal, num_asked: torch.Tensor) -> bool:
        """Returns `stop.agreed(num_asked)`, which waits for the device, and counts the time it took."""
        before = time.perf_counter()
        is_agreed = stop.agreed(num_asked)
        self.device_seconds += time.perf_counter() - before
        return is_agreed

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    @property
    def host_seconds(self) -> float:
        """The time in which this process has not waited, but worked: it gave the device its work."""
        return self.seconds - self.data_seconds - self.device_seconds

    def lap(self, images_per_step: int) -> dict[str, float]:
        """Returns the rates since the last lap and starts a new one."""
        seconds = self.seconds
        rates = {
            "seconds_per_step": seconds / self.num_steps,
            "images_per_s": self.num_steps * images_per_step / seconds,
        }
        self.restart()
        return rates


def total(means: dict[str, float | None]) -> float | None:
    """Returns the sum, or None if a mean is None."""
    summed = 0.0
    for value in means.values():
        if value is None:
            return None
        summed += value
    return summed


# ---------------------------------------------------------------------------------------------------------- utilisation

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


def utilization(
    device: torch.device, precision: str, count_multiply_adds: Callable[[], tuple[float, float]]
) -> list[Callable[[Mapping[str, Any]], dict[str, float]]]:
    """Returns a function from a report's values to {"mfu": share of the GPUs' peak}; none if the peak is unknown.

    It counts what the model needs: three times the multiply-adds of a forward pass, and none that are recomputed.
    count_multiply_adds: returns those of an image's forward pass, in 10^9: (trained model, frozen teacher).
    """
    peak = peak_flops(device_name(device), precision)
    if peak is None:
        return []
    trained, frozen = count_multiply_adds()
    flops = 2e9 * (3 * trained + frozen)  # of an image
    _, world_size = rank_and_world_size()

    def measure(scalars: Mapping[str, Any]) -> dict[str, float]:
        return {"mfu": flops * scalars["images_per_s"] / (world_size * peak)}

    return [measure]
