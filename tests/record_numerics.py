"""Records the numbers of small runs, to show that a change of the code leaves them alone, bit for bit.

    python -m tests.record_numerics before.json              # on the old code
    python -m tests.record_numerics after.json               # on the new code, on the same machine
    python -m tests.record_numerics --compare before.json after.json

A record holds every reported loss and score, and hashes of weights and of the optimizer's state. Every second run is
stopped half-way and resumed. For code that is older than this file, copy the file there.
"""

import argparse
import contextlib
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conftest import write_photo
from tests.downstream.dense import detect, segment, segment_linear, write_shapes, write_stripes
from tests.runs import PLAIN, Program, finetune, pretrain, reports_without_times, state
from tests.warm import run_by_torchrun

HALF = 3  # of the steps


@dataclass(frozen=True)
class Case:
    """A run of six steps. In its flags, {first} is the folder of the first case's run."""

    program: Program
    data: str
    flags: str = ""
    processes: int = 1


def pretraining(model: str, flags: str = "", **options: Any) -> Case:
    return Case(pretrain, "photos", f"--model {model} --picture_every 0 {flags}", **options)


CASES = {
    "mae": pretraining("mae_vit_micro_patch4"),
    "mae, nothing thrown": pretraining("mae_vit_micro_patch4", "--throw_ratio 0"),
    "mae, plain": pretraining("mae_vit_micro_patch4", "--no-progressive --no-norm_pix_loss"),
    "mae, bf16, accumulated": pretraining("mae_vit_micro_patch4", "--precision bf16 --batch_size 4 --accum_iter 2"),
    "mae, recomputed, clipped": pretraining("mae_vit_micro_patch4", "--recompute --clip_grad 0.1 --drop_path 0.2"),
    "mae, workers": pretraining("mae_vit_micro_patch4", "--num_workers 2"),
    "mae, transformer": pretraining("mae_vit_micro_patch4", "--aggregation transformer --sampling random"),
    "mae, two processes": pretraining("mae_vit_micro_patch4", "--batch_size 4", processes=2),
    "mae, kNN": Case(pretrain, "labelled", "--knn_every 1 --picture_every 1"),
    "mff": pretraining("mff_vit_micro_patch4"),
    "simmim": pretraining("simmim_vit_micro_patch4", "--throw_ratio 0.25"),
    "simmim, swin": pretraining("simmim_swin_micro_patch4_window4", "--throw_ratio 0"),
    "localmim": pretraining("localmim_vit_micro_patch4"),
    "greenmim": pretraining("greenmim_swin_micro_patch4_window4"),
    "crossmae": pretraining("crossmae_vit_micro_patch4"),
    "amt": pretraining(
        "amt_vit_micro_patch4", "--sampling attention --attention_start 0 --attention_every 1 --throw_ratio 0.25"
    ),
    "tec": pretraining("tec_vit_micro_patch4", "--teacher {first}"),
    "pre-trained further": pretraining("mae_vit_micro_patch4", "--pretrained {first}"),
    "fine-tuned": Case(finetune, "labelled", "--aa rand-m9-mstd0.5-inc1 --mixup 0.8 --cutmix 1 --reprob 0.25"),
    "fine-tuned, plain": Case(finetune, "labelled", f"--finetune {{first}} {' '.join(PLAIN)}"),
    "linear probe": Case(finetune, "labelled", "--trainable_blocks 0 --finetune {first} --lr 0.1"),
    "fine-tuned, two processes": Case(finetune, "labelled", "--batch_size 4 --drop_path 0.1", processes=2),
    "fine-tuned, swin": Case(finetune, "labelled", "--model swin_micro_patch4_window4"),
    "segmentation": Case(segment, "pairs", "--save_steps 3"),
    "segmentation, linear": Case(segment_linear, "pairs", "--save_steps 3 --finetune {first}"),
    "segmentation, two processes": Case(segment, "pairs", "--save_steps 3", processes=2),
    "detection": Case(detect, "coco", "--save_steps 3"),
}


