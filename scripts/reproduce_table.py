"""Runs every row of a table of the paper, and writes the table with measured beside published numbers.

    python scripts/reproduce_table.py --list
    python scripts/reproduce_table.py kernels --data_path IMAGENET --dry_run
    python scripts/reproduce_table.py kernels --data_path IMAGENET --nproc_per_node 8
    python scripts/reproduce_table.py schedules --rows "*_large_*" --data_path IMAGENET --launcher slurm -- --nodes 4
    python scripts/reproduce_table.py all --collect --costs cost.csv

A row is a pre-training run, its runs of fine-tuning, segmentation or detection and, for the table of robustness, their
evaluation. Their folders are ROOT/<recipe>, ROOT/<recipe>/<fine-tuning recipe> and robustness/ below the latter. A run
that several tables share is one run. A finished run is not started again. The same command resumes everything else.

--launcher torchrun runs one program after the other. With --launcher slurm, submitit_launch.py submits every run at
once, and a run starts when the run that it needs has finished. A run that is already in the queue is not submitted
again. Flags after `--` are those of torchrun or of submitit_launch.py.

--collect launches nothing. It writes ROOT/<table>.md and ROOT/<table>.csv from the runs that are there. Accuracies are
those of the last epoch of finished runs. FLOPs are counted. Memory and time are taken from --costs.
"""

import argparse
import importlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch.distributed.run import get_args_parser as torchrun_parser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import main_pretrain
import submitit_launch
from downstream.robustness.main_robustness import BENCHMARKS
from scripts.parts.paper_tables import TABLES, Row
from scripts.parts.table_results import RECIPES_OF, collect, read_costs
from scripts.parts.table_runs import Run, is_finished, pending, progress_of, runs_of
from util.run.cli import Parser, check_least, run_program, user_errors
from util.run.flags import split_batch

ROOT = Path(__file__).resolve().parents[1]
SETS = list(TABLES["robustness"].columns.values())
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PATHS = {"main_segmentation": "ade_path", "main_detection": "coco_path"}  # flags of their data


class StoppedError(Exception):
    """A signal has stopped the program that is running."""


# ------------------------------------------------------------------------------------------------------- commands


def flags_of(run: Run, args: argparse.Namespace) -> list[str]:
    """Returns the flags of the run's main. ValueError if a flag of this script is missing."""
    if run.main == "main_robustness":
        if not run.sets:
            raise ValueError(f"the table of robustness needs at least one of {', '.join(f'--{name}' for name in SETS)}")
        flags = ["--resume", str(run.folder.parent)]
        for name in run.sets:
            flags += [f"--{name}", getattr(args, name)]
        return [*flags, "--output_dir", str(run.folder), *args.robustness_flags]
    recipe = RECIPES_OF[run.main][run.recipe]
    source = "inat_path" if str(recipe.get("dataset", "")).startswith("inat") else "data_path"
    source = PATHS.get(run.main, source)
    if getattr(args, source) is None:
        raise ValueError(f"{run.name} needs --{source}: the folder of its images")
    flags = ["--recipe", run.recipe, "--data_path", getattr(args, source), "--output_dir", str(run.folder)]
    if run.needs is not None:
        own_flags = getattr(args, run.main.replace("main_", "") + "_flags")
        return [*flags, "--finetune", str(run.needs.folder), *own_flags]
    if any(flag.name == "teacher" for flag in main_pretrain.CLASS_OF[str(recipe["model"])].flags):
        if args.teacher is None:
            raise ValueError(f"{run.name} needs --teacher: a checkpoint of iBOT's ViT-B/16 for the paper's rows")
        flags += ["--teacher", args.teacher]
    return [*flags, *args.pretrain_flags]


def submission_of(run: Run, args: argparse.Namespace, job_id: str | None) -> list[str]:
    """Returns the arguments of submitit_launch.py. job_id: of the job that the run waits for."""
    dependency = [] if job_id is None else ["--dependency", f"afterok:{job_id}"]
    name = ["--name", run.name.replace("/", "-")]
    return [*name, *dependency, *args.launcher_flags, run.main, *flags_of(run, args)]


