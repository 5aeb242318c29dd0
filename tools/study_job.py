"""One run of the study (one arm, one seed), in a process of its own: pre-train, measure, fine-tune. Started by study.py.

    python tools/study_job.py output/study/cpu/runs/prmim50-seed0 MACHINE

The folder's job.json says what to do, MACHINE (JSON) with what; result.json is written last. The mains resume by
themselves, so an interrupted job starts again with the same command.

READINGS are the ways to read the paper that the core does not follow; what they gave is in docs/study.md.
"""

import argparse
import fcntl
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import main_finetune
import main_pretrain
from prmim import ProgressiveDecoder, SpatialAggregation
from scripts.visualize import evenly_spaced, load_run, measure
from util.costs import forward_gmac
from util.data.datasets import open_images
from util.run.cli import Parser, run_program, user_errors
from util.run.run_folder import write_json


class AggregatesPredictions(ProgressiveDecoder):
    """Norm and head on the kept tokens first; the convolution then reconstructs predictions from predictions."""

    def reconstruct(self, x, order):
        return self.aggregation(super().predict(self.decode(x, order)), order, self.grid_size)

    def predict(self, x):
        return x


def predictions(model):
    kernel_size = model.decoder.aggregation.operator.kernel_size[0]
    model.decoder.__class__ = AggregatesPredictions  # the same parameters, another order of operations
    model.decoder.aggregation = SpatialAggregation(model.decoder.pred.out_features, kernel_size)


def init_average(model):
    """The convolution starts as the mean of its window."""
    convolution = model.decoder.aggregation.operator
    nn.init.constant_(convolution.weight, 1 / convolution.weight[0].numel())
    nn.init.zeros_(convolution.bias)


def init_normal(model):
    """ConvNeXt's initialisation."""
    convolution = model.decoder.aggregation.operator
    nn.init.trunc_normal_(convolution.weight, std=0.02)
    nn.init.zeros_(convolution.bias)


READINGS = {f.__name__: f for f in (predictions, init_average, init_normal)}


def add_reading(name):
    """Lets main_pretrain's models be built with the reading: `mae_vit_micro_patch4+init_normal`."""

    def wrap(factory):
        def build(**options):
            model = factory(**options)
            READINGS[name](model)
            return model

        return build

    main_pretrain.MODELS |= {f"{model}+{name}": wrap(factory) for model, factory in main_pretrain.MODELS.items()}


class Stopped(Exception):
    """A signal has stopped a main before the end of its run."""


def run_main(main: Callable[[list[str]], object], argv: list[str]) -> None:
    """Trains with one of the mains; Stopped where the run is not at its end."""
    if main(argv) is False:
        raise Stopped


def pretrain(job: dict[str, Any], machine: dict[str, Any], folder: Path) -> dict[str, float]:
    """-> {loss, mse of reconstruction, cost} of the pre-trained model."""
    argv = [*job["pretrain"], "--data_path", machine["data_path"], "--output_dir", str(folder), "--picture_every", "0"]
    if job["reading"]:
        add_reading(job["reading"])
        argv[argv.index("--model") + 1] += f"+{job['reading']}"
    argv += ["--device", machine["device"], "--num_workers", str(machine["num_workers"])]
    run_main(main_pretrain.main, argv)
    model, settings = load_run(folder)
    images = open_images("folder", machine["data_path"], "val")
    (mse,) = measure(model, settings, images, evenly_spaced(len(images), job["measured_images"])).values()
    tokens = {"retained": model.counts.num_retained, "thrown": model.counts.num_thrown}
    result = {f"mse_{name}": value for name, value in mse.items()}
    if all(name in mse for name, n in tokens.items() if n):  # plain predicts no thrown token
        result["mse_masked"] = sum(mse[name] * tokens[name] for name in mse) / sum(tokens[name] for name in mse)
    losses = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return result | {"loss": losses[-1]["epoch_loss"], "gmac": forward_gmac(settings, main_pretrain.build_model)[0]}


def finetune(job: dict[str, Any], machine: dict[str, Any], folder: Path, encoder: Path | None) -> dict[str, float]:
    """-> {top1} after the last epoch."""
    argv = [*job["finetune"], "--dataset", "folder", "--data_path", machine["labelled"], "--output_dir", str(folder)]
    argv += ["--finetune", str(encoder)] if encoder else []
    argv += ["--device", machine["device"], "--num_workers", str(machine["num_workers"])]
    run_main(main_finetune.main, argv)
    return {"top1": json.loads((folder / "results.json").read_text())["last"]["val_top1"]}


def work(job: dict[str, Any], machine: dict[str, Any], folder: Path) -> bool:
    """Does the job and writes result.json; -> False, and no result, where a signal stopped it."""
    result = dict.fromkeys(("top1", "loss", "mse_masked", "mse_retained", "mse_thrown", "gmac"))
    result |= {"status": "finished", "device": machine["device"], "torch": torch.__version__}
    try:
        if job["pretrain"]:
            result |= pretrain(job, machine, folder / "pretrain")
        result |= finetune(job, machine, folder / "finetune", folder / "pretrain" if job["pretrain"] else None)
    except Stopped:
        return False
    except SystemExit as stop:
        if stop.code != 3:  # 3: the mains stop where numbers are no longer finite, and that is a result, too
            raise
        result["status"] = "diverged"
    write_json(folder / "result.json", result)
    return True


def read_json(text: str, what: str) -> dict[str, Any]:
    """The JSON object in `text`; ValueError, in which `what` names it, for anything else."""
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{what} must be a JSON object as tools/study.py writes it, got {text[:60]!r}")
    return content


def main(argv: Sequence[str] | None = None) -> bool:
    """The program; -> False where a signal stopped it. `argv` stands for the command line."""
    parser = Parser("study_job.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the run; its job.json says what to do")
    parser.add_argument("machine", help="JSON: data_path, labelled, device, num_workers")
    args = parser.parse_args(argv)
    with user_errors(parser):
        machine = read_json(args.machine, "MACHINE")
        job = read_json((args.folder / "job.json").read_text(), f"{str(args.folder / 'job.json')!r}")
        lock = open(args.folder / "lock", "w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends, however it ends
        except BlockingIOError:
            text = f"another process is at work in {args.folder}: a study on this folder runs already"
            parser.exit(1, f"{parser.prog}: error: {text}\n")
        return work(job, machine, args.folder)


if __name__ == "__main__":
    run_program(main, "study_job.py")
