"""How a model runs on several processes: in DDP, or sharded with its optimizer state (FSDP2, `--shard`).

With --shard each rank keeps a shard of every parameter. The parameters of a transformer block are all-gathered only
while the block computes. Many ranks form groups of `MIN_SHARDS` or a few more: each group holds the whole model, and
gradients are summed over the groups. The model is built, and a checkpoint is loaded, on the CPU before `shard`.
`HostCopies` assembles whole tensors for saving. Checkpoints are therefore the same files as without sharding: a run may
resume with or without `--shard`, and with another number of processes.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from util import attention
from util.collectives import all_reduce_sum, gather_objects
from util.lazy import LazyModule
from util.run.processes.distributed import PRECISIONS

fsdp = LazyModule("torch.distributed.fsdp")
dtensor = LazyModule("torch.distributed.tensor")
Batch = TypeVar("Batch")
Autocast = Callable[[], AbstractContextManager[Any]]
# Matrix products, and attention on any kernel.
PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.prmim.short_attention.default,
]
# Rows of a parameter are split, and padded to a multiple of the shards. With 8 shards padding is below 1 % of a ViT-B,
# with 1,024 it is more than the model itself. 8 GPUs are a node in most clusters, or two.
MIN_SHARDS = 8


def choose_attention(
    model: nn.Module, name: str, precision: str, device: torch.device, note: Callable[[str], None]
) -> None:
    """Uses the kernel for short sequences in `model` if --attention `name` asks for it, and it works on all ranks.

    With "auto" it is used on GPUs of capability 9.0, where it was measured to be faster. All ranks call it before the
    model is compiled. note: is called with the reason if the kernel does not work.
    """
    dtype = PRECISIONS[precision]
    heads = plain_heads(model)
    if name not in ("auto", "short") or not heads:
        return
    if device.type != "cuda" or dtype is None:
        if name == "short":
            note("note: torch's attention kernels are used: --attention short is for bf16 and fp16 on a GPU")
        return
    fault: str | None = ""  # needs no note
    if name == "short" or torch.cuda.get_device_capability(device) == (9, 0):
        fault = attention.find_fault(dtype, heads, device)
    faults = gather_objects(fault)
    if all(fault is None for fault in faults):
        attention.use_short(dtype, heads)
        return
    for rank, fault in enumerate(faults):
        if fault:
            note(f"note: torch's attention kernels are used: --attention short fails on rank {rank}: {fault}")
            return


def plain_heads(model: nn.Module) -> set[tuple[int, int]]:
    """Returns (number, width) of the heads of each layer that calls `self_attention`, also in a teacher."""
    modules = list(model.modules())
    teacher = getattr(model, "teacher", None)  # no submodule, but a part of the step
    if teacher is not None:
        modules += teacher.modules()
    return {module.plain_heads for module in modules if hasattr(module, "plain_heads")}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of encoder and decoders. Every model keeps them in lists named `blocks`.

    Layers in other lists are not sharded separately: they are small, or they are used through other methods than
    `forward` (LocalMIM's decoders, Swin's stages), and only `forward` gathers parameters.
    """
    return [module for name, module in model.named_modules() if re.search(r"(^|\.)blocks\.\d+$", name)]


def recompute_blocks(model: nn.Module, pointwise_only: bool = False) -> None:
    """Makes each block store only its input, and recompute the rest in the backward pass. Values stay bit-equal.

    pointwise_only: also store the results of matrix products and of attention, which take most of the time.
    """
    forward = _recomputed
    if pointwise_only:
        forward = _pointwise_recomputed
    for block in blocks_of(model):
        block.forward = MethodType(forward, block)  # which equal blocks share, so that they share compiled code


def _recomputed(block: nn.Module, *inputs: Any) -> Any:
    return checkpoint(type(block).forward, block, *inputs, use_reentrant=False)


def _pointwise_recomputed(block: nn.Module, *inputs: Any) -> Any:
    stored = partial(create_selective_checkpoint_contexts, PRODUCTS)
    return checkpoint(type(block).forward, block, *inputs, use_reentrant=False, context_fn=stored)


