"""The model as training calls it: compiled, sharded or in DDP."""

import argparse
import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from util import attention
from util.run.processes import shard
from util.run.processes.distributed import PRECISIONS, Process
from util.run.processes.supervise import collective_timeout
from util.run.start.plan import Plan


def wrap_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    args: argparse.Namespace,
    plan: Plan,
    process: Process,
    note: Callable[[str], None],
) -> nn.Module:
    """Applies --attention, --recompute, compilation and --shard, then wraps the model in DDP if there are several.

    Returns the module to call. Parameters of `optimizer` are replaced by their shards. note: writes to the log.
    """
    attention.prefer(args.attention, process.device)
    shard.choose_attention(model, args.attention, plan.precision, process.device, note)
    if args.recompute or args.recompute_pointwise:
        shard.recompute_blocks(model, pointwise_only=not args.recompute)
    if args.shard:
        compiles = bool(plan.compile)
        minutes = collective_timeout(args.dist_timeout, compiles)
        shard.shard(model, optimizer, process.device, PRECISIONS[plan.precision], compiles, minutes, args.reshard)
        return model
    if plan.compile:
        shard.compile_parts(model)
    if process.world_size == 1:
        return model
    # Buffers are not broadcast with every step, but before evaluation. Newer torch has renamed the flag.
    sync_buffers = "broadcast_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        sync_buffers = "forward_sync_buffers"
    # With accumulation some backward passes do not all-reduce, which a static graph does not allow.
    is_static = plan.accum_iter == 1
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=is_static, **{sync_buffers: False})
