"""The training step that pre-training and fine-tuning share: accumulation, mixed precision, logging; knows no model.

The device is never waited for, except where values are printed: losses and gradient norms add up on it, and whether a
step is finite is decided there, too. A gradient whose norm is not finite leaves the weights as they were (a skip inside the
fused AdamW, made for GradScaler; LARS has its own); DDP has averaged the gradients before that, and of sharded ones the norm
is exchanged, so all processes skip alike.
"""

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from util.addressed import STEP, addressed_seed
from util.run.distributed import all_reduce_sum, rank_and_world_size
from util.run.logging import RunLog, duration
from util.run.shard import total_norm
from util.run.watchdog import BACKWARD, BETWEEN, DATA, FORWARD, PHASES

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
STARVED = 0.1  # a larger share of the time spent waiting for data is worth a word
MAX_BAD_STEPS = 20  # so many non-finite steps in a row, as seen at a report, end the run


def precision(name, device):
    """-> (name, autocast() -> context, GradScaler, which only fp16 enables). "auto" is bf16 where the GPU has it, else fp16;
    fp32 on the CPU."""
    if name == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        name = "fp32" if device.type == "cpu" else "bf16" if has_bf16 else "fp16"
    dtype = PRECISIONS[name]
    scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
    return name, lambda: torch.autocast(device.type, dtype=dtype, enabled=dtype is not None), scaler


class Meter:
    """Running sums that stay on the device: losses and gradient norms of the finite steps."""

    def __init__(self, device):
        self.device, self.names = device, None

    def add(self, losses, grad_norm):
        """losses: dict of scalars of one step; grad_norm: scalar."""
        if self.names is None:
            self._start([*losses, "grad_norm"])
        finite = torch.isfinite(grad_norm)
        values = torch.stack([*losses.values(), grad_norm, torch.ones_like(grad_norm)])
        self.sums[:, :-1] += torch.where(finite, values, 0.0)  # into both rows
        self.sums[:, -1] += 1
        self.bad_streak = torch.where(finite, 0.0, self.bad_streak + 1)

    def read(self, whole_epoch: bool = False, reset: bool = True) -> tuple[dict[str, float | None], int]:
        """-> (means over processes and finite steps, number of skipped steps), since the last reset. Waits.

        Without any finite step the means are None.
        """
        row = int(whole_epoch)
        *sums, finite, steps = (all_reduce_sum(self.sums[row].clone()) / rank_and_world_size()[1]).tolist()
        if reset:
            self.sums[row] = 0
        means = {name: total / finite if finite else None for name, total in zip(self.names, sums, strict=True)}
        return means, round(steps - finite)

    def _start(self, names):
        self.names = names
        # Rows: since the last report, since the epoch began. Columns: the names, finite steps, all steps.
        self.sums = torch.zeros(2, len(names) + 2, device=self.device)
        self.bad_streak = torch.zeros((), device=self.device)

    def state_dict(self):
        """Every process must ask for it, since each has sums of its own."""
        rank, world_size = rank_and_world_size()
        sums = self.sums.new_zeros(world_size, *self.sums.shape)
        sums[rank] = self.sums
        return {"names": self.names, "sums": all_reduce_sum(sums).cpu(), "bad_streak": self.bad_streak.cpu()}

    def load_state_dict(self, state):
        rank, world_size = rank_and_world_size()
        self._start(state["names"])
        sums = state["sums"]
        self.sums.copy_(sums[rank] if len(sums) == world_size else sums.mean(dim=0))
        self.bad_streak.copy_(state["bad_streak"])


class Clock:
    """Wall time since the last lap, and how much of it went into waiting for data."""

    def __init__(self):
        self.start, self.waited, self.num_steps = time.perf_counter(), 0.0, 0

    def next(self, batches):
        before = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - before
        return batch

    def lap(self, images_per_step):
        seconds = time.perf_counter() - self.start
        rates = {
            "seconds_per_step": seconds / self.num_steps,
            "images_per_s": self.num_steps * images_per_step / seconds,
            "data_share": self.waited / seconds,
        }
        self.__init__()
        return rates


