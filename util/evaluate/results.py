"""Results of evaluations, and the files that hold them.

A results file is JSON that is replaced in one step. A run overwrites results.json at each evaluation. The file of a
program with many parts grows by each finished part, and the same command continues after the last of them.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from util import collectives
from util.code_version import code_version
from util.collectives import print_on_rank0
from util.pictures import save
from util.run.cli import Parser
from util.run.files.json_files import read_json, write_json

RESULTS = "results.json"


def accuracies(top1: float, top5: float, num_classes: int) -> dict[str, float]:
    """Returns {"top1", "top5"}. With five classes or fewer every answer is in the top 5: it is left out."""
    if num_classes <= 5:
        return {"top1": top1}
    return {"top1": top1, "top5": top5}


def accuracy_text(scores: Mapping[str, float], prefix: str = "", digits: int = 2) -> str:
    """Returns, for example, "top-1 81.50 %, top-5 95.25 %". prefix: of the names in `scores`."""
    text = f"top-1 {scores[f'{prefix}top1']:.{digits}f} %"
    if f"{prefix}top5" in scores:
        text += f", top-5 {scores[f'{prefix}top5']:.{digits}f} %"
    return text


class Evaluation(NamedTuple):
    """The result of one evaluation."""

    scores: dict[str, float]  # for the log and the results file
    details: Mapping[str, Any] = {}  # for the results file alone
    picture: np.ndarray | None = None  # uint8 [H, W, 3]; rank 0 writes its own


def write_results(folder: Path, last: Mapping[str, Any], details: Mapping[str, Any], **facts: Any) -> None:
    """Writes results.json. last: {"step", "val_top1", ...} of the newest evaluation. facts: more, such as the best."""
    write_json(folder / RESULTS, {"last": last, **facts, "details": details, "code": code_version()})


def finish_evaluation(
    result: Evaluation, line: str, folder: Path | None, checkpoint: str, step: int | None, picture_name: str = ""
) -> None:
    """Prints the scores of a program that does not train, and writes them and the picture to its folder, if any.

    line: the scores. checkpoint, step: of the weights.
    """
    print_on_rank0(line)
    rank, _ = collectives.rank_and_world_size()
    if folder is None or rank > 0:
        return
    write_results(folder, {"step": step, **named_scores(result.scores)}, result.details, checkpoint=checkpoint)
    print_on_rank0(f"all scores: {folder / RESULTS}")
    if result.picture is not None:
        save(result.picture, folder / picture_name)
        print_on_rank0(f"pictures: {folder / picture_name}")


def named_scores(scores: Mapping[str, Any]) -> dict[str, float]:
    """Returns the scores under their names in the log: val_top1, ..."""
    return {f"val_{name}": value for name, value in scores.items()}


def folder_of_eval(parser: Parser, args: argparse.Namespace, origins: str) -> str | None:
    """Returns the output folder of `--eval` of a training program, which is used only if the command names it.

    Ends the program if the flags do not go with --eval. origins: whose models can be evaluated, for messages.
    """
    if args.resume in ("auto", "none"):
        parser.error(f"--eval needs --resume: a checkpoint of {origins}, or a run's folder")
    if args.check_data:
        parser.error("--check_data checks a training: leave out --eval")
    if "output_dir" not in parser.given:
        return None
    if (Path(args.output_dir) / "settings.json").exists():
        parser.error(f"--output_dir {args.output_dir} holds a run, whose results --eval would replace: choose another")
    before = read_json(Path(args.output_dir) / RESULTS)
    if before and before.get("checkpoint") != args.resume:
        parser.error(f"--output_dir {args.output_dir} holds results of {before.get('checkpoint')}: choose another")
    return args.output_dir


class ResultsFile:
    """The results of a program in parts, of which each is saved once it is finished. All ranks hold the same.

    checkpoint, sha256: path and hash of the weights. settings: what else the results depend on. summarise: returns
    further entries of the file, which follow from the parts. ValueError if the file holds results of another model or
    of other settings.
    """

    def __init__(
        self,
        path: Path,
        checkpoint: str,
        sha256: str,
        settings: Mapping[str, Any],
        summarise: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> None:
        self.path = path
        self.checkpoint = checkpoint
        self.sha256 = sha256
        self.summarise = summarise
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))  # as the file holds them
        self.parts: dict[str, Any] = collectives.run_on_rank0(self._read)

    def add(self, name: str, result: Any) -> None:
        """Adds a finished part, and rank 0 writes the file. All ranks must call it."""
        self.parts[name] = result
        content = {
            "checkpoint": self.checkpoint,
            "sha256": self.sha256,
            "settings": self.settings,
            "code": code_version(),
            **self.summarise(self.parts),
            "parts": self.parts,
        }
        collectives.run_on_rank0(lambda: write_json(self.path, content))

    def _read(self) -> dict[str, Any]:
        """Returns the parts that an earlier start has finished."""
        if not self.path.exists():
            return {}
        content = json.loads(self.path.read_text())
        before = {"checkpoint": content["sha256"], **content["settings"]}
        refuse_changes(self.path, before, {"checkpoint": self.sha256, **self.settings})
        return content["parts"]


def refuse_changes(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ValueError if the settings of the results in a file differ from those of now. It names the first differences."""
    changes = []
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            changes.append(f"{name} was {before.get(name)} and now is {now.get(name)}")
    if changes:
        reasons = "; ".join(changes[:3])[:400]
        raise ValueError(f"{str(path)!r} holds other results ({reasons}); choose another --output_dir")
