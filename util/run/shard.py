"""Parameters, gradients and moments split over the processes, for models that outgrow a GPU (`--shard`).

This is torch's FSDP2. A process keeps its share of every parameter, and a transformer block's parameters are gathered for
as long as something is computed with them. Runs begin and end whole: the model is built, and a checkpoint read, on the
CPU before `shard` deals it out, and `gather` puts together what a checkpoint holds. So the file is DDP's own, and a run may go
on with or without --shard, by any number of processes.
"""

import re
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from util.run.distributed import all_reduce_sum


def check_group():
    """ValueError where there is nobody to share with."""
    if not dist.is_initialized():
        raise ValueError("--shard needs several processes: start with torchrun")


def blocks_of(model):
    """The transformer blocks of encoder and decoders; every model here has them in lists named `blocks`.

    Other lists hold layers that are too small for a group of their own, or modules (LocalMIM's decoders, Swin's stages) that are
    used through other methods than `forward`, which alone gathers parameters.
    """
    return [module for name, module in model.named_modules() if re.search(r"(^|\.)blocks\.\d+$", name)]


def shard(model, optimizer, device, dtype=None, compiled=False):
    """Deals the parameters of a whole `model`, and what `optimizer` holds of them, out to the processes, and onto `device`.

    dtype: what autocast computes in, or None. On GPUs the blocks, nearly all of the parameters, are gathered in bfloat16, if it
    is that, and their gradients reduced in float32. What is outside of blocks stays float32, as under autocast: positions and
    tokens begin the residual stream, and heads compute in their own precision. With float16, whose range is too small for sums
    such as the gradients of norms, autocast casts what it casts without sharding; and so does the CPU's, whose norms cannot
    mix precisions. Each block moves to the device whole and leaves its share there, before the next one comes.

    compiled: every block is a graph of its own, between the hooks that gather its parameters and free them.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    outside = in_blocks = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype is torch.bfloat16 and device.type == "cuda":
        in_blocks = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = blocks_of(model)
    for module in [*blocks, model]:
        before = list(module.parameters())
        fully_shard(module, mesh=mesh, mp_policy=outside if module is model else in_blocks)
        _replace(optimizer, before, module.parameters())
        del before  # the last reference to whole parameters
    if compiled:
        _compile(blocks)
    model.to(device)  # a teacher is no submodule
    model.no_sync = partial(_no_sync, model)  # as DDP's, so that the engine needs not know which of the two it has


def _compile(blocks):
    config = torch._dynamo.config
    # Blocks share their code, and each has its own rate of drop path and shape: dynamo counts their graphs together.
    config.recompile_limit = max(config.recompile_limit, 8 * len(blocks))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8 * len(blocks))
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)


@contextmanager
def _no_sync(model):
    """Gradients wait in the process; unlike the sum they become, they are whole: few large micro-batches need less memory."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _replace(optimizer, before, after):
    """Lets the optimizer go on with the parameters `after` where it had `before`; its moments are split like them."""
    new = {old: parameter for old, parameter in zip(before, after, strict=True) if old is not parameter}
    for group in optimizer.param_groups:
        group["params"] = [new.get(p, p) for p in group["params"]]
    for old, parameter in new.items():
        if old in optimizer.state:
            optimizer.state[parameter] = {name: _split(value, parameter) for name, value in optimizer.state.pop(old).items()}


def _split(value, parameter):
    """A moment, split like its parameter; anything else (AdamW's step count) is each process's own."""
    if not torch.is_tensor(value) or value.shape != parameter.shape:
        return value.to(parameter.device) if torch.is_tensor(value) else value
    share = torch.zeros_like(parameter)  # made as the optimizer makes it: fused AdamW insists on one layout
    # Every process has the whole already, so none need send it.
    whole = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    share.to_local().copy_(whole.to_local())
    return share


def gather(content, keep):
    """`content`, dicts and lists of anything, with sharded tensors whole and on the CPU where `keep`, else None.

    All processes must call it. One tensor at a time is whole on the device. torch.distributed.checkpoint would rename the
    optimizer's states by parameter; these keep the numbers that `optimizer.state_dict()` gives them, sharded or not.
    """
    if isinstance(content, DTensor):
        whole = content.full_tensor()
        # full_tensor is contiguous; a channels-last kernel had its layout, which its moments must have when DDP goes on.
        return torch.empty_strided(whole.shape, content.stride(), dtype=whole.dtype).copy_(whole) if keep else None
    if isinstance(content, dict):
        return {name: gather(value, keep) for name, value in content.items()}
    return [gather(value, keep) for value in content] if isinstance(content, list) else content


def total_norm(grads):
    """The norm of all gradients together, on every process, of which each may hold a share; one number is exchanged."""
    norm = torch.nn.utils.get_total_norm([g.to_local() if isinstance(g, DTensor) else g for g in grads])
    if not any(isinstance(g, DTensor) for g in grads):
        return norm
    return all_reduce_sum(norm.square()).sqrt()


def count_bad(parameters):
    """How many parameters, or this process's shares of them, are not finite; on the device."""
    own = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return torch.stack([~p.detach().isfinite().all() for p in own]).float().sum()


def is_sharded(model):
    return isinstance(model, FSDPModule)


@contextmanager
def unsharded(model):
    """For methods of the model other than `forward`: what is outside of the blocks is gathered, too. All processes must."""
    if not is_sharded(model):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def in_company(batches, num_passes, model, blank, autocast):
    """`batches`, one forward pass each; then passes of `blank`, an image, until there were `num_passes`.

    A forward pass needs every process's shares, so all must make equally many, whatever images they have left.
    """
    for batch in batches:
        yield batch
        num_passes -= 1
    for _ in range(num_passes):
        with autocast():
            model(blank)
