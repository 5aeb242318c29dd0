"""Measures what loading costs a DataLoader worker and the trainer, in CPU time.

    python tools/benchmark_loading.py FOLDER PACKED PACKED_SMALLER --repeats 1 2 4

Each row is a data set, as `--data_path` takes it, with a number of crops of each image that is decoded. One worker
makes the batches of a pre-training by PR-MIM. The rows are measured in turn, after the slots of batches have been used
once. Others who are busy on the machine hardly change CPU time; medians of the rounds are printed.
"""

import multiprocessing
import os
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prmim import MaskCollator, TokenCounts, TokenOrderSampler
from util.data.datasets import AddressedDataset, StepBatchSampler
from util.data.loader import Loader
from util.data.open import open_images
from util.data.transforms import RandomResizedCropFlip
from util.run.cli import Parser, run_program

SIZE = 224
WARM = 8  # batches that are not measured: as many as there are slots


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def seconds_at_rest(pid: int) -> float:
    """Returns the CPU time of a worker, when it has made all batches that it may make ahead."""
    before = -1.0
    while before < cpu_seconds(pid):
        before = cpu_seconds(pid)
        time.sleep(0.5)
    return before


def measure(data_path: str, repeats: int, batch_size: int, num_batches: int) -> tuple[float, float]:
    """Returns the microseconds of CPU time that an image of a batch costs the worker and this process."""
    images = open_images("folder", data_path)
    dataset = AddressedDataset(images, RandomResizedCropFlip(SIZE, seed=0))
    collate = MaskCollator(TokenOrderSampler(SIZE // 16, TokenCounts.from_ratios((SIZE // 16) ** 2, 0.75, 0.5)), seed=0)
    many = range(10**6)
    sampler = StepBatchSampler(len(images), batch_size, 1, 0, 1, 0, 0, len(many), repeats, many)
    size = 3 * SIZE**2 * batch_size
    with closing(Loader(dataset, sampler, collate, num_workers=1, for_gpu=False, batch_bytes=size, kept=3)) as batches:
        for _ in range(WARM):
            next(batches)
        (worker,) = multiprocessing.active_children()
        before = seconds_at_rest(worker.pid or 0)
        own = 0.0
        for _ in range(num_batches):
            begin = time.process_time()
            next(batches)
            own += time.process_time() - begin
        after = seconds_at_rest(worker.pid or 0)
    images_made = batch_size * num_batches / 1e6
    return (after - before) / images_made, own / images_made


def main(argv: list[str] | None = None) -> None:
    parser = Parser("benchmark_loading.py", description=__doc__)
    parser.add_argument("data", nargs="+", metavar="DATA")
    parser.add_argument("--repeats", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--num_batches", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for data in args.data:
            for repeats in args.repeats:
                cost = measure(data, repeats, args.batch_size, args.num_batches)
                found.setdefault((data, repeats), []).append(cost)
                print(data, repeats, *map(round, cost), file=sys.stderr)
    print("| data | crops of an image | worker, us | trainer, us | images/s per core |\n|---|--:|--:|--:|--:|")
    for (data, repeats), costs in found.items():
        worker, own = (statistics.median(values) for values in zip(*costs, strict=True))
        print(f"| {data} | {repeats} | {worker:.0f} | {own:.0f} | {1e6 / worker:.0f} |")


if __name__ == "__main__":
    run_program(main, "benchmark_loading.py")
