"""The pre-registered comparisons of the second study: what is compared, by which interval, and what decides.

docs/study.md registers them. tools/study_report.py writes their table and plots.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.study_results import Results, spread
from util.plots import pyplot
from util.tables import markdown_table
from util.text import count_of

SEEDS = tuple(range(8))
# Student's t: 97.5 % quantiles for 1 to 30 degrees of freedom.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

MEASURES = {"top1": "top-1, points", "knn": "kNN", "ridge": "ridge regression"}
ARMS = {  # {arm of the preset grid14: its name}
    "mae": "MAE",
    "plain50": "plain, ρ_d .50",
    "progressive50": "progressive, ρ_d .50",
    "prmim50": "PR-MIM, ρ_d .50",
    "plain65": "plain, ρ_d .65",
    "progressive65": "progressive, ρ_d .65",
    "prmim65": "PR-MIM, ρ_d .65",
    "prmim50_all": "PR-MIM .50, convolution's output for all cells",
    "prmim50_masknorm": "PR-MIM .50, mask-normalised convolution",
    "prmim50_convnext": "PR-MIM .50, ConvNeXt block",
    "prmim50_gaussian": "PR-MIM .50, Gaussian mean and convolution",
    "prmim50_cell": "PR-MIM .50, running cell instead of furthest sampling",
    "crossmae": "CrossMAE",
    "crossmae_prmim50": "CrossMAE + PR-MIM .50",
    "mae_short": "MAE, 446 of 781 steps",
    "scratch": "no pre-training",
}


@dataclass(frozen=True)
class Comparison:
    """A difference of top-1 that decides a question: the mean over `pairs` of (arm, arm to subtract), seed by seed.

    claim: `lower` or `higher`: the interval lies on this side of 0, and a difference of `bound` would matter.
        `level`: the interval lies inside -+ `bound`. `differs`: the interval excludes 0. `better`: the mean exceeds two
        standard errors.
    primary: whether it is one of the four questions that the study was made for, which are tested in this order.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    claim: str
    bound: float | None = None
    primary: bool = False


def _both(arm: str, reference: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{arm}{r}", reference if reference == "mae" else f"{reference}{r}") for r in (50, 65))


COMPARISONS = (
    Comparison("1. throwing costs: plain − MAE", _both("plain", "mae"), "lower", 0.5, True),
    Comparison("2. recovery: progressive − plain", _both("progressive", "plain"), "higher", 0.5, True),
    Comparison("3. level with MAE: PR-MIM − MAE", _both("prmim", "mae"), "level", 0.6, True),
    Comparison("4. furthest sampling: PR-MIM − progressive", _both("prmim", "progressive"), "higher", 0.3, True),
    Comparison("5. all cells − thrown cells", (("prmim50_all", "prmim50"),), "differs"),
    Comparison("6a. mask-normalised − default", (("prmim50_masknorm", "prmim50"),), "better"),
    Comparison("6b. ConvNeXt block − default", (("prmim50_convnext", "prmim50"),), "better"),
    Comparison("6c. Gaussian mean − default", (("prmim50_gaussian", "prmim50"),), "better"),
    Comparison("7. equal multiply-adds: PR-MIM − MAE", (("prmim50", "mae_short"),), "higher", 0.5),
)
YES = ("confirmed", "level")  # the verdicts that open the next primary question


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean of the values and half the width of its 95 % interval, by Student's t. It needs 2 to 31 values."""
    if not 2 <= len(values) <= len(T_975) + 1:
        raise ValueError(f"an interval needs 2 to {len(T_975) + 1} values, got {len(values)}")
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), T_975[len(values) - 2] * error


def verdict(comparison: Comparison, values: Sequence[float]) -> str:
    """What the differences of all seeds say about the claim."""
    mean, half = interval(values)
    if comparison.claim == "better":
        error = statistics.stdev(values) / math.sqrt(len(values))
        return "candidate" if mean > 2 * error else "default stays"
    low, high = mean - half, mean + half
    if comparison.claim == "differs":
        return "higher" if low > 0 else "lower" if high < 0 else "undecided"
    assert comparison.bound is not None
    if comparison.claim == "level":
        if -comparison.bound < low and high < comparison.bound:
            return "level"
        return "not level" if low > comparison.bound or high < -comparison.bound else "undecided"
    if comparison.claim == "lower":
        low, high = -high, -low
    if low > 0:
        return "confirmed" if high >= comparison.bound else "too small to matter"
    return "refuted" if high < comparison.bound else "undecided"


def registered(results: Results) -> Results:
    """The runs with the registered seeds."""
    return Results(row for row in results.rows.values() if row["seed"] in SEEDS)


def differences(results: Results, comparison: Comparison, measure: str = "top1") -> list[float]:
    """The differences of the seeds that all arms have. None if an arm diverged: the other seeds would be too good."""
    if any(results.diverged(arm) for pair in comparison.pairs for arm in pair):
        return []
    return results.effect(comparison.pairs, measure)


