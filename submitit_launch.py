"""Submits a main of this project to SLURM and requeues the job until the run is done.

    python submitit_launch.py --nodes 8 --partition P main_pretrain --recipe prmim50_vit_base_800ep --data_path IMAGENET
    python submitit_launch.py --cluster local --gpus_per_node 0 --tasks_per_node 2 main_pretrain --recipe quickstart ...
    python submitit_launch.py --dry_run ...

The flags after the name of the main belong to the main. Each task is one process of the run. If --output_dir is not
given, a new folder below output/ is used. It also holds the job's logs (jobs/) and a copy of the code (code/HASH).

The job runs this copy, also when it is requeued. A new submission copies the code again. Before the time limit, or when
the job is preempted, SLURM sends a signal: the run saves after its current step, and the requeued job resumes there. If
a process or a node dies, the job is requeued, too. Three requeues in a row may bring no progress. If the storage fails,
the job waits in the queue, for a day. After `scancel`, submit the same command again to resume. main_probe does not
resume, so its time limit ends it.
"""

import argparse
import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import submitit

from util.code_version import code_version, source_files, source_hash, write_version
from util.flag import Flag
from util.run.cli import Parser
from util.run.exits import FINAL, TEMPORARY, end_if_others_wait, run_program
from util.urls import redact

# {name on the command line: module}. Modules of downstream/ are imported only if they are to be run.
MAINS = {
    "main_pretrain": "main_pretrain",
    "main_finetune": "main_finetune",
    "main_probe": "downstream.probe.main_probe",
    "main_segmentation": "downstream.segmentation.main_segmentation",
    "main_detection": "downstream.detection.main_detection",
}
ROOT = Path(__file__).resolve().parent
PARTS = ("imagenet_c.json", "probe.json")  # to which a finished part is added
NO_RESUME = ("main_probe",)  # mains that begin anew after a stop
GENERIC = ("gres", "tres_per_job", "tres_per_node", "tres_per_task")  # options that may request GPUs
MAX_IDLE_STARTS = 3  # starts in a row without progress after which a job is still requeued
MAX_LATE_STARTS = 24  # as many more, if the storage has failed; they begin ever later, the last one after a day
LATER = 300  # seconds that the first of them waits in the queue
SLURM_TIMEOUT_MIN = 24 * 60
YEAR_MIN = 365 * 24 * 60


class JobTask:
    """Runs `main` with `argv` in each process of the job. submitit pickles it at submission and at each requeue."""

    def __init__(self, main: str, argv: list[str], folder: str) -> None:
        self.main = main
        self.argv = argv
        self.folder = folder

    def __call__(self) -> bool:
        job = submitit.JobEnvironment()
        if job.cluster == "slurm":  # the run reads ranks and addresses from SLURM
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                os.environ.pop(name, None)
            if job.global_rank == 0:  # all starts write to the same logs
                print(f"job {job.job_id}, restarted {os.environ.get('SLURM_RESTART_COUNT', 0)} times", flush=True)
        else:
            submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        requeue_locally: Any = signal.getsignal(signal.SIGUSR2)  # submitit's handler, which the run replaces
        if job.cluster == "slurm":
            signal.signal(signal.SIGUSR2, self.end_before_training)
        try:
            os.chdir(self.folder)  # to which paths in the flags are relative
            finished = importlib.import_module(MAINS[self.main]).main(self.argv) is not False
        except KeyboardInterrupt:  # SIGINT stopped the run, which has saved
            if job.cluster == "debug":
                raise
            finished = False
        except SystemExit as stop:
            # srun reports the other processes, which it kills, instead of this one: leave a note for `guard`.
            note = job.paths.folder / f"exit-code-{job.job_id}"
            is_known = stop.code in FINAL or (stop.code == TEMPORARY and not note.exists())
            if is_known and job.cluster != "debug":
                note.write_text(f"{stop.code}\n")
            end_if_others_wait(stop)
            raise
        except Exception as error:
            end_if_others_wait(error)
            raise
        if finished or job.cluster == "debug":
            return finished
        # SystemExit prevents submitit from writing a result file. It would treat that file as the result of the run.
        if job.global_rank != 0:
            sys.exit(0)
        if job.cluster == "local":
            requeue_locally(signal.SIGUSR2, None)
        sys.exit(TEMPORARY)  # see `guard`

    def end_before_training(self, number: int, frame: FrameType | None) -> NoReturn:
        """Handles the signal before the time limit while the run is not trained, so that `guard` requeues the job."""
        if self.main in NO_RESUME:
            print(f"{self.main}: error: it cannot resume: give a longer --timeout_min", file=sys.stderr)
            sys.exit(2)
        sys.exit(128 + number)

    def checkpoint(self) -> Any:
        """Returns what submitit requeues: the same command, which resumes the run."""
        return submitit.helpers.DelayedSubmission(JobTask(self.main, self.argv, self.folder))


