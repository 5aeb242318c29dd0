"""Whole optimizer steps on an accelerator that need not exist: `python tests/fake_accelerator.py NAME NAME:FAULT`.

The device is a PrivateUse1 backend whose tensors are fake: they have shapes, types and a device, and no data. Every
operator checks its devices as it would on a GPU, and a value that the host asks for does not exist. The backend stays
for the rest of a process, so this is a program of its own. It prints a line of JSON for each name.
"""

import json
import sys
from pathlib import Path

import torch
from timm.data import Mixup
from torch import library as operators
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from downstream.segmentation.engine_segmentation import train_iterations
from downstream.segmentation.models import UPerNet
from engine_finetune import BatchAugmentation
from tests.loops import a_driver
from tests.reads import reads
from tests.util.run.test_shard import CLASSIFIERS, batches_of, make

DEVICE = "fakegpu"
FAULTS = {  # of a loss
    "a number is read": lambda loss: loss * loss.item(),
    "a number is copied": lambda loss: loss * torch.tensor(2.0, device=loss.device),
    "a mask is an index": lambda loss: loss.expand(4)[loss.expand(4) > 0].sum(),
    "a tensor is on the host": lambda loss: (loss * torch.ones(4)).sum(),
}


def to_fake_gpu(model, device):
    """Inside a FakeTensorMode: moves the model's tensors to a device that need not exist. They hold no data."""
    for module in [*model.modules(), *(model.teacher.modules() if hasattr(model, "teacher") else ())]:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    tensors[name] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake


def setting(name):
    """Returns (model, four micro-batches, what `a_driver` takes beside them)."""
    if name == "UPerNet":
        sizes = dict(img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2)
        model = UPerNet(num_classes=5, channels=8, **sizes)
        return model, [(torch.zeros(2, 3, 32, 32).byte(), torch.zeros(2, 32, 32).byte())] * 4, {}
    model = make(name)
    augment = BatchAugmentation(mixup=Mixup(0.8, 1.0, num_classes=5)) if name in CLASSIFIERS else None
    return model, [*batches_of(name, model, 0, 4)], {"augment": augment}


def check(name, fault=None):
    """Returns what the second step read of the device, and on which devices weights, moments and losses are.

    Two steps of two micro-batches with clipping and fused AdamW, in bf16.
    """
    model, micro_batches, more = setting(name)
    if fault is not None:
        forward = model.forward
        model.forward = lambda *batch: {name: FAULTS[fault](loss) for name, loss in forward(*batch).items()}
    with FakeTensorMode() as mode:
        to_fake_gpu(model, DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
        options = dict(accum_iter=2, clip_grad=1.0, print_freq=1000)
        driver = a_driver(model, optimizer, lambda *_, **__: 1e-2, "bf16", DEVICE, **more, **options)
        if name == "UPerNet":
            driver.train = train_iterations
        batches = iter([[mode.from_tensor(tensor) for tensor in batch] for batch in micro_batches])
        driver.step(batches, 0)
        with reads() as found:
            driver.step(batches, 1)
        moments = [value for state in optimizer.state.values() for value in state.values()]
    return found, sorted({str(tensor.device) for tensor in [*model.parameters(), *moments]})


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