def compile_parts(model: nn.Module) -> None:
    """Compiles each block, and each of the methods that modules name as their `parts`, as a graph of its own.

    Equal blocks share one graph, so that a deep model compiles as fast as a shallow one. In DDP the gradients of a
    block are reduced while those of the block before it are computed. A part holds no block. Anything else, such as
    norms between blocks, runs as it is written.

    So does all that runs in eval mode: other batches have other shapes, each of which would have to be compiled.
    """
    functions = [(block, "forward") for block in blocks_of(model)]
    modules = list(model.modules())
    teacher = getattr(model, "teacher", None)  # no submodule, but a part of the step
    if teacher is not None:
        functions += [(block, "forward") for block in blocks_of(teacher)]
        modules.append(teacher)
    for module in modules:
        functions += [(module, name) for name in getattr(module, "parts", ())]
    # Else compiled blocks that are recomputed drop paths by generators of their own, which no seed of a step reaches.
    torch._functorch.config.graphsafe_rng_functionalization = False
    config = torch._dynamo.config
    config.optimize_ddp = False  # it would cut the graph of a block where a bucket of gradients ends
    # Blocks share their code but differ in width, shift of windows and number of tokens. Dynamo counts them together.
    limit = max(config.recompile_limit, 8 * len(functions))
    config.recompile_limit = limit
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, limit)
    for module, name in functions:
        function = getattr(module, name)
        compiled = torch.compile(function, fullgraph=True, dynamic=False)
        setattr(module, name, partial(_call, model, function, compiled))


def _call(model: nn.Module, function: Callable[..., Any], compiled: Callable[..., Any], *inputs: Any) -> Any:
    if model.training:
        return compiled(*inputs)
    return function(*inputs)


def num_shards(world_size: int) -> int:
    """The least divisor of `world_size` that is not below MIN_SHARDS, or `world_size`."""
    for number in range(MIN_SHARDS, world_size):
        if world_size % number == 0:
            return number
    return world_size


def make_mesh(device_type: str, world_size: int, timeout_minutes: float) -> DeviceMesh:
    """The ranks as one row of shards; or as several rows, replicas of each other, that gather parameters separately.

    Neighbouring ranks share a row, and most often a node. Between rows, only the shards of gradients are all-reduced.
    timeout_minutes: of each collective.
    """
    shards = num_shards(world_size)
    if shards == world_size:
        return init_device_mesh(device_type, (world_size,))
    mesh = init_device_mesh(device_type, (world_size // shards, shards), mesh_dim_names=("replicas", "shards"))
    for group in mesh.get_all_groups():
        group.set_timeout(timedelta(minutes=timeout_minutes))  # NCCL's default is 10
    return mesh


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    dtype: torch.dtype | None = None,
    compiled: bool = False,
    timeout_minutes: float = 30,
    reshard: bool = True,
) -> None:
    """Shards a whole `model` and the state of its `optimizer` across ranks, and moves the shards to `device`.

    dtype: what autocast computes in, or None. With bfloat16 on GPUs, blocks are gathered in bfloat16 and their
    gradients are reduced in float32. Everything outside of blocks stays float32, as under autocast. float16 is left to
    autocast, because its range is too small for sums such as the gradients of norms. So is bfloat16 on the CPU, whose
    norms cannot mix precisions. Blocks move to the device one at a time, so the whole model never lies there.

    reshard: free the parameters of a block after its forward pass, and gather them again for the backward pass.

    compiled: call `compile_parts`. Blocks are compiled between the hooks that gather and free their parameters.
    """
    mesh = make_mesh(device.type, dist.get_world_size(), timeout_minutes)
    outside = fsdp.MixedPrecisionPolicy(cast_forward_inputs=False)
    in_blocks = outside
    if dtype is torch.bfloat16 and device.type == "cuda":
        in_blocks = fsdp.MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = blocks_of(model)
    for module in [*blocks, model]:
        before = list(module.parameters())
        class_name = type(module).__name__
        policy = outside if module is model else in_blocks
        is_resharded = reshard and module is not model  # the backward pass begins with what is outside of blocks
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=is_resharded)
        type(module).__name__ = class_name  # FSDP has made a class of its own, and messages name the user's
        # Methods that gather parameters as `forward` does. The `forward` of a classifier calls `forward_features`.
        for method in ("cls_attention", "forward_features"):
            if hasattr(module, method) and not hasattr(module, "head"):
                fsdp.register_fsdp_forward_method(module, method)
        _replace_parameters(optimizer, before, module.parameters())
        del before  # the last reference to whole parameters
    if compiled:
        compile_parts(model)
    model.to(device)  # fully_shard has not moved a teacher, which is no submodule
    model.no_sync = partial(_no_sync, model)  # DDP's method, so that callers treat both alike


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    """Accumulates gradients without reducing them. They are unsharded, so few large micro-batches need less memory."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _replace_parameters(
    optimizer: torch.optim.Optimizer, before: Iterable[nn.Parameter], after: Iterable[nn.Parameter]
) -> None:
    """Replaces the optimizer's parameters `before` by `after`, and shards their state alike."""
    shard_of = dict(zip(before, after, strict=True))
    fused: set[nn.Parameter] = set()
    for group in optimizer.param_groups:
        if group.get("fused"):
            fused.update(group["params"])
        group["params"] = [shard_of.get(p, p) for p in group["params"]]
    for whole, parameter in shard_of.items():
        if whole is parameter or whole not in optimizer.state:
            continue
        state = optimizer.state.pop(whole)
        for name, value in state.items():
            optimizer.state[parameter][name] = _shard_state(value, parameter, whole in fused)


