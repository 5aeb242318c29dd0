"""What the training loops of all engines share: rates, micro-batches, the optimizer step. It knows no model.

There is no host-device sync except at reports: losses and gradient norms add up on the device, and the device
decides whether a step is finite. If the loss or the norm of the gradient is not finite, the weights stay as they were.
Fused AdamW skips the step by itself (torch made this for GradScaler), and so does LARS. All ranks skip alike: a loss
that is not finite makes its gradient NaN, and DDP has averaged the gradients before.
"""

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from util.addressed import STEP, addressed_seed
from util.collectives import all_reduce_sum
from util.data.transforms import Normalize
from util.run.processes.distributed import DeviceCopies, precision
from util.run.processes.supervise import BatchesAhead, Stopped, StopSignal
from util.run.start.plan import RunSchedule
from util.run.start.run import Run
from util.run.train.logging import RunLog
from util.run.train.reports import Clock, Measure, Meter, StepReports
from util.run.train.step_graphs import ForwardBackward, StepGraphs, Update
from util.text import count_of


class TrainLoop:
    """The state of a training loop, apart from data.

    model_in_ddp: the model as it is called: compiled, in DDP if there are several processes. model: without DDP.
    parameters: those that are trained, in the model's order.
    """

    def __init__(
        self,
        run: Run,
        model_in_ddp: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: RunSchedule,
        normalize: Normalize,
        log: RunLog,
        state: Mapping[str, Any],
        bad_images: torch.Tensor | None = None,
        measures: Sequence[Measure] = (),
    ) -> None:
        """normalize: turns images as stored (uint8, uint16 or float32) into normalised float images, on the device.

        state: see `Run.restore`. bad_images: see `AddressedDataset.bad`. measures: of the reports.
        """
        self.run = run
        self.schedule = schedule
        self.model_in_ddp = model_in_ddp
        self.model = model_in_ddp
        if isinstance(model_in_ddp, DistributedDataParallel):
            self.model = model_in_ddp.module
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optimizer
        self.normalize = normalize
        self.log = log
        self.process = run.process
        self.device = run.process.device
        self.watchdog = run.watchdog
        self.stop = StopSignal(self.device)
        self.precision = precision(run.plan.precision, self.device)
        self.autocast = self.precision.autocast  # makes the context of a forward pass
        self.scaler = self.precision.scaler  # does nothing unless in fp16
        self.accum_iter = run.plan.accum_iter
        self.learning_rate = schedule.learning_rate
        self.steps_per_epoch = schedule.steps_per_epoch
        self.last_step = schedule.last_step(run.args.max_steps)  # after which this start ends
        self.clip_grad: float | None = run.args.clip_grad  # bound on the norm of the whole gradient
        self.seed: int = run.args.seed
        self.print_freq: int = run.args.print_freq
        self.graphs: StepGraphs | None = None
        self.copies = DeviceCopies(self.device)
        self.meter = Meter(self.device)
        self.clock = Clock()
        self.reports = StepReports(run, schedule, self.meter, self.clock, log, bad_images, measures)
        self.losses: dict[str, torch.Tensor] = {}  # of the current step, summed over micro-batches
        self.step = run.first_step  # number of optimizer steps done, over all starts of the run
        self.first_step = run.first_step
        self.has_stopped = False  # `should_stop` has been true: the run ends
        if "meter" in state:
            self.meter.load_state_dict(state["meter"])
        if "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    # ------------------------------------------------------------------------------------- what a step is made of

    def set_rates(self, step: int) -> None:
        """Sets the learning rates of optimizer step number `step`, counted from 0 over the whole run.

        On a GPU they are float32, as a graph can hold them.
        """
        for group in self.optimizer.param_groups:
            rate = self.learning_rate(step, group.get("lr_scale", 1.0))
            if step < group.get("first_epoch", 0) * self.steps_per_epoch:
                rate = 0.0
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
        self.watchdog.heartbeat(f"step {self.step + 1}", self.watchdog.first_timeout if is_first else 0.0)
        before = time.perf_counter()
        batch = next(batches)
        self.clock.data_seconds += time.perf_counter() - before
        self.seed_draws(self.step, micro)
        on_device = []
        for part in batch:
            if torch.is_tensor(part):
                part = self.copies.copy(part)
            on_device.append(part)
        return on_device

    def seed_draws(self, step: int, micro: int) -> None:
        """Seeds the global generators by (seed, step, micro-batch, rank): a resumed run repeats drop path and mixup."""
        seed = addressed_seed(STEP, self.seed, step, micro * self.process.world_size + self.process.rank)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def no_sync_before_last(self, model: torch.nn.Module, micro: int) -> AbstractContextManager:
        """Context of a micro-batch: only the backward pass of a step's last micro-batch all-reduces the gradients."""
        is_last = micro == self.accum_iter - 1
        if is_last or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return model.no_sync()

    def scaled_loss(self, losses: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the scalar whose `backward()` gives a micro-batch's share of the gradient. Logs `losses`.

        `1 + 0 * loss_sum` turns a loss that is not finite into NaN gradients on all ranks, so that all skip the step.
        """
        for name, loss in losses.items():
            share = loss.detach() / self.accum_iter
            if name in self.losses:
                self.losses[name] += share
            else:
                self.losses[name] = share
        loss_sum: Any = sum(losses.values()) / self.accum_iter
        return self.scaler.scale(loss_sum * (1 + 0 * loss_sum.detach()))

    def total_norm(self, parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        """Returns the norm of the gradient of these parameters."""
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def step_if_finite(self, grad_norm: torch.Tensor) -> None:
        """Steps the optimizer, which changes nothing if `grad_norm` is not finite."""
        if self.scaler.is_enabled():  # it has checked every gradient
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.found_inf = (~grad_norm.isfinite()).float()  # fused AdamW and LARS then skip
            self.optimizer.step()

    def log_step(self, values: dict[str, torch.Tensor]) -> None:
        """Counts the step and reports if it is time: means of the losses and of `values`, among them "grad_norm"."""
        self.meter.add(self.losses | values)
        self.clock.num_steps += 1
        self.step += 1
        self.log.advance()
        epoch_ends = self.step % self.steps_per_epoch == 0
        is_due = self.step % self.print_freq == 0 or epoch_ends
        if is_due or self.step == self.last_step:
            self.reports.write(self.step, self.losses, interim=not is_due)
        self.losses = {}

    def should_stop(self) -> bool:
        """Whether all ranks have agreed to stop after this step because of a signal."""
        before = time.perf_counter()
        self.has_stopped = self.stop.agreed()
        self.clock.device_seconds += time.perf_counter() - before
        return self.has_stopped

    # ------------------------------------------------------------------------------------------------- between steps

    def capture_steps(self, forward_backward: ForwardBackward, update: Update) -> StepGraphs:
        """Returns both as CUDA graphs."""
        self.graphs = StepGraphs(forward_backward, update, self.optimizer, self.device)
        return self.graphs

    def load_ahead(self, batches: Iterator[Any]) -> BatchesAhead:
        """Loads the batches of the next two steps. If that fails on a rank, or one got a signal, `has_stopped`.

        The watchdog gives each of them the time of a first step.
        """
        ahead = BatchesAhead(batches, self.stop)
        for _ in range(2 * self.accum_iter):
            self.watchdog.heartbeat(f"step {self.step + 1}", self.watchdog.first_timeout)
            ahead.load()
        num_asked = all_reduce_sum(torch.full((1,), float(self.stop.is_asked), device=self.device))
        self.has_stopped = num_asked.item() > 0
        return ahead

    def stop_if_asked(self) -> None:
        """Raises Stopped on all ranks if one was asked to stop in work between steps.

        All ranks must call it equally often, such as once a batch. Only this call exchanges their flags there, and
        tells the watchdog that the process works.
        """
        self.watchdog.heartbeat(f"between two steps, after step {self.step}")
        if self.should_stop():
            raise Stopped

    def has_ended(self) -> bool:
        """Whether the last step is done, or all ranks have agreed to stop."""
        return self.has_stopped or self.step >= self.last_step

    def ends_epoch(self, every: int) -> bool:
        """Whether the current step ends an epoch whose number is a multiple of `every`, or the whole schedule.

        Epochs count from 1 here; step 0 counts as the end of epoch 0. every 0: never.
        """
        epoch, rest = divmod(self.step, self.steps_per_epoch)
        return every > 0 and rest == 0 and (epoch % every == 0 or self.step == self.schedule.num_steps)

    def progress(self, num_images: int) -> str:
        """Returns, for example, "for 100 of 200 steps on 24 images"."""
        return f"for {self.step} of {count_of(self.schedule.num_steps, 'step')} on {count_of(num_images, 'image')}"
