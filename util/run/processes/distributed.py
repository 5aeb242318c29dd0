"""The processes of a run, their device, and the precision they compute in."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from util import collectives
from util.run.processes.supervise import Watchdog, print_error
from util.text import count_of

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of a collective: the others wait while rank 0 counts up to four million files. In a training the watchdog comes first.
TIMEOUT = timedelta(hours=4)


@dataclass(frozen=True)
class Process:
    """This process: its device, and its place among all processes of the run."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def need_not_verify(self) -> bool:
        """Whether the hash of a file has been compared: by rank 0 at first, then by one process of each other node."""
        return self.is_main or self.local_rank > 0


def init_process(device: str = "auto", join_timeout: float = 600) -> Process:
    """Joins the process group that the environment of torchrun or srun describes (nccl on GPUs, else gloo).

    Without such an environment the run is this one process. join_timeout: if the others have not joined after so many
    seconds, the process ends with exit code 75.

    Raises ValueError if the environment is incomplete, or if the device does not exist. OSError if the GPUs of a SLURM
    job are not there, which another node may have.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no GPU: check nvidia-smi, or use --device cpu")
    use_cuda = device != "cpu" and torch.cuda.is_available()
    gpus_of_job = os.environ.get("SLURM_JOB_GPUS", "")
    if device == "auto" and gpus_of_job and not use_cuda and torch.version.cuda is not None:
        raise OSError(
            f"SLURM gave this job GPUs ({gpus_of_job}), but torch sees none: a GPU or its driver may have failed; "
            "--device cpu computes on the CPU"
        )
    os.environ.update(slurm_environment(os.environ))
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        if use_cuda:
            return Process(torch.device("cuda", 0))
        return Process(torch.device("cpu"))
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"RANK or WORLD_SIZE is set, but {', '.join(missing)} is not: start with torchrun, or unset both for a "
            "single process"
        )
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    place = torch.device("cpu")
    if use_cuda:
        place = torch.device("cuda", gpu_index(local_rank, os.environ))
        torch.cuda.set_device(place)
    process = Process(place, rank, world_size, local_world_size, local_rank)
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    waiting = f"waiting for all {world_size} processes at {address}"
    if local_rank == 0:
        print_error(f"process {rank} is {waiting}")
    with Watchdog(join_timeout, join_timeout, rank) as watchdog:
        watchdog.heartbeat(waiting)
        join_group(process)
    return process


def gpu_index(local_rank: int, environment: Mapping[str, str]) -> int:
    """Returns the GPU of a process. A task of srun that sees one GPU uses it: SLURM may show each task only its own.

    Not so under torchrun, whose processes see the same GPUs. ValueError if there is no GPU of that number.
    """
    num_gpus = torch.cuda.device_count()
    is_task = "SLURM_STEP_ID" in environment and "TORCHELASTIC_RUN_ID" not in environment
    if is_task and num_gpus == 1:
        return 0
    if local_rank >= num_gpus:
        advice = "start one task per GPU" if is_task else "lower --nproc_per_node"
        raise ValueError(f"LOCAL_RANK is {local_rank}, but this process sees {count_of(num_gpus, 'GPU')}: {advice}")
    return local_rank


def gpu_memory(device: torch.device) -> int:
    """Returns the bytes of a GPU's memory, or 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).total_memory


def memory_scalars(device: torch.device) -> dict[str, float]:
    """Returns the most memory that tensors have taken on a GPU since the start, for the log; {} for a CPU."""
    if device.type != "cuda":
        return {}
    return {"gpu_memory_gb": torch.cuda.max_memory_allocated(device) / 1e9}


class DeviceCopies:
    """Copies batches to a device. On a GPU they are copied beside the step before, which the GPU still computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the device; the host does not wait for it, but what the GPU computes from now on does.

        tensor: of the CPU; of pinned memory for a GPU.
        """
        if self.stream is None:
            return tensor.to(self.device, non_blocking=True)
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            copied = tensor.to(self.device, non_blocking=True)
        computing.wait_stream(self.stream)
        copied.record_stream(computing)  # the stream of copies may reuse this memory only after the step
        return copied


def join_group(process: Process) -> None:
    """Connects all processes.

    OSError if their store cannot be reached: the next start may use another port.
    """
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=TIMEOUT))
    except dist.DistNetworkError as error:
        raise OSError(f"process {process.rank} cannot reach the store of all processes: {error}") from error
    # torchrun may keep one store over its restarts, where gloo would find the addresses of dead processes. The restart
    # count is the same for all processes on one node only. On several nodes, `--rdzv_backend c10d` and
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 give each restart a store of its own. Static rendezvous has no such option.
    restarts = "0"
    if process.local_world_size == process.world_size:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"restart-{restarts}", store)
    backend = "gloo"
    gpu: torch.device | None = None
    if process.device.type == "cuda":
        backend = "nccl"
        gpu = process.device  # NCCL connects now, and not with the first collective
    dist.init_process_group(
        backend, store=store, rank=process.rank, world_size=process.world_size, timeout=TIMEOUT, device_id=gpu
    )
    dist.all_reduce(torch.zeros(1, device=process.device))


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set, for a task that srun started together with others; else {}.

    A batch script is no such task, and neither is a process that torchrun started. The port follows from the numbers of
    job, step and restart, unless MASTER_PORT is set.
    """
    # In the shell of salloc, SLURM_NTASKS may be that of the job, though the shell is the only task of its step.
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    if "RANK" in environment or "SLURM_STEP_ID" not in environment or int(num_tasks) == 1:
        return {}
    # A requeued job tries another port, far from those of the next jobs.
    start = int(environment["SLURM_JOB_ID"]) + 617 * int(environment.get("SLURM_RESTART_COUNT", 0))
    port = 20_000 + (16 * start + int(environment["SLURM_STEP_ID"])) % 20_000
    nodes = environment.get("SLURM_STEP_NODELIST", environment["SLURM_JOB_NODELIST"])
    query = ["scontrol", "show", "hostnames", nodes]
    hosts = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    num_on_node = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(num_on_node),
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


def tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks on each node. "4(x2),1" means four on each of two nodes and one on the third."""
    counts: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", text):
        counts += [int(count)] * int(repeats or 1)
    return counts


def shut_down() -> None:
    """Leaves the process group, if there is one. To leave that of NCCL waits for the other processes."""
    collectives.wait_for_threads()
    if dist.is_initialized():
        dist.destroy_process_group()


class Precision(NamedTuple):
    """A resolved precision: its name, `autocast()`, and a GradScaler that is enabled for fp16 only."""

    name: str
    autocast: Callable[[], AbstractContextManager]
    scaler: torch.amp.GradScaler


def precision(name: str, device: torch.device) -> Precision:
    """Resolves one of `PRECISIONS`, or "auto": fp32 on a CPU; on a GPU bf16 if it supports that, else fp16."""
    if name == "auto":
        name = best_precision(device)
    dtype = PRECISIONS[name]
    autocast = partial(torch.autocast, device.type, dtype=dtype, enabled=dtype is not None)
    return Precision(name, autocast, torch.amp.GradScaler(device.type, enabled=name == "fp16"))


def best_precision(device: torch.device) -> str:
    """Returns the fastest precision of the device that can train."""
    if device.type == "cpu":
        return "fp32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16"