def _shard_state(value: Any, parameter: Any, is_fused: bool) -> Any:
    """Shards a moment like its parameter. Anything else, such as AdamW's step count, is replicated.

    is_fused: the optimizer reads the step count on the device. Others read it on the host.
    """
    if not torch.is_tensor(value):
        return value
    if value.shape != parameter.shape:
        return value.to(parameter.device) if is_fused else value
    moment = torch.zeros_like(parameter)  # as the optimizer allocates it: fused AdamW requires one layout
    # Every rank already holds the whole tensor, so none is sent.
    whole = dtensor.distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    moment.to_local().copy_(whole.to_local())
    return moment


class HostCopies:
    """Makes whole copies of states on the CPU. Each copy overwrites the one before. device: where most tensors are.

    torch.distributed.checkpoint.state_dict is not used: it keys optimizer states by name, not by number, and loses the
    memory format of channels-last kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[tuple[Any, ...], torch.Tensor] = {}  # pinned if they are copied from a GPU

    def take(self, state: Any, keep: bool) -> Any:
        """Returns `state`, nested dicts and lists, with copies of its tensors, or with None for them unless `keep`.

        All ranks must call it. One tensor at a time is whole on the device.
        """
        copy = self._copy(state, keep, ())
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # copies to pinned memory are asynchronous
        return copy

    def _copy(self, content: Any, keep: bool, place: tuple[Any, ...]) -> Any:
        if isinstance(content, dict):
            return {name: self._copy(value, keep, (*place, name)) for name, value in content.items()}
        if isinstance(content, list):
            return [self._copy(value, keep, (*place, i)) for i, value in enumerate(content)]
        if not torch.is_tensor(content):
            return content
        whole = content
        if isinstance(content, dtensor.DTensor):
            whole = content.full_tensor()
        if not keep:
            return None
        if place not in self.buffers:
            # A whole DTensor is contiguous. Its memory format is restored, as DDP needs it in moments.
            like = torch.empty_strided(whole.shape, content.stride(), dtype=whole.dtype, device="meta")
            self.buffers[place] = torch.empty_like(like, device="cpu", pin_memory=self.device.type == "cuda")
        return self.buffers[place].copy_(whole, non_blocking=True)


def total_norm(grads: Sequence[torch.Tensor], flag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of all gradients together, sharded or not, on every rank; and the sum of the ranks' flags.

    flag: a number of this rank, [1]. If the norm is all-reduced, the flag travels with it.
    """
    norm = nn.utils.get_total_norm([_local(grad) for grad in grads])
    for grad in grads:
        if isinstance(grad, dtensor.DTensor):
            # Summed over replicas, too, so that all ranks clip by the same bits.
            num_replicas = grad.device_mesh.size() // grad.device_mesh.size(-1)
            sums = all_reduce_sum(torch.cat([norm.square().reshape(1) / num_replicas, flag]))
            return sums[0].sqrt(), sums[1:]
    return norm, all_reduce_sum(flag)


def count_bad(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The number of tensors, or this rank's shards of them, that hold a non-finite value; a scalar on the device."""
    return torch.stack([~_local(tensor).detach().isfinite().all() for tensor in tensors]).float().sum()


def _local(tensor: Any) -> torch.Tensor:
    """Returns this rank's shard of a sharded tensor, or the tensor itself."""
    if isinstance(tensor, dtensor.DTensor):
        return tensor.to_local()
    return tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` was applied to the model."""
    return isinstance(model, fsdp.FSDPModule)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gathers the parameters outside of blocks, for methods of the model other than `forward`. All ranks must enter."""
    if not is_sharded(model):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def pad_forward_passes(
    batches: Iterable[Batch],
    num_passes: int,
    forward: Callable[[torch.Tensor], Any],
    blank: torch.Tensor,
    autocast: Autocast,
) -> Iterator[Batch]:
    """Yields `batches`, of which the caller runs one forward pass each, then runs passes of `blank` up to `num_passes`.

    A sharded forward pass needs all ranks, so every rank must run the same number, however few batches it has.
    """
    for batch in batches:
        yield batch
        num_passes -= 1
    for _ in range(num_passes):
        with autocast():
            forward(blank)
