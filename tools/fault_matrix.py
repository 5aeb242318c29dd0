"""Does to small runs what docs/faults.md lists, and writes down what happened.

    python tools/fault_matrix.py --repeats 5 --markdown docs/faults.md

The rows are tests with the mark `fault`: F1, F2, ... are faults of the cluster, U1, U2, ... actions of users. Faults that
strike at random strike `--repeats` times. Rows whose means are absent (SLURM, a file system that root may fill) say so.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.run.cli import Parser, run_program

ROOT = Path(__file__).resolve().parents[1]


def get_args_parser():
    parser = Parser("fault_matrix.py", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="of faults that strike at random")
    parser.add_argument("--rows", help="only these, as pytest's -k: 'killed or signal'")
    parser.add_argument("--markdown", type=Path, help="write the table below the line `<!-- table -->` of this file")
    return parser


def run_tests(repeats, rows):
    """-> ElementTree of pytest's report."""
    with tempfile.TemporaryDirectory() as folder:
        report, env = Path(folder) / "report.xml", {**os.environ, "PRMIM_LONG_TESTS": "1"}
        flags = ["-q", "-m", "fault", f"--repeats={repeats}", f"--junitxml={report}", "--timeout=3600"]
        tests = subprocess.run(
            [sys.executable, "-m", "pytest", *flags, *(["-k", rows] if rows else [])], cwd=ROOT, env=env, check=False
        )
        if tests.returncode not in (0, 1):
            raise ValueError(f"pytest ended with exit code {tests.returncode}; its message stands above")
        return ElementTree.parse(report)


def table(report):
    """-> [(id, what is done, what is expected, tests run, tests held, why none was, what was measured)], by id."""
    rows = defaultdict(lambda: {"ran": 0, "held": 0, "skipped": [], "measured": []})
    for case in report.iter("testcase"):
        properties = [(p.get("name"), p.get("value")) for p in case.iter("property")]
        for key in [tuple(value.split(" | ")) for name, value in properties if name == "fault"]:
            row = rows[key]
            if (skipped := case.find("skipped")) is not None:
                row["skipped"].append(skipped.get("message"))
                continue
            row["ran"] += 1
            row["held"] += case.find("failure") is None and case.find("error") is None
            row["measured"] += [value for name, value in properties if name == "measured"]
    lines = []
    for (number, *texts), row in sorted(rows.items(), key=lambda item: _order(item[0][0])):
        lines.append((number, *texts, row["ran"], row["held"], "; ".join(set(row["skipped"])), "; ".join(row["measured"])))
    return lines


def _order(number: str) -> tuple[str, int, str]:
    found = re.match(r"([FU])(\d+)(\w*)", number)
    return found[1], int(found[2]), found[3]


TITLES = {"F": ("What a cluster does", "Fault"), "U": ("What users do", "Action")}


def markdown(lines: list[tuple], repeats: int, seconds: float) -> str:
    """The tables, one for each letter of TITLES, each below a sentence that counts its rows."""
    text = f"Measured in one run of {seconds / 60:.0f} minutes, with {repeats} repetitions.\n"
    for letter, (title, column) in TITLES.items():
        rows = [line for line in lines if line[0].startswith(letter)]
        if not rows:
            continue
        run = [line for line in rows if line[3]]
        held = sum(line[3] == line[4] for line in run)
        text += f"\n## {title}\n\n{held} of {len(run)} rows held ({len(rows) - len(run)} not run).\n\n"
        text += f"| | {column} | Expected | Tests that held | Measured |\n|---|---|---|---|---|\n"
        for *texts, ran, held, skipped, measured in rows:
            text += f"| {' | '.join(texts)} | {f'{held} of {ran}' if ran else f'not run: {skipped}'} | {measured} |\n"
    return text


def main(argv: list[str] | None = None) -> None:
    parser = get_args_parser()
    args = parser.parse_args(argv)
    began = time.monotonic()
    try:
        lines = table(run_tests(args.repeats, args.rows))
    except ValueError as error:
        parser.error(str(error))
    text = markdown(lines, args.repeats, time.monotonic() - began)
    print(text)
    if args.markdown:
        before = args.markdown.read_text().partition("<!-- table -->")[0]
        args.markdown.write_text(f"{before}<!-- table -->\n\n{text}")
    if not lines or any(line[3] != line[4] for line in lines):
        parser.exit(1, "fault_matrix.py: error: not every row held\n")


if __name__ == "__main__":
    run_program(main, "fault_matrix.py")