def slurm_state(job_id: str) -> str | None:
    """Returns the job's state, such as PENDING, RUNNING or COMPLETING; "" if it has ended; None if SLURM fails."""
    query = subprocess.run(["squeue", "--noheader", "--jobs", job_id, "--format", "%T"], capture_output=True, text=True)
    if query.returncode and "Invalid job id" not in query.stderr:
        return None
    return query.stdout.strip()


PROGRAM_FLAGS = (
    Flag("main", help="program to run", positional=True, choices=MAINS),
    Flag("argv", help="flags of the main", positional=True, nargs=argparse.REMAINDER),
)

SUBMISSION_FLAGS = (
    Flag(
        "cluster", str, "slurm", "local: on this machine; debug: in this process", choices=("slurm", "local", "debug")
    ),
    Flag("wait", bool, False, "wait until the job has ended, as --cluster debug always does"),
    Flag("dry_run", bool, False, "print what would be submitted"),
    Flag("name", help="name of the job (default: name of the run's folder)"),
    Flag("comment", help="comment of the job"),
)

RESOURCE_FLAGS = (
    Flag("nodes", int, 1, "number of nodes", at_least=1),
    Flag("gpus_per_node", int, 8, "number of GPUs per node; 0: CPU only", at_least=0),
    Flag("tasks_per_node", int, help="number of processes per node (default: one per GPU)", at_least=1),
    Flag("cpus_per_task", int, 16, "CPUs per process, as SLURM counts them", at_least=1),
    Flag("mem_gb", float, help="memory per node in GB (default: the partition's)"),
)

QUEUE_FLAGS = (
    Flag("timeout_min", int, help="time limit of one job in minutes (default: 1440 on SLURM, else none)", at_least=1),
    Flag("signal_delay_s", int, 300, "seconds before the time limit at which the run is told to save", at_least=1),
    Flag("partition", help="SLURM partition (default: the cluster's)"),
    Flag("account", help="account to charge (default: the user's)"),
    Flag("qos", help="quality of service (default: the account's)"),
    Flag("constraint", help="required features of the nodes"),
    Flag("dependency", help="condition under which the job starts, such as afterok:ID; cancelled if it cannot be met"),
    Flag(
        "slurm",
        str,
        [],
        "further option of sbatch, such as gres=gpu:h200:8, or exclusive= without a value; repeatable",
        repeats=True,
        metavar="KEY=VALUE",
    ),
)


def get_args_parser() -> Parser:
    parser = Parser("submitit_launch.py", __doc__, *PROGRAM_FLAGS)
    parser.add_flags("submission", *SUBMISSION_FLAGS)
    parser.add_flags("resources", *RESOURCE_FLAGS)
    parser.add_flags("queue", *QUEUE_FLAGS)
    return parser


def site_options(given: Sequence[str]) -> dict[str, Any]:
    """Returns --slurm as {option of sbatch: value, or True without one}. They win over what the launcher sets."""
    options: dict[str, Any] = {}
    for text in given:
        key, _, value = text.partition("=")
        options[key.lstrip("-").replace("-", "_")] = value or True
    return options


