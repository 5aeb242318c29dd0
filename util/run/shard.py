"""How a model runs on several processes: in DDP, or sharded with its optimizer state (FSDP2, `--shard`).

With --shard each rank keeps a shard of every parameter. The parameters of a transformer block are all-gathered only
while the block computes. Many ranks form groups of `MIN_SHARDS` or a few more: each group holds the whole model, and
gradients are summed over the groups. The model is built, and a checkpoint is loaded, on the CPU before `shard`.
`HostCopies` assembles whole tensors for saving. Checkpoints are therefore the same files as without sharding: a run may
resume with or without `--shard`, and with another number of processes.
"""

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from util import attention
from util.collectives import all_reduce_sum
from util.lazy import LazyModule
from util.run.distributed import PRECISIONS, Process

fsdp, dtensor = LazyModule("torch.distributed.fsdp"), LazyModule("torch.distributed.tensor")

Batch = TypeVar("Batch")
Autocast = Callable[[], AbstractContextManager[Any]]

# Rows of a parameter are split, and padded to a multiple of the shards. With 8 shards padding is below 1 % of a ViT-B,
# with 1,024 it is more than the model itself. 8 GPUs are a node in most clusters, or two.
MIN_SHARDS = 8
GROUP_TIMEOUT = timedelta(minutes=30)  # as of the group of all ranks; NCCL's default is 10


