"""Loss curves of runs, from their log.jsonl (needs matplotlib: requirements-dev.txt).

    python scripts/plot_losses.py MAE=output/mae PR-MIM=output/prmim --out losses.svg

A run is its folder or its log.jsonl, with a label before it or without. Of a fine-tuning run the loss on the validation
images is drawn, too, as a dashed line. An interval whose loss was not finite leaves a gap.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.plots import pyplot
from util.run.cli import Parser, replaced_file, run_program, user_errors, why_not_writable

SUFFIXES = (".svg", ".png", ".pdf")


class Curves(NamedTuple):
    """What is drawn of one run: (step, loss) of the reports, a loss that was not finite as NaN."""

    label: str
    train: list[tuple[int, float]]
    val: list[tuple[int, float]]


def split_label(run: str) -> tuple[str, Path]:
    """LABEL=PATH or PATH -> (label, path); of several "=" the one counts behind which there is a file or folder."""
    parts = run.split("=")
    splits = [("=".join(parts[:i]), Path("=".join(parts[i:]))) for i in range(len(parts))]
    return next((split for split in splits if split[1].exists()), splits[min(1, len(parts) - 1)])


def find_log(path: Path) -> Path:
    """The log of a run, given as that file or as the run's folder; ValueError where there is none."""
    if path.is_dir():
        log = path / "log.jsonl"
        if not log.is_file():
            inside = [str(found.parent) for found in sorted(path.glob("*/log.jsonl"))]
            advice = f"; did you mean {' or '.join(inside[:3])}?" if inside else ": it is not the folder of a run"
            raise ValueError(f"{str(path)!r} holds no log.jsonl{advice}")
        return log
    if not path.is_file():
        raise ValueError(f"there is no {str(path)!r}: give the folder of a run, or its log.jsonl")
    return path


def read_curves(run: str) -> Curves:
    """The curves of LABEL=PATH or PATH; ValueError where it holds no report of a loss."""
    label, path = split_label(run)
    log = find_log(path)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    reports = [report for report in map(parse_report, lines) if report is not None]
    train, val = ([(r["step"], r[name]) for r in reports if name in r] for name in ("loss", "val_loss"))
    if not train and not val:
        if not lines:
            raise ValueError(f"{str(log)!r} is empty: the run has reported nothing yet")
        raise ValueError(f"{str(log)!r} is not the log of a run: none of its lines is a report of a loss")
    if all(math.isnan(loss) for _, loss in train + val):
        raise ValueError(f"none of the losses in {str(log)!r} is finite")
    name = log.resolve().parent.name if log.name == "log.jsonl" else log.stem
    return Curves(label or name, train, val)


def parse_report(line: str) -> dict[str, float] | None:
    """The step and the losses in a line of log.jsonl; None for any other line, such as one that a kill cut off."""
    try:
        report = json.loads(line)
    except ValueError:
        return None
    if not isinstance(report, dict) or not isinstance(report.get("step"), int):
        return None
    losses = {name: report[name] for name in ("loss", "val_loss") if name in report}
    losses = {name: math.nan if loss is None else loss for name, loss in losses.items()}
    return {"step": report["step"]} | {name: loss for name, loss in losses.items() if isinstance(loss, (int, float))}


def plot(plt: Any, runs: Sequence[Curves], path: Path) -> None:
    """Draws the curves to `path`; `plt` is matplotlib.pyplot."""
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for run in runs:
        color = None
        if run.train:
            (line,) = axes.plot(*zip(*run.train, strict=True), label=run.label, lw=1.4)
            color = line.get_color()
        if run.val:
            marker = "o" if len(run.val) == 1 else None
            axes.plot(*zip(*run.val, strict=True), "--", label=f"{run.label}, val", lw=1.4, color=color, marker=marker)
    pretrained = not any(run.val for run in runs)
    axes.set(xlabel="optimizer step", ylabel="loss (mean over supervised tokens)" if pretrained else "loss")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    with replaced_file(path) as temporary:
        figure.savefig(temporary, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def check_out(path: Path) -> None:
    """ValueError where no plot can be written at `path`."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--out {str(path)!r} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if reason := why_not_writable(path):
        raise ValueError(f"--out {str(path)!r} cannot be written: {reason}")


def main(argv: Sequence[str] | None = None) -> None:
    """The program; `argv` stands for the command line."""
    parser = Parser("plot_losses.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="the folder of a run, or its log.jsonl")
    parser.add_argument("--out", type=Path, default=Path("losses.svg"), help=".svg, .png or .pdf (default: losses.svg)")
    args = parser.parse_args(argv)
    with user_errors(parser):
        plt = pyplot("losses")
        check_out(args.out)
        plot(plt, [read_curves(run) for run in args.runs], args.out)
    print(f"losses of {len(args.runs)} run{'s' if len(args.runs) > 1 else ''}: {args.out}")


if __name__ == "__main__":
    run_program(main, "plot_losses.py")
