"""List the runs in folders, a row each: method, step, state, last loss, kNN, best score, and the settings that differ.

    python scripts/list_runs.py output
    python scripts/list_runs.py output --where program=finetune --where "model=vit_base*" --sort best --descending
    python scripts/list_runs.py output --where state=failed --format json
    python scripts/list_runs.py output --where program=pretrain --plot losses.svg

Runs of all mains are found by the files that they leave, also in folders inside those of other runs. Nothing large is
read. States: `runs`: a process holds the folder; `stopped`: by a signal or --max_steps, the same command goes on;
`finished`; `failed`: with an error; `interrupted`: ended early, and the log does not say why; `unknown`: started on a
host whose lock cannot be seen here. Of its settings a row has those in which listed runs of its program differ.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import plot_losses
from scripts.parts.run_rows import COLUMNS, RunRow, find_runs, read_run
from util.plots import pyplot
from util.run.cli import Parser, prepare_file, run_program, user_errors
from util.tables import csv_text, markdown_table
from util.text import close_to, count_of, printable

LONGEST_REASON = 60  # characters of it in the table; CSV and JSON have all


def get_args_parser() -> Parser:
    parser = Parser("list_runs.py", description=__doc__)
    flag = parser.add_argument
    flag("folders", nargs="+", type=Path, metavar="FOLDER", help="where runs are looked for")
    flag(
        "--where",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="only runs with this value of a column or a setting, or with * and ? in it; repeat it for more conditions",
    )
    flag("--sort", metavar="NAME", help="sort by a column or a setting; runs without it come last (default: by folder)")
    flag("--descending", action=argparse.BooleanOptionalAction, default=False, help="sort from high to low")
    flag("--format", default="table", choices=("table", "csv", "json"), help="what is printed")
    flag("--plot", type=Path, metavar="FILE", help="also draw the losses of the listed runs to this .svg, .png or .pdf")
    return parser


def tell(message: str) -> None:
    """Prints a note beside the table."""
    print(f"note: {printable(message)}", file=sys.stderr)


def read_runs(folders: Sequence[Path], note: Callable[[str], None]) -> list[RunRow]:
    """Reads the rows of all runs in the folders, each once. ValueError if there is none."""
    rows: dict[Path, RunRow] = {}
    for root in folders:
        if not root.is_dir():
            raise ValueError(f"{str(root)!r} is no folder: give one that holds runs")
        for folder in find_runs(root, note):
            if folder.resolve() not in rows:
                rows[folder.resolve()] = read_run(folder)
    if not rows:
        raise ValueError(f"no run in {', '.join(map(str, folders))}: a run leaves settings.json and log.jsonl")
    return list(rows.values())


def value_of(row: RunRow, name: str) -> Any:
    """Returns the value of a column or a setting; None without."""
    if name in COLUMNS:
        return getattr(row, name)
    return row.settings.get(name)


def check_name(flag: str, name: str, rows: Sequence[RunRow]) -> None:
    """ValueError unless a column, or a setting of a run, has this name."""
    known = set(COLUMNS)
    for row in rows:
        known |= row.settings.keys()
    if name not in known:
        raise ValueError(f"{flag}: no column or setting is called {name!r}{close_to(name, sorted(known))}")


def text_of(value: Any) -> str:
    """Returns a value as it is compared and shown."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value
    return json.dumps(value)


def chosen_runs(rows: Sequence[RunRow], conditions: Sequence[str]) -> list[RunRow]:
    """Returns the runs for which all conditions hold. ValueError for one that is not NAME=VALUE."""
    chosen = list(rows)
    for condition in conditions:
        name, equals, wanted = condition.partition("=")
        if not equals:
            raise ValueError(f"--where {condition!r} must be NAME=VALUE")
        check_name("--where", name, rows)
        chosen = [row for row in chosen if matches(value_of(row, name), wanted)]
    return chosen


