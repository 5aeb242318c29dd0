"""The reports of a run on its steps: means of what was logged, rates, and what the steps wait for.

The ranks exchange what they need in one call, every `--print_freq` steps. A report waits for the device.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from util.collectives import all_reduce_sum, gather_objects
from util.data.open import data_hint
from util.run.processes.distributed import memory_scalars
from util.run.start.plan import RunSchedule
from util.run.start.run import Run
from util.run.train.logging import RunLog
from util.run.train.meter import Clock, Meter, total
from util.text import duration, rate

SLOW_DATA = 0.1  # warn if more than this share of the time is spent waiting for data
BUSY_HOST = 0.95  # say so if a host does not wait for its GPU in more than this share of the time: the GPU waits
HOST_HINT = "larger --batch_size, --compile or --cuda_graph help, and cores that are free"
MAX_BAD_STEPS = 20  # this many non-finite steps in a row end the run, at the next report

Measure = Callable[[Mapping[str, Any]], dict[str, float]]  # from the values of a report to further ones


@dataclass(frozen=True)
class RankReport:
    """What a rank tells the others at a report."""

    sums: torch.Tensor  # of its meter, on the CPU
    num_bad_images: int  # that its workers have found
    data_seconds: float  # since the last report
    host_seconds: float


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
        self.num_written = 0  # since the workers have started

    def expect_start_of_workers(self) -> None:
        """Takes the next report for one that includes it, and says nothing about a slow loading of data."""
        self.num_written = 0

    def write(self, step: int, losses: Mapping[str, torch.Tensor], interim: bool) -> None:
        """Logs the means since the last report. FloatingPointError if steps are lost. All ranks must call it.

        step: number of steps done. losses: of the last one. An interim report is made if a run ends between two regular
        ones. It leaves the meter as it is, so that the regular reports of a resumed run equal those of an undisturbed
        run.
        """
        own = RankReport(
            sums=self.meter.sums.cpu(),
            num_bad_images=0 if self.bad_images is None else int(self.bad_images.count_nonzero()),
            data_seconds=self.clock.data_seconds,
            host_seconds=self.clock.host_seconds,
        )
        ranks = gather_objects(own)
        self.num_bad_images = sum(rank.num_bad_images for rank in ranks)
        since_report, since_epoch = torch.stack([rank.sums for rank in ranks]).sum(dim=0) / len(ranks)
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
        scalars |= self._longest_share("data", [rank.data_seconds for rank in ranks])
        scalars |= self._longest_share("host", [rank.host_seconds for rank in ranks])
        scalars |= self.clock.lap(self.images_per_step)
        scalars |= memory_scalars(self.device)
        for measure in self.measures:
            scalars |= measure(scalars)
        if step % self.steps_per_epoch == 0:
            epoch_means = self.meter.means(since_epoch)
            self.meter.since_epoch.zero_()
            scalars["epoch_loss"] = total({name: epoch_means[name] for name in losses})
        line, postfix = self._describe(step, scalars)
        self.log.report(step, scalars, line, postfix, interim)
        self.num_written += 1
        if self.num_written > 1:
            self._advise(scalars)

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
            where = self._place(scalars["host_rank"])
            self.log.info(f"note: the host{where} works {host:.0%} of the time, and its GPU waits: {self.host_hint}")
            self.host_hint = ""

    def _longest_share(self, name: str, seconds: list[float]) -> dict[str, float]:
        """Returns the largest of the ranks' seconds as a share of the time, and its rank."""
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        share = seconds[slowest] / self.clock.seconds
        return {
            f"{name}_share": min(share, 0.99),  # the ranks' clocks do not start at the same moment
            f"{name}_rank": slowest,
        }

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

    def _describe(self, step: int, scalars: dict[str, Any]) -> tuple[str, str]:
        """Returns a report as (line of the log, text beside the progress bar)."""
        eta = duration((self.last_step - step) * scalars["seconds_per_step"])
        loss = "not finite"
        if scalars["loss"] is not None:
            loss = f"{scalars['loss']:.4f}"
        values = f"loss {loss}, lr {scalars['lr']:.2e}, {rate(scalars['images_per_s'])} images/s"
        if scalars["skipped_steps"]:
            values += f", {scalars['skipped_steps']} steps skipped"
        where = f"epoch {scalars['epoch']}, step {step}/{self.last_step}"
        line = f"{where}: {values}, data {scalars['data_share']:.0%}{self._place(scalars['data_rank'])}, eta {eta}"
        if "gpu_memory_gb" in scalars:
            line += f", {scalars['gpu_memory_gb']:.1f} GB"
        if "mfu" in scalars:
            line += f", MFU {scalars['mfu']:.0%}"
        return line, values