def torchrun_of(run: Run, args: argparse.Namespace) -> list[str]:
    program = os.path.relpath(ROOT / (submitit_launch.MAINS[run.main].replace(".", "/") + ".py"))
    return ["--nproc_per_node", str(args.nproc_per_node), *args.launcher_flags, program, *flags_of(run, args)]


def check(run: Run, args: argparse.Namespace) -> None:
    """Parses a run's flags as its main will, and those of the launcher. ValueError or a parser's error if one fails."""
    if args.launcher == "slurm":
        launch = submitit_launch.parse_args(submission_of(run, args, "1"))[0]
        if launch.dry_run:
            raise ValueError("--dry_run belongs before `--`")
        processes = launch.nodes * launch.tasks_per_node
    else:
        parser = torchrun_parser()
        parser.prog = "reproduce_table.py"  # in errors; by default it is what has started Python
        launch = parser.parse_args(torchrun_of(run, args))
        processes = args.nproc_per_node * int(launch.nnodes.rpartition(":")[2])
    _, settings = importlib.import_module(submitit_launch.MAINS[run.main]).parse_args(flags_of(run, args))
    if run.main != "main_robustness":
        try:
            split_batch(settings.batch_size, settings.accum_iter, settings.total_batch_size, processes)
        except ValueError as error:
            raise ValueError(f"{run.name}: {error}; --{run.main[5:]}_flags passes flags on") from error
    if run.main == "main_pretrain":
        main_pretrain.check_own_flags(vars(settings))


