"""Predict time, memory and days of MAE's pre-training on GPUs that need not be here, by arithmetic from its sizes.

    python scripts/estimate.py mae_vit_base_800ep prmim50_vit_base_800ep --gpu H200 A100-80 --gpus 8
    python scripts/estimate.py mae_vit_large_800ep --model mae_vit_huge_patch14 --gpu H200 --csv predicted.csv

A block of width D on T tokens computes 12 T D^2 + 2 T^2 D multiply-adds, and moves and keeps T D values times the
constants below. The bound is a roofline: FLOPs / rate of large matrix products, plus bytes / rate of large copies, plus
the update of the weights. The expected step is longer by the factors that ViT-B's step had on an H100, and at least as
long as the host needs to launch it there without --cuda_graph. It says how long the GPUs work. Images may come more
slowly: days are given with each GPU's cores decoding JPEGs in full size, and decoding shards that `pack_dataset.py
--quality 90` has written, and say which of the two is the limit. Communication is left out.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frameworks.registry import build_model
from main_pretrain import get_args_parser
from models_mae_pr import MaskedAutoencoderViT
from recipes import RECIPES
from util.costs import STATE, USABLE
from util.run.cli import Parser, check_recipe, parse_with_recipe, prepare_file, run_program, user_errors
from util.run.start.plan import split_batch
from util.tables import markdown_table, write_csv

# Bytes that one token, channel and block costs in a step, bfloat16 with a float32 residual stream.
MOVED = {"eager": 230, "compiled": 130}
KEPT = 36  # for the backward pass: input 4, norm 2, qkv 6, attention 2, residual 4, norm 2, MLP 8 + 8
TEMPORARY = 24  # of the block that is widest: three gradients of the MLP's hidden layer, in bfloat16
PIXEL = 13  # bytes a pixel value: uint8, and float32 as image, patches and target
UPDATE = 32  # bytes that the norm of the gradients and AdamW move for each parameter
# A real step relative to the bound, on an H100: docs/costs.md. Attention and norms are farther from their limits.
EXPECTED = {"eager": 1.55, "compiled": 1.65}
EXPECTED_SHORT = 1.45  # compiled, with `--attention short`, which "auto" is on Hopper alone
HOST = 3.3e-3  # seconds of the host for each block of a micro-batch: 66 ms for the 20 of ViT-B, on a virtual Xeon core
USUAL_BATCH = 512  # images of a micro-batch, where they fit
IMAGENET = 1_281_167
GIB = 2**30
# Images per second that one idle core decodes and crops: docs/costs.md.
DECODING = {"jpeg": 559, "q90": 789}
BUSY = 0.75  # rate of a core while all cores of a server decode, relative to an idle one: an estimate


@dataclass(frozen=True)
class Device:
    """Rates that a device achieves."""

    flops: float  # per second, of a large matrix product in bfloat16
    bandwidth: float  # bytes per second, read and written, of a large copy
    memory: float  # bytes
    is_hopper: bool = False


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
    "H200": Device(788e12, 4.3e12, 139 * GIB, is_hopper=True),
    # SXM. MAMF; datasheet 3.35 TB/s: https://www.nvidia.com/en-us/data-center/h100
    "H100": Device(794.5e12, SHARE * 3.35e12, 79 * GIB, is_hopper=True),
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
COLUMNS = ["recipe", "model", "throw_ratio", "device", "gpus", "code", "batch_size", "accum_iter", "peak_gb"]
COLUMNS += ["largest_batch_size", "bound_ms", "host_ms", "expected_ms", "images_per_second", "days"]
COLUMNS += ["days_jpeg", "limit_jpeg", "days_q90", "limit_q90"]


@dataclass(frozen=True)
class Costs:
    """What one image costs, and the number of parameters."""

    parameters: int
    multiply_adds: float  # of the forward pass
    attention: float  # of these: queries with keys, and weights with values
    embedding: float  # of these: of the patches, whose pixels need no gradient
    values: float  # tokens x channels, summed over all blocks
    kept: float  # bytes that are kept for the backward pass
    temporary: float  # bytes that the backward pass needs beside them
    num_blocks: int

    @property
    def flops(self) -> float:
        """Of forward and backward pass: each product has two gradients. Fused attention computes its scores again."""
        return 6 * self.multiply_adds + self.attention - 2 * self.embedding

    def seconds(self, device: Device, code: str) -> float:
        """Bound of an image, without the update of the weights."""
        return self.flops / device.flops + self.values * MOVED[code] / device.bandwidth


def count_costs(settings: dict[str, Any]) -> Costs:
    """Counts by layer. ValueError for a model or an aggregation with other layers than MAE's, or another optimizer."""
    with torch.device("meta"):
        model = build_model(settings, read_files=False)
    if type(model) is not MaskedAutoencoderViT:
        raise ValueError(f"{settings['recipe']} trains {settings['model']}: estimate.py knows the layers of MAE alone")
    decoder = model.decoder
    aggregates = decoder.aggregation is not None
    if aggregates and settings["aggregation"] != "dwconv":
        raise ValueError(f"{settings['recipe']}: estimate.py knows --aggregation dwconv alone")
    if settings["optimizer"] != "adamw":
        raise ValueError(f"{settings['recipe']}: estimate.py knows --optimizer adamw alone")
    counts = model.counts
    width = model.embed_dim
    decoder_width = decoder.embed.out_features
    pixels = decoder.pred.out_features  # of a patch
    tokens = decoder.num_prefix + counts.num_visible
    decoder_tokens = decoder.num_prefix + counts.num_kept
    supervised = counts.num_masked if settings["progressive"] else counts.num_retained
    depth = len(model.blocks)
    decoder_depth = len(decoder.blocks)

    values = depth * tokens * width + decoder_depth * decoder_tokens * decoder_width
    attention = depth * 2 * tokens**2 * width + decoder_depth * 2 * decoder_tokens**2 * decoder_width
    linear = depth * 12 * tokens * width**2 + decoder_depth * 12 * decoder_tokens * decoder_width**2
    embedding = counts.num_visible * pixels * width
    other = embedding + tokens * width * decoder_width + supervised * decoder_width * pixels
    kept = KEPT * values + PIXEL * counts.num_tokens * pixels
    if aggregates:
        grid = counts.num_tokens * decoder_width
        other += settings["kernel_size"] ** 2 * grid
        kept += 4 * grid  # the convolution's input and output, in bfloat16
    return Costs(
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        multiply_adds=linear + attention + other,
        attention=attention,
        embedding=embedding,
        values=values,
        kept=kept,
        temporary=TEMPORARY * max(tokens * width, decoder_tokens * decoder_width),
        num_blocks=depth + decoder_depth,
    )


