"""The training of a run: its steps, its saves, what comes between the steps, and its end.

The order of events is the same for all programs: the steps up to the next pause, such as the end of an epoch, then a
checkpoint if one is due, then what comes between steps (`BetweenSteps`), in the order of its list. Saves by time are
made at reports.
"""

import gc
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from util import collectives
from util.data.bad_images import BadImages
from util.data.datasets import AddressedDataset
from util.data.images import ImageError
from util.data.open import data_hint
from util.data.transforms import Normalize
from util.data.workers import kill_workers
from util.run.cli import Parser
from util.run.exits import describe_error, is_full_gpu, refuse
from util.run.files.record import CheckpointInfo
from util.run.files.reports import record_failure, set_aside_earlier_run, write_json, write_state
from util.run.processes.distributed import shut_down
from util.run.processes.supervise import Stopped
from util.run.start.plan import RunSchedule
from util.run.start.run import Run
from util.run.train.logging import RunLog, print_line, summary_lines
from util.run.train.loop import TrainLoop
from util.run.train.profile import Profile
from util.run.train.saving import CheckpointSaver
from util.text import count_of, printable

TrainSteps = Callable[[nn.Module, Iterator[Any], range, TrainLoop], None]  # an engine's `train_one_epoch`


class BetweenSteps(Protocol):
    """Work between two steps: an evaluation, a picture, new attention maps.

    A run asks at its start and at each pause, such as the end of an epoch: what is due and not done runs, on all ranks.
    Work that a signal or a kill has prevented is therefore done by the next start.
    """

    def is_due(self) -> bool:
        """Whether the current step asks for it. A function of step and flags alone, so all ranks agree."""
        ...

    def is_done(self) -> bool:
        """Whether an earlier start has done it at this step. Only rank 0 is asked, and its answer holds for all."""
        ...

    def perform(self) -> None:
        """Does it. All ranks call it.

        If it takes longer than a moment, it calls `loop.stop_if_asked`, which ends it by an exception. Nothing is to be
        written or changed before it is complete.
        """
        ...