def print_commands(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Prints one command per line. ID_OF_... stands for the number of a SLURM job that is not submitted yet."""
    for run in runs:
        if args.launcher == "slurm":
            needed = run.needs if run.needs in runs else None
            job_id = None if needed is None else f"ID_OF_{needed.name.replace('/', '-')}"
            command = ["python", os.path.relpath(submitit_launch.__file__), *submission_of(run, args, job_id)]
        else:
            command = ["torchrun", *torchrun_of(run, args)]
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
    for i, run in enumerate(runs):
        if problems and args.fail_fast:
            break
        if run.needs is not None and not is_finished(run.needs):
            problems.append(f"{run.name} was not started: {run.needs.name} is not finished")
            continue
        print(f"[{i + 1} of {len(runs)}] {run.name}", flush=True)
        code = call([sys.executable, "-m", "torch.distributed.run", *torchrun_of(run, args)])
        if code or not is_finished(run):
            problems.append(f"{run.name} ended with exit code {code}; {progress_of(run) or 'nothing was saved'}")
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
    jobs: dict[Run, str] = {}
    for run in runs:
        queued = queued_job(run)
        if queued is not None:
            print(f"{run.name} is already in the queue: job {queued}")
        needed = jobs.get(run.needs) if run.needs is not None else None
        jobs[run] = queued or submitit_launch.main(submission_of(run, args, needed)).job_id


# ----------------------------------------------------------------------------------------------------------- flags


def get_args_parser() -> Parser:
    parser = Parser("reproduce_table.py", description=__doc__)
    group = parser.add_argument_group("what is run").add_argument
    group("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)}, or all")
    group("--rows", metavar="GLOB", help="only rows whose pre-training recipe matches, such as 'prmim*'")
    group("--list", action="store_true", help="print the tables and their rows")
    group("--dry_run", action="store_true", help="print the commands, one per line, and run nothing")
    group("--collect", action="store_true", help="run nothing, and write the tables")
    group = parser.add_argument_group("data and output").add_argument
    group("--output_dir", type=Path, default="output/tables", metavar="ROOT", help="folder of all runs")
    group("--data_path", help="ImageNet, as for main_pretrain.py")
    group("--inat_path", help="iNaturalist 2018 and 2019, as for main_finetune.py")
    group("--ade_path", help="ADE20K, as for main_segmentation.py")
    group("--coco_path", help="COCO 2017, as for main_detection.py")
    for name in SETS:
        what = f"{BENCHMARKS[name].title}, as for downstream/robustness/main_robustness.py"
        group(f"--{name}", metavar="DIR", help=what)
    group("--teacher", help="teacher of the rows of TEC, as for main_pretrain.py")
    group("--costs", nargs="+", default=[], metavar="CSV", help="with --collect: files of scripts/profile_pretrain.py")
    group = parser.add_argument_group("how").add_argument
    group("--launcher", default="torchrun", choices=("torchrun", "slurm"), help="flags after -- are the launcher's")
    group("--nproc_per_node", type=int, default=max(1, torch.cuda.device_count()), help="processes, for torchrun")
    for name in ("pretrain", "finetune", "segmentation", "detection", "robustness"):
        text = f'flags of main_{name}.py, as in --{name}_flags "--batch_size 64" or --{name}_flags=--device=cpu'
        group(f"--{name}_flags", type=shlex.split, default=[], metavar="FLAGS", help=text)
    group("--fail_fast", action="store_true", help="start nothing more after a run has failed")
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    parser = get_args_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.launcher_flags = words[end + 1 :]
    unknown = [name for name in args.tables if name not in (*TABLES, "all")]
    if unknown:
        parser.error(f"unknown table {unknown[0]!r}: give {', '.join(TABLES)}, or all")
    if not args.tables and not args.list:
        parser.error(f"give a table ({', '.join(TABLES)}, or all), or --list")
    if "all" in args.tables or args.list:
        args.tables = list(TABLES)
    if args.costs and not args.collect:
        parser.error("--costs goes with --collect")
    return parser, args


def select_rows(args: argparse.Namespace) -> dict[str, list[Row]]:
    """Returns {table: its rows that --rows asks for}. ValueError if there are none."""
    chosen = {name: list(TABLES[name].rows) for name in dict.fromkeys(args.tables)}
    if args.rows is None:
        return chosen
    known = [row.pretrain for rows in chosen.values() for row in rows]
    for name, rows in chosen.items():
        chosen[name] = [row for row in rows if fnmatchcase(row.pretrain, args.rows)]
    if not any(chosen.values()):
        raise ValueError(f"--rows {args.rows!r} matches none of {', '.join(dict.fromkeys(known)) or 'no recipes'}")
    return {name: rows for name, rows in chosen.items() if rows}


def check_paths(args: argparse.Namespace) -> None:
    """ValueError if a folder of images does not exist. Runs that need it may start days later."""
    for name in ("data_path", "inat_path", *PATHS.values(), *SETS):
        path = getattr(args, name)
        if path is not None and not Path(path).exists():
            raise ValueError(f"--{name} {path!r} does not exist")


def find_pending(chosen: Mapping[str, Sequence[Row]], args: argparse.Namespace) -> list[Run]:
    """Returns the runs that are not finished, in order and each once."""
    sets = [name for name in SETS if getattr(args, name) is not None]
    found: dict[Run, None] = {}
    for name, rows in chosen.items():
        for row in rows:
            for run in runs_of(TABLES[name], row, args.output_dir, sets).values():
                found |= dict.fromkeys(pending(run))
    return list(found)


def print_list(chosen: Mapping[str, Sequence[Row]]) -> None:
    for name, rows in chosen.items():
        print(f"{name}: {TABLES[name].title}")
        for row in rows:
            numbers = ", ".join(n for n in row.numbers if n != "-")
            recipes = ", ".join(dict.fromkeys(row.finetune.values()))
            print(f"  {row.label:24} {row.throw_ratio:2} %  {row.pretrain}: {recipes}: {numbers}")


def main(argv: Sequence[str] | None = None) -> bool:
    """Runs the program; `argv` replaces the command line. Returns False if a signal stopped it."""
    parser, args = parse_args(argv)
    with user_errors(parser):
        check_least(args, 1, "nproc_per_node")
        chosen = select_rows(args)
        if args.list:
            print_list(chosen)
            return True
        if args.collect:
            files = read_costs(args.costs)
            print("\n".join(collect(name, rows, args.output_dir, files) for name, rows in chosen.items()), end="")
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
