"""One process or many: what the environment says, and the few collectives that training needs."""

import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """This process among all of the run's."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    store: dist.Store | None = None  # keys and values that all processes see

    @property
    def is_main(self):
        return self.rank == 0


def init_process(device="auto", timeout_minutes=30):
    """Joins the process group that torchrun's environment, or srun's, describes (nccl on GPUs, else gloo); -> Process.

    Without such an environment the run is this one process. ValueError for half an environment or a device that is
    not there.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}, choose from auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no GPU: check nvidia-smi, or use --device cpu")
    use_cuda = device != "cpu" and torch.cuda.is_available()
    slurm = slurm_environment(os.environ)
    os.environ.update(slurm)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    found = [name for name in names if name in os.environ]
    if "RANK" not in found and "WORLD_SIZE" not in found:
        return Process(torch.device("cuda", 0) if use_cuda else torch.device("cpu"))
    if len(found) < len(names):
        absent = ", ".join(name for name in names if name not in found)
        raise ValueError(f"the environment sets {', '.join(found)} but not {absent}: start with torchrun, or unset them")
    rank, world_size, local_rank = (int(os.environ[name]) for name in names[:3])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if slurm and use_cuda and torch.cuda.device_count() == 1:  # srun may show each task its own GPU alone
        local_rank = 0
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise ValueError(f"LOCAL_RANK {local_rank}, but this node has {torch.cuda.device_count()} GPUs: lower --nproc_per_node")
    place = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(place)
    timeout = timedelta(minutes=timeout_minutes)
    store, *_ = next(dist.rendezvous("env://", timeout=timeout))
    # torchrun keeps one store over its restarts, in which gloo would find the dead processes' addresses. On one node all
    # know how often it was restarted; on several that differs, and the README's command gives each start a store of its own.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if local_world_size == world_size else "0"
    store = dist.PrefixStore(f"restart-{restarts}", store)
    dist.init_process_group("nccl" if use_cuda else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    own = store.clone() if hasattr(store, "clone") else store  # a connection of its own waits for no other's answer
    return Process(place, rank, local_rank, world_size, local_world_size, dist.PrefixStore("prmim", own))


def slurm_environment(environment):
    """What torchrun would have set, for a task that srun has started among others; {} anywhere else.

    A batch script, and what torchrun starts, are no such tasks. The port follows from the job's number.
    """
    if "RANK" in environment or "SLURM_STEP_ID" not in environment or int(environment.get("SLURM_NTASKS", 1)) == 1:
        return {}
    try:
        nodes = environment.get("SLURM_STEP_NODELIST", environment["SLURM_JOB_NODELIST"])
        hosts = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True).stdout.split()
        # "4(x2),1": four tasks on each of two nodes, one on the third
        here = int(environment["SLURM_NODEID"])
        groups = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(",")]
        tasks = [int(group[1]) for group in groups for _ in range(int(group[2] or 1))][here]
        own = {"RANK": environment["SLURM_PROCID"], "WORLD_SIZE": environment["SLURM_NTASKS"]}
        own |= {"LOCAL_RANK": environment["SLURM_LOCALID"], "LOCAL_WORLD_SIZE": str(tasks), "MASTER_ADDR": hosts[0]}
        return own | {"MASTER_PORT": str(20_000 + int(environment["SLURM_JOB_ID"]) % 20_000)}
    except (KeyError, OSError, IndexError, TypeError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"this is one of {environment['SLURM_NTASKS']} tasks of srun, but where the others are is not clear "
            f"({type(error).__name__}: {error}); start with submitit_launch.py or torchrun"
        ) from error


def all_reduce_sum(tensor):
    """The sum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def broadcast_buffers(model):
    """The main process's buffers to all: running statistics differ from process to process while training."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def rank_and_world_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def from_main(function):
    """The main process's `function()`, on every process; so is the ValueError or OSError that it may raise."""
    if not dist.is_initialized():
        return function()
    outcome = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except (ValueError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def gather_objects(value: object) -> list:
    """Every process's `value`, by rank, on every process."""
    if not dist.is_initialized():
        return [value]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def run_everywhere(function: Callable[[], T]) -> T:
    """`function()` of this process. Where it raises ValueError or OSError in one process, all raise, and none waits."""
    result, own = None, None
    try:
        result = function()
    except (ValueError, OSError) as error:
        own = error
    errors = gather_objects(None if own is None else str(own))
    if own is not None:
        raise own
    failed = [rank for rank, error in enumerate(errors) if error is not None]
    if failed:
        raise ValueError(f"rank {failed[0]} failed: {errors[failed[0]]}")
    return result


def refuse_differences(values: dict[str, object], what: str) -> None:
    """ValueError, in every process, where the processes' `values` differ; it names each difference with its ranks."""
    everyone = gather_objects(values)
    differing = []
    for name in dict.fromkeys(name for values in everyone for name in values):
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(everyone):
            ranks.setdefault(str(values.get(name, "absent")), []).append(rank)
        if len(ranks) > 1:
            sides = (f"{value} on rank {_shorten_ranks(who)}" for value, who in ranks.items())
            differing.append(f"{name} is {' and '.join(sides)}")
    if differing:
        raise ValueError(f"the processes of one run must have the same {what}, but {'; '.join(differing)}")


def _shorten_ranks(ranks: list[int], most: int = 4) -> str:
    return ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")


def shut_down():
    """Leaves the process group, if there is one."""
    let_go()
    if dist.is_initialized():
        dist.destroy_process_group()


def let_go():
    """Before this process ends. A gloo thread drops the tensors of the last collective under the GIL; if the interpreter is
    ending by then, the process aborts (pytorch#179291). Sleeping hands the GIL over."""
    if dist.is_initialized():
        time.sleep(0.2)
