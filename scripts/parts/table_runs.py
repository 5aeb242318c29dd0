"""The runs behind the rows of the paper's tables: their folders below ROOT, whether they are finished, their results.

    ROOT/<recipe>                                         pre-training
    ROOT/<recipe>/<fine-tuning recipe>                    fine-tuning, or a downstream task
    ROOT/<recipe>/<fine-tuning recipe>/robustness         evaluation on other test sets

`scripts/reproduce_table.py` starts the runs and writes the tables.
"""

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit_launch
from downstream.recipes import DOWNSTREAM_RECIPES
from recipes import FINETUNE_RECIPES, RECIPES
from util.pos_embed import height_and_width
from util.run.files import search
from util.run.files.reports import read_json

RECIPES_OF: dict[str, Any] = {"main_pretrain": RECIPES, "main_finetune": FINETUNE_RECIPES, **DOWNSTREAM_RECIPES}
# Measures of `paper_tables` that the results.json of a downstream program holds, and the program.
DOWNSTREAM = {
    "miou": "main_segmentation",
    "macc": "main_segmentation",
    "box_ap": "main_detection",
    "mask_ap": "main_detection",
}


@dataclass(frozen=True)
class Run:
    """One run of a main. It needs the weights of the run `needs`."""

    main: str
    recipe: str
    folder: Path
    needs: "Run | None" = None

    @property
    def name(self) -> str:
        """The folder relative to ROOT."""
        if self.needs is None:
            return self.folder.name
        return f"{self.needs.name}/{self.folder.name}"

    @property
    def is_finished(self) -> bool:
        """Whether all epochs are done and evaluated. Results count without the checkpoints, which may be deleted."""
        if self.main == "main_robustness":
            return False  # which test sets are asked for is not known here
        if self.main == "main_pretrain":
            paths = search.list_checkpoints(self.folder)
            if not paths:
                return False
            info = search.read_sidecar(paths[-1])
            return info is not None and info.is_finished
        settings = read_json(self.folder / "settings.json")
        last = read_json(self.folder / "results.json").get("last")
        if last is None or not settings:
            return False
        if self.main in DOWNSTREAM.values():
            return bool(last["step"] >= settings["num_iters"])
        return bool(last["epoch"] + 1 >= settings["epochs"])

    def pending(self) -> list["Run"]:
        """The runs that are still to be started, in order, until this one is finished."""
        if self.is_finished:
            return []
        if self.needs is None:
            return [self]
        return [*self.needs.pending(), self]

    def chain(self) -> list["Run"]:
        """This run, and those whose weights it has needed."""
        if self.needs is None:
            return [self]
        return [self, *self.needs.chain()]

    def result(self, measure: str) -> float | None:
        """The measured number of a finished run."""
        if self.main == "main_robustness":
            figures = read_json(self.folder / "robustness.json").get("summary", {}).get(measure, {})
            return figures.get("mce", figures.get("top1"))
        if not self.is_finished:
            return None
        return float(read_json(self.folder / "results.json")["last"][f"val_{measure}"])

    def changed_settings(self, flags: Sequence[str] = ()) -> list[str]:
        """A line for each setting with which the run's results differ from those of its recipe with `flags`."""
        recipes = RECIPES_OF.get(self.main, {})
        settings = read_json(self.folder / "settings.json")
        if self.recipe not in recipes or not settings:
            return []
        main = importlib.import_module(submitit_launch.MAINS[self.main])
        parser, args = main.parse_args(["--recipe", self.recipe, *flags])
        expected = json.loads(json.dumps(vars(args), default=str))
        for sizes in (expected, settings):
            if sizes.get("input_size") is not None:
                sizes["input_size"] = list(height_and_width(sizes["input_size"]))
        lines = []
        for name, value in expected.items():
            is_compared = name in recipes[self.recipe] or parser.changes.get(name) == "results"
            is_derived = value is None or name in ("dataset", "precision")  # from the data, the model or the machine
            if is_compared and not is_derived and settings.get(name, value) != value:
                lines.append(f"{self.name}: {name} {settings[name]} instead of {value}")
        return lines


def run_of(measure: str, pretrain: str, recipe: str, root: Path) -> Run:
    """The run that fills a column of a row. pretrain, recipe: of its pre-training and of its evaluation."""
    pretraining = Run("main_pretrain", pretrain, root / pretrain)
    finetuning = Run(DOWNSTREAM.get(measure, "main_finetune"), recipe, pretraining.folder / recipe, pretraining)
    if measure.startswith("imagenet_"):
        return Run("main_robustness", recipe, finetuning.folder / "robustness", finetuning)
    return finetuning
