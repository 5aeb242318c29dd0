"""Answers the five questions of docs/study_length.md from a finished table, and draws the gain against the length.

python tools/length_report.py docs/study_length.csv --figure docs/figures/study_length.svg
"""

import csv
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.length_study import ARMS, PASSES, SEEDS
from util.plots import pyplot
from util.run.cli import Parser
from util.tables import markdown_table

LEVEL = 0.05  # of the five questions together
MARGIN = 0.5  # points of fine-tuned accuracy
OUTCOMES = {"finetuned": "fine-tuned", "frozen": "frozen", "last_block": "last block"}
Table = dict[tuple[str, int, int], dict[str, float]]  # {(arm, passes, seed): accuracies in percent}


@dataclass
class Answer:
    """A question and its answer. p: None if an arm has diverged."""

    question: str
    differences: np.ndarray  # one per seed
    is_level: bool = False  # asks whether the mean lies within the margin
    p: float = 1.0
    alpha: float = LEVEL  # the level of Holm's procedure at which it was tested
    rejected: bool = False

    @property
    def mean(self) -> float:
        return float(self.differences.mean())

    @property
    def standard_error(self) -> float:
        return float(self.differences.std(ddof=1) / math.sqrt(len(self.differences)))

    def interval(self) -> tuple[float, float]:
        """The interval that belongs to the test: of 1 - alpha, or of 1 - 2 alpha for two one-sided tests."""
        tail = self.alpha if self.is_level else self.alpha / 2
        width = stats.t.ppf(1 - tail, len(self.differences) - 1) * self.standard_error
        return self.mean - width, self.mean + width


def read_table(path: Path) -> Table:
    """Reads the rows. ValueError unless each arm, length and seed has exactly one row, which finished or diverged."""
    table: Table = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            key = (row["arm"], int(row["passes"]), int(row["seed"]))
            if key in table:
                raise ValueError(f"{path} holds two rows of {key}")
            accuracies = {}
            for name in ("knn", "ridge", "finetuned", "last_block"):
                accuracies[name] = float(row[name]) if row[name] else math.nan
            measured = dict(accuracies)
            if key[1] != max(PASSES):
                del measured["last_block"]
            if row["status"] == "finished" and not all(map(math.isfinite, measured.values())):
                raise ValueError(f"{path}: the row of {key} has finished without all accuracies")
            accuracies["frozen"] = (accuracies["knn"] + accuracies["ridge"]) / 2
            table[key] = accuracies
    planned = set(itertools.product(ARMS, PASSES, SEEDS))
    if set(table) != planned:
        raise ValueError(
            f"{path} is not finished: {len(planned - set(table))} of {len(planned)} rows are missing, "
            f"{len(set(table) - planned)} were not planned"
        )
    return table


def difference(table: Table, arm: str, baseline: str, passes: int, outcome: str) -> np.ndarray:
    """The differences arm - baseline of an outcome, one per seed, in points."""
    return np.array([table[arm, passes, seed][outcome] - table[baseline, passes, seed][outcome] for seed in SEEDS])


def lengths_of(outcome: str) -> tuple[int, ...]:
    """The lengths at which an outcome is measured."""
    return PASSES if outcome != "last_block" else (max(PASSES),)


def slope(table: Table) -> np.ndarray:
    """Per seed, the slope of the frozen gain progressive - plain over the logarithm of the length, per doubling."""
    doublings = np.log2(PASSES)
    centred = doublings - doublings.mean()
    gains = np.stack([difference(table, "progressive50", "plain50", n, "frozen") for n in PASSES])  # [lengths, seeds]
    return centred @ gains / (centred @ centred)


def ask(table: Table) -> list[Answer]:
    """The five registered questions, with their p-values and Holm's decisions."""
    longest = max(PASSES)
    sampling = []
    for passes in PASSES:
        for outcome in ("finetuned", "frozen"):
            sampling.append(difference(table, "prmim50", "progressive50", passes, outcome))
    answers = [
        Answer("1 plain − MAE, fine-tuned", difference(table, "plain50", "mae", longest, "finetuned")),
        Answer(
            "2 progressive − plain, fine-tuned", difference(table, "progressive50", "plain50", longest, "finetuned")
        ),
        Answer("3 PR-MIM − MAE, fine-tuned, level", difference(table, "prmim50", "mae", longest, "finetuned"), True),
        Answer("4 slope of progressive − plain, frozen", slope(table)),
        Answer("5 PR-MIM − progressive, all lengths", np.mean(sampling, axis=0)),
    ]
    for answer in answers:
        answer.p = p_value(answer)
    holm(answers)
    return answers


