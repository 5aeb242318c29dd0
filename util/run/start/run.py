"""A start of a run, in its processes and its folder. A main composes the rest, see `main` of main_pretrain.py."""

import argparse
import math
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from util import collectives
from util.code_version import code_version
from util.data.datasets import AddressedDataset, StepBatchSampler
from util.data.images import Images
from util.data.loader import Loader
from util.data.statistics import Statistics
from util.run.cli import Parser
from util.run.exits import user_errors
from util.run.files.json_files import record_failure
from util.run.files.record import CheckpointInfo, DataInfo, EncoderSource, RunInfo, StartInfo
from util.run.processes.distributed import Process
from util.run.processes.supervise import Watchdog, first_timeout
from util.run.start.begin import (
    begin,
    check_space,
    checkpoint_bytes,
    refuse_separate_folders,
    remove_leftovers,
    take_folder,
)
from util.run.start.first_weights import find_first_weights
from util.run.start.plan import Plan, RunSchedule, make_plan
from util.run.start.resume import (
    find_changes,
    find_checkpoint,
    find_notes,
    read_resumed,
    restore,
)
from util.urls import redact


@dataclass
class Run:
    """One start of a run, in one process: what is known before its model is there.

    program: the main, for example "main_pretrain.py". resume_path: the checkpoint that the run continues from. resumed:
    what it says, None for a new run. encoder_flag: name of the flag that gives the first weights. first_weights:
    the checkpoint whose weights the run begins with, or began with. notes: for the log, which opens later.
    """

    parser: Parser
    args: argparse.Namespace
    program: str
    process: Process
    plan: Plan
    output_dir: Path
    resume_path: Path | None
    origin: StartInfo
    watchdog: Watchdog
    resumed: CheckpointInfo | None
    encoder_flag: str
    first_weights: EncoderSource | None
    notes: list[str]

    @classmethod
    @contextmanager
    def begin(
        cls,
        program: str,
        parser: Parser,
        args: argparse.Namespace,
        argv: Sequence[str] | None = None,
        *,
        check: Callable[[argparse.Namespace, Plan], None],
        encoder_flag: str,
        default_batch_size: int = 64,
        fitting_batch: Callable[[int, str], int] | None = None,
    ) -> Iterator["Run"]:
        """Begins a program that trains, see `begin`: checks its flags, takes the folder and finds out what to resume.

        The watchdog looks. check: refuses the program's own flags before the folder is touched. default_batch_size,
        fitting_batch: see `make_plan`.
        """
        output_dir = Path(args.output_dir)
        with begin(program, parser, args, None, trains=True) as (process, _), ExitStack() as stack:
            has_folder = threading.Event()

            def record(why: str) -> None:
                if has_folder.is_set():  # until then it may be that of another run
                    record_failure(output_dir, why)

            patience = first_timeout(args.dist_timeout, args.compile)
            watchdog = stack.enter_context(Watchdog(args.dist_timeout, patience, process.rank, record))
            with user_errors(parser):
                watchdog.set_up("output folder")
                plan = make_plan(args, process, default_batch_size, fitting_batch)
                check(args, plan)
                take_folder(output_dir, args, stack)
                has_folder.set()
                refuse_separate_folders(output_dir)
                if not args.check_data:  # which leaves the folder as it is
                    collectives.run_on_rank0(lambda: remove_leftovers(output_dir))
                # Rank 0 chooses, so that all ranks resume from the same file.
                resume_path, remarks = collectives.run_on_rank0(lambda: find_checkpoint(output_dir, args.resume))
                origin = describe_start(program, argv)
                resumed = read_resumed(resume_path, program, plan.total_batch_size)
                path = getattr(args, encoder_flag)
                first_weights, weights_notes = find_first_weights(path, encoder_flag, resumed)
                watchdog.set_up("images")
            yield cls(
                parser=parser,
                args=args,
                program=program,
                process=process,
                plan=plan,
                output_dir=output_dir,
                resume_path=resume_path,
                origin=origin,
                watchdog=watchdog,
                resumed=resumed,
                encoder_flag=encoder_flag,
                first_weights=first_weights,
                notes=[*remarks, *weights_notes],
            )

    @property
    def began_elsewhere(self) -> bool:
        """Whether the run starts at a checkpoint of another folder than its own."""
        return self.resume_path is not None and self.resume_path.resolve().parent != self.output_dir.resolve()

    @property
    def continues_here(self) -> bool:
        """Whether the folder holds the checkpoint that the run continues from."""
        return self.resume_path is not None and not self.began_elsewhere

    @property
    def first_step(self) -> int:
        """The number of optimizer steps that are done already."""
        if self.resumed is None or self.resumed.run is None:
            return 0
        return self.resumed.run.step

    def note(self, *notes: str) -> None:
        """Keeps notes until the log opens."""
        self.notes += notes

    def load_first_weights(self, weights: Any, load: Callable[[Any], object], note_without: str = "") -> None:
        """Loads the first weights into the model of a new run, by `load(weights)`, which returns a report.

        note_without: for the log, if the run begins with random weights.
        """
        if self.resumed is not None:
            return
        self.watchdog.set_up("first weights")
        if self.first_weights is not None:
            self.note(f"encoder from {self.first_weights.path}: {load(weights)}", *self.first_weights.warnings())
        elif note_without:
            self.note(note_without)

    def open_loader(
        self,
        dataset: AddressedDataset,
        sampler: StepBatchSampler,
        collate: Callable[[Sequence[Any]], Any],
        img_size: tuple[int, int],
        steps: range,
    ) -> Loader:
        """Returns this process's batches of these steps, which workers make ahead. All ranks must call it.

        collate: makes a batch of samples, in the worker. img_size: (height, width) of the images of a batch.
        """
        plan = self.plan
        return Loader(
            dataset,
            sampler.batches(steps),
            collate,
            num_workers=plan.num_workers,
            for_gpu=plan.device == "cuda",
            batch_bytes=dataset.images.pixel_format.pixel_bytes * math.prod(img_size) * plan.batch_size,
        )

    def describe(
        self,
        images: Images,
        optimizer: torch.optim.Optimizer,
        schedule: RunSchedule,
        statistics: Statistics,
        settings: Mapping[str, Any],
        *,
        val_images: Images | None = None,
        classes: list[str] | None = None,
        class_colors: list[list[int]] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> CheckpointInfo:
        """Returns what a checkpoint of now would say. All ranks must call it.

        statistics: mean and deviation of each channel. settings: what follows from model and data; they override the
        flags. files: {flag: fingerprint} of files that the model reads.
        """
        started_from: str | None = None  # a checkpoint of another folder
        if self.began_elsewhere:
            started_from = str(self.resume_path)
        elif self.resumed is not None and self.resumed.run is not None:
            started_from = self.resumed.run.origin.started_from
        run = RunInfo(
            program=self.program,
            step=self.first_step,
            epoch=self.first_step / schedule.steps_per_epoch,
            world_size=self.process.world_size,
            data=describe_data(images),
            val_data=None if val_images is None else describe_data(val_images),
            torch=torch.__version__,
            optimizer=type(optimizer).__name__,
            origin=replace(self.origin, started_from=started_from),
            encoder=self.first_weights,
            files=dict(files or {}),
        )
        mean, std = statistics
        resolved = {**vars(self.args), **asdict(self.plan), "epochs": schedule.epochs, "mean": mean, "std": std}
        resolved |= settings
        # A resumed run keeps the path of its first weights, whatever the flag gives now.
        if self.resumed is not None:
            resolved[self.encoder_flag] = self.resumed.settings.get(self.encoder_flag)
        if images.pinned_path is not None:
            resolved["data_path"] = images.pinned_path
        for name, value in resolved.items():
            if isinstance(value, tuple):
                resolved[name] = list(value)  # as after reading JSON
        return CheckpointInfo(resolved, images.pixel_format.dtype, classes, class_colors, run)

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, info: CheckpointInfo) -> dict[str, Any]:
        """Restores model and optimizer if there is a checkpoint. Returns the rest of its state, of the loop; {} if not.

        info: what a checkpoint of now would say. ValueError if flags or data have changed in a way that changes the
        results, unless --allow_changes.
        """
        assert info.run is not None
        self.watchdog.set_up("checkpoint")
        collectives.refuse_differences(info.run.files, "model")
        if not info.is_finished:
            num_bytes = checkpoint_bytes(model, optimizer)
            collectives.run_on_rank0(lambda: check_space(self.output_dir, num_bytes, self.continues_here))
        state: dict[str, Any] = {}
        if self.resumed is not None and self.resume_path is not None:
            changes = find_changes(self.resumed, info, self.parser.changes, self.parser.flags_chosen())
            if changes and not self.args.allow_changes:
                raise ValueError(
                    f"{str(self.resume_path)!r} cannot be resumed without changing its results: {'; '.join(changes)}. "
                    "Undo that, choose another --output_dir, or accept it by --allow_changes"
                )
            state = restore(self.resume_path, self.process.need_not_verify, model, optimizer)
            if self.resumed.settings["precision"] != self.plan.precision:
                del state["scaler"]  # another precision has another loss scale
            for change in changes:
                self.note(f"warning: {change}")
            self.note(*find_notes(self.resumed, info, self.parser.changes))
            self.note(f"resuming {self.resume_path} at step {self.first_step}")
        self.watchdog.set_up("training")
        return state


def describe_data(images: Any) -> DataInfo:
    """Returns what checkpoints say about a data set."""
    return DataInfo(len(images), images.fingerprint())


def describe_start(program: str, argv: Sequence[str] | None) -> StartInfo:
    """Returns code, command line and hosts of this start. All ranks must call it. argv: None for this program's."""
    words = [redact(word) for word in (sys.argv[1:] if argv is None else argv)]
    hosts = sorted(set(collectives.gather_objects(socket.gethostname())))
    return StartInfo(collectives.run_on_rank0(code_version), shlex.join([program, *words]), hosts)
