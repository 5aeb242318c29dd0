"""The model as training calls it: with its attention kernel, recomputed, compiled, in DDP."""

import re
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from util import attention
from util.collectives import gather_objects
from util.run.processes.distributed import PRECISIONS
from util.run.start.run import Run

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


def wrap_model(model: nn.Module, run: Run) -> nn.Module:
    """Applies --attention, --recompute and compilation, then wraps the model in DDP if there are several processes.

    Returns the module to call.
    """
    args = run.args
    plan = run.plan
    process = run.process
    attention.prefer(args.attention, process.device)
    choose_attention(model, args.attention, plan.precision, process.device, run.note)
    if args.recompute or args.recompute_pointwise:
        recompute_blocks(model, pointwise_only=not args.recompute)
    if args.compile:
        compile_parts(model)
    if process.world_size == 1:
        return model
    # With accumulation some backward passes do not all-reduce, which a static graph does not allow.
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=plan.accum_iter == 1)
    ddp.broadcast_buffers = False  # not with every step, but before evaluation
    if process.device.type == "cpu":
        ddp.register_comm_hook(None, average_in_rank_order)
    return ddp


def average_in_rank_order(_: None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """A communication hook of DDP: the mean of the ranks' gradients, each added up in the same order.

    The order in which gloo adds three or more depends on a gradient's place in its bucket. DDP orders the buckets anew
    after the first backward pass of each start, so that a resumed run would differ from an undisturbed one.
    """
    size = len(bucket.buffer())
    world_size = dist.get_world_size()
    padded = nn.functional.pad(bucket.buffer(), (0, -size % world_size))
    received = torch.empty_like(padded)  # this rank's share of the bucket, of each rank
    dist.all_to_all_single(received, padded)
    total, *others = received.chunk(world_size)
    for share in others:
        total += share
    dist.all_gather(list(padded.chunk(world_size)), total / world_size)
    averaged: Future[torch.Tensor] = Future()
    averaged.set_result(padded[:size])
    return averaged


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
    is_wanted = name == "short" or torch.cuda.get_device_capability(device) == (9, 0)
    if not all(gather_objects(is_wanted)):
        return
    for rank, fault in enumerate(gather_objects(attention.find_fault(dtype, heads, device))):
        if fault is not None:
            note(f"note: torch's attention kernels are used: --attention short fails on rank {rank}: {fault}")
            return
    attention.use_short(dtype, heads)


def plain_heads(model: nn.Module) -> set[tuple[int, int]]:
    """Returns (number, width) of the heads of each layer that calls `self_attention`, also in a teacher."""
    heads = set()
    for part in parts_of_step(model):
        heads |= {module.plain_heads for module in part.modules() if hasattr(module, "plain_heads")}
    return heads


def parts_of_step(model: nn.Module) -> list[nn.Module]:
    """Returns what a step runs: the model, and what a framework calls without owning it, such as a teacher."""
    if hasattr(model, "named_files"):
        return [model, *model.named_files().values()]
    return [model]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of encoder and decoders. Every model keeps them in lists named `blocks`."""
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
    """Compiles each block, and each of the modules' `compiled_methods`, as a graph of its own.

    Equal blocks share one graph, so that a deep model compiles as fast as a shallow one. In DDP the gradients of a
    block are reduced while those of the block before it are computed. A part holds no block. Anything else, such as
    norms between blocks, runs as it is written.

    So does all that runs in eval mode: other batches have other shapes, each of which would have to be compiled.
    """
    functions: list[tuple[nn.Module, str]] = []
    for part in parts_of_step(model):
        functions += [(block, "forward") for block in blocks_of(part)]
        for module in part.modules():
            functions += [(module, name) for name in getattr(module, "compiled_methods", ())]
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
