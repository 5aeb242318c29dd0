"""What the downstream programs share: schedules that count iterations, and evaluations between them."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from util.run import distributed
from util.run.encoder_origin import find_encoder, resume_encoder
from util.run.flags import Plan, RunSchedule, check_least
from util.run.loop import TrainLoop
from util.run.run_folder import write_json
from util.run.saving import CheckpointSaver
from util.run.start import Start
from util.run.watchdog import BETWEEN
from util.text import count_of

RESULTS = "results.json"


def add_iteration_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the length of a schedule in iterations, and its learning rate."""
    flag = group.add_argument
    flag("--num_iters", type=int, help="length of the schedule in optimizer steps")
    flag("--warmup_iters", type=int, help="optimizer steps of linear warm-up")
    flag("--lr", type=float, help="learning rate of the head at the total batch size; it is not scaled")


def check_iteration_flags(args: argparse.Namespace) -> None:
    """ValueError if a flag of `add_iteration_flags`, or a pair of them, is out of range."""
    check_least(args, 1, "num_iters eval_every")
    if not 0 <= args.warmup_iters <= args.num_iters:
        raise ValueError(f"--warmup_iters {args.warmup_iters} must lie between 0 and --num_iters {args.num_iters}")


@dataclass(frozen=True)
class LinearDecay:
    """mmsegmentation's schedule: the rate falls linearly from `lr` to `min_lr`, times a linear warm-up from 1e-6 to 1.

    `schedule(step, lr_scale)` returns the learning rate of an optimizer step, counted from 0. lr_scale: the factor of a
    parameter group under layer-wise learning-rate decay.
    """

    num_iters: int
    warmup_iters: int
    lr: float
    min_lr: float = 0.0

    def __call__(self, step: int, lr_scale: float = 1.0) -> float:
        rate = self.min_lr + (lr_scale * self.lr - self.min_lr) * (1 - step / self.num_iters)
        if step < self.warmup_iters:
            rate *= 1 - (1 - step / self.warmup_iters) * (1 - 1e-6)
        return rate


def schedule_by_iterations(
    args: argparse.Namespace, plan: Plan, steps_per_epoch: int, learning_rate: Callable[..., float] | None = None
) -> RunSchedule:
    """Returns the schedule of a run whose flags count iterations. learning_rate: default: `LinearDecay`."""
    if learning_rate is None:
        learning_rate = LinearDecay(args.num_iters, args.warmup_iters, plan.lr, args.min_lr)
    summary = f"{count_of(args.num_iters, 'iteration')}, {args.num_iters / steps_per_epoch:.4g} epochs of "
    summary += f"{count_of(steps_per_epoch, 'step')}, {args.warmup_iters} of warm-up, peak learning rate {plan.lr:.4g}"
    return RunSchedule(steps_per_epoch, args.num_iters, args.save_every, learning_rate, summary)


def choose_encoder(args: argparse.Namespace, start: Start, content: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the identity of the pre-trained encoder, or None. ValueError if a resumed run began with another one."""
    encoder = distributed.run_on_rank0(lambda: find_encoder(args.finetune, start.resume_path is not None))
    if content is None:
        return encoder
    encoder, remarks = resume_encoder(content["meta"], encoder, args.output_dir)
    start.remarks += remarks
    return encoder


class Evaluation(NamedTuple):
    """The result of one evaluation."""

    scalars: dict[str, float]  # for the log
    line: str  # for the console
    details: dict[str, Any]  # for results.json alone


@dataclass
class Evaluator:
    """Evaluates a run every `eval_every` iterations and at the end of the schedule, logs it and writes results.json.

    evaluate: `evaluate(alive)` returns the Evaluation on all ranks, and calls `alive` now and then for the watchdog.
    """

    evaluate: Callable[[Callable[[], None]], Evaluation]
    model: torch.nn.Module
    loop: TrainLoop
    saver: CheckpointSaver
    eval_every: int

    def is_due(self) -> bool:
        """Whether the current step is to be evaluated."""
        step = self.loop.step
        return step > 0 and (step % self.eval_every == 0 or step == self.saver.schedule.num_steps)

    def is_done(self) -> bool:
        """Whether log and results.json hold the evaluation of the current step. All ranks must call it."""

        def look() -> bool:
            step = self.loop.step
            in_log = any(report["step"] == step and "val_num_images" in report for report in self.loop.log.history())
            return in_log and self.results().get("last", {}).get("step") == step

        return distributed.run_on_rank0(look)

    def run(self) -> None:
        """Evaluates the current weights, outside the measured time of training. All ranks must call it."""
        loop = self.loop
        distributed.broadcast_buffers(self.model)

        def alive() -> None:
            if loop.watchdog is not None:
                loop.watchdog.reached(loop.step - 1, BETWEEN)

        result = self.evaluate(alive)
        if self.saver.record.process.is_main:
            self.write(result)
        loop.clock.restart()

    def write(self, result: Evaluation) -> None:
        """Writes the scores of the current weights to results.json and to the log."""
        loop, record = self.loop, self.saver.record
        scalars: dict[str, float] = {"epoch": (loop.step - 1) // loop.steps_per_epoch}
        scalars |= {f"val_{name}": value for name, value in result.scalars.items()}
        content = {"last": {"step": loop.step, **scalars}, "details": result.details}
        content |= {"encoder": record.extra["encoder"], "code": record.origin["code"]}
        try:
            write_json(self.saver.output_dir / RESULTS, content)
        except OSError as error:
            loop.log.info(f"warning: {RESULTS} could not be written ({error}); the same command writes it again")
        # The log comes last: an evaluation that is not in the log is repeated after a kill.
        loop.log.report(loop.step, scalars, f"after iteration {loop.step}: {result.line}", result.line)

    def results(self) -> dict[str, Any]:
        """Returns the content of results.json; an empty dict if there is none."""
        return read_results(self.saver.output_dir)


def read_results(folder: Path) -> dict[str, Any]:
    """Returns the content of a run's results.json; an empty dict if it is missing or damaged."""
    try:
        content = json.loads((folder / RESULTS).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def progress_settings(args: argparse.Namespace, steps_per_epoch: int) -> Mapping[str, float]:
    """Returns the setting `epochs`, by which other programs see how far a run is."""
    return {"epochs": args.num_iters / steps_per_epoch}
