"""Write the study's tables and plots from the CSV of its runs (needs matplotlib: requirements-dev.txt).

    python tools/study_report.py docs/study_cpu.csv --report output/study.md

A line of the CSV is one run: arm, seed, top-1 after fine-tuning, errors of reconstruction, cost. The tables replace the
section of the preset (`cpu` for study_cpu.csv) in the report. The plots are written to figures/ beside it. "a ± b (n)"
is the mean over n seeds and its standard error. A difference is taken seed by seed, between runs with equal initial
weights, crops and visible tokens.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import study_comparisons
from tools.study_presets import ABLATION
from tools.study_results import Results, mean_se, read_rows, spread, write_rows
from util.plots import pyplot
from util.run.cli import Parser, run_program, user_errors
from util.tables import markdown_table

RATIOS = (25, 50, 65)
# ImageNet top-1 of ViT-B/16 after 100 epochs, from the paper.
_PLAIN = {"plain25": 81.4, "plain50": 81.1, "plain65": 80.3}
_PROGRESSIVE = {"progressive25": 81.7, "progressive50": 81.6, "progressive65": 81.5}
_FURTHEST = {"furthest25": 81.6, "furthest50": 81.4, "furthest65": 80.4}
_BOTH = {"prmim25": 81.7, "prmim50": 81.8, "prmim65": 81.7}
_KERNELS = {"kernel3": 81.7, "kernel5": 81.7, "kernel9": 81.7, "kernel11": 81.6}
_DESIGNS = {"transformer": 81.8, "convnext": 81.7}
PAPER = {"mae": 81.7} | _PLAIN | _PROGRESSIVE | _FURTHEST | _BOTH | _KERNELS | _DESIGNS
EFFECTS = {  # {title: (arm, arm to subtract)}; "mae" has no ratio
    "throwing alone: plain − MAE": ("plain", "mae"),
    "progressive reconstruction, random sampling": ("progressive", "plain"),
    "progressive reconstruction, furthest sampling": ("prmim", "furthest"),
    "furthest sampling, plain": ("furthest", "plain"),
    "furthest sampling, progressive": ("prmim", "progressive"),
    "both: PR-MIM − plain": ("prmim", "plain"),
    "what remains: PR-MIM − MAE": ("prmim", "mae"),
}
DEFAULT = "prmim50"
VARIANTS = {  # {title: {arm: its name}}; compared with DEFAULT
    "Kernel size": {
        "kernel3": "3 × 3",
        "kernel5": "5 × 5",
        DEFAULT: "7 × 7",
        "kernel9": "9 × 9",
        "kernel11": "11 × 11",
    },
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

ARMS_ALONE = ("tuning14", "pilot14", "frozen14", "deep16")  # presets whose section is the table of arms
PEERS = {  # {arm: its name} of the preset `peers`
    "mae": "MAE",
    "plain50": "plain, random sampling",
    "furthest50": "plain, furthest sampling",
    "cell50": "plain, running cell",
    "attention50": "plain, attention",
    "progressive50": "progressive, random sampling",
    "prmim50": "PR-MIM",
    "amt": "AMT (ρ_d .40 of .85 masked)",
    "crossmae": "CrossMAE",
    "crossmae_plain50": "CrossMAE, plain",
    "crossmae_plain50_lr": "CrossMAE, plain, rate / 3",
    "crossmae_prmim50": "CrossMAE + PR-MIM",
    "scratch": "no pre-training",
}


def difference(results: Results, arm: str, reference: str, metric: str = "top1", relative: bool = False) -> str:
    """The cell of a difference between two arms."""
    if arm == reference:
        return "reference"
    text = spread(results.effect([(arm, reference)], metric, relative), sign=True)
    return text.replace(" (", " % (") if relative else text


def top1(results: Results, arm: str) -> str:
    """The cell of an arm's accuracy, with the seeds that diverged."""
    values = list(results.values(arm, "top1").values())
    if not results.diverged(arm):
        return spread(values)
    text = f"diverged (seeds {', '.join(f'{seed:g}' for seed in results.diverged(arm))})"
    return f"{text}; else {spread(values)}" if values else text


def masked_error(results: Results, arm: str) -> str:
    """The cell of an arm's error of reconstruction, in 10^-3."""
    return spread([1e3 * value for value in results.values(arm, "mse_masked").values()])