def predict(
    settings: dict[str, Any],
    costs: Costs,
    name: str,
    gpus: int,
    code: str,
    cores: int,
    batch_size: int | None,
) -> dict[str, Any]:
    """Predicts a recipe on `gpus` devices `name`, which have `cores` each. code: eager or compiled."""
    device = DEVICES[name]
    state = STATE * costs.parameters
    image_bytes = costs.kept + costs.temporary
    largest = max(0, int((USABLE * device.memory - state) / image_bytes))
    usual = max(1, min(USUAL_BATCH, largest))
    size, accum_iter, total = split_batch(batch_size, settings["accum_iter"], settings["total_batch_size"], gpus, usual)
    bound = total / gpus * costs.seconds(device, code) + UPDATE * costs.parameters / device.bandwidth
    host = HOST * costs.num_blocks * accum_iter
    factor = EXPECTED[code]
    if code == "compiled" and device.is_hopper:
        factor = EXPECTED_SHORT
    expected = max(factor * bound, host)
    images = settings["epochs"] * IMAGENET
    if settings["dataset"] == "cifar10":
        images = settings["epochs"] * 50_000
    row: dict[str, Any] = {
        "recipe": settings["recipe"],
        "model": settings["model"],
        "throw_ratio": settings["throw_ratio"],
        "device": name,
        "gpus": gpus,
        "code": code,
        "batch_size": size,
        "accum_iter": accum_iter,
        "peak_gb": (state + size * image_bytes) / 1e9,
        "largest_batch_size": largest,
        "bound_ms": 1e3 * bound,
        "host_ms": 1e3 * host,
        "expected_ms": 1e3 * expected,
        "images_per_second": total / expected,
        "days": images / total * expected / 86400,
    }
    for source, rate in DECODING.items():
        loading = total / (gpus * cores * BUSY * rate)
        row[f"days_{source}"] = images / total * max(expected, loading) / 86400
        row[f"limit_{source}"] = "loader" if loading > expected else "GPU"
    return row


