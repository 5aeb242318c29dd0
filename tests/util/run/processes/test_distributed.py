import contextlib
import socket
from types import SimpleNamespace

import pytest

from util import collectives
from util.data import loader
from util.run.processes import distributed
from util.run.processes.distributed import slurm_environment

JOB = {
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "9",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
}
JOB |= {"SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1"}


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A fake `scontrol`, first on PATH."""
    script = tmp_path / "scontrol"
    script.write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames gpu[07-09]" ] || exit 1\nprintf "gpu07\\ngpu08\\ngpu09\\n"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_a_task_of_srun_finds_the_others(scontrol):
    assert slurm_environment(JOB) == {
        "RANK": "6",
        "WORLD_SIZE": "9",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(20_000 + 16 * 1234567 % 20_000),
    }
    assert slurm_environment(JOB | {"SLURM_NODEID": "2", "SLURM_LOCALID": "0"})["LOCAL_WORLD_SIZE"] == "1"


def test_two_steps_of_a_job_use_two_ports_and_the_user_s_own_is_kept(scontrol):
    first, second = (slurm_environment(JOB | {"SLURM_STEP_ID": step})["MASTER_PORT"] for step in "01")
    assert first != second
    assert slurm_environment(JOB | {"SLURM_RESTART_COUNT": "1"})["MASTER_PORT"] not in (first, second)
    assert slurm_environment(JOB | {"MASTER_PORT": "29500"})["MASTER_PORT"] == "29500"


def test_processes_that_srun_did_not_start_together_have_no_slurm_environment(scontrol):
    batch_script = {name: value for name, value in JOB.items() if name != "SLURM_STEP_ID"}
    assert slurm_environment(batch_script) == {} == slurm_environment({})
    assert slurm_environment(JOB | {"RANK": "0"}) == {}  # torchrun was started once per node
    assert slurm_environment(JOB | {"SLURM_NTASKS": "1"}) == {}  # srun of one task


def test_the_shell_of_salloc_is_one_process():
    """It is a step of one task, to which `srun --preserve-env` gives the number of tasks of the job."""
    shell = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    shell |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert slurm_environment(JOB | shell) == {}


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("num_gpus", "environment", "chosen"),
    [
        (8, {}, 2),
        (8, JOB, 2),
        (1, JOB, 0),  # --gpus-per-task or --gpu-bind: each task sees its own GPU alone
        (1, JOB | {"RANK": "6"}, 0),  # likewise if the user's own launcher has exported the ranks
        (1, JOB | TORCHRUN, "LOCAL_RANK is 2, but this process sees 1 GPU: lower --nproc_per_node"),
        (1, TORCHRUN, "LOCAL_RANK is 2, but this process sees 1 GPU: lower --nproc_per_node"),
        (2, JOB, "LOCAL_RANK is 2, but this process sees 2 GPUs: start one task per GPU"),
    ],
)
def test_a_process_uses_its_own_gpu(monkeypatch, num_gpus, environment, chosen):
    cuda = SimpleNamespace(device_count=lambda: num_gpus)
    monkeypatch.setattr(distributed, "torch", SimpleNamespace(cuda=cuda))
    if isinstance(chosen, int):
        assert distributed.gpu_index(2, environment) == chosen
    else:
        with pytest.raises(ValueError, match=chosen):
            distributed.gpu_index(2, environment)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_of_torchrun_is_an_error(monkeypatch, missing):
    for name in {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - {missing}:
        monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"but {missing} is not"):
        distributed.init_process("cpu")


def test_a_job_whose_gpus_are_not_there_may_start_again(monkeypatch):
    monkeypatch.replace_in(distributed, "torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1")
    with pytest.raises(OSError, match=r"SLURM gave this job GPUs \(0,1\), but torch sees none"):
        distributed.init_process("auto")
    assert distributed.init_process("cpu").device.type == "cpu"


def take_a_port_of_slurm(listener, job):
    """Gives the job a number whose port is free, and listens there. Returns the job's environment."""
    for number in range(1, 1000):
        job["SLURM_JOB_ID"] = str(number)
        environment = slurm_environment(job)
        with contextlib.suppress(OSError):  # another program's
            listener.bind(("0.0.0.0", int(environment["MASTER_PORT"])))
            listener.listen()
            return environment
    raise AssertionError("no port is free")


def test_a_port_in_use_is_a_reason_to_start_again(scontrol, monkeypatch):
    job = JOB | {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    with socket.socket() as taken:
        exported = take_a_port_of_slurm(taken, job)
        for name, value in job.items():
            monkeypatch.setenv(name, value)
        for name in exported:  # `init_process` exports these
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        with pytest.raises(
            OSError, match="process 0 cannot reach the store of all processes: .*address already in use"
        ):
            distributed.init_process("cpu")


def test_threads_settle_before_workers_are_forked(photos, monkeypatch):
    """Else a worker can hang at its start, until Python 3.12."""
    events = []
    monkeypatch.setattr(collectives, "wait_for_threads", lambda: events.append("settled"))
    monkeypatch.replace_in(loader, "torch.utils.data.DataLoader", lambda *_, **__: note_start(events))
    for num_workers in (2, 0):
        next(loader.Loader(range(4), [[0]], list, num_workers=num_workers, for_gpu=False))
    assert events == ["settled", "started", "started"]


def note_start(events):
    class Source:
        def __iter__(self):
            events.append("started")
            return iter([1])

    return Source()