def p_value(answer: Answer) -> float:
    """Two-sided paired t test against 0, or the larger of two one-sided ones against the margins. 1 if diverged."""
    if not np.isfinite(answer.differences).all():
        return 1.0
    degrees = len(answer.differences) - 1
    if answer.is_level:
        below = stats.t.sf((answer.mean + MARGIN) / answer.standard_error, degrees)
        above = stats.t.cdf((answer.mean - MARGIN) / answer.standard_error, degrees)
        return float(max(below, above))
    return float(2 * stats.t.sf(abs(answer.mean) / answer.standard_error, degrees))


def holm(answers: list[Answer]) -> None:
    """Sets the level and the decision of each answer. The first p-value above its bound ends the procedure."""
    goes_on = True
    for position, answer in enumerate(sorted(answers, key=lambda answer: answer.p)):
        if goes_on:
            alpha = LEVEL / (len(answers) - position)
        goes_on = goes_on and answer.p <= alpha
        answer.alpha = alpha
        answer.rejected = goes_on


def report(table: Table) -> str:
    """The answers and the means of all arms, as Markdown."""
    rows = []
    for answer in ask(table):
        low, high = answer.interval()
        deviation = answer.differences.std(ddof=1)
        interval = f"{low:+.2f} to {high:+.2f} ({100 * (1 - answer.alpha):.4g} %)"
        decision = "answered" if answer.rejected else "undecided"
        rows.append([answer.question, f"{answer.mean:+.2f}", interval, f"{deviation:.2f}", f"{answer.p:.2g}", decision])
    answers = markdown_table(["question", "difference", "interval (level)", "deviation", "p", "Holm"], rows)
    rows = []
    for outcome, title in OUTCOMES.items():
        for passes in lengths_of(outcome):
            cells = []
            for arm in ARMS:
                values = np.array([table[arm, passes, seed][outcome] for seed in SEEDS])
                cells.append(f"{values.mean():.2f} ± {values.std(ddof=1) / math.sqrt(len(SEEDS)):.2f}")
            rows.append([title, str(passes), *cells])
    return f"{answers}\n\n{markdown_table(['outcome', 'passes', *ARMS], rows)}\n"


def draw(table: Table, path: Path) -> None:
    """Draws the differences against the length: one panel per outcome, means with 95 % intervals, points per seed."""
    plt = pyplot("the figure")
    pairs = [("plain50", "mae"), ("progressive50", "plain50"), ("prmim50", "mae")]
    names = {"mae": "MAE", "plain50": "plain", "progressive50": "progressive", "prmim50": "PR-MIM"}
    figure, panels = plt.subplots(1, len(OUTCOMES), figsize=(9, 3.2), sharey=True)
    for panel, (outcome, title) in zip(panels, OUTCOMES.items(), strict=True):
        for number, (arm, baseline) in enumerate(pairs):
            lengths = lengths_of(outcome)
            gains = np.stack([difference(table, arm, baseline, passes, outcome) for passes in lengths])
            means = gains.mean(axis=1)
            half = stats.t.ppf(0.975, len(SEEDS) - 1) * gains.std(axis=1, ddof=1) / math.sqrt(len(SEEDS))
            shifted = np.array(lengths) * 2 ** (0.12 * (number - 1))
            label = f"{names[arm]} − {names[baseline]}"
            panel.errorbar(shifted, means, half, marker="o", capsize=2, color=f"C{number}", label=label)
            panel.plot(shifted, gains, ".", color=f"C{number}", alpha=0.25)
        panel.axhline(0, color="black", linewidth=0.7)
        panel.set_xscale("log", base=2)
        panel.set_xticks(PASSES, [str(passes) for passes in PASSES])
        panel.set_xlabel("passes over 50,000 images")
        panel.set_title(title)
    panels[0].set_ylabel("difference of top-1, points")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    parser = Parser("length_report.py", description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args(argv)
    try:
        table = read_table(args.csv)
    except ValueError as error:
        parser.error(str(error))
    print(report(table))
    if args.figure:
        draw(table, args.figure)


if __name__ == "__main__":
    main()
