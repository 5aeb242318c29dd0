"""The study's statistics, tables and plots, from the CSV of its runs (needs matplotlib: requirements-dev.txt).

    python tools/study_report.py docs/study_cpu.csv --report docs/study.md

One line of the CSV is one run: arm, seed, top-1 after fine-tuning, errors of reconstruction, cost. The tables replace the
section of the preset (`cpu` in study_cpu.csv) in the report and leave the rest of it alone; the plots go to figures/
beside it. "a ± b (n)" is the mean over n seeds and its standard error; a difference is taken seed by seed, between runs
with equal first weights, crops and visible tokens.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.plots import pyplot
from util.run.cli import Parser, run_program, user_errors
from util.tables import read_csv, write_csv

COLUMNS = ["arm", "seed", "status", "top1", "loss", "mse_masked", "mse_retained", "mse_thrown", "gmac", "device", "torch"]
TEXT = ("arm", "status", "device", "torch")

RATIOS = (25, 50, 65)
ABLATION = {  # arm, less its ratio -> its name
    "plain": "plain partial reconstruction",
    "progressive": "+ progressive reconstruction",
    "furthest": "+ furthest sampling",
    "prmim": "+ both: PR-MIM",
}
# ImageNet top-1, ViT-B/16, 100 epochs: tables "Ablation studies", kernel sizes and designs of the paper.
_PLAIN = {"plain25": 81.4, "plain50": 81.1, "plain65": 80.3}
_PROGRESSIVE = {"progressive25": 81.7, "progressive50": 81.6, "progressive65": 81.5}
_FURTHEST = {"furthest25": 81.6, "furthest50": 81.4, "furthest65": 80.4}
_BOTH = {"prmim25": 81.7, "prmim50": 81.8, "prmim65": 81.7}
_KERNELS = {"kernel3": 81.7, "kernel5": 81.7, "kernel9": 81.7, "kernel11": 81.6}
_DESIGNS = {"transformer": 81.8, "convnext": 81.7}
PAPER = {"mae": 81.7} | _PLAIN | _PROGRESSIVE | _FURTHEST | _BOTH | _KERNELS | _DESIGNS
EFFECTS = {  # the question -> (arm, the arm that lacks it); "mae" has no ratio
    "throwing alone: plain − MAE": ("plain", "mae"),
    "progressive reconstruction, random sampling": ("progressive", "plain"),
    "progressive reconstruction, furthest sampling": ("prmim", "furthest"),
    "furthest sampling, plain": ("furthest", "plain"),
    "furthest sampling, progressive": ("prmim", "progressive"),
    "both: PR-MIM − plain": ("prmim", "plain"),
    "what remains: PR-MIM − MAE": ("prmim", "mae"),
}
DEFAULT = "prmim50"
VARIANTS = {  # title -> {arm: what it is}; compared with DEFAULT
    "Kernel size": {"kernel3": "3 × 3", "kernel5": "5 × 5", DEFAULT: "7 × 7", "kernel9": "9 × 9", "kernel11": "11 × 11"},
    "Design of the aggregation": {
        DEFAULT: "depth-wise convolution",
        "avgpool": "average pooling",
        "avgpool_all": "average pooling for all cells",
        "transformer": "Transformer block",
        "convnext": "ConvNeXt block",
    },
    "What the paper leaves open": {
        DEFAULT: "thrown cells, before the norm, framework's initialisation",
        "all": "convolution's output for all cells",
        "predictions": "convolution on the predictions, after norm and head",
        "init_average": "initialised as the mean of its window",
        "init_normal": "initialised as ConvNeXt's (normal, σ .02)",
    },
}


def mean_se(values):
    """-> (mean, standard error of the mean, n); the error of fewer than two values is None."""
    n = len(values)
    return (statistics.fmean(values) if n else None), (statistics.stdev(values) / n**0.5 if n > 1 else None), n


class Results:
    """The finished runs' numbers by arm and seed."""

    def __init__(self, rows):
        self.rows = {(row["arm"], row["seed"]): row for row in rows}
        self.arms = {row["arm"] for row in rows}

    def values(self, arm, metric):
        """{seed: value} where there is one."""
        return {s: row[metric] for (a, s), row in sorted(self.rows.items()) if a == arm and row[metric] is not None}

    def differences(self, arm, reference, metric, relative=False):
        """Seed by seed, where both are there; relative: in percent of the reference."""
        left, right = self.values(arm, metric), self.values(reference, metric)
        pairs = [(left[seed], right[seed]) for seed in sorted(left.keys() & right.keys())]
        return [100 * (a / b - 1) if relative else a - b for a, b in pairs]

    def effect(self, pairs, metric="top1"):
        """Mean over several (arm, reference), seed by seed: the seeds, not the pairs, are the independent draws."""
        values = [(self.values(a, metric), self.values(b, metric)) for a, b in pairs]
        seeds = set.intersection(*[a.keys() & b.keys() for a, b in values])
        return [statistics.fmean(a[seed] - b[seed] for a, b in values) for seed in sorted(seeds)]

    def diverged(self, arm):
        return [seed for (a, seed), row in self.rows.items() if a == arm and row["status"] == "diverged"]

    def cost(self, arm):
        """Multiply-adds relative to MAE's, or None."""
        ours, mae = (next(iter(self.values(a, "gmac").values()), None) for a in (arm, "mae"))
        return ours / mae if ours and mae else None


