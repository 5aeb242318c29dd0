"""The JSON files of a run: settings, results, reports, state."""

import json
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from util.atomic import replaced_file
from util.text import printable

STATE = "run.json"
LOG = "log.txt"
# What a run that starts anew would replace or continue. The log comes last: see `set_aside_earlier_run`.
REPORTS = (
    "results.json",
    "checkpoint-best.json",
    "settings.json",
    "tensorboard",
    "attention",
    "log.jsonl",
)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file; an empty dict if it is missing or damaged."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_reports(log: Path) -> list[dict[str, Any]]:
    """Returns the reports in a log.jsonl, without lines that a kill has cut off; [] if there is no such file."""
    if not log.is_file():
        return []
    reports = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            reports.append(json.loads(line))
    return reports


def set_aside_earlier_run(folder: Path) -> list[str]:
    """Moves what an earlier run has reported to `earlier-1`, or the next free number. Returns a note for the log.

    Its checkpoints were removed or copied without their records, or it was killed before the first one. For a run that
    begins in this folder.
    """
    checkpoints = sorted(folder.glob("checkpoint-*.pth"))  # the run would overwrite them
    has_results = (folder / "results.json").exists()
    if not read_reports(folder / "log.jsonl") and not has_results and not checkpoints:
        return []
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    aside = folder / f"earlier-{number}"
    aside.mkdir()
    for path in [*checkpoints, *(folder / name for name in REPORTS)]:
        if path.exists():
            path.rename(aside / path.name)
    return [f"note: the folder held a run without a checkpoint to resume: what was there is in {aside.name}"]


def write_json(path: Path, content: object) -> None:
    with replaced_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def write_state(output_dir: str | Path, state: str | None = None, why: str = "", **values: object) -> None:
    """Writes how a run is to run.json, beside what the file says already.

    state: "running", "finished", "stopped" by a signal or by --max_steps, or "failed"; None: as before. values:
    program, model, step, last_step. A killed run is still "running": nobody holds its lock. OSError is ignored.
    """
    path = Path(output_dir) / STATE
    content = {**read_json(path), **values}
    if state is not None:
        content |= {"state": state, "why": why}
    content["time"] = datetime.now().isoformat(" ", "seconds")
    content["host"] = socket.gethostname()
    try:
        write_json(path, content)
    except OSError:  # on a full disk there is still the place of the file itself
        with suppress(OSError), open(path, "r+") as file:
            file.write(json.dumps(content))
            file.truncate()


def record_failure(output_dir: Path, why: str, **values: object) -> None:
    """Writes why this process fails to the run's log, and to run.json if it is the first one that does.

    The others may fail because of it, and would name a closed connection. values: see `write_state`. Nothing is written
    where no run has begun. OSError is ignored: the disk may be what fails.
    """
    log = output_dir / LOG
    before = read_json(output_dir / STATE)
    if before.get("state") == "failed" and before.get("why") == why:  # all ranks raise the same error
        return
    with suppress(OSError):
        if log.exists():
            with open(log, "a", encoding="utf-8", errors="replace") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} error: {printable(' '.join(why.split()))}\n")
    if before.get("state", "failed") != "failed":
        write_state(output_dir, "failed", why, **values)
