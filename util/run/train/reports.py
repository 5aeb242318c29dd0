"""The reports of a run on its steps: means of what was logged, rates, and what the steps wait for.

The ranks exchange what they need in one call, every `--print_freq` steps. A report waits for the device.
"""

import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from util.collectives import all_reduce_sum, gather_objects, gather_tensors, rank_and_world_size
from util.data.open import data_hint
from util.run.processes.distributed import memory_scalars
from util.run.start.plan import RunSchedule
from util.run.start.run import Run
from util.run.train.logging import RunLog
from util.text import duration, rate

SLOW_DATA = 0.1  # warn if more than this share of the time is spent waiting for data
BUSY_HOST = 0.95  # say so if a host does not wait for its GPU in more than this share of the time: the GPU waits
HOST_HINT = "larger --batch_size, --compile or --cuda_graph help, and cores that are free"
MAX_BAD_STEPS = 20  # this many non-finite steps in a row end the run, at the next report

Measure = Callable[[Mapping[str, Any]], dict[str, float]]  # from the values of a report to further ones


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
        return {"names": self.names, "sums": gather_tensors(self.sums).cpu(), "bad_streak": self.bad_streak.cpu()}

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
    """When the steps of a report began, and how long this process has waited in them for data and for the device."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.start = time.perf_counter()
        self.data_seconds = 0.0
        self.device_seconds = 0.0
        self.num_steps = 0


def total(means: dict[str, float | None]) -> float | None:
    """Returns the sum, or None if a mean is None."""
    summed = 0.0
    for value in means.values():
        if value is None:
            return None
        summed += value
    return summed


class StepReports:
    """Writes the reports of a run to its log.

    num_bad_images: that the workers of all ranks had found at the last report.
    """

    def __init__(
        self,
        run: Run,
        schedule: RunSchedule,
        meter: Meter,
        clock: Clock,
        log: RunLog,
        bad_images: torch.Tensor | None,
        measures: Sequence[Measure],
    ) -> None:
        """bad_images: see `AddressedDataset.bad`."""
        self.bad_images = bad_images
        self.num_bad_images = 0
        self.meter = meter
        self.clock = clock
        self.log = log
        self.measures = measures
        self.data_hint = data_hint(run.plan.num_workers, run.plan.device)  # what to do if loading data is too slow
        self.device = run.process.device
        self.is_scaled = run.plan.precision == "fp16"
        self.images_per_step = run.plan.total_batch_size  # over all ranks
        self.learning_rate = schedule.learning_rate
        self.steps_per_epoch = schedule.steps_per_epoch
        self.last_step = schedule.last_step(run.args.max_steps)
        self.hosts = gather_objects(socket.gethostname())  # of each rank
        self.host_hint = HOST_HINT if self.device.type == "cuda" else ""
        self.is_first = True  # the next report includes what a start does once, such as compilation

    def write(self, step: int, losses: Mapping[str, torch.Tensor], interim: bool) -> None:
        """Logs the means since the last report. FloatingPointError if steps are lost. All ranks must call it.

        step: number of steps done. losses: of the last one. An interim report is made if a run ends between two regular
        ones. It leaves the meter as it is, so that the regular reports of a resumed run equal those of an undisturbed
        run.
        """
        sums = self.meter.sums.cpu()
        seconds = time.perf_counter() - self.clock.start
        num_bad_images = 0
        if self.bad_images is not None:
            num_bad_images = int(self.bad_images.count_nonzero())
        of_this_rank = torch.cat([sums.flatten(), torch.tensor([num_bad_images, self.clock.data_seconds])])
        of_ranks = gather_tensors(of_this_rank.to(self.device)).cpu()
        self.num_bad_images = int(of_ranks[:, -2].sum())
        waits = of_ranks[:, -1].tolist()
        since_report, since_epoch = of_ranks[:, :-2].reshape(-1, *sums.shape).mean(dim=0)
        means = self.meter.means(since_report)
        if not interim:
            self.meter.since_report.zero_()
        self._refuse_lost_steps(step, losses, are_all_lost=means["grad_norm"] is None)

        losses_means = {name: means.pop(name) for name in losses}
        scalars: dict[str, Any] = {"epoch": (step - 1) // self.steps_per_epoch, "loss": total(losses_means)}
        if len(losses) > 1:
            for name, value in losses_means.items():
                scalars[f"loss_{name}"] = value
        scalars |= means  # of what the update returns
        scalars["lr"] = self.learning_rate(step - 1)
        scalars["skipped_steps"] = self.meter.num_skipped(since_report)
        scalars["data_rank"] = waits.index(max(waits))
        scalars["data_share"] = min(max(waits) / seconds, 0.99)  # the ranks' clocks do not start together
        # Of rank 0, which has the same work as others: it has not waited, but given the device its work.
        scalars["host_share"] = 1 - (self.clock.data_seconds + self.clock.device_seconds) / seconds
        scalars["seconds_per_step"] = seconds / self.clock.num_steps
        scalars["images_per_s"] = self.images_per_step / scalars["seconds_per_step"]
        self.clock.restart()
        scalars |= memory_scalars(self.device)
        for measure in self.measures:
            scalars |= measure(scalars)
        if step % self.steps_per_epoch == 0:
            epoch_means = self.meter.means(since_epoch)
            self.meter.since_epoch.zero_()
            scalars["epoch_loss"] = total({name: epoch_means[name] for name in losses})
        self.log.report(step, scalars, self._describe(step, scalars), interim)
        if not self.is_first:
            self._advise(scalars)
        self.is_first = False

    def _advise(self, scalars: dict[str, Any]) -> None:
        """Says what steps wait for, data or the host, and what helps. Once each."""
        data = scalars["data_share"]
        host = scalars["host_share"]
        if data > SLOW_DATA:
            if self.data_hint:
                loaded = scalars["images_per_s"]
                rates = f"{rate(loaded)} images/s are loaded, the model takes up to {rate(loaded / (1 - data))}"
                where = self._place(scalars["data_rank"])
                warning = f"warning: {data:.0%} of the time{where} is spent waiting for data"
                self.log.info(f"{warning} ({rates}): {self.data_hint}")
                self.data_hint = ""
        elif host + data > BUSY_HOST and self.host_hint:
            self.log.info(f"note: the host works {host:.0%} of the time, and its GPU waits: {self.host_hint}")
            self.host_hint = ""

    def _place(self, rank: int) -> str:
        """Returns, for example, " on rank 3 (node1)", or "" for a single process."""
        if len(self.hosts) < 2:
            return ""
        return f" on rank {rank} ({self.hosts[rank]})"

    def _refuse_lost_steps(self, step: int, losses: Mapping[str, torch.Tensor], are_all_lost: bool) -> None:
        """FloatingPointError after MAX_BAD_STEPS steps in a row that were not finite. For all ranks.

        At the end of the run it is enough if no step since the last report was finite: `are_all_lost`.
        """
        bad_streak = int(self.meter.bad_streak)  # equal on all ranks
        is_too_long = bad_streak >= MAX_BAD_STEPS
        ends_in_it = step == self.last_step and bad_streak > 0 and are_all_lost
        if is_too_long or (ends_in_it and not self._is_backing_off(bad_streak, losses)):
            raise FloatingPointError(
                f"the loss or its gradient was not finite in each of the last {bad_streak} steps before step "
                f"{step}, whose updates were skipped: lower the learning rate, or try --precision bf16 or fp32"
            )

    def _is_backing_off(self, bad_streak: int, losses: Mapping[str, torch.Tensor]) -> bool:
        """Whether fp16's loss scale explains a streak: it is short, and only gradients overflow. For all ranks."""
        num_bad_losses = torch.stack([~loss.isfinite() for loss in losses.values()]).sum()
        is_short = self.is_scaled and bad_streak < MAX_BAD_STEPS // 2
        return all_reduce_sum(num_bad_losses).item() == 0 and is_short

    def _describe(self, step: int, scalars: dict[str, Any]) -> str:
        """Returns a report as a line of the log."""
        eta = duration((self.last_step - step) * scalars["seconds_per_step"])
        loss = "not finite"
        if scalars["loss"] is not None:
            loss = f"{scalars['loss']:.4f}"
        line = f"epoch {scalars['epoch']}, step {step}/{self.last_step}: loss {loss}, lr {scalars['lr']:.2e}"
        line += f", {rate(scalars['images_per_s'])} images/s"
        if scalars["skipped_steps"]:
            line += f", {scalars['skipped_steps']} steps skipped"
        line += f", data {scalars['data_share']:.0%}{self._place(scalars['data_rank'])}, eta {eta}"
        if "gpu_memory_gb" in scalars:
            line += f", {scalars['gpu_memory_gb']:.1f} GB"
        if "mfu" in scalars:
            line += f", MFU {scalars['mfu']:.0%}"
        return line
