"""Runs every row of a table of the paper, and writes the table with measured beside published numbers.

    python scripts/reproduce_table.py kernels --data_path IMAGENET --dry_run
    python scripts/reproduce_table.py kernels --data_path IMAGENET --nproc_per_node 8
    python scripts/reproduce_table.py schedules --rows "*_large_*" --data_path IMAGENET --launcher slurm -- --nodes 4
    python scripts/reproduce_table.py all --collect

A row is a pre-training run, its runs of fine-tuning, segmentation or detection and, for the table of robustness, their
evaluation. A run that several tables share is one run. The same command again skips what is finished, and resumes
everything else.

--launcher torchrun runs one program after the other. With --launcher slurm, submitit_launch.py submits every run at
once, and a run starts when the run that it needs has finished. Flags after `--` are those of torchrun or of
submitit_launch.py.

--collect launches nothing. It writes ROOT/<table>.md and ROOT/<table>.csv. Accuracies are those of the last epoch of
finished runs. FLOPs are counted. Memory and time are printed as published; scripts/profile_pretrain.py measures them.
"""

import argparse
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import submitit_launch
from downstream.robustness.benchmarks import BENCHMARKS
from frameworks.registry import class_of
from recipes import RECIPES
from scripts.parts.paper_tables import COUNTED_FLOPS, TABLES, Row, Table
from scripts.parts.table_runs import RECIPES_OF, Run, run_of
from util.run.cli import Parser, run_program, user_errors
from util.tables import markdown_table, write_csv
from util.urls import is_url, redact

ROOT = Path(__file__).resolve().parents[1]
NOT_MEASURED = ("memory", "time", "module_gflops")  # measures of columns that no run fills
SETS = list(TABLES["robustness"].columns.values())
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StoppedError(Exception):
    """A signal has stopped the program that is running."""


# ------------------------------------------------------------------------------------------------------- commands


def path_flag(run: Run) -> str:
    """The flag of this script that names the images of a run."""
    if run.main == "main_segmentation":
        return "ade_path"
    if run.main == "main_detection":
        return "coco_path"
    if str(RECIPES_OF[run.main][run.recipe].get("dataset", "")).startswith("inat"):
        return "inat_path"
    return "data_path"


def own_flags_of(run: Run, args: argparse.Namespace) -> list[str]:
    """Returns what --pretrain_flags, --finetune_flags and the like give to the run's main."""
    return getattr(args, run.main.replace("main_", "") + "_flags")


def flags_of(run: Run, args: argparse.Namespace) -> list[str]:
    """Returns the flags of the run's main. ValueError if a flag of this script is missing."""
    own_flags = own_flags_of(run, args)
    if run.main == "main_robustness":
        flags = ["--resume", str(run.folder.parent), "--output_dir", str(run.folder)]
        for name in given_sets(args):
            flags += [f"--{name}", getattr(args, name)]
        return [*flags, *own_flags]
    path = getattr(args, path_flag(run))
    if path is None:
        raise ValueError(f"{run.name} needs --{path_flag(run)}: the folder of its images")
    flags = ["--recipe", run.recipe, "--data_path", path, "--output_dir", str(run.folder)]
    if run.needs is not None:
        flags += ["--finetune", str(run.needs.folder)]
    elif any(flag.name == "teacher" for flag in class_of(str(RECIPES[run.recipe]["model"])).flags):
        if args.teacher is None:
            raise ValueError(f"{run.name} needs --teacher: a checkpoint of iBOT's ViT-B/16 for the paper's rows")
        flags += ["--teacher", args.teacher]
    return [*flags, *own_flags]


def given_sets(args: argparse.Namespace) -> list[str]:
    """Returns the test sets of robustness whose folders are given. ValueError if there is none."""
    sets = [name for name in SETS if getattr(args, name) is not None]
    if not sets:
        flags = ", ".join(f"--{name}" for name in SETS)
        raise ValueError(f"the table of robustness needs at least one of {flags}")
    return sets


