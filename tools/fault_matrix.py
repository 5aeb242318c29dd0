"""Inject the faults of docs/faults.md into small runs, and write down what happened.

    python tools/fault_matrix.py --repeats 5 --markdown docs/faults.md
    python tools/fault_matrix.py --rows F12 U31 --markdown docs/faults.md   # these rows anew, the others stay

A row is made of the tests with one mark `fault`: F1, F2, ... are faults of the cluster, U1, U2, ... actions of users.
Faults at random times are repeated `--repeats` times. Rows that this machine cannot run (they need SLURM, or a file
system that root may fill) are listed with the reason. Each row names the commit that it was measured at. A list above
the tables says when, with what and on which machine each of these commits was measured.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.run.cli import Parser, run_program, user_errors
from util.tables import markdown_table
from util.text import count_of

ROOT = Path(__file__).resolve().parents[1]
TITLES = {"F": ("What a cluster does", "Fault"), "U": ("What users do", "Action")}
MARKER = "<!-- table -->"  # the text below this line of the document is the tool's


@dataclass
class Row:
    """The results of all tests with one mark `fault`."""

    number: str  # F1, U12, ...
    action: str
    expected: str
    ran: int = 0
    held: int = 0
    skipped: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)

    def line(self, commit: str) -> str:
        """The row of the Markdown table."""
        held = f"{self.held} of {self.ran}" if self.ran else f"not run: {'; '.join(dict.fromkeys(self.skipped))}"
        cells = [self.number, self.action, self.expected, held, "; ".join(self.measured), commit]
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def run_tests(repeats: int, rows: Sequence[str] | None) -> ElementTree.Element:
    """Run the tests of all rows, or of those named, and return pytest's report as XML."""
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


def read_rows(report: ElementTree.Element) -> list[Row]:
    """Read the rows from pytest's report, sorted by their numbers."""
    rows: dict[str, Row] = {}
    for case in report.iter("testcase"):
        properties = [(p.get("name"), p.get("value") or "") for p in case.iter("property")]
        for mark in (value for name, value in properties if name == "fault"):
            number, action, expected = mark.split(" | ")
            row = rows.setdefault(mark, Row(number, action, expected))
            if (skipped := case.find("skipped")) is not None:
                row.skipped.append(skipped.get("message") or "")
                continue
            row.ran += 1
            row.held += case.find("failure") is None and case.find("error") is None
            row.measured += [value for name, value in properties if name == "measured"]
    return list(rows.values())


def commit_at_hand() -> str:
    """The commit that is checked out, with "+ changes" if files differ from it. Documents do not count."""
    head, changes = (
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for command in (
            ["rev-parse", "--short=10", "HEAD"],
            ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs"],
        )
    )
    return f"{head} + changes" if changes else head


def machine() -> str:
    """Versions and hardware, for the document."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    cpu = found[1] if found else platform.machine()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}"
    return f"{versions}; {len(os.sched_getaffinity(0))} cores of {cpu}, {gpu}"


def order(line: str) -> tuple[str, int, str]:
    """A key that sorts the table's rows: F2 before F10."""
    found = re.match(r"\| ([FU])(\d+)(\w*) \|", line)
    assert found, line
    return found[1], int(found[2]), found[3]


def document(lines: Iterable[str], runs: Sequence[str]) -> str:
    """The list of runs, and the tables of faults and of actions, each with a sentence that counts its rows.

    lines: rows of the tables. runs: items of the list, of which those without a row are left out.
    """
    lines = sorted(lines, key=order)
    used = {line.split(" | ")[-1].removesuffix(" |") for line in lines}
    text = "\n".join(run for run in runs if run.split("`")[1] in used)
    text = f"The last column names the commit at which a row was measured:\n\n{text}\n"
    for letter, (title, column) in TITLES.items():
        own = [line for line in lines if line.startswith(f"| {letter}")]
        if own:
            run = [line for line in own if " | not run: " not in line]
            held = sum(re.search(r" \| (\d+) of \1 \| ", line) is not None for line in run)
            head = markdown_table(["", column, "Expected", "Tests that held", "Measured", "Commit"], [], left=6)
            text += f"\n## {title}\n\n{held} of {len(run)} rows held ({len(own) - len(run)} not run).\n\n"
            text += "\n".join([head, *own]) + "\n"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line. The exit code is 1 if a row did not hold."""
    parser = Parser("fault_matrix.py", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of faults at random times")
    parser.add_argument("--rows", nargs="+", metavar="ID", help="rows to run, such as F12 (default: all)")
    help_text = f"write the tables below the line `{MARKER}` of this file; with --rows its other rows stay"
    parser.add_argument("--markdown", type=Path, help=help_text)
    args = parser.parse_args(argv)
    start, commit, now = time.monotonic(), commit_at_hand(), datetime.now(timezone.utc)
    with user_errors(parser):
        rows = read_rows(run_tests(args.repeats, args.rows))
    minutes = f"{(time.monotonic() - start) / 60:.0f} minutes"
    lines = [row.line(commit) for row in rows]
    ran = f"{count_of(len(rows), 'row')} in {minutes}, repetitions {args.repeats}"
    runs = [f"- `{commit}`: {now:%Y-%m-%d}, {ran}; {machine()}"]
    before, _, old = args.markdown.read_text().partition(MARKER) if args.markdown else ("", "", "")
    if args.rows:
        measured = {row.number for row in rows}
        lines += [line for line in re.findall(r"^\| [FU]\d.*", old, re.M) if line.split()[1] not in measured]
        runs = re.findall(r"^- `.*", old, re.M) + runs
    text = document(lines, runs)
    print(text)
    if args.markdown:
        args.markdown.write_text(f"{before}{MARKER}\n\n{text}")
    if not rows or any(row.ran != row.held for row in rows):
        parser.exit(1, "fault_matrix.py: error: not every row held\n")


if __name__ == "__main__":
    run_program(main, "fault_matrix.py")
