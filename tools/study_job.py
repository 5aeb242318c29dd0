"""Run one arm of the study with one seed: pre-train, measure, fine-tune. tools/study.py starts it as a process.

    python tools/study_job.py output/study/cpu/runs/prmim50-seed0 MACHINE

job.json in the folder describes the job, MACHINE (JSON) the data and the device. result.json is written last. The mains
resume by themselves, so the same command continues an interrupted job.

READINGS are readings of the paper that the core does not follow. docs/study.md compares them.
"""

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
from framework import Framework
from prmim import ProgressiveDecoder, SpatialAggregation, TokenOrder
from reconstruction import evenly_spaced, measure
from util.costs import forward_gmac
from util.data.datasets import open_images
from util.run.cli import Parser, run_program, user_errors
from util.run.run_folder import write_json


class AggregatesPredictions(ProgressiveDecoder):
    """Norm and head on the kept tokens come first; the convolution reconstructs predictions from predictions."""

    def reconstruct(self, x: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        assert self.aggregation is not None  # all arms with this reading throw tokens
        return self.aggregation(super().predict(self.decode(x, order)), order, self.grid_size)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return x


def predictions(model: Framework) -> None:
    """Apply the convolution to the predictions."""
    kernel_size = model.decoder.aggregation.operator.kernel_size[0]
    model.decoder.__class__ = AggregatesPredictions  # the same parameters, another order of operations
    model.decoder.aggregation = SpatialAggregation(model.decoder.pred.out_features, kernel_size)


def init_average(model: Framework) -> None:
    """Initialise the convolution as the mean of its window."""
    convolution = model.decoder.aggregation.operator
    nn.init.constant_(convolution.weight, 1 / convolution.weight[0].numel())
    nn.init.zeros_(convolution.bias)


def init_normal(model: Framework) -> None:
    """Initialise the convolution as in ConvNeXt."""
    convolution = model.decoder.aggregation.operator
    nn.init.trunc_normal_(convolution.weight, std=0.02)
    nn.init.zeros_(convolution.bias)


READINGS = {f.__name__: f for f in (predictions, init_average, init_normal)}


def add_reading(model: str, reading: str) -> str:
    """Register a model of main_pretrain.py with a reading, and return its name: mae_vit_micro_patch4+init_normal."""
    factory, name = main_pretrain.MODELS[model], f"{model}+{reading}"

    def build(**options: Any) -> Framework:
        built = factory(**options)
        READINGS[reading](built)
        return built

    main_pretrain.MODELS[name] = build
    main_pretrain.FRAMEWORK_OF[name] = main_pretrain.FRAMEWORK_OF[model]
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


def finetune(job: dict[str, Any], machine: dict[str, Any], folder: Path, encoder: Path | None) -> dict[str, float]:
    """Fine-tune. Returns the top-1 accuracy after the last epoch."""
    argv = [*job["finetune"], "--dataset", "folder", "--data_path", machine["labelled"], "--output_dir", str(folder)]
    if encoder is not None:
        argv += ["--finetune", str(encoder)]
    run_main(main_finetune.main, argv, machine)
    return {"top1": json.loads((folder / "results.json").read_text())["last"]["val_top1"]}


def work(job: dict[str, Any], machine: dict[str, Any], folder: Path) -> bool:
    """Do the job and write result.json. Returns False, and writes nothing, if a signal stops it."""
    result = dict.fromkeys(("top1", "loss", "mse_masked", "mse_retained", "mse_thrown", "gmac"))
    result |= {"status": "finished", "device": machine["device"], "torch": torch.__version__}
    try:
        if job["pretrain"]:
            result |= pretrain(job, machine, folder / "pretrain")
        result |= finetune(job, machine, folder / "finetune", folder / "pretrain" if job["pretrain"] else None)
    except Stopped:
        return False
    except SystemExit as stop:
        if stop.code != 3:  # the mains end with 3 if the loss is no longer finite: a result of the study
            raise
        result["status"] = "diverged"
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
    parser.add_argument("machine", help="JSON: data_path, labelled, device, num_workers")
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