def submission_of(run: Run, args: argparse.Namespace, job_id: str | None) -> list[str]:
    """Returns the arguments of submitit_launch.py. job_id: of the job that the run waits for."""
    flags = ["--name", run.name.replace("/", "-")]
    if job_id is not None:
        flags += ["--dependency", f"afterok:{job_id}"]
    return [*flags, *args.launcher_flags, run.main, *flags_of(run, args)]


def torchrun_of(run: Run, args: argparse.Namespace) -> list[str]:
    program = os.path.relpath(ROOT / (submitit_launch.MAINS[run.main].replace(".", "/") + ".py"))
    return ["--nproc_per_node", str(args.nproc_per_node), *args.launcher_flags, program, *flags_of(run, args)]


def check(run: Run, args: argparse.Namespace) -> None:
    """Parses a run's flags as its main will, and those of submitit_launch.py: errors come before any run."""
    if args.launcher == "slurm" and submitit_launch.parse_args(submission_of(run, args, "1"))[0].dry_run:
        raise ValueError("--dry_run belongs before `--`")
    importlib.import_module(submitit_launch.MAINS[run.main]).parse_args(flags_of(run, args))


def print_commands(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Prints one command per line. ID_OF_... stands for the number of a SLURM job that is not submitted yet."""
    for run in runs:
        command = ["torchrun", *torchrun_of(run, args)]
        if args.launcher == "slurm":
            job_id = None
            if run.needs is not None and run.needs in runs:
                job_id = f"ID_OF_{run.needs.name.replace('/', '-')}"
            command = ["python", os.path.relpath(submitit_launch.__file__), *submission_of(run, args, job_id)]
        print(redact(shlex.join(command)))


# ------------------------------------------------------------------------------------------------------ launching


def call(command: Sequence[str]) -> int:
    """Runs a command and returns its exit code. The first signal ends it by SIGTERM, so that a main saves first.

    Then StoppedError is raised, or KeyboardInterrupt after Ctrl-C.
    """
    received: list[int] = []
    not_told: list[subprocess.Popen[bytes]] = []  # the child, until it has been told to end

    def stop(number: int, frame: Any) -> None:
        received.append(number)
        if not_told and len(received) == 1:
            not_told.pop().terminate()

    # Before the child starts: the default action of a signal would end this process alone, and leave the child.
    # A signal that is ignored stays ignored: nohup has SIGHUP ignored.
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in handled}
    try:
        # In a session of its own: the terminal's Ctrl-C would reach torchrun and its processes a second time.
        with subprocess.Popen(command, start_new_session=True) as process:
            not_told.append(process)
            if received and not_told:  # the signal came while the child was starting
                not_told.pop().terminate()
            code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if received:
        raise StoppedError(signal.Signals(received[0]).name)
    return code


def run_in_turn(runs: Sequence[Run], args: argparse.Namespace) -> list[str]:
    """Runs the runs one after the other by torchrun. Returns what has gone wrong."""
    problems: list[str] = []
    failed: set[Run] = set()
    for i, run in enumerate(runs):
        if run.needs is not None and run.needs in failed:
            failed.add(run)
            problems.append(f"{run.name} was not started: {run.needs.name} is not finished")
            continue
        print(f"[{i + 1} of {len(runs)}] {run.name}", flush=True)
        code = call([sys.executable, "-m", "torch.distributed.run", *torchrun_of(run, args)])
        if code or not (run.is_finished or run.main == "main_robustness"):
            failed.add(run)
            problems.append(f"{run.name} ended with exit code {code}, before its end")
    return problems


def submit(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Submits the runs to SLURM. Each waits for the run that it needs."""
    job_ids: dict[Run | None, str] = {}
    for run in runs:
        job_ids[run] = submitit_launch.main(submission_of(run, args, job_ids.get(run.needs))).job_id


# ------------------------------------------------------------------------------------------------------ collecting


def counted_flops(row: Row) -> float | None:
    """Returns the counted FLOPs of a row relative to the same model that throws nothing; None if they are unknown."""
    if row.throw_ratio == 0:
        return 1.0
    without_epochs = re.sub(r"_\d+ep$", "", row.pretrain)
    # How the thrown tokens are chosen costs nothing.
    return COUNTED_FLOPS.get(without_epochs.replace("progressive", "prmim").replace("furthest", "plain"))


def collect(name: str, rows: Sequence[Row], root: Path) -> str:
    """Writes ROOT/<table>.csv and ROOT/<table>.md, and returns the latter's text."""
    table = TABLES[name]
    lines = []
    notes = []
    if table.note:
        notes.append(table.note)
    for row in rows:
        line, runs = collect_row(table, row, root)
        lines.append(line)
        for run in runs:
            for setting in run.changed_settings():
                if setting not in notes:
                    notes.append(setting)
    root.mkdir(parents=True, exist_ok=True)
    titles = list(lines[0])
    write_csv(root / f"{name}.csv", titles, lines)
    cells = [[cell_text(value) for value in line.values()] for line in lines]
    text = f"## {table.title}\n\n{markdown_table(titles, cells, left=2)}\n"
    if notes:
        text += "\n" + "".join(f"- {note}\n" for note in notes)
    (root / f"{name}.md").write_text(text, encoding="utf-8")
    return text


def collect_row(table: Table, row: Row, root: Path) -> tuple[dict[str, Any], list[Run]]:
    """Returns (published and measured numbers of a row, the runs behind them)."""
    line: dict[str, Any] = {
        "row": row.label,
        "recipe": row.pretrain,
        "epochs": row.epochs,
        "throw_ratio": row.throw_ratio,
    }
    runs: list[Run] = []
    for (column, measure), published in zip(table.columns.items(), row.numbers, strict=True):
        line[column] = published.removeprefix("-")
        if measure in NOT_MEASURED:
            continue
        measured = None
        if measure == "flops":
            measured = counted_flops(row)
        elif column in row.finetune:
            run = run_of(measure, row.pretrain, row.finetune[column], root)
            measured = run.result(measure)
            runs += run.chain()
        line[f"{column} measured"] = measured
    return line, runs


def cell_text(value: object) -> str:
    """Returns a number with four digits, "" for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


# ----------------------------------------------------------------------------------------------------------- flags


def get_args_parser() -> Parser:
    parser = Parser("reproduce_table.py", description=__doc__)
    group = parser.add_argument_group("what is run").add_argument
    group("tables", nargs="+", metavar="TABLE", help=f"{', '.join(TABLES)}, or all")
    group("--rows", metavar="GLOB", default="*", help="only rows whose pre-training recipe matches, such as 'prmim*'")
    group("--dry_run", action="store_true", help="print the commands, one per line, and run nothing")
    group("--collect", action="store_true", help="run nothing, and write the tables")
    group = parser.add_argument_group("data and output").add_argument
    group("--output_dir", type=Path, default="output/tables", metavar="ROOT", help="folder of all runs")
    group("--data_path", help="ImageNet, as for main_pretrain.py")
    group("--inat_path", help="iNaturalist 2018 and 2019, as for main_finetune.py")
    group("--ade_path", help="ADE20K, as for main_segmentation.py")
    group("--coco_path", help="COCO 2017, as for main_detection.py")
    for name in SETS:
        group(f"--{name}", metavar="DIR", help=f"{BENCHMARKS[name].title}, as for main_robustness.py")
    group("--teacher", help="teacher of the rows of TEC, as for main_pretrain.py")
    group = parser.add_argument_group("how").add_argument
    group("--launcher", default="torchrun", choices=("torchrun", "slurm"), help="flags after -- are the launcher's")
    group(
        "--nproc_per_node",
        type=int,
        at_least=1,
        default=max(1, torch.cuda.device_count()),
        help="processes, for torchrun",
    )
    for name in ("pretrain", "finetune", "segmentation", "detection", "robustness"):
        text = f'flags of main_{name}.py, as in --{name}_flags "--batch_size 64" or --{name}_flags=--device=cpu'
        group(f"--{name}_flags", type=shlex.split, default=[], metavar="FLAGS", help=text)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    parser = get_args_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    launcher_flags: list[str] = []
    if "--" in words:
        end = words.index("--")
        launcher_flags = words[end + 1 :]
        words = words[:end]
    args = parser.parse_args(words)
    args.launcher_flags = launcher_flags
    for name in args.tables:
        if name not in (*TABLES, "all"):
            parser.error(f"unknown table {name!r}: give {', '.join(TABLES)}, or all")
    if "all" in args.tables:
        args.tables = list(TABLES)
    return parser, args


def select_rows(args: argparse.Namespace) -> dict[str, list[Row]]:
    """Returns {table: its rows that --rows asks for}. ValueError if there are none."""
    chosen: dict[str, list[Row]] = {}
    for name in args.tables:
        rows = [row for row in TABLES[name].rows if fnmatchcase(row.pretrain, args.rows)]
        if rows:
            chosen[name] = rows
    if not chosen:
        known = dict.fromkeys(row.pretrain for name in args.tables for row in TABLES[name].rows)
        raise ValueError(f"--rows {args.rows!r} matches none of {', '.join(known)}")
    return chosen


def find_pending(chosen: dict[str, list[Row]], args: argparse.Namespace) -> list[Run]:
    """Returns the runs that are not finished, in order and each once."""
    pending: list[Run] = []
    for run in last_runs(chosen, args.output_dir):
        if run.main == "main_robustness" and has_results(run, given_sets(args)):
            continue
        pending += [needed for needed in run.pending() if needed not in pending]
    return pending


def last_runs(chosen: dict[str, list[Row]], root: Path) -> Iterator[Run]:
    """Yields the runs that fill the columns of the rows: the last ones of their chains."""
    for name, rows in chosen.items():
        for row in rows:
            for column, recipe in row.finetune.items():
                yield run_of(TABLES[name].columns[column], row.pretrain, recipe, root)


def notes_on_finished(chosen: dict[str, list[Row]], args: argparse.Namespace) -> list[str]:
    """Returns a note for each setting with which finished runs differ from what this command asks for."""
    notes: list[str] = []
    for last in last_runs(chosen, args.output_dir):
        for run in last.chain():
            if run.is_finished:
                notes += run.changed_settings(own_flags_of(run, args))
    return list(dict.fromkeys(notes))


def has_results(run: Run, measures: Sequence[str]) -> bool:
    """Whether a run has all these numbers."""
    return all(run.result(measure) is not None for measure in measures)


def check_paths(args: argparse.Namespace) -> None:
    """ValueError if a folder of images does not exist. Runs that need it may start days later."""
    for name in ("data_path", "inat_path", "ade_path", "coco_path", *SETS):
        path = getattr(args, name)
        if path is not None and not is_url(path) and not Path(path).exists():
            raise ValueError(f"--{name} {path!r} does not exist")


def main(argv: Sequence[str] | None = None) -> bool:
    """Runs the program; `argv` replaces the command line. Returns False if a signal stopped it."""
    parser, args = parse_args(argv)
    with user_errors(parser):
        chosen = select_rows(args)
        if args.collect:
            texts = [collect(name, rows, args.output_dir) for name, rows in chosen.items()]
            print("\n".join(texts), end="")
            return True
        runs = find_pending(chosen, args)
        for run in runs:
            check(run, args)
        for note in notes_on_finished(chosen, args):
            print(f"note: {note} in a finished run, which is not started again", file=sys.stderr)
        if not runs:
            print("nothing is left to run", file=sys.stderr)
            return True
        if args.dry_run:
            print_commands(runs, args)
            return True
        check_paths(args)
        if args.launcher == "slurm":
            submit(runs, args)
            return True
    try:
        problems = run_in_turn(runs, args)
    except StoppedError as stopped:
        print(f"stopped by {stopped}; the same command goes on", file=sys.stderr)
        return False
    if problems:
        parser.exit(1, "\n".join([*problems, "start the same command again to go on"]) + "\n")
    print(f"all runs are finished: {args.output_dir}; --collect writes the tables")
    return True


if __name__ == "__main__":
    run_program(main, "reproduce_table.py")
