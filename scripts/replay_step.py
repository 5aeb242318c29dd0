"""Repeat a step of a pre-training that was not finite, and name what was not.

    python scripts/replay_step.py output/prmim50_base/bad-step-70.pth

A run writes this file when it ends with exit code 3, and at a report whose step was not finite: with `--print_freq 1`
at the first one, except in fp16. Of a checkpoint, the step that followed is repeated. All micro-batches of all
processes are computed in this one, not compiled, in the precision of the run and then in float32. Printed are, for each
micro-batch, its images; the first module whose output is not finite, and for which images; and the first parameter, in
the order of the backward pass, whose gradient is not finite.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from framework import Framework
from frameworks.registry import build_model, check_pretrained
from prmim import MaskCollator
from util import attention
from util.data.datasets import AddressedDataset, StepBatchSampler
from util.data.open import open_everywhere
from util.data.statistics import normalizer
from util.run.cli import Parser, run_program, user_errors
from util.run.files.checkpoint import read_checkpoint
from util.run.files.record import Checkpoint
from util.run.processes.distributed import init_process, precision
from util.run.processes.supervise import StopSignal
from util.run.train.loader import make_augmentation
from util.run.train.logging import RunLog
from util.run.train.loop import TrainLoop
from util.run.train.saving import REPLAYED_PROGRAM
from util.run.train.wrap import choose_attention
from util.text import count_of, shorten
from util.urls import data_path


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yields the floating-point tensors of a module's output."""
    if torch.is_tensor(output):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from tensors_in(part)


