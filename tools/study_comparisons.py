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

from tools.study_presets import SEEDS
from tools.study_results import Results, mean_se, spread
from util.plots import pyplot
from util.tables import markdown_table
from util.text import count_of

# Student's t: 97.5 % quantiles for 1 to 7 degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)

MEASURES = {"top1": "top-1, points", "knn": "kNN", "ridge": "ridge regression"}
ARMS = {  # {arm of the preset grid14: its name}
    "mae": "MAE",
    "plain50": "plain, ρ_d .50",
    "progressive50": "progressive, ρ_d .50",
    "prmim50": "PR-MIM, ρ_d .50",
    "plain65": "plain, ρ_d .65",
    "progressive65": "progressive, ρ_d .65",
    "prmim65": "PR-MIM, ρ_d .65",
    "prmim50_all": "PR-MIM .50, all cells",
    "prmim50_masknorm": "PR-MIM .50, mask-normalised",
    "prmim50_convnext": "PR-MIM .50, ConvNeXt block",
    "prmim50_gaussian": "PR-MIM .50, Gaussian mean",
    "prmim50_cell": "PR-MIM .50, running cell",
    "crossmae": "CrossMAE",
    "crossmae_prmim50": "CrossMAE + PR-MIM .50",
    "mae_short": "MAE, 446 of 781 steps",  # the multiply-adds of prmim50
    "scratch": "no pre-training",
}


@dataclass(frozen=True)
class Comparison:
    """A difference of top-1 that decides a question: the mean over `pairs` of (arm, arm to subtract), seed by seed.

    claim: `lower` or `higher`: the interval lies on this side of 0, and a difference of `bound` would matter.
        `level`: the interval lies inside -+ `bound`. `differs`: the interval excludes 0. `better`: the mean exceeds two
        standard errors. None: not registered, so nothing is decided.
    primary: whether it is one of the four questions that the study was made for, which are tested in this order.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    claim: str | None = None
    bound: float | None = None
    primary: bool = False


def _both(arm: str, reference: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{arm}{r}", reference if reference == "mae" else f"{reference}{r}") for r in (50, 65))


COMPARISONS = (
    Comparison("1. throwing costs: plain − MAE", _both("plain", "mae"), "lower", 0.5, True),
    Comparison("2. reconstructing the thrown: progressive − plain", _both("progressive", "plain"), "higher", 0.5, True),
    Comparison("3. level with MAE: PR-MIM − MAE", _both("prmim", "mae"), "level", 0.6, True),
    Comparison("4. furthest sampling: PR-MIM − progressive", _both("prmim", "progressive"), "higher", 0.3, True),
    Comparison("5. all cells − thrown cells", (("prmim50_all", "prmim50"),), "differs"),
    Comparison("6a. mask-normalised − default", (("prmim50_masknorm", "prmim50"),), "better"),
    Comparison("6b. ConvNeXt block − default", (("prmim50_convnext", "prmim50"),), "better"),
    Comparison("6c. Gaussian mean − default", (("prmim50_gaussian", "prmim50"),), "better"),
    Comparison("7. equal multiply-adds: PR-MIM .50 − MAE, 446 steps", (("prmim50", "mae_short"),), "higher", 0.5),
    Comparison("PR-MIM − plain", _both("prmim", "plain")),
    Comparison("equal multiply-adds: plain .50 − MAE, 446 steps", (("plain50", "mae_short"),)),
)
YES = ("confirmed", "level")  # the verdicts that open the next primary question


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean of the values and half the width of its 95 % interval, by Student's t. It needs 2 to 8 values."""
    mean, error, n = mean_se(values)
    if error is None or n > len(T_975) + 1:
        raise ValueError(f"an interval needs 2 to {len(T_975) + 1} values, got {n}")
    return mean, T_975[n - 2] * error


