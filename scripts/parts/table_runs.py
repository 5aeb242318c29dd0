"""The runs behind the rows of the paper's tables: their folders below ROOT, and how far they are.

    ROOT/<recipe>                                         pre-training
    ROOT/<recipe>/<fine-tuning recipe>                    fine-tuning, or a downstream task
    ROOT/<recipe>/<fine-tuning recipe>/robustness         evaluation on other test sets

`scripts/reproduce_table.py` starts the runs and writes the tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.parts.paper_tables import Row, Table
from util.run import checkpoint
from util.run.folder import read_json
from util.text import count_of

# Measures of `paper_tables` that the results.json of a downstream program holds, and the program.
DOWNSTREAM = dict.fromkeys(("miou", "macc"), "main_segmentation")
DOWNSTREAM |= dict.fromkeys(("box_ap", "mask_ap"), "main_detection")


@dataclass(frozen=True)
class Run:
    """One run of a main. sets: names of the test sets of downstream/robustness/main_robustness.py."""

    main: str
    recipe: str
    folder: Path
    needs: "Run | None" = None
    sets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The folder relative to ROOT."""
        return self.folder.name if self.needs is None else f"{self.needs.name}/{self.folder.name}"

    @property
    def chain(self) -> list["Run"]:
        """The runs from pre-training to this one."""
        return [*(self.needs.chain if self.needs else []), self]


def is_test_set(measure: str) -> bool:
    """Whether a measure of `paper_tables` is a test set of downstream/robustness/main_robustness.py."""
    return measure.startswith("imagenet_")


def runs_of(table: Table, row: Row, root: Path, sets: Sequence[str]) -> dict[str, Run]:
    """Returns {column: the run that fills it}. sets: test sets of the table of robustness that are used."""
    pretrain = Run("main_pretrain", row.pretrain, root / row.pretrain)
    found = {}
    for column, recipe in row.finetune.items():
        main = DOWNSTREAM.get(table.columns[column], "main_finetune")
        run = Run(main, recipe, pretrain.folder / recipe, pretrain)
        if is_test_set(table.columns[column]):
            run = Run("main_robustness", recipe, run.folder / "robustness", run, tuple(sets))
        found[column] = run
    return found


def epochs_of(run: Run) -> tuple[float, float]:
    """Returns (epochs done, epochs of the schedule) of a training run; (0, 0) if it has saved nothing."""
    for path in reversed(checkpoint.list_checkpoints(run.folder)):
        meta = checkpoint.read_record(path)
        if meta is not None:
            return meta["epoch"], meta["settings"]["epochs"]
    return 0, 0


def is_finished(run: Run) -> bool:
    """Whether a run has reached its end and written its results.

    Fine-tuning runs count as finished even if their checkpoints were deleted.
    """
    if run.main == "main_robustness":
        summary = read_json(run.folder / "robustness.json").get("summary", {})
        return bool(run.sets) and all(name in summary for name in run.sets)
    if run.needs is not None:
        last, settings = read_json(run.folder / "results.json").get("last"), read_json(run.folder / "settings.json")
        if last is None or not settings:
            return False
        if run.main in DOWNSTREAM.values():
            return bool(last["step"] >= settings["num_iters"])
        return bool(last["epoch"] + 1 >= settings["epochs"])
    done, total = epochs_of(run)
    return 0 < total <= done


def progress_of(run: Run) -> str:
    """Returns how far an unfinished run is; "" if it has saved nothing."""
    if run.main == "main_robustness":
        parts = read_json(run.folder / "robustness.json").get("parts", {})
        return f"{run.name}: {count_of(len(parts), 'part')} done" if parts else ""
    done, total = epochs_of(run)
    return f"{run.name}: epoch {done:.4g} of {total:.4g}" if total else ""


def pending(run: Run) -> list[Run]:
    """Returns the runs that are still to be run, in order, until `run` is finished."""
    if is_finished(run):
        return []
    return [*(pending(run.needs) if run.needs else []), run]


def describe_state(runs: Sequence[Run]) -> str:
    """Returns "finished", the progress of the runs that are not, or "" if none of them has saved anything."""
    chain = dict.fromkeys(link for run in runs for link in run.chain)
    finished = [run for run in chain if is_finished(run)]
    if all(run in finished for run in runs):
        return "finished"
    texts = [text for run in chain if run not in finished and (text := progress_of(run))]
    if finished or texts:
        texts.insert(0, f"{len(finished)} of {count_of(len(chain), 'run')} finished")
    return "; ".join(texts)
