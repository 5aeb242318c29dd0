"""Cost of a training step: counted multiply-adds, memory, the share of a GPU's peak."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from util.collectives import rank_and_world_size
from util.text import count_of

STATE_BYTES = 18  # bytes a parameter in a step: float32 weight, gradient, AdamW's two moments, and autocast's copy
USABLE = 0.9  # of a GPU's memory: the rest is for the CUDA context, libraries, communication and fragmentation
# Memory of an image in half precision, relative to what float32 would save. On an H100, PR-MIM's ViT-B took 36 MB an
# image, of 64; MAE's, and ViT-L of both, .44 to .47.
HALF_SHARE = 0.56
# FLOP/s in bfloat16 or float16, without sparsity, of the datasheets; the first pattern that fits a device's name.
PEAKS = {
    r"\bH100 PCIe\b": 756e12,
    r"\bH[12]00 NVL\b": 835e12,
    r"\b(H100|H200|GH200)\b": 989e12,
    r"\bA100\b": 312e12,
    r"\bL40S\b": 362e12,
    r"\bRTX 4090\b": 165.2e12,
}


def forward_gmac(settings: Mapping[str, Any], build_model: Callable[..., nn.Module]) -> tuple[float, float]:
    """Counts the multiply-adds, in 10^9, of the forward pass of one image: (trained model, frozen teacher).

    The models are built on the meta device, by `frameworks.registry.build_model`. Without a teacher the second is 0.
    """
    from torch.utils.flop_counter import FlopCounterMode  # here, because it imports Triton

    with torch.device("meta"):
        model = build_model(settings, read_files=False)
        imgs = torch.empty(1, settings.get("in_chans", 3), *model.img_size)
    _, orders = make_batch(model, settings, batch_size=1)
    inputs = [order.to("meta") for order in orders]
    with FlopCounterMode(display=False) as counter:
        model(imgs, *inputs)
    flops_by_module = counter.get_flop_counts()
    frozen = 0
    for part in model.named_files().values():
        frozen += sum(flops_by_module[type(part).__name__].values())
    return (counter.get_total_flops() - frozen) / 2e9, frozen / 2e9


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes of all storages that autograd saves for the backward pass of `forward()`."""
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()  # on the meta device there are no data, but storages
        # The graph holds the storage, so no address is reused. The tensor is detached: an operation that saves its own
        # output would otherwise form a reference cycle, which would count in the peak memory measured next.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    del output
    return sum(storages.values())


def image_bytes(model: nn.Module, settings: Mapping[str, Any]) -> float:
    """Bytes in float32 that the forward pass of a framework's model on the meta device saves for an image."""
    saved = []
    for num_images in (2, 4):  # what does not depend on the number, such as weights, goes
        imgs, orders = make_batch(model, settings, num_images)
        imgs = torch.empty(imgs.shape, device="meta")
        inputs = [order.to("meta") for order in orders]
        saved.append(saved_bytes(partial(model, imgs, *inputs)))
    return (saved[1] - saved[0]) / 2


def fitting_images(
    settings: Mapping[str, Any],
    build_model: Callable[..., nn.Module],
    memory: int,
    precision: str,
) -> int:
    """Returns how many images of a micro-batch fit a GPU of so many bytes of memory; 0 if the model alone does not."""
    with torch.device("meta"):
        model = build_model(settings, read_files=False)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    memory_of_image = image_bytes(model, settings)
    if precision != "fp32":
        memory_of_image *= HALF_SHARE
    free = USABLE * memory - STATE_BYTES * parameters
    return max(0, int(free / memory_of_image))


def make_batch(model: nn.Module, settings: Mapping[str, Any], batch_size: int) -> tuple[Tensor, list[Tensor]]:
    """Return random bytes [B, C, H, W] for a framework's model, and [ids_shuffle [B, N], further inputs...]."""
    generator = torch.Generator().manual_seed(0)
    in_chans = settings.get("in_chans", 3)
    shape = (batch_size, in_chans, *model.img_size)
    crops = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    collator = model.collator(settings["sampling"], seed=0)
    samples = [(crop, 0, (0, i)) for i, crop in enumerate(crops)]
    imgs, _, *orders = collator(samples)
    return imgs, orders


def device_name(device: torch.device) -> str:
    """The name of the GPU, or the number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu ({count_of(torch.get_num_threads(), 'thread')})"


def peak_flops(name: str, precision: str) -> float | None:
    """Returns the peak of a device by its name, or None if it is unknown, for a part of a GPU, and for fp32."""
    if precision == "fp32" or re.search(r"\bMIG\b", name):
        return None
    for pattern, peak in PEAKS.items():
        if re.search(pattern, name):
            return peak
    return None


def utilization(
    device: torch.device, precision: str, count_multiply_adds: Callable[[], tuple[float, float]]
) -> list[Callable[[Mapping[str, Any]], dict[str, float]]]:
    """Returns a function from a report's values to {"mfu": share of the GPUs' peak}; none if the peak is unknown.

    It counts what the model needs: three times the multiply-adds of a forward pass, and none that are recomputed.
    count_multiply_adds: returns those of an image's forward pass, in 10^9: (trained model, frozen teacher).
    """
    peak = peak_flops(device_name(device), precision)
    if peak is None:
        return []
    trained, frozen = count_multiply_adds()
    flops = 2e9 * (3 * trained + frozen)  # of an image
    _, world_size = rank_and_world_size()

    def measure(scalars: Mapping[str, Any]) -> dict[str, float]:
        return {"mfu": flops * scalars["images_per_s"] / (world_size * peak)}

    return [measure]