def verdict(comparison: Comparison, values: Sequence[float]) -> str:
    """What the differences of all seeds say about the claim."""
    mean, half = interval(values)
    low, high = mean - half, mean + half
    if comparison.claim is None:
        return "not registered"
    if comparison.claim == "better":
        error = mean_se(values)[1]
        assert error is not None
        return "candidate" if mean > 2 * error else "default stays"
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


def verdicts(results: Results) -> list[str]:
    """The verdict of each comparison, or why it has none. A verdict needs all seeds of arms that did not diverge.

    Of several aggregations that are better, the one with the highest mean is the candidate.
    """
    said: list[str] = []
    candidates: dict[int, float] = {}
    for place, comparison in enumerate(COMPARISONS):
        values = results.effect(comparison.pairs)
        if any(results.diverged(arm) for pair in comparison.pairs for arm in pair):
            said.append("none: an arm diverged")
        elif len(values) < len(SEEDS):
            said.append(f"{len(values)} of {len(SEEDS)} seeds")
        else:
            said.append(verdict(comparison, values))
            if said[-1] == "candidate":
                candidates[place] = statistics.fmean(values)
    for place, mean in candidates.items():
        if mean < max(candidates.values()):
            said[place] = "better, but not the best"
    return said


def exploratory(said: Sequence[str]) -> list[bool]:
    """For each verdict, whether it is exploratory: that of a primary question after the first one without a yes."""
    marks, is_open = [], True
    for comparison, answer in zip(COMPARISONS, said, strict=True):
        is_final = not answer.endswith(" seeds")
        marks.append(comparison.primary and is_final and not is_open)
        if comparison.primary and is_final and answer not in YES:
            is_open = False
    return marks


def recovery(results: Results) -> str:
    """Whether PR-MIM recovers what throwing costs: questions 1 to 3 have a yes, and plain itself is not level."""
    answers = verdicts(results)[:3]
    if any(answer.endswith(" seeds") for answer in answers):
        return "not known yet"
    if any(answer not in YES for answer in answers):
        return "not shown, because one of the questions 1 to 3 has no yes"
    cost, _, level = COMPARISONS[:3]
    plain = verdict(level, results.effect(cost.pairs))
    return "yes" if plain == "not level" else f"not shown, because plain itself is {plain} by the rule of question 3"


def registered(results: Results) -> Results:
    """The runs with the registered seeds."""
    return Results(row for row in results.rows.values() if row["seed"] in SEEDS)


