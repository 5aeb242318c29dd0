"""Benchmark attention kernels on the layers of pre-training: forward and backward, every kernel in turn.

    python tools/benchmark_attention.py --batch_size 256 --markdown attention.md

A row is the attention of one layer. As in the models, queries, keys and values are views of the output of one linear
layer. "auto" is torch's choice. The other fused kernels are the values of `--attention` of the mains; "fastest" names
the best of them. "explicit" is two matrix products and a softmax in the precision of the inputs, as in the reference.
A dash marks a kernel that does not support a layer. A kernel with wrong outputs or gradients (compared with float64)
is reported and left out. Each round times every kernel once, in rotating order. Times are medians in ms.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models_vit import split_heads
from util.attention import KERNELS
from util.costs import device_name, time_in_turn
from util.run.cli import Parser, prepare_file, run_program
from util.run.precision import PRECISIONS
from util.tables import markdown_table

LAYERS = {  # (tokens, heads, width of a head, whether a learned bias is added)
    "encoder, ViT-B": (50, 12, 64, False),
    "encoder, ViT-L": (50, 16, 64, False),
    "decoder, ρ_d 0": (197, 16, 32, False),
    "decoder, ρ_d .25": (148, 16, 32, False),
    "decoder, ρ_d .5": (99, 16, 32, False),
    "decoder, ρ_d .65": (70, 16, 32, False),
    "fine-tuning, ViT-B": (197, 12, 64, False),
    "SimMIM ViT-B, ρ_d .3": (139, 12, 64, True),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # relative to the largest value

# (q, k, v, bias or None) -> output, all [B, H, N, D]
Attention = Callable[..., torch.Tensor]
Times = dict[str, float | None]


def fused(kernel: Any = None) -> Attention:
    """torch's attention with one kernel, or with torch's choice."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with sdpa_kernel(kernel) if kernel else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return attend


def explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Attention as two matrix products and a softmax."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if bias is not None:
        logits = logits + bias
    return logits.softmax(dim=-1) @ v


WAYS: dict[str, Attention] = {"auto": fused()}
WAYS |= {name: fused(kernel) for name, kernel in KERNELS.items()}
WAYS |= {"explicit": explicit}


class Layer:
    """The attention of one layer of LAYERS on random inputs."""

    def __init__(self, title: str, batch_size: int, device: torch.device, dtype: torch.dtype) -> None:
        tokens, heads, head_dim, has_bias = LAYERS[title]
        generator = torch.Generator().manual_seed(0)
        qkv = torch.randn(batch_size, tokens, 3 * heads * head_dim, generator=generator)
        self.inputs = [qkv.to(device, dtype).requires_grad_()]
        if has_bias:
            bias = torch.randn(batch_size, heads, tokens, tokens, generator=generator)
            self.inputs.append(bias.to(device, dtype).requires_grad_())
        self.title, self.heads = title, heads
        self.upstream = torch.randn(batch_size, tokens, heads * head_dim, generator=generator).to(device, dtype)

    def run(self, way: Attention) -> list[torch.Tensor]:
        """Return the output and the gradients of the inputs."""
        qkv, *bias = self.inputs
        out = way(*split_heads(qkv, self.heads), bias[0] if bias else None).transpose(1, 2).flatten(2)
        return [out.detach(), *torch.autograd.grad(out, self.inputs, self.upstream)]

    def exact(self) -> list[torch.Tensor]:
        """Like `run`, for the first two images in float64."""
        few = copy.copy(self)
        few.inputs = [x.detach()[:2].double().requires_grad_() for x in self.inputs]
        few.upstream = self.upstream[:2].double()
        return few.run(explicit)

    def is_supported(self, name: str) -> bool:
        """Whether WAYS[name] runs here with correct results. Prints why not, unless torch has no such kernel."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about every kernel that it rejects
                found = self.run(WAYS[name])
        except RuntimeError as error:
            if not str(error).startswith(("No available kernel", "No viable backend")):
                print(f"{name} fails at {self.title}: {error}", file=sys.stderr)
            return False
        pairs = zip(found, self.exact(), strict=True)
        largest = max(((f[:2] - e).abs().max() / e.abs().max()).item() for f, e in pairs)
        if largest < TOLERANCE[self.upstream.dtype]:
            return True
        print(f"{name} at {self.title} differs from float64 by {largest:.1e} of the largest value", file=sys.stderr)
        return False


def measure(batch_size: int, rounds: int, device: torch.device, dtype: torch.dtype) -> dict[str, Times]:
    """Return {layer: {name of the kernel: ms, or None if it does not support the layer}}."""
    table = {}
    for title in LAYERS:
        layer = Layer(title, batch_size, device, dtype)
        names = [name for name in WAYS if layer.is_supported(name)]
        seconds = time_in_turn([partial(layer.run, WAYS[name]) for name in names], device, rounds)
        ms = dict(zip(names, (1e3 * s for s in seconds), strict=True))
        table[title] = {name: ms.get(name) for name in WAYS}
    return table


def markdown(table: dict[str, Times], title: str) -> str:
    """The times as a Markdown table below its title."""
    rows = []
    for layer, times in table.items():
        tokens, heads, head_dim, has_bias = LAYERS[layer]
        shape = f"{tokens} × {heads} × {head_dim}" + (", bias" if has_bias else "")
        known = {name: ms for name, ms in times.items() if ms is not None and name in KERNELS}
        fastest = min(known, key=lambda name: known[name]) if known else "–"
        rows.append([layer, shape, *("–" if ms is None else f"{ms:.2f}" for ms in times.values()), fastest])
    return f"{title}\n\n{markdown_table(['layer', 'tokens × heads × width', *WAYS, 'fastest'], rows, left=2)}\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    parser = Parser("benchmark_attention.py", description=__doc__)
    has_cuda = torch.cuda.is_available()
    flag = parser.add_argument
    flag("--batch_size", type=int, default=8, help="images per layer, at least 2")
    flag("--rounds", type=int, default=21, help="number of times that every kernel is timed")
    flag("--device", default="cuda" if has_cuda else "cpu", choices=("cpu", "cuda"))
    flag("--precision", default="bf16" if has_cuda else "fp32", choices=PRECISIONS)
    flag("--markdown", type=Path, help="write the printed table to this file")
    args = parser.parse_args(argv)
    if args.batch_size < 2 or args.rounds < 1:
        parser.error(
            f"--batch_size must be at least 2 and --rounds at least 1, got {args.batch_size} and {args.rounds}"
        )
    if args.device == "cuda" and not has_cuda:
        parser.error("--device cuda, but there is no CUDA device")
    if args.markdown and (reason := prepare_file(args.markdown)):
        parser.error(f"{str(args.markdown)!r} cannot be written: {reason}")
    device = torch.device(args.device)
    table = measure(args.batch_size, args.rounds, device, PRECISIONS[args.precision] or torch.float32)
    how = f"batch {args.batch_size}, {device_name(device)}, {args.precision}, {args.rounds} rounds"
    text = markdown(table, f"{how}, torch {torch.__version__}")
    print(text, end="")
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_program(main, "benchmark_attention.py")
