"""What the folder of a run says about it, as a row of `scripts/list_runs.py`.

It reads small files alone, also those of a run that is writing them, and imports no torch. A file that is missing or
damaged leaves fields empty.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from socket import gethostname
from typing import Any, Literal

from util.run.cli import ERROR, LOG, PROGRESS, STOPPED
from util.run.files import search
from util.run.files.lock import LOCK, LockView, view_lock
from util.run.files.reports import read_json

# Any of these, or a checkpoint's record, makes a folder that of a run.
MARKS = (LOCK, "settings.json", "log.jsonl", "results.json", "probe.json", "robustness.json")
WRITTEN = (LOG, PROGRESS, *MARKS)  # whose times say when the run has last written
RECORD = re.compile(r"checkpoint-\d+\.json")
EARLIER = re.compile(r"earlier-\d+")  # folders with what an earlier run has reported
SKIPPED = ("tensorboard", "attention")
# runs: a process holds the folder. stopped: by a signal or --max_steps. failed: with an error. interrupted: it ended
# before its last step, and the log does not say why. unknown: it may still run on another host.
State = Literal["runs", "stopped", "finished", "failed", "interrupted", "unknown"]
MEASURES = ("top1", "miou", "box_ap")  # the main score of each program; the first that is there
TAIL = 1 << 16  # bytes
STAMP = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
COMMAND = re.compile(STAMP + r"  command +(main_\w+\.py)")  # in the summary at each start
END = re.compile(
    STAMP + rf"(?:{STOPPED}(?P<signal>.+?) after step|{ERROR}(?P<error>.+)"
    r"|(?:pre-)?trained .* for (?P<steps>\d+) steps?(?P<partial> of \d+)? on \d)"
)
STEP = re.compile(STAMP + r"epoch \d+, step (\d+)/(\d+): ")


@dataclass(frozen=True)
class RunRow:
    """A run. Fields that are unknown, or that its program does not have, are None.

    sampling, aggregation: of pre-training, where they have an effect. step, steps: optimizer steps, done and in all; of
    robustness, finished parts. why: of the state, if more is known. loss: "not finite" if it was not. best: the highest
    score of the evaluations, in percent, of robustness that of the first set; measure: its name. written: when a file
    was last written. settings: all of the run.
    """

    run: str
    program: str | None = None
    model: str | None = None
    throw_ratio: float | None = None
    sampling: str | None = None
    aggregation: str | None = None
    step: int | None = None
    steps: int | None = None
    state: State = "unknown"
    why: str = ""
    loss: float | str | None = None
    knn: float | None = None
    best: float | None = None
    measure: str | None = None
    written: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


COLUMNS = tuple(column.name for column in fields(RunRow) if column.name != "settings")


def find_runs(root: Path, note: Callable[[str], None]) -> Iterator[Path]:
    """Yields the folders of runs in `root`, which may be one itself, by name. note: is told what cannot be read."""

    def tell(error: OSError) -> None:
        note(f"{error.filename} cannot be read: {error.strerror}")

    for folder, names, files in os.walk(root, onerror=tell):
        kept = [name for name in names if not name.startswith(".") and name not in SKIPPED]
        names[:] = sorted(name for name in kept if not EARLIER.fullmatch(name))
        has_record = any(RECORD.fullmatch(name) for name in files)
        if has_record or not set(MARKS).isdisjoint(files):
            yield Path(folder)


def read_run(folder: Path) -> RunRow:
    """Reads the row of a run."""
    lock = view_lock(folder)
    if (folder / "probe.json").is_file():
        return read_probe(folder, lock)
    if (folder / "robustness.json").is_file():
        return read_robustness(folder, lock)
    results = read_json(folder / "results.json")
    if "checkpoint" in results:
        return read_evaluation(folder, lock, results)
    return read_training(folder, lock, results)


# ----------------------------------------------------------------------------------------------- programs that train


@dataclass(frozen=True)
class LogEnd:
    """What log.txt says of the last start. state: None if it has not ended, or without a word. steps: in all."""

    program: str = ""
    state: State | None = None
    why: str = ""
    steps: int | None = None


def read_training(folder: Path, lock: LockView, results: Mapping[str, Any]) -> RunRow:
    """Reads the row of a run of a program that trains. results: the content of its results.json."""
    record = newest_record(folder)
    settings = read_json(folder / "settings.json")
    if "output_dir" not in settings:  # no settings of a run
        settings = as_dict(record.get("settings"))
    log = read_log_end(folder / LOG)
    reports = Reports(folder / "log.jsonl")
    program = name_of_program(str(record.get("program") or log.program), settings)
    steps = total_steps(record) or log.steps
    last_report = reports.last("step")
    step = as_int(last_report.get("step"))
    saved_step = as_int(record.get("step"))
    if saved_step is not None:
        step = max(saved_step, step or 0)
    method = method_of(program, settings)
    evaluations = [*reports.all("val_num_images"), as_dict(results.get("last")), as_dict(results.get("best"))]
    best, measure = best_score(evaluations)
    is_complete = steps is not None and saved_step == steps
    if program != "pretrain":
        is_complete = is_complete and as_dict(results.get("last")).get("step") == steps
    state, why = find_state(folder, lock, log, is_complete)
    return RunRow(
        run=str(folder),
        program=program,
        model=as_text(settings.get("model")),
        throw_ratio=method.throw_ratio,
        sampling=method.sampling,
        aggregation=method.aggregation,
        step=step,
        steps=steps,
        state=state,
        why=why,
        loss=last_loss(reports),
        knn=as_number(reports.last("knn_top1").get("knn_top1")),
        best=best,
        measure=measure,
        written=last_written(folder),
        settings=settings,
    )


def newest_record(folder: Path) -> dict[str, Any]:
    """Returns what the newest checkpoint says beside tensors, from its .json; an empty dict without any."""
    for path in reversed(sorted_records(folder)):
        sidecar = search.read_sidecar_file(path)
        if sidecar is not None:
            return dict(sidecar["meta"])
    return {}


def sorted_records(folder: Path) -> list[Path]:
    """Returns the .json files of checkpoints, whose weights may be deleted, by their steps."""
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    return sorted((folder / name for name in names if RECORD.fullmatch(name)), key=search.step_of)


def total_steps(record: Mapping[str, Any]) -> int | None:
    """Returns the steps of the whole schedule, by the share of it at which the checkpoint was saved."""
    step = as_number(record.get("step"))
    epoch = as_number(record.get("epoch"))
    epochs = as_number(as_dict(record.get("settings")).get("epochs"))
    if not step or not epoch or not epochs:
        return None
    return round(step / epoch * epochs)


def name_of_program(file: str, settings: Mapping[str, Any]) -> str | None:
    """Returns, for example, "pretrain" for "main_pretrain.py"; "linprobe" if fine-tuning trains the head alone."""
    name = file.removeprefix("main_").removesuffix(".py")
    if not name and "throw_ratio" in settings:
        name = "pretrain"
    if name == "finetune" and settings.get("trainable_blocks") == 0:
        name = "linprobe"
    return name or None


def last_loss(reports: "Reports") -> float | str | None:
    """Returns the last reported loss, which may be "not finite"."""
    report = reports.last("loss")
    loss = as_number(report.get("loss"))
    if report and loss is None:
        return "not finite"
    return loss


@dataclass(frozen=True)
class Method:
    """What a pre-training does with masked tokens. sampling, aggregation: None where they have no effect."""

    throw_ratio: float | None = None
    sampling: str | None = None
    aggregation: str | None = None


def method_of(program: str | None, settings: Mapping[str, Any]) -> Method:
    """Returns the method of a pre-training; for other programs an empty one."""
    if program != "pretrain":
        return Method()
    throw_ratio = as_number(settings.get("throw_ratio"))
    sampling = as_text(settings.get("sampling"))
    aggregation = as_text(settings.get("aggregation"))
    if settings.get("progressive") is False:
        aggregation = "none"
    if throw_ratio == 0:
        aggregation = None
        if sampling != "attention":
            sampling = None
    return Method(throw_ratio, sampling, aggregation)


def best_score(evaluations: Sequence[Mapping[str, Any]]) -> tuple[float | None, str | None]:
    """Returns the highest score, and its name, of reports of evaluations."""
    for measure in MEASURES:
        scores = []
        for report in evaluations:
            score = as_number(report.get(f"val_{measure}"))
            if score is not None:
                scores.append(score)
        if scores:
            return max(scores), measure
    return None, None


def read_log_end(path: Path) -> LogEnd:
    """Reads the end of log.txt, and its beginning if the end does not name the program."""
    try:
        with open(path, "rb") as file:
            head = file.read(TAIL).decode(errors="replace")
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            tail = file.read(TAIL).decode(errors="replace")
    except OSError:
        return LogEnd()
    program = ""
    state: State | None = None
    why = ""
    steps = None
    for line in tail.splitlines():
        begun = COMMAND.match(line)
        reported = STEP.match(line)
        ended = END.match(line)
        if begun:
            program = begun[1]
            state = None
            why = ""
        elif reported:
            steps = int(reported[2])
        elif ended:
            state, why = describe_end(ended)
    if not program:
        first = re.search(COMMAND.pattern, head, re.MULTILINE)
        if first:
            program = first[1]
    return LogEnd(program, state, why, steps)


def describe_end(line: re.Match[str]) -> tuple[State, str]:
    """Returns (state, why) of the line in log.txt with which a start has ended."""
    if line["signal"]:
        return "stopped", line["signal"]
    if line["error"]:
        return "failed", line["error"]
    if line["partial"]:
        return "stopped", f"--max_steps {line['steps']}"
    return "finished", ""


class Reports:
    """The reports in a log.jsonl. Only lines that name what is asked for are parsed, since the log may be long."""

    def __init__(self, log: Path) -> None:
        self.lines: list[str] = []
        with suppress(OSError):
            self.lines = log.read_text(encoding="utf-8", errors="replace").splitlines()

    def _newest_first(self, name: str) -> Iterator[dict[str, Any]]:
        for line in reversed(self.lines):
            if f'"{name}"' not in line:
                continue
            with suppress(ValueError):  # a line that a kill has cut off
                report = as_dict(json.loads(line))
                if name in report and as_int(report.get("step")) is not None:
                    yield report

    def last(self, name: str) -> dict[str, Any]:
        """Returns the last report with a value of this name; an empty dict if there is none."""
        return next(self._newest_first(name), {})

    def all(self, name: str) -> list[dict[str, Any]]:
        """Returns all reports with a value of this name, the newest first."""
        return list(self._newest_first(name))


# ----------------------------------------------------------------------------- programs that evaluate without training


def read_probe(folder: Path, lock: LockView) -> RunRow:
    """Reads the row of a folder of main_probe.py."""
    content = read_json(folder / "probe.json")
    settings = as_dict(content.get("settings"))
    parts = as_dict(content.get("parts"))
    scores: dict[str, float] = {}
    for row in as_list(content.get("results")):
        score = as_number(as_dict(row).get("top1"))
        if score is not None:
            name = str(row.get("probe"))
            scores[name] = max(score, scores.get(name, score))
    best = None
    measure = None
    if scores:
        name = max(scores, key=lambda name: scores[name])
        best = scores[name]
        measure = f"top1 {name}"
    missing = []
    for name in as_list(settings.get("probes")):
        part = "knn" if name == "knn" else "heads"
        if part not in parts:
            missing.append(name)
    state, why = find_state(folder, lock, LogEnd(), bool(content) and not missing)
    return RunRow(
        run=str(folder),
        program="probe",
        model=as_text(content.get("checkpoint")),
        state=state,
        why=why,
        knn=scores.get("knn"),
        best=best,
        measure=measure,
        written=last_written(folder),
        settings=settings,
    )


def read_robustness(folder: Path, lock: LockView) -> RunRow:
    """Reads the row of a folder of main_robustness.py. Which sets were asked for is not known, so it has no `steps`."""
    path = folder / "robustness.json"
    content = read_json(path)
    best = None
    measure = None
    for name, figures in as_dict(content.get("summary")).items():
        for figure in ("mce", "top1"):
            best = as_number(as_dict(figures).get(figure))
            if best is not None:
                measure = f"{figure} {name}"
                break
        if measure:
            break
    # The table is written at the end.
    is_complete = bool(content) and (time_of(path.with_suffix(".md")) or 0) >= (time_of(path) or 0)
    state, why = find_state(folder, lock, LogEnd(), is_complete)
    return RunRow(
        run=str(folder),
        program="robustness",
        model=as_text(content.get("checkpoint")),
        step=len(as_dict(content.get("parts"))),
        state=state,
        why=why,
        best=best,
        measure=measure,
        written=last_written(folder),
        settings=as_dict(content.get("settings")),
    )


def read_evaluation(folder: Path, lock: LockView, results: Mapping[str, Any]) -> RunRow:
    """Reads the row of a folder of a main with --eval."""
    last = as_dict(results.get("last"))
    best, measure = best_score([last])
    is_complete = (time_of(folder / "results.json") or 0) >= (time_of(folder / LOCK) or 0)
    state, why = find_state(folder, lock, LogEnd(), is_complete)
    return RunRow(
        run=str(folder),
        program="eval",
        model=as_text(results.get("checkpoint")),
        step=as_int(last.get("step")),
        state=state,
        why=why,
        best=best,
        measure=measure,
        written=last_written(folder),
    )


# ------------------------------------------------------------------------------------------------------------- state


def find_state(folder: Path, lock: LockView, log: LogEnd, is_complete: bool) -> tuple[State, str]:
    """Returns (state, why). is_complete: whether the files hold all that the run was to make.

    A lock that is not held means that no process works in the folder, but for a lock of another host: file systems may
    hide it.
    """
    if lock.is_held:
        return "runs", lock.holder
    is_hidden = lock.is_held is None or lock.host not in ("", gethostname())
    if not lock.holder and (folder / LOCK).exists():
        is_hidden = True  # the file system had no locks, or a start has just begun
    started = time_of(folder / LOCK) or 0
    has_started_again = started > (time_of(folder / LOG) or 0)
    if log.state and not (is_hidden and has_started_again):
        return log.state, log.why
    if is_complete:
        return "finished", ""
    if is_hidden:
        return "unknown", f"its lock is not visible here: {lock.holder or 'no process is named'}"
    return "interrupted", "its log does not say why"


def last_written(folder: Path) -> str | None:
    """Returns when one of the run's files was last written, in local time."""
    times = [time_of(folder / name) or 0 for name in WRITTEN]
    if not any(times):
        return None
    return datetime.fromtimestamp(max(times)).isoformat(" ", "seconds")


def time_of(path: Path) -> float | None:
    """Returns when a file was last written; None if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


# ---------------------------------------------------------------------------------- values of files that may be damaged


def as_dict(value: Any) -> dict[str, Any]:
    """Returns the value if it is a dict, or else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Returns the value if it is a list, or else an empty one."""
    return value if isinstance(value, list) else []


def as_text(value: Any) -> str | None:
    """Returns the value if it is text."""
    return value if isinstance(value, str) else None


def as_int(value: Any) -> int | None:
    """Returns the value if it is an integer."""
    return value if type(value) is int else None


def as_number(value: Any) -> float | None:
    """Returns the value if it is a finite number."""
    if type(value) not in (int, float) or not math.isfinite(value):
        return None
    return value
