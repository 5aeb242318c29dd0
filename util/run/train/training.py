"""The training of a run: its steps, what comes between them, and its end.

The order of events is the same for all programs: the steps up to the next pause, such as a report or the end of an
epoch, then what comes between steps (`BetweenSteps`): a checkpoint first, then the rest in the order of its list.
"""

import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Protocol

import torch
from torch import nn

from util import collectives
from util.data.datasets import AddressedDataset
from util.data.images import ImageError
from util.data.loader import Loader
from util.data.workers import kill_workers
from util.run.exits import describe_error, is_full_gpu, refuse
from util.run.files.json_files import record_failure, write_state
from util.run.processes.distributed import shut_down
from util.run.processes.supervise import BatchesAhead, Stopped
from util.run.train.loop import TrainLoop
from util.run.train.saving import CheckpointSaver
from util.text import count_of

TrainSteps = Callable[[nn.Module, Iterator[Any], range, TrainLoop], None]  # an engine's `train_one_epoch`
OpenLoader = Callable[[range], Loader]  # returns this process's batches of these steps


class BetweenSteps(Protocol):
    """Work between two steps: a checkpoint, an evaluation, a picture, new attention maps.

    A run asks at its start and at each pause, such as the end of an epoch: what is due and not done runs, on all ranks.
    Work that a signal or a kill has prevented is therefore done by the next start.
    """

    def is_due(self) -> bool:
        """Whether the current step asks for it. A function of step and flags alone, so all ranks agree."""
        ...

    def is_done(self) -> bool:
        """Whether an earlier start has done it at this step. Only rank 0 is asked, and its answer holds for all."""
        ...

    def perform(self) -> OpenLoader | None:
        """Does it. All ranks call it. It may return what opens the loader from the current step on.

        If it takes longer than a moment, it calls `loop.stop_if_asked`, which ends it by an exception. Nothing is to be
        written or changed before it is complete.
        """
        ...


class Batches:
    """This process's batches. The loader is opened when a step asks for them."""

    def __init__(self, loop: TrainLoop, open_loader: OpenLoader) -> None:
        self.loop = loop
        self.open_loader = open_loader
        self.loader: Loader | None = None
        self.ahead: BatchesAhead | None = None

    def from_here(self) -> BatchesAhead:
        """Returns the batches from the current step on."""
        if self.ahead is None:
            self.loader = self.open_loader(range(self.loop.step, self.loop.last_step))
            self.ahead = self.loop.load_ahead(self.loader)
        return self.ahead

    def open_by(self, open_loader: OpenLoader) -> None:
        """From now on the loader is one that `open_loader` opens."""
        self.close()
        self.open_loader = open_loader

    def close(self) -> None:
        """Ends the workers."""
        if self.loader is not None:
            self.loader.close()
        self.loader = None
        self.ahead = None


def train(
    loop: TrainLoop,
    train_steps: TrainSteps,
    open_loader: OpenLoader,
    saver: CheckpointSaver,
    between: Sequence[BetweenSteps],
    summary: Callable[[], Sequence[str]],
) -> bool:
    """Trains to the last step. Returns False if a signal stopped the run before.

    train_steps: makes the steps of a range; it returns earlier if `loop.should_stop()`. saver, between: what happens
    between steps. summary: returns the first lines of what is printed at the end.
    """
    run = loop.run
    args = run.args
    with closing(Batches(loop, open_loader)) as batches:
        record_state(loop, "running", model=args.model)
        run.watchdog.heartbeat("beginning to train", run.watchdog.first_timeout)
        gc.freeze()  # garbage collection skips what exists now: of many ranks, some rank would always be in it
        try:
            with loop.stop, saver:
                # An earlier start may have been stopped or killed before it did what was due at its last step.
                all_done = do_what_is_due(loop, saver, between, batches)
                with loop.log.traced(args.profile, loop.step, loop.last_step):
                    while not loop.has_ended():  # MAE's loop over epochs, cut where something may be due
                        steps = steps_to_next_pause(loop)
                        ahead = batches.from_here()
                        loop.clock.restart()  # what happens between steps does not count
                        if not loop.has_stopped:
                            with torch.autograd.set_detect_anomaly(args.detect_anomaly):
                                train_steps(loop.model_in_ddp, ahead, steps, loop)
                        all_done = do_what_is_due(loop, saver, between, batches)
                # If a signal came while work was done between steps, the current step is not saved yet.
                saver.save(final=True)
                raise_load_error(loop)
                return end(loop, all_done, summary)
        except Exception as error:
            refuse_training_error(error, loop, saver)
            raise
        finally:
            gc.unfreeze()


