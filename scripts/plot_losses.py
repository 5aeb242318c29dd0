"""Plot the loss curves of runs from their log.jsonl (needs matplotlib: requirements-dev.txt).

    python scripts/plot_losses.py MAE=output/mae PR-MIM=output/prmim --out losses.svg

A run is the folder of a run or its log.jsonl, with or without a label. For fine-tuning runs the loss on the validation
images is a dashed line. A loss that was not finite leaves a gap. If a run has kNN accuracies (--knn_every), a second
panel shows them.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.atomic import replaced_file
from util.plots import pyplot
from util.run.cli import Parser, prepare_file, run_program, user_errors
from util.text import count_of

SUFFIXES = (".svg", ".png", ".pdf")


class Curves(NamedTuple):
    """The curves of one run, as lists of (step, loss), and (step, kNN top-1 in percent). NaN if it was not finite."""

    label: str
    train: list[tuple[int, float]]
    val: list[tuple[int, float]]
    knn: list[tuple[int, float]]


def split_label(run: str) -> tuple[str, Path]:
    """Split LABEL=PATH or PATH into (label or "", path). Both may contain "=": the longest existing path counts."""
    parts = run.split("=")
    for i in range(len(parts)):
        path = Path("=".join(parts[i:]))
        if path.exists():
            return "=".join(parts[:i]), path
    label, separator, name = run.partition("=")
    return (label, Path(name)) if separator else ("", Path(run))


def find_log(path: Path) -> Path:
    """Return the log.jsonl of a run, given as that file or as the run's folder. ValueError if it is missing."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"there is no {str(path)!r}: give the folder of a run, or its log.jsonl")
    log = path / "log.jsonl"
    if not log.is_file():
        inside = [str(found.parent) for found in sorted(path.glob("*/log.jsonl"))]
        advice = f"; did you mean {' or '.join(inside[:3])}?" if inside else ": it is not the folder of a run"
        raise ValueError(f"{str(path)!r} holds no log.jsonl{advice}")
    return log


def read_curves(run: str) -> Curves:
    """Read the curves of LABEL=PATH or PATH. ValueError if the file logs no loss."""
    label, path = split_label(run)
    log = find_log(path)
    if not label:
        label = log.resolve().parent.name if log.name == "log.jsonl" else log.stem
    curves = Curves(label, [], [], [])
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        try:
            report = json.loads(line)
        except ValueError:  # a line that was cut off when the run was killed
            continue
        if not isinstance(report, dict) or not isinstance(report.get("step"), int):
            continue
        for name, curve in (("loss", curves.train), ("val_loss", curves.val), ("knn_top1", curves.knn)):
            loss = report.get(name, "missing")
            if loss is None or isinstance(loss, (int, float)):
                curve.append((report["step"], math.nan if loss is None else loss))
    if not lines:
        raise ValueError(f"{str(log)!r} is empty: the run has logged nothing yet")
    if not curves.train and not curves.val:
        raise ValueError(f"{str(log)!r} is not the log of a run: no line of it reports a loss")
    if all(math.isnan(loss) for _, loss in curves.train + curves.val):
        raise ValueError(f"none of the losses in {str(log)!r} is finite")
    return curves


def plot(plt: Any, runs: Sequence[Curves], path: Path) -> None:
    """Draw the curves to `path`. `plt` is matplotlib.pyplot."""
    has_knn = any(run.knn for run in runs)
    figure = plt.figure(figsize=(6, 5.4 if has_knn else 3.4), layout="constrained")
    axes = figure.add_subplot(1 + has_knn, 1, 1)
    accuracies = figure.add_subplot(2, 1, 2, sharex=axes) if has_knn else None
    for run in runs:
        color = None
        if run.train:
            (line,) = axes.plot(*zip(*run.train, strict=True), label=run.label, lw=1.4)
            color = line.get_color()
        if run.val:
            marker = "o" if len(run.val) == 1 else None
            axes.plot(*zip(*run.val, strict=True), "--", label=f"{run.label}, val", lw=1.4, color=color, marker=marker)
        if accuracies is not None and run.knn:
            accuracies.plot(*zip(*run.knn, strict=True), label=run.label, lw=1.4, color=color, marker="o", ms=3)
    is_pretraining = not any(run.val for run in runs)
    axes.set(ylabel="loss (mean over supervised tokens)" if is_pretraining else "loss")
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
    """Run the program; `argv` replaces the command line."""
    parser = Parser("plot_losses.py", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="the folder of a run, or its log.jsonl")
    parser.add_argument(
        "--out", type=Path, default=Path("losses.svg"), help="write the plot to this .svg, .png or .pdf"
    )
    args = parser.parse_args(argv)
    with user_errors(parser):
        plt = pyplot("losses")
        if args.out.suffix not in SUFFIXES:
            raise ValueError(f"--out {str(args.out)!r} must end in .svg, .png or .pdf")
        if reason := prepare_file(args.out):
            raise ValueError(f"--out {str(args.out)!r} cannot be written: {reason}")
        plot(plt, [read_curves(run) for run in args.runs], args.out)
    print(f"losses of {count_of(len(args.runs), 'run')}: {args.out}")


if __name__ == "__main__":
    run_program(main, "plot_losses.py")