def request_gpus(options: dict[str, Any]) -> bool:
    """Whether these options of sbatch request GPUs, so that the launcher must not."""
    return any(key.startswith("gpus") or (key in GENERIC and "gpu" in str(options[key])) for key in options)


def parse_args(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Path]:
    """Returns the launcher's args and the folder of the run. The main parses its flags, too, to find errors now."""
    parser = get_args_parser()
    args = parser.parse_args(argv)
    if args.timeout_min is None:
        args.timeout_min = SLURM_TIMEOUT_MIN if args.cluster == "slurm" else YEAR_MIN
    if args.tasks_per_node is None:
        args.tasks_per_node = max(1, args.gpus_per_node)
    if args.cluster != "slurm" and args.nodes > 1:
        parser.error(f"--cluster {args.cluster} is one node, got --nodes {args.nodes}")
    args.slurm = site_options(args.slurm)
    if args.cluster == "slurm" and 60 * args.timeout_min <= 2 * args.signal_delay_s:
        limits = f"--timeout_min {args.timeout_min} is too short for --signal_delay_s {args.signal_delay_s}"
        parser.error(f"{limits}: the limit must be more than twice the delay")
    main_parser, main_args = importlib.import_module(MAINS[args.main]).parse_args(args.argv)
    if "output_dir" in main_parser.given:
        folder = Path(main_args.output_dir).resolve()
    else:
        folder = Path("output").resolve() / time.strftime(f"{args.main}-%Y%m%d-%H%M%S")
    if any(redact(word) != word for word in args.argv):
        parser.error("a job stores its flags, so a URL must hold no password or query: use ~/.netrc, for example")
    args.argv += ["--output_dir", str(folder)]  # the last one counts; jobs start in another folder
    return args, folder


def job_parameters(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns submitit's parameters of the job."""
    parameters: dict[str, Any] = {"name": args.name or folder.name}
    for name in ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "timeout_min"):
        parameters[name] = getattr(args, name)
    if args.mem_gb is not None:
        parameters["mem_gb"] = args.mem_gb
    if args.cluster != "slurm":
        return parameters
    for name in ("partition", "account", "qos", "constraint", "comment"):
        if getattr(args, name):
            parameters[f"slurm_{name}"] = getattr(args, name)
    if request_gpus(args.slurm):
        del parameters["gpus_per_node"]
    more: dict[str, Any] = {"requeue": True, **args.slurm}
    if args.dependency:
        more |= {"dependency": args.dependency, "kill_on_invalid_dep": "yes"}
    return parameters | {
        "slurm_signal_delay_s": args.signal_delay_s,
        "slurm_srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={args.cpus_per_task}"],
        "slurm_additional_parameters": more,
        "slurm_setup": note_progress(folder),
        "slurm_teardown": guard(folder),
    }


def note_progress(folder: Path) -> list[str]:
    """Returns shell lines that come before srun: they note how far the run is, by what its main has saved."""
    saved = " ".join(f"{shlex.quote(str(folder))}/{name}" for name in ("checkpoint-*.json", *PARTS))
    return [f"progress() {{ cksum {saved} 2>/dev/null; }}", "before=$(progress)"]


