"""What do several crops of an image in one step cost? Pre-trains MAE and PR-MIM with R = 1, 2 and 4.

    python tools/repeat_study.py --data_path CIFAR10 --csv docs/studies/repeat_aug.csv --output_dir output/repeat

CIFAR10 holds train/ and val/ with class folders of 32-px images. Each run is a process of its own. Its row is appended
to the CSV when it has finished. The same command continues: runs with a row are skipped, interrupted ones resume.
Registration: docs/repeat_aug.md.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import main_finetune
import main_pretrain
from downstream.probe.models import open_encoder
from frameworks.hooks.reconstruction import measure
from frameworks.registry import load_run
from util.code_version import code_version
from util.data.datasets import AddressedDataset
from util.data.images import evenly_spaced
from util.data.open import open_images
from util.data.statistics import normalizer
from util.data.transforms import ResizeCenterCrop
from util.evaluate.features import Features, extract_features
from util.evaluate.knn import KnnProtocol, knn_accuracy
from util.evaluate.loop import EvalContext
from util.evaluate.moments import Moments
from util.run.cli import Parser, run_program

Flags = dict[str, object]

ROOT = Path(__file__).resolve().parents[1]
ARMS: dict[str, Flags] = {
    "mae": dict(throw_ratio=0.0),
    "prmim50": dict(throw_ratio=0.5, progressive=True, sampling="furthest"),
}
REPEATS = (1, 2, 4)
PASSES = 4
SEEDS = tuple(range(1000, 1008))
RATES = {"mae": 0.04, "prmim50": 0.02}  # --blr, chosen by the pilot of the study of the length

# 8 x 8 tokens of 4 px. One pass has 1,562 steps.
PRETRAIN: Flags = dict(
    model="mae_vit_nano_patch4",
    input_size=32,
    mask_ratio=0.75,
    norm_pix_loss=True,
    crop_scale=(0.6, 1.0),
    total_batch_size=32,
    picture_every=0,
)
FINETUNE: Flags = dict(
    recipe="finetune_cifar10",
    dataset="folder",
    model="vit_nano_patch4",
    input_size=32,
    total_batch_size=64,
    eval_every=1000,
)
ALL_BLOCKS: Flags = dict(epochs=3, warmup_epochs=0.3, blr=0.032, layer_decay=0.65)
BANK_PER_CLASS = 500  # training images that are the bank of kNN and fit the ridge regression
NEIGHBOURS = 20
RIDGE_PENALTY = 0.01  # relative to the variance of a feature
PICTURES = 1000  # validation images for the error of the reconstruction


@dataclass(frozen=True)
class Run:
    """One arm, with R and a seed."""

    arm: str
    repeats: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-R{self.repeats}-seed{self.seed}"


@dataclass
class Row:
    """What a run measured. Accuracies are top-1 on val/ in percent; None: not asked for."""

    arm: str
    repeats: int
    seed: int
    status: str = "finished"
    loss: float | None = None  # mean of the last epoch
    mse_retained: float | None = None
    mse_thrown: float | None = None
    knn: float | None = None
    ridge: float | None = None
    finetuned: float | None = None
    cpu_seconds: float | None = None
    starts: int | None = None
    torch: str | None = None
    code: str | None = None
    finished: str | None = None


class Stopped(Exception):
    """A signal has ended a main before the end of its run."""


def train(main: Callable[[list[str]], object], flags: Flags, folder: Path) -> None:
    """Run one of the mains on the CPU. Raises Stopped if a signal has ended it."""
    flags = flags | dict(device="cpu", num_workers=0, output_dir=folder)
    argv = []
    for name, value in flags.items():
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            argv += [f"--{name}", *map(str, value)]
        else:
            argv += [f"--{name}", str(value)]
    if main(argv) is False:
        raise Stopped


def pretrain(run: Run, row: Row, data_path: Path, folder: Path) -> None:
    """Pre-train, and measure the loss and the errors of the reconstruction."""
    schedule: Flags = dict(
        epochs=PASSES, warmup_epochs=PASSES / 10, blr=RATES[run.arm], seed=run.seed, repeat_aug=run.repeats
    )
    train(main_pretrain.main, PRETRAIN | ARMS[run.arm] | schedule | dict(data_path=data_path), folder)
    reports = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    row.loss = reports[-1]["epoch_loss"]
    model, settings = load_run(folder)
    images = open_images("folder", str(data_path), "val")
    (errors,) = measure(model, settings, images, evenly_spaced(len(images), PICTURES)).values()
    row.mse_retained = errors.get("retained")
    row.mse_thrown = errors.get("thrown")


def first_of_each_class(labels: np.ndarray, number: int) -> np.ndarray:
    """Returns the indices of the first `number` images of each class."""
    chosen = [np.flatnonzero(labels == label)[:number] for label in np.unique(labels)]
    return np.sort(np.concatenate(chosen))


def ridge_accuracy(bank: Features, test: Features, feature: str, num_classes: int) -> float:
    """Returns the top-1 of a ridge regression of one-hot labels on standardised features, in percent."""
    moments = Moments.of(bank.values[feature])
    x = (bank.values[feature].double() - moments.mean) / (moments.std + 1e-6)
    queries = (test.values[feature].double() - moments.mean) / (moments.std + 1e-6)
    targets = F.one_hot(bank.labels, num_classes).double()
    mean = targets.mean(dim=0)
    gram = x.T @ x / len(x) + RIDGE_PENALTY * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.solve(gram, x.T @ (targets - mean) / len(x))
    predicted = (queries @ weights + mean).argmax(dim=1)
    return 100 * (predicted == test.labels).double().mean().item()


def evaluate_frozen(row: Row, data_path: Path, folder: Path) -> None:
    """Measure kNN and ridge regression on the mean patch token of the last block."""
    encoder = open_encoder(folder)
    view = ResizeCenterCrop(encoder.img_size)
    features = {}
    for split in ("train", "val"):
        images = open_images("folder", str(data_path), split, labelled=True)
        normalize = normalizer(encoder.pixel_settings, images.pixel_format)
        indices = np.arange(len(images))
        if split == "train":
            indices = first_of_each_class(images.labels, BANK_PER_CLASS)
        context = EvalContext(normalize, nullcontext, batch_size=32, num_workers=0)
        dataset = AddressedDataset(images, view)
        features[split] = extract_features(encoder.vectors, encoder, dataset, indices, context)
    name = f"{encoder.depth} mean"
    num_classes = len(images.classes)
    protocol = KnnProtocol(num_classes, (NEIGHBOURS,))
    moments = Moments.of(features["train"].values[name])
    knn = knn_accuracy(features["train"], features["val"], name, protocol, moments)
    row.knn = knn[NEIGHBOURS]["top1"]
    row.ridge = ridge_accuracy(features["train"], features["val"], name, num_classes)


def finetune(run: Run, schedule: Flags, data_path: Path, encoder: Path, folder: Path) -> float:
    """Fine-tune with all labels. Returns the top-1 after the last epoch, in percent."""
    files: Flags = dict(data_path=data_path, finetune=encoder, seed=run.seed)
    train(main_finetune.main, FINETUNE | schedule | files, folder)
    return json.loads((folder / "results.json").read_text())["last"]["val_top1"]


def work(run: Run, data_path: Path, folder: Path) -> Row | None:
    """Do a run. Returns None if a signal has ended it."""
    row = Row(**asdict(run), torch=torch.__version__, code=code_version())
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "starts", "a") as starts:
        starts.write(".")
    row.starts = (folder / "starts").stat().st_size
    try:
        pretrain(run, row, data_path, folder / "pretrain")
        evaluate_frozen(row, data_path, folder / "pretrain")
        row.finetuned = finetune(run, ALL_BLOCKS, data_path, folder / "pretrain", folder / "finetuned")
    except Stopped:
        return None
    except SystemExit as stop:
        if stop.code != 3:  # the mains' exit code for a loss that is not finite
            raise
        row.status = "diverged"
    row.cpu_seconds = round(time.process_time())
    row.finished = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return row


def start(run: Run, args: argparse.Namespace) -> Row | None:
    """Do a run in a process of its own. Returns None if it has failed or was stopped."""
    folder = Path(args.output_dir).resolve() / "runs" / run.name
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--data_path", str(Path(args.data_path).resolve())]
    command += ["--csv", args.csv, "--output_dir", args.output_dir]
    command += ["--one", json.dumps(asdict(run))]
    with open(folder / "log.txt", "a") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    result = folder / "row.json"
    if process.returncode or not result.exists():
        print(f"{run.name} has not finished (exit code {process.returncode}): {folder / 'log.txt'}", flush=True)
        return None
    return Row(**json.loads(result.read_text()))


def read_rows(path: Path) -> Iterator[Run]:
    """Yields the runs that have a row."""
    if path.exists():
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                yield Run(row["arm"], int(row["repeats"]), int(row["seed"]))


def append_row(path: Path, row: Row) -> None:
    """Appends a row; a new file gets the header first."""
    is_new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(row)))
        if is_new:
            writer.writeheader()
        writer.writerow(asdict(row))


def get_args_parser() -> Parser:
    parser = Parser("repeat_study.py", description=__doc__)
    parser.add_argument("--data_path", required=True, help="folder with train/ and val/")
    parser.add_argument("--csv", required=True, help="file of the rows; the runs in it are not repeated")
    parser.add_argument("--output_dir", required=True, help="folder of the runs")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--repeats", nargs="+", type=int, default=REPEATS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, each with one thread")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # JSON of the run that this process does
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    args = get_args_parser().parse_args(argv)
    if args.one:
        run = Run(**json.loads(args.one))
        folder = Path(args.output_dir) / "runs" / run.name
        row = work(run, Path(args.data_path), folder)
        if row is None:
            sys.exit(75)
        (folder / "row.json").write_text(json.dumps(asdict(row)))
        return
    done = set(read_rows(Path(args.csv)))
    runs = []
    for seed in args.seeds:
        for arm in args.arms:
            for repeats in args.repeats:
                run = Run(arm, repeats, seed)
                if run not in done:
                    runs.append(run)
    print(f"{len(runs)} runs to do, {args.jobs} at once", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(start, run, args) for run in runs]
        for future in as_completed(futures):
            row = future.result()
            if row is not None:
                append_row(Path(args.csv), row)
                print(row, flush=True)


if __name__ == "__main__":
    run_program(main, "repeat_study.py")