@dataclass
class Finder:
    """Context manager of a forward and a backward pass: finds the first values that are not finite.

    output: name of the module, or of the images. rows: images of the batch whose values in it are not finite; none if
    it has no row for each image. gradient: name of the parameter.
    """

    model: Framework
    batch_size: int
    output: str | None = None
    rows: list[int] = field(default_factory=list)
    gradient: str | None = None
    handles: list[RemovableHandle] = field(default_factory=list)

    def __enter__(self) -> "Finder":
        for name, module in self.model.named_modules():
            hook = partial(self.look_at_output, name or "the losses")
            self.handles.append(module.register_forward_hook(hook))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                hook = partial(self.look_at_gradient, name)
                self.handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def look_at_output(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            self.look(name, tensor)

    def look(self, name: str, tensor: torch.Tensor) -> None:
        """Notes a tensor if it is the first that is not finite."""
        finite = tensor.detach().isfinite()
        if self.output is not None or finite.all():
            return
        self.output = name
        if finite.dim() > 0 and len(finite) == self.batch_size:
            is_bad = ~finite.reshape(self.batch_size, -1).all(dim=1)
            self.rows = is_bad.nonzero().flatten().tolist()

    def look_at_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if self.gradient is None and parameter.grad is not None and not parameter.grad.isfinite().all():
            self.gradient = name


@dataclass(frozen=True)
class Replay:
    """A step of a run: number `step`, counted from 0, of `world_size` processes."""

    model: Framework
    dataset: AddressedDataset
    collator: MaskCollator
    settings: dict[str, Any]
    step: int
    world_size: int
    scaler: dict[str, Any]
    device: torch.device

    def addresses(self, rank: int) -> list[list[tuple[int, int]]]:
        """Returns those of each micro-batch of a process."""
        sampler = StepBatchSampler(
            len(self.dataset),
            self.settings["batch_size"],
            self.settings["accum_iter"],
            rank,
            self.world_size,
            self.settings["seed"],
            self.step,
            self.step + 1,
        )
        return list(sampler)

    def make_loop(self, precision_name: str) -> TrainLoop:
        """Returns a loop like that of the run, whose weights stay as they are."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        loop = TrainLoop(
            parameters=parameters,
            optimizer=torch.optim.SGD(parameters, lr=0.0),
            precision=precision(precision_name, self.device),
            normalize=normalizer(self.settings, self.dataset.images.pixel_format).to(self.device),
            learning_rate=lambda step, lr_scale: 0.0,
            log=RunLog("", 0, 0, enabled=False),
            stop=StopSignal(self.device),
            images_per_step=self.settings["total_batch_size"],
            steps_per_epoch=self.step + 1,
            last_step=self.step + 1,
            accum_iter=self.settings["accum_iter"],
            seed=self.settings["seed"],
            step=self.step,
        )
        if loop.precision.scaler.is_enabled():
            loop.precision.scaler.load_state_dict(self.scaler)
        return loop

    def repeat(self, precision_name: str) -> None:
        """Computes the step in a precision, and prints what is not finite."""
        print(f"{precision_name}:")
        loop = self.make_loop(precision_name)
        means: dict[str, float] = {}
        for rank in range(self.world_size):
            loop.begin_step(self.step)
            for micro, addresses in enumerate(self.addresses(rank)):
                paths = [self.dataset.images.path(index) for _, index in addresses]
                print(f"  process {rank}, micro-batch {micro}: {', '.join(paths)}")
                finder = self.repeat_micro_batch(loop, micro, rank, addresses)
                if finder.output is not None:
                    images = "all images"
                    if 0 < len(finder.rows) < len(paths):
                        images = shorten([paths[row] for row in finder.rows])
                    print(f"    first output that is not finite: {finder.output}, of {images}")
                if finder.gradient is not None:
                    print(f"    first gradient that is not finite: {finder.gradient}")
            for name, loss in loop.losses.items():
                means[name] = means.get(name, 0.0) + loss.item() / self.world_size
        for name, mean in means.items():
            print(f"  loss {name} {mean!r}")

    def repeat_micro_batch(
        self,
        loop: TrainLoop,
        micro: int,
        rank: int,
        addresses: Sequence[tuple[int, int]],
    ) -> Finder:
        """Computes losses and gradients as `engine_pretrain.train_one_epoch` does."""
        batch = self.collator([self.dataset[address] for address in addresses])
        number = micro * self.world_size + rank  # by which the draws of the run are seeded
        imgs, _, *orders = loop.next_batch(iter([batch]), number)
        normalized = loop.normalize(imgs, fill=False)
        with Finder(self.model, len(addresses)) as finder:
            finder.look("the normalised images", loop.normalize(imgs))
            with loop.autocast():
                losses = self.model(normalized, *orders)
            loop.scaled_loss(losses, micro).backward()
        self.model.zero_grad(set_to_none=True)
        return finder


def make_replay(found: Checkpoint, data_path: str | None, device: torch.device) -> Replay:
    """Makes what repeats the step after `found`. ValueError for other files, and for other data."""
    info = found.info
    check_pretrained(info, found.path)
    if info.run is None or info.run.program != REPLAYED_PROGRAM:
        raise ValueError(f"{str(found.path)!r} is no bad step and no checkpoint of a run of {REPLAYED_PROGRAM}")
    settings = {**info.settings, **info.pixel_settings}
    if settings["sampling"] == "attention":
        raise ValueError("the steps of --sampling attention also depend on maps, and cannot be repeated")
    settings["data_path"] = data_path or settings["data_path"]
    args = argparse.Namespace(**{"vflip": False, **settings})  # runs of earlier commits have no such flag
    images = open_everywhere(args, "train", max_bad_fraction=args.max_bad_fraction)
    if images.fingerprint() != info.run.data.fingerprint:
        raise ValueError(f"the run had {info.run.data}; {settings['data_path']!r} holds others: give --data_path")
    attention.prefer(settings["attention"], device)
    model = build_model(settings).to(device)
    model.use_statistics(settings["mean"], settings["std"])
    model.load_state_dict(found.weights)
    choose_attention(model, settings["attention"], settings["precision"], device, print)
    dataset = AddressedDataset(images, make_augmentation(args, model.img_size), replace=args.max_bad_fraction > 0)
    collator = model.collator(settings["sampling"], settings["seed"])
    scaler = found.training.get("scaler", {})
    return Replay(model.train(), dataset, collator, settings, info.run.step, info.run.world_size, scaler, device)


def get_args_parser() -> Parser:
    parser = Parser("replay_step.py", description=__doc__)
    flag = parser.add_argument
    flag("path", type=Path, help="bad-step-<n>.pth, or a checkpoint of a run")
    flag("--data_path", type=data_path, help="the data of the run, if they have moved")
    flag("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: a GPU if there is one")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; `argv` replaces the command line."""
    parser = get_args_parser()
    args = parser.parse_args(argv)
    with user_errors(parser):
        found = read_checkpoint(args.path)
        device = init_process(args.device).device
        replay = make_replay(found, args.data_path, device)
        split = f"{count_of(replay.world_size, 'process')} x {replay.settings['accum_iter']} accumulated"
        print(f"step {replay.step + 1} of {replay.settings['output_dir']}, {split}, on {device.type}")
        bad_weights = [name for name, value in found.weights.items() if not value.isfinite().all()]
        if bad_weights:
            print(f"weights that are not finite before the step: {shorten(bad_weights)}")
        for precision_name in dict.fromkeys([replay.settings["precision"], "fp32"]):
            replay.repeat(precision_name)


if __name__ == "__main__":
    run_program(main, "replay_step.py")
