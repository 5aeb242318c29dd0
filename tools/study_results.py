"""The numbers of the study's runs: the CSV that holds them, and means and differences over seeds."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from util.atomic import replaced_file
from util.tables import read_csv, write_csv

COLUMNS = [
    "arm",
    "seed",
    "status",
    "top1",
    "loss",
    "mse_masked",
    "mse_retained",
    "mse_thrown",
    "gmac",
    "device",
    "torch",
]
# Columns that the CSVs of earlier studies lack.
ADDED = [
    "top1_each",  # of each fine-tuning, separated by spaces; top1 is their mean
    "knn",
    "ridge",
    "val_loss",  # mean over the fine-tunings
    "cpu_seconds",  # of the process, without those of earlier processes if the run was resumed
    "starts",  # 1: the run was never interrupted, so its CPU seconds are complete
    "threads",
    "finished",  # UTC
    "code",
    "images",  # hash of the images
    "job",  # hash of the run's settings
]
TEXT = ("arm", "status", "device", "torch", "top1_each", "finished", "code", "images", "job")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the CSV `path` by these rows in one step. A crash leaves the old file or the new one."""
    with replaced_file(path, durable=True) as temporary:
        write_csv(temporary, COLUMNS + ADDED, rows)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read a CSV of `write_rows`. Columns that an older one lacks are empty. Raises ValueError if it is none."""
    empty: dict[str, Any] = {column: "" if column in TEXT else None for column in ADDED}
    rows: list[dict[str, Any]] = [empty | row for row in read_csv(path, COLUMNS, TEXT)]
    return [row | {"seed": int(row["seed"])} for row in rows]


def mean_se(values: Sequence[float]) -> tuple[Any, float | None, int]:
    """Return (mean, standard error of the mean, n). The error needs two values, the mean one; otherwise it is None."""
    n = len(values)
    return (statistics.fmean(values) if n else None), (statistics.stdev(values) / n**0.5 if n > 1 else None), n


class Results:
    """The numbers of the finished runs, by arm and seed."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.rows = {(row["arm"], row["seed"]): row for row in rows}
        self.arms = {arm for arm, _ in self.rows}

    def values(self, arm: str, metric: str) -> dict[float, float]:
        """{seed: value} of the runs that have one."""
        return {s: row[metric] for (a, s), row in sorted(self.rows.items()) if a == arm and row[metric] is not None}

    def effect(self, pairs: Iterable[tuple[str, str]], metric: str = "top1", relative: bool = False) -> list[float]:
        """For each seed of all arms the mean difference over several (arm, reference). Only seeds are independent.

        relative: in percent of the reference. Empty if an arm diverged: the mean of its other seeds would be too good.
        """
        pairs = list(pairs)
        if any(self.diverged(arm) for pair in pairs for arm in pair):
            return []
        values = [(self.values(a, metric), self.values(b, metric)) for a, b in pairs]
        seeds = sorted(set.intersection(*[a.keys() & b.keys() for a, b in values]))
        if relative:
            return [statistics.fmean(100 * (a[seed] / b[seed] - 1) for a, b in values) for seed in seeds]
        return [statistics.fmean(a[seed] - b[seed] for a, b in values) for seed in seeds]

    def diverged(self, arm: str) -> list[float]:
        """The seeds with which the arm diverged."""
        return [seed for (a, seed), row in self.rows.items() if a == arm and row["status"] == "diverged"]

    def cost(self, arm: str) -> float | None:
        """Multiply-adds relative to MAE's, or None if one of them is unknown."""
        ours, mae = (next(iter(self.values(a, "gmac").values()), None) for a in (arm, "mae"))
        return ours / mae if ours and mae else None

    def cost_text(self, arm: str, digits: int = 2) -> str:
        """The cell of an arm's multiply-adds relative to MAE's."""
        ratio = self.cost(arm)
        return "–" if ratio is None else f"{ratio:.{digits}f}×"


def spread(values: Sequence[float], sign: bool = False) -> str:
    """Mean, standard error and number of the values, such as "47.10 ± 0.31 (3)"."""
    mean, error, n = mean_se(values)
    if n == 0:
        return "–"
    text = f"{mean:+.2f}" if sign else f"{mean:.2f}"
    return f"{text} ({n})" if error is None else f"{text} ± {error:.2f} ({n})"
