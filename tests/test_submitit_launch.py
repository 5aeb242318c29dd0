import json
import os
import re
import signal
import subprocess
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest

import submitit_launch
from tests.runs import children_of, pretrain, refused, reports
from tests.until import wait_until
from util import code_version
from util.run.files.checkpoint import newest_checkpoint


def write_program(path, line):
    """Writes a shell script that stands in for a program of SLURM."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_a_dry_run_says_what_would_be_submitted(tmp_path, capsys):
    options = "--nodes 8 --partition P --account A --timeout_min 300 --mem_gb 400 --dry_run"
    flags = ["main_pretrain", "--recipe", "cifar10", "--output_dir", str(tmp_path / "run")]
    submitit_launch.main([*options.split(), *flags])
    assert not (tmp_path / "run").exists()
    out = capsys.readouterr().out
    assert out.startswith("main_pretrain --recipe cifar10 --output_dir ")
    for line in (
        "nodes: 8",
        "tasks_per_node: 8",
        "gpus_per_node: 8",
        "slurm_partition: P",
        "slurm_account: A",
        "slurm_signal_delay_s: 300",
        "mem_gb: 400.0",
    ):
        assert f"  {line}\n" in out
    assert "--kill-on-bad-exit=1" in out
    assert "{'requeue': True}" in out


@pytest.mark.parametrize(
    ("flags", "minutes"),
    [
        ("--cluster slurm", 24 * 60),
        ("--cluster local", 365 * 24 * 60),  # submitit ends a local job after its fourth time limit
        ("--cluster debug", 365 * 24 * 60),
        ("--cluster slurm --timeout_min 300", 300),
        ("--cluster local --timeout_min 300", 300),
    ],
)
def test_only_slurm_limits_the_time(tmp_path, capsys, flags, minutes):
    submitit_launch.main([*flags.split(), "--dry_run", "main_pretrain", "--output_dir", str(tmp_path / "run")])
    assert f"  timeout_min: {minutes}\n" in capsys.readouterr().out


def test_a_job_may_wait_for_another_one(tmp_path, capsys):
    flags = ["--dry_run", "--dependency", "afterok:77", "main_pretrain", "--output_dir", str(tmp_path / "run")]
    submitit_launch.main(flags)
    assert "{'requeue': True, 'dependency': 'afterok:77', 'kill_on_invalid_dep': 'yes'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sbatch", "requests_gpus"),
    [
        (
            "gres=gpu:h200:8 exclusive= gpu-bind=none",
            {"gres": "gpu:h200:8", "exclusive": True, "gpu_bind": "none"},
            True,
        ),
        ("gpus_per_task=1 --reservation=R", {"gpus_per_task": "1", "reservation": "R"}, True),
        ("tres-per-task=gres/gpu:1", {"tres_per_task": "gres/gpu:1"}, True),
        ("gres=nvme:100 mem-per-cpu=4G", {"gres": "nvme:100", "mem_per_cpu": "4G"}, False),
        ("gpu-bind=single:1", {"gpu_bind": "single:1"}, False),
    ],
)
def test_a_site_s_options_go_to_sbatch_as_they_are(tmp_path, options, sbatch, requests_gpus):
    """GPUs are requested once: by the launcher, or by such an option."""
    flags = [f"--slurm={option}" for option in options.split()]
    parsed = submitit_launch.parse_args([*flags, "main_pretrain", "--output_dir", str(tmp_path)])
    parameters = submitit_launch.job_parameters(*parsed)
    assert parameters["slurm_additional_parameters"] == {"requeue": True, **sbatch}
    assert parameters["tasks_per_node"] == 8
    assert parameters.get("gpus_per_node") == (None if requests_gpus else 8)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("main_train", "argument main"),
        ("--nodes 0 main_pretrain", "--nodes"),
        ("--tasks_per_node 0 main_pretrain", "--tasks_per_node"),
        ("--cluster local --nodes 2 main_pretrain", "--nodes 2"),
        ("--timeout_min 10 main_pretrain", "--timeout_min 10"),
        ("main_pretrain --recipe nowhere", "nowhere"),
        ("main_pretrain --no_such_flag 3", "--no_such_flag"),
        ("main_pretrain --data_path https://me:secret@host/data", "password"),
    ],
)
def test_errors_come_before_the_queue(capsys, flags, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named in refused(capsys, submitit_launch.main, "--dry_run", *flags.split())
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rc", "said", "idle", "now", "state", "left", "wait"),
    [  # idle: lines of starts without progress in a row before this one; left: after it, if the job is requeued
        (1, None, "", "40", "RUNNING", "", 0),
        (137, None, "\n\n\n", "40", "RUNNING", "", 0),
        (75, None, "", "40", "RUNNING", "", 0),  # stopped by a signal
        (137, None, "\n\n", "20", "RUNNING", "\n\n\n", 0),
        (137, None, "\n\n\n", "20", "RUNNING", None, 0),
        (137, 75, "", "20", "RUNNING", "75\n", 300),  # the storage has failed
        (137, 75, "\n\n\n75\n", "20", "RUNNING", "\n\n\n75\n75\n", 600),
        (137, 75, "75\n" * 24, "20", "RUNNING", None, 0),
        (137, 75, "75\n" * 24, "40", "RUNNING", "", 0),
        (2, None, "", "40", "RUNNING", None, 0),
        (0, None, "\n", "40", "RUNNING", None, 0),
        (143, 2, "", "40", "RUNNING", None, 0),  # srun has killed a process because another one had ended so
        (143, None, "", "40", "COMPLETING", None, 0),  # cancelled, or requeued already
    ],
)
def test_a_job_is_requeued_until_it_gets_nowhere(tmp_path, rc, said, idle, now, state, left, wait):
    """Runs the lines around srun with fake `scontrol` and `squeue`. `said`: the exit code in a process's note."""
    jobs = tmp_path / "my run" / "jobs"
    jobs.mkdir(parents=True)
    (jobs.parent / "checkpoint-20.json").touch()
    counter = jobs / "idle-starts-77"
    if idle:
        counter.write_text(idle)
    (jobs / "77_0_result.pkl").touch()
    if said is not None:
        (jobs / "exit-code-77").write_text(f"{said}\n")
    called = tmp_path / "called"
    write_program(tmp_path / "scontrol", f'echo "$@" >> "{called}"')
    write_program(tmp_path / "squeue", f"echo {state}")
    srun = f'touch "{jobs.parent}/checkpoint-{now}.json"; (exit {rc})'
    done = run_job(tmp_path, [*submitit_launch.note_progress(jobs.parent), srun, *submitit_launch.guard(jobs.parent)])
    assert done.returncode == (said or rc)
    assert called.exists() == (left is not None)
    assert (jobs / "77_0_result.pkl").exists() == (left is None)
    if left is not None:
        later = f"update jobid=77 starttime=now+{wait}\n" if wait else ""
        assert called.read_text() == f"requeue 77\n{later}"
    assert (counter.read_text() if counter.exists() else "") == (left or "")
    gave_up = left is None and now == "20"
    num_starts = idle.count("\n") + 1
    assert (f"job 77 ends after {num_starts} starts without progress" in done.stderr) == gave_up


