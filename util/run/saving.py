"""When a run saves, what it keeps, and how it survives a full disk and values that are not finite.

Training stands still only while rank 0 copies the state to the CPU. A thread writes the copy: it runs no collectives,
and it does not touch model, optimizer, device and log.
"""

import shlex
import time
from bisect import bisect_left
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from util.collectives import all_reduce_sum, run_on_rank0
from util.run import checkpoint, shard
from util.run.checkpoint import CheckpointInfo
from util.run.flags import RunSchedule
from util.run.folder import FolderLock, Start, write_json, write_progress
from util.run.loop import TrainLoop


@dataclass
class CheckpointSaver:
    """Writes the checkpoints of a run and prunes those that are not needed any more.

    An update can ruin weights that stay finite. Only the next step shows it, because its loss is not finite. While
    steps are skipped, the weights do not change and nothing is saved. So each save shows that the checkpoint before it
    had a finite loss, and that one is kept beside the new one.

    minutes, steps: a save is due so often, and whenever a checkpoint is to be kept for good; 0: never.
    """

    start: Start
    info: CheckpointInfo
    model: torch.nn.Module
    loop: TrainLoop
    schedule: RunSchedule
    minutes: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        self.output_dir, self.lock = self.start.output_dir, self.start.lock
        self.first_step = self.loop.step
        self.good_steps = [self.first_step]  # checkpoints known to be good: resumed from, or written since
        self.copies = shard.HostCopies(self.loop.device)
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.writing: Future[str] | None = None  # on rank 0, until `join` has seen how it ended
        self.name: int | str = self.first_step  # of the checkpoint that was written last, or is now
        self.began = time.monotonic()  # the last save

    def is_due(self) -> bool:
        """Whether the current step is to be saved, whatever the time. A function of step and flags alone."""
        return self.is_kept(self.loop.step) or (self.steps > 0 and self.loop.step % self.steps == 0)

    def is_kept(self, step: int) -> bool:
        """Whether the checkpoint of `step` is kept for good. That of the end of the schedule always is."""
        return step % self.schedule.keep_every == 0 or step == self.schedule.num_steps

    def save_by_time(self) -> None:
        """Saves if `minutes` have passed since the last save on rank 0, and no write is in flight. For all ranks."""
        if self.minutes and run_on_rank0(self.is_time):
            self.save()

    def is_time(self) -> bool:
        """Whether rank 0's clock asks for a save. It also reports a write that has failed since."""
        if self.writing is not None and self.writing.done():
            self.join()
        return self.writing is None and time.monotonic() - self.began >= 60 * self.minutes

    def save(self, final: bool = False) -> None:
        """Saves the current step, unless its weights are saved already. All ranks must call it.

        It waits for the write before it, so that there never is more than one copy. The `final` one is complete when
        this returns on any rank: if one ended before, its launcher would soon kill rank 0, which writes. At the end of
        the run the weights are saved again, as the last step.

        If the save is not final, a full disk costs a warning only. FloatingPointError if the weights are not finite.
        """
        loop, step = self.loop, self.loop.step
        changed_at = step if step == loop.last_step else self.step_of_weights()
        if run_on_rank0(lambda: self.is_saved(changed_at, final)):
            return
        # Buffers, too: one batch that is not finite ruins the running statistics of a BatchNorm for good.
        if all_reduce_sum(shard.count_bad(self.model.state_dict().values())) > 0:
            raise FloatingPointError(f"the weights are not finite after step {step} and were not saved")
        state = {"model": self.model.state_dict(), "optimizer": loop.optimizer.state_dict()}
        state |= {"scaler": loop.precision.scaler.state_dict(), "meter": loop.meter.state_dict()}
        self.began = time.monotonic()
        info = self.info.at_step(step, self.schedule.steps_per_epoch)
        self.write(step, state, info.to_json(), self.is_kept(step), required=final)

    def is_saved(self, step: int, final: bool) -> bool:
        """Whether rank 0 has written the weights of `step`, or, unless it is `final`, writes them now."""
        if self.writing is not None and self.name == step and not final:
            return True
        self.join()
        return step <= self.good_steps[-1]

    def write(
        self,
        name: int | str,
        state: Mapping[str, Any],
        meta: dict[str, Any],
        keep: bool = False,
        required: bool = False,
    ) -> None:
        """Copies `state` and lets the thread write it as a checkpoint, and prune older ones. All ranks must call it.

        If it is `required`, they wait for the write, and raise OSError if it fails.
        """
        self.join()  # the write before it reads the memory of the copy
        copy = self.copies.take(dict(state), keep=self.start.process.is_main)
        # The newest one that a finite step has followed, and all later ones.
        followed = bisect_left(self.good_steps, self.step_of_weights()) - 1
        good_steps = [*self.good_steps[max(0, followed) :], name] if isinstance(name, int) else []
        self.name = name

        def begin() -> None:
            try:
                self.renew_folder()
            except OSError as error:
                self._fail(error, required)
                return
            self.writing = self.thread.submit(self._write, name, copy, meta, keep, good_steps)
            if required:
                self.join(required)

        run_on_rank0(begin)

    def _write(
        self, name: int | str, state: Mapping[str, Any], meta: Mapping[str, Any], keep: bool, good_steps: list[int]
    ) -> str:
        """Writes and prunes in the thread. Returns a warning for the log, or "". OSError if the write fails."""
        checkpoint.save_checkpoint(self.output_dir, name, state, meta, keep)
        if good_steps:
            self.good_steps = good_steps
            write_progress(self.output_dir, name)
            try:
                checkpoint.prune_checkpoints(self.output_dir, good_steps)
            except OSError as error:
                return f"warning: older checkpoints could not be removed ({error})"
        return ""

    def join(self, required: bool = False) -> None:
        """Waits on this rank until the write in flight is complete. If it has failed, see `_fail`."""
        writing, self.writing = self.writing, None
        try:
            warning = "" if writing is None else writing.result()
        except OSError as error:
            self._fail(error, required)
        else:
            if warning:
                self.loop.log.info(warning)

    def _fail(self, error: OSError, required: bool) -> None:
        """Raises the error of a write that was `required`, and logs that of any other."""
        if required:
            raise error
        self.loop.log.info(f"warning: checkpoint-{self.name}.pth could not be written ({error}); training goes on")

    def finish(self) -> None:
        """Waits on all ranks, which must call it, until the write in flight is complete."""
        run_on_rank0(self.join)

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Waits for the write in flight. All ranks have raised a FloatingPointError, so they wait for rank 0."""
        if kind is FloatingPointError:
            self.finish()
        self.join()
        self.thread.shutdown()

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

    def renew_folder(self) -> None:
        """Makes the output folder again if it was deleted, with its files. FolderInUse if another run has it now."""
        if self.lock is None or not self.lock.is_lost():
            return
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.lock = FolderLock(self.output_dir)
        if self.loop.log.renew():
            write_json(self.output_dir / "settings.json", self.info.settings)
            self.loop.log.info(f"warning: {str(self.output_dir)!r} was deleted; it is made again, and the run goes on")