def spread(values, digits=2, sign=False):
    """ "47.10 ± 0.31 (3)" """
    mean, error, n = mean_se(values)
    if n == 0:
        return "–"
    text = f"{mean:{'+' if sign else ''}.{digits}f}"
    return f"{text} ({n})" if error is None else f"{text} ± {error:.{digits}f} ({n})"


def difference(results, arm, reference, metric="top1", relative=False):
    if arm == reference:
        return "reference"
    if results.diverged(arm) or results.diverged(reference):
        return "–"  # the seeds that are left are the lucky ones
    text = spread(results.differences(arm, reference, metric, relative), sign=True)
    return text if text == "–" or not relative else text.replace(" (", " % (")


def table(header, rows):
    align = ["--:" if i else "---" for i in range(len(header))]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, align, *rows))


def top1(results, arm):
    values = list(results.values(arm, "top1").values())
    if not results.diverged(arm):
        return spread(values)
    gone = f"diverged (seeds {', '.join(f'{seed:g}' for seed in results.diverged(arm))})"
    return f"{gone}; else {spread(values)}" if values else gone


def times(ratio):
    return "–" if ratio is None else f"{ratio:.2f}×"


def ablation_table(results):
    header = ["ρ_d", "arm", "top-1, %", "− MAE", "− plain", "masked error, 10⁻³", "multiply-adds", "paper: top-1"]
    arms = [("0", "mae", "MAE", None)]
    arms += [(f".{ratio}", f"{arm}{ratio}", name, f"plain{ratio}") for ratio in RATIOS for arm, name in ABLATION.items()]
    rows = []
    for ratio, arm, name, plain in arms:
        if arm in results.arms:
            error = spread([1e3 * v for v in results.values(arm, "mse_masked").values()])
            against = [difference(results, arm, other) if other else "–" for other in ("mae", plain)]
            rows.append([ratio, name, top1(results, arm), *against, error, times(results.cost(arm)), PAPER[arm]])
    if "scratch" in results.arms:
        rows.append(["–", "no pre-training", top1(results, "scratch"), difference(results, "scratch", "mae"), *["–"] * 4])
    return table(header, rows)


def effects_table(results):
    def pairs(arm, reference, ratios):
        return [(f"{arm}{r}", reference if reference == "mae" else f"{reference}{r}") for r in ratios]

    header = ["points of top-1", *(f"ρ_d .{ratio}" for ratio in RATIOS), "mean of the three", "paper: .25, .5, .65"]
    rows = []
    for name, (arm, reference) in EFFECTS.items():
        cells = [spread(results.effect(pairs(arm, reference, ratios)), sign=True) for ratios in (*((r,) for r in RATIOS), RATIOS)]
        rows.append([name, *cells, ", ".join(f"{PAPER[a] - PAPER[b]:+.1f}" for a, b in pairs(arm, reference, RATIOS))])
    return table(header, rows)


def variants_table(results, title):
    header = [title, "top-1, %", "difference", "masked error, 10⁻³", "difference", "multiply-adds", "paper: top-1"]
    rows = []
    for arm, name in VARIANTS[title].items():
        if arm in results.arms:
            error = spread([1e3 * v for v in results.values(arm, "mse_masked").values()])
            against = [difference(results, arm, DEFAULT), difference(results, arm, DEFAULT, "mse_masked", relative=True)]
            paper = PAPER.get(arm, "fails to converge" if arm.startswith("avgpool") else "–")
            rows.append([name, top1(results, arm), against[0], error, against[1], times(results.cost(arm)), paper])
    return table(header, rows)


