"""A check of some seconds before a run: is a GPU, a host or a link slower than the others? (`--check_nodes`)

All ranks time matrix products, copies to their device, transfers to the next rank of their node, and an all-reduce. One
throttled GPU or bad link slows down all ranks, and the log of a run does not tell which it is. The check only warns.
"""

import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from util import collectives
from util.costs import seconds_of
from util.run.processes.distributed import PRECISIONS, Process
from util.text import count_of, shorten

PRODUCTS = "products"
COPIES = "copies to the device"
IN_NODE = "transfers inside a node"
ALL_REDUCE = "all-reduce"
UNITS = {PRODUCTS: "TFLOP/s", COPIES: "GB/s", IN_NODE: "GB/s", ALL_REDUCE: "GB/s"}
SECONDS = 1.0  # of products, and of copies
REPEATS = 20  # calls between two host-device syncs
SLOW = 0.8  # share of the median
NVLINK = 50.0  # GB/s; PCIe is slower (by its specification, not measured), NVLink several times as fast
MOST_NAMED = 16


@dataclass(frozen=True)
class Sizes:
    """side: of the square matrices. num_bytes: of a copy, a transfer or an all-reduce."""

    side: int
    num_bytes: int


ON_GPU = Sizes(8192, 2**28)
ON_CPU = Sizes(1024, 2**24)


@dataclass(frozen=True)
class Measured:
    """The rates of one rank in UNITS, without those for which there is no other rank."""

    host: str
    rates: dict[str, float]


def check_nodes(process: Process, precision: str) -> list[str]:
    """Returns the medians of all ranks, and warnings about slow ones. All ranks must call it.

    precision: of the products, a key of PRECISIONS.
    """
    dtype = PRECISIONS[precision] or torch.float32
    if process.device.type == "cuda":
        measured = measure(process, dtype, ON_GPU, SECONDS)
        torch.cuda.empty_cache()
    else:
        measured = measure(process, dtype, ON_CPU, SECONDS)
    return describe(collectives.gather_objects(measured), on_gpus=process.device.type == "cuda")


def measure(process: Process, dtype: torch.dtype, sizes: Sizes, seconds: float) -> Measured:
    """Measures the rates of this rank, while all others do the same. seconds: of products and of copies, at least."""
    device = process.device
    # Random numbers: products of equal ones take less power. The generator of the run is left as it is.
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(sizes.side, sizes.side, device=device, generator=generator).to(dtype)
    product = torch.empty_like(matrix)
    on_host = torch.zeros(sizes.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = torch.zeros(sizes.num_bytes, dtype=torch.uint8, device=device)
    multiply = partial(torch.mm, matrix, matrix, out=product)
    copy = partial(on_device.copy_, on_host, non_blocking=True)
    rates = {
        PRODUCTS: 2e-12 * sizes.side**3 / seconds_of_call(multiply, device, seconds),
        COPIES: 1e-9 * sizes.num_bytes / seconds_of_call(copy, device, seconds),
    }
    host = socket.gethostname()
    hosts = collectives.gather_objects(host)
    neighbours = [rank for rank, other in enumerate(hosts) if other == host]
    if len(neighbours) > 1:
        # Not by an all-reduce: a group of the node's ranks would need communicators of its own.
        send = partial(send_to_next, on_device, torch.empty_like(on_device), neighbours, process.rank)
        rates[IN_NODE] = 1e-9 * sizes.num_bytes / seconds_of_call(send, device)
    if len(hosts) > 1:
        numbers = torch.zeros(sizes.num_bytes // 4, device=device)
        bytes_on_bus = 2 * sizes.num_bytes * (len(hosts) - 1) / len(hosts)  # that a ring sends to the next rank
        rates[ALL_REDUCE] = 1e-9 * bytes_on_bus / seconds_of_call(partial(dist.all_reduce, numbers), device)
    return Measured(host, rates)


def send_to_next(sent: torch.Tensor, received: torch.Tensor, ranks: Sequence[int], rank: int) -> None:
    """Sends to the next of the `ranks` and receives from the one before, around."""
    place = ranks.index(rank)
    send = dist.P2POp(dist.isend, sent, ranks[(place + 1) % len(ranks)])
    receive = dist.P2POp(dist.irecv, received, ranks[place - 1])
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def seconds_of_call(work: Callable[[], object], device: torch.device, seconds: float = 0.0) -> float:
    """Returns the mean time of a call after a first one. It is called REPEATS times, and again up to `seconds`.

    For collectives `seconds` must be 0, so that all ranks make the same number of calls.
    """

    def repeat() -> None:
        for _ in range(REPEATS):
            work()

    seconds_of(work, device)
    total = seconds_of(repeat, device)
    num_calls = REPEATS
    while total < seconds:
        total += seconds_of(repeat, device)
        num_calls += REPEATS
    return total / num_calls


def describe(measured: Sequence[Measured], on_gpus: bool) -> list[str]:
    """Returns a note on the medians of all ranks, and warnings. measured: by rank."""
    medians: list[str] = []
    slow: list[str] = []
    for name, unit in UNITS.items():
        rates = [one.rates[name] for one in measured if name in one.rates]
        if not rates:
            continue
        median = statistics.median(rates)
        medians.append(f"{name} {median:.3g} {unit}")
        for rank, one in enumerate(measured):
            if name in one.rates and one.rates[name] < SLOW * median:
                slow.append(f"rank {rank} on {one.host} ({name} {one.rates[name]:.3g} {unit})")
    notes = [f"check of nodes, medians of {count_of(len(measured), 'process')}: {', '.join(medians)}"]
    if slow:
        notes.append(f"warning: below {SLOW:.0%} of the median: {shorten(slow, MOST_NAMED)}")
    without_nvlink = {one.host for one in measured if one.rates.get(IN_NODE, NVLINK) < NVLINK}
    if on_gpus and without_nvlink:
        hosts = shorten(sorted(without_nvlink), MOST_NAMED)
        advice = "each process must see all GPUs of its node, and nvidia-smi topo -m show NV links between them"
        notes.append(f"warning: NVLink is not used on {hosts}: {advice}")
    return notes
