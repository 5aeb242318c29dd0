"""Runs on a real SLURM of two virtual nodes on this machine: its signals, requeues and lost nodes.

All runs are the same one, of 72 steps in two processes. Each must end with exactly the losses of the undisturbed one.
PRMIM_LONG_TESTS=1 adds what takes minutes.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

import submitit_launch
from tests import until
from tests.patches import MonkeyPatch
from tests.runs import pretrain, reports

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "slurm_on_one_machine.sh"
HOME = Path("/run/slurm-on-one-machine")
DAEMONS = {"slurmctld", "slurmd", "slurmstepd"}
FINISHED = "pre-trained"
# 12 steps an epoch, and 72 in all
TINY = [*pretrain.flags.split(), "--batch_size", "1", "--blr", "0.1"]
TWO_NODES = ["--cluster", "slurm", "--nodes", "2", "--tasks_per_node", "1", "--cpus_per_task", "1"]


@pytest.fixture(scope="module")
def slurm():
    """Starts it, and stops it in the end, unless it was up before."""
    if os.geteuid() != 0:
        pytest.skip("starting a SLURM on this machine needs root")
    if not all(shutil.which(daemon) for daemon in ("slurmctld", "slurmd", "munged")):
        pytest.skip("no SLURM is installed: bash scripts/slurm_on_one_machine.sh install")
    was_up = HOME.exists()
    start = subprocess.run(["bash", SCRIPT, "up"], capture_output=True, text=True)
    with MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(HOME / "slurm.conf"))
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("OMP_NUM_THREADS", "1")
        try:
            if start.returncode:
                pytest.skip(f"SLURM does not start here: {start.stderr.strip()}")
            yield
        finally:
            if not was_up:
                subprocess.run(["bash", SCRIPT, "down"], check=True)
    if not was_up:
        wait_until(lambda: not DAEMONS.intersection(process_names().values()), process_names)


# On a machine at a tenth of the speed of one where a test takes two minutes.
LIMIT = 1800
pytestmark = pytest.mark.timeout(LIMIT + 60)
wait_until = partial(until.wait_until, seconds=LIMIT)


HELD = """

import time
from util.run.train.loop import TrainLoop

set_rates = TrainLoop.set_rates


def hold(loop, step):
    mark = loop.run.output_dir / f"held-{{step}}-{{loop.process.rank}}"
    if step in {steps} and not mark.exists():
        mark.touch()
        while loop.stop.name is None:
            time.sleep(0.1)
    set_rates(loop, step)


