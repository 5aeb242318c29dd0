"""Inject the faults of docs/faults.md into small runs, and write down what happened.

    python tools/fault_matrix.py --repeats 5 --markdown docs/faults.md
    python tools/fault_matrix.py --rows F12 U31 --markdown docs/faults.md   # these rows anew, the others stay

A row is made of the tests with one mark `fault`: F1, F2, ... are faults of the cluster, U1, U2, ... actions of users.
Faults at random times are repeated `--repeats` times. Rows that this machine cannot run (they need SLURM, or a file
system that root may fill) are listed with the reason. The CSV beside the document holds all values: how many tests of
a row ran and held, all that they measured, and the commit, date, libraries and machine of the run. The table of the
document shows the faults, and those actions that did not hold.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.run.cli import Parser, run_program, user_errors
from util.tables import markdown_table, read_csv, write_csv

ROOT = Path(__file__).resolve().parents[1]
MARKER = "<!-- table -->"  # the text below this line of the document is the tool's
COLUMNS = ["row", "action", "expected", "ran", "held", "not_run", "measured", "commit", "run"]


def run_tests(repeats: int, rows: Sequence[str] | None) -> ElementTree.Element:
    """Runs the tests of all rows, or of those named, and return pytest's report as XML."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "fault", f"--repeats={repeats}", "--timeout=3600"]
        command += [f"--junitxml={report}"]
        if rows:
            command += [f"--faults={','.join(rows)}"]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PRMIM_LONG_TESTS": "1"}, check=False)
        if done.returncode not in (0, 1):
            raise ValueError(f"pytest ended with exit code {done.returncode}; its message is above")
        return ElementTree.parse(report).getroot()


def read_report(report: ElementTree.Element, commit: str, run: str) -> list[dict[str, Any]]:
    """Reads the rows, as in the CSV, from pytest's report."""
    rows: dict[str, dict[str, Any]] = {}
    for case in report.iter("testcase"):
        properties = [(p.get("name"), p.get("value") or "") for p in case.iter("property")]
        measured = [value for name, value in properties if name == "measured"]
        for mark in (value for name, value in properties if name == "fault"):
            number, action, expected = mark.split(" | ")
            new = dict(row=number, action=action, expected=expected, ran=0, held=0, not_run="", measured="")
            row = rows.setdefault(mark, new | dict(commit=commit, run=run))
            if (skipped := case.find("skipped")) is not None:
                row["not_run"] = skipped.get("message") or "skipped"
                continue
            row["ran"] += 1
            row["held"] += case.find("failure") is None and case.find("error") is None
            row["measured"] = "; ".join(filter(None, [row["measured"], *measured]))
    return list(rows.values())


def commit_at_hand() -> str:
    """Returns the commit that is checked out, with "+ changes" if files differ from it. Documents do not count."""
    head, changes = (
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for command in (
            ["rev-parse", "--short=10", "HEAD"],
            ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs"],
        )
    )
    return f"{head} + changes" if changes else head


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    cpu = found[1] if found else platform.machine()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}"
    return f"{versions}; {len(os.sched_getaffinity(0))} cores of {cpu}, {gpu}"


def order(row: Mapping[str, Any]) -> tuple[str, int, str]:
    found = re.fullmatch(r"([FU])(\d+)(\w*)", row["row"])
    assert found, row
    return found[1], int(found[2]), found[3]


def outcome(row: Mapping[str, Any]) -> str:
    """Returns the last cell of a row: what was expected, and what did not hold."""
    if not row["ran"]:
        return f"{row['expected']} (**not run**: {row['not_run']})"
    if row["held"] < row["ran"]:
        return f"{row['expected']} (**held in {row['held']} of {row['ran']} tests**)"
    return str(row["expected"])


def document(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns what was run when, how many rows held, and the table: all faults, and actions that did not hold."""
    runs: dict[tuple[str, str], list[str]] = {}  # consecutive rows become one range
    before = None
    for row in rows:
        run = row["commit"], row["run"]
        own = runs.setdefault(run, [])
        if run == before:
            own[-1] = f"{own[-1].partition('-')[0]}-{row['row']}"
        else:
            own.append(row["row"])
        before = run
    lines = [f"- `{commit}`, {run.partition(',')[0]}: {', '.join(own)}\n" for (commit, run), own in runs.items()]
    text = f"Commits:\n\n{''.join(lines)}\nIn the last run of each: "
    for letter, title in (("F", "faults of a cluster"), ("U", "actions of users")):
        run_rows = [row for row in rows if row["row"].startswith(letter) and row["ran"]]
        held = sum(row["held"] == row["ran"] for row in run_rows)
        text += f"{held} of {len(run_rows)} {title} held. "
    shown = [row for row in rows if row["row"].startswith("F") or row["held"] < row["ran"] or not row["ran"]]
    cells = [[f"{row['row']} {row['action']}".replace("|", r"\|"), outcome(row).replace("|", r"\|")] for row in shown]
    return f"{text.strip()}\n\n{markdown_table(['Fault', 'Expected'], cells, left=2)}\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; `argv` replaces the command line. The exit code is 1 if a row did not hold."""
    parser = Parser("fault_matrix.py", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of faults at random times")
    parser.add_argument("--rows", nargs="+", metavar="ID", help="rows to run, such as F12 (default: all)")
    help_text = f"write the table below the line `{MARKER}` of this file, and all values to the CSV beside it; "
    parser.add_argument("--markdown", type=Path, help=f"{help_text}with --rows the other rows of the CSV stay")
    args = parser.parse_args(argv)
    start, now = time.monotonic(), datetime.now(timezone.utc)
    with user_errors(parser):
        report = run_tests(args.repeats, args.rows)
        minutes = (time.monotonic() - start) / 60
        run = f"{now:%Y-%m-%d}, {minutes:.0f} minutes, repetitions {args.repeats}; {machine()}"
        measured = read_report(report, commit_at_hand(), run)
        rows = measured
        if args.markdown and args.rows:
            names = {row["row"] for row in measured}
            earlier = read_csv(args.markdown.with_suffix(".csv"), COLUMNS, COLUMNS)
            earlier = [row | {column: int(row[column]) for column in ("ran", "held")} for row in earlier]
            rows = measured + [row for row in earlier if row["row"] not in names]
    rows = sorted(rows, key=order)
    text = document(rows)
    print(text)
    if args.markdown:
        before = args.markdown.read_text().partition(MARKER)[0]
        args.markdown.write_text(f"{before}{MARKER}\n\n{text}")
        write_csv(args.markdown.with_suffix(".csv"), COLUMNS, rows)
    if not measured or any(row["ran"] != row["held"] for row in measured):
        parser.exit(1, "fault_matrix.py: error: not every row held\n")


if __name__ == "__main__":
    run_program(main, "fault_matrix.py")
