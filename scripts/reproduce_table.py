"""Runs every row of a table of the paper, and writes the table with measured beside published numbers.

    python scripts/reproduce_table.py kernels --data_path IMAGENET --dry_run
    python scripts/reproduce_table.py kernels --data_path IMAGENET --nproc_per_node 8
    python scripts/reproduce_table.py schedules --rows "*_large_*" --data_path IMAGENET --launcher slurm -- --nodes 4
    python scripts/reproduce_table.py all --collect --costs cost.csv

A row is a pre-training run, its runs of fine-tuning, segmentation or detection and, for the table of robustness, their
evaluation. A run that several tables share is one run. The same command again skips what is finished, and resumes
everything else.

--launcher torchrun runs one program after the other. With --launcher slurm, submitit_launch.py submits every run at
once, and a run starts when the run that it needs has finished. A run that is already in the queue is not submitted
again. Flags after `--` are those of torchrun or of submitit_launch.py.

--collect launches nothing. It writes ROOT/<table>.md and ROOT/<table>.csv. Accuracies are those of the last epoch of
finished runs. FLOPs are counted. Memory and time are taken from --costs.
"""

import argparse
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import submitit_launch
from downstream.robustness.benchmarks import BENCHMARKS
from frameworks.registry import CLASS_OF
from recipes import RECIPES
from scripts.parts.paper_tables import COUNTED_FLOPS, TABLES, Row
from scripts.parts.table_runs import RECIPES_OF, Run, run_of
from util.run.cli import Parser, run_program, user_errors
from util.tables import markdown_table, read_csv, write_csv

ROOT = Path(__file__).resolve().parents[1]
SETS = list(TABLES["robustness"].columns.values())
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
COST_COLUMNS = {"memory": "peak_mb", "time": "ms"}  # of scripts/profile_pretrain.py


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


def flags_of(run: Run, args: argparse.Namespace) -> list[str]:
    """Returns the flags of the run's main. ValueError if a flag of this script is missing."""
    own_flags = getattr(args, run.main.replace("main_", "") + "_flags")
    if run.main == "main_robustness":
        flags = ["--resume", str(run.folder.parent), "--output_dir", str(run.folder)]
        sets = [name for name in SETS if getattr(args, name) is not None]
        if not sets:
            raise ValueError(f"the table of robustness needs at least one of {', '.join(f'--{name}' for name in SETS)}")
        for name in sets:
            flags += [f"--{name}", getattr(args, name)]
        return [*flags, *own_flags]
    path = getattr(args, path_flag(run))
    if path is None:
        raise ValueError(f"{run.name} needs --{path_flag(run)}: the folder of its images")
    flags = ["--recipe", run.recipe, "--data_path", path, "--output_dir", str(run.folder)]
    if run.needs is not None:
        flags += ["--finetune", str(run.needs.folder)]
    elif any(flag.name == "teacher" for flag in CLASS_OF[str(RECIPES[run.recipe]["model"])].flags):
        if args.teacher is None:
            raise ValueError(f"{run.name} needs --teacher: a checkpoint of iBOT's ViT-B/16 for the paper's rows")
        flags += ["--teacher", args.teacher]
    return [*flags, *own_flags]


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
        print(shlex.join(command))


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
    previous = {number: signal.signal(number, stop) for number in SIGNALS}
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


def queued_job(run: Run) -> str | None:
    """Returns the number of the run's SLURM job that is waiting or running, or None."""
    for path in sorted((run.folder / "jobs").glob("*_submission.sh")):
        job_id = path.name.partition("_")[0]
        state = submitit_launch.slurm_state(job_id) if job_id.isdigit() else ""
        if state is None:
            raise ValueError(f"SLURM does not say whether job {job_id} of {run.name} is in the queue: try again later")
        if state:
            return job_id
    return None


