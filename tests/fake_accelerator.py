"""Whole optimizer steps on an accelerator that need not exist: `python tests/fake_accelerator.py NAME ...`.

The device is a PrivateUse1 backend. Each of its tensors holds its values in a tensor of the CPU, which computes them.
An operator that gets tensors of the device and of the host fails. What
would make the host wait for the device is recorded. The backend stays for the rest of a process, so this is a program
of its own. It prints a line of JSON for each name.
"""

import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch import library as operators
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine_pretrain
from downstream.probe.engine_probe import Probes, Probing
from downstream.probe.models import FrozenEncoder
from downstream.segmentation import engine_segmentation
from downstream.segmentation.models import UPerNet
from engine_finetune import BatchAugmentation
from models_vit import MICRO, VisionTransformer
from tests.loops import CLASSIFIERS, a_driver, batches_of, make, update_with_part
from util.data.transforms import Normalize
from util.evaluate.context import EvalContext
from util.run.processes.distributed import precision

DEVICE = "fakegpu"
SMALL = dict(img_size=64, patch_size=4, embed_dim=64, depth=4, num_heads=2)
# Operators whose results, or the shapes of them, the host must know.
READS = {"_local_scalar_dense", "equal", "allclose", "is_nonzero", "nonzero", "masked_select", "bincount", "nms"}
READS |= {"_unique2", "unique_dim", "unique_consecutive"}
SETTING = {"index_put", "index_put_", "_index_put_impl_"}
found_reads = []  # the functions that made the host wait


class OnDevice(torch.Tensor):
    """A tensor of the device. `held`: the tensor of the CPU with its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=f"{DEVICE}:0",
        )
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})

    def tolist(self):
        found_reads.append(place())
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
    name = operator.overloadpacket.__name__
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_device = [x for x in inputs if isinstance(x, OnDevice)]
    on_host = [x for x in inputs if not isinstance(x, OnDevice)]
    is_copy = name in ("_to_copy", "copy_")
    if on_device and not is_copy and any(x.ndim for x in on_host):
        raise RuntimeError(f"{operator} gets tensors of the device and of the host")
    is_result_on_device = bool(on_device)
    if kwargs.get("device") is not None:
        is_result_on_device = torch.device(kwargs["device"]).type == DEVICE
        kwargs = {**kwargs, "device": "cpu"}
    is_between_devices = is_copy and (bool(on_device) != is_result_on_device or bool(on_device and on_host))
    if (is_between_devices and not is_asynchronous(args, kwargs)) or (
        on_device and makes_host_wait(name, args, kwargs)
    ):
        found_reads.append(place())

    tensors = {id(x): x for x in on_host} | {id(x.held): x for x in on_device}
    args, kwargs = tree_map_only(OnDevice, lambda x: x.held, (args, kwargs))

    def wrap(result):
        if id(result) in tensors:  # changed in place
            return tensors[id(result)]
        return OnDevice(result) if is_result_on_device else result

    return tree_map_only(torch.Tensor, wrap, operator(*args, **kwargs))


def is_asynchronous(args, kwargs):
    """Whether the call of _to_copy or copy_ returns before the copy is made."""
    return bool(kwargs.get("non_blocking")) or (len(args) > 2 and args[2] is True)


def makes_host_wait(name, args, kwargs):
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    # A mask as an index is turned into the places where it is true. `x[mask] = number` fills without that.
    if name == "index" or (name in SETTING and args[2].ndim > 0):
        return any(torch.is_tensor(index) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in READS


def place():
    """Returns the innermost function outside of torch and the tests."""
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        function = frame.f_code.co_name
        if package not in ("torch", "tests", "__main__") and not function.startswith("<"):  # a comprehension
            owner = frame.f_locals.get("self")
            return function if owner is None else f"{type(owner).__name__}.{function}"
        frame = frame.f_back
    return "the backward pass"


def augmentation_of(name):
    if name not in CLASSIFIERS:
        return None
    erase = RandomErasing(0.9, mode="pixel", device=DEVICE)
    return BatchAugmentation(erase, Mixup(0.8, 1.0, num_classes=5))


def training(name):
    """Returns (weights, optimizer, function that makes a step) of a training loop, in bf16 with clipping."""
    train = None
    if name == "UPerNet":
        train = partial(engine_segmentation.train_one_epoch, mean_over_valid=False)
        model = UPerNet(num_classes=5, channels=8, **SMALL)
        batches = [(torch.zeros(2, 3, 64, 64).byte(), torch.zeros(2, 64, 64).byte())] * 4
    else:
        model = make(name)
        batches = list(batches_of(name, model, 0, 4))
        if name not in CLASSIFIERS:
            train = partial(engine_pretrain.train_one_epoch, update=update_with_part)
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
    options = dict(accum_iter=2, clip_grad=1.0, print_freq=1000, augment=augmentation_of(name))
    driver = a_driver(model, optimizer, lambda step, lr_scale=1.0: 1e-2, "bf16", DEVICE, **options)
    if train is not None:
        driver.train = train
    return model.parameters(), optimizer, partial(driver.step, iter(batches))


class Steps(Probing):
    """A probing that has batches, and no images."""

    def __init__(self, encoder, context):
        self.args = Namespace(steps=1000)
        self.accum_iter = 2
        self.encoder = encoder
        self.context = context


def probing():
    """The same of the heads of a probe, which are trained in float32."""
    torch.manual_seed(0)
    device = torch.device(DEVICE)
    network = VisionTransformer(global_pool="token", **MICRO)
    encoder = FrozenEncoder(network, "ViT", (32, 32), 1, 1, 3, "", {}).to(device)
    heads = Probes(encoder, ("linear", "attentive"), 5).to(device)
    groups = []
    for grid in heads.grids.values():
        groups += grid.parameter_groups(1.0)
    optimizer = torch.optim.AdamW(groups, fused=True)
    context = EvalContext(Normalize().to(device), precision("bf16", device).autocast, batch_size=4, num_workers=0)
    batches = iter(list(batches_of("ViT", network, 0, 4)))

    return heads.parameters(), optimizer, partial(Steps(encoder, context).train_step, heads, optimizer, batches)


def check(name):
    """Returns what the second step read of the device, and on which devices weights and moments are.

    Two steps of two micro-batches with fused AdamW.
    """
    with Device():
        if name == "probe":
            weights, optimizer, make_step = probing()
        else:
            weights, optimizer, make_step = training(name)
        weights = list(weights)
        make_step(0)
        found_reads.clear()
        make_step(1)
        reads = list(found_reads)
        assert all(x.isfinite().all() for x in weights)
    tensors = list(weights)
    for state in optimizer.state.values():
        tensors += filter(torch.is_tensor, state.values())
    return reads, sorted({str(tensor.device) for tensor in tensors})


def main(*names):
    _setup_privateuseone_for_python_backend(DEVICE)
    torch.fakegpu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    kernels = operators.Library("_", "IMPL")
    kernels.fallback(operators.fallthrough_kernel, "AutocastPrivateUse1")
    for name in names:
        result = {"name": name, "reads": [], "devices": [], "error": None}
        try:
            result["reads"], result["devices"] = check(name)
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
