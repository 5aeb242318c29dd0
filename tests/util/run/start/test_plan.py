"""What follows from the flags: the split of the total batch, and the number of workers."""

import argparse
from types import SimpleNamespace

import pytest
import torch

import main_pretrain
from util import host
from util.run.processes.distributed import Process
from util.run.start import plan as plan_module
from util.run.start.plan import make_plan, num_workers


def plan_of(flags, world_size):
    args = main_pretrain.get_args_parser().parse_args(flags.split())
    return make_plan(args, Process(torch.device("cpu"), world_size=world_size))


@pytest.mark.parametrize(
    ("flags", "world_size", "batch_size", "accum_iter"),
    [
        ("--total_batch_size 4096", 8, 64, 8),
        ("--total_batch_size 4096", 1, 64, 64),
        ("--total_batch_size 96", 3, 32, 1),
        ("--total_batch_size 134", 1, 2, 67),
        ("", 2, 64, 1),
    ],
)
def test_the_batch_size_of_a_process_fits_the_total_by_itself(flags, world_size, batch_size, accum_iter):
    plan = plan_of(flags, world_size)
    assert (plan.batch_size, plan.accum_iter) == (batch_size, accum_iter)
    assert plan.total_batch_size == batch_size * accum_iter * world_size


@pytest.mark.parametrize(
    ("command", "memory", "expected"),
    [
        ("--total_batch_size 4096", [150, 150, 150, 150], (512, 2)),
        ("--total_batch_size 4096", [85, 16, 85, 85], (256, 4)),  # of the smallest GPU
        ("--total_batch_size 4096", [6, 6, 6, 6], (64, 16)),
        ("--total_batch_size 4096 --model mae_vit_huge_patch14 --throw_ratio 0", [80, 80, 80, 80], (256, 4)),
        ("--total_batch_size 4096 --model mae_vit_huge_patch14", [24, 24, 24, 24], (64, 16)),
        ("--total_batch_size 4096 --batch_size 128", [150, 150, 150, 150], (128, 8)),
        ("--total_batch_size 4096 --input_size 448", [150, 150, 150, 150], (512, 2)),
        ("--total_batch_size 4096 --input_size 448 --precision fp32", [80, 80, 80, 80], (128, 8)),
        ("--total_batch_size 4096 --model greenmim_swin_base_patch4_window7", [150, 150, 150, 150], (64, 16)),
        ("", [150, 150, 150, 150], (64, 1)),  # no total: the micro-batch decides the results
    ],
)
def test_a_pretraining_on_gpus_takes_micro_batches_that_fill_them(monkeypatch, command, memory, expected):
    _, args = main_pretrain.parse_args(command.split())
    monkeypatch.setattr(plan_module, "least_memory", lambda process: min(memory) * 10**9)
    monkeypatch.setattr(plan_module, "precision", lambda name, _: SimpleNamespace(name=name.replace("auto", "bf16")))
    process = Process(torch.device("cpu"), world_size=4)
    plan = make_plan(args, process, fitting_batch=main_pretrain.fitting_batch(args))
    assert (plan.batch_size, plan.accum_iter) == expected


def test_gpus_of_two_precisions_are_refused(monkeypatch):
    """--precision auto is fp16 on a V100 and bf16 on an A100: their gradients must not be added."""
    monkeypatch.setattr(plan_module, "least_memory", lambda process: 0)
    monkeypatch.setattr(plan_module.collectives, "gather_objects", lambda value: [value, {"--precision": "fp16"}])
    _, args = main_pretrain.parse_args([])
    with pytest.raises(
        ValueError, match="same precision of the GPUs, but --precision is fp32 on rank 0 and fp16 on ra"
    ):
        make_plan(args, Process(torch.device("cpu"), world_size=2))


def test_a_total_that_the_processes_cannot_share_is_refused():
    with pytest.raises(ValueError, match="a total batch of 4096 cannot be split over 3 processes"):
        plan_of("--total_batch_size 4096", 3)


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        ("--accum_iter 3", 1, "--accum_iter 3, .* --batch_size 16 on 1 process takes 4"),
        ("--batch_size 24", 1, "--batch_size 24 on 1 process: try --batch_size 16"),
    ],
)
def test_a_split_that_is_refused_names_what_was_given(flags, world_size, message):
    with pytest.raises(ValueError, match=f"{message}$"):
        plan_of(f"--total_batch_size 64 {flags}", world_size)


@pytest.mark.parametrize(
    ("num_visible", "num_processes", "environment", "share"),
    [
        (64, 8, {}, 8),
        (4, 8, {}, 1),
        (10, 8, {"SLURM_CPUS_PER_TASK": "10"}, 10),  # each task is bound to its own cores
        (6, 8, {"SLURM_CPUS_PER_TASK": "5"}, 5),  # to whole cores of two threads
        (80, 8, {"SLURM_CPUS_PER_TASK": "10"}, 10),  # no binding: all tasks see all cores of the job
        (64, 2, {"SLURM_CPUS_PER_TASK": "4"}, 32),  # or of the node
        (64, 8, {"SLURM_CPUS_PER_TASK": "64", "TORCHELASTIC_RUN_ID": "none"}, 8),  # torchrun in one task
        (64, 8, {"SLURM_CPUS_PER_TASK": "?"}, 8),
        (64, 1, {}, 64),  # more than a trainer's workers
    ],
)
def test_the_cores_of_a_process(monkeypatch, num_visible, num_processes, environment, share):
    for name in ("SLURM_CPUS_PER_TASK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(host, "available_cores", lambda: num_visible)
    assert host.cores_per_process(num_processes) == share
    process = argparse.Namespace(local_world_size=num_processes)
    assert num_workers(argparse.Namespace(num_workers=None), process) == min(32, max(1, share - 1))


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("50000 100000\n", 1), ("250000 100000\n", 2), ("1600000 100000\n", 8), ("max 100000\n", 8), (None, 8)],
)
def test_a_container_may_allow_fewer_cores_than_the_machine_has(tmp_path, monkeypatch, limit, cores):
    """limit: microseconds of a core in each period, as in cgroup's file. Half a core is one."""
    files = {"/sys/fs/cgroup/cpu.max": tmp_path / "cpu.max"}
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(host, "Path", files.__getitem__)
    monkeypatch.replace_in(host, "os.sched_getaffinity", lambda pid: set(range(8)))
    assert host.available_cores() == cores
