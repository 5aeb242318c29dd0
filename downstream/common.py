"""What the downstream programs share: schedules that count iterations, evaluations between them, evaluations alone."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from util import collectives
from util.pictures import save
from util.run import distributed
from util.run.flags import Plan, RunSchedule, check_least
from util.run.folder import read_json, refuse_different_starts, writable_folder, write_json
from util.run.resume import warn_if_unfinished
from util.run.run import Run
from util.text import count_of

RESULTS = "results.json"
RECIPE_FILE = "downstream/recipes.py"


def add_iteration_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the length of a schedule in iterations, and its learning rate."""
    flag = group.add_argument
    flag("--num_iters", type=int, help="length of the schedule in optimizer steps")
    help_text = "optimizer steps of linear warm-up; if not given and longer than --num_iters, it is scaled with it"
    flag("--warmup_iters", type=int, help=help_text)
    flag("--lr", type=float, help="learning rate of the head at the total batch size; it is not scaled")


def check_shared_flags(args: argparse.Namespace, task: str) -> None:
    """ValueError if a flag of all downstream programs, or a pair of them, is out of range. task: for messages."""
    check_least(args, 1, "num_iters eval_every decoder_channels patch_size")
    check_least(args, 0, "drop_path num_pictures")
    if not 0 <= args.warmup_iters <= args.num_iters:
        raise ValueError(f"--warmup_iters {args.warmup_iters} must lie between 0 and --num_iters {args.num_iters}")
    if args.drop_path > 1:
        raise ValueError(f"--drop_path must be at most 1, got {args.drop_path}")
    if not 0 < args.layer_decay <= 1:
        raise ValueError(f"--layer_decay must lie in (0, 1], got {args.layer_decay}")
    for name in ("shard", "compile"):
        if getattr(args, name):
            raise ValueError(f"--{name} is not for {task}: leave it out")


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
    pauses, epochs = (args.eval_every, args.save_every), args.num_iters / steps_per_epoch
    return RunSchedule(steps_per_epoch, args.num_iters, args.save_every, learning_rate, summary, pauses, epochs)


def load_first_weights(load: Callable[[str], object], encoder: dict[str, Any] | None) -> list[str]:
    """Loads the encoder of a new run by `load(path)`, which returns a report. Returns remarks."""
    if encoder is None:
        return ["no --finetune: training from scratch"]
    report = load(encoder["path"])
    return [f"encoder from {encoder['path']}: {report}", *warn_if_unfinished(encoder)]


# -------------------------------------------------------------------------------------------- evaluation in training


class Evaluation(NamedTuple):
    """The result of one evaluation."""

    scores: dict[str, float]  # for results.json and the log
    details: dict[str, Any]  # for results.json alone
    picture: np.ndarray | None  # uint8 [H, W, 3]; of rank 0 alone


