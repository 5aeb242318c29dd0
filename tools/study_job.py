"""Run one arm of the study with one seed: pre-train, measure, fine-tune. tools/study.py starts it as a process.

    python tools/study_job.py output/study/cpu/runs/prmim50-seed0 MACHINE

job.json in the folder describes the job, MACHINE (JSON) the data and the device. result.json is written last. The mains
resume by themselves, so the same command continues an interrupted job.
"""

import fcntl
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import main_finetune
import main_pretrain
from downstream.probe.models import open_encoder
from framework import Framework
from frameworks.reconstruction import measure
from tools.readings import READINGS
from util.code_version import code_version, files_hash
from util.costs import forward_gmac
from util.data.datasets import AddressedDataset, open_images
from util.data.images import evenly_spaced
from util.data.statistics import normalizer
from util.data.transforms import ResizeCenterCrop
from util.features import Features, extract_features, knn_accuracy
from util.knn import Moments
from util.run.cli import Parser, run_program, user_errors
from util.run.folder import write_json

NEIGHBOURS = 20
RIDGE_PENALTY = 1e-2  # relative to the variance of a feature
EVALUATION_BATCH = 32


def add_reading(model: str, reading: str) -> str:
    """Register a model of main_pretrain.py with a reading, and return its name: mae_vit_micro_patch4+init_normal."""
    factory, name = main_pretrain.MODELS[model], f"{model}+{reading}"

    def build(**options: Any) -> Framework:
        built = factory(**options)
        READINGS[reading](built)
        return built

    main_pretrain.MODELS[name] = build
    main_pretrain.CLASS_OF[name] = main_pretrain.CLASS_OF[model]
    return name


class Stopped(Exception):
    """A signal has stopped a main before the end of its run."""


def run_main(main: Callable[[list[str]], object], argv: list[str], machine: dict[str, Any]) -> None:
    """Train with one of the mains. Raises Stopped if a signal stops it."""
    if main([*argv, "--device", machine["device"], "--num_workers", str(machine["num_workers"])]) is False:
        raise Stopped


def pretrain(job: dict[str, Any], machine: dict[str, Any], folder: Path) -> dict[str, float]:
    """Pre-train. Returns the loss, the errors of reconstruction, and the cost."""
    argv = [*job["pretrain"], "--data_path", machine["data_path"], "--output_dir", str(folder), "--picture_every", "0"]
    if job["reading"]:
        place = argv.index("--model") + 1
        argv[place] = add_reading(argv[place], job["reading"])
    run_main(main_pretrain.main, argv, machine)
    model, settings = main_pretrain.load_run(folder)
    images = open_images("folder", machine["data_path"], "val")
    (mse,) = measure(model, settings, images, evenly_spaced(len(images), job["measured_images"])).values()
    tokens = {"retained": model.counts.num_retained, "thrown": model.counts.num_thrown}
    result = {f"mse_{name}": value for name, value in mse.items()}
    if all(name in mse for name, n in tokens.items() if n):  # plain partial reconstruction predicts no thrown token
        result["mse_masked"] = sum(mse[name] * tokens[name] for name in mse) / sum(tokens[name] for name in mse)
    reports = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return result | {"loss": reports[-1]["epoch_loss"], "gmac": forward_gmac(settings, main_pretrain.build_model)[0]}


def ridge_scores(
    features: torch.Tensor, labels: torch.Tensor, queries: torch.Tensor, num_classes: int, penalty: float
) -> torch.Tensor:
    """Scores of the classes [Q, num_classes] for queries [Q, D], by ridge regression of one-hot labels on features.

    features: [n, D], with labels [n]. Features and queries are standardised by the moments of `features`. The penalty
    is relative to n. The optimum is unique and has a closed form, so there are no steps, seeds or learning rates.
    """
    moments = Moments.of(features)
    x, q = ((values.double() - moments.mean) / (moments.std + 1e-6) for values in (features, queries))
    targets = F.one_hot(labels, num_classes).double()
    mean = targets.mean(dim=0)
    gram = x.T @ x / len(x) + penalty * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    return q @ torch.linalg.solve(gram, x.T @ (targets - mean) / len(x)) + mean


def measure_frozen(machine: dict[str, Any], folder: Path) -> dict[str, float]:
    """Top-1 of kNN and of ridge regression on the frozen encoder's mean patch token, in percent of val/.

    The labelled training images are the bank of kNN and fit the regression.
    """
    encoder, parts = open_encoder(folder).to(machine["device"]), []
    view, name = ResizeCenterCrop(encoder.img_size), f"{encoder.depth} mean"
    for split in ("train", "val"):
        images = open_images("folder", machine["labelled"], split, labelled=True)
        normalize = normalizer(encoder.pixel_settings, images.pixel_format).to(machine["device"])
        data, sizes = AddressedDataset(images, view), (EVALUATION_BATCH, machine["num_workers"])
        indices = np.arange(len(images))
        parts.append(extract_features(encoder.vectors, data, indices, encoder, normalize, nullcontext, *sizes))
    bank, test = parts
    return frozen_accuracies(bank, test, name, len(images.classes))