def guard(folder: Path) -> list[str]:
    """Returns shell lines that follow srun. They requeue a job that a signal or the death of a process has stopped.

    A file has a line for each start in a row without progress: TEMPORARY if it has ended so, as when the storage fails.
    After too many the job ends. A job that is not RUNNING is left to SLURM, which is ending it. A busy SLURM is asked
    again. Results of dead processes are removed.
    """
    final = " ".join(f"&& [ $rc -ne {code} ]" for code in FINAL)
    ended = "submitit_launch.py: error: job $SLURM_JOB_ID ends after $((late + others)) starts without progress"
    return [
        f"rc=$?; jobs={shlex.quote(str(folder / 'jobs'))}",
        "code=$jobs/exit-code-$SLURM_JOB_ID; idle=$jobs/idle-starts-$SLURM_JOB_ID; asked=0",
        'said=$(cat "$code" 2>/dev/null); rc=${said:-$rc}; rm -f "$code"',
        "until state=$(squeue --noheader --jobs $SLURM_JOB_ID --format %T) || [ $((asked += 1)) -gt 6 ]",
        "do sleep 10; done",
        f'if [ $rc -ne 0 ] {final} && [ "$state" = RUNNING ]; then',
        '   if [ "$(progress)" = "$before" ]; then echo "$said" >> "$idle"; else rm -f "$idle"; fi',
        f'   late=$(cat "$idle" 2>/dev/null | grep -cx {TEMPORARY})',
        f'   others=$(cat "$idle" 2>/dev/null | grep -cvx {TEMPORARY})',
        f"   if [ $others -le {MAX_IDLE_STARTS} ] && [ $late -le {MAX_LATE_STARTS} ]; then",
        '      rm -f "$jobs/$SLURM_JOB_ID"_*_result.pkl',
        "      trap '' TERM; scontrol requeue $SLURM_JOB_ID",  # SLURM now ends this script by TERM
        f"      [ $late = 0 ] || scontrol update jobid=$SLURM_JOB_ID starttime=now+$((late * {LATER}))",
        "      exit $rc",
        f'   else echo "{ended}" >&2; fi',
        "fi",
        'rm -f "$idle"; exit $rc',
    ]


def snapshot(folder: Path) -> Path:
    """Copies the code into the run's folder, so that later edits do not affect a waiting job. Returns the copy.

    Its name is the hash of its content. Equal code is copied once, and a copy is never changed: requeues still need it.
    """
    code = folder / "code" / source_hash()
    if not code.exists():
        code.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=code.parent) as temporary:  # removed if the disk is full
            copy = Path(temporary) / "code"
            for path in source_files(ROOT):
                target = copy / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
            write_version(copy)
            copy.rename(code)
    return code


def main(argv: Sequence[str] | None = None) -> Any:
    """Submits the job and returns it; None after --dry_run; False if a signal stopped a run in this process."""
    args, folder = parse_args(argv)
    parameters = job_parameters(args, folder)
    if args.dry_run:
        print(f"{args.main} {shlex.join(args.argv)}")
        print("\n".join(f"  {name}: {value}" for name, value in parameters.items()))
        return None
    here = os.getcwd()
    try:
        executor = submitit.AutoExecutor(folder / "jobs", cluster=args.cluster)
        executor.update_parameters(**parameters)
        os.chdir(snapshot(folder))  # a job starts in the folder of its submission, and imports from there
        job = executor.submit(JobTask(args.main, args.argv, here))
    except (OSError, RuntimeError) as error:  # no SLURM, sbatch failed, the folder cannot be written to
        sys.exit(f"submitit_launch.py: error: the job could not be submitted: {error}")
    finally:
        os.chdir(here)
    print(f"job {job.job_id}: {folder}\ncode: {code_version()}\nlogs: {job.paths.stdout}")
    if args.wait or args.cluster == "debug":
        wait_for(job, args.cluster)
    if args.cluster == "debug" and not all(job.results()):
        return False
    return job


def wait_for(job: Any, cluster: str) -> None:
    """Waits until the job has ended, requeues included. Exits with a message if its run failed.

    Asks SLURM first: submitit takes the files of a failed start for a finished job.
    """
    while cluster == "slurm" and slurm_state(job.job_id) != "":
        time.sleep(5)
    failed = f"submitit_launch.py: error: job {job.job_id} has ended, but its run has not"
    if cluster == "slurm" and not job.paths.result_pickle.exists():
        sys.exit(f"{failed}; see {job.paths.stderr}")
    try:
        job.results()
    except submitit.core.utils.UncompletedJobError:  # its message holds the whole log
        sys.exit(f"{failed}; see {job.paths.stderr}")


if __name__ == "__main__":  # under the module's own name, since the task is pickled by it
    run_program(importlib.import_module("submitit_launch").main, "submitit_launch.py")