def with_interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval of differences, such as "-0.51 [-0.93, -0.09] (8)"."""
    if len(values) < 2:
        return spread(values, sign=True)
    mean, half = interval(values)
    return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}] ({len(values)})"


def comparisons_table(results: Results) -> str:
    """All comparisons and their verdicts."""
    rows, said = [], verdicts(results)
    for comparison, answer, is_exploratory in zip(COMPARISONS, said, exploratory(said), strict=True):
        cells = [with_interval(results.effect(comparison.pairs, measure)) for measure in MEASURES]
        name = f"**{comparison.name}**" if comparison.primary else comparison.name
        bound = "–" if comparison.bound is None else f"{comparison.bound:g}"
        rows.append([name, *cells, bound, f"{answer} (exploratory)" if is_exploratory else answer])
    return markdown_table(["comparison", *MEASURES.values(), "minimum", "verdict"], rows)


def arms_table(results: Results, names: dict[str, str]) -> str:
    """What each arm has measured. names: of the arms."""
    columns = {"top-1, %": ("top1", 1), "kNN, %": ("knn", 1), "ridge regression, %": ("ridge", 1)}
    columns |= {"validation loss, 10⁻²": ("val_loss", 100), "masked error, 10⁻³": ("mse_masked", 1000)}
    has_mae, any_diverged = "mae" in results.arms, any(map(results.diverged, names))
    titles = ["arm", *columns]
    if has_mae:
        titles += ["top-1 − MAE", "multiply-adds per image"]
    if any_diverged:
        titles.append("diverged")
    rows = []
    for arm, name in names.items():
        if arm in results.arms:
            cells = [spread([scale * x for x in results.values(arm, m).values()]) for m, scale in columns.values()]
            if has_mae:
                cells.append("–" if arm == "mae" else with_interval(results.effect([(arm, "mae")])))
                cells.append(results.cost_text(arm, digits=3))
            if any_diverged:
                cells.append(", ".join(map(str, results.diverged(arm))) or "–")
            rows.append([name, *cells])
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
    """Plot the mean of each row's values with its 95 % interval, one below the other, and print both at the right."""
    plt: Any = pyplot("study")
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.36 * len(rows)), layout="constrained")
    for row, (_, values, marks, color) in enumerate(rows):
        axes.plot(marks, [row] * len(marks), "|", color="#cc3311", ms=12, mew=1.6)
        if len(values) > 1:
            mean, half = interval(values)
            axes.errorbar([mean], [row], xerr=[half], fmt="s", ms=5, color=color, capsize=3)
            text, place = with_interval(values), axes.get_yaxis_transform()  # x in shares of the width, y in rows
            axes.text(1.01, row, text, transform=place, va="center", fontsize="small")
    axes.axvline(0, color="#222222", lw=0.8, ls=":")
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.invert_yaxis()
    figure.supxlabel(title, fontsize="medium")  # under the labels of the rows, too
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def plot_comparisons(results: Results, path: Path) -> None:
    """Plot the differences of all comparisons, and what would matter."""
    rows = []
    for comparison in COMPARISONS:
        sides = {"lower": (-1,), "higher": (1,)}.get(comparison.claim or "", (-1, 1))
        marks = [] if comparison.bound is None else [side * comparison.bound for side in sides]
        color = "#222222" if comparison.primary else "#4477aa" if comparison.claim else "#999999"
        rows.append((comparison.name, registered(results).effect(comparison.pairs), marks, color))
    title = "difference of top-1, points, 95 % interval (right: the first is better); red: what would matter"
    dot_plot(rows, path, title)


def plot_arms(results: Results, path: Path) -> None:
    """Plot what each arm gains over MAE. Without pre-training is left out: it would squeeze all others."""
    rows: list[DotRow] = []
    for arm, name in ARMS.items():
        if arm not in ("mae", "scratch"):
            rows.append((name, registered(results).effect([(arm, "mae")]), [], "#222222"))
    dot_plot(rows, path, "top-1 − MAE's, points, 95 % interval (right: better); no verdicts")


def section(results: Results) -> str:
    """The Markdown of the results of the preset grid14."""
    chosen = registered(results)
    parts = [
        "#### Comparisons",
        "a [b, c] (n): mean of the differences, paired by seed, its 95 % interval, and the number of seeds. Above 0, "
        "the first arm is better. Only top-1 decides. The intervals of kNN and ridge regression are not corrected for "
        "their number. For question 1, the rules apply to MAE − plain. We speak of recovery if questions 1 to 3 have a "
        "yes and plain itself is *not level* by the rule of question 3, so its interval lies outside ±0.6.",
        comparisons_table(chosen),
        f"Does PR-MIM recover what throwing costs? Answer: {recovery(chosen)}.",
        "![all comparisons](figures/study_grid14_comparisons.svg)",
        "#### Arms",
        "a ± b (n): mean over n seeds and its standard error. Arms share their seeds, so paired differences are more "
        "precise than the two errors suggest.",
        arms_table(chosen, ARMS),
        "![difference to MAE](figures/study_grid14_arms.svg)",
    ]
    if (noise := noise_of_finetuning(chosen)) is not None:
        parts.append(f"Standard deviation between the fine-tunings of one run: {noise:.2f} points of top-1.")
    parts.append(f"Made with: {versions(chosen)}.")
    return "\n\n".join(parts)


def versions(results: Results) -> str:
    """Code, PyTorch and images of the runs, and how many runs have them."""
    found = Counter(f"{row['code']}; torch {row['torch']}; images {row['images']}" for row in results.rows.values())
    return ", ".join(f"{version} ({count_of(number, 'run')})" for version, number in found.items())
