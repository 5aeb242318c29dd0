"""One run of the study (one arm, one seed), in a process of its own: pre-train, measure, fine-tune. Started by study.py.

    python scripts/study_job.py output/study/cpu/runs/prmim50-seed0 MACHINE

The folder's job.json says what to do, MACHINE (JSON) with what; result.json is written last. The mains resume by
themselves, so an interrupted job starts again with the same command.

READINGS are the ways to read the paper that the core does not follow; what they gave is in docs/study.md.
"""

import fcntl
import json
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import main_finetune
import main_pretrain
from prmim import ProgressiveDecoder, SpatialAggregation
from scripts.step_costs import forward_gmac
from scripts.visualize import evenly_spaced, load_run, measure
from util.datasets import open_images


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


def pretrain(job, machine, folder):
    """-> {loss, mse of reconstruction, cost} of the pre-trained model."""
    argv = [*job["pretrain"], "--data_path", machine["data_path"], "--output_dir", str(folder), "--picture_every", "0"]
    if job["reading"]:
        add_reading(job["reading"])
        argv[argv.index("--model") + 1] += f"+{job['reading']}"
    main_pretrain.main([*argv, "--device", machine["device"], "--num_workers", str(machine["num_workers"])])
    model, settings = load_run(folder)
    images = open_images("folder", machine["data_path"], "val")
    (mse,) = measure(model, settings, images, evenly_spaced(len(images), job["measured_images"])).values()
    tokens = {"retained": model.counts.num_retained, "thrown": model.counts.num_thrown}
    result = {f"mse_{name}": value for name, value in mse.items()}
    if all(name in mse for name, n in tokens.items() if n):  # plain predicts no thrown token
        result["mse_masked"] = sum(mse[name] * tokens[name] for name in mse) / sum(tokens[name] for name in mse)
    losses = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return result | {"loss": losses[-1]["epoch_loss"], "gmac": forward_gmac(settings)[0]}


def finetune(job, machine, folder, encoder):
    """-> {top1} after the last epoch."""
    argv = [*job["finetune"], "--dataset", "folder", "--data_path", machine["labelled"], "--output_dir", str(folder)]
    argv += ["--finetune", str(encoder)] if encoder else []
    main_finetune.main([*argv, "--device", machine["device"], "--num_workers", str(machine["num_workers"])])
    return {"top1": json.loads((folder / "results.json").read_text())["last"]["val_top1"]}


def main(folder, machine):
    folder, machine = Path(folder), json.loads(machine)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends, however it ends
        except BlockingIOError:
            sys.exit(f"another process is at work in {folder}: a study on this folder runs already")
        work(folder, machine)


def work(folder, machine):
    job = json.loads((folder / "job.json").read_text())
    result = dict.fromkeys(("top1", "loss", "mse_masked", "mse_retained", "mse_thrown", "gmac"))
    result |= {"status": "finished", "device": machine["device"], "torch": torch.__version__}
    try:
        if job["pretrain"]:
            result |= pretrain(job, machine, folder / "pretrain")
        result |= finetune(job, machine, folder / "finetune", folder / "pretrain" if job["pretrain"] else None)
    except SystemExit as stop:
        if stop.code != 3:  # 3: the mains stop where numbers are no longer finite, and that is a result, too
            raise
        result["status"] = "diverged"
    main_finetune.write_json(folder / "result.json", result)


if __name__ == "__main__":
    main(*sys.argv[1:])