def ablation_table(results: Results) -> str:
    """The steps from plain partial reconstruction to PR-MIM, for each throw ratio."""
    titles = ["ρ_d", "arm", "top-1, %", "− MAE", "− plain", "masked error, 10⁻³", "multiply-adds", "paper: top-1"]
    rows = []
    if "mae" in results.arms:
        cells = [
            top1(results, "mae"),
            "reference",
            "–",
            masked_error(results, "mae"),
            results.cost_text("mae"),
            PAPER["mae"],
        ]
        rows.append(["0", "MAE", *cells])
    for ratio in RATIOS:
        for prefix, name in ABLATION.items():
            arm = f"{prefix}{ratio}"
            if arm in results.arms:
                against = [difference(results, arm, other) for other in ("mae", f"plain{ratio}")]
                cells = [top1(results, arm), *against, masked_error(results, arm), results.cost_text(arm), PAPER[arm]]
                rows.append([f".{ratio}", name, *cells])
    if "scratch" in results.arms:
        against_mae = difference(results, "scratch", "mae")
        rows.append(["–", "no pre-training", top1(results, "scratch"), against_mae, "–", "–", "–", "–"])
    return markdown_table(titles, rows)


def effects_table(results: Results) -> str:
    """The effect of each part of the method, for each throw ratio and over all of them."""
    titles = ["points of top-1", *(f"ρ_d .{ratio}" for ratio in RATIOS), "mean of the three", "paper: .25, .5, .65"]
    rows = []
    for name, (arm, reference) in EFFECTS.items():
        pairs = [(f"{arm}{r}", reference if reference == "mae" else f"{reference}{r}") for r in RATIOS]
        cells = [spread(results.effect([pair]), sign=True) for pair in pairs]
        paper = ", ".join(f"{PAPER[a] - PAPER[b]:+.1f}" for a, b in pairs)
        rows.append([name, *cells, spread(results.effect(pairs), sign=True), paper])
    return markdown_table(titles, rows)


def variants_table(results: Results, title: str) -> str:
    """The variants of VARIANTS[title], compared with DEFAULT."""
    titles = [title, "top-1, %", "difference", "masked error, 10⁻³", "difference", "multiply-adds", "paper: top-1"]
    rows = []
    for arm, name in VARIANTS[title].items():
        if arm in results.arms:
            paper = PAPER.get(arm, "fails to converge" if arm.startswith("avgpool") else "–")
            accuracy = [top1(results, arm), difference(results, arm, DEFAULT)]
            error = [masked_error(results, arm), difference(results, arm, DEFAULT, "mse_masked", relative=True)]
            rows.append([name, *accuracy, *error, results.cost_text(arm), paper])
    return markdown_table(titles, rows)


def peers_table(results: Results) -> str:
    """PR-MIM and its peers, with half of the tokens thrown."""
    titles = ["strategy", "top-1, %", "− MAE", "masked error, 10⁻³", "multiply-adds"]
    rows = []
    for arm, name in PEERS.items():
        if arm in results.arms:
            cells = [top1(results, arm), difference(results, arm, "mae"), masked_error(results, arm)]
            rows.append([name, *cells, results.cost_text(arm)])
    return markdown_table(titles, rows)


