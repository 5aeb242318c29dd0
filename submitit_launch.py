"""Submits any main of this project to SLURM, and sees it through time limits and preemptions.

    python submitit_launch.py --nodes 8 --partition P main_pretrain --recipe prmim50_vit_base_800ep --data_path IMAGENET
    python submitit_launch.py --cluster local --gpus_per_node 0 --tasks_per_node 2 main_pretrain --recipe quickstart ...
    python submitit_launch.py --dry_run ...

What follows the name of the main is the main's own. Each task is a process of the run; --output_dir is chosen if it is not
given. The folder holds the job's logs, too (jobs/), and a copy of the code as it was submitted (code/HASH), which is what
runs, requeues included. A new submission runs the code of its day, with a copy of its own. Before the time limit, or when
the job is preempted, SLURM's signal makes the run save after its step; then the job is requeued and goes on there, as often
as it takes. A job whose process or node has died is requeued, too, if its run has got further since it was started. After
`scancel`, it has saved as well, and the same command goes on.
"""

import argparse
import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import submitit

from recipes import RECIPES
from util.run.cli import Parser, flags_given, parse_with_recipe, run_program
from util.run.code_version import code_version, source_files, source_hash, write_version
from util.run.run_folder import PROGRESS
from util.run.watchdog import TEMPORARY

MAINS = ("main_pretrain", "main_finetune", "main_robustness")
ROOT = Path(__file__).resolve().parent
FINAL = (2, 3, 4)  # exit codes of a user's error, of numbers that are not finite, of no usable checkpoint: a restart ends alike


class Task:
    """What a job does: `main`, with its flags, in every process of the job. submitit pickles it, and again to requeue it."""

    def __init__(self, main, argv, folder):
        self.main, self.argv, self.folder = main, argv, folder

    def __call__(self):
        os.chdir(self.folder)  # where it was submitted, to which the flags' paths are relative; the code is elsewhere
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's own, which the run replaces while it trains
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        job = submitit.JobEnvironment()
        if job.cluster == "slurm" and job.global_rank == 0:  # all starts write to the same logs
            print(f"job {job.job_id}, restarted {os.environ.get('SLURM_RESTART_COUNT', 0)} times", flush=True)
        try:
            finished = importlib.import_module(self.main).main(self.argv)
        except KeyboardInterrupt:  # stopped by SIGINT, and saved
            if job.cluster == "debug":
                raise
            finished = False
        except SystemExit as stop:
            # srun tells of the processes that it kills on this account, not of this one.
            if stop.code in FINAL and job.cluster != "debug":
                (job.paths.folder / f"exit-code-{job.job_id}").write_text(f"{stop.code}\n")
            raise
        if finished is False and job.cluster != "debug":
            end_stopped(job, requeue)
        return finished is not False

    def checkpoint(self):
        """Called by submitit to requeue: the same command goes on where the run was saved."""
        return submitit.helpers.DelayedSubmission(Task(self.main, self.argv, self.folder))


def end_stopped(job, requeue):
    """A signal has stopped the run, and it has saved: the first process requeues the job where nobody else does; all exit.

    Only by SystemExit does submitit write no result, which would pass for the whole run's.
    """
    if job.global_rank != 0:
        sys.exit(0)
    # If it is ending, it has been requeued already, or cancelled, and must not come back.
    if job.cluster == "slurm" and slurm_state(job.job_id) != "RUNNING":
        sys.exit(TEMPORARY)
    try:
        requeue(signal.SIGUSR2, None)
    except subprocess.CalledProcessError:  # in the meantime
        sys.exit(TEMPORARY)


def slurm_state(job_id):
    """PENDING, RUNNING, COMPLETING while SLURM is ending it, ...; "" once it has ended; None where SLURM does not answer."""
    query = subprocess.run(["squeue", "--noheader", "--jobs", job_id, "--format", "%T"], capture_output=True, text=True)
    return None if query.returncode and "Invalid job id" not in query.stderr else query.stdout.strip()


