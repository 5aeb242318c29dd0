"""The life of a run. Whoever looks for the loader, the resume or the end of a run starts here.

    with Run.begin(PROGRAM, parser, args, argv) as run:  # processes, flags, folder, the checkpoint to resume
        model, images, optimizer = ...
        run.open(model=model, optimizer=optimizer, images=images, ...)  # restores; wraps; log, loader, saver
        return run.train(train_one_epoch, [evaluator])  # steps, saves, signals, the end

The order of events is the same for all programs: the steps of an epoch, then a checkpoint if one is due, then what
comes between steps (`Periodic`), in the order of its list.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from util import collectives
from util.data.datasets import AddressedDataset, StepBatchSampler, cores_per_process, steps_per_epoch
from util.data.images import Images
from util.data.loader import BadImages, Loader, TooManyBadImages
from util.data.open import data_hint, data_settings
from util.data.statistics import Statistics, choose_statistics
from util.data.transforms import Normalize
from util.run import checkpoint
from util.run.checkpoint import read_meta
from util.run.cli import Parser
from util.run.distributed import precision
from util.run.ending import end_after_signal, finish_run
from util.run.errors import refuse_setup_error, refuse_training_error
from util.run.flags import Plan, RunSchedule, changes_of_flags, make_plan, schedule_by_epochs
from util.run.folder import Start, enter_folder, join_processes, remove_created, write_json
from util.run.logging import RunLog
from util.run.loop import TrainLoop
from util.run.resume import (
    RunRecord,
    data_facts,
    find_encoder,
    json_settings,
    read_run,
    restore,
    resume_encoder,
    warn_if_unfinished,
)
from util.run.saving import CheckpointSaver
from util.run.shard import wrap_model
from util.run.supervise import BETWEEN, StopSignal, Watchdog, first_timeout
from util.text import count_of

NOTHING: Mapping[str, Any] = {}
TrainSteps = Callable[[nn.Module, Iterator[Any], range, TrainLoop], None]  # an engine's `train_one_epoch`


class Periodic(Protocol):
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
        """Does it. All ranks call it. If `loop.should_stop()` is true inside, it returns and the run ends."""
        ...


class Run:
    """One start of a run, in one process: its flags, processes and folder; after `open` also its model and loader."""

    model: nn.Module
    wrapped: nn.Module  # the model as training calls it: compiled, sharded or in DDP
    images: Any  # of training
    schedule: RunSchedule
    record: RunRecord
    loop: TrainLoop
    saver: CheckpointSaver
    watchdog: Watchdog
    batches: Loader  # of all remaining steps; no worker runs before the first one is taken

    def __init__(self, parser: Parser, args: argparse.Namespace, plan: Plan, start: Start) -> None:
        self.parser, self.args, self.plan, self.start = parser, args, plan, start
        self.process, self.output_dir = start.process, start.output_dir
        self.checkpoint: dict[str, Any] | None = None  # the content to resume from, until `open` has restored it
        self.encoder: dict[str, Any] | None = None  # identity of the weights that the run began with
        self.encoder_flag: str | None = None
        self.is_training = False
        self._log: RunLog | None = None
        self._waiting: list[str] = []  # remarks before the log is open

    # ------------------------------------------------------------------------------------------------------ begin

    @classmethod
    @contextmanager
    def begin(
        cls,
        program: str,
        parser: Parser,
        args: argparse.Namespace,
        argv: Sequence[str] | None = None,
        *,
        check: Callable[[argparse.Namespace, Plan], None] | None = None,
        default_batch_size: int = 64,
    ) -> Iterator["Run"]:
        """Joins the processes, checks the flags, takes the folder and reads the checkpoint to resume from.

        Errors of the user inside this context end the program with one paragraph and an exit code (`util.run.errors`).
        check: refuses the program's own flags before the folder is touched. default_batch_size: of a micro-batch, if
        only the total is given.
        """
        run: Run | None = None
        created: list[Path] = []  # by this start, removed if it fails
        try:
            process = join_processes(parser, args)
            plan = make_plan(args, process, default_batch_size)
            if check is not None:
                check(args, plan)
            start, remarks = enter_folder(program, args, argv, process, created)
            run = cls(parser, args, plan, start)
            run.note(*remarks)
            run.checkpoint = read_run(start, plan.total_batch_size)
            yield run
        except BaseException as error:
            if run is not None and run.is_training:
                if isinstance(error, Exception):
                    refuse_training_error(parser, error, run.saver)
                raise
            remove_created(created)
            if not isinstance(error, (ValueError, FloatingPointError, OSError)):
                raise
            refuse_setup_error(parser, error)
        finally:
            if run is not None:
                run.close()

    def close(self) -> None:
        """Ends the workers and frees the folder. The parts of a run refer to each other: it is not freed by itself."""
        if "batches" in vars(self):
            self.batches.close()
        if self.start.lock is not None:
            self.start.lock.file.close()

    @property
    def is_new(self) -> bool:
        """Whether this start begins the run, so that first weights are needed."""
        return self.start.resume_path is None

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the checkpoint to resume says beside tensors, before `open`; empty for a new run."""
        return NOTHING if self.checkpoint is None else self.checkpoint["meta"]

    @property
    def build_device(self) -> torch.device:
        """The device to build the model on. With --shard the whole model never lies on a GPU."""
        return torch.device("cpu") if self.args.shard else self.process.device

    @property
    def log(self) -> RunLog:
        """The log, once `open` has opened it."""
        return self.loop.log

    def note(self, *remarks: str) -> None:
        """Writes remarks to the log. Before the log is open, they wait for it."""
        if self._log is None:
            self._waiting += remarks
        else:
            for remark in remarks:
                self._log.info(remark)

    def load_encoder(self, flag: str, load: Callable[[str], object]) -> None:
        """Loads the weights that `flag` names into the model of a new run, by `load(path)`, which returns a report.

        `encoder` then identifies them, or is None. ValueError if a resumed run began with others. All ranks must call
        it.
        """
        given, start = getattr(self.args, flag), self.start
        self.encoder = collectives.run_on_rank0(lambda: find_encoder(given, not self.is_new, flag))
        self.encoder_flag = flag
        if self.checkpoint is not None:
            self.encoder, remarks = resume_encoder(self.checkpoint["meta"], self.encoder, start, flag)
            self.note(*remarks)
        elif self.encoder is not None:
            path = self.encoder["path"]
            self.note(f"encoder from {path}: {load(path)}", *warn_if_unfinished(self.encoder))
        elif flag == "finetune":
            self.note("no --finetune: training from scratch")

    def choose_statistics(self, images: Images) -> Statistics:
        """Returns the pixel statistics that the run normalises with: see `util.data.statistics`."""
        resumed, encoder = None, {}
        if self.checkpoint is not None:
            meta = self.checkpoint["meta"]
            resumed = {"in_chans": meta["settings"].get("in_chans", 3), **checkpoint.pixel_settings(meta)}
        elif self.encoder is not None:
            encoder = checkpoint.pixel_settings(read_meta(self.encoder["path"]))
        given = self.args.mean, self.args.std
        statistics, remarks = choose_statistics(given, images, resumed, encoder)
        self.note(*remarks)
        return statistics

    # ------------------------------------------------------------------------------------------------------- open

    def open(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        images: Any,
        transform: Callable[..., torch.Tensor],
        collate: Callable[[Sequence[Any]], Any],
        statistics: tuple[Sequence[float], Sequence[float]],
        rows: Mapping[str, str],
        val_images: Any = None,
        schedule: Callable[[argparse.Namespace, Plan, int], RunSchedule] = schedule_by_epochs,
        settings: Mapping[str, Any] = NOTHING,
        classes: list[str] | None = None,
        class_colors: list[list[int]] | None = None,
        files: Mapping[str, str] = NOTHING,
        split_changes_draws: bool = False,
    ) -> None:
        """Restores the checkpoint, wraps the model, opens the log, makes loader, loop and saver, writes the summary.

        statistics: mean and deviation of each channel. rows: of the summary. schedule: (args, plan, steps per epoch).
        settings: what follows from model and data, over the flags. classes, class_colors: for the checkpoints. files:
        {flag: fingerprint} of files that the model reads. split_changes_draws: see `find_notes`.
        """
        args, plan, start, process = self.args, self.plan, self.start, self.process
        self.model, self.images = model, images
        epoch_steps = steps_per_epoch(len(images), plan.total_batch_size, process.world_size)
        self.schedule = schedule(args, plan, epoch_steps)
        mean, std = statistics
        own = {"epochs": self.schedule.epochs, "mean": mean, "std": std, **settings}
        if self.checkpoint is not None and self.encoder_flag is not None:
            own[self.encoder_flag] = self.checkpoint["meta"]["settings"].get(self.encoder_flag)
        merged = json_settings(vars(args), asdict(plan), own, data_settings(images))
        collectives.refuse_differences(files, "model")
        self.record = RunRecord(
            program=start.program,
            settings=merged,
            data=data_facts(images),
            val_data=None if val_images is None else data_facts(val_images),
            pixels=images.pixel_format.dtype,
            steps_per_epoch=epoch_steps,
            process=process,
            optimizer=type(optimizer).__name__,
            origin=start.origin,
            encoder=self.encoder,
            classes=classes,
            class_colors=class_colors,
            files=dict(files),
        )
        first_step = self._restore(optimizer, split_changes_draws)
        normalize = Normalize(*statistics, images.pixel_format).to(process.device)
        self._make_loop(optimizer, normalize, transform, first_step)
        how_often = args.save_minutes, args.save_steps
        self.saver = CheckpointSaver(start, self.record, model, self.loop, self.schedule, *how_often)
        self.batches = self.open_batches(range(first_step, self.loop.last_step), collate)
        self._announce(self.loop.log, rows)
        self.checkpoint = None  # frees its weights and moments

    def _restore(self, optimizer: torch.optim.Optimizer, split_changes_draws: bool) -> int:
        """Restores model and optimizer from the checkpoint to resume. Returns its step, 0 for a new run."""
        if self.checkpoint is None:
            return 0
        remarks = restore(
            content=self.checkpoint,
            start=self.start,
            record=self.record,
            model=self.model,
            optimizer=optimizer,
            flag_changes=changes_of_flags(self.parser, self.plan),
            allow_changes=self.args.allow_changes,
            split_changes_draws=split_changes_draws,
        )
        self.note(*remarks)
        return self.checkpoint["meta"]["step"]

    def _make_loop(
        self,
        optimizer: torch.optim.Optimizer,
        normalize: Normalize,
        transform: Callable[..., torch.Tensor],
        first_step: int,
    ) -> None:
        """Opens the log, wraps the model, and makes data set, watchdog and training loop."""
        args, plan, process, images, schedule = self.args, self.plan, self.process, self.images, self.schedule
        last_step = min(schedule.num_steps, args.max_steps or sys.maxsize)
        log = RunLog(self.output_dir, first_step, last_step, process.is_main, schedule.steps_per_epoch)
        self.wrapped = wrap_model(self.model, optimizer, args, plan.precision, plan.accum_iter, process)
        first = first_timeout(args.dist_timeout, args.compile)
        self.watchdog = Watchdog(args.dist_timeout, first, process.rank)
        self.dataset = AddressedDataset(images, transform, replace=args.max_bad_fraction > 0)
        self.bad_images = BadImages(images, self.dataset.bad, args.max_bad_fraction, log.info)
        self.loop = TrainLoop(
            parameters=[p for p in self.wrapped.parameters() if p.requires_grad],
            optimizer=optimizer,
            precision=precision(plan.precision, process.device),
            normalize=normalize,
            learning_rate=schedule.learning_rate,
            log=log,
            images_per_step=plan.total_batch_size,
            steps_per_epoch=schedule.steps_per_epoch,
            last_step=last_step,
            accum_iter=plan.accum_iter,
            clip_grad=args.clip_grad,
            seed=args.seed,
            print_freq=args.print_freq,
            data_hint=data_hint(images, plan.num_workers, cores_per_process(process.local_world_size), plan.device),
            on_report=self._at_report,
            watchdog=self.watchdog,
        )
        self.loop.load_state(self.checkpoint, first_step)

    def open_batches(self, steps: range, collate: Callable[[Sequence[Any]], Any], with_boxes: bool = False) -> Loader:
        """Returns this rank's batches of these steps. Workers start with the first one; `close()` ends them."""
        plan, process, images = self.plan, self.process, self.images
        self.dataset.with_boxes = with_boxes
        split = plan.batch_size, plan.accum_iter, process.rank, process.world_size
        return Loader(
            self.dataset,
            StepBatchSampler(len(images), *split, self.args.seed, steps.start, steps.stop),
            collate,
            num_workers=plan.num_workers,
            pin_memory=plan.device == "cuda",
            batch_bytes=self._batch_bytes(),
        )

    def _batch_bytes(self) -> int:
        """Returns the size of the images of one batch of this process."""
        height, width = self.model.img_size
        return self.images.pixel_format.pixel_bytes * height * width * self.plan.batch_size

    def _at_report(self) -> None:
        """Saves if it is time, also before an error of the data ends the run on all ranks: all steps are good."""
        try:
            self.bad_images.report()
        except (TooManyBadImages, OSError):
            self.saver.save()
            self.saver.finish()
            raise
        self.saver.save_by_time()

    def _announce(self, log: RunLog, rows: Mapping[str, str]) -> None:
        """Writes settings.json, the summary, and all remarks that have waited for the log."""
        args, plan, start, processes = self.args, self.plan, self.start, count_of(self.process.world_size, "process")
        if self.process.is_main:
            write_json(self.output_dir / "settings.json", self.record.settings)
        common = {
            "batch": f"{plan.total_batch_size} = {plan.batch_size} x {processes} x {plan.accum_iter} accumulated",
            "schedule": self.schedule.summary,
            "device": f"{processes} on {plan.device} in {plan.precision}",
            "code": str(start.origin["code"]),
            "command": f"{start.origin['command']} on {', '.join(start.origin['hosts'])}",
            "output": str(self.output_dir),
        }
        log.start_summary({**rows, **common})
        log.write_to_file(json.dumps(self.record.settings))
        self._log = log
        self.note(*self._waiting, *self.images.notes)
        if plan.device == "cuda" and torch.cuda.device_count() > 1 and self.process.world_size == 1:
            self.note(f"note: 1 of {torch.cuda.device_count()} GPUs is used; torchrun --nproc_per_node uses more")
        if args.compile:
            self.note("note: the first step compiles the model, which takes minutes; nothing is reported before")

    # ------------------------------------------------------------------------------------------------------ train

    def train(
        self,
        train_steps: TrainSteps,
        between: Sequence[Periodic] = (),
        summary: Callable[[], Sequence[str]] = tuple,
    ) -> bool:
        """Trains to the last step. Returns False if a signal stopped the run before.

        train_steps: `train_steps(wrapped model, batches, steps, loop)` makes these steps; it returns earlier if
        `loop.should_stop()`. summary: returns the first lines of what is printed at the end.
        """
        self.is_training = True
        loop = self.loop
        with self.watchdog, StopSignal(self.process.device) as stop, self.saver:
            loop.stop = stop
            all_done = self._run_due(between)  # missing because the run was stopped or killed before it
            while loop.step < loop.last_step and not loop.has_stopped():
                train_steps(self.wrapped, self.batches, self._steps_to_next_pause(), loop)
                ends = loop.has_stopped() or loop.step == loop.last_step
                if ends or self.saver.is_due():
                    self.saver.save(final=ends)
                if loop.step == loop.last_step or not loop.has_stopped():
                    all_done = self._run_due(between)
            self.saver.save(final=True)  # unless it is saved already
            if loop.step < loop.last_step or not all_done:
                end_after_signal(loop, stop)
                return False
            finish_run(loop, stop, "\n".join([*summary(), *self.closing_lines()]))
        return True

    def _run_due(self, between: Sequence[Periodic]) -> bool:
        """Runs what is due and not done, until the run is to stop. Returns whether nothing is left.

        All ranks run the same: `is_due` is equal on all, rank 0 says what is done.
        """
        for work in between:
            if work.is_due() and not collectives.run_on_rank0(work.is_done):
                if not self.loop.has_stopped():
                    with self.watchdog.first_time(type(work)):
                        work.perform()
                    self.loop.clock.restart()  # it does not count as training
                if self.loop.has_stopped():
                    return False
        return True

    def _steps_to_next_pause(self) -> range:
        """Returns the steps up to the next one that may ask for a checkpoint or for work between steps."""
        step, periods = self.loop.step, (*self.schedule.pauses, self.args.save_steps)
        ends = [(step // period + 1) * period for period in periods if period]
        return range(step, min([self.loop.last_step, *ends]))

    def ends_epoch(self, every: int) -> bool:
        """Whether the current step ends an epoch whose number is a multiple of `every`, or the whole schedule.

        Epochs count from 1 here; step 0 counts as the end of epoch 0. every 0: never.
        """
        epoch, rest = divmod(self.loop.step, self.loop.steps_per_epoch)
        return every > 0 and rest == 0 and (epoch % every == 0 or self.loop.step == self.schedule.num_steps)

    def heartbeat(self) -> None:
        """Tells the watchdog that this process works, for example once per batch of an evaluation."""
        self.watchdog.heartbeat(self.loop.step - 1, BETWEEN)

    def progress(self) -> str:
        """Returns, for example, "for 100 steps on 24 images", and how to go on if --max_steps ended the run early."""
        step, total, images = self.loop.step, self.schedule.num_steps, count_of(self.record.data["num_images"], "image")
        if step >= total:
            return f"for {count_of(step, 'step')} on {images}"
        return f"for {count_of(step, 'step')} of {total} on {images}; the same command without --max_steps goes on"

    def closing_lines(self) -> list[str]:
        """Returns where the newest checkpoint and TensorBoard's files are."""
        # Its hash is not computed: this run has just written it.
        finished = checkpoint.list_finished(self.output_dir) if self.process.is_main else []
        lines = [f"  checkpoint   {path}" for path in finished[-1:]]
        return [*lines, f"  TensorBoard  tensorboard --logdir {self.output_dir / 'tensorboard'}"]
