"""What the training loops of all engines share: micro-batches, rates, the optimizer step, reports. It knows no model.

There is no host-device sync except at reports: losses and gradient norms add up on the device, and the device
decides whether a step is finite. If the loss or the norm of the gradient is not finite, the weights stay as they were.
Fused AdamW skips the step by itself (torch made this for GradScaler), and so does LARS. All ranks skip alike: a loss
that is not finite makes its gradient NaN, and DDP has averaged the gradients before. Ranks exchange one flag in each
step, and all that a report needs in one all-reduce.
"""

import random
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from util.addressed import STEP, addressed_seed
from util.collectives import all_reduce_sum, gather_objects, rank_and_world_size
from util.data.transforms import Normalize
from util.run.processes.distributed import DeviceCopies, memory_scalars, precision
from util.run.processes.supervise import Stopped, StopSignal
from util.run.start.plan import RunSchedule
from util.run.start.run import Run
from util.run.train.logging import RunLog
from util.run.train.meter import Clock, Meter, total
from util.run.train.step_graphs import ForwardBackward, StepGraphs
from util.text import duration, rate

SLOW_DATA = 0.1  # warn if more than this share of the time is spent waiting for data
BUSY_HOST = 0.95  # say so if a host does not wait for its GPU in more than this share of the time: the GPU waits
HOST_HINT = "larger --batch_size, --compile or --cuda_graph help, and cores that are free"
MAX_BAD_STEPS = 20  # this many non-finite steps in a row end the run, at the next report


@dataclass(frozen=True)
class ReportSums:
    """What the ranks tell each other at a report. The first three are means over the ranks."""

    since_report: list[float]
    since_epoch: list[float]
    bad_streak: int
    data_seconds: list[float]  # of each rank, since the last report
    host_seconds: list[float]
    numbers: list[float]  # of `at_report`, summed over the ranks


class AtReport(Protocol):
    """What else is done at each report, by all ranks."""

    def count(self) -> float:
        """Returns a number of this rank."""
        ...

    def report(self, total: float) -> None:
        """Does it. total: the sum of all ranks' numbers, so that all ranks can do the same."""
        ...


