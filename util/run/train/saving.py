"""When a run saves, what it keeps, and how it survives a full disk and values that are not finite.

Training stands still only while rank 0 copies the state to the CPU. A thread writes the copy: it runs no collectives,
and it does not touch model, optimizer, device and log.
"""

import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from util.collectives import all_reduce_sum, run_on_rank0
from util.run.files import checkpoint
from util.run.files.json_files import write_state
from util.run.files.record import CheckpointInfo
from util.run.processes.supervise import SETUP_TIMEOUT
from util.run.train.loop import TrainLoop

UNSAVED_SECONDS = 60.0  # of training that may be lost if the process is killed in work between steps
MAX_FAILURES = 3  # this many saves in a row that fail end the run


def copy_on_cpu(content: Any) -> Any:
    """Returns nested dicts and lists with copies of their tensors. Those from a GPU are pinned, and not awaited."""
    if isinstance(content, dict):
        return {name: copy_on_cpu(value) for name, value in content.items()}
    if isinstance(content, list):
        return [copy_on_cpu(value) for value in content]
    if torch.is_tensor(content):
        return content.to("cpu", non_blocking=True, copy=True)
    return content


@dataclass
class Write:
    """A write of the thread. file: what it writes. needed_steps: the saved steps, once it is complete."""

    file: str
    needed_steps: list[int]
    outcome: Future[None]  # OSError if the write fails


