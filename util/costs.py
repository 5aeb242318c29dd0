"""What a training step costs, counted; what a device can do at most, measured; and how times are taken in turn."""

import math
import statistics
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from util.data.datasets import AddressedDataset
from util.data.transforms import RandomResizedCropFlip


def forward_gmac(settings, build_model):
    """Multiply-adds, in 10^9, of one image's forward pass, counted on the meta device -> (what is trained, teacher).

    build_model: main_pretrain's.
    """
    with torch.device("meta"):  # where a teacher needs no weights
        model = build_model({**settings, "teacher": None})
        imgs = torch.empty(1, 3, *model.img_size)
    orders = [order.to("meta") for order in a_batch(model, settings, 1)[1]]
    teacher = getattr(model, "teacher", None)
    if teacher is None:
        return counted(lambda: model(imgs, *orders)), 0.0
    inputs = []
    handle = teacher.register_forward_hook(lambda _, args, kwargs, __: inputs.append((args, kwargs)), with_kwargs=True)
    total = counted(lambda: model(imgs, *orders))
    handle.remove()
    ((args, kwargs),) = inputs
    alone = counted(lambda: teacher(*args, **kwargs))
    return total - alone, alone


def counted(forward):
    with FlopCounterMode(display=False) as counter:
        forward()
    return counter.get_total_flops() / 2e9


def saved_bytes(forward):
    """Bytes of all storages that autograd keeps for the backward pass of `forward()`."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        # Alive until the graph goes, so no address is given out twice. Detached, or an operation that keeps its own
        # output would be a cycle that nothing frees, and the peak memory measured next would be too large.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    del output
    return sum(storages.values())


class Traffic(TorchDispatchMode):
    """Counts `operations`, and `moved`, the bytes of the tensors that they take and give; views are neither.

    Matrix products, attention and convolutions are left out of `moved`: arithmetic bounds them, and memory the others. What is
    expanded counts as it lies in memory; a gather, as all that it may read.
    """

    FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh")
    OVERWRITE = ("copy_", "fill_", "zero_", "ones_like", "zeros_like", "full_like", "new_zeros", "new_full", "new_ones")

    def __init__(self):
        super().__init__()
        self.operations = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet, schema = func._overloadpacket, func._schema
        given = tensors_in(out)
        if schema.is_mutable and not given:  # fused and foreach operations give nothing back
            given = tensors_in([a for a, s in zip(args, schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write])
        if given and not func.is_view and packet.__name__ not in self.FREE:
            self.operations += 1
            if packet not in flop_registry and "attention" not in packet.__name__:
                taken = tensors_in((args[packet.__name__ in self.OVERWRITE :], kwargs))
                self.moved += sum(map(extent, taken)) + sum(map(extent, given))
        return out


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def extent(tensor):
    """Bytes of a tensor's elements, the repeated ones once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


def a_batch(model, settings, batch_size, images=None):
    """uint8 crops of `images`, or random bytes; and [their token orders, and what the model takes beside]."""
    collator = model.collator(settings["sampling"], seed=0)
    if images is None:
        generator = torch.Generator().manual_seed(0)
        crops = torch.randint(0, 256, (batch_size, 3, *model.img_size), dtype=torch.uint8, generator=generator)
        imgs, _, *orders = collator([(crop, 0, (0, i)) for i, crop in enumerate(crops)])
    else:
        dataset = AddressedDataset(images, RandomResizedCropFlip(model.img_size, seed=0))
        imgs, _, *orders = collator([dataset[(0, i % len(dataset))] for i in range(batch_size)])
    return imgs, orders


def matmul_tflops(device, dtype, rounds=10):
    """What the device does in a square matrix product, in 10^12 operations a second: the ceiling that MFU is relative to."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / median_seconds(lambda: a @ b, device, rounds) / 1e12


def copied_gb_per_s(device, rounds=10):
    """Bytes that the device reads and writes in a large copy, in 10^9 a second."""
    a = torch.ones(2**30 if device.type == "cuda" else 2**28, device=device, dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2 * len(a) / median_seconds(lambda: b.copy_(a), device, rounds) / 1e9


def median_seconds(work, device, rounds):
    """Of `rounds` calls after two to warm up."""
    seconds = []
    for _ in range(rounds + 2):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_in_turn(steps, rounds):
    """Functions that return their seconds -> the median of each; another one is first in each round, since a step feels the
    memory that its predecessor left."""
    times = [[] for _ in steps]
    for i in range(rounds):
        for j in range(len(steps)):
            k = (i + j) % len(steps)
            times[k].append(steps[k]())
    return [statistics.median(of_step) for of_step in times]


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' if threads > 1 else ''})"