def markdown(rows: Sequence[dict[str, Any]], cores: int) -> str:
    """The rows as a table, below a line that says what they are."""
    titles = ["recipe", "ρ_d", "GPUs", "code", "micro-batch", "peak GB", "largest"]
    titles += ["bound ms", "host ms", "expected ms", "images/s", "days", "days from JPEGs", "days from q90 shards"]
    lines = []
    for row in rows:
        cells = [row["recipe"], row["throw_ratio"], f"{row['gpus']} x {row['device']}", row["code"]]
        cells += [f"{row['batch_size']} x {row['accum_iter']}", f"{row['peak_gb']:.1f}", row["largest_batch_size"]]
        cells += [f"{row[name]:.1f}" for name in ("bound_ms", "host_ms", "expected_ms")]
        cells += [f"{row['images_per_second']:.0f}"]
        cells += [f"{row['days']:.2f}"]
        cells += [f"{row[f'days_{source}']:.2f}, {row[f'limit_{source}']}" for source in DECODING]
        lines.append(cells)
    how = f"*Predicted*, not measured; milliseconds of a step of the total batch; {cores} cores for each GPU."
    how += " Days from images name what limits them."
    return f"{how}\n\n{markdown_table(titles, lines)}\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; `argv` replaces the command line."""
    parser = Parser("estimate.py", description=__doc__)
    flag = parser.add_argument
    flag("recipes", nargs="+", metavar="RECIPE", help="names from recipes.py, of MAE's models")
    flag("--model", help="another of MAE's models for the recipes")
    flag("--gpu", nargs="+", default=["H200"], choices=DEVICES, help="kinds of GPUs")
    flag("--gpus", type=int, default=8, at_least=1, help="number of GPUs")
    flag(
        "--cores",
        type=int,
        default=14,
        at_least=1,
        help="cores of each GPU that load images; two CPUs of 56 cores for 8: 14",
    )
    flag(
        "--batch_size", type=int, at_least=1, help="micro-batch (default: the largest that fits and divides, up to 512)"
    )
    flag("--csv", type=Path, help="write unrounded numbers to this file")
    args = parser.parse_args(argv)
    for name in args.recipes:
        check_recipe(parser, name, RECIPES)
    model = []
    if args.model:
        model = ["--model", args.model]
    rows = []
    with user_errors(parser):
        prepare_file("--csv", args.csv)
        for name in args.recipes:
            settings = vars(parse_with_recipe(get_args_parser(), RECIPES, ["--recipe", name, *model]))
            costs = count_costs(settings)
            for device in args.gpu:
                for code in MOVED:
                    rows.append(predict(settings, costs, device, args.gpus, code, args.cores, args.batch_size))
    print(markdown(rows, args.cores), end="")
    if args.csv:
        write_csv(args.csv, COLUMNS, rows)


if __name__ == "__main__":
    run_program(main, "estimate.py")