def frozen_accuracies(bank: Features, test: Features, name: str, num_classes: int) -> dict[str, float]:
    """Top-1 of kNN (standardised features, 20 neighbours) and ridge regression, in percent. name: of the feature."""
    known, queries = bank.values[name], test.values[name]
    scores = ridge_scores(known, bank.labels, queries, num_classes, RIDGE_PENALTY)
    knn = knn_accuracy(bank, test, name, num_classes, (NEIGHBOURS,), Moments.of(known))
    return {
        "knn": knn[NEIGHBOURS]["top1"],
        "ridge": 100 * (scores.argmax(dim=1) == test.labels).double().mean().item(),
    }


def finetune(job: dict[str, Any], machine: dict[str, Any], folder: Path, encoder: Path | None) -> dict[str, Any]:
    """Fine-tune, once with each of the seeds. Returns the mean top-1 after the last epoch, and that of each."""
    argv = [*job["finetune"], "--dataset", "folder", "--data_path", machine["labelled"]]
    if encoder is not None:
        argv += ["--finetune", str(encoder)]
    names = {f"finetune-{seed}": ["--seed", str(seed)] for seed in job.get("finetune_seeds", ())} or {"finetune": []}
    last = []
    for name, seed in names.items():
        run_main(main_finetune.main, [*argv, *seed, "--output_dir", str(folder / name)], machine)
        last.append(json.loads((folder / name / "results.json").read_text())["last"])
    accuracies, losses = ([values[name] for values in last] for name in ("val_top1", "val_loss"))
    return {
        "top1": statistics.fmean(accuracies),
        "top1_each": " ".join(map(str, accuracies)),
        "val_loss": statistics.fmean(losses),
    }


def study_version() -> str:
    """The version of the code, and the hash of tools/, which defines readings and measures."""
    tools = Path(__file__).parent
    return f"{code_version()}, tools {files_hash(sorted(tools.glob('*.py')), tools)}"


def work(job: dict[str, Any], machine: dict[str, Any], folder: Path) -> bool:
    """Do the job and write result.json. Returns False, and writes nothing, if a signal stops it."""
    result = dict.fromkeys(("top1", "loss", "mse_masked", "mse_retained", "mse_thrown", "gmac"))
    result |= {"status": "finished", "device": machine["device"], "torch": torch.__version__}
    with open(folder / "starts", "a") as starts:
        starts.write(".")
    result |= {"starts": (folder / "starts").stat().st_size, "threads": torch.get_num_threads()}
    result |= {"images": machine["images"], "code": study_version()}
    try:
        if job["pretrain"]:
            result |= pretrain(job, machine, folder / "pretrain")
            if job.get("frozen"):
                result |= measure_frozen(machine, folder / "pretrain")
        if job["finetune"] is not None:
            result |= finetune(job, machine, folder, folder / "pretrain" if job["pretrain"] else None)
    except Stopped:
        return False
    except SystemExit as stop:
        if stop.code != 3:  # the mains end with 3 if the loss is no longer finite: a result of the study
            raise
        result["status"] = "diverged"
    result |= {
        "cpu_seconds": round(time.process_time()),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    write_json(folder / "result.json", result)
    return True


def read_json(text: str, what: str) -> dict[str, Any]:
    """Parse the JSON object in `text`. `what` names the text in the ValueError."""
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{what} must be a JSON object as tools/study.py writes it, got {text[:60]!r}")
    return content


def main(argv: Sequence[str] | None = None) -> bool:
    """Run the program; `argv` replaces the command line. Returns False if a signal stopped it."""
    parser = Parser("study_job.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the run; its job.json describes the job")
    parser.add_argument("machine", help="JSON: data_path, labelled, images (their hash), device, num_workers")
    args = parser.parse_args(argv)
    with user_errors(parser):
        machine = read_json(args.machine, "MACHINE")
        job = read_json((args.folder / "job.json").read_text(), f"{str(args.folder / 'job.json')!r}")
        lock = open(args.folder / "lock", "w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends
        except BlockingIOError:
            parser.exit(1, f"{parser.prog}: error: a study on this folder runs already: {args.folder}\n")
        return work(job, machine, args.folder)


if __name__ == "__main__":
    run_program(main, "study_job.py")
