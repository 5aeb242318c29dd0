"""When a run saves, what it keeps, and how it survives a full disk."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from util.run import checkpoint, shard
from util.run.distributed import all_reduce_sum, run_on_rank0
from util.run.flags import RunSchedule
from util.run.loop import TrainLoop
from util.run.resume import RunRecord
from util.run.run_folder import FolderLock, write_json, write_progress


def step_ranges(start: int, last: int, *periods: int) -> Iterator[range]:
    """Splits the steps from `start` to `last` into ranges that end at each multiple of a period.

    A period of 0 is ignored. Periods are the steps of an epoch, or the steps between checkpoints or evaluations.
    """
    while start < last:
        ends = [last, *((start // period + 1) * period for period in periods if period)]
        yield range(start, min(ends))
        start = min(ends)


@dataclass
class CheckpointSaver:
    """Writes the checkpoints of a run and prunes those that are not needed any more.

    first_step: where this start resumed, or 0. lock: of the output folder, on rank 0.
    """

    output_dir: Path
    record: RunRecord
    model: torch.nn.Module
    loop: TrainLoop
    is_sharded: bool
    schedule: RunSchedule
    first_step: int
    lock: FolderLock | None = None
    good_steps: list[int] = field(init=False)  # checkpoints known to be good: resumed from, or saved since

    def __post_init__(self) -> None:
        self.good_steps = [self.first_step]

    def save(self, required: bool) -> None:
        """Writes the checkpoint of the current step, unless it is saved already. All ranks must call it.

        All ranks return after the write: if one ended before, its launcher would soon kill rank 0, which writes. If the
        save is not `required`, a full disk costs a warning only. FloatingPointError if the weights are not finite.
        """
        loop, step = self.loop, self.loop.step
        if run_on_rank0(lambda: self.good_steps[-1] == step):
            return
        if all_reduce_sum(shard.count_bad(self.model.parameters())) > 0:
            raise FloatingPointError(
                f"the weights are not finite after step {step}: not saved; the last checkpoint is good"
            )
        meter = loop.meter.state_dict()
        weights, moments = self.gather(self.model), self.gather(loop.optimizer)
        state = {"model": weights, "optimizer": moments, "scaler": loop.precision.scaler.state_dict(), "meter": meter}

        def write() -> None:
            if self.write(step, state, self.record.meta(step), required, keep=self.is_kept(step)):
                write_progress(self.output_dir, step)

        run_on_rank0(write)

    def is_kept(self, step: int) -> bool:
        """Whether the checkpoint of `step` is kept for good. That of the end of the schedule always is."""
        return step % self.schedule.keep_every == 0 or step == self.schedule.num_steps

    def gather(self, part: torch.nn.Module | torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the whole state dict of the model or the optimizer on rank 0. All ranks must call it."""
        state = part.state_dict()
        return shard.gather(state, keep=self.record.process.is_main) if self.is_sharded else state

    def write(
        self, name: int | str, state: dict[str, Any], meta: dict[str, Any], required: bool, keep: bool = False
    ) -> bool:
        """Writes a checkpoint and prunes older ones. Returns whether that worked. OSError only if it is `required`."""
        try:
            self.renew_folder()
            checkpoint.save_checkpoint(self.output_dir, name, state, meta, keep)
        except OSError as error:
            if required:
                raise
            self.loop.log.info(f"warning: checkpoint-{name}.pth could not be written ({error}); training goes on")
            return False
        try:
            if isinstance(name, int):
                self.good_steps = [*self.good_steps, name][-2:]
                checkpoint.prune_checkpoints(self.output_dir, self.good_steps)
        except OSError as error:
            self.loop.log.info(f"warning: older checkpoints could not be removed ({error})")
        return True

    def renew_folder(self) -> None:
        """Makes the output folder again if it was deleted, with its files. FolderInUse if another run has it now."""
        if self.lock is None or not self.lock.is_lost():
            return
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.lock = FolderLock(self.output_dir)
        if self.loop.log.renew():
            write_json(self.output_dir / "settings.json", self.record.settings)
            self.loop.log.info(f"warning: {str(self.output_dir)!r} was deleted; it is made again, and the run goes on")
