"""Plot the loss curves of runs from their log.jsonl (needs matplotlib: requirements-dev.txt).

    python scripts/plot_losses.py MAE=output/mae PR-MIM=output/prmim --out losses.svg
    python scripts/plot_losses.py output/prmim --reference quickstart_prmim50

A run is the folder of a run or its log.jsonl, with or without a label. For fine-tuning runs the loss on the validation
images is a dashed line. A loss that was not finite leaves a gap. If a run has kNN accuracies (--knn_every), a second
panel shows them. --reference adds curves of docs/runs/, dashed and grey; docs/healthy.md says what they are.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.atomic import replaced_file
from util.plots import pyplot
from util.run.cli import Parser, prepare_file, run_program, user_errors
from util.run.folder import read_reports
from util.text import count_of

REFERENCES = Path(__file__).resolve().parents[1] / "docs" / "runs"


class Curves(NamedTuple):
    """The curves of one run, as lists of (step, loss), and (step, kNN top-1 in percent). NaN if it was not finite."""

    label: str
    train: list[tuple[int, float]]
    val: list[tuple[int, float]]
    knn: list[tuple[int, float]]
    is_reference: bool = False


def split_label(run: str) -> tuple[str, Path]:
    """Splits LABEL=PATH or PATH into (label or "", path). Both may contain "=": the longest existing path counts."""
    parts = run.split("=")
    for i in range(len(parts)):
        path = Path("=".join(parts[i:]))
        if path.exists():
            return "=".join(parts[:i]), path
    label, separator, name = run.partition("=")
    return (label, Path(name)) if separator else ("", Path(run))


def read_curves(run: str) -> Curves:
    """Reads the curves of LABEL=PATH or PATH. ValueError if there is no log, or no finite loss in it."""
    label, path = split_label(run)
    log = path if path.is_file() else path / "log.jsonl"
    if not log.is_file():
        raise ValueError(f"there is no log at {str(path)!r}: give the folder of a run, or its log.jsonl")
    curves = Curves(label or (log.resolve().parent.name if log.name == "log.jsonl" else log.stem), [], [], [])
    for report in read_reports(log):
        for name, curve in (("loss", curves.train), ("val_loss", curves.val), ("knn_top1", curves.knn)):
            if name in report:
                curve.append((report["step"], math.nan if report[name] is None else report[name]))
    if all(math.isnan(loss) for _, loss in curves.train + curves.val):
        raise ValueError(f"{str(log)!r} reports no finite loss")
    return curves


def read_reference(name: str) -> Curves:
    """Reads the curves of docs/runs/NAME.jsonl. ValueError if there is no such file."""
    names = sorted(path.stem for path in REFERENCES.glob("*.jsonl"))
    if name not in names:
        raise ValueError(f"--reference {name!r} must be one of {', '.join(names)}")
    curves = read_curves(str(REFERENCES / f"{name}.jsonl"))
    return curves._replace(label=f"{name} (reference)", is_reference=True)


def plot(plt: Any, runs: Sequence[Curves], path: Path) -> None:
    """Draws the curves to `path`, references in grey. plt: matplotlib.pyplot."""
    has_knn = any(run.knn for run in runs)
    figure = plt.figure(figsize=(6, 5.4 if has_knn else 3.4), layout="constrained")
    axes = figure.add_subplot(1 + has_knn, 1, 1)
    accuracies = figure.add_subplot(2, 1, 2, sharex=axes) if has_knn else None
    dashes = itertools.cycle(("--", ":", "-."))
    for run in runs:
        look = {"color": "0.55", "ls": next(dashes)} if run.is_reference else {"color": None, "ls": "-"}
        if run.train:
            (line,) = axes.plot(*zip(*run.train, strict=True), label=run.label, lw=1.4, **look)
            look["color"] = line.get_color()
        if run.val:
            marker = "o" if len(run.val) == 1 else None
            axes.plot(
                *zip(*run.val, strict=True), "--", label=f"{run.label}, val", lw=1.4, color=look["color"], marker=marker
            )
        if accuracies is not None and run.knn:
            accuracies.plot(*zip(*run.knn, strict=True), label=run.label, lw=1.4, marker="o", ms=3, **look)
    is_pretraining = not any(run.val for run in runs)
    axes.set(ylabel="loss over supervised tokens" if is_pretraining else "loss")
    axes.legend(frameon=False)
    if accuracies is not None:
        accuracies.set(ylabel="kNN top-1, %")
    for panel in figure.axes:
        panel.grid(alpha=0.3, which="both")
    figure.axes[-1].set(xlabel="optimizer step")
    with replaced_file(path) as temporary:
        figure.savefig(temporary, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("plot_losses.py", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="the folder of a run, or its log.jsonl")
    what = "also draw these curves of this project: files docs/runs/NAME.jsonl"
    parser.add_argument("--reference", nargs="+", default=(), metavar="NAME", help=what)
    what = "write the plot to this .svg, .png or .pdf"
    parser.add_argument("--out", type=Path, default=Path("losses.svg"), help=what)
    args = parser.parse_args(argv)
    with user_errors(parser):
        plt = pyplot("losses")
        prepare_file("--out", args.out, (".svg", ".png", ".pdf"))
        curves = [read_curves(run) for run in args.runs]
        plot(plt, curves + [read_reference(name) for name in args.reference], args.out)
    print(f"losses of {count_of(len(args.runs), 'run')}: {args.out}")


if __name__ == "__main__":
    run_program(main, "plot_losses.py")
