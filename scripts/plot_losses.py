"""Plot the loss curves of runs from their log.jsonl (needs matplotlib: requirements-dev.txt).

    python scripts/plot_losses.py MAE=output/mae PR-MIM=output/prmim --out losses.svg
    python scripts/plot_losses.py output/prmim docs/runs/quickstart_prmim50.jsonl

A run is the folder of a run or its log.jsonl, with or without a label. The loss on the validation images is a dashed
line. A loss that was not finite leaves a gap. If a run has kNN accuracies (--knn_every), a second panel shows them.
docs/run.md says what the curves of docs/runs/ are.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.atomic import replaced_file
from util.plots import pyplot
from util.run.cli import Parser, prepare_file, run_program, user_errors
from util.run.folder import read_reports
from util.text import count_of

Curve = list[tuple[int, float]]  # (step, value); NaN if it was not finite


def read_run(run: str) -> tuple[str, dict[str, Curve]]:
    """Reads LABEL=PATH or PATH. Returns (label, curves by their names in the log). ValueError without a finite loss."""
    label, separator, name = run.partition("=")
    if not separator or Path(run).exists():
        label, name = "", run
    path = Path(name)
    log = path if path.is_file() else path / "log.jsonl"
    if not log.is_file():
        raise ValueError(f"there is no log at {name!r}: give the folder of a run, or its log.jsonl")
    if not label:
        label = log.resolve().parent.name if log.name == "log.jsonl" else log.stem
    curves: dict[str, Curve] = {"loss": [], "val_loss": [], "knn_top1": []}
    for report in read_reports(log):
        for value, curve in curves.items():
            if value in report:
                curve.append((report["step"], math.nan if report[value] is None else report[value]))
    if all(math.isnan(loss) for _, loss in curves["loss"] + curves["val_loss"]):
        raise ValueError(f"{str(log)!r} reports no finite loss")
    return label, curves


def plot(plt: Any, runs: Sequence[tuple[str, dict[str, Curve]]], path: Path) -> None:
    """Draws the curves to `path`: a panel of losses and, if there are any, one of accuracies."""
    has_knn = any(curves["knn_top1"] for _, curves in runs)
    figure, panels = plt.subplots(
        1 + has_knn, figsize=(6, 5.4 if has_knn else 3.4), squeeze=False, layout="constrained"
    )
    panels = panels[:, 0]
    for i, (label, curves) in enumerate(runs):
        for name, curve in curves.items():
            if curve:
                panel = panels[-1] if name == "knn_top1" else panels[0]
                style = "o--" if name == "val_loss" else "-"
                panel.plot(*zip(*curve, strict=True), style, color=f"C{i}", ms=3, label=f"{label}, {name}")
    panels[0].set_ylabel("loss")
    if has_knn:
        panels[-1].set_ylabel("kNN top-1, %")
    for panel in panels:
        panel.legend(frameon=False)
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("optimizer step")
    with replaced_file(path) as temporary:
        figure.savefig(temporary, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("plot_losses.py", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="the folder of a run, or its log.jsonl")
    parser.add_argument("--out", type=Path, default=Path("losses.svg"), help="write to this .svg, .png or .pdf")
    args = parser.parse_args(argv)
    with user_errors(parser):
        plt = pyplot("losses")
        prepare_file("--out", args.out, (".svg", ".png", ".pdf"))
        plot(plt, [read_run(run) for run in args.runs], args.out)
    print(f"losses of {count_of(len(args.runs), 'run')}: {args.out}")


if __name__ == "__main__":
    run_program(main, "plot_losses.py")