def matches(value: Any, wanted: str) -> bool:
    """Whether a value is the wanted one: as a number, or as text with wildcards."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(wanted) == value
        except ValueError:
            pass
    return fnmatchcase(text_of(value).lower(), wanted.lower())


def sorted_runs(rows: Sequence[RunRow], name: str, descending: bool) -> list[RunRow]:
    """Returns the runs by a column or setting: numbers before text, and those without it last."""
    check_name("--sort", name, rows)
    numbers = []
    texts = []
    rest = []
    for row in rows:
        value = value_of(row, name)
        if value is None or value == "":
            rest.append(row)
        elif isinstance(value, (int, float)):
            numbers.append(row)
        else:
            texts.append(row)
    numbers.sort(key=lambda row: value_of(row, name), reverse=descending)
    texts.sort(key=lambda row: text_of(value_of(row, name)), reverse=descending)
    return [*numbers, *texts, *rest]


def with_differing_settings(rows: Sequence[RunRow]) -> list[RunRow]:
    """Returns the rows with those settings alone in which runs of their program differ, in the order of its flags."""
    values: dict[tuple[str | None, str], set[str]] = {}  # of each setting of a program
    for row in rows:
        for name, value in row.settings.items():
            values.setdefault((row.program, name), set()).add(json.dumps(value))
    shown = []
    for row in rows:
        settings = {}
        for name, value in row.settings.items():
            differs = len(values[row.program, name]) > 1
            if differs and name not in COLUMNS and name != "output_dir":
                settings[name] = value
        shown.append(replace(row, settings=settings))
    return shown


def table_of(rows: Sequence[RunRow]) -> str:
    """Returns the table for eyes, without columns that are empty."""
    cells = []
    for row in rows:
        step = text_of(row.step)
        if row.steps is not None:
            step = f"{step or 0}/{row.steps}"
        state: str = row.state
        if row.why:
            state += f": {row.why[:LONGEST_REASON]}"
            if len(row.why) > LONGEST_REASON:
                state += "..."
        best = ""
        if row.best is not None:
            best = f"{row.best:.2f} {row.measure}"
        loss = text_of(row.loss)
        if isinstance(row.loss, float):
            loss = f"{row.loss:.4f}"
        knn = ""
        if row.knn is not None:
            knn = f"{row.knn:.2f}"
        settings = [f"{name} {text_of(value) or 'none'}" for name, value in row.settings.items()]
        cells.append(
            {
                "run": row.run,
                "program": text_of(row.program),
                "model": text_of(row.model),
                "throw_ratio": text_of(row.throw_ratio),
                "sampling": text_of(row.sampling),
                "aggregation": text_of(row.aggregation),
                "step": step,
                "state": state,
                "loss": loss,
                "knn": knn,
                "best": best,
                "settings": ", ".join(settings),
            }
        )
    titles = [title for title in cells[0] if any(row[title] for row in cells)]
    return markdown_table(titles, [[row[title] for title in titles] for row in cells], left=3, pad=True)


def text_of_runs(rows: Sequence[RunRow], form: str) -> str:
    """Returns what is printed."""
    shown = with_differing_settings(rows)
    records = [asdict(row) for row in shown]
    if form == "json":
        return json.dumps(records, indent=1)
    if form == "csv":
        names = dict.fromkeys(name for row in shown for name in row.settings)
        return csv_text([*COLUMNS, *names], [{**record, **record["settings"]} for record in records]).rstrip("\n")
    if not rows:
        return "no run"
    return table_of(shown)


def draw(rows: Sequence[RunRow], path: Path, note: Callable[[str], None]) -> None:
    """Draws the losses of the runs that have any. ValueError if none has."""
    curves = []
    for row in rows:
        try:
            curves.append((row.run, plot_losses.read_run(row.run)[1]))
        except ValueError as error:
            note(f"not drawn: {error}")
    if not curves:
        raise ValueError("--plot: no listed run has a loss")
    plot_losses.plot(pyplot("losses"), curves, path)
    note(f"losses of {count_of(len(curves), 'run')}: {path}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = get_args_parser()
    args = parser.parse_args(argv)
    with user_errors(parser):
        if args.plot is not None:
            pyplot("losses")
            prepare_file("--plot", args.plot, (".svg", ".png", ".pdf"))
        rows = chosen_runs(read_runs(args.folders, tell), args.where)
        if args.sort is not None:
            rows = sorted_runs(rows, args.sort, args.descending)
        print(printable(text_of_runs(rows, args.format)))
        if args.plot is not None:
            draw(rows, args.plot, tell)


if __name__ == "__main__":
    run_program(main, "list_runs.py")