TrainLoop.set_rates = hold
"""


class Run:
    """A run's folder, and the SLURM job that works on it; every check of what the run has said is a method."""

    def __init__(self, photos, folder, epochs=6):
        self.flags = [*TINY, "--epochs", str(epochs), "--data_path", str(photos), "--output_dir", str(folder)]
        self.folder = folder
        self.job = None
        self.starts = 0

    def submit(self, *options):
        """By a function call, which saves the seconds of another Python's imports."""
        job = submitit_launch.main([*TWO_NODES, "--gpus_per_node", "0", *options, "main_pretrain", *self.flags])
        self.job = job.job_id

    def text(self):
        path = self.folder / "log.txt"
        return path.read_text() if path.exists() else ""

    def step(self):
        """The last one of which this run has told."""
        path = self.folder / "log.jsonl"
        if not path.exists():
            return 0
        steps = re.findall(r'^{"step": (\d+),.*}$', path.read_text(), re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def hold_at(self, *steps):
        """Before each of these steps (from 0), the run waits once for a signal, however late that comes."""
        main = submitit_launch.snapshot(self.folder) / "main_pretrain.py"  # what the job runs
        main.write_text(main.read_text() + HELD.format(steps=steps))

    def wait_until_held(self, step):
        wait_until(lambda: len([*self.folder.glob(f"held-{step}-*")]) == 2, self.why)
        self.starts += 1

    def disturb(self, step, *command):
        """Runs the command while the run is held, and waits for its next start; -> the step where that resumed."""
        self.wait_until_held(step)
        subprocess.run(command, check=True, capture_output=True)
        return self.resumed()

    def resumed(self):
        """Waits for the next start's first step; -> the step where it resumed."""
        wait_until(lambda: len(re.findall(r"resuming .+ at step", self.text())) >= self.starts, self.why)
        at = int(re.findall(r"resuming .+ at step (\d+)", self.text())[-1])
        wait_until(lambda: self.step() > at, self.why)
        return at

    def stopped(self):
        """[(signal, step)] where it has said that it stopped for a signal."""
        return [(name, int(step)) for name, step in re.findall(r"stopped by (\w+) after step (\d+)", self.text())]

    def state(self):
        """RUNNING, PENDING, ...: SLURM's word for the job."""
        return re.search(r"JobState=(\w+)", shown_by_slurm(self.job))[1]

    def wait_for_the_end(self):
        """-> the loss of each step, in order; every step must stand in the log once."""
        wait_until(lambda: FINISHED in self.text() and self.state() == "COMPLETED", self.why)
        losses = {report["step"]: report["loss"] for report in reports(self.folder)}
        assert [report["step"] for report in reports(self.folder)] == list(range(1, max(losses) + 1))
        return list(losses.values())

    def why(self):
        """What to read if it never came."""
        logs = [path.read_text()[-2000:] for path in sorted((self.folder / "jobs").glob("*_log.*"))]
        return "\n".join([self.state() if self.job else "no job", self.text()[-1000:], *logs])


def nodes_by_slurm():
    return subprocess.run(["sinfo", "-h", "-N", "-o", "%t"], capture_output=True, text=True).stdout


def shown_by_slurm(job):
    return subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout


def process_names():
    """{pid: name} of all processes that are not dead."""
    names = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = path.read_text().split(" (", 1)
        except OSError:
            continue
        name, _, state = rest.rpartition(") ")
        if not state.startswith("Z"):
            names[int(pid)] = name
    return names


def task(run, rank):
    """The process id of a rank, which is of Python, not of what leads to it."""
    wanted = {f"SLURM_JOB_ID={run.job}", f"SLURM_PROCID={rank}", "SUBMITIT_EXECUTOR=slurm"}
    for pid, name in process_names().items():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if name.startswith("python") and wanted <= set(environment):
            return pid
    raise AssertionError(f"rank {rank} of job {run.job} does not run")


@pytest.fixture(scope="module")
def undisturbed(slurm, photos, tmp_path_factory):
    """The loss of each step of a run that nothing has happened to, by the command line, with virtual GPUs."""
    run = Run(photos, tmp_path_factory.mktemp("slurm") / "run")
    command = [
        sys.executable,
        "submitit_launch.py",
        *TWO_NODES,
        *["--gpus_per_node", "2", "--wait", "main_pretrain"],
        *run.flags,
    ]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    run.job = re.match(r"job (\d+): ", out)[1]
    return run.wait_for_the_end()


def test_two_nodes_make_one_run(undisturbed):
    assert len(undisturbed) == 72
    assert undisturbed[-1] < undisturbed[0]


@pytest.mark.parametrize("requeue", [False, pytest.param(True, marks=pytest.mark.long)])
def test_signals_cost_no_step(undisturbed, photos, tmp_path, requeue):
    """Before the time limit SLURM sends USR2. A preemption and an administrator's requeue send TERM alone."""
    run = Run(photos, tmp_path / "run")
    run.flags += ["--num_workers", "1"]  # which SLURM sends its signals, too
    run.hold_at(8, 24, *[40] * requeue)
    run.submit()
    expected = [("SIGUSR2", run.disturb(8, "scancel", "--signal=USR2", run.job))]
    urgent = ["sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
    expected.append(("SIGTERM", run.disturb(24, *urgent)))
    if requeue:
        expected.append(("SIGTERM", run.disturb(40, "scontrol", "requeue", run.job)))
    assert run.wait_for_the_end() == undisturbed
    # SLURM may start the job once more before the urgent one, and preempts it again then.
    assert set(expected) <= set(run.stopped())
    said = (run.folder / "jobs" / f"{run.job}_0_log.out").read_text()
    restarts = [int(number) for number in re.findall(r"restarted (\d) times", said)]
    assert restarts == list(range(len(restarts)))
    assert len(restarts) > len(expected)


HELD_WORK = """

from util.run.train.loop import TrainLoop

stop_if_asked = TrainLoop.stop_if_asked


def hold(loop):
    while loop.step in (12, 24, 36) and loop.step > loop.first_step and loop.stop.name is None:
        __import__("time").sleep(0.1)
    stop_if_asked(loop)


TrainLoop.stop_if_asked = hold
"""


def test_signals_in_evaluations_cost_no_step(undisturbed, photos, tmp_path):
    """The first three evaluations last until a signal comes. Nothing else would save before the end."""
    run = Run(photos, tmp_path / "run")
    run.flags = [*run.flags, "--save_steps", "0", "--knn_every", "1"]
    main = submitit_launch.snapshot(run.folder) / "main_pretrain.py"  # what the job runs
    main.write_text(main.read_text() + HELD_WORK)
    run.submit()
    urgent = ["sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
    for step, command in ((12, ["scancel", "--signal=USR2", run.job]), (24, urgent), (36, ["scancel", run.job])):
        wait_until(lambda step=step: run.step() == step, run.why)
        subprocess.run(command, check=True, capture_output=True)
        wait_until(lambda step=step: (run.folder / f"checkpoint-{step}.json").exists(), run.why)
    wait_until(lambda: run.state() == "CANCELLED", run.why)
    main.write_text(main.read_text().removesuffix(HELD_WORK))
    run.submit()
    wait_until(lambda: FINISHED in run.text() and run.state() == "COMPLETED", run.why)
    assert run.stopped() == [("SIGUSR2", 12), ("SIGTERM", 24), ("SIGTERM", 36)]
    assert [int(step) for step in re.findall(r"resuming .+ at step (\d+)", run.text())] == [12, 24, 36]
    trained = [report for report in reports(run.folder) if "loss" in report]
    assert [report["step"] for report in trained] == list(range(1, 73))
    assert [report["loss"] for report in trained] == undisturbed
    evaluated = [report["step"] for report in reports(run.folder) if "rankme" in report]
    assert evaluated == [0, 12, 24, 36, 48, 60, 72]


def test_what_is_cancelled_or_killed_goes_on(undisturbed, photos, tmp_path):
    """A cancelled job has saved and is not requeued. The next one loses a process and is requeued."""
    run = Run(photos, tmp_path / "run")
    run.flags += ["--save_steps", "3"]
    run.hold_at(8, 30)
    run.submit()
    run.wait_until_held(8)
    subprocess.run(["scancel", run.job], check=True)
    wait_until(lambda: run.state() == "CANCELLED", run.why)
    [(name, step)] = run.stopped()
    assert name == "SIGTERM"
    assert (run.folder / f"checkpoint-{step}.json").exists()
    cancelled = run.job
    run.submit()
    assert run.resumed() == step

    run.wait_until_held(30)
    os.kill(task(run, 1), signal.SIGKILL)
    before = run.step()
    assert before - 5 <= run.resumed()

    # srun ends the other process by TERM: it may save before it is killed.
    assert run.wait_for_the_end() == undisturbed
    assert run.stopped()[:1] == [(name, step)]
    assert "JobState=CANCELLED" in shown_by_slurm(cancelled)


@pytest.mark.long
def test_a_dependent_job_waits_until_the_first_run_is_finished(slurm, photos, tmp_path):
    """A requeue of the first job is not its end. If the first job is cancelled, so is the second."""
    first = Run(photos, tmp_path / "first", epochs=3)
    first.hold_at(8)
    first.submit()
    second = Run(photos, tmp_path / "second", epochs=1)
    second.submit("--dependency", f"afterok:{first.job}")
    first.disturb(8, "scancel", "--signal=USR2", first.job)
    assert second.state() == "PENDING"
    assert not second.text()
    first.wait_for_the_end()
    second.wait_for_the_end()
    third = Run(photos, tmp_path / "third")
    third.hold_at(8)
    third.submit()
    fourth = Run(photos, tmp_path / "fourth")
    fourth.submit("--dependency", f"afterok:{third.job}")
    third.wait_until_held(8)
    subprocess.run(["scancel", third.job], check=True)
    wait_until(lambda: fourth.state() == "CANCELLED", fourth.why)
    assert not fourth.text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "code", "restarts"),
    [
        ("sys.exit(3)", 3, 0),
        ("sys.exit(1)", None, 3),
        ("os.kill(os.getpid(), signal.SIGUSR2)", None, 3),
    ],
)
def test_one_process_decides_whether_another_start_makes_sense(slurm, tmp_path, end, code, restarts):
    """srun kills the other processes. After exit code 3 there is no restart. After 1, or the signal before the time
    limit, there are three, since no start makes progress."""
    run = Run(tmp_path, tmp_path / "run")
    main = submitit_launch.snapshot(run.folder) / "main_pretrain.py"  # what the job runs
    main.write_text(
        "import os, signal, sys, time\n\n\ndef main(argv):\n    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        f"    time.sleep(60 * (os.environ['SLURM_PROCID'] == '0'))\n    {end}\n"
    )
    (run.folder / "checkpoint-5.json").touch()
    run.submit()
    wait_until(lambda: run.state() == "FAILED", run.why)
    shown = shown_by_slurm(run.job)
    assert f"Restarts={restarts} " in shown
    assert code is None or f"ExitCode={code}:0" in shown
    assert submitit_launch.slurm_state(run.job) == ""
    assert submitit_launch.slurm_state("999999") == ""
    jobs = run.folder / "jobs"
    assert [path.name for path in jobs.iterdir() if "_" not in path.name] == []
    said = (jobs / f"{run.job}_0_log.err").read_text()
    assert ("ends after 4 starts without progress" in said) == (restarts > 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_storage_makes_a_job_wait_in_the_queue(slurm, photos, tmp_path, rank):
    """One process ends with 75, and srun kills the other. SLURM starts the job again when its time has come."""
    run = Run(photos, tmp_path / "run")
    main = submitit_launch.snapshot(run.folder) / "main_pretrain.py"  # what the job runs
    real = main.read_text()
    wait = f"    time.sleep(60 * (os.environ['SLURM_PROCID'] != '{rank}'))\n"
    main.write_text(f"import os, sys, time\n\n\ndef main(argv):\n{wait}    sys.exit(75)\n")
    run.submit()
    wait_until(lambda: "JobState=PENDING Reason=BeginTime" in shown_by_slurm(run.job), run.why)
    shown = shown_by_slurm(run.job)
    times = dict(re.findall(r"(SubmitTime|EligibleTime)=(\S+)", shown))
    begin = datetime.fromisoformat(times["EligibleTime"])
    assert 290 <= (begin - datetime.fromisoformat(times["SubmitTime"])).total_seconds() < 600
    main.write_text(real)
    # The first start has left its nodes, and its daemon has told SLURM so: it would take a later message for the next
    # start's end.
    wait_until(lambda: set(nodes_by_slurm().split()) == {"idle"}, nodes_by_slurm)
    daemons = ["pgrep", "-f", rf"slurmstepd: \[{run.job}\."]
    wait_until(lambda: subprocess.run(daemons, capture_output=True).stdout == b"", run.why)
    subprocess.run(["scontrol", "update", f"jobid={run.job}", "starttime=now"], check=True)
    run.wait_for_the_end()


ALL_SEE = """
import os, sys, time

def main(argv):
    gpus, per_task, rank, start = map(os.environ.get, (
        "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_PER_TASK", "SLURM_LOCALID", "SLURM_RESTART_COUNT"))
    print("sees", gpus, per_task, rank, flush=True)
    open(f"{folder}/{{start}}-{{rank}}", "w").close()
    while not all(os.path.exists(f"{folder}/{{start}}-{{other}}") for other in (0, 1)):
        time.sleep(0.1)  # SLURM ends one when the other ends
    sys.exit(1)
"""


def test_a_site_s_options_hold_for_requeues_too(slurm, tmp_path):
    """Each of two tasks sees one GPU, in all starts of an exclusive job."""
    run = Run(tmp_path, tmp_path / "run")
    main = submitit_launch.snapshot(run.folder) / "main_pretrain.py"  # what the job runs
    main.write_text(ALL_SEE.format(folder=str(tmp_path)))
    flags = "--nodes 1 --tasks_per_node 2 --gpus_per_node 2 --slurm gpus-per-task=1 --slurm exclusive= --slurm nice=7"
    run.submit(*flags.split())
    wait_until(lambda: run.state() == "FAILED", run.why)
    shown = shown_by_slurm(run.job)
    assert "Restarts=3 " in shown
    assert "Nice=7 " in shown
    assert "OverSubscribe=NO" in shown
    for rank in (0, 1):
        said = (run.folder / "jobs" / f"{run.job}_{rank}_log.out").read_text()
        assert re.findall("sees (.+)", said) == [f"{rank} 1 {rank}"] * 4


@pytest.mark.long
def test_a_run_outlives_its_node(undisturbed, photos, tmp_path):
    """SLURM gives the node up some 20 s after its daemon has died, and requeues the job itself."""
    run = Run(photos, tmp_path / "run")
    run.flags += ["--save_steps", "3"]
    run.hold_at(30)
    run.submit()
    run.wait_until_held(30)
    lost = task(run, 1)
    keeper = int(Path(f"/proc/{lost}/stat").read_text().rpartition(")")[2].split()[1])  # its slurmstepd
    for pid in (int((HOME / "slurmd.n2.pid").read_text()), keeper, lost):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: run.state() != "RUNNING", run.why)
    before = run.step()
    subprocess.run(["bash", SCRIPT, "up"], check=True)
    assert before - 5 <= run.resumed()
    assert run.wait_for_the_end() == undisturbed
    assert not run.stopped()


@pytest.mark.long
def test_a_run_outlasts_its_time_limits(slurm, photos, tmp_path):
    """Jobs of one minute: SLURM looks at the clock each half minute, so that the signal comes early."""
    run = Run(photos, tmp_path / "run")
    run.hold_at(8, 24)
    run.submit("--timeout_min", "1", "--signal_delay_s", "20")
    wait_until(lambda: FINISHED in run.text() and run.state() == "COMPLETED", run.why)
    losses = run.wait_for_the_end()
    stops = run.stopped()
    assert len(losses) == 72
    assert len(stops) >= 2
    assert {name for name, _ in stops} == {"SIGUSR2"}
    resumed = [int(step) for step in re.findall(r"resuming .+ at step (\d+)", run.text())]
    assert resumed == [step for _, step in stops]
