"""Inject the faults of docs/faults.md into small runs, and write down what happened.

    python tools/fault_matrix.py --repeats 5 --markdown docs/faults.md

A row is made of the tests with one mark `fault`: F1, F2, ... are faults of the cluster, U1, U2, ... actions of users.
Faults at random times are repeated `--repeats` times. Rows that this machine cannot run (they need SLURM, or a file
system that root may fill) are listed with the reason.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.run.cli import Parser, run_program, user_errors
from util.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
TITLES = {"F": ("What a cluster does", "Fault"), "U": ("What users do", "Action")}


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

    def order(self) -> tuple[str, int, str]:
        """A key that sorts F2 before F10."""
        found = re.fullmatch(r"([FU])(\d+)(\w*)", self.number)
        assert found, self.number
        return found[1], int(found[2]), found[3]

    def cells(self) -> list[str]:
        """The cells of the Markdown table."""
        held = f"{self.held} of {self.ran}" if self.ran else f"not run: {'; '.join(dict.fromkeys(self.skipped))}"
        return [self.number, self.action, self.expected, held, "; ".join(self.measured)]


def run_tests(repeats: int, rows: str | None) -> ElementTree.Element:
    """Run the tests, and return pytest's report as XML."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "fault", f"--repeats={repeats}", "--timeout=3600"]
        command += [f"--junitxml={report}"]
        if rows:
            command += ["-k", rows]
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
    return sorted(rows.values(), key=Row.order)


def markdown(rows: Sequence[Row], repeats: int, seconds: float) -> str:
    """The tables of faults and of actions, each with a sentence that counts its rows."""
    text = f"Measured in one run of {seconds / 60:.0f} minutes, with {repeats} repetitions.\n"
    for letter, (title, column) in TITLES.items():
        own = [row for row in rows if row.number.startswith(letter)]
        if own:
            run = [row for row in own if row.ran]
            held = sum(row.held == row.ran for row in run)
            table = markdown_table(["", column, "Expected", "Tests that held", "Measured"], map(Row.cells, own), left=5)
            text += f"\n## {title}\n\n{held} of {len(run)} rows held ({len(own) - len(run)} not run).\n\n{table}\n"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line. The exit code is 1 if a row did not hold."""
    parser = Parser("fault_matrix.py", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of faults at random times")
    parser.add_argument("--rows", help="run a part of the tests, as pytest's -k selects them: 'killed or signal'")
    parser.add_argument("--markdown", type=Path, help="write the tables below the line `<!-- table -->` of this file")
    args = parser.parse_args(argv)
    start = time.monotonic()
    with user_errors(parser):
        rows = read_rows(run_tests(args.repeats, args.rows))
    text = markdown(rows, args.repeats, time.monotonic() - start)
    print(text)
    if args.markdown:
        before = args.markdown.read_text().partition("<!-- table -->")[0]
        args.markdown.write_text(f"{before}<!-- table -->\n\n{text}")
    if not rows or any(row.ran != row.held for row in rows):
        parser.exit(1, "fault_matrix.py: error: not every row held\n")


if __name__ == "__main__":
    run_program(main, "fault_matrix.py")