def submit(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Submits the runs to SLURM. Each waits for the run that it needs."""
    jobs: dict[Run | None, str] = {}
    for run in runs:
        queued = queued_job(run)
        if queued is None:
            jobs[run] = submitit_launch.main(submission_of(run, args, jobs.get(run.needs))).job_id
        else:
            jobs[run] = queued
            print(f"{run.name} is already in the queue: job {queued}")


# ------------------------------------------------------------------------------------------------------ collecting


def without_epochs(recipe: str) -> str:
    """What recipes that differ only in their schedule have in common: their steps cost the same."""
    return re.sub(r"_\d+ep$", "", recipe)


def read_costs(paths: Sequence[str]) -> list[dict[str, dict[str, Any]]]:
    """Returns {recipe without epochs: row} of each CSV of scripts/profile_pretrain.py."""
    text = ("recipe", "model", "device", "precision", "torch", "attention", "compile")
    files = [read_csv(path, ("recipe", *COST_COLUMNS.values()), text) for path in paths]
    return [{without_epochs(row["recipe"]): row for row in rows} for rows in files]


def measured_cost(name: str, row: Row, measure: str, costs: Sequence[dict[str, dict[str, Any]]]) -> float | None:
    """Returns the cost of a row relative to the row of the same model that throws nothing, or None."""
    recipe = without_epochs(row.pretrain)
    if measure == "flops":
        if row.throw_ratio == 0:
            return 1.0
        # How the thrown tokens are chosen costs nothing.
        return COUNTED_FLOPS.get(recipe.replace("progressive", "prmim").replace("furthest", "plain"))
    if measure not in COST_COLUMNS:
        return None
    column = COST_COLUMNS[measure]
    model = RECIPES[row.pretrain]["model"]
    for other in TABLES[name].rows:
        baseline = without_epochs(other.pretrain)
        if other.throw_ratio or RECIPES[other.pretrain]["model"] != model:
            continue
        for rows in costs:
            if recipe in rows and baseline in rows and rows[recipe][column] and rows[baseline][column]:
                return float(rows[recipe][column] / rows[baseline][column])
    return None


def collect(name: str, rows: Sequence[Row], root: Path, costs: Sequence[dict[str, dict[str, Any]]]) -> str:
    """Writes ROOT/<table>.csv and ROOT/<table>.md, and returns the latter's text."""
    table = TABLES[name]
    lines: list[dict[str, Any]] = []
    notes: dict[str, None] = {}
    for row in rows:
        line: dict[str, Any] = dict(row=row.label, recipe=row.pretrain, epochs=row.epochs, throw_ratio=row.throw_ratio)
        for (column, measure), published in zip(table.columns.items(), row.numbers, strict=True):
            line[column] = published.removeprefix("-")
            line[f"{column} measured"] = measured_cost(name, row, measure, costs)
            if column in row.finetune:
                run: Run | None = run_of(measure, row.pretrain, row.finetune[column], root)
                line[f"{column} measured"] = run.result(measure) if run is not None else None
                while run is not None:
                    notes |= dict.fromkeys(run.changed_settings())
                    run = run.needs
        lines.append(line)
    root.mkdir(parents=True, exist_ok=True)
    titles = list(lines[0])
    write_csv(root / f"{name}.csv", titles, lines)
    cells = [[f"{value:.4g}" if isinstance(value, float) else value for value in line.values()] for line in lines]
    cells = [["" if value is None else value for value in values] for values in cells]
    text = f"## {table.title}\n\n{markdown_table(titles, cells, left=2)}\n"
    remarks = [*([table.note] if table.note else []), *notes]
    if remarks:
        text += "\n" + "".join(f"- {remark}\n" for remark in remarks)
    (root / f"{name}.md").write_text(text, encoding="utf-8")
    return text


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
    group("--costs", nargs="+", default=[], metavar="CSV", help="with --collect: files of scripts/profile_pretrain.py")
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
    if args.costs and not args.collect:
        parser.error("--costs goes with --collect")
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
    sets = [name for name in SETS if getattr(args, name) is not None]
    found: dict[Run, None] = {}
    for name, rows in chosen.items():
        for row in rows:
            for column, recipe in row.finetune.items():
                run = run_of(TABLES[name].columns[column], row.pretrain, recipe, args.output_dir)
                is_evaluated = run.main == "main_robustness" and all(run.result(name) is not None for name in sets)
                if not (sets and is_evaluated):
                    found |= dict.fromkeys(run.pending())
    return list(found)


def check_paths(args: argparse.Namespace) -> None:
    """ValueError if a folder of images does not exist. Runs that need it may start days later."""
    for name in ("data_path", "inat_path", "ade_path", "coco_path", *SETS):
        path = getattr(args, name)
        if path is not None and not Path(path).exists():
            raise ValueError(f"--{name} {path!r} does not exist")


def main(argv: Sequence[str] | None = None) -> bool:
    """Runs the program; `argv` replaces the command line. Returns False if a signal stopped it."""
    parser, args = parse_args(argv)
    with user_errors(parser):
        chosen = select_rows(args)
        if args.collect:
            costs = read_costs(args.costs)
            print("\n".join(collect(name, rows, args.output_dir, costs) for name, rows in chosen.items()), end="")
            return True
        runs = find_pending(chosen, args)
        for run in runs:
            check(run, args)
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