def plot_peers(results: Results, path: Path) -> None:
    """Plot the accuracy of the peers against their multiply-adds."""
    plt = pyplot("study")
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    colors = plt.get_cmap("tab20").colors
    for color, (arm, name) in zip(colors, PEERS.items(), strict=False):
        ratio, (mean, error, n) = results.cost(arm), mean_se(list(results.values(arm, "top1").values()))
        if ratio is not None and n:
            shape = "s" if arm.startswith("crossmae") else "^" if arm in ("amt", "attention50", "cell50") else "o"
            axes.errorbar([ratio], [mean], [error or 0], fmt=shape, color=color, capsize=3, label=name)
    axes.set(xlabel="forward multiply-adds of pre-training, relative to MAE", ylabel="top-1 after fine-tuning, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def plot_ratios(results: Results, path: Path) -> None:
    """Plot the accuracy against the throw ratio. The area of a bubble is the cost."""
    plt = pyplot("study")
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    colors = dict(zip(ABLATION, ("#bbbbbb", "#4477aa", "#ddaa33", "#aa3377"), strict=True))  # distinct in grey, too
    mae = mean_se(list(results.values("mae", "top1").values()))
    for shift, (arm, name) in zip((-1.2, -0.4, 0.4, 1.2), ABLATION.items(), strict=True):
        present = [r for r in RATIOS if results.values(f"{arm}{r}", "top1")]
        stats = [mean_se(list(results.values(f"{arm}{r}", "top1").values())) for r in present]
        xs, ys = [r + shift for r in present], [mean for mean, _, _ in stats]
        errors, areas = [error or 0 for _, error, _ in stats], [260 * (results.cost(f"{arm}{r}") or 1) for r in present]
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


def plot_variants(results: Results, path: Path) -> None:
    """Plot the paired differences of accuracy and masked error from the default."""
    plt = pyplot("study")
    arms = []
    for title, names in VARIANTS.items():
        for arm, name in names.items():
            if arm != DEFAULT and results.effect([(arm, DEFAULT)], "mse_masked"):
                arms.append((title, arm, f"kernel {name}" if title == "Kernel size" else name))
    figure, panels = plt.subplots(1, 2, figsize=(9, 0.6 + 0.32 * max(1, len(arms))), sharey=True, layout="constrained")
    for axes, metric, relative in ((panels[0], "top1", False), (panels[1], "mse_masked", True)):
        for row, (title, arm, _) in enumerate(arms):
            mean, error, n = mean_se(results.effect([(arm, DEFAULT)], metric, relative))
            if n:
                color = ("#4477aa", "#ddaa33", "#aa3377")[list(VARIANTS).index(title)]
                axes.errorbar([mean], [row], xerr=[error or 0], fmt="o", color=color, capsize=3)
        axes.axvline(0, color="#222222", lw=0.8, ls=":")
        axes.grid(alpha=0.3)
    panels[0].set_yticks(range(len(arms)), [name for _, _, name in arms])
    panels[0].invert_yaxis()
    panels[0].set_xlabel("top-1, points (right: better)")
    panels[1].set_xlabel("masked error, % (left: better)")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def section(results: Results, preset: str) -> str:
    """The Markdown between the preset's two markers."""
    if preset == "grid14":
        return study_comparisons.section(results)
    if preset in ARMS_ALONE:
        return study_comparisons.arms_table(results, {arm: f"`{arm}`" for arm in sorted(results.arms)})
    if preset == "peers":
        return f"{peers_table(results)}\n\n![accuracy against cost](figures/study_peers.svg)"
    parts = ["### Ablation", ablation_table(results)]
    parts += [f"![accuracy against throw ratio](figures/study_{preset}_ratios.svg)"]
    if results.arms >= PAPER.keys():
        parts += ["### Effects, seed by seed", effects_table(results)]
    if DEFAULT in results.arms:
        for title in VARIANTS:
            parts += [f"### {title}", variants_table(results, title)]
        parts += [f"![paired differences from the default](figures/study_{preset}_variants.svg)"]
    return "\n\n".join(parts)


def replace_section(text: str, name: str, content: str) -> str:
    """Replace the text between the markers of `name`. A missing section is added at the end."""
    begin, end = f"<!-- study {name}: written by tools/study_report.py -->", f"<!-- end of study {name} -->"
    block = f"{begin}\n{content}\n{end}"
    if (begin in text) != (end in text):
        raise ValueError(f"the report has only one of the markers {begin!r} and {end!r}")
    if begin not in text:
        return f"{text.rstrip()}\n\n## Preset `{name}`\n\n{block}\n".lstrip()
    before, rest = text.split(begin, 1)
    return before + block + rest.split(end, 1)[1]


def render(path: str | Path, report: str | Path) -> str:
    """Write tables and plots of the CSV `path`, which is named NAME_PRESET.csv. Returns the tables."""
    results, report = Results(read_rows(path)), Path(report)
    preset = Path(path).stem.rpartition("_")[2]
    content = section(results, preset)
    old = report.read_text(encoding="utf-8") if report.exists() else "# The study\n"
    text = replace_section(old, preset, content)
    figures = report.parent / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    if preset == "peers":
        plot_peers(results, figures / "study_peers.svg")
    elif preset == "grid14":
        study_comparisons.plot_comparisons(results, figures / "study_grid14_comparisons.svg")
        study_comparisons.plot_arms(results, figures / "study_grid14_arms.svg")
    elif preset not in ARMS_ALONE:
        plot_ratios(results, figures / f"study_{preset}_ratios.svg")
        plot_variants(results, figures / f"study_{preset}_variants.svg")
    report.write_text(text, encoding="utf-8")
    return content


def csv_path(report: str | Path, preset: str) -> Path:
    """The CSV of a preset, beside the report."""
    return Path(report).with_name(f"study_{preset}.csv")


def write(report: str | Path, preset: str, results: Iterable[dict[str, Any]]) -> str:
    """Write the CSV of `results` beside the report, and render it. Returns the tables."""
    path = csv_path(report, preset)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, results)
    return render(path, report)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    parser = Parser("study_report.py", description=__doc__)
    parser.add_argument("csv", help="study_PRESET.csv, as tools/study.py writes it")
    parser.add_argument("--report", default="docs/study.md", help="the Markdown file whose section is replaced")
    args = parser.parse_args(argv)
    with user_errors(parser):
        pyplot("study")  # fail before any work if matplotlib is missing
        print(render(args.csv, args.report))


if __name__ == "__main__":
    run_program(main, "study_report.py")
