"""Predict memory, time and length of pre-training on a GPU that need not be here.

    python scripts/profile_pretrain.py mae_vit_base_800ep --predict H200 --gpus 8

One training step runs on fake tensors, which have shapes and types but no data. Every storage is followed from its
allocation to its release, and every operation takes max(FLOPs / peak, bytes / bandwidth) seconds: a roofline with the
rates that a large matrix product and a large copy achieve. Two batch sizes give the costs of any other one, because all
of them are linear in the batch. Columns, in 10^9 bytes on each GPU:

parameters   weights and buffers, and those of a frozen teacher
gradients    all gradients. Without DDP and accumulation they appear while activations are freed: then the peak is lower
             than the sum of the parts
moments      the state of AdamW
saved        what the forward pass leaves for the backward pass, with autocast's copies of the weights
temporary    what the backward pass needs beside it
peak         the most that tensors hold at once
largest      the largest micro-batch whose peak stays below 90 % of the GPU's memory
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from framework import Framework
from util import costs
from util.data.transforms import Normalize
from util.run.flags import split_batch
from util.run.shard import blocks_of, recompute_blocks, total_norm
from util.tables import markdown_table

try:
    from torch._subclasses.fake_tensor import FakeTensorMode
except ImportError:  # not a public interface
    FakeTensorMode = None  # type: ignore[assignment, misc]

aten = torch.ops.aten
Settings = dict[str, Any]
Row = dict[str, Any]
GB, GIB = 1e9, 2**30


class Device(NamedTuple):
    """Rates that a device achieves."""

    flops: float  # per second, of a large matrix product in the precision of the step
    bandwidth: float  # bytes per second, read and written, of a large copy
    memory: float  # bytes


# MAMF: "Maximum Achievable Matmul FLOPS", bfloat16, mean of 100 products of the best shape in PyTorch:
# https://github.com/stas00/ml-engineering/tree/master/compute/accelerator
# TABLE: bfloat16 products of up to 10240^3 in PyTorch, by its users:
# https://github.com/zzc0721/torch-performance-test-data/blob/main/database.md
# SHARE of the datasheet's bandwidth where no measurement was found: that of the H200, 4.3 of 4.8 TB/s.
SHARE = 0.9
DEVICES = {
    # SXM. Product of 8192^3 random numbers, and copy of 8.6 GB, in PyTorch 2.11, 2026-10: reported to this project,
    # which did not measure it; the copy has no publication. Published products: 790 in TABLE, 794.5 in MAMF.
    # Datasheet 989 TFLOP/s without sparsity, 4.8 TB/s, 141 GB: https://www.nvidia.com/en-us/data-center/h200
    "H200": Device(788e12, 4.3e12, 139 * GIB),
    # SXM. MAMF; datasheet 3.35 TB/s: https://www.nvidia.com/en-us/data-center/h100
    "H100": Device(794.5e12, SHARE * 3.35e12, 79 * GIB),
    # SXM. MAMF; datasheet 2.039 TB/s: https://www.nvidia.com/en-us/data-center/a100, times the share of the next line
    "A100-80": Device(271.2e12, 0.846 * 2.039e12, 79 * GIB),
    # SXM. MAMF of A100 SXM, whose memory it does not name; copy: 1225.3 GiB/s of 1448.4,
    # https://pc2.github.io/GPUInspector.jl/dev/examples/data_bandwidth
    "A100-40": Device(271.2e12, 1225.3 * GIB, 39 * GIB),
    # TABLE, of a datasheet's 362 TFLOP/s; 864 GB/s: https://www.nvidia.com/en-us/data-center/l40s
    "L40S": Device(269e12, SHARE * 864e9, 44 * GIB),
    # The slowest of seven in TABLE. Datasheet 165.2 TFLOP/s with float32 sums:
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    # Copy: https://github.com/xytpai/nvbench
    "RTX4090": Device(160.5e12, 921e9, 23 * GIB),
}
USABLE = 0.9  # of the memory: the rest is for the CUDA context, libraries, communication and fragmentation
RATIOS = (0.0, 0.25, 0.5, 0.65)
BATCHES = (64, 128)  # whose costs are counted
IMAGENET, IMAGES = 1_281_167, {"cifar10": 50_000}  # training images, of ImageNet-1K unless --dataset says another
LEFT_OUT = (
    "Left out: launches of kernels, caches, fused or slower kernels, fragmentation, buffers of cuBLAS, cuDNN and NCCL, "
    "loading data, communication. Expect a real step to be slower."
)
PARTS = ("parameters", "gradients", "moments", "saved", "temporary")
COLUMNS = ["recipe", "model", "throw_ratio", "recompute", "device", "gpus", "batch_size", "accum_iter"]
COLUMNS += [
    *(f"{part}_gb" for part in PARTS),
    "peak_gb",
    "largest_batch_size",
    "ms",
    "images_per_second",
    "days",
    "torch",
]


class CudaCalls(TorchFunctionMode):
    """Calls on the CPU what autocast and attention call on a GPU, where they differ in what they keep for backward."""

    IN_FLOAT32 = {F.layer_norm, F.softmax, torch.softmax, torch.Tensor.softmax}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, is_autocast = kwargs or {}, torch.is_autocast_enabled("cpu")
        if is_autocast and func in self.IN_FLOAT32:
            args = [x.float() if isinstance(x, torch.Tensor) else x for x in args]
        if func is F.scaled_dot_product_attention and kwargs.get("attn_mask") is not None:
            bias = kwargs["attn_mask"].expand(*args[0].shape[:-1], args[1].shape[-2])
            q, k, v, bias = (x.bfloat16() if is_autocast else x for x in (*args, bias))
            return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[0]
        return func(*args, **kwargs)

    @classmethod
    def around(cls, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `forward` in this mode. The backward pass, which may recompute it, has left the mode."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with cls():
                return forward(*args, **kwargs)

        return wrapped


SAME_FLOPS = {  # for torch 2.11, which counts no attention on the CPU
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def count_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """FLOPs of an operator: two per multiply-add, matrix products, convolutions and attention only."""
    if func is aten.convolution_backward.default:  # torch's counter ignores its groups
        grad, weight, output_mask = args[0], args[2], args[10]
        return 2.0 * sum(output_mask[:2]) * weight.numel() * grad.numel() / grad.shape[1]
    formula = flop_registry.get(SAME_FLOPS.get(func.overloadpacket, func.overloadpacket))
    return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0


def count_bytes(func: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
    """Bytes that an operator reads and writes. A view reads and writes nothing."""
    known = {x.untyped_storage()._cdata for x in inputs}
    is_view = not func._schema.is_mutable and all(x.untyped_storage()._cdata in known for x in outputs)
    if is_view or "empty" in func._schema.name:
        return 0.0
    written = outputs or inputs  # a fused optimizer returns nothing
    return float(sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in [*inputs, *written]))


class Tally(TorchDispatchMode):
    """Counts the operators of a step, and the bytes of the storages that it makes.

    operators: (FLOPs, bytes) of each. live, peak: bytes that are held now, and most bytes, without gradients. whole:
    most bytes with gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[float, float]] = []
        self.live = self.peak = self.gradients = self.whole = 0
        self.storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace != "aten":
            return out
        inputs, outputs = ([x for x in tree_leaves(y) if isinstance(x, torch.Tensor)] for y in ((args, kwargs), out))
        flops, moved = count_flops(func, args, kwargs, out), count_bytes(func, inputs, outputs)
        if flops or moved:
            self.operators.append((flops, moved))
        made = {x.untyped_storage()._cdata for x in inputs}
        for tensor in outputs:
            self.follow(tensor.untyped_storage(), made)
        return out

    def follow(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        """Count a new storage until it is released."""
        key = storage._cdata
        if key in known or key in self.storages:
            return
        self.storages[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak, self.whole = max(self.peak, self.live), max(self.whole, self.live + self.gradients)
        finalize(storage, self.release, key)

    def release(self, key: int) -> None:
        """Stop counting a storage."""
        self.live -= self.storages.pop(key, 0)

    def hold_gradient(self, parameter: torch.Tensor) -> None:
        """Count the storage of a gradient apart from the others."""
        assert parameter.grad is not None
        size = self.storages.pop(parameter.grad.untyped_storage()._cdata, 0)
        self.live, self.gradients = self.live - size, self.gradients + size


class Costs(NamedTuple):
    """Costs of one micro-batch, in bytes and as (FLOPs, bytes) of the operators."""

    parameters: int
    gradients: int
    saved: int
    peak: int  # without parameters, gradients and moments
    whole: int  # without parameters and moments; no gradients at the start
    micro: list[tuple[float, float]]  # forward and backward
    update: list[tuple[float, float]]  # of the weights

    def seconds(self, device: Device) -> tuple[float, float]:
        """Seconds of (a micro-batch, the update of the weights)."""
        times = [
            sum(max(flops / device.flops, moved / device.bandwidth) for flops, moved in operators)
            for operators in (self.micro, self.update)
        ]
        return times[0], times[1]


def count_step(
    build: Callable[[Settings], Framework],
    settings: Settings,
    batch_size: int,
    recompute: bool = False,
    dtype: torch.dtype | None = torch.bfloat16,
    on_cuda: bool = True,
) -> Costs:
    """Count a training step as engine_pretrain.py makes it. dtype: of autocast, or None. on_cuda: with its kernels."""
    if FakeTensorMode is None:
        raise ValueError(f"--predict needs FakeTensorMode, which torch {torch.__version__} does not have")
    with torch.device("meta"):
        model = build(settings).train()
    imgs, orders = costs.make_batch(model, settings, batch_size)
    tally = Tally()
    with FakeTensorMode() as mode:
        parameters, normalize = costs.to_fake(model), Normalize()
        if on_cuda:
            for module in (*blocks_of(model), model):
                module.forward = CudaCalls.around(module.forward)
        if recompute:
            recompute_blocks(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(tally.hold_gradient)
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        batch = [mode.from_tensor(x) for x in (imgs, *orders)]
        with tally:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss: Any = sum(model(normalize(batch[0]), *batch[1:]).values())
            saved = tally.live
            loss.backward()
        micro, tally.operators = tally.operators, []
        optimizer.step()  # makes the moments
        with tally:
            total_norm([p.grad for p in trained if p.grad is not None])
            optimizer.step()
    return Costs(parameters, tally.gradients, saved, tally.peak, tally.whole, micro, tally.operators)


def at_batch(batch_size: int, values: Sequence[float]) -> float:
    """The value at a batch size, from those at BATCHES. It is linear in the batch size."""
    (first, second), (low, high) = values, BATCHES
    return first + (second - first) * (batch_size - low) / (high - low)


def predict(
    settings: Settings, counted: Sequence[Costs], device_name: str, gpus: int = 1, batch_size: int | None = None
) -> Row:
    """Predict a recipe on GPUs of one kind.

    counted: its costs at BATCHES. batch_size: micro-batch of a GPU (default: the largest that fits and divides the
    total batch).
    """
    device, parameters, gradients = DEVICES[device_name], counted[0].parameters, counted[0].gradients
    fixed = parameters + 3 * gradients  # AdamW has two moments
    saved, peak, whole = ([getattr(c, name) for c in counted] for name in ("saved", "peak", "whole"))
    room, slope = USABLE * device.memory - fixed - at_batch(0, peak), at_batch(1, peak) - at_batch(0, peak)
    largest = max(0, int(room / slope))
    size, accum_iter, total = split_batch(
        batch_size, settings["accum_iter"], settings["total_batch_size"], gpus, max(1, largest)
    )
    top = fixed + at_batch(size, peak)
    if gpus == accum_iter == 1:
        top = max(fixed, fixed - gradients + at_batch(size, whole))
    times = [c.seconds(device) for c in counted]
    seconds = accum_iter * at_batch(size, [micro for micro, _ in times]) + times[0][1]
    parts = [parameters, gradients, 2 * gradients, at_batch(size, saved), at_batch(size, peak) - at_batch(size, saved)]
    images = settings["epochs"] * IMAGES.get(settings["dataset"], IMAGENET)
    row: Row = {name: settings[name] for name in ("recipe", "model", "throw_ratio")}
    row |= {"device": device_name, "gpus": gpus, "batch_size": size, "accum_iter": accum_iter}
    row |= {f"{name}_gb": part / GB for name, part in zip(PARTS, parts, strict=True)}
    row |= {"peak_gb": top / GB, "largest_batch_size": largest, "ms": 1e3 * seconds, "torch": torch.__version__}
    return row | {"images_per_second": total / seconds, "days": images / (total / seconds) / 86400}


def predict_all(
    build: Callable[[Settings], Framework], recipes: Sequence[Settings], args: argparse.Namespace
) -> Iterator[Row]:
    """Predict recipes, eager and with --recompute; a single recipe at the throw ratios that its framework takes."""
    for settings in recipes:
        own = settings["throw_ratio"]
        for ratio in sorted({own, *RATIOS}) if len(recipes) == 1 else [own]:
            for recompute in (False, True):
                arm = {**settings, "throw_ratio": ratio}
                try:
                    counted = [count_step(build, arm, size, recompute) for size in BATCHES]
                except ValueError:  # more than is masked, for example
                    if ratio == own:
                        raise
                    continue
                for name in args.predict:
                    yield predict(arm, counted, name, args.gpus, args.batch_size) | {"recompute": recompute}


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, below a line that says what they are."""
    rates = {name: DEVICES[name] for name in dict.fromkeys(row["device"] for row in rows)}
    how = f"*Predicted*, not measured, with torch {rows[0]['torch']}. Rates: "
    how += ", ".join(
        f"{n} {d.flops / 1e12:.0f} TFLOP/s (bf16), {d.bandwidth / 1e12:.2f} TB/s" for n, d in rates.items()
    )
    titles = ["recipe", "ρ_d", "GPUs", "recompute", *(f"{part} GB" for part in PARTS), "peak GB", "largest"]
    titles += ["micro-batch", "ms a step", "images/s", "days"]
    lines = []
    for row in rows:
        gpus = f"{row['gpus']} x {row['device']}"
        cells = [row["recipe"], row["throw_ratio"], gpus, "yes" if row["recompute"] else "no"]
        cells += [f"{row[f'{part}_gb']:.2f}" for part in PARTS]
        cells += [f"{row['peak_gb']:.2f}", row["largest_batch_size"], f"{row['batch_size']} x {row['accum_iter']}"]
        lines.append([*cells, f"{row['ms']:.1f}", f"{row['images_per_second']:.0f}", f"{row['days']:.2f}"])
    return f"{how}. {LEFT_OUT}\n\n{markdown_table(titles, lines)}\n"
