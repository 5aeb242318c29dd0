"""Compile the kernels of `util.short_attention` for GPUs that are not there: registers, spilled bytes, shared memory.

    python tools/compile_attention.py > docs/attention_kernels.csv

It needs Triton, which comes with torch's CUDA builds, and takes a minute. Columns:

tokens          the most that the compiled kernel takes
heads, width    number of heads, and channels of a head; recipes have no other width
capability      of the GPU: 80 is an A100, 89 an L40S, 90 an H100
rows, warps     queries at a time, and warps of a program
registers       of a thread, at most 255
stack_bytes     of a thread, spilled from registers to memory
shared_bytes    of a program; a GPU of capability 80 has 166912, 89 101376, 90 232448
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.run.cli import Parser
from util.run.exits import run_program
from util.short_attention import Launch, backward_launch, forward_launch
from util.tables import csv_text

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
CAPABILITIES = (80, 89, 90)
TOKENS = (64, 128)
WIDTHS = {32: 16, 48: 16, 64: 12, 80: 16}  # of heads -> how many heads a model of a recipe has
COLUMNS = ["kernel", "tokens", "heads", "width", "capability", "rows", "warps", "registers", "stack_bytes"]
COLUMNS += ["shared_bytes"]


def compile_kernel(launch: Launch, tokens: int, capability: int) -> dict[str, Any]:
    """Compiles a kernel for bfloat16 tensors as its launch would. Returns its row of the table."""
    kernel = launch.kernel
    signature = dict.fromkeys(kernel.arg_names, "*bf16")
    signature |= {"T": "i32", "scale": "fp32"}
    signature |= dict.fromkeys(launch.constants, "constexpr")
    aligned = {}
    for i, kind in enumerate(signature.values()):
        if kind.startswith("*"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=launch.constants, attrs=aligned)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    return {
        "kernel": kernel.__name__,
        "tokens": tokens,
        "heads": launch.constants["H"],
        "width": launch.constants["D"],
        "capability": capability,
        "rows": launch.constants["ROWS"],
        "warps": launch.warps,
        "registers": int(numbers["REG"]),
        "stack_bytes": int(numbers["STACK"]),
        "shared_bytes": compiled.metadata.shared,
    }


def compile_all() -> Iterator[dict[str, Any]]:
    """Yields a row for each kernel, width and capability."""
    for tokens in TOKENS:
        for width, heads in WIDTHS.items():
            for launch in (forward_launch(tokens, heads, width), backward_launch(tokens, heads, width)):
                for capability in CAPABILITIES:
                    yield compile_kernel(launch, tokens, capability)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; `argv` replaces the command line."""
    parser = Parser("compile_attention.py", __doc__)
    parser.parse_args(argv)
    print(csv_text(COLUMNS, compile_all()), end="")


if __name__ == "__main__":
    run_program(main, "compile_attention.py")
