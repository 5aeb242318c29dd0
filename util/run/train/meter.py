"""What reports are made of: sums of losses on the device, the time that a process has waited."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from util.collectives import all_reduce_sum, rank_and_world_size


class Meter:
    """Sums of scalars on the device over the finite steps, by name: since the last report and since the epoch began."""

    def __init__(self, device: torch.device) -> None:
        self.names: list[str] = []  # known from the first step on
        # [2, 3, names]: the two sums of each value, the number of finite steps in them, and of all steps.
        self.sums = torch.zeros(2, 3, 0, device=device)
        self.bad_streak = torch.zeros((), device=device)  # non-finite steps in a row

    @property
    def since_report(self) -> torch.Tensor:
        return self.sums[0]

    @property
    def since_epoch(self) -> torch.Tensor:
        return self.sums[1]

    def add(self, scalars: Mapping[str, torch.Tensor]) -> None:
        """Adds the scalars of one step, which is finite if "grad_norm" among them is."""
        if list(scalars) != self.names:
            self._rearrange(list(scalars))
        is_finite = torch.isfinite(scalars["grad_norm"])
        values = torch.where(is_finite, torch.stack(list(scalars.values())), 0.0)
        self.sums += torch.stack([values, is_finite.to(values).expand_as(values), torch.ones_like(values)])
        self.bad_streak = torch.where(is_finite, 0.0, self.bad_streak + 1)

    def _rearrange(self, names: list[str]) -> None:
        """Gives each name a place. Sums of a new one begin at zero, as when a run is resumed with a value more."""
        sums = self.sums.new_zeros(2, 3, len(names))
        for place, name in enumerate(names):
            if name in self.names:
                sums[..., place] = self.sums[..., self.names.index(name)]
        self.names = names
        self.sums = sums

    def means(self, sums: torch.Tensor) -> dict[str, float | None]:
        """Returns the means over ranks and finite steps. One is None if no step was finite, or if its sum is not.

        sums: `since_report` or `since_epoch`, averaged over the ranks.
        """
        means: dict[str, float | None] = {}
        for name, total, num_finite in zip(self.names, *sums[:2].tolist(), strict=True):
            means[name] = None
            if num_finite > 0 and math.isfinite(total):
                means[name] = total / num_finite
        return means

    def num_skipped(self, sums: torch.Tensor) -> int:
        """Returns the number of steps that were not finite. sums: as of `means`."""
        _, num_finite, num_steps = sums[:, self.names.index("grad_norm")].tolist()
        return round(num_steps - num_finite)

    def state_dict(self) -> dict[str, Any]:
        """All ranks must call it, because each has its own sums."""
        rank, world_size = rank_and_world_size()
        sums = self.sums.new_zeros(world_size, *self.sums.shape)
        sums[rank] = self.sums
        return {"names": self.names, "sums": all_reduce_sum(sums).cpu(), "bad_streak": self.bad_streak.cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the sums; if the world size has changed, each rank gets the mean."""
        rank, world_size = rank_and_world_size()
        sums = state["sums"]  # of each rank
        if len(sums) == world_size:
            own_sums = sums[rank]
        else:
            own_sums = sums.mean(dim=0)
        self.names = state["names"]
        self.sums = own_sums.to(self.sums.device)
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