def write_photos(root: Path) -> Path:
    """Writes 24 training and 7 validation images of two classes."""
    for split, number in (("train", 12), ("val", 4)):
        for label, name in enumerate(("cat", "dog")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(number - (split == "val") * label):
                write_photo(folder / f"{i}.jpg", size=(36 + 4 * i, 60 - 2 * i), seed=100 * label + i + 1000 * number)
    return root


DATA: dict[str, Callable[[Path], object]] = {
    "photos": write_photos,
    "labelled": write_photos,
    "pairs": write_stripes,
    "coco": write_shapes,
}


def call(case: Case, data: Path, folder: Path, *flags: object) -> None:
    """Starts the run once. RuntimeError if it fails; its output is in FOLDER.txt."""
    words = case.flags.format(first=folder.with_name("run-0")).split()
    command = case.program.command(data, folder, *words, *flags)
    output = folder.with_suffix(".txt")
    if case.processes > 1:
        script = Path(case.program.module.__file__ or "")
        code, text = run_by_torchrun(script, *command)
        output.write_text(text)
        if code:
            raise RuntimeError(f"exit code {code}, see {output}")
        return
    with open(output, "a") as console, contextlib.redirect_stdout(console), contextlib.redirect_stderr(console):
        case.program.module.main(command)


def digest(value: Any) -> str:
    """Returns a hash of all tensors and numbers in nested dicts and lists."""
    if torch.is_tensor(value):
        value = value.detach().contiguous().cpu()
        content = f"{value.dtype} {tuple(value.shape)} ".encode() + value.view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        content = "".join(f"{key}: {digest(value[key])}\n" for key in sorted(value, key=str)).encode()
    elif isinstance(value, (list, tuple)):
        content = "".join(digest(part) for part in value).encode()
    else:
        content = repr(value).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def record(case: Case, data: Path, folder: Path, is_stopped: bool) -> dict[str, Any]:
    """Runs it. Returns what it has reported, and what it has left."""
    if is_stopped:
        call(case, data, folder, "--max_steps", HALF)
    call(case, data, folder)
    last = state(folder)
    reports = reports_without_times(folder)
    for report in reports:
        report.pop("gpu_memory_gb", None)
    return {"reports": reports, "weights": digest(last["model"]), "optimizer": digest(last["optimizer"]["state"])}


def record_all(path: Path, names: list[str]) -> None:
    """Writes the record of these cases to `path`. A case that fails is recorded by its error."""
    torch.set_num_threads(1)
    content: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for kind, write in DATA.items():
            write(root / kind)
        for number, name in enumerate(CASES):
            if names and name not in names and number > 0:  # others may need the first
                continue
            case = CASES[name]
            try:
                content[name] = record(case, root / case.data, root / f"run-{number}", is_stopped=number % 2 == 1)
            except (Exception, SystemExit) as error:
                console = root / f"run-{number}.txt"
                last_lines = console.read_text()[-1000:] if console.exists() else ""
                content[name] = {"error": f"{error!r}: {last_lines}"}
            print(f"{name}: {content[name].get('weights') or content[name]['error']}", flush=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns a line for each difference of two records, the first one of each run."""
    lines = []
    for name in {**before, **after}:
        if name not in before or name not in after:
            lines.append(f"{name}: is in one record only")
            continue
        old = before[name]
        new = after[name]
        if old != new:
            lines.append(f"{name}: {describe_difference(old, new)}")
    return lines


def describe_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    for earlier, later in zip(old.get("reports", ()), new.get("reports", ()), strict=False):
        for key in {**earlier, **later}:
            if earlier.get(key) != later.get(key):
                return f"step {earlier['step']}: {key} was {earlier.get(key)} and now is {later.get(key)}"
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return f"{', '.join(changed)} changed: {[old.get(key) for key in changed]} -> {[new.get(key) for key in changed]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", type=Path, help="file to write")
    parser.add_argument("--compare", nargs=2, type=Path, help="two records")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[],
        choices=CASES,
        metavar="CASE",
        help="only these runs",
    )
    args = parser.parse_args(argv)
    if args.compare:
        before, after = (json.loads(path.read_text()) for path in args.compare)
        lines = differences(before, after)
        print("\n".join(lines) or f"{len(before)} runs, all equal")
        return int(bool(lines))
    record_all(args.record, args.cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
