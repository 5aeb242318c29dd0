"""Evaluation: the batches, which the ranks share; evaluations of a run; programs that only evaluate; results files.

A results file is JSON that is replaced in one step. That of a run says how its last evaluation was. That of a program
with many parts grows by each finished part, and the same command continues after the last of them.
"""

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from util import collectives
from util.code_version import code_version
from util.data.datasets import AddressedDataset, batches, every_image_once, stack
from util.pictures import save
from util.run import checkpoint, distributed, shard
from util.run.cli import Parser
from util.run.errors import exit_on_setup_errors
from util.run.folder import lock_folder, read_json, refuse_different_starts, write_json, write_progress
from util.run.run import Run
from util.text import count_of, shorten

RESULTS = "results.json"


def evaluation_batches(
    dataset: AddressedDataset,
    indices: Sequence[int] | np.ndarray,
    model: nn.Module,
    forward: Callable[[torch.Tensor], Any],
    autocast: Callable[[], AbstractContextManager],
    device: torch.device,
    batch_size: int,
    num_workers: int,
    on_batch: Callable[[], None] | None = None,
) -> Iterator[Any]:
    """Yields this rank's share of the images: (imgs [B, C, H, W] as stored, labels int64 [B]), on the CPU.

    indices: the images, of which rank r of W takes r, r + W, r + 2 W, ... in this order. forward: what the caller runs
    once per batch. If `model` is sharded, all ranks must run it equally often, so blank images are added at the end.
    on_batch: called before each batch.
    """
    rank, world_size = collectives.rank_and_world_size()
    places = every_image_once(len(indices), batch_size, rank, world_size)
    addresses = [[(0, int(indices[i])) for _, i in batch] for batch in places]
    (height, width), pixels = dataset.transform.size, dataset.images.pixel_format
    pin_memory = device.type == "cuda"
    stored = pixels.pixel_bytes * height * width * batch_size
    loaded = batches(dataset, addresses, stack, num_workers, pin_memory, batch_bytes=stored)
    bar = tqdm(loaded, total=len(addresses), unit="batch", leave=False, disable=rank != 0 or not sys.stderr.isatty())

    def stream() -> Iterator[Any]:
        for batch in bar:
            if on_batch is not None:
                on_batch()
            yield batch

    if not shard.is_sharded(model):
        return stream()
    most = len(every_image_once(len(indices), batch_size, 0, world_size))  # rank 0 has the most
    blank = torch.zeros(1, pixels.channels, height, width, device=device)
    return shard.pad_forward_passes(stream(), most, forward, blank, autocast)


# ------------------------------------------------------------------------------------------------ evaluation of a run


class Evaluation(NamedTuple):
    """The result of one evaluation."""

    scores: dict[str, float]  # for the log and the results file
    details: Mapping[str, Any] = {}  # for the results file alone
    picture: np.ndarray | None = None  # uint8 [H, W, 3], of rank 0 alone


