"""Which types CUDA's autocast computes in, on a machine without a GPU: `python tests/cuda_autocast.py NAME ...`.

The device is CUDA, and its tensors are fake: they have shapes and types, and no data. torch is made to believe that
autocast is possible, for the rest of the process, so this is a program of its own. It prints a line of JSON for each
name: {kind of operator: types of its floating-point inputs}.
"""

import json
import sys
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.test_framework_contract import a_batch, build
from util.attention import prefer

KINDS = {"addmm": "products", "mm": "products", "convolution": "products"}  # "math" attention has others
KINDS |= {"native_layer_norm": "norms", "mse_loss": "losses", "smooth_l1_loss": "losses", "mean": "losses"}


class Types(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kind = KINDS.get(operator.overloadpacket.__name__)
        if kind is not None:
            tensors = [x for x in args if torch.is_tensor(x)]
            self.found.setdefault(kind, set()).update(str(x.dtype) for x in tensors if x.is_floating_point())
        return operator(*args, **(kwargs or {}))


def to_fake(model, device):
    """Replaces the tensors of a framework and of its teacher by fake ones. Call it in a FakeTensorMode."""
    modules = list(model.modules())
    if getattr(model, "teacher", None) is not None:  # it is no submodule
        modules += model.teacher.modules()
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                if isinstance(tensor, torch.nn.Parameter):
                    fake = torch.nn.Parameter(fake, tensor.requires_grad)
                tensors[name] = fake


def main(*names):
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    prefer("math", torch.device("cpu"))  # a choice between kernels asks for the GPU
    for name in names:
        model = build(name)
        batch = a_batch(model)
        with FakeTensorMode() as mode, torch.no_grad():
            to_fake(model, "cuda")
            inputs = [mode.from_tensor(x).to("cuda") for x in batch]
            with torch.autocast("cuda", torch.bfloat16), Types() as types:
                losses = model(*inputs)
        found = {kind: sorted(values) for kind, values in types.found.items()}
        found["name"] = name
        found["result"] = sorted({str(loss.dtype) for loss in losses.values()})
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
