"""Answers the questions of docs/study_frozen14.md from its finished table.

    python tools/study_frozen14.py docs/study_frozen14.csv --figure docs/figures/study_frozen14.svg

It refuses a table that lacks a run, so nobody sees an answer before the end.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from tools.study_results import read_rows, spread
from util.plots import pyplot
from util.run.cli import Parser, run_program, user_errors
from util.tables import markdown_table

SEEDS = range(400, 418)
FINETUNED = range(400, 404)
LEVEL = 0.3  # points
ALPHA = 0.05
ARMS = ("mae", "plain50", "plain65", "progressive50", "progressive65", "prmim50", "prmim65")
QUESTIONS = (  # name, method, what is subtracted
    ("1 plain − MAE", "plain", "mae"),
    ("2 progressive − plain", "progressive", "plain"),
    ("3 PR-MIM − plain", "prmim", "plain"),
    ("4 PR-MIM − MAE, level within ±0.3", "prmim", "mae"),
    ("5 PR-MIM − progressive", "prmim", "progressive"),
)
EXPECTED = (-1, 1, 1, 0, 1)  # sign of the difference that is a yes; 0: level
OUTCOMES = {"kNN": ("knn", 1), "ridge": ("ridge", 1), "masked error, 10⁻³": ("mse_masked", 1000), "top-1": ("top1", 1)}

Table = Mapping[tuple[str, int], Mapping[str, Any]]


@dataclass(frozen=True)
class Answer:
    """d: mean difference in points. alpha: the level at which Holm tested it. low, high: of its interval."""

    d: float
    deviation: float
    p: float
    alpha: float
    low: float
    high: float
    verdict: str


def read(path: str | Path) -> Table:
    """Returns {(arm, seed): row}. ValueError unless each run is there exactly once, and nothing else."""
    rows = read_rows(path)
    table = {(row["arm"], row["seed"]): row for row in rows}
    wanted = {(arm, seed) for arm in ARMS for seed in SEEDS}
    if table.keys() != wanted or len(rows) != len(wanted):
        missing, others = len(wanted - table.keys()), len(table.keys() - wanted)
        raise ValueError(f"{path} has {len(rows)} of {len(wanted)} runs: {missing} missing, {others} not registered")
    return table


def primary(row: Mapping[str, Any]) -> float:
    """The mean of kNN and ridge accuracy, in percent; not finite if the run diverged."""
    values = [row["loss"], row["knn"], row["ridge"]]
    if row["status"] == "diverged" or any(v is None or not math.isfinite(v) for v in values):
        return math.nan
    return (row["knn"] + row["ridge"]) / 2


def difference(table: Table, method: str, reference: str, outcome: Any = primary, seeds: range = SEEDS) -> np.ndarray:
    """Returns for each seed the mean over both ratios of method − reference."""

    def value(arm: str, ratio: int, seed: int) -> float:
        found = outcome(table[arm if arm == "mae" else f"{arm}{ratio}", seed])
        return math.nan if found is None else found

    return np.array([np.mean([value(method, r, s) - value(reference, r, s) for r in (50, 65)]) for s in seeds])


def p_value(d: np.ndarray, expected: int) -> float:
    """Two-sided paired t, or the larger of two one-sided tests against ±LEVEL if `expected` is 0. Diverged: 1."""
    if not np.isfinite(d).all():
        return 1.0
    if expected:
        return float(stats.ttest_1samp(d, 0).pvalue)
    sides = ((-LEVEL, "greater"), (LEVEL, "less"))
    return max(float(stats.ttest_1samp(d, bound, alternative=side).pvalue) for bound, side in sides)


def holm(p_values: Sequence[float]) -> list[tuple[bool, float]]:
    """Returns for each p-value whether Holm rejects its hypothesis, and at which level it was tested."""
    results = [(False, 0.0)] * len(p_values)
    level, rejecting = 0.0, True
    for place, index in enumerate(np.argsort(p_values, kind="stable")):
        if rejecting:
            level = ALPHA / (len(p_values) - place)
            rejecting = p_values[index] < level
        results[index] = (rejecting, level)
    return results


def answers(table: Table) -> list[Answer]:
    """Returns the answers of the five questions."""
    differences = [difference(table, method, reference) for _, method, reference in QUESTIONS]
    p_values = [p_value(d, expected) for d, expected in zip(differences, EXPECTED, strict=True)]
    found = []
    for d, p, expected, (rejected, alpha) in zip(differences, p_values, EXPECTED, holm(p_values), strict=True):
        mean, deviation = float(d.mean()), float(d.std(ddof=1))
        half = stats.t.isf(alpha / 2 if expected else alpha, len(d) - 1) * deviation / math.sqrt(len(d))
        yes = "yes" if mean * expected > 0 else "the opposite"
        verdict = "undecided" if not rejected else yes if expected else "level"
        found.append(Answer(mean, deviation, p, alpha, mean - half, mean + half, verdict))
    return found


def questions_table(table: Table) -> str:
    """The registered questions."""
    rows = []
    for (name, *_), a in zip(QUESTIONS, answers(table), strict=True):
        coverage = 100 * (1 - (2 if "level" in name else 1) * a.alpha)
        cells = f"{a.d:+.2f}", f"{a.low:+.2f} to {a.high:+.2f}", f"{coverage:g} %", f"{a.deviation:.2f}"
        rows.append([name, *cells, f"{a.p:.1e}" if a.p < 0.001 else f"{a.p:.3f}", a.verdict])
    return markdown_table(["question", "difference", "interval", "its level", "deviation", "p", "answer"], rows)


def secondary_table(table: Table) -> str:
    """The same differences by the other outcomes: mean ± standard error."""
    rows = []
    for name, method, reference in QUESTIONS:
        cells = []
        for column, scale in OUTCOMES.values():
            seeds = FINETUNED if column == "top1" else SEEDS
            d = difference(table, method, reference, lambda row, c=column: row[c], seeds) * scale
            cells.append(f"{d.mean():+.2f} ± {stats.sem(d):.2f}" if np.isfinite(d).all() else "–")
        rows.append([name.partition(",")[0], *cells])
    return markdown_table(["difference", *OUTCOMES], rows)


def arms_table(table: Table) -> str:
    """Mean ± standard error (number of seeds) of each arm."""
    rows = []
    for arm in ARMS:
        cells = [spread([primary(table[arm, seed]) for seed in SEEDS])]
        for column, scale in OUTCOMES.values():
            values = [table[arm, seed][column] for seed in SEEDS]
            cells.append(spread([scale * v for v in values if v is not None]))
        rows.append([arm, *cells])
    return markdown_table(["arm", "primary", *OUTCOMES], rows)


def plot(table: Table, path: Path) -> None:
    """Plots every seed's difference and the interval of each question."""
    plt: Any = pyplot("study")
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    axes.axvspan(-LEVEL, LEVEL, color="#dddddd", zorder=0)
    for row, ((_, method, reference), a) in enumerate(zip(QUESTIONS, answers(table), strict=True)):
        d = difference(table, method, reference)
        axes.plot(d, row + 0.22 + 0.012 * (np.arange(len(d)) % 7), "o", ms=3.5, color="#4477aa", alpha=0.6)
        axes.errorbar([a.d], [row], xerr=[a.high - a.d], fmt="s", ms=5, color="#222222", capsize=3)
        text = f"{a.d:+.2f} [{a.low:+.2f}, {a.high:+.2f}] {a.verdict}"
        axes.text(1.01, row, text, transform=axes.get_yaxis_transform(), va="center", fontsize="small")
    axes.axvline(0, color="#222222", lw=0.8, ls=":")
    axes.set_yticks(range(len(QUESTIONS)), [name.partition(",")[0] for name, *_ in QUESTIONS])
    axes.invert_yaxis()
    figure.supxlabel("difference of frozen accuracy, points; dots: seeds; grey: level", fontsize="medium")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables, and draws the figure."""
    parser = Parser("study_frozen14.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="CSV")
    parser.add_argument("--figure", type=Path, help="where to draw the figure")
    args = parser.parse_args(argv)
    with user_errors(parser):
        table = read(args.table)
    print(questions_table(table), secondary_table(table), arms_table(table), sep="\n\n")
    if args.figure:
        plot(table, args.figure)


if __name__ == "__main__":
    run_program(main, "study_frozen14.py")