@dataclass
class CheckpointSaver:
    """Context manager: writes the checkpoints of a run and prunes those that are not needed any more.

    A checkpoint counts as good once a later step had a finite loss: an update can ruin weights that stay finite. While
    steps are skipped, the weights do not change and nothing is saved. The newest good checkpoint is never pruned, and
    neither is any after it.

    info: what a checkpoint of the first step says. It saves every `--save_minutes` and `--save_steps`, where a
    checkpoint is to be kept for good, and at the end.
    """

    loop: TrainLoop
    info: CheckpointInfo

    def __post_init__(self) -> None:
        args = self.loop.run.args
        self.save_minutes: float = args.save_minutes
        self.save_steps: int = args.save_steps
        self.model = self.loop.model
        self.schedule = self.loop.schedule
        self.output_dir = self.loop.run.output_dir
        self.saved_steps = [self.loop.step]  # resumed from, or written since; older ones may be pruned
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.writing: Write | None = None  # on rank 0, until `join` has seen how it ended
        self.began = time.monotonic()  # the last save
        self.num_failures = 0  # saves in a row

    def is_due(self) -> bool:
        """Whether the current step is to be saved: by its number, by the time, or at the end. For rank 0."""
        step = self.loop.step
        is_chosen = self.save_steps > 0 and step % self.save_steps == 0
        return self.loop.has_ended() or self.is_kept(step) or is_chosen or self.is_time()

    def is_kept(self, step: int) -> bool:
        """Whether the checkpoint of `step` is kept for good. Those of the end and of the start of the decay are."""
        return step % self.schedule.keep_every == 0 or step in (self.schedule.num_steps, self.schedule.decay_step)

    def is_time(self) -> bool:
        """Whether `save_minutes` have passed since the last save, and no write is in flight. For rank 0.

        It also reports a write that has failed since. It is time, too, if a write takes half an hour: then `save` waits
        for it, and so does the watchdog.
        """
        if not self.save_minutes:
            return False
        if self.writing is not None and not self.writing.outcome.done():
            return time.monotonic() - self.began > SETUP_TIMEOUT
        self.join()
        return time.monotonic() - self.began >= 60 * self.save_minutes

    def is_behind(self) -> bool:
        """Whether the last save was more than UNSAVED_SECONDS ago. For rank 0."""
        return time.monotonic() - self.began > UNSAVED_SECONDS

    def save(self, final: bool = False) -> None:
        """Saves the current step, unless its weights are saved already. All ranks must call it.

        It waits for the write before it, so that there never is more than one copy. The `final` one is complete when
        this returns on any rank: if one ended before, its launcher would soon kill rank 0, which writes. At the end of
        the run the weights are saved again, as the last step.

        If the save is not final, a full disk costs a warning only, unless MAX_FAILURES in a row have failed: then the
        run ends by OSError. FloatingPointError if the weights are not finite.
        """
        loop = self.loop
        step = loop.step
        self.expect_a_wait()
        if not run_on_rank0(self.is_needed):
            return
        # Buffers, too: one batch that is not finite ruins the running statistics of a BatchNorm for good.
        num_bad = torch.stack([~tensor.isfinite().all() for tensor in self.model.state_dict().values()]).sum()
        if all_reduce_sum(num_bad) > 0:
            raise FloatingPointError(f"the weights are not finite after step {step} and were not saved")
        state = {
            "model": self.model.state_dict(),
            "optimizer": loop.optimizer.state_dict(),
            "scaler": loop.scaler.state_dict(),
            "meter": loop.meter.state_dict(),
        }
        self.began = time.monotonic()
        self.expect_a_wait()
        run_on_rank0(lambda: self.begin_write(step, state))
        if final:
            self.finish(required=True)

    def is_needed(self) -> bool:
        """Whether the current step is to be saved, once the write before it is complete. For rank 0."""
        step = self.loop.step
        if step != self.loop.last_step:
            step = self.step_of_weights()
        self.join()
        return step > self.saved_steps[-1]

    def save_best(self, info: CheckpointInfo) -> None:
        """Saves the current weights alone, as checkpoint-best.pth. All ranks must call it. info: what it says.

        At the end of the run it is complete when this returns. OSError if that fails.
        """
        self.finish()
        run_on_rank0(lambda: self.begin_write_of_best(info))
        if self.loop.step == self.loop.last_step:
            self.finish(required=True)

    def begin_write(self, step: int, state: Mapping[str, Any]) -> None:
        """Lets the thread write a copy of `state` as the checkpoint of `step`, and prune older ones. For rank 0."""
        info = self.info.at_step(step, self.schedule.steps_per_epoch)
        needed_steps = [*self.steps_since_newest_good(), step]
        outcome = self.thread.submit(self.write_and_prune, step, self.copy(state), info, needed_steps)
        self.writing = Write(checkpoint.file_name(step), needed_steps, outcome)
        if step == self.schedule.decay_step:
            path = self.output_dir / self.writing.file
            self.loop.log.info(
                f"note: the decay begins; a run with more --epochs can start at {path}, which is kept (--resume)"
            )

    def begin_write_of_best(self, info: CheckpointInfo) -> None:
        """Lets the thread write a copy of the weights as checkpoint-best.pth. For rank 0."""
        outcome = self.thread.submit(self.write_best, self.copy({"model": self.model.state_dict()}), info)
        self.writing = Write(checkpoint.file_name("best"), self.saved_steps, outcome)

    def copy(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a copy on the CPU, when it is complete."""
        copied = copy_on_cpu(state)
        if self.loop.device.type == "cuda":
            torch.cuda.current_stream(self.loop.device).synchronize()
        return copied

    def steps_since_newest_good(self) -> list[int]:
        """Returns the saved steps from the newest good one on, or all if none is good."""
        step_of_weights = self.step_of_weights()
        good = [step for step in self.saved_steps if step < step_of_weights]  # a finite step has followed these
        if not good:
            return self.saved_steps
        return [step for step in self.saved_steps if step >= good[-1]]

    def write_and_prune(
        self, step: int, state: Mapping[str, Any], info: CheckpointInfo, needed_steps: Sequence[int]
    ) -> None:
        """For the thread. OSError if it fails."""
        checkpoint.save_checkpoint(self.output_dir, step, state, info.to_json(), self.is_kept(step))
        write_state(self.output_dir, step=step)
        checkpoint.prune_checkpoints(self.output_dir, needed_steps)

    def write_best(self, state: Mapping[str, Any], info: CheckpointInfo) -> None:
        """For the thread. OSError if it fails."""
        # A kill may leave weights without their record, but none beside the record of others.
        (self.output_dir / checkpoint.file_name("best")).with_suffix(".json").unlink(missing_ok=True)
        checkpoint.save_checkpoint(self.output_dir, "best", state, info.to_json())

    def join(self, required: bool = False) -> None:
        """Waits on this rank until the write in flight is complete. If it has failed, logs or raises its error."""
        if self.writing is None:
            return
        writing = self.writing
        error = writing.outcome.exception()
        self.writing = None
        if error is None:
            self.saved_steps = writing.needed_steps
            self.num_failures = 0
            return
        self.num_failures += 1
        if required or self.num_failures == MAX_FAILURES or not isinstance(error, OSError):
            raise error
        self.loop.log.info(f"warning: {writing.file} could not be written ({error}); training goes on")

    def finish(self, required: bool = False) -> None:
        """Waits on all ranks, which must call it, until the write in flight is complete.

        required: all raise OSError if it has failed.
        """
        self.expect_a_wait()
        run_on_rank0(lambda: self.join(required=required))

    def expect_a_wait(self) -> None:
        """Tells the watchdog that this process is about to wait for a write."""
        self.loop.watchdog.heartbeat("waiting for a checkpoint to be written", SETUP_TIMEOUT)

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the write in flight. All ranks have raised a FloatingPointError, so they wait for rank 0."""
        if kind is FloatingPointError:
            self.finish()
        self.expect_a_wait()
        self.join()
        self.thread.shutdown()

    def step_of_weights(self) -> int:
        """Returns the step that made the current weights: the last finite one. It waits for the device."""
        return self.loop.step - int(self.loop.meter.bad_streak)

    def name_last_good(self) -> str:
        """Returns how to go on after values that are not finite, to be added to the message."""
        # A finite step has followed these: the last one, after which the weights have not changed any more.
        finished = checkpoint.list_finished(self.output_dir)
        good = [path for path in finished if checkpoint.step_of(path) < self.step_of_weights()]
        if not good:
            return ". No checkpoint of this run has a finite loss: start again in another --output_dir"
        return (
            f". The last checkpoint with a finite loss is {str(good[-1])!r}. To go on from it with other settings, "
            f"give another --output_dir, --resume {shlex.quote(str(good[-1]))} and --allow_changes"
        )
