"""List the runs in folders, a row each: program, model, step, state, last loss, kNN, score, and settings that differ.

    python scripts/list_runs.py output
    python scripts/list_runs.py output --format json | jq '.[] | select(.state == "failed").run'

A run leaves run.json in its folder, also in folders inside those of other runs. States: `running`: a process holds the
folder; `interrupted`: it was killed; `stopped`: by a signal or --max_steps; `finished`; `failed`: with an error. The
score is the best one of results.json, or else the last. The table shows the settings in which runs of a program differ.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.flag import Flag
from util.run.cli import Parser
from util.run.exits import run_program, user_errors
from util.run.files.json_files import STATE, read_json, read_reports
from util.run.files.lock import is_held
from util.tables import markdown_table
from util.text import printable

COLUMNS = ("run", "program", "model", "step", "last_step", "state", "why", "loss", "knn", "score", "measure", "time")
MEASURES = ("val_top1", "val_miou", "val_box_ap")  # the score of a program; the first that is there
NO_SETTINGS = (*COLUMNS, "output_dir", "mean", "std")  # the last two are mostly measured
Row = dict[str, Any]


def read_run(folder: Path) -> Row:
    """Returns the columns of a run, and its settings. None: unknown, or the program has no such value."""
    content = read_json(folder / STATE)
    row: Row = {name: content.get(name) for name in COLUMNS}
    row["run"] = str(folder)
    if is_held(folder):
        row["state"] = "running"
    elif row["state"] == "running":
        row["state"] = "interrupted"
    for report in read_reports(folder / "log.jsonl"):
        row["step"] = max(row["step"] or 0, report["step"])
        row["loss"] = report.get("loss", row["loss"])
        row["knn"] = report.get("knn_top1", row["knn"])
    results = read_json(folder / "results.json")
    scores = results.get("best") or results.get("last") or {}
    for measure in MEASURES:
        if measure in scores:
            row["score"] = scores[measure]
            row["measure"] = measure.removeprefix("val_")
            break
    return read_json(folder / "settings.json") | row


def find_runs(folders: Sequence[Path]) -> list[Row]:
    """Returns the runs in the folders, by name. ValueError if there is none."""
    rows = []
    for root in folders:
        rows += [read_run(path.parent) for path in sorted(root.rglob(STATE))]
    if not rows:
        raise ValueError(f"no run in {', '.join(map(str, folders))}: a run leaves {STATE}")
    return rows


def text_of(value: Any) -> str:
    """Returns a value as it is shown."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)


def differing_settings(row: Row, rows: Sequence[Row]) -> str:
    """Returns those settings of a run that others of its program have otherwise, as "name value, ..."."""
    others = [other for other in rows if other["program"] == row["program"]]
    parts = []
    for name, value in row.items():
        if name not in NO_SETTINGS and any(other.get(name) != value for other in others):
            parts.append(f"{name} {text_of(value) or 'none'}")
    return ", ".join(parts)


FLAGS = (
    Flag("folders", Path, help="where runs are looked for", positional=True, nargs="+", metavar="FOLDER"),
    Flag("format", str, "table", "what is printed", choices=("table", "json")),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("list_runs.py", __doc__, *FLAGS)
    args = parser.parse_args(argv)
    with user_errors(parser):
        rows = find_runs(args.folders)
    if args.format == "json":
        print(json.dumps(rows, indent=1))
        return
    titles = [title for title in COLUMNS if any(text_of(row[title]) for row in rows)]
    cells = []
    for row in rows:
        cells.append([*(text_of(row[title])[:60] for title in titles), differing_settings(row, rows)])
    titles.append("settings")
    print(printable(markdown_table(titles, cells, left=3, pad=True)))


if __name__ == "__main__":
    run_program(main, "list_runs.py")
