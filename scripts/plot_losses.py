"""Loss curves of runs, from their log.jsonl (needs matplotlib: requirements-dev.txt).

python scripts/plot_losses.py MAE=output/mae/log.jsonl PR-MIM=output/prmim/log.jsonl --out losses.svg
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.plots import pyplot


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=LOG", help="a label and the path of a log.jsonl")
    parser.add_argument("--out", default="losses.svg")
    args = parser.parse_args()
    plt = pyplot("losses")
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for run in args.runs:
        label, _, path = run.rpartition("=")
        reports = [json.loads(line) for line in Path(path).read_text().splitlines()]
        axes.plot([r["step"] for r in reports], [r["loss"] for r in reports], label=label or Path(path).parent.name, lw=1.4)
    axes.set(xlabel="optimizer step", ylabel="loss (mean over supervised tokens)")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
