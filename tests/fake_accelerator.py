"""Whole optimizer steps on an accelerator that need not exist: `python tests/fake_accelerator.py NAME NAME:FAULT`.

The device is a PrivateUse1 backend. Each of its tensors holds its values in a tensor of the CPU, which computes them:
shapes may follow from values, as in a detector. An operator that gets tensors of the device and of the host fails. The
backend stays for the rest of a process, so this is a program of its own. It prints a line of JSON for each name.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from timm.data import Mixup
from torch import library as operators
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from downstream.detection import engine_detection
from downstream.detection.data import PadAndStack
from downstream.detection.models import Detector
from downstream.probe.engine_probe import Probes, update_heads
from downstream.probe.models import FrozenEncoder
from downstream.segmentation import engine_segmentation
from downstream.segmentation.models import UPerNet
from engine_finetune import BatchAugmentation
from models_vit import MICRO, VisionTransformer
from tests.loops import a_driver
from tests.reads import reads
from tests.util.run.test_shard import CLASSIFIERS, batches_of, make
from util.data.transforms import Normalize
from util.evaluate.loop import EvalContext
from util.run.distributed import precision

DEVICE = "fakegpu"
SMALL = dict(img_size=64, patch_size=4, embed_dim=64, depth=4, num_heads=2)
FAULTS = {  # of a loss
    "a number is read": lambda loss: loss * loss.item(),
    "a number is copied": lambda loss: loss * torch.tensor(2.0, device=loss.device),
    "a mask is an index": lambda loss: loss.expand(4)[loss.expand(4) > 0].sum(),
    "a tensor is on the host": lambda loss: (loss * torch.ones(4)).sum(),
    "a tensor of the host is an index": lambda loss: loss.expand(4)[torch.arange(4)].sum(),
}


class OnDevice(torch.Tensor):
    """A tensor of the device. `held`: the tensor of the CPU with its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        layout = dict(strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype)
        tensor = torch.Tensor._make_wrapper_subclass(cls, held.shape, **layout, device=f"{DEVICE}:0")
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})

    def tolist(self):
        return self.held.tolist()


class Device(TorchDispatchMode):
    """Within the context, the device exists."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})

    def __enter__(self):
        torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(..., device=DEVICE) comes here
        return super().__enter__()


def compute(operator, args, kwargs):
    """Runs an operator on the CPU. The results belong to the device if it is named, or if an argument belongs to it."""
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    known = {id(x.held) if isinstance(x, OnDevice) else id(x): x for x in inputs}
    on_device = any(isinstance(x, OnDevice) for x in inputs)
    copies = operator.overloadpacket.__name__ in ("_to_copy", "copy_")
    if on_device and not copies and any(x.ndim for x in inputs if not isinstance(x, OnDevice)):
        raise RuntimeError(f"{operator} gets tensors of the device and of the host")
    if kwargs.get("device") is not None:
        on_device = torch.device(kwargs["device"]).type == DEVICE
        kwargs = {**kwargs, "device": "cpu"}
    args, kwargs = tree_map_only(OnDevice, lambda x: x.held, (args, kwargs))

    def wrap(result):
        if id(result) in known:  # changed in place
            return known[id(result)]
        return OnDevice(result) if on_device else result

    return tree_map_only(torch.Tensor, wrap, operator(*args, **kwargs))


def fine_tuning_of(name):
    return BatchAugmentation(mixup=Mixup(0.8, 1.0, num_classes=5)) if name in CLASSIFIERS else None


def detection_batches():
    """Four micro-batches of two images with three objects each."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        samples = []
        for _ in range(2):
            corners = torch.rand(3, 2, generator=generator) * 30
            boxes = torch.cat([corners, corners + 10 + 20 * torch.rand(3, 2, generator=generator)], dim=1)
            masks = torch.zeros(3, 64, 60, dtype=torch.uint8)
            for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
                mask[y1:y2, x1:x2] = 1
            img = torch.randint(0, 256, (3, 64, 60), dtype=torch.uint8, generator=generator)
            samples.append(((img, boxes, torch.tensor([1, 2, 3]), masks),))
        yield PadAndStack(64)(samples)


def training(name, fault):
    """Returns (weights, optimizer, function that makes a step) of a training loop, in bf16 with clipping."""
    train = None
    if name == "UPerNet":
        model, train = UPerNet(num_classes=5, channels=8, **SMALL), engine_segmentation.train_iterations
        batches = [(torch.zeros(2, 3, 64, 64).byte(), torch.zeros(2, 64, 64).byte())] * 4
    elif name == "Mask R-CNN":
        model = Detector(3, channels=8, num_rois=16, pretrain_size=32, window_size=4, **SMALL)
        train, batches = engine_detection.train_iterations, detection_batches()
    else:
        model = make(name)
        batches = batches_of(name, model, 0, 4)
    if fault is not None:
        forward = model.forward
        model.forward = lambda *batch: {name: FAULTS[fault](loss) for name, loss in forward(*batch).items()}
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
    options = dict(accum_iter=2, clip_grad=1.0, print_freq=1000, augment=fine_tuning_of(name))
    driver = a_driver(model, optimizer, lambda *_, **__: 1e-2, "bf16", DEVICE, **options)
    driver.train = train or driver.train
    return model.parameters(), optimizer, partial(driver.step, iter([*batches]))


def probing():
    """The same of the heads of a probe, which are trained in float32."""
    torch.manual_seed(0)
    device = torch.device(DEVICE)
    network = VisionTransformer(global_pool="token", **MICRO)
    encoder = FrozenEncoder(network, "ViT", (32, 32), 1, 1, 3, "", {}).to(device)
    heads = Probes(encoder, ("linear", "attentive"), 5).to(device)
    groups = [group for grid in heads.grids.values() for group in grid.parameter_groups(1.0)]
    optimizer = torch.optim.AdamW(groups, fused=True)
    context = EvalContext(Normalize().to(device), precision("bf16", device).autocast, batch_size=4, num_workers=0)
    batches = iter([*batches_of("ViT", network, 0, 4)])
    return heads.parameters(), optimizer, lambda step: update_heads(heads, optimizer, encoder, batches, 2, context)


def check(name, fault=None):
    """Returns what the second step read of the device, and on which devices weights and moments are.

    Two steps of two micro-batches with fused AdamW.
    """
    with Device():
        weights, optimizer, step = probing() if name == "probe" else training(name, fault)
        weights = [*weights]
        step(0)
        with reads() as found:
            step(1)
        moments = [value for state in optimizer.state.values() for value in state.values()]
        assert all(x.isfinite().all() for x in weights)
    return found, sorted({str(tensor.device) for tensor in [*weights, *moments]})


def main(*names):
    _setup_privateuseone_for_python_backend(DEVICE)
    torch.fakegpu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    kernels = operators.Library("_", "IMPL")
    kernels.fallback(operators.fallthrough_kernel, "AutocastPrivateUse1")
    for name in names:
        found, devices, error = [], [], None
        try:
            found, devices = check(*name.split(":"))
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        print(json.dumps({"name": name, "reads": found, "devices": devices, "error": error}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
