"""Which attention kernel is fastest where pre-training attends: forward and backward, every kernel in turn.

    python tools/benchmark_attention.py --batch_size 256 --markdown attention.md

A line is one layer's attention: queries, keys and values are views of what one linear layer gave, as in the models. "auto" is
torch's own choice, the others are `--attention` of the mains, and one of these is "fastest"; a kernel that cannot serve a layer
has a dash. "explicit" is not fused: two matrix products and a softmax in the inputs' precision, as in the reference. Each round
times every kernel once, in rotating order; medians, in ms. A kernel whose outputs or gradients differ from float64's is said and
left out.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models_vit import split_heads
from util.attention import KERNELS
from util.costs import device_name, time_in_turn, wait
from util.run.cli import Parser, run_program, why_not_writable
from util.run.train_engine import PRECISIONS

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
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of gradients as large as the largest


def fused(kernel=None):
    def attend(q, k, v, bias):
        with sdpa_kernel(kernel) if kernel else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return attend


def explicit(q, k, v, bias):
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return (logits if bias is None else logits + bias).softmax(dim=-1) @ v


WAYS = {"auto": fused(), **{name: fused(kernel) for name, kernel in KERNELS.items()}, "explicit": explicit}


class Layer:
    """One layer's attention, ready to be run in any way."""

    def __init__(self, title, batch_size, device, dtype):
        tokens, heads, head_dim, biased = LAYERS[title]
        generator = torch.Generator().manual_seed(0)
        qkv = torch.randn(batch_size, tokens, 3 * heads * head_dim, generator=generator)
        self.inputs = [qkv.to(device, dtype).requires_grad_()]
        if biased:
            bias = torch.randn(batch_size, heads, tokens, tokens, generator=generator)
            self.inputs.append(bias.to(device, dtype).requires_grad_())
        self.title, self.heads, self.device = title, heads, device
        self.upstream = torch.randn(batch_size, tokens, heads * head_dim, generator=generator).to(device, dtype)

    def run(self, way, inputs, upstream):
        """-> output and gradients of the inputs."""
        qkv, *bias = inputs
        out = way(*split_heads(qkv, self.heads), bias[0] if bias else None).transpose(1, 2).flatten(2)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    def serves(self, name):
        """Whether that of WAYS can do it, and rightly; else it is said why not, unless torch simply has no such kernel."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says of each kernel why it would not
                found = self.run(WAYS[name], self.inputs, self.upstream)
        except RuntimeError as error:
            if not str(error).startswith(("No available kernel", "No viable backend")):
                print(f"{name} fails at {self.title}: {error}", file=sys.stderr)
            return False
        few = [x.detach()[:2].double().requires_grad_() for x in self.inputs]
        exact = self.run(explicit, few, self.upstream[:2].double())
        error = max(((f[:2] - e).abs().max() / e.abs().max()).item() for f, e in zip(found, exact, strict=True))
        right = error < TOLERANCE[self.upstream.dtype]
        if not right:
            print(f"{name} at {self.title} differs from float64 by {error:.1e} of the largest value", file=sys.stderr)
        return right

    def timed(self, way):
        def once():
            wait(self.device)
            start = time.perf_counter()
            self.run(way, self.inputs, self.upstream)
            wait(self.device)
            return time.perf_counter() - start

        return once


def measure(batch_size, rounds, device, dtype):
    """-> {layer: {way: ms, or None where it cannot serve}}"""
    table = {}
    for title in LAYERS:
        layer = Layer(title, batch_size, device, dtype)
        ways = {name: way for name, way in WAYS.items() if layer.serves(name)}
        steps = [layer.timed(way) for way in ways.values()]
        for step in steps:
            step()
        ms = dict(zip(ways, (1e3 * seconds for seconds in time_in_turn(steps, rounds)), strict=True))
        table[title] = {name: ms.get(name) for name in WAYS}
    return table


def markdown(table, title):
    lines = [["layer", "tokens × heads × width", *WAYS, "fastest"], ["---", "---", *["--:"] * len(WAYS), "---"]]
    for layer, times in table.items():
        tokens, heads, head_dim, biased = LAYERS[layer]
        fastest = min((name for name in KERNELS if times[name]), key=times.get, default="–")
        shape = f"{tokens} × {heads} × {head_dim}" + (", bias" if biased else "")
        lines.append([layer, shape, *("–" if ms is None else f"{ms:.2f}" for ms in times.values()), fastest])
    return "\n".join([title, "", *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """The program; `argv` stands for the command line."""
    parser = Parser("benchmark_attention.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="bf16" if cuda else "fp32", choices=PRECISIONS)
    parser.add_argument("--markdown", type=Path, help="what is printed")
    args = parser.parse_args(argv)
    if args.batch_size < 2 or args.rounds < 1:
        parser.error(f"--batch_size must be at least 2 and --rounds at least 1, got {args.batch_size} and {args.rounds}")
    if args.device == "cuda" and not cuda:
        parser.error("--device cuda, but there is no CUDA device")
    reason = args.markdown and why_not_writable(args.markdown)
    if reason:
        parser.error(f"{str(args.markdown)!r} cannot be written: {reason}")
    device = torch.device(args.device)
    table = measure(args.batch_size, args.rounds, device, PRECISIONS[args.precision] or torch.float32)
    title = f"batch {args.batch_size}, {device_name(device)}, {args.precision}, {args.rounds} rounds, torch {torch.__version__}"
    text = markdown(table, title)
    print(text, end="")
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_program(main, "benchmark_attention.py")
