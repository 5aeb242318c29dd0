"""What a training step costs, counted; what a device can do at most, measured; and how times are taken in turn."""

import statistics
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from main_pretrain import build_model
from scripts.reference_mae import SIZES, ReferenceMAE
from util.datasets import AddressedDataset
from util.transforms import RandomResizedCropFlip


def forward_gmac(settings):
    """Multiply-adds, in 10^9, of one image's forward pass, counted on the meta device -> (what is trained, teacher)."""
    if settings.get("reference"):
        with torch.device("meta"):
            model = ReferenceMAE(**SIZES[settings["model"]])
            return counted(lambda: model(torch.empty(1, 3, 224, 224), torch.empty(1, model.num_tokens, dtype=torch.long))), 0.0
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
    seconds = []
    for _ in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / statistics.median(seconds[2:]) / 1e12


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