def wrap_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    args: argparse.Namespace,
    precision: str,
    accum_iter: int,
    process: Process,
) -> nn.Module:
    """Applies --attention, --recompute, --compile and --shard, then wraps the model in DDP if there are several ranks.

    Returns the module to call. Parameters of `optimizer` are replaced by their shards.
    """
    attention.prefer(args.attention)
    if args.recompute:
        recompute_blocks(model)
    if args.shard:
        shard(model, optimizer, process.device, PRECISIONS[precision], args.compile)
        return model
    if args.compile:
        model.compile(fullgraph=True, dynamic=False)
    if process.world_size == 1:
        return model
    # Buffers are not broadcast with every step, but before evaluation. Newer torch has renamed the flag.
    known = inspect.signature(DistributedDataParallel).parameters
    flag = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    # With accumulation some backward passes do not all-reduce, which a static graph does not allow.
    static = accum_iter == 1
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=static, **{flag: False})


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of encoder and decoders. Every model keeps them in lists named `blocks`.

    Layers in other lists are not sharded separately: they are small, or they are used through other methods than
    `forward` (LocalMIM's decoders, Swin's stages), and only `forward` gathers parameters.
    """
    return [module for name, module in model.named_modules() if re.search(r"(^|\.)blocks\.\d+$", name)]


def recompute_blocks(model: nn.Module) -> None:
    """Makes each block store only its input, and recompute the rest in the backward pass. Values stay bit-equal."""
    for block in blocks_of(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def num_shards(world_size: int) -> int:
    """The least divisor of `world_size` that is not below MIN_SHARDS, or `world_size`."""
    return next((n for n in range(MIN_SHARDS, world_size) if world_size % n == 0), world_size)


def make_mesh(device_type: str, world_size: int) -> DeviceMesh:
    """The ranks as one row of shards; or as several rows, replicas of each other, that gather parameters separately.

    Neighbouring ranks share a row, and most often a node. Between rows, only the shards of gradients are all-reduced.
    """
    shards = num_shards(world_size)
    if shards == world_size:
        return init_device_mesh(device_type, (world_size,))
    mesh = init_device_mesh(device_type, (world_size // shards, shards), mesh_dim_names=("replicas", "shards"))
    for group in mesh.get_all_groups():
        group.set_timeout(GROUP_TIMEOUT)
    return mesh


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    dtype: torch.dtype | None = None,
    compiled: bool = False,
) -> None:
    """Shards a whole `model` and the state of its `optimizer` across ranks, and moves the shards to `device`.

    dtype: what autocast computes in, or None. With bfloat16 on GPUs, blocks are gathered in bfloat16 and their
    gradients are reduced in float32. Everything outside of blocks stays float32, as under autocast. float16 is left to
    autocast, because its range is too small for sums such as the gradients of norms. So is bfloat16 on the CPU, whose
    norms cannot mix precisions. Blocks move to the device one at a time, so the whole model never lies there.

    compiled: compile each block as a separate graph, between the hooks that gather and free its parameters.
    """
    mesh = make_mesh(device.type, dist.get_world_size())
    outside = in_blocks = fsdp.MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype is torch.bfloat16 and device.type == "cuda":
        in_blocks = fsdp.MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = blocks_of(model)
    for module in [*blocks, model]:
        before = list(module.parameters())
        fsdp.fully_shard(module, mesh=mesh, mp_policy=outside if module is model else in_blocks)
        # Methods that gather parameters as `forward` does. The `forward` of a classifier calls `forward_features`.
        for method in ("cls_attention", "forward_features"):
            if hasattr(module, method) and not hasattr(module, "head"):
                fsdp.register_fsdp_forward_method(module, method)
        _replace_parameters(optimizer, before, module.parameters())
        del before  # the last reference to whole parameters
    if compiled:
        _compile(blocks)
    model.to(device)  # fully_shard has not moved a teacher, which is no submodule
    model.no_sync = partial(_no_sync, model)  # DDP's method, so that callers treat both alike


def _compile(blocks: Sequence[nn.Module]) -> None:
    config = torch._dynamo.config
    # Blocks share their code but differ in drop-path rate and shape. Dynamo counts their graphs together.
    config.recompile_limit = max(config.recompile_limit, 8 * len(blocks))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8 * len(blocks))
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)


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
    new = {old: parameter for old, parameter in zip(before, after, strict=True) if old is not parameter}
    for group in optimizer.param_groups:
        group["params"] = [new.get(p, p) for p in group["params"]]
    for old, parameter in new.items():
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[parameter] = {name: _shard_state(value, parameter) for name, value in state.items()}


def _shard_state(value: Any, parameter: Any) -> Any:
    """Shards a moment like its parameter. Anything else, such as AdamW's step count, is replicated."""
    if not torch.is_tensor(value):
        return value
    if value.shape != parameter.shape:
        return value.to(parameter.device)
    share = torch.zeros_like(parameter)  # as the optimizer allocates it: fused AdamW requires one layout
    # Every rank already holds the whole tensor, so none is sent.
    whole = dtensor.distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    share.to_local().copy_(whole.to_local())
    return share


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
        whole = content.full_tensor() if isinstance(content, dtensor.DTensor) else content
        if not keep:
            return None
        if place not in self.buffers:
            # A whole DTensor is contiguous. Its memory format is restored, as DDP needs it in moments.
            like = torch.empty_strided(whole.shape, content.stride(), dtype=whole.dtype, device="meta")
            self.buffers[place] = torch.empty_like(like, device="cpu", pin_memory=self.device.type == "cuda")
        return self.buffers[place].copy_(whole, non_blocking=True)


def total_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients together, sharded or not, on every rank. One number is all-reduced."""
    norm = nn.utils.get_total_norm([g.to_local() if isinstance(g, dtensor.DTensor) else g for g in grads])
    mesh = next((g.device_mesh for g in grads if isinstance(g, dtensor.DTensor)), None)
    if mesh is None:
        return norm
    # Summed over replicas, too, so that all ranks clip by the same bits.
    return all_reduce_sum(norm.square() / (mesh.size() // mesh.size(-1))).sqrt()


def count_bad(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The number of tensors, or this rank's shards of them, that hold a non-finite value; a scalar on the device."""
    own = (t.to_local() if isinstance(t, dtensor.DTensor) else t for t in tensors)
    return torch.stack([~t.detach().isfinite().all() for t in own]).float().sum()


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
