"""Evaluations of a run, between its steps."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from util import collectives
from util.evaluate.context import EvalContext, context_of_loop
from util.evaluate.results import RESULTS, Evaluation, named_scores, write_results
from util.run.files import checkpoint
from util.run.files.json_files import read_json
from util.run.files.record import RunInfo
from util.run.train.loop import TrainLoop
from util.run.train.saving import CheckpointSaver

BEST = "checkpoint-best.pth"


@dataclass
class Evaluator:
    """Evaluates a run every `--eval_every` epochs or iterations and at the end of the schedule.

    It writes the scores to the log and to results.json, and keeps the best weights as checkpoint-best.pth.

    evaluate: returns the Evaluation on all ranks. describe: returns scores in one line. best_by: the score that the
    best weights have the highest of; "": none are kept. picture_name: of the picture's file in the output folder.
    """

    loop: TrainLoop
    saver: CheckpointSaver
    evaluate: Callable[[EvalContext], Evaluation]
    describe: Callable[[Mapping[str, Any]], str]
    best_by: str = ""
    picture_name: str = ""

    def is_due(self) -> bool:
        """Whether the current step is to be evaluated."""
        step = self.loop.step
        schedule = self.loop.schedule
        period = self.loop.run.args.eval_every
        if schedule.unit == "epoch":
            period *= schedule.steps_per_epoch
        return step > 0 and (step % period == 0 or step == schedule.num_steps)

    def is_done(self) -> bool:
        """Whether the log holds the evaluation of the current step, and its weights are there if they are the best."""
        step = self.loop.step
        evaluations = [report for report in self.loop.log.history() if "val_num_images" in report]
        if not any(report["step"] == step for report in evaluations):
            return False
        is_best = self.results().get("best", {}).get("step") == step
        best = self.read_best()
        return not is_best or (best is not None and best.step == step)

    def perform(self) -> None:
        """Evaluates the current weights. The result goes to the output folder and the log; OSError if that fails."""
        loop = self.loop
        run = loop.run
        step = loop.step
        collectives.broadcast_buffers(loop.model)
        result = self.evaluate(context_of_loop(self.loop))
        report = self.report_of(step, result.scores)
        last = {"step": step, **report}
        facts: dict[str, Any] = {}
        if self.best_by:
            facts["best"] = self.save_best(last, result.scores)
        facts["encoder"] = None if run.first_weights is None else asdict(run.first_weights)

        def write() -> None:
            if result.picture is not None:
                loop.log.picture(self.picture_name, result.picture, step)
            write_results(run.output_dir, last, result.details, **facts)
            # The log comes last: an evaluation that is not in the log is repeated after a kill.
            line = self.describe(result.scores)
            loop.log.report(step, report, f"after {self.when(last)}: {line}")

        collectives.run_on_rank0(write)

    def report_of(self, step: int, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the log says of the evaluation of a step."""
        return {"epoch": (step - 1) // self.loop.steps_per_epoch, **named_scores(scores)}

    def save_best(self, last: dict[str, Any], scores: dict[str, Any]) -> dict[str, Any]:
        """Saves the weights as checkpoint-best.pth if they are better than its own. Returns the better ones' report."""
        self.saver.finish()  # earlier ones may be written just now
        best = collectives.run_on_rank0(self.best_before)
        if best is not None and best[f"val_{self.best_by}"] >= scores[self.best_by]:
            return best
        info = self.saver.info.at_step(last["step"], self.loop.steps_per_epoch, scores)
        self.saver.save_best(info)
        return last

    def best_before(self) -> dict[str, Any] | None:
        """Returns the report of the best weights so far, of an earlier step than the current one."""
        best = self.read_best()
        if best is None or best.val is None or best.step >= self.loop.step:
            return None
        return {"step": best.step, **self.report_of(best.step, best.val)}

    def read_best(self) -> RunInfo | None:
        """Returns what checkpoint-best.pth says about the run; None if there is none."""
        path = self.loop.run.output_dir / BEST
        return checkpoint.read_info(path).run if path.exists() else None

    def results(self) -> dict[str, Any]:
        """Returns the content of results.json; an empty dict if there is none."""
        return read_json(self.loop.run.output_dir / RESULTS)

    def when(self, report: Mapping[str, Any]) -> str:
        """Returns, for example, "epoch 3" or "iteration 400"."""
        if self.loop.schedule.unit == "epoch":
            return f"epoch {report['epoch']}"
        return f"iteration {report['step']}"

    def summary(self, model: str, num_images: int) -> list[str]:
        """Returns what the run did, from its results, so that a finished run can say it again. model: its name."""
        lines = [f"trained {model} {self.loop.progress(num_images)}"]
        results = self.results()
        for name in ("last", "best"):
            if name in results:
                scores = {key.removeprefix("val_"): value for key, value in results[name].items()}
                lines.append(f"  {name:<11}  {self.when(results[name])}: {self.describe(scores)}")
        return lines
