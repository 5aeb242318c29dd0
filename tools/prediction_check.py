"""How far the predictions of scripts/parts/predict.py are from steps on this machine.

    OMP_NUM_THREADS=1 python tools/prediction_check.py mae_vit_base_100ep prmim50_vit_base_100ep --batch_size 4

The rates are those of a large matrix product and a large copy, measured in turn with the steps. On the CPU the steps
are in float32, and the times are CPU times, of which other programs take no part; use one thread. On a GPU the steps
are in bfloat16, and the peak memory is compared too.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from main_pretrain import build_model, get_args_parser
from recipes import RECIPES
from scripts import profile_pretrain
from scripts.parts.predict import Device, count_step
from util import costs
from util.run.cli import Parser, check_least, check_recipe, parse_with_recipe, run_program, user_errors


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds on a GPU, or CPU seconds of this process."""
    if device.type == "cuda":
        return costs.seconds_of(work, device)
    start = time.process_time()
    work()
    return time.process_time() - start


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the flags. Those of `profile_pretrain.Step` that a prediction does not know have their defaults."""
    parser = Parser("prediction_check.py", description=__doc__)
    parser.add_argument("recipes", nargs="+", help="names from recipes.py")
    parser.add_argument("--batch_size", type=int, default=8, help="images per step")
    parser.add_argument("--rounds", type=int, default=7, help="number of times that every step is timed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cpu", "cuda"))
    parser.set_defaults(compile=False)
    args = parser.parse_args(argv)
    for name in args.recipes:
        check_recipe(parser, name, RECIPES)
    with user_errors(parser):
        check_least(args, 1, "batch_size rounds")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; `argv` replaces the command line."""
    args = parse_args(argv)
    device, on_cuda = torch.device(args.device), args.device == "cuda"
    args.precision, dtype = ("bf16", torch.bfloat16) if on_cuda else ("fp32", torch.float32)
    side, numbers = (8192, 2**30) if on_cuda else (2048, 2**26)
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    copied, target = torch.ones(2, numbers, device=device, dtype=dtype)
    for name in args.recipes:
        settings = vars(parse_with_recipe(get_args_parser(), RECIPES, ["--recipe", name]))
        counted = count_step(
            partial(build_model, read_files=False),
            settings,
            args.batch_size,
            dtype=dtype if on_cuda else None,
            on_cuda=on_cuda,
        )
        others = profile_pretrain.allocated(device)
        step = profile_pretrain.Step(settings, args, device, None)
        step.warm_up()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        work = (partial(torch.mm, a, b), partial(target.copy_, copied), step)
        times = [[seconds_of(part, device) for part in work] for _ in range(args.rounds)]
        product, copy, measured = (statistics.median(column) for column in zip(*times, strict=True))
        rates = Device(2 * side**3 / product, 2 * copied.nbytes / copy, 0)
        predicted = sum(counted.seconds(rates))
        print(
            f"{name}: {rates.flops / 1e12:.3f} TFLOP/s, {rates.bandwidth / 1e9:.1f} GB/s; predicted "
            f"{1e3 * predicted:.1f} ms, measured {1e3 * measured:.1f} ms, {measured / predicted:.2f} times as long"
        )
        if on_cuda:
            predicted = (counted.parameters + 2 * counted.gradients + counted.whole) / 1e6
            measured = profile_pretrain.allocated(device, peak=True) - others
            print(f"  peak: predicted {predicted:.0f} MB, measured {measured:.0f} MB")


if __name__ == "__main__":
    run_program(main, "prediction_check.py")
