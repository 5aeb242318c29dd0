"""Breaks runs in every way of docs/faults.md, and writes down what happened.

    python scripts/fault_matrix.py --repeats 5 --markdown docs/faults.md

The rows are tests with the mark `fault`; faults that strike at random strike `--repeats` times. Rows whose means are
absent (SLURM, a file system that root may fill) say so.
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

from util.cli import Parser

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
        subprocess.run([sys.executable, "-m", "pytest", *flags, *(["-k", rows] if rows else [])], cwd=ROOT, env=env, check=False)
        return ElementTree.parse(report)


def table(report):
    """-> [(id, what is done, what is expected, how it went, what was measured)], by id."""
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
        outcome = f"{row['held']} of {row['ran']}" if row["ran"] else f"not run: {row['skipped'][0]}"
        lines.append((number, *texts, outcome, "; ".join(row["measured"])))
    return lines


def _order(number):
    found = re.match(r"F(\d+)(\w*)", number)
    return int(found[1]), found[2]


def markdown(lines, repeats, seconds):
    head = "| | Fault | Expected | Tests that held | Measured |\n|---|---|---|---|---|\n"
    held = sum(line[3].split(" of ")[0] == line[3].split(" of ")[-1] for line in lines)
    text = head + "".join(f"| {' | '.join(line)} |\n" for line in lines)
    run = sum(not line[3].startswith("not run") for line in lines)
    return f"{held} of {run} rows held ({len(lines) - run} not run), {repeats} repetitions, {seconds / 60:.0f} minutes.\n\n{text}"


def main(argv=None):
    args = get_args_parser().parse_args(argv)
    began = time.monotonic()
    lines = table(run_tests(args.repeats, args.rows))
    text = markdown(lines, args.repeats, time.monotonic() - began)
    print(text)
    if args.markdown:
        before = args.markdown.read_text().partition("<!-- table -->")[0]
        args.markdown.write_text(f"{before}<!-- table -->\n\n{text}")
    return any(line[3].split(" of ")[0] != line[3].split(" of ")[-1] for line in lines if " of " in line[3])


if __name__ == "__main__":
    sys.exit(main())