def get_args_parser():
    parser = Parser("submitit_launch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag, boolean = parser.add_argument, argparse.BooleanOptionalAction
    flag("--cluster", default="slurm", choices=("slurm", "local", "debug"), help="local: processes here; debug: this process")
    flag("--nodes", type=int, default=1)
    flag("--gpus_per_node", type=int, default=8)
    flag("--tasks_per_node", type=int, help="processes a node (default: one a GPU)")
    flag("--cpus_per_task", type=int, default=10)
    flag("--mem_gb", type=float, help="a node's (default: the partition's)")
    flag("--timeout_min", type=int, default=24 * 60, help="of a job; the run takes as many jobs as it needs")
    flag("--signal_delay_s", type=int, default=300, help="saving begins so long before the limit, or up to a minute earlier")
    flag("--partition")
    flag("--account")
    flag("--qos")
    flag("--constraint")
    flag("--comment")
    flag("--name", help="of the job (default: the folder's)")
    flag("--wait", action=boolean, default=False, help="until the job has ended; always with --cluster debug")
    flag("--dry_run", action=boolean, default=False, help="print what would be submitted")
    flag("main", choices=MAINS)
    flag("argv", nargs=argparse.REMAINDER, help="the main's flags")
    return parser


def parse_args(argv=None):
    """-> (args, the run's folder). The main parses its own flags now, so that a typing error is not found in the queue."""
    parser = get_args_parser()
    args = parser.parse_args(argv)
    if min(args.nodes, args.cpus_per_task, args.timeout_min, args.signal_delay_s) < 1 or args.gpus_per_node < 0:
        counts = "--nodes, --cpus_per_task, --timeout_min and --signal_delay_s"
        parser.error(f"{counts} must be at least 1, and --gpus_per_node at least 0")
    args.tasks_per_node = args.tasks_per_node or max(1, args.gpus_per_node)
    if args.cluster != "slurm" and args.nodes > 1:
        parser.error(f"--cluster {args.cluster} is one node, got --nodes {args.nodes}")
    if 60 * args.timeout_min <= 2 * args.signal_delay_s and args.cluster == "slurm":
        parser.error(f"--timeout_min {args.timeout_min} leaves no time beside --signal_delay_s {args.signal_delay_s} for saving")
    known, given = main_flags(args.main, args.argv)
    folder = Path(known.output_dir)
    if "output_dir" not in given:
        folder = Path("output") / time.strftime(f"{args.main}-%Y%m%d-%H%M%S")
    args.argv += ["--output_dir", str(folder.resolve())]  # the last one counts; jobs start elsewhere
    return args, folder.resolve()


def main_flags(main: str, argv: list[str]) -> tuple[argparse.Namespace, set[str]]:
    """-> (the main's flags as it parses them itself, the names of those that `argv` sets)."""
    module = importlib.import_module(main)
    parser = module.get_args_parser()
    if hasattr(module, "parse_args"):
        known = module.parse_args(argv)[1]
    else:
        known = parse_with_recipe(parser, RECIPES, argv) if main == "main_pretrain" else parser.parse_args(argv)
    return known, flags_given(parser, argv)


def job_parameters(args, folder):
    """submitit's parameters of the job."""
    parameters = dict(
        name=args.name or folder.name,
        nodes=args.nodes,
        tasks_per_node=args.tasks_per_node,
        gpus_per_node=args.gpus_per_node,
        cpus_per_task=args.cpus_per_task,
        timeout_min=args.timeout_min,
    )
    if args.mem_gb is not None:
        parameters["mem_gb"] = args.mem_gb
    if args.cluster != "slurm":
        return parameters
    chosen = {name: getattr(args, name) for name in ("partition", "account", "qos", "constraint", "comment")}
    parameters |= {f"slurm_{name}": value for name, value in chosen.items() if value}
    return parameters | dict(
        slurm_signal_delay_s=args.signal_delay_s,
        slurm_srun_args=["--kill-on-bad-exit=1", f"--cpus-per-task={args.cpus_per_task}"],
        slurm_additional_parameters={"requeue": True},
        slurm_teardown=guard(folder),
    )


def guard(folder: Path) -> list[str]:
    """Lines after srun: a job whose process or node has died goes back to the queue, unless it died where it had died before.

    How far the run is, the main itself has noted in the folder. A job that no longer is RUNNING is left alone: SLURM knows
    what to do with it. Results that the dead processes have left are removed.
    """
    last = "$jobs/progress"
    final = " ".join(f"&& [ $rc -ne {code} ]" for code in FINAL)
    return [
        f"rc=$?; jobs={shlex.quote(str(folder / 'jobs'))}; code=$jobs/exit-code-$SLURM_JOB_ID",
        'if [ -e "$code" ]; then rc=$(cat "$code"); rm "$code"; fi',
        f'now=$(cat {shlex.quote(str(folder / PROGRESS))} 2>/dev/null); before=$(cat "{last}" 2>/dev/null)',
        f'echo "$now" > "{last}"',
        f'if [ $rc -ne 0 ] {final} && [ "$now" != "$before" ] &&',
        '   [ "$(squeue --noheader --jobs $SLURM_JOB_ID --format %T)" = RUNNING ]',
        'then rm -f "$jobs/$SLURM_JOB_ID"_*_result.pkl; scontrol requeue $SLURM_JOB_ID; fi',
        "exit $rc",
    ]


def snapshot(folder: Path) -> Path:
    """Copies the code of today beside the run, so that what is edited while a job waits does not run; -> the copy.

    Its name is the hash of its content: equal code is copied once, and a copy is never changed, since jobs that were
    submitted before may be requeued.
    """
    code, temporary = folder / "code" / source_hash(), folder / f".code.tmp-{os.getpid()}"
    if not code.exists():
        for path in source_files(ROOT):
            copy = temporary / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        write_version(temporary)
        code.parent.mkdir(parents=True, exist_ok=True)
        temporary.rename(code)
    return code


def main(argv=None):
    args, folder = parse_args(argv)
    parameters = job_parameters(args, folder)
    if args.dry_run:
        print(f"{args.main} {shlex.join(args.argv)}")
        print("\n".join(f"  {name}: {value}" for name, value in parameters.items()))
        return None
    options = {"slurm_max_num_timeout": 10_000} if args.cluster == "slurm" else {}  # submitit's 3 end a long run
    here = os.getcwd()
    try:
        executor = submitit.AutoExecutor(folder / "jobs", cluster=args.cluster, **options)
        executor.update_parameters(**parameters)
        os.chdir(snapshot(folder))  # jobs start in the folder that they are submitted from, and import what lies there
        job = executor.submit(Task(args.main, args.argv, here))
    except (OSError, RuntimeError) as error:  # no SLURM here, sbatch refuses, the folder cannot be written to
        sys.exit(f"submitit_launch.py: error: the job could not be submitted: {error}")
    finally:
        os.chdir(here)
    print(f"job {job.job_id}: {folder}\ncode: {code_version()}\nlogs: {job.paths.stdout}")
    if args.wait or args.cluster == "debug":
        wait_for(job, args.cluster)
    if args.cluster == "debug" and not all(job.results()):
        return False  # stopped by a signal
    return job


def wait_for(job: submitit.Job, cluster: str) -> None:
    """Waits until the job has ended, requeues included, and exits with a message if its run has not.

    What a start that dies leaves behind would pass submitit for the end, so SLURM is asked first.
    """
    while cluster == "slurm" and slurm_state(job.job_id) != "":
        time.sleep(5)
    failed = f"submitit_launch.py: error: job {job.job_id} has ended, but its run has not"
    if cluster == "slurm" and not job.paths.result_pickle.exists():
        sys.exit(f"{failed}; see {job.paths.stderr}")
    try:
        job.results()
    except submitit.core.utils.UncompletedJobError:  # a long text with the whole log inside
        sys.exit(f"{failed}; see {job.paths.stderr}")


if __name__ == "__main__":  # under its own name, or the pickled task would be of __main__
    run_program(importlib.import_module("submitit_launch").main, "submitit_launch.py")
