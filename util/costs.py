"""Cost of a training step: counted multiply-adds, memory, timed steps."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from util.lazy import LazyModule
from util.text import count_of

flop_counter = LazyModule("torch.utils.flop_counter")  # which imports Triton


def forward_gmac(settings: Mapping[str, Any], build_model: Callable[..., torch.nn.Module]) -> tuple[float, float]:
    """Counts the multiply-adds, in 10^9, of the forward pass of one image: (trained model, frozen teacher).

    The models are built on the meta device, by `frameworks.registry.build_model`. Without a teacher the second is 0.
    """
    with torch.device("meta"):
        model = build_model(settings, read_files=False)
        imgs = torch.empty(1, settings.get("in_chans", 3), *model.img_size)
    orders = [order.to("meta") for order in make_batch(model, settings, 1)[1]]
    teacher = getattr(model, "teacher", None)
    if teacher is None:
        return count_gmac(lambda: model(imgs, *orders)), 0.0
    calls: list[tuple[Any, Any]] = []

    def keep_inputs(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((args, kwargs))

    handle = teacher.register_forward_hook(keep_inputs, with_kwargs=True)
    total = count_gmac(lambda: model(imgs, *orders))
    handle.remove()
    args, kwargs = calls[0]
    teacher_gmac = count_gmac(lambda: teacher(*args, **kwargs))
    return total - teacher_gmac, teacher_gmac


def count_gmac(forward: Callable[[], object]) -> float:
    """Multiply-adds of `forward()`, in 10^9."""
    with flop_counter.FlopCounterMode(display=False) as counter:
        forward()
    return counter.get_total_flops() / 2e9


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes of all storages that autograd saves for the backward pass of `forward()`."""
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        # The graph holds the storage, so no address is reused. The tensor is detached: an operation that saves its own
        # output would otherwise form a reference cycle, which would count in the peak memory measured next.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    del output
    return sum(storages.values())


def make_batch(
    model: torch.nn.Module, settings: Mapping[str, Any], batch_size: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return random bytes [B, C, H, W] for a framework's model, and [ids_shuffle [B, N], further inputs...]."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, settings.get("in_chans", 3), *model.img_size)
    crops = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    collator = model.collator(settings["sampling"], seed=0)
    imgs, _, *orders = collator([(crop, 0, (0, i)) for i, crop in enumerate(crops)])
    return imgs, orders


def seconds_of(work: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Times `calls` calls of `work` between two host-device syncs, as in training, and returns the seconds of one."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_round(steps: Sequence[Callable[[], object]], device: torch.device, first: int, calls: int = 1) -> list[float]:
    """Times `calls` calls of every step, and returns the seconds of one in the order of `steps`.

    Another step is `first` in each round, because the memory that one step leaves behind can slow down the next one.
    """
    seconds = [0.0] * len(steps)
    for j in range(len(steps)):
        k = (first + j) % len(steps)
        seconds[k] = seconds_of(steps[k], device, calls)
    return seconds


def device_name(device: torch.device) -> str:
    """The name of the GPU, or the number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu ({count_of(torch.get_num_threads(), 'thread')})"