def steps_to_next_pause(loop: TrainLoop) -> range:
    """Returns the steps up to the next report, or the next one that may ask for something else between steps."""
    end = loop.last_step
    for period in (*loop.schedule.pauses, loop.run.args.save_steps, loop.print_freq):
        if period:
            end = min(end, (loop.step // period + 1) * period)
    return range(loop.step, end)


def do_what_is_due(loop: TrainLoop, saver: CheckpointSaver, between: Sequence[BetweenSteps], batches: Batches) -> bool:
    """Does what is due and not done, until the run is to stop. Returns whether nothing is left.

    All ranks do the same: `is_due` is equal on all, rank 0 says what is done.
    """
    if collectives.run_on_rank0(saver.is_due):
        saver.save(final=loop.has_ended())
    for work in between:
        if not work.is_due() or collectives.run_on_rank0(work.is_done):
            continue
        if loop.has_stopped:
            return False
        if collectives.run_on_rank0(saver.is_behind):
            saver.save()
        try:
            loop.stop_if_asked()
            open_loader = work.perform()
        except Stopped:
            return False
        if open_loader is not None:
            batches.open_by(open_loader)
    return True


def end_check(loop: TrainLoop, dataset: AddressedDataset, draw_target: Callable[..., Any] | None = None) -> bool:
    """Ends the program of --check_data, which has set up all that a run has, with a picture in its folder.

    draw_target: see `util.data.pictures.write_samples`.
    """
    from util.data.pictures import write_samples

    path = loop.run.output_dir / "check.png"
    collectives.run_on_rank0(lambda: write_samples(path, dataset, loop.normalize, draw_target))
    loop.log.info(f"--check_data: the run would start; nothing was trained or saved but samples in {path}")
    return True


# ---------------------------------------------------------------------------------------------------------- the end


def raise_load_error(loop: TrainLoop) -> None:
    """All ranks raise the error for which one of them has stopped the run, if there is one."""
    for rank, error in enumerate(collectives.gather_objects(loop.stop.error)):
        if error is not None and loop.process.world_size > 1:
            raise type(error)(f"rank {rank}: {describe_error(error)}") from error
        if error is not None:
            raise error


def end(loop: TrainLoop, all_done: bool, summary: Callable[[], Sequence[str]]) -> bool:
    """Ends a run that has made its steps. Returns False if a signal has stopped it; its checkpoint is saved.

    Our signal handlers stay installed meanwhile: the previous ones might requeue the job or kill the process. After
    Ctrl-C it raises KeyboardInterrupt, so that the shell stops its script, too.
    """
    stop = loop.stop
    is_stopped = loop.step < loop.last_step or not all_done
    if is_stopped:
        name = stop.name or "a signal to another process"
        record_state(loop, "stopped", name)
        progress = f"after step {loop.step} of {loop.last_step}"
        loop.log.info(f"stopped by {name} {progress}; the same command goes on from there")
        stop.wait()
    else:
        if loop.step < loop.schedule.num_steps:
            record_state(loop, "stopped", f"--max_steps {loop.run.args.max_steps}")
        else:
            record_state(loop, "finished")
        loop.log.info("\n".join([*summary(), f"  output       {loop.run.output_dir}"]))
        stop.finish()
    loop.log.close()
    shut_down()
    if is_stopped and stop.name == signal.SIGINT.name:
        kill_workers()  # a program that dies of SIGINT runs no exit handlers
        raise KeyboardInterrupt
    return not is_stopped


def record_state(loop: TrainLoop, state: str, why: str = "", **values: object) -> None:
    """Rank 0 writes run.json: see `util.run.files.json_files.write_state`."""
    run = loop.run
    if run.process.is_main:
        num_steps = loop.schedule.num_steps
        write_state(run.output_dir, state, why, program=run.program, step=loop.step, last_step=num_steps, **values)


def refuse_training_error(error: Exception, loop: TrainLoop, saver: CheckpointSaver) -> None:
    """Ends a training run after unreadable data, values that are not finite, or an I/O error.

    Other errors are bugs, and are only recorded. The other ranks may hang in a collective, so the process group is left
    as it is.
    """
    run = loop.run
    is_expected = isinstance(error, (ImageError, FloatingPointError, OSError))
    is_full = is_full_gpu(error)
    reason = describe_error(error)
    if is_full:
        images = count_of(run.plan.batch_size, "image")
        reason = f"{reason.partition('. ')[0]}, in micro-batches of {images}: lower --batch_size, or --recompute"
        error = ValueError(reason)
    elif not is_expected:
        reason = f"{type(error).__name__}: {reason}"
    if run.process.world_size > 1 and not is_expected:  # it fails alone
        reason = f"rank {run.process.rank}: {reason}"
    record_failure(run.output_dir, reason, step=loop.step)
    if is_expected or is_full:
        collectives.wait_for_threads()
        advice = ""
        if isinstance(error, FloatingPointError):
            advice = saver.name_last_good()
        refuse(run.parser, error, advice, is_training=True)
