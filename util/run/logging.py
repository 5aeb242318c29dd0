"""What a run tells: a progress bar or plain lines, `log.txt`, `log.jsonl` and TensorBoard."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class RunLog:
    """The run's log. Only rank 0 writes (`enabled`); on the others every method does nothing.

    On a terminal a progress bar shows the latest values; elsewhere, and always in `log.txt`, they are plain lines.
    `log.jsonl` holds one JSON object per report. A resumed run moves what was reported after its first step to
    `log-superseded.jsonl`, so that each step stands in `log.jsonl` once. Neither a full disk nor a console that is gone
    ends a run: reports wait in memory until they can be written, TensorBoard's are dropped, and so is the console's text.
    """

    def __init__(self, output_dir: str | Path, start_step: int, end_step: int, enabled: bool = True) -> None:
        self.enabled = enabled
        if not enabled:
            return
        output_dir = Path(output_dir)
        self.text = open(output_dir / "log.txt", "a", encoding="utf-8")
        self.reports = ReportFile(output_dir / "log.jsonl", start_step)
        self.tensorboard: SummaryWriter | None = SummaryWriter(output_dir / "tensorboard", purge_step=start_step + 1)
        columns = terminal_columns(sys.stderr)
        size = {"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 24}  # some terminals report 0 x 0
        self.bar = tqdm(total=end_step, initial=start_step, unit="step", disable=not sys.stderr.isatty(), **size)

    def info(self, message: str) -> None:
        """A sentence, on the console and in log.txt."""
        if self.enabled:
            self._write(message)
            with surviving(sys.stderr):
                self.bar.clear()
            print_line(message)

    def _write(self, message: str) -> None:
        with suppress(OSError):  # a full disk, of which the console tells
            self.text.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
            self.text.flush()

    def advance(self) -> None:
        """One optimizer step is done."""
        if self.enabled:
            with surviving(sys.stderr):
                self.bar.update()

    def report(self, step: int, scalars: dict, line: str, postfix: str, interim: bool = False) -> None:
        """Values at `step`: `scalars` to log.jsonl and TensorBoard, `line` to log.txt, `postfix` to the bar.

        An `interim` report, at a stop between two regular ones, is marked as such and dropped when the run goes on.
        """
        if not self.enabled:
            return
        was_full = bool(self.reports.unwritten)
        problem = self.reports.append({"step": step, **scalars} | ({"interim": True} if interim else {}))
        if problem and not was_full:
            self.info(f"warning: {self.reports.path} cannot be written ({problem}); its lines are kept until it can be")
        for name, value in scalars.items():
            if value is not None and not interim:
                self._to_tensorboard("add_scalar", name, value, step)
        if self.bar.disable:
            self.info(line)
        else:
            self._write(line)
            with surviving(sys.stderr):
                self.bar.set_postfix_str(postfix)

    def _to_tensorboard(self, method: str, *values: object, **options: object) -> None:
        """Calls the SummaryWriter, which is given up with a warning once it cannot write."""
        if self.tensorboard is None:
            return
        try:
            getattr(self.tensorboard, method)(*values, **options)
        except OSError as error:
            self.tensorboard = None
            self.info(f"warning: TensorBoard's file cannot be written ({error}); this start writes no more to it")

    def history(self) -> list[dict]:
        """All reports so far, those before a resume included."""
        return list(self.reports.content) if self.enabled else []

    def picture(self, name: str, picture: np.ndarray, step: int) -> None:
        """uint8 array [H, W, 3] to TensorBoard."""
        if self.enabled:
            self._to_tensorboard("add_image", name, picture, step, dataformats="HWC")

    def close(self) -> None:
        if self.enabled:
            self._to_tensorboard("close")
            with surviving(sys.stderr):
                self.bar.close()
            problem = self.reports.flush()
            if problem:
                print_line(f"warning: {self.reports.path} cannot be written ({problem}): its last lines are lost")
            with suppress(OSError):
                self.text.close()


class ReportFile:
    """A JSON-lines file of reports, each with its "step". Opening it drops the reports after `start_step`, and interim ones.

    What is dropped (the run makes these steps again) is appended to NAME-superseded.jsonl. Lines that
    cannot be written, as on a full disk, are written together with a later one.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        self.path, self.content, self.unwritten = path, [], b""
        kept, dropped = [], []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                report = json.loads(line)
            except ValueError:  # cut off by a crash
                continue
            if not isinstance(report, dict) or "step" not in report:
                dropped.append(line)
            elif report["step"] <= start_step and not report.get("interim"):
                kept.append(line)
                self.content.append(report)
            else:
                dropped.append(line)
        if dropped:
            with open(path.with_name(f"{path.stem}-superseded{path.suffix}"), "a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in dropped))
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, path)
        self.file = open(path, "ab", buffering=0)

    def append(self, report: dict) -> OSError | None:
        """Adds a report; -> why it cannot be written now, if it cannot."""
        self.content.append(report)
        self.unwritten += (json.dumps(report) + "\n").encode()
        return self.flush()

    def flush(self) -> OSError | None:
        """Writes the lines that are not in the file yet; -> why that is not possible, if it is not."""
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            return error
        return None


@contextmanager
def surviving(stream: TextIO) -> Iterator[None]:
    """Inside it, a stream that cannot be written to any more becomes /dev/null, instead of ending the program.

    Its terminal was closed, the reader of its pipe is dead, or its disk is full.
    """
    try:
        yield
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError):
            os.dup2(null, stream.fileno())  # what is still buffered goes there, too
        os.close(null)


def print_line(message: str, stream: TextIO | None = None) -> None:
    """Prints to stdout, or to `stream`, if anybody can still read it."""
    stream = sys.stdout if stream is None else stream
    with surviving(stream):
        print(message, file=stream, flush=True)


def terminal_columns(stream: TextIO) -> int:
    """The width of the terminal behind `stream`; 0 where it does not say, or where there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def count_of(number: int, noun: str) -> str:
    """ "1 image", "2 images", "2 processes"."""
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch")) else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def duration(seconds: float) -> str:
    """1:02:03, without fractions."""
    return str(timedelta(seconds=round(seconds)))
