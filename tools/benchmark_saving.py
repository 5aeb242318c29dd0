"""Measures for how many seconds a save stops training, in this tree and in others, in turn.

    python tools/benchmark_saving.py --folder /scratch --trees ../before

The state is that of a run on the CPU: a model, and AdamW's moments with random values. Nothing is trained. Each process
makes three saves and leaves out the first, which allocates the memory of the copy. Written files are deleted.

stands still    seconds until `CheckpointSaver.save` returns
until written   seconds until the checkpoint and its record have their names
CPU             seconds of all threads until then
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, os.environ.get("MEASURED_TREE", str(Path(__file__).resolve().parents[1])))

import torch

import models_mae_pr
from util.run.cli import Parser, run_program
from util.run.loop import Meter
from util.run.saving import CheckpointSaver
from util.tables import markdown_table

ROOT, NUM_SAVES = Path(__file__).resolve().parents[1], 3


def make_saver(name: str, folder: Path) -> CheckpointSaver:
    """Returns the saver of a run that has just begun. Its parts are those that savers of all measured trees need."""
    torch.manual_seed(0)
    model = getattr(models_mae_pr, name)()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {moment: torch.rand_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.ones(()), **moments}
    device, process = torch.device("cpu"), Namespace(is_main=True)
    meter, scaler = Meter(device), torch.amp.GradScaler("cpu", enabled=False)
    meter.add({"loss": torch.ones(())}, torch.ones(()))
    parts = {
        "start": Namespace(output_dir=folder, lock=None, process=process),
        "output_dir": folder,
        "record": Namespace(meta=lambda step: {"step": step}, process=process),
        "model": model,
        "loop": Namespace(
            optimizer=optimizer, meter=meter, precision=Namespace(scaler=scaler), device=device, step=0, last_step=1000
        ),
        "schedule": Namespace(keep_every=1000, num_steps=1000),
        "is_sharded": False,
        "first_step": 0,
    }
    return CheckpointSaver(**{part.name: parts[part.name] for part in fields(CheckpointSaver) if part.name in parts})


def measure(name: str, folder: Path) -> list[list[float]]:
    """Returns the three values of each save but the first."""
    saver, rows = make_saver(name, folder), []
    for saver.loop.step in range(1, NUM_SAVES + 1):
        begin, cpu = time.perf_counter(), time.process_time()
        saver.save(False)
        stopped = time.perf_counter() - begin
        getattr(saver, "finish", lambda: None)()  # of a tree whose saves are complete when they return there is none
        rows.append([stopped, time.perf_counter() - begin, time.process_time() - cpu])
    return rows[1:]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and prints a table of medians."""
    parser = Parser("benchmark_saving.py", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mae_vit_base_patch16", "mae_vit_large_patch16"])
    parser.add_argument("--trees", nargs="*", type=Path, default=[], help="other working trees of this project")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each model and tree")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where checkpoints are written")
    parser.add_argument("--measure", metavar="MODEL", help="print the times of one model as JSON, nothing else")
    args = parser.parse_args(argv)
    if args.measure:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            print(json.dumps(measure(args.measure, Path(folder))))
        return
    found: dict[tuple[str, Path], list[list[float]]] = {}
    loads = []
    for _ in range(args.rounds):
        for name in args.models:
            for tree in (*args.trees, ROOT):
                command = [sys.executable, __file__, "--measure", name, "--folder", args.folder]
                environment = {**os.environ, "MEASURED_TREE": str(tree.resolve())}
                out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                found.setdefault((name, tree), []).extend(json.loads(out))
                loads.append(os.getloadavg()[0])
    rows = [
        [name, tree.name, *(f"{statistics.median(values):.2f}" for values in zip(*saves, strict=True)), str(len(saves))]
        for (name, tree), saves in found.items()
    ]
    table = markdown_table(["model", "tree", "stands still, s", "until written, s", "CPU, s", "saves"], rows)
    print(f"{table}\nload of the machine {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    run_program(main, "tools/benchmark_saving.py")