@dataclass
class TrainEngine:
    """What stays the same from step to step. A subclass says what a batch's losses are (`losses_of`).

    `learning_rate(step, lr_scale)` -> float, for parameter groups of that `lr_scale` (1 where they have none); `normalize`
    turns uint8 batches into float ones on the device; `images_per_step` counts all processes; the run ends at `last_step`;
    `clip_grad` bounds the norm of the whole gradient; `data_hint` says what would help where the data is too slow;
    `at_report()` is called with each report, by all processes; `reached` tells a watchdog how far a step is.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: Callable
    normalize: torch.nn.Module
    learning_rate: Callable
    accum_iter: int
    images_per_step: int
    steps_per_epoch: int
    last_step: int
    log: RunLog
    print_freq: int = 20
    clip_grad: float | None = None
    seed: int = 0
    data_hint: str = ""
    at_report: Callable = lambda: None
    reached: Callable = lambda step, phase: None

    def __post_init__(self):
        self.device = self.normalize.mean.device
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.meter, self.clock, self.reports = Meter(self.device), Clock(), 0

    def losses_of(self, batch, step, micro):
        """The scalar losses, by name, of a micro-batch; called inside autocast."""
        raise NotImplementedError

    def reseed(self, step, micro):
        """What a micro-batch draws from the global generators (drop path, mixup) follows from its address.

        That is (seed, step, micro-batch, process), so a resumed run repeats the draws.
        """
        rank, world_size = rank_and_world_size()
        seed = addressed_seed(STEP, self.seed, step, micro * world_size + rank)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def train_one_epoch(self, epoch, steps, batches, after_step, stop=lambda: False):
        """Runs the optimizer steps `steps`, a range of global step numbers; -> whether `stop` ended it.

        batches: iterator of the collator's batches, `accum_iter` of them a step, standing at `steps.start`.
        after_step(number of steps done) is called after each step; it may save. stop() is asked then.
        """
        self.model.train()
        self.clock = Clock()
        for step in steps:
            self.train_step(batches, step)
            self.log.advance()
            epoch_ends = (step + 1) % self.steps_per_epoch == 0
            is_due = (step + 1) % self.print_freq == 0 or epoch_ends
            if is_due or step + 1 == self.last_step:
                self.report(epoch, step + 1, epoch_ends, interim=not is_due)
            after_step(step + 1)
            if stop():
                return True
        return False

    def train_step(self, batches, step):
        """The optimizer step number `step`, over `accum_iter` micro-batches."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step, group.get("lr_scale", 1.0))
        sums = {}
        for micro in range(1, self.accum_iter + 1):
            phase = len(PHASES) * (micro - 1)
            self.reached(step, phase + DATA)
            batch = self.clock.next(batches)
            self.reached(step, phase + FORWARD)
            # Only the last micro-batch's backward reduces: the earlier gradients wait in the process.
            waits = micro < self.accum_iter and hasattr(self.model, "no_sync")
            with self.model.no_sync() if waits else nullcontext():
                with self.autocast():
                    losses = self.losses_of(batch, step, micro - 1)
                self.reached(step, phase + BACKWARD)
                self.scaler.scale(sum(losses.values()) / self.accum_iter).backward()
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0) + loss.detach() / self.accum_iter
        self.meter.add(sums, self.update_weights())
        self.clock.num_steps += 1
        self.reached(step, phase + BETWEEN)

    def rehearse(self, batch, step):
        """Forward and backward that leave nothing behind but what was compiled for the batch's shapes; `step` comes next."""
        self.reached(step, FORWARD)
        with self.autocast():
            losses = self.losses_of(batch, step, 0)
        self.reached(step, BACKWARD)
        self.scaler.scale(sum(losses.values())).backward()
        self.optimizer.zero_grad(set_to_none=True)

    def update_weights(self):
        """Steps the optimizer and clears the gradients; -> their norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        grad_norm = total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.clip_grad is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip_grad, grad_norm)
        if self.scaler.is_enabled():  # it has looked at every gradient
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self.optimizer.found_inf = (~grad_norm.isfinite()).float()
            self.optimizer.step()
        elif grad_norm.isfinite():  # an optimizer that cannot skip by itself: this waits for the device
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def report(self, epoch: int, step: int, epoch_ends: bool, interim: bool = False) -> None:
        """Reads the meter, which waits for the device, and logs; FloatingPointError if nothing is finite any more.

        An interim report, where a run ends between two regular ones, leaves the meter as it is: the regular reports of
        a run that is resumed are those of an undisturbed one.
        """
        means, skipped = self.meter.read(reset=not interim)
        bad_streak = int(self.meter.bad_streak)
        if bad_streak >= MAX_BAD_STEPS:
            raise FloatingPointError(
                f"the gradient's norm was not finite in each of the last {bad_streak} steps before step {step}; their updates "
                f"were skipped, so weights and checkpoints are good. Lower --blr, or try --precision bf16 or fp32"
            )
        grad_norm = means.pop("grad_norm")
        scalars = {"epoch": epoch, "loss": _total(means)}
        if len(means) > 1:
            scalars |= {f"loss_{name}": value for name, value in means.items()}
        scalars |= {"grad_norm": grad_norm, "lr": self.learning_rate(step - 1), "skipped_steps": skipped}
        scalars |= self.clock.lap(self.images_per_step)
        if epoch_ends:
            means, _ = self.meter.read(whole_epoch=True)
            del means["grad_norm"]
            scalars["epoch_loss"] = _total(means)
        eta = duration((self.last_step - step) * scalars["seconds_per_step"])
        loss = "not finite" if scalars["loss"] is None else f"{scalars['loss']:.4f}"
        values = f"loss {loss}, lr {scalars['lr']:.2e}, {scalars['images_per_s']:.0f} images/s"
        values += f", {skipped} steps skipped" if skipped else ""
        line = f"epoch {epoch}, step {step}/{self.last_step}: {values}, data {scalars['data_share']:.0%}, eta {eta}"
        self.log.report(step, scalars, line, values, interim)
        self.at_report()
        self.reports += 1
        # The first report has the workers' start in it; one word is enough.
        if self.reports > 1 and self.data_hint and scalars["data_share"] > STARVED:
            self.log.info(f"warning: {scalars['data_share']:.0%} of the time goes into waiting for data: {self.data_hint}")
            self.data_hint = ""


def _total(means):
    return None if None in means.values() else sum(means.values())
