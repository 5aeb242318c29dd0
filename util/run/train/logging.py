"""The log of a run: a progress bar or plain lines, `log.txt`, `log.jsonl` and TensorBoard."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import nn
from torch.profiler import profile, schedule
from tqdm import tqdm

from util import collectives
from util.atomic import replaced_file
from util.pictures import save
from util.run.files.json_files import LOG, read_reports, set_aside_earlier_run, write_json
from util.run.files.record import CheckpointInfo
from util.run.start.plan import RunSchedule
from util.run.start.run import Run
from util.text import count_of, printable

TRACED_STEPS = 3  # of --profile


class RunLog:
    """Writes the log of a run, on rank 0 only (`enabled`). On other ranks every method does nothing.

    A terminal shows a progress bar below the lines. `log.jsonl` holds one JSON object per report. On resume, reports
    after `start_step` are removed from it, so that it holds each step once. Methods raise OSError if a file cannot be
    written. A closed console ends no run, since the signal that closed it must not stop the save.
    """

    def __init__(
        self,
        output_dir: str | Path,
        start_step: int,
        end_step: int,
        enabled: bool = True,
        prints: bool = False,
    ) -> None:
        """prints: whether `info` prints if not enabled."""
        self.enabled = enabled
        self.prints = prints
        if not enabled:
            return
        self.output_dir = Path(output_dir)
        self.text = open(self.output_dir / LOG, "a", encoding="utf-8")
        self.last_kept = start_step or -1  # a new run repeats what an earlier one has reported at step 0
        path = self.output_dir / "log.jsonl"
        self.reports: list[dict[str, Any]] = []
        for report in read_reports(path):
            if report["step"] <= self.last_kept and "interim" not in report:
                self.reports.append(report)
        with replaced_file(path, durable=True) as temporary:
            temporary.write_text("".join(json.dumps(report) + "\n" for report in self.reports))
        self.json_lines = open(path, "a", encoding="utf-8")
        self.profiler: profile | None = None  # while it may trace
        self.tensorboard: Any = None  # a SummaryWriter, made with the first report: a start that fails leaves none
        # Some terminals report a size of 0 x 0, in which tqdm shows nothing.
        has_bar = sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
        self.bar = tqdm(total=end_step, initial=start_step, unit="step", disable=not has_bar, dynamic_ncols=True)

    def info(self, message: str) -> None:
        message = printable(message)
        if self.enabled:
            self.text.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
            self.text.flush()
            with redirect_if_broken(sys.stderr):
                self.bar.clear()
        if self.enabled or self.prints:
            with redirect_if_broken(sys.stdout):
                print(message, flush=True)

    @contextmanager
    def traced(self, first: int | None, start_step: int, end_step: int) -> Iterator[None]:
        """Context of training the steps from `start_step` on. Those after step `first` are written as a trace.

        TRACED_STEPS of them, or those before `end_step`. first: None for no trace, which then costs nothing.
        """
        if not self.enabled or first is None or not start_step <= first < end_step:
            yield
            return

        def write(profiler: profile) -> None:
            path = self.output_dir / f"trace-{first}.json"
            profiler.export_chrome_trace(str(path))
            self.info(f"trace of the steps from {first + 1} on: {path}")

        warmup = min(1, first - start_step)
        active = min(TRACED_STEPS, end_step - first)
        steps = schedule(wait=first - start_step - warmup, warmup=warmup, active=active, repeat=1)
        with profile(schedule=steps, on_trace_ready=write) as self.profiler:
            yield
        self.profiler = None

    def advance(self) -> None:
        """Counts a step."""
        if not self.enabled:
            return
        if self.profiler is not None:
            self.profiler.step()
        if not self.bar.disable:
            with redirect_if_broken(sys.stderr):
                self.bar.update()

    def report(self, step: int, scalars: Mapping[str, float | None], line: str, interim: bool = False) -> None:
        """Writes values at `step`: `scalars` to log.jsonl and TensorBoard, `line` as `info` does.

        An `interim` report is made at a stop between two regular ones. It is marked, and removed on resume.
        """
        if not self.enabled:
            return
        report = {"step": step, **scalars}
        if interim:
            report["interim"] = True
        self.reports.append(report)
        self.json_lines.write(json.dumps(report) + "\n")
        self.json_lines.flush()
        if not interim:
            for name, value in scalars.items():
                if value is not None:
                    self._events().add_scalar(name, value, step)
        self.info(line)

    def _events(self) -> Any:
        if self.tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = self.output_dir / "tensorboard"
            self.tensorboard = SummaryWriter(folder, purge_step=self.last_kept + 1)
        return self.tensorboard

    def history(self) -> list[dict[str, Any]]:
        """Returns all reports so far, including those before a resume."""
        return list(self.reports) if self.enabled else []

    def picture(self, file_name: str, picture: np.ndarray, step: int) -> None:
        """Sends a picture to TensorBoard, and writes it to the output folder, over an older one."""
        if not self.enabled:
            return
        self._events().add_image(Path(file_name).stem, picture, step, dataformats="HWC")
        try:
            save(picture, self.output_dir / file_name)
        except OSError as error:  # a full disk; other processes would wait for this one
            self.info(f"warning: {file_name} could not be written ({error}); training goes on")

    def close(self) -> None:
        if not self.enabled:
            return
        with redirect_if_broken(sys.stderr):
            self.bar.close()
        if self.tensorboard is not None:
            self.tensorboard.close()
        self.json_lines.close()
        self.text.close()


def summary_rows(name: str, model: nn.Module, num_classes: int, images: Any, val_images: Any) -> dict[str, str]:
    """Returns what is printed about model and data at the start. name: of the model."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    return {
        "model": f"{name}, {trained:.2f} M trainable parameters",
        "classes": str(num_classes),
        "train": f"{count_of(len(images), 'image')} in {images.root}",
        "val": f"{count_of(len(val_images), 'image')} in {val_images.root}",
    }