def run_job(tmp_path, lines):
    """Runs the lines of a batch script, with the programs of `tmp_path`."""
    write_program(tmp_path / "job", "\n".join(lines))
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    return subprocess.run(["bash", tmp_path / "job"], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(("answers_at", "requeued"), [(3, True), (9, False)])
def test_a_busy_slurm_is_asked_again(tmp_path, answers_at, requeued):
    (tmp_path / "jobs").mkdir()
    asked = tmp_path / "asked"
    called = tmp_path / "called"
    write_program(tmp_path / "sleep", f"echo $1 >> '{asked}'")
    write_program(tmp_path / "squeue", f"[ $(cat '{asked}' | wc -l) -ge {answers_at} ] && echo RUNNING")
    write_program(tmp_path / "scontrol", f"touch '{called}'")
    assert run_job(tmp_path, ["(exit 75)", *submitit_launch.guard(tmp_path)]).returncode == 75
    assert called.exists() == requeued
    assert asked.read_text().split() == ["10"] * min(answers_at, 6)


@pytest.fixture
def run_task(tmp_path, monkeypatch):
    """Returns a function that runs the task of a process whose main is given; -> (how it has ended, local requeues)."""

    def run(cluster, rank, main, name="main_pretrain"):
        requeued = []
        before = signal.signal(signal.SIGUSR2, lambda number, frame: requeued.append(number))  # as submitit does
        job = SimpleNamespace(
            cluster=cluster, global_rank=rank, job_id="77", paths=SimpleNamespace(folder=tmp_path / "jobs")
        )
        job.paths.folder.mkdir()
        monkeypatch.replace_in(submitit_launch, "submitit.JobEnvironment", lambda: job)
        distributed = SimpleNamespace(export=lambda **options: None)
        monkeypatch.replace_in(submitit_launch, "submitit.helpers.TorchDistributedEnvironment", lambda: distributed)
        monkeypatch.replace_in(submitit_launch, "importlib.import_module", lambda name: SimpleNamespace(main=main))
        try:
            with pytest.raises(SystemExit) as end:
                submitit_launch.JobTask(name, [], os.getcwd())()
        finally:
            signal.signal(signal.SIGUSR2, before)
        return end.value.code, requeued

    return run


@pytest.mark.parametrize(
    ("cluster", "rank", "code", "requeued"),
    [
        ("slurm", 0, 75, []),  # the lines after srun do
        ("slurm", 1, 0, []),
        ("local", 0, 75, [signal.SIGUSR2]),
        ("local", 1, 0, []),
    ],
)
def test_a_stopped_run_asks_for_one_requeue(run_task, cluster, rank, code, requeued):
    assert run_task(cluster, rank, lambda argv: False) == (code, requeued)


@pytest.mark.parametrize(
    ("name", "code", "note"),
    [
        ("main_pretrain", 140, None),
        ("main_finetune", 140, None),
        ("main_probe", 2, "2\n"),
    ],
)
def test_a_signal_before_training_ends_a_start_like_any_other(run_task, tmp_path, capsys, name, code, note):
    """Not by submitit's handler, which would requeue the job for ever. A program that cannot resume ends for good."""

    def main(argv):
        os.kill(os.getpid(), signal.SIGUSR2)

    assert run_task("slurm", 0, main, name) == (code, [])
    left = tmp_path / "jobs" / "exit-code-77"
    assert (left.read_text() if left.exists() else None) == note
    assert ("give a longer --timeout_min" in capsys.readouterr().err) == (note is not None)


LOCAL = ["--cluster", "local", "--gpus_per_node", "0"]
# Appended to loop.py: step 13 waits for a file, so that the run is not over before the signal comes.
HOLD = """

def _hold(loop, step, set_rates=TrainLoop.set_rates):
    import os, time
    while step == 12 and not os.path.exists({gate!r}):
        time.sleep(0.1)
    set_rates(loop, step)

TrainLoop.set_rates = _hold
"""


def test_two_processes_are_requeued_by_a_signal_and_end_as_if_there_had_been_none(photos, tmp_path, monkeypatch):
    """submitit's local controller runs a copy of the code. The requeued run resumes at the step of the signal."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for others' cores make a step take seconds
    flags = pretrain.command(photos, tmp_path / "run", "--batch_size", 4, "--epochs", 6, "--save_every", 1000)
    gate = tmp_path / "gate"
    loop = submitit_launch.snapshot(tmp_path / "run") / "util" / "run" / "train" / "loop.py"  # what the job runs
    loop.write_text(loop.read_text() + HOLD.format(gate=str(gate)))
    job = submitit_launch.main([*LOCAL, "--tasks_per_node", "2", "--cpus_per_task", "1", "main_pretrain", *flags])
    log = tmp_path / "run" / "log.jsonl"
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 3)
    for rank in children_of(int(job.job_id)):
        os.kill(rank, signal.SIGUSR2)
    gate.touch()
    text = tmp_path / "run" / "log.txt"
    wait_until(lambda: "pre-trained" in text.read_text(), text.read_text)
    stopped = int(re.search(r"stopped by SIGUSR2 after step (\d+) of 18", text.read_text())[1])
    assert f"checkpoint-{stopped}.pth at step {stopped}" in text.read_text()
    assert [r["step"] for r in reports(tmp_path / "run")] == list(range(1, 19))
    pretrain(photos, tmp_path / "one", "--epochs", 6)
    losses = [report["loss"] for report in reports(tmp_path / "run")]
    expected = [report["loss"] for report in reports(tmp_path / "one")]
    assert losses == pytest.approx(expected, rel=1e-4)
    (code,) = (tmp_path / "run" / "code").iterdir()
    assert (code / "util" / "run" / "train" / "loop.py").is_file()
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["output_dir"] == str(tmp_path / "run")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project that replaces this one."""
    root = tmp_path / "project"
    (root / "util").mkdir(parents=True)
    for name in ("main_pretrain.py", "util/leaf.py"):
        (root / name).write_text("x = 1\n")
    for module in (submitit_launch, code_version):
        monkeypatch.setattr(module, "ROOT", root)
    for name in ("source_hash", "write_version"):
        monkeypatch.setattr(submitit_launch, name, partial(getattr(code_version, name), root=root))
    return root


def test_each_submission_has_the_code_of_its_day(tmp_path, project):
    first = submitit_launch.snapshot(tmp_path / "run")
    assert {path.name for path in first.iterdir()} == {"main_pretrain.py", "util", code_version.VERSION_FILE}
    assert submitit_launch.snapshot(tmp_path / "run") == first  # the same code again: the same copy
    (project / "util" / "leaf.py").write_text("x = 2\n")
    second = submitit_launch.snapshot(tmp_path / "run")
    assert second != first
    assert (second / "util" / "leaf.py").read_text() == "x = 2\n"
    assert (first / "util" / "leaf.py").read_text() == "x = 1\n"  # for the requeues of the first job
    assert sorted((tmp_path / "run" / "code").iterdir()) == sorted([first, second])
    assert code_version.source_hash(second) == second.name == code_version.source_hash(project)


@pytest.mark.parametrize("main", submitit_launch.MAINS)
def test_the_folder_is_the_one_that_is_given(main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags in (["--output_dir", "X"], ["--output_dir=X"]):
        args, folder = submitit_launch.parse_args(["--dry_run", main, *flags])
        assert folder == tmp_path / "X"
        assert args.argv[-2:] == ["--output_dir", str(tmp_path / "X")]
    _, folder = submitit_launch.parse_args(["--dry_run", main])
    assert folder.parent == tmp_path / "output"
    assert folder.name.startswith(f"{main}-2")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stopped_run_in_this_process_is_not_finished(photos, tmp_path, before_step, name):
    before_step(1, lambda: os.kill(os.getpid(), getattr(signal, name)))
    flags = ["--cluster", "debug", "--gpus_per_node", "0", "main_pretrain"]
    flags += pretrain.command(photos, tmp_path / "run")
    with mock.patch.dict(os.environ):  # into which submitit exports
        if name == "SIGINT":
            with pytest.raises(KeyboardInterrupt):
                submitit_launch.main(flags)
        else:
            assert submitit_launch.main(flags) is False
    assert newest_checkpoint(tmp_path / "run")[0].name in ("checkpoint-2.pth", "checkpoint-3.pth")