@dataclass
class Evaluator:
    """Evaluates a run every `eval_every` iterations and at the end of the schedule, logs it and writes results.json.

    evaluate: `evaluate(alive)` returns the Evaluation on all ranks, and calls `alive` now and then for the watchdog.
    describe: returns scores in one line. picture_name: of the picture's file in the output folder.
    """

    run: Run
    evaluate: Callable[[Callable[[], None]], Evaluation]
    describe: Callable[[Mapping[str, Any]], str]
    picture_name: str

    def is_due(self) -> bool:
        """Whether the current step is to be evaluated."""
        step = self.run.loop.step
        return step > 0 and (step % self.run.args.eval_every == 0 or step == self.run.schedule.num_steps)

    def is_done(self) -> bool:
        """Whether log and results.json hold the evaluation of the current step."""
        step = self.run.loop.step
        in_log = any(report["step"] == step and "val_num_images" in report for report in self.run.log.history())
        return in_log and self.results().get("last", {}).get("step") == step

    def perform(self) -> None:
        """Evaluates the current weights, and writes picture and scores to the output folder and to the log."""
        collectives.broadcast_buffers(self.run.model)
        result = self.evaluate(self.run.alive)
        if not self.run.process.is_main:
            return
        loop, record, folder = self.run.loop, self.run.record, self.run.output_dir
        if result.picture is not None:
            loop.log.picture(Path(self.picture_name).stem, result.picture, loop.step)
            try:
                save(result.picture, folder / self.picture_name)
            except OSError as error:  # a full disk; other processes would wait for this one
                loop.log.info(f"warning: {self.picture_name} could not be written ({error}); training goes on")
        scalars: dict[str, float] = {"epoch": (loop.step - 1) // loop.steps_per_epoch}
        scalars |= {f"val_{name}": value for name, value in result.scores.items()}
        content = {"last": {"step": loop.step, **scalars}, "details": result.details}
        content |= {"encoder": record.extra["encoder"], "code": record.origin["code"]}
        try:
            write_json(folder / RESULTS, content)
        except OSError as error:
            loop.log.info(f"warning: {RESULTS} could not be written ({error}); the same command writes it again")
        line = self.describe(result.scores)
        # The log comes last: an evaluation that is not in the log is repeated after a kill.
        loop.log.report(loop.step, scalars, f"after iteration {loop.step}: {line}", line)

    def results(self) -> dict[str, Any]:
        """Returns the content of results.json; an empty dict if there is none."""
        return read_json(self.run.output_dir / RESULTS)

    def summary(self, what: str) -> list[str]:
        """Returns what the run did, from its results, so that a finished run can say it again. what: the model."""
        lines, last = [f"trained {what} {self.run.progress()}"], self.results().get("last")
        if last:
            scores = {name.removeprefix("val_"): value for name, value in last.items()}
            lines.append(f"  iteration {last['step']}: {self.describe(scores)}")
        picture = self.run.output_dir / self.picture_name
        if self.run.args.num_pictures and picture.exists():
            lines.append(f"  pictures     {picture}")
        return lines


# -------------------------------------------------------------------------------------------------- evaluation alone


def begin_evaluation(
    args: argparse.Namespace, given: set[str], created: list[Path], origins: str
) -> tuple[distributed.Process, Path | None]:
    """Joins the processes of --eval. Returns (process, folder for the results or None without --output_dir).

    given: names of the flags that were set explicitly. created: gets the folders made. origins: programs whose models
    can be evaluated, for messages. ValueError if a flag is missing or out of range, or if the folder holds a run or is
    not writable.
    """
    process = distributed.init_process(args.device)
    refuse_different_starts(args)
    if args.resume in ("auto", "none"):
        raise ValueError(f"--eval needs --resume: a checkpoint of {origins}, or a run's folder")
    check_least(args, 0, "num_workers num_pictures")
    if "output_dir" not in given:
        return process, None

    def check_folder() -> Path:
        if (Path(args.output_dir) / "settings.json").exists():
            raise ValueError(
                f"--output_dir {args.output_dir} holds a run, whose results --eval would replace: choose another"
            )
        return writable_folder(args.output_dir, created)

    return process, collectives.run_everywhere(check_folder)


def end_evaluation(
    folder: Path | None, result: Evaluation, line: str, picture_name: str, origin: Mapping[str, Any]
) -> None:
    """Prints the scores of --eval in one `line`, writes them and the picture to the folder, and leaves the processes.

    origin: "step" and "checkpoint" of the weights, for results.json.
    """
    if collectives.rank_and_world_size()[0] == 0:
        print(line)
        if folder is not None:
            last = {"step": origin["step"], **{f"val_{name}": value for name, value in result.scores.items()}}
            content = {"last": last, "details": result.details, "checkpoint": origin["checkpoint"]}
            write_json(folder / RESULTS, content)
            print(f"all scores: {folder / RESULTS}")
        if folder is not None and result.picture is not None:
            save(result.picture, folder / picture_name)
            print(f"pictures: {folder / picture_name}")
    distributed.shut_down()
