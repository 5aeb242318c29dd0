"""Evaluations of a run, between its steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from util import collectives
from util.evaluate.loop import EvalContext
from util.evaluate.results import RESULTS, Evaluation
from util.pictures import save
from util.run import checkpoint
from util.run.folder import read_json, write_json
from util.run.run import Run

BEST = "checkpoint-best.pth"


def context_of_run(run: Run) -> EvalContext:
    """Returns the context of the evaluations of an opened run."""
    return EvalContext(
        normalize=run.loop.normalize,
        autocast=run.loop.autocast,
        batch_size=run.plan.batch_size,
        num_workers=run.plan.num_workers,
        heartbeat=run.heartbeat,
    )


@dataclass
class Evaluator:
    """Evaluates a run every `--eval_every` epochs or iterations and at the end of the schedule.

    It writes the scores to the log and to results.json, and keeps the best weights as checkpoint-best.pth.

    evaluate: returns the Evaluation on all ranks. describe: returns scores in one line. best_by: the score that the
    best weights have the highest of; "": none are kept. picture_name: of the picture's file in the output folder.
    """

    run: Run
    evaluate: Callable[[EvalContext], Evaluation]
    describe: Callable[[Mapping[str, Any]], str]
    best_by: str = ""
    picture_name: str = ""

    def is_due(self) -> bool:
        """Whether the current step is to be evaluated."""
        step = self.run.loop.step
        schedule = self.run.schedule
        period = self.run.args.eval_every
        if schedule.unit == "epoch":
            period *= schedule.steps_per_epoch
        return step > 0 and (step % period == 0 or step == schedule.num_steps)

    def is_done(self) -> bool:
        """Whether log and results.json hold the evaluation of the current step, and its weights are there if best."""
        step = self.run.loop.step
        if not any(report["step"] == step for report in self.evaluations()):
            return False
        results = self.results()
        if results.get("last", {}).get("step") != step:
            return False
        is_best = results.get("best", {}).get("step") == step
        return not is_best or self.read_best().get("step") == step

    def perform(self) -> None:
        """Evaluates the current weights, and writes the result to the output folder and to the log."""
        run = self.run
        collectives.broadcast_buffers(run.model)
        result = self.evaluate(context_of_run(run))
        self.save_best(result)
        if not run.process.is_main:
            return
        self.write_picture(result.picture)
        report: dict[str, Any] = {"epoch": (run.loop.step - 1) // run.loop.steps_per_epoch}
        for name, value in result.scores.items():
            report[f"val_{name}"] = value
        last = {"step": run.loop.step, **report}
        self.write_results(last, result.details)
        # The log comes last: an evaluation that is not in the log is repeated after a kill.
        line = self.describe(result.scores)
        run.log.report(run.loop.step, report, f"after {self.when(last)}: {line}", line)

    def write_results(self, last: Mapping[str, Any], details: Mapping[str, Any]) -> None:
        """Writes results.json. last: the report of the current evaluation."""
        run = self.run
        content: dict[str, Any] = {"last": last}
        if self.best_by:
            earlier = [report for report in self.evaluations() if report["step"] < run.loop.step]
            content["best"] = max([*earlier, last], key=lambda report: report[f"val_{self.best_by}"])
        content["details"] = details
        content["encoder"] = run.encoder
        content["code"] = run.record.origin["code"]
        try:
            write_json(run.output_dir / RESULTS, content)
        except OSError as error:
            run.note(f"warning: {RESULTS} could not be written ({error}); the same command writes it again")

    def save_best(self, result: Evaluation) -> None:
        """Saves the weights as checkpoint-best.pth if they are better than those of earlier steps."""
        if not self.best_by:
            return
        run = self.run
        score = result.scores[self.best_by]
        if collectives.run_on_rank0(lambda: score > self.best_before()):
            meta = {**run.record.meta(run.loop.step), "val": result.scores}
            run.saver.write("best", {"model": run.model.state_dict()}, meta)

    def best_before(self) -> float:
        """Returns the score of the best weights so far, of an earlier step than the current one."""
        self.run.saver.join()  # they may be written just now
        best = self.read_best()
        if best and best["step"] < self.run.loop.step:
            return best["val"][self.best_by]
        return -1.0

    def read_best(self) -> dict[str, Any]:
        """Returns the record of checkpoint-best.pth; an empty dict if there is none."""
        return checkpoint.read_record(self.run.output_dir / BEST) or {}

    def write_picture(self, picture: np.ndarray | None) -> None:
        """Writes the picture to TensorBoard and to the output folder."""
        if picture is None:
            return
        self.run.log.picture(Path(self.picture_name).stem, picture, self.run.loop.step)
        try:
            save(picture, self.run.output_dir / self.picture_name)
        except OSError as error:  # a full disk; other processes would wait for this one
            self.run.note(f"warning: {self.picture_name} could not be written ({error}); training goes on")

    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the reports of all evaluations in the log, on rank 0."""
        return [report for report in self.run.log.history() if "val_num_images" in report]

    def results(self) -> dict[str, Any]:
        """Returns the content of results.json; an empty dict if there is none."""
        return read_json(self.run.output_dir / RESULTS)

    def when(self, report: Mapping[str, Any]) -> str:
        """Returns, for example, "epoch 3" or "iteration 400"."""
        if self.run.schedule.unit == "epoch":
            return f"epoch {report['epoch']}"
        return f"iteration {report['step']}"

    def summary(self, model: str) -> list[str]:
        """Returns what the run did, from its results, so that a finished run can say it again. model: its name."""
        lines = [f"trained {model} {self.run.progress()}"]
        results = self.results()
        for name in ("last", "best"):
            if name in results:
                scores = {key.removeprefix("val_"): value for key, value in results[name].items()}
                lines.append(f"  {name:<11}  {self.when(results[name])}: {self.describe(scores)}")
        picture = self.run.output_dir / self.picture_name
        if self.picture_name and self.run.args.num_pictures and picture.exists():
            lines.append(f"  pictures     {picture}")
        return lines
