"""The log of a run: a progress bar or plain lines, `log.txt`, `log.jsonl` and TensorBoard."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from util.atomic import replaced_file
from util.lazy import LazyModule

events = LazyModule("util.run.events")  # which imports TensorBoard


class RunLog:
    """Writes the log of a run, on rank 0 only (`enabled`). On other ranks every method does nothing.

    A terminal shows a progress bar with the latest values. Without a terminal, and always in `log.txt`, they are plain
    lines. `log.jsonl` holds one JSON object per report. On resume, reports after `start_step` move to
    `log-superseded.jsonl`, so that `log.jsonl` holds each step once. A full disk or a closed console never ends a run:
    reports are kept in memory until they can be written; output for TensorBoard and the console is dropped.
    """

    def __init__(
        self, output_dir: str | Path, start_step: int, end_step: int, enabled: bool = True, steps_per_epoch: int = 0
    ) -> None:
        """steps_per_epoch: if given, the progress bar shows the epoch."""
        self.enabled, self.steps_per_epoch = enabled, steps_per_epoch
        if not enabled:
            return
        output_dir = Path(output_dir)
        self.text = open(output_dir / "log.txt", "a", encoding="utf-8")
        done = start_step or -1  # a new run repeats what an earlier one has reported at step 0
        self.reports = ReportFile(output_dir / "log.jsonl", done)
        self.tensorboard: Any = None  # an EventFile, made with the first report: a start that fails leaves none
        self.open_tensorboard: Callable[[], Any] | None
        self.open_tensorboard = lambda: events.EventFile(output_dir / "tensorboard", purge_step=done + 1)
        # Some terminals report a size of 0 x 0.
        size = {"dynamic_ncols": True} if terminal_columns(sys.stderr) else {"ncols": 80, "nrows": 24}
        options = {"unit": "step", "file": sys.stderr, "disable": not sys.stderr.isatty(), **size}
        self.bar = tqdm(total=end_step, initial=start_step, **options)

    def start_summary(self, rows: Mapping[str, str]) -> None:
        """Writes one aligned line per row, such as `batch    4096 = 64 x 8 processes x 8 accumulated`."""
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            self.info(f"  {name:<{width}}  {value}")

    def info(self, message: str) -> None:
        if self.enabled:
            self._write(message)
            with redirect_if_broken(sys.stderr):
                self.bar.clear()
            print_line(message)

    def write_to_file(self, message: str) -> None:
        if self.enabled:
            self._write(message)

    def _write(self, message: str) -> None:
        with suppress(OSError):  # a full disk, which the console reports
            self.text.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
            self.text.flush()

    def advance(self) -> None:
        if self.enabled:
            with redirect_if_broken(sys.stderr):
                if self.steps_per_epoch:
                    self.bar.set_description_str(f"epoch {self.bar.n // self.steps_per_epoch}", refresh=False)
                self.bar.update()

    def report(
        self, step: int, scalars: Mapping[str, float | None], line: str, postfix: str, interim: bool = False
    ) -> None:
        """Writes values at `step`: `scalars` to log.jsonl and TensorBoard, `line` to log.txt, `postfix` to the bar.

        An `interim` report is made at a stop between two regular ones. It is marked, and dropped on resume.
        """
        if not self.enabled:
            return
        was_full = bool(self.reports.unwritten)
        report = {"step": step, **scalars}
        if interim:
            report["interim"] = True
        problem = self.reports.append(report)
        if problem and not was_full:
            self.info(f"warning: {self.reports.path} cannot be written ({problem}); its lines are kept until it can be")
        for name, value in scalars.items():
            if value is not None and not interim:
                self._to_tensorboard("add_scalar", name, value, step)
        if self.bar.disable:
            self.info(line)
        else:
            self._write(line)
            with redirect_if_broken(sys.stderr):
                self.bar.set_postfix_str(postfix)

    def _to_tensorboard(self, method: str, *values: object) -> None:
        """Calls the EventFile. After the first failed write it is dropped, with a warning."""
        if self.open_tensorboard is None:
            return
        try:
            if self.tensorboard is None:
                self.tensorboard = self.open_tensorboard()
            getattr(self.tensorboard, method)(*values)
        except OSError as error:
            self.open_tensorboard = None
            self.info(f"warning: TensorBoard's file cannot be written ({error}); this start writes no more to it")

    def renew(self) -> bool:
        """Writes all reports again if the files were deleted, and returns whether they were. log.txt begins anew."""
        path = self.reports.path
        if path.exists():
            return False
        self.text = open(self.text.name, "a", encoding="utf-8")
        self.reports.write_all()
        self.tensorboard = None
        self.open_tensorboard = lambda: events.EventFile(path.parent / "tensorboard")
        for report in self.history():
            for name, value in report.items():
                if value is not None and name != "step" and "interim" not in report:
                    self._to_tensorboard("add_scalar", name, value, report["step"])
        return True

    def history(self) -> list[dict[str, Any]]:
        """Returns all reports so far, including those before a resume."""
        return list(self.reports.content) if self.enabled else []

    def picture(self, name: str, picture: np.ndarray, step: int) -> None:
        if self.enabled:
            self._to_tensorboard("add_picture", name, picture, step)

    def close(self) -> None:
        """Writes what is still in memory and closes all files."""
        if self.enabled:
            if self.tensorboard is not None:
                self._to_tensorboard("close")
            with redirect_if_broken(sys.stderr):
                self.bar.close()
            problem = self.reports.flush()
            if problem:
                print_line(f"warning: {self.reports.path} cannot be written ({problem}): its last lines are lost")
            with suppress(OSError):
                self.text.close()


class ReportFile:
    """A JSON-lines file of reports, each with its "step". Lines that cannot be written are kept for the next write.

    On opening, interim reports and those after `start_step`, which the run repeats, move to NAME-superseded.jsonl.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        self.path = path
        self.content: list[dict[str, Any]] = []
        self.unwritten = b""
        dropped = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                report = json.loads(line)
            except ValueError:  # cut off by a crash
                continue
            is_kept = isinstance(report, dict) and report.get("step", start_step + 1) <= start_step
            if is_kept and "interim" not in report:
                self.content.append(report)
            else:
                dropped.append(line + "\n")
        if dropped:
            with open(path.with_name(f"{path.stem}-superseded{path.suffix}"), "a", encoding="utf-8") as file:
                file.writelines(dropped)
        self.write_all()

    def write_all(self) -> None:
        """Writes the file anew and opens it."""
        with replaced_file(self.path) as temporary:
            temporary.write_text("".join(json.dumps(report) + "\n" for report in self.content))
        self.file, self.unwritten = open(self.path, "ab", buffering=0), b""

    def append(self, report: dict[str, Any]) -> OSError | None:
        """Adds a report. Returns the error if it cannot be written now."""
        self.content.append(report)
        self.unwritten += (json.dumps(report) + "\n").encode()
        return self.flush()

    def flush(self) -> OSError | None:
        """Writes all lines that are not in the file yet. Returns the error if that fails."""
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            return error
        return None


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


def print_line(message: str, stream: TextIO | None = None) -> None:
    """Prints to `stream` (default: stdout), unless that is closed."""
    stream = sys.stdout if stream is None else stream
    with redirect_if_broken(stream):
        print(message, file=stream, flush=True)


def terminal_columns(stream: TextIO) -> int:
    """Returns the width of the terminal behind `stream`, or 0 if it is unknown or there is no terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0