def open_log(run: Run, schedule: RunSchedule, info: CheckpointInfo, rows: Mapping[str, str]) -> RunLog:
    """Opens the log, and writes the summary and all notes so far to it, and settings.json. All ranks must call it.

    info: what a checkpoint of now would say. rows: of the summary, about model and data. With --check_data all is
    printed alone.
    """
    args = run.args
    plan = run.plan
    process = run.process
    writes = process.is_main and not args.check_data
    if not run.continues_here and not args.check_data:
        run.note(*collectives.run_on_rank0(lambda: set_aside_earlier_run(run.output_dir)))
    last_step = schedule.last_step(args.max_steps)
    log = RunLog(run.output_dir, run.first_step, last_step, writes, prints=process.is_main)
    if writes:
        write_json(run.output_dir / "settings.json", info.settings)
    processes = count_of(process.world_size, "process")
    common = {
        "batch": f"{plan.total_batch_size} = {plan.batch_size} x {processes} x {plan.accum_iter} accumulated",
        "schedule": schedule.summary,
        "device": f"{processes} on {plan.device} in {plan.precision}",
        "code": run.origin.code,
        "command": f"{run.origin.command} on {', '.join(run.origin.hosts)}",
        "output": str(run.output_dir),
    }
    if plan.device == "cuda" and torch.cuda.device_count() > 1 and process.world_size == 1:
        run.note(f"note: 1 of {torch.cuda.device_count()} GPUs is used; torchrun --nproc_per_node uses more")
    if args.compile:
        run.note("note: the first step compiles the model, and nothing is reported before (--no-compile)")
    summary = {**rows, **common}
    width = max(map(len, summary))
    for name, value in summary.items():
        log.info(f"  {name:<{width}}  {value}")
    for note in run.notes:
        log.info(note)
    return log


@contextmanager
def redirect_if_broken(stream: TextIO) -> Iterator[None]:
    """If `stream` cannot be written any more (closed terminal or pipe, full disk), redirects it to /dev/null."""
    try:
        yield
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError):
            os.dup2(null, stream.fileno())  # its buffer goes there, too
        os.close(null)