class TrainLoop:
    """The state of a training loop, apart from model and data.

    at_report: what else is done at each report. measures: functions of a report's values that return further ones.
    """

    def __init__(
        self,
        run: Run,
        schedule: RunSchedule,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        normalize: Normalize,
        log: RunLog,
        data_hint: str = "",
    ) -> None:
        """model: as it is called: compiled, in DDP. normalize: turns images as stored (uint8, uint16 or float32) into
        normalised float images, on the device. data_hint: what to do if loading data is too slow, or "".
        """
        self.parameters = [p for p in model.parameters() if p.requires_grad]  # in the model's order
        self.optimizer = optimizer
        self.normalize = normalize
        self.log = log
        self.data_hint = data_hint
        self.device = run.process.device
        self.watchdog = run.watchdog
        self.stop = StopSignal(self.device)
        self.precision = precision(run.plan.precision, self.device)
        self.images_per_step = run.plan.total_batch_size  # over all ranks
        self.accum_iter = run.plan.accum_iter
        self.learning_rate = schedule.learning_rate
        self.steps_per_epoch = schedule.steps_per_epoch
        self.last_step = schedule.last_step(run.args.max_steps)  # after which this start ends
        self.clip_grad: float | None = run.args.clip_grad  # bound on the norm of the whole gradient
        self.seed: int = run.args.seed
        self.print_freq: int = run.args.print_freq
        self.hosts = gather_objects(socket.gethostname())  # of each rank
        self.at_report: list[AtReport] = []
        self.measures: list[Callable[[Mapping[str, Any]], dict[str, float]]] = []
        self.graphs: StepGraphs | None = None
        self.copies = DeviceCopies(self.device)
        self.num_asked = torch.zeros(1)  # ranks that were asked to stop before the last update, on the device
        self.meter = Meter(self.device)
        self.clock = Clock()
        self.host_hint = HOST_HINT if self.device.type == "cuda" else ""
        self.losses: dict[str, torch.Tensor] = {}  # of the current step, summed over micro-batches
        self.step = 0  # number of optimizer steps done, over all starts of the run
        self.first_step = 0  # of this start
        self.num_micro = 0  # micro-batches of the current step whose forward pass has begun
        self.num_reports = 0
        self.has_begun = False
        self.has_stopped = False  # `should_stop` has been true: the run ends

    @property
    def autocast(self) -> Callable[[], AbstractContextManager]:
        """Context manager for the forward pass."""
        return self.precision.autocast

    def load_state(self, state: dict[str, Any], step: int, precision_name: str) -> None:
        """Continues at `step` with the sums and the loss scale of a checkpoint that was trained in a precision."""
        self.step = step
        self.first_step = step
        self.meter.load_state_dict(state["meter"])
        if precision_name == self.precision.name:
            self.precision.scaler.load_state_dict(state["scaler"])

    def begin_step(self, step: int) -> None:
        """Sets the learning rates of optimizer step number `step`, counted from 0 over the whole run."""
        self.losses = {}
        self.num_micro = 0
        if not self.has_begun or step % self.steps_per_epoch == 0:
            self.clock.restart()  # set-up and evaluation do not count
        self.has_begun = True
        for group in self.optimizer.param_groups:
            rate = self.learning_rate(step, group.get("lr_scale", 1.0))
            if step < group.get("first_epoch", 0) * self.steps_per_epoch:
                rate = 0.0
            self.set_rate(group, rate)

    def set_rate(self, group: dict[str, Any], rate: float) -> None:
        """Sets the learning rate of a parameter group. On a GPU it is a float32, as a graph can hold it."""
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(rate)
        elif self.device.type == "cuda":
            group["lr"] = float(np.float32(rate))
        else:
            group["lr"] = rate

    def next_batch(self, batches: Iterator[Any], micro: int) -> list[Any]:
        """Returns the next micro-batch and seeds the random draws that are made with it.

        Tensors go to the device. Numbers that only the host needs, such as sizes, are not tensors and stay.
        """
        is_first = self.step < self.first_step + 3  # after the third one all processes have made a step
        self.watchdog.heartbeat(f"step {self.step + 1}", self.watchdog.first if is_first else 0.0)
        batch = self.clock.next(batches)
        self.num_micro = micro + 1
        self.seed_draws(self.step, micro)
        on_device = []
        for part in batch:
            if torch.is_tensor(part):
                part = self.copies.copy(part)
            on_device.append(part)
        return on_device

    def seed_draws(self, step: int, micro: int) -> None:
        """Seeds the global generators by (seed, step, micro-batch, rank): a resumed run repeats drop path and mixup."""
        rank, world_size = rank_and_world_size()
        seed = addressed_seed(STEP, self.seed, step, micro * world_size + rank)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def no_sync_before_last(self, model: torch.nn.Module, micro: int) -> AbstractContextManager:
        """Context of a micro-batch: only the backward pass of a step's last micro-batch all-reduces the gradients."""
        is_last = micro == self.accum_iter - 1
        if is_last or not hasattr(model, "no_sync"):
            return nullcontext()
        return model.no_sync()

    def capture_steps(self, forward_backward: ForwardBackward) -> ForwardBackward:
        """Captures updates, and the passes of the result, as CUDA graphs: see `StepGraphs`."""
        self.graphs = StepGraphs(self.optimizer, self.device)
        return partial(self.graphs.run_pass, forward_backward)

    def scaled_loss(self, losses: dict[str, torch.Tensor], micro: int) -> torch.Tensor:
        """Returns the scalar whose `backward()` gives this micro-batch's share of the gradient. Logs `losses`.

        `1 + 0 * loss_sum` turns a loss that is not finite into NaN gradients on all ranks, so that all skip the step.
        """
        for name, loss in losses.items():
            share = loss.detach() / self.accum_iter
            if name in self.losses:
                self.losses[name] += share
            else:
                self.losses[name] = share
        loss_sum: Any = sum(losses.values()) / self.accum_iter
        return self.precision.scaler.scale(loss_sum * (1 + 0 * loss_sum.detach()))

    def update_weights(self) -> torch.Tensor:
        """Steps the optimizer and clears the gradients. Returns the norm of the gradient before clipping."""
        flag = self.stop.flag()
        if self.graphs is None:
            grad_norm, self.num_asked = self._step_optimizer(flag)
            self.optimizer.zero_grad(set_to_none=True)
        else:
            grad_norm, self.num_asked = self.graphs.run_update(self._step_optimizer, flag)
        return grad_norm

    def _step_optimizer(self, flag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of the gradient before clipping, and the sum of the ranks' flags."""
        scaler = self.precision.scaler
        scaler.unscale_(self.optimizer)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm(grads)
        num_asked = all_reduce_sum(flag)
        if self.clip_grad is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip_grad, grad_norm)
        if scaler.is_enabled():  # it has checked every gradient
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.found_inf = (~grad_norm.isfinite()).float()  # fused AdamW and LARS then skip
            self.optimizer.step()
        return grad_norm, num_asked

    def end_step(self, grad_norm: torch.Tensor) -> None:
        """Counts the step and reports if it is time."""
        self.meter.add(self.losses, grad_norm)
        self.clock.num_steps += 1
        self.step += 1
        self.num_micro = 0
        self.log.advance()
        epoch_ends = self.step % self.steps_per_epoch == 0
        is_due = self.step % self.print_freq == 0 or epoch_ends
        if is_due or self.step == self.last_step:
            self.report(epoch_ends, interim=not is_due)

    def should_stop(self) -> bool:
        """Whether all ranks have agreed to stop after this step because of a signal."""
        self.has_stopped = self.clock.agreed(self.stop, self.num_asked)
        return self.has_stopped

    def stop_if_asked(self) -> None:
        """Raises Stopped on all ranks if one was asked to stop in work between steps.

        All ranks must call it equally often, such as once a batch. Only this call exchanges their flags there, and
        tells the watchdog that the process works.
        """
        self.watchdog.heartbeat(f"between two steps, after step {self.step}")
        self.num_asked = all_reduce_sum(self.stop.flag())
        if self.should_stop():
            raise Stopped

    def has_ended(self) -> bool:
        """Whether the last step is done, or all ranks have agreed to stop."""
        return self.has_stopped or self.step >= self.last_step

    def exchange(self) -> ReportSums:
        """Sums over the ranks all that a report needs, in one all-reduce, and waits for it. All ranks must call it."""
        rank, world_size = rank_and_world_size()
        numbers = [float(work.count()) for work in self.at_report]
        seconds = torch.zeros(2, world_size)
        seconds[:, rank] = torch.tensor([self.clock.data_seconds, self.clock.host_seconds])
        of_host = torch.cat([seconds.flatten(), torch.tensor(numbers)]).to(self.device, non_blocking=True)
        parts = [self.meter.since_report, self.meter.since_epoch, self.meter.bad_streak.reshape(1), of_host]
        sums = all_reduce_sum(torch.cat(parts)).cpu()
        num_sums = len(self.meter.since_report)
        sizes = [num_sums, num_sums, 1, world_size, world_size, len(numbers)]
        since_report, since_epoch, bad_streak, data_seconds, host_seconds, numbers_of_all = sums.split(sizes)
        return ReportSums(
            since_report=(since_report / world_size).tolist(),
            since_epoch=(since_epoch / world_size).tolist(),
            bad_streak=round(bad_streak.item() / world_size),
            data_seconds=data_seconds.tolist(),
            host_seconds=host_seconds.tolist(),
            numbers=numbers_of_all.tolist(),
        )

    def report(self, epoch_ends: bool, interim: bool = False) -> None:
        """Logs the means since the last report, which waits for the device. FloatingPointError if steps are lost.

        An interim report is made if a run ends between two regular ones. It leaves the meter as it is, so that the
        regular reports of a resumed run equal those of an undisturbed run.
        """
        step = self.step
        sums = self.exchange()
        means, skipped = self.meter.means(sums.since_report)
        if not interim:
            self.meter.since_report.zero_()
        self._refuse_lost_steps(sums.bad_streak, are_all_lost=means["grad_norm"] is None)
        grad_norm = means.pop("grad_norm")
        scalars: dict[str, Any] = {"epoch": (step - 1) // self.steps_per_epoch, "loss": total(means)}
        if len(means) > 1:
            for name, value in means.items():
                scalars[f"loss_{name}"] = value
        scalars["grad_norm"] = grad_norm
        scalars["lr"] = self.learning_rate(step - 1)
        scalars["skipped_steps"] = skipped
        scalars |= self._shares(sums)
        scalars |= self.clock.lap(self.images_per_step)
        scalars |= memory_scalars(self.device)
        for measure in self.measures:
            scalars |= measure(scalars)
        if epoch_ends:
            epoch_means, _ = self.meter.means(sums.since_epoch)
            self.meter.since_epoch.zero_()
            del epoch_means["grad_norm"]
            scalars["epoch_loss"] = total(epoch_means)
        line, postfix = self._describe(scalars)
        self.log.report(step, scalars, line, postfix, interim)
        for work, number in zip(self.at_report, sums.numbers, strict=True):
            work.report(number)
        self.num_reports += 1
        if self.num_reports > 1:  # the first one includes the start of the workers
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

    def _shares(self, sums: ReportSums) -> dict[str, float]:
        """Returns the longest wait for data, and the most work of a host, as shares of the time, each with its rank."""
        shares = {}
        for name, seconds in (("data", sums.data_seconds), ("host", sums.host_seconds)):
            slowest = max(range(len(seconds)), key=seconds.__getitem__)
            share = seconds[slowest] / self.clock.seconds
            shares[f"{name}_share"] = min(share, 0.99)  # the ranks' clocks do not start at the same moment
            shares[f"{name}_rank"] = slowest
        return shares

    def _place(self, rank: int) -> str:
        """Returns, for example, " on rank 3 (node1)", or "" for a single process."""
        if len(self.hosts) < 2:
            return ""
        return f" on rank {rank} ({self.hosts[rank]})"

    def _refuse_lost_steps(self, bad_streak: int, are_all_lost: bool) -> None:
        """FloatingPointError after MAX_BAD_STEPS steps in a row that were not finite. For all ranks.

        At the end of the run it is enough if no step since the last report was finite: `are_all_lost`.
        """
        is_too_long = bad_streak >= MAX_BAD_STEPS
        ends_in_it = self.step == self.last_step and bad_streak > 0 and are_all_lost
        if is_too_long or (ends_in_it and not self._is_backing_off(bad_streak)):
            raise FloatingPointError(
                f"the loss or its gradient was not finite in each of the last {bad_streak} steps before step "
                f"{self.step}, whose updates were skipped: lower the learning rate, or try --precision bf16 or fp32"
            )

    def _is_backing_off(self, bad_streak: int) -> bool:
        """Whether fp16's loss scale explains a streak: it is short, and only gradients overflow. For all ranks."""
        num_bad_losses = torch.stack([~loss.isfinite() for loss in self.losses.values()]).sum()
        is_short = self.precision.scaler.is_enabled() and bad_streak < MAX_BAD_STEPS // 2
        return all_reduce_sum(num_bad_losses).item() == 0 and is_short

    def _describe(self, scalars: dict[str, Any]) -> tuple[str, str]:
        """Returns a report as (line of the log, text beside the progress bar)."""
        eta = duration((self.last_step - self.step) * scalars["seconds_per_step"])
        loss = "not finite"
        if scalars["loss"] is not None:
            loss = f"{scalars['loss']:.4f}"
        values = f"loss {loss}, lr {scalars['lr']:.2e}, {rate(scalars['images_per_s'])} images/s"
        if scalars["skipped_steps"]:
            values += f", {scalars['skipped_steps']} steps skipped"
        where = f"epoch {scalars['epoch']}, step {self.step}/{self.last_step}"
        line = f"{where}: {values}, data {scalars['data_share']:.0%}{self._place(scalars['data_rank'])}, eta {eta}"
        if "gpu_memory_gb" in scalars:
            line += f", {scalars['gpu_memory_gb']:.1f} GB"
        if "mfu" in scalars:
            line += f", MFU {scalars['mfu']:.0%}"
        return line, values
