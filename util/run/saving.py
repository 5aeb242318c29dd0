"""When a run saves, what it keeps, and how it survives a full disk and values that are not finite."""

import shlex
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from util.collectives import all_reduce_sum, run_on_rank0
from util.run import checkpoint, shard
from util.run.flags import RunSchedule
from util.run.folder import FolderLock, write_json, write_progress
from util.run.loop import TrainLoop
from util.run.resume import RunRecord


@dataclass
class CheckpointSaver:
    """Writes the checkpoints of a run and prunes those that are not needed any more.

    An update can ruin weights that stay finite. Only the next step shows it, because its loss is not finite. While
    steps are skipped, the weights do not change and nothing is saved. So each save shows that the checkpoint before it
    had a finite loss, and that one is kept beside the new one.

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
        """Writes the checkpoint of the current step, unless its weights are saved already. All ranks must call it.

        At the end of the run they are saved again, as the last step. All ranks return after the write: if one ended
        before, its launcher would soon kill rank 0, which writes. If the save is not `required`, a full disk costs a
        warning only. FloatingPointError if the weights are not finite.
        """
        loop, step = self.loop, self.loop.step
        changed_at = step if step == loop.last_step else self.step_of_weights()
        if run_on_rank0(lambda: changed_at <= self.good_steps[-1]):
            return
        # Buffers, too: one batch that is not finite ruins the running statistics of a BatchNorm for good.
        if all_reduce_sum(shard.count_bad(self.model.state_dict().values())) > 0:
            raise FloatingPointError(f"the weights are not finite after step {step} and were not saved")
        meter = loop.meter.state_dict()
        weights, moments = self.gather(self.model), self.gather(loop.optimizer)
        state = {"model": weights, "optimizer": moments, "scaler": loop.precision.scaler.state_dict(), "meter": meter}

        def write() -> None:
            if self.write(step, state, self.record.meta(step), required, keep=self.is_kept(step)):
                write_progress(self.output_dir, step)

        run_on_rank0(write)

    def step_of_weights(self) -> int:
        """Returns the step that made the current weights: the last finite one. It waits for the device."""
        return self.loop.step - int(self.loop.meter.bad_streak)

    def advice(self, error: Exception) -> str:
        """Returns how to go on after `error` has ended the training, to be added to its message."""
        finished = checkpoint.list_finished(self.output_dir)
        if isinstance(error, OSError):
            how = "goes on from the newest checkpoint" if finished else "starts from the beginning"
            return f"; the same command {how}"
        if not isinstance(error, FloatingPointError):
            return ""
        # A finite step has followed these: the last one, after which the weights have not changed any more.
        good = [path for path in finished if checkpoint.step_of(path) < self.step_of_weights()]
        if not good:
            return ". No checkpoint of this run has a finite loss: start again in another --output_dir"
        return (
            f". The last checkpoint with a finite loss is {str(good[-1])!r}. To go on from it with other settings, "
            f"give another --output_dir, --resume {shlex.quote(str(good[-1]))} and --allow_changes"
        )

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
                # The newest one that a finite step has followed, and all later ones.
                followed = bisect_left(self.good_steps, self.step_of_weights()) - 1
                self.good_steps = [*self.good_steps[max(0, followed) :], name]
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