def with_interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval of differences, such as "-0.51 [-0.93, -0.09] (8)"."""
    if len(values) < 2:
        return spread(values, sign=True)
    mean, half = interval(values)
    return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}] ({len(values)})"


def comparisons_table(results: Results) -> str:
    """All comparisons. A verdict is given when all registered seeds are there.

    After the first primary question without a yes, the verdicts of the later ones are exploratory.
    """
    titles = ["comparison", *MEASURES.values(), "minimum", "verdict"]
    rows, is_open = [], True
    for comparison in COMPARISONS:
        cells = [with_interval(differences(results, comparison, measure)) for measure in MEASURES]
        values = differences(results, comparison)
        diverged = any(results.diverged(arm) for pair in comparison.pairs for arm in pair)
        said = f"{len(values)} of {len(SEEDS)} seeds"
        if diverged:
            said = "none: an arm diverged"
        elif len(values) == len(SEEDS):
            said = verdict(comparison, values)
        name, bound = comparison.name, "–" if comparison.bound is None else f"{comparison.bound:g}"
        if comparison.primary:
            name, is_yes = f"**{name}**", said in YES
            said += "" if is_open else " (exploratory)"
            is_open = is_open and is_yes
        rows.append([name, *cells, bound, said])
    return markdown_table(titles, rows)


def arms_table(results: Results, names: dict[str, str]) -> str:
    """What each arm has measured. names: of the arms."""
    columns = {"top-1, %": ("top1", 1), "kNN, %": ("knn", 1), "ridge regression, %": ("ridge", 1)}
    columns |= {"validation loss, 10⁻²": ("val_loss", 100), "masked error, 10⁻³": ("mse_masked", 1000)}
    titles = ["arm", *columns, "multiply-adds per image", "diverged"]
    rows = []
    for arm, name in names.items():
        if arm in results.arms:
            measured = [
                [scale * x for x in results.values(arm, measure).values()] for measure, scale in columns.values()
            ]
            ratio = results.cost(arm)
            cost = "–" if ratio is None else f"{ratio:.3f}×"
            diverged = ", ".join(map(str, results.diverged(arm))) or "–"
            rows.append([name, *map(spread, measured), cost, diverged])
    return markdown_table(titles, rows)


def noise_of_finetuning(results: Results) -> float | None:
    """Standard deviation of top-1 between fine-tunings of one encoder, pooled over all runs with more than one."""
    runs = [[float(x) for x in row["top1_each"].split()] for row in results.rows.values()]
    runs = [values for values in runs if len(values) > 1]
    if not runs:
        return None
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in runs)
    return math.sqrt(squares / sum(len(values) - 1 for values in runs))


DotRow = tuple[str, Sequence[float], Sequence[float], str]  # label, values, places of red marks, color


def dot_plot(rows: Sequence[DotRow], path: Path, title: str) -> None:
    """Plot the mean of each row's values with its 95 % interval, one below the other."""
    plt: Any = pyplot("study")
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.36 * len(rows)), layout="constrained")
    for row, (_, values, marks, color) in enumerate(rows):
        axes.plot(marks, [row] * len(marks), "|", color="#cc3311", ms=12, mew=1.6)
        if len(values) > 1:
            mean, half = interval(values)
            axes.errorbar([mean], [row], xerr=[half], fmt="s", ms=5, color=color, capsize=3)
    axes.axvline(0, color="#222222", lw=0.8, ls=":")
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.invert_yaxis()
    figure.supxlabel(title, fontsize="medium")  # under the labels of the rows, too
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def plot_comparisons(results: Results, path: Path) -> None:
    """Plot the differences of the registered comparisons, and what would matter."""
    rows = []
    for comparison in COMPARISONS:
        sides = {"lower": (-1,), "higher": (1,)}.get(comparison.claim, (-1, 1))
        marks = [] if comparison.bound is None else [side * comparison.bound for side in sides]
        color = "#222222" if comparison.primary else "#4477aa"
        rows.append((comparison.name, differences(registered(results), comparison), marks, color))
    dot_plot(rows, path, "difference of top-1, points; red: what would matter")


def plot_arms(results: Results, path: Path) -> None:
    """Plot what each arm gains over MAE, with its multiply-adds."""
    rows: list[DotRow] = []
    for arm, name in ARMS.items():
        if arm != "mae":
            values = differences(registered(results), Comparison(name, ((arm, "mae"),), "differs"))
            cost = results.cost(arm)
            rows.append((name if cost is None else f"{name}: {cost:.2f}×", values, [], "#222222"))
    dot_plot(rows, path, "top-1 − MAE's, points; ×: multiply-adds relative to MAE")


def section(results: Results) -> str:
    """The Markdown of the results of the preset grid14."""
    chosen = registered(results)
    parts = [
        "#### Comparisons",
        comparisons_table(chosen),
        "![registered comparisons](figures/study_grid14_comparisons.svg)",
    ]
    parts += [
        "#### Arms",
        arms_table(chosen, ARMS),
        "![difference to MAE](figures/study_grid14_arms.svg)",
    ]
    if (noise := noise_of_finetuning(chosen)) is not None:
        parts.append(f"Standard deviation between fine-tunings of one encoder: {noise:.2f} points of top-1.")
    parts.append(f"Made with: {versions(chosen)}.")
    return "\n\n".join(parts)


def versions(results: Results) -> str:
    """Code, PyTorch and images of the runs, and how many runs have them."""
    found = Counter(f"{row['code']}; torch {row['torch']}; images {row['images']}" for row in results.rows.values())
    return ", ".join(f"{version} ({count_of(number, 'run')})" for version, number in found.items())