@dataclass
class Evaluator:
    """Evaluates a run every `--eval_every` epochs or iterations and at the end of the schedule.

    It writes the scores to the log and to results.json, and keeps the best weights as checkpoint-best.pth.

    evaluate: `evaluate(alive)` returns the Evaluation on all ranks, and calls `alive` now and then for the watchdog.
    describe: returns scores in one line. best_by: the score that the best weights have the highest of; "": none are
    kept. picture_name: of the picture's file in the output folder.
    """

    run: Run
    evaluate: Callable[[Callable[[], None]], Evaluation]
    describe: Callable[[Mapping[str, Any]], str]
    best_by: str = ""
    picture_name: str = ""

    def is_due(self) -> bool:
        """Whether the current step is to be evaluated."""
        step, schedule = self.run.loop.step, self.run.schedule
        every = self.run.args.eval_every * (schedule.steps_per_epoch if schedule.unit == "epoch" else 1)
        return step > 0 and (step % every == 0 or step == schedule.num_steps)

    def is_done(self) -> bool:
        """Whether log and results.json hold the evaluation of the current step, and its weights are there if best."""
        step, results = self.run.loop.step, self.results()
        in_log = any(report["step"] == step for report in self.evaluations())
        best = checkpoint.read_record(self.run.output_dir / "checkpoint-best.pth") or {}
        has_best = results.get("best", {}).get("step") != step or best.get("step") == step
        return in_log and results.get("last", {}).get("step") == step and has_best

    def perform(self) -> None:
        """Evaluates the current weights, and writes what was found to the output folder and to the log."""
        run, loop = self.run, self.run.loop
        collectives.broadcast_buffers(run.model)
        result = self.evaluate(run.alive)
        self.save_best(result)
        if not run.process.is_main:
            return
        self.write_picture(result.picture)
        last: dict[str, Any] = {"step": loop.step, "epoch": (loop.step - 1) // loop.steps_per_epoch}
        last |= {f"val_{name}": value for name, value in result.scores.items()}
        content: dict[str, Any] = {"last": last}
        if self.best_by:
            earlier = [report for report in self.evaluations() if report["step"] < loop.step]
            content["best"] = max([*earlier, last], key=lambda report: report[f"val_{self.best_by}"])
        content |= {
            "details": result.details,
            "encoder": run.encoder,
            "code": run.record.origin["code"],
        }
        try:
            write_json(run.output_dir / RESULTS, content)
        except OSError as error:
            run.note(f"warning: {RESULTS} could not be written ({error}); the same command writes it again")
        # The log comes last: an evaluation that is not in the log is repeated after a kill.
        line = self.describe(result.scores)
        scalars = {name: value for name, value in last.items() if name != "step"}
        loop.log.report(loop.step, scalars, f"after {self.when(last)}: {line}", line)

    def save_best(self, result: Evaluation) -> None:
        """Saves the weights as checkpoint-best.pth if they are better than those of earlier steps."""
        run, saver = self.run, self.run.saver
        if not self.best_by or not collectives.run_on_rank0(lambda: result.scores[self.best_by] > self.best_before()):
            return
        saver.write("best", {"model": run.model.state_dict()}, {**run.record.meta(run.loop.step), "val": result.scores})

    def best_before(self) -> float:
        """Returns the score of the best weights so far, of an earlier step than the current one."""
        self.run.saver.join()  # they may be written just now
        meta = checkpoint.read_record(self.run.output_dir / "checkpoint-best.pth")
        return meta["val"][self.best_by] if meta and meta["step"] < self.run.loop.step else -1.0

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
        return f"epoch {report['epoch']}" if self.run.schedule.unit == "epoch" else f"iteration {report['step']}"

    def summary(self, what: str) -> list[str]:
        """Returns what the run did, from its results, so that a finished run can say it again. what: the model."""
        lines, results = [f"trained {what} {self.run.progress()}"], self.results()
        for name in ("last", "best"):
            if name in results:
                scores = {key.removeprefix("val_"): value for key, value in results[name].items()}
                lines.append(f"  {name:<11}  {self.when(results[name])}: {self.describe(scores)}")
        picture = self.run.output_dir / self.picture_name
        if self.picture_name and self.run.args.num_pictures and picture.exists():
            lines.append(f"  pictures     {picture}")
        return lines


# ---------------------------------------------------------------------------------------- programs that only evaluate


class Session(NamedTuple):
    """One process of a program that evaluates without training."""

    process: distributed.Process
    output_dir: Path | None

    def print(self, *lines: str) -> None:
        """Prints lines on rank 0."""
        for line in lines if self.process.is_main else ():
            print(line, flush=True)

    def finish(self, result: Evaluation, line: str, origin: Mapping[str, Any], picture_name: str = "") -> None:
        """Prints scores in one line, and writes them and the picture to the output folder.

        origin: "step" and "checkpoint" of the weights, for results.json.
        """
        self.print(line)
        if self.output_dir is None or not self.process.is_main:
            return
        last = {"step": origin["step"], **{f"val_{name}": value for name, value in result.scores.items()}}
        content = {"last": last, "details": result.details, "checkpoint": origin["checkpoint"], "code": code_version()}
        write_json(self.output_dir / RESULTS, content)
        self.print(f"all scores: {self.output_dir / RESULTS}")
        if result.picture is not None:
            save(result.picture, self.output_dir / picture_name)
            self.print(f"pictures: {self.output_dir / picture_name}")


@contextmanager
def evaluation_session(
    parser: Parser,
    args: argparse.Namespace,
    output_dir: str | Path | None,
    check: Callable[[argparse.Namespace], None] | None = None,
) -> Iterator[Session]:
    """Joins the processes, and takes the output folder if there is one. Errors of the user end the program.

    check: refuses flags before the folder is touched.
    """
    lock = None
    with exit_on_setup_errors(parser) as created:
        # The other ranks wait while rank 0 counts up to four million files.
        process = distributed.init_process(args.device, timeout_minutes=240)
        if check is not None:
            check(args)
        refuse_different_starts(parser, args)
        try:
            if output_dir is not None:
                output_dir, lock = lock_folder(output_dir, created)
            yield Session(process, output_dir)
        finally:
            if lock is not None:
                lock.file.close()
        distributed.shut_down()


@contextmanager
def session_of_eval(parser: Parser, args: argparse.Namespace, given: set[str], origins: str) -> Iterator[Session]:
    """The session of `--eval` of a training program, whose output folder is used only if it is named.

    given: names of the flags that were set explicitly. origins: whose models can be evaluated, for messages.
    """
    if args.resume in ("auto", "none"):
        parser.error(f"--eval needs --resume: a checkpoint of {origins}, or a run's folder")
    if "output_dir" in given and (Path(args.output_dir) / "settings.json").exists():
        parser.error(f"--output_dir {args.output_dir} holds a run, whose results --eval would replace: choose another")
    with evaluation_session(parser, args, args.output_dir if "output_dir" in given else None) as session:
        yield session


class ResultsFile:
    """The results of a program in parts, of which each is saved once it is finished. All ranks hold the same.

    what: what the results depend on, {"checkpoint", "sha256", "settings"}. summarise: returns further entries of the
    file, which follow from the parts. sources: {part: its data}, for parts whose data may change. ValueError if the
    file holds results of something else.
    """

    def __init__(
        self,
        path: Path,
        what: Mapping[str, Any],
        summarise: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        sources: Mapping[str, str] = {},
    ) -> None:
        self.path, self.what, self.summarise = path, json.loads(json.dumps(what)), summarise
        self.parts: dict[str, Any] = collectives.run_on_rank0(lambda: self._read(sources))

    @property
    def content(self) -> dict[str, Any]:
        """What the file holds."""
        return {**self.what, "code": code_version(), **self.summarise(self.parts), "parts": self.parts}

    def missing(self, names: Collection[str]) -> list[str]:
        """Returns those of the parts that are not there yet, and says on rank 0 which are."""
        there = [name for name in names if name in self.parts]
        if there and collectives.rank_and_world_size()[0] == 0:
            print(f"{self.path} already holds {len(there)} of {count_of(len(names), 'part')}: {shorten(there, 5)}")
        return [name for name in names if name not in there]

    def add(self, name: str, result: Any) -> None:
        """Adds a finished part, and rank 0 writes the file."""
        self.parts[name] = result
        if collectives.rank_and_world_size()[0] == 0:
            write_json(self.path, self.content)
            write_progress(self.path.parent, len(self.parts))

    def _read(self, sources: Mapping[str, str]) -> dict[str, Any]:
        """Returns the parts of an earlier start."""
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text())
            before = {"checkpoint": content["sha256"], **content["settings"]}
            parts = content["parts"]
            before |= {name: parts[name]["source"] for name in sources if name in parts}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{str(self.path)!r} is no result of this program ({error!r}); choose another --output_dir"
            ) from error
        now = {"checkpoint": self.what["sha256"], **self.what["settings"]}
        now |= {name: source for name, source in sources.items() if name in parts}
        odd = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if odd:
            changes = "; ".join(f"{name} was {before.get(name)} and now is {now.get(name)}" for name in odd[:3])
            raise ValueError(
                f"{str(self.path)!r} holds other results ({changes[:400]}); choose another --output_dir, or remove it"
            )
        return parts