class Training:
    """A run whose model is there: its log, loop and saver.

    info: what the checkpoints say, at the first step. wrapped: the model as training calls it: compiled, in DDP.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        wrapped: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: AddressedDataset,
        schedule: RunSchedule,
        info: CheckpointInfo,
        state: dict[str, Any],
    ) -> None:
        args = run.args
        plan = run.plan
        process = run.process
        self.run = run
        self.args = args
        self.plan = plan
        self.process = process
        self.output_dir = run.output_dir
        self.encoder = run.encoder
        self.model = model
        self.dataset = dataset
        self.images = dataset.images
        self.schedule = schedule
        self.info = info
        last_step = schedule.last_step(args.max_steps)
        writes_log = process.is_main and not args.check_data
        if not run.continues_here and not args.check_data:
            run.note(*collectives.run_on_rank0(lambda: set_aside_earlier_run(run.output_dir)))
        self.log = RunLog(run.output_dir, run.first_step, last_step, writes_log, schedule.steps_per_epoch)
        self.wrapped = wrapped
        normalize = Normalize(info.settings["mean"], info.settings["std"], self.images.pixel_format).to(process.device)
        hint = data_hint(plan.num_workers, plan.device)
        self.loop = TrainLoop(run, wrapped, optimizer, schedule, normalize, self.log, state, hint)
        self.saver = CheckpointSaver(
            run, info, model, self.loop, schedule, save_minutes=args.save_minutes, save_steps=args.save_steps
        )
        save = partial(self.saver.save, final=True)
        bad_images = BadImages(self.images, dataset.bad, args.max_bad_fraction, self.log.info, before_error=save)
        self.loop.reports.at_report += [bad_images, self.saver]
        self.profile = Profile(args.profile, last_step, process, self.log)

    def note(self, *notes: str) -> None:
        """Writes notes to the log, and prints them. With --check_data there is no log."""
        for note in notes:
            self.log.info(note)
            if self.args.check_data and self.process.is_main:
                print_line(printable(note))

    def announce(self, rows: dict[str, str]) -> None:
        """Writes the summary, all notes so far, and settings.json. rows: of the summary, about model and data."""
        plan = self.plan
        origin = self.run.origin
        settings = self.info.settings
        processes = count_of(self.process.world_size, "process")
        if self.process.is_main and not self.args.check_data:
            write_json(self.output_dir / "settings.json", settings)
        common = {
            "batch": f"{plan.total_batch_size} = {plan.batch_size} x {processes} x {plan.accum_iter} accumulated",
            "schedule": self.schedule.summary,
            "device": f"{processes} on {plan.device} in {plan.precision}",
            "code": origin.code,
            "command": f"{origin.command} on {', '.join(origin.hosts)}",
            "output": str(self.output_dir),
        }
        self.note(*summary_lines({**rows, **common}))
        self.log.write_to_file(json.dumps(settings))
        self.note(*self.run.notes, *self.images.notes)
        if plan.device == "cuda" and torch.cuda.device_count() > 1 and self.process.world_size == 1:
            self.note(f"note: 1 of {torch.cuda.device_count()} GPUs is used; torchrun --nproc_per_node uses more")
        if settings["compile"]:
            self.note("note: the first step compiles the model, and nothing is reported before (--no-compile)")

    def train(
        self,
        train_steps: TrainSteps,
        open_batches: Callable[[range], Any],
        between: Sequence[BetweenSteps] = (),
        summary: Callable[[], Sequence[str]] = tuple,
        draw_target: Callable[..., Any] | None = None,
    ) -> bool:
        """Trains to the last step. Returns False if a signal stopped the run before.

        open_batches: returns this process's batches of the steps of this start, an iterator that `close` ends.
        train_steps: `train_steps(wrapped model, batches, steps, loop)` makes these steps; it returns earlier if
        `loop.should_stop()`. summary: returns the first lines of what is printed at the end. With --check_data the
        program ends instead, with a picture of samples. draw_target: see `util.data.pictures.write_samples`.
        """
        if self.args.check_data:
            self._end_check(draw_target)
            return True
        loop = self.loop
        with closing(open_batches(range(loop.step, loop.last_step))) as batches:
            self.write_state("running")
            gc.freeze()  # garbage collection skips what exists now: of many ranks, some rank would always be in it
            try:
                return self._train(train_steps, batches, between, summary)
            except Exception as error:
                refuse_training_error(self.run.parser, error, self.saver, self.plan.batch_size)
            finally:
                gc.unfreeze()

    def write_state(self, state: str, why: str = "") -> None:
        """Rank 0 writes run.json: see `util.run.files.reports.write_state`."""
        if self.process.is_main:
            write_state(
                self.output_dir,
                state,
                program=self.run.program,
                model=self.info.settings["model"],
                step=self.loop.step,
                last_step=self.schedule.num_steps,
                why=why,
            )

    def _end_check(self, draw_target: Callable[..., Any] | None) -> None:
        """Ends the program of --check_data, which has set up all that a run has, with a picture in its folder."""
        from util.data.pictures import write_samples

        path = self.output_dir / "check.png"
        collectives.run_on_rank0(lambda: write_samples(path, self.dataset, self.loop.normalize, draw_target))
        self.note(f"--check_data: the run would start; nothing was trained or saved but samples in {path}")
        shut_down()

    def _train(
        self,
        train_steps: TrainSteps,
        batches: Iterator[Any],
        between: Sequence[BetweenSteps],
        summary: Callable[[], Sequence[str]],
    ) -> bool:
        loop = self.loop
        watchdog = self.run.watchdog
        watchdog.heartbeat("beginning to train", watchdog.first)
        with loop.stop, self.saver:
            # An earlier start may have been stopped or killed before it did what was due at its last step.
            all_done = self._run_due(between)
            while not loop.has_ended():
                steps = self.profile.cut(self._steps_to_next_pause())
                loop.clock.restart()  # set-up, saves and evaluations do not count
                ahead = loop.load_ahead(batches, steps)
                if not loop.has_stopped:
                    with self.profile.trace(steps), torch.autograd.set_detect_anomaly(self.args.detect_anomaly):
                        train_steps(self.wrapped, ahead, steps, loop)
                if loop.has_ended():
                    self.saver.save(final=True)
                elif self.saver.is_due():
                    self.saver.save()
                all_done = self._run_due(between)
            # If a signal came while work was done between steps, the current step is not saved yet.
            self.saver.save(final=True)
            self._raise_load_error()
            if loop.step < loop.last_step or not all_done:
                self.write_state("stopped", loop.stop.name or "a signal to another process")
                end_after_signal(loop)
                return False
            if loop.step < self.schedule.num_steps:
                self.write_state("stopped", f"--max_steps {self.args.max_steps}")
            else:
                self.write_state("finished")
            finish_run(loop, "\n".join([*summary(), f"  output       {self.output_dir}"]))
        return True

    def _raise_load_error(self) -> None:
        """All ranks raise the error for which one of them has stopped the run, if there is one."""
        for rank, error in enumerate(collectives.gather_objects(self.loop.stop.error)):
            if error is not None and self.process.world_size > 1:
                raise type(error)(f"rank {rank}: {describe_error(error)}") from error
            if error is not None:
                raise error

    def _run_due(self, between: Sequence[BetweenSteps]) -> bool:
        """Runs what is due and not done, until the run is to stop. Returns whether nothing is left.

        All ranks run the same: `is_due` is equal on all, rank 0 says what is done.
        """
        for work in between:
            if not work.is_due() or collectives.run_on_rank0(work.is_done):
                continue
            if self.loop.has_stopped:
                return False
            if collectives.run_on_rank0(self.saver.is_behind):
                self.saver.save()
            try:
                self.loop.stop_if_asked()
                work.perform()
            except Stopped:
                return False
        return True

    def _steps_to_next_pause(self) -> range:
        """Returns the steps up to the next one that may ask for a checkpoint or for work between steps."""
        step = self.loop.step
        end = self.loop.last_step
        for period in (*self.schedule.pauses, self.args.save_steps):
            if period:
                end = min(end, (step // period + 1) * period)
        return range(step, end)

    def ends_epoch(self, every: int) -> bool:
        """Whether the current step ends an epoch whose number is a multiple of `every`, or the whole schedule.

        Epochs count from 1 here; step 0 counts as the end of epoch 0. every 0: never.
        """
        epoch, rest = divmod(self.loop.step, self.loop.steps_per_epoch)
        return every > 0 and rest == 0 and (epoch % every == 0 or self.loop.step == self.schedule.num_steps)

    def progress(self) -> str:
        """Returns, for example, "for 100 steps on 24 images"."""
        step = self.loop.step
        total = self.schedule.num_steps
        images = count_of(len(self.images), "image")
        if step >= total:
            return f"for {count_of(step, 'step')} on {images}"
        return f"for {count_of(step, 'step')} of {total} on {images}"


# ---------------------------------------------------------------------------------------------------------- the end


def finish_run(loop: TrainLoop, summary: str) -> None:
    """Prints the summary of a finished run and leaves the process group."""
    loop.stop.finish()
    loop.log.info(summary)
    loop.log.close()
    shut_down()


def end_after_signal(loop: TrainLoop) -> None:
    """Ends a run that a signal has stopped, after its checkpoint is saved.

    Our signal handlers stay installed meanwhile: the previous ones might requeue the job or kill the process. After
    Ctrl-C it raises KeyboardInterrupt, so that the shell stops its script, too.
    """
    stop = loop.stop
    name = stop.name or "a signal to another process"
    progress = f"after step {loop.step} of {loop.last_step}"
    loop.log.info(f"stopped by {name} {progress}; the same command goes on from there")
    loop.log.close()
    stop.wait()
    shut_down()
    if stop.name == signal.SIGINT.name:
        kill_workers()  # a program that dies of SIGINT runs no exit handlers
        raise KeyboardInterrupt


def refuse_training_error(parser: Parser, error: Exception, saver: CheckpointSaver, batch_size: int) -> NoReturn:
    """Ends a training run after unreadable data, values that are not finite, or an I/O error.

    Other errors are bugs and are raised. The other ranks may hang in a collective, so the process group is left as it
    is. batch_size: of a micro-batch.
    """
    reason = describe_error(error)
    is_bug = False
    if is_full_gpu(error):
        images = count_of(batch_size, "image")
        reason = f"{reason.partition('. ')[0]}, in micro-batches of {images}: lower --batch_size, or --recompute"
        error = ValueError(reason)
    elif not isinstance(error, (ImageError, FloatingPointError, OSError)):
        reason = f"{type(error).__name__}: {reason}"
        is_bug = True
    process = saver.run.process
    place = ""
    if process.world_size > 1 and not isinstance(error, (ImageError, FloatingPointError, OSError)):
        place = f"rank {process.rank}: "  # it fails alone
    record_failure(saver.output_dir, place + reason, step=saver.loop.step)
    if isinstance(error, ValueError) and is_bug:
        raise RuntimeError(reason) from error  # before training, a ValueError is the user's
    if is_bug:
        raise error
    collectives.wait_for_threads()
    refuse(parser, error, saver.advice(error), is_training=True)
