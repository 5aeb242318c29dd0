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
from util.run.files.reports import read_reports
from util.text import count_of

STYLES = {"loss": "-", "val_loss": "o--", "knn_top1": "-"}  # of the values in a log that are drawn
Curves = dict[str, list[tuple[int, float]]]  # {name of a value: (step, value)}; NaN if it was not finite


def read_run(run: str) -> tuple[str, Curves]:
    """Reads LABEL=PATH or PATH. Returns (label, curves). ValueError without a finite loss."""
    label = ""
    name = run
    if "=" in run and not Path(run).exists():
        label, _, name = run.partition("=")
    log = Path(name)
    if not log.is_file():
        log = log / "log.jsonl"
    if not log.is_file():
        raise ValueError(f"there is no log at {name!r}: give the folder of a run, or its log.jsonl")
    if not label:
        label = log.stem
        if log.name == "log.jsonl":
            label = log.resolve().parent.name
    curves: Curves = {name: [] for name in STYLES}
    for report in read_reports(log):
        for value, curve in curves.items():
            if value in report:
                number = report[value]
                if not isinstance(number, (int, float)):  # None: the loss was not finite
                    number = math.nan
                curve.append((report["step"], number))
    losses = curves["loss"] + curves["val_loss"]
    if all(math.isnan(loss) for _, loss in losses):
        raise ValueError(f"{str(log)!r} reports no finite loss")
    return label, curves


def plot(plt: Any, runs: Sequence[tuple[str, Curves]], path: Path) -> None:
    """Draws the curves to `path`: a panel of losses and, if there are any, one of accuracies."""
    num_panels = 1
    if any(curves["knn_top1"] for _, curves in runs):
        num_panels = 2
    figure, axes = plt.subplots(num_panels, figsize=(6, 1.4 + 2 * num_panels), squeeze=False, layout="constrained")
    panels = axes[:, 0]
    panels[-1].set_ylabel("kNN top-1, %")
    panels[0].set_ylabel("loss")
    for i, (label, curves) in enumerate(runs):
        for name, curve in curves.items():
            if not curve:
                continue
            panel = panels[0]
            if name == "knn_top1":
                panel = panels[-1]
            steps, values = zip(*curve, strict=True)
            panel.plot(steps, values, STYLES[name], color=f"C{i}", ms=3, label=f"{label}, {name}")
    for panel in panels:
        panel.legend(frameon=False)
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("optimizer step")
    metadata: dict[str, None] = {}
    if path.suffix == ".svg":
        metadata["Date"] = None
    with replaced_file(path) as temporary:
        figure.savefig(temporary, metadata=metadata)
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