def plot_ratios(results, path):
    """Accuracy against throw ratio; a bubble's area is the cost."""
    plt = pyplot("study")
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    colors = dict(zip(ABLATION, ("#bbbbbb", "#4477aa", "#ddaa33", "#aa3377"), strict=True))  # told apart in grey, too
    mae = mean_se(list(results.values("mae", "top1").values()))
    for shift, (arm, name) in zip((-1.2, -0.4, 0.4, 1.2), ABLATION.items(), strict=True):
        points = [(r, mean_se(list(results.values(f"{arm}{r}", "top1").values())), results.cost(f"{arm}{r}")) for r in RATIOS]
        points = [point for point in points if point[1][2]]
        xs, ys = [r + shift for r, *_ in points], [mean for _, (mean, *_), _ in points]
        errors, areas = [error or 0 for _, (_, error, _), _ in points], [260 * (cost or 1) for *_, cost in points]
        axes.errorbar(xs, ys, errors, color=colors[arm], lw=1, capsize=2, zorder=1)
        axes.scatter(xs, ys, s=areas, color=colors[arm], edgecolor="white", label=name.lstrip("+ "), zorder=2)
    if mae[2]:
        axes.errorbar([0], [mae[0]], [mae[1] or 0], color="#222222", capsize=2, zorder=1)
        axes.scatter([0], [mae[0]], s=260, color="#222222", edgecolor="white", label="MAE", zorder=2)
        axes.axhline(mae[0], color="#222222", lw=0.8, ls=":")
    axes.set(xlabel="throw ratio ρ_d, % of all tokens", ylabel="top-1 after fine-tuning, %")
    axes.set_xticks([0, *RATIOS])
    axes.text(0.02, 0.02, "bubble area: forward multiply-adds; bars: ± 1 s.e.", transform=axes.transAxes, fontsize=8)
    axes.grid(alpha=0.3)
    for handle in axes.legend(frameon=False, fontsize=8).legend_handles:
        handle.set_sizes([50])
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def plot_variants(results, path):
    """Paired differences from the default, of accuracy and of the masked error."""
    plt = pyplot("study")
    arms = [(title, arm, name) for title, names in VARIANTS.items() for arm, name in names.items() if arm != DEFAULT]
    compared = [arm for _, arm, _ in arms if results.differences(arm, DEFAULT, "mse_masked") and not results.diverged(arm)]
    arms = [(title, arm, name) for title, arm, name in arms if arm in compared]
    figure, panels = plt.subplots(1, 2, figsize=(9, 0.6 + 0.32 * max(1, len(arms))), sharey=True, layout="constrained")
    for axes, metric, relative in ((panels[0], "top1", False), (panels[1], "mse_masked", True)):
        for row, (title, arm, _) in enumerate(arms):
            mean, error, n = mean_se(results.differences(arm, DEFAULT, metric, relative))
            if n:
                color = ("#4477aa", "#ddaa33", "#aa3377")[list(VARIANTS).index(title)]
                axes.errorbar([mean], [row], xerr=[error or 0], fmt="o", color=color, capsize=3)
        axes.axvline(0, color="#222222", lw=0.8, ls=":")
        axes.grid(alpha=0.3)
    panels[0].set_yticks(range(len(arms)), [f"kernel {name}" if title == "Kernel size" else name for title, _, name in arms])
    panels[0].invert_yaxis()
    panels[0].set_xlabel("top-1, points (right: better)")
    panels[1].set_xlabel("masked error, % (left: better)")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def section(results, preset, figures):
    """The Markdown between the preset's two markers."""
    parts = [f"### Ablation\n\n{ablation_table(results)}", f"![accuracy against throw ratio]({figures}/study_{preset}_ratios.svg)"]
    parts += [f"### Effects, seed by seed\n\n{effects_table(results)}"] if all(map(results.arms.__contains__, PAPER)) else []
    if DEFAULT in results.arms:
        parts += [f"### {title}\n\n{variants_table(results, title)}" for title in VARIANTS]
        parts += [f"![paired differences from the default]({figures}/study_{preset}_variants.svg)"]
    return "\n\n".join(parts)


def replace_section(text, name, content):
    """`text` with what stands between the markers of `name` replaced; a new section at the end where there is none."""
    begin, end = f"<!-- study {name}: written by tools/study_report.py -->", f"<!-- end of study {name} -->"
    block = f"{begin}\n{content}\n{end}"
    if (begin in text) != (end in text):
        raise ValueError(f"the report has only one of the markers {begin!r} and {end!r}")
    if begin not in text:
        return f"{text.rstrip()}\n\n## Preset `{name}`\n\n{block}\n".lstrip()
    before, rest = text.split(begin, 1)
    return before + block + rest.split(end, 1)[1]


def render(path, report):
    """Tables and plots of the CSV at `path`, called NAME_PRESET.csv; -> the tables."""
    results, report = Results(read_csv(path, COLUMNS, TEXT)), Path(report)
    preset = Path(path).stem.rpartition("_")[2]
    (report.parent / "figures").mkdir(parents=True, exist_ok=True)
    content = section(results, preset, "figures")
    text = replace_section(report.read_text(encoding="utf-8") if report.exists() else "# The study\n", preset, content)
    plot_ratios(results, report.parent / f"figures/study_{preset}_ratios.svg")
    plot_variants(results, report.parent / f"figures/study_{preset}_variants.svg")
    report.write_text(text, encoding="utf-8")
    return content


def write(report, preset, results):
    """The CSV of `results` beside the report, and all that follows from it; -> the tables."""
    report = Path(report)
    report.parent.mkdir(parents=True, exist_ok=True)
    path = report.with_name(f"study_{preset}.csv")
    write_csv(path, COLUMNS, results)
    return render(path, report)


def main(argv: Sequence[str] | None = None) -> None:
    """The program; `argv` stands for the command line."""
    parser = Parser("study_report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help="study_PRESET.csv")
    parser.add_argument("--report", default="docs/study.md")
    args = parser.parse_args(argv)
    with user_errors(parser):
        pyplot("study")  # refuses before any work where matplotlib is missing
        print(render(args.csv, args.report))


if __name__ == "__main__":
    run_program(main, "study_report.py")
