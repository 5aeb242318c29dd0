"""Starts the project's programs with tiny models, in this process or as processes of their own, and reads what is left.

pretrain(photos, tmp_path / "out", "--epochs", 3)               # -> the newest checkpoint
pretrain.refused(capsys, photos, tmp_path / "out", "--epochs", 0)  # -> the error
refused(capsys, visualize.main, "nowhere")                      # of any program
"""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import main_finetune
import main_pretrain
from tests.until import wait_until
from tests.warm import Python, torchrun
from util.run.files.checkpoint import newest_checkpoint
from util.run.files.record import CheckpointInfo, DataInfo, RunInfo, StartInfo

ROOT = Path(__file__).resolve().parents[1]
PLAIN = ["--aa", "none", "--mixup", "0", "--cutmix", "0", "--reprob", "0", "--drop_path", "0"]


def refused(capsys, main: Callable[[list[str]], Any], *arguments, code: int = 2) -> str:
    """Calls a `main` that must end with this exit code, no result, and one paragraph, which is returned."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in arguments])
    out, shown = capsys.readouterr()
    assert stop.value.code == code, shown
    assert not re.search("^(pre-)?trained ", out, re.MULTILINE), shown
    begin = re.search(r"^\w+\.py: error: ", shown, re.MULTILINE)  # a progress bar may stand before it
    assert begin
    assert "Traceback" not in shown
    message = shown[begin.start() :]
    assert len(message) < 3000, message  # ten broken images with long paths at the most
    return message


@dataclass(frozen=True)
class Program:
    """A main with the flags of a tiny run; later flags win."""

    module: ModuleType
    flags: str

    def command(self, data_path, output_dir, *flags) -> list[str]:
        words = [*self.flags.split(), "--data_path", data_path, "--output_dir", output_dir, *flags]
        return [str(word) for word in words]

    def also(self, flags: str) -> "Program":
        return Program(self.module, f"{self.flags} {flags}")

    def __call__(self, data_path, output_dir, *flags) -> dict[str, Any]:
        """Runs it. Returns the newest checkpoint."""
        self.module.main(self.command(data_path, output_dir, *flags))
        return state(output_dir)

    def refused(self, capsys, data_path, output_dir, *flags, code: int = 2) -> str:
        return refused(capsys, self.module.main, *self.command(data_path, output_dir, *flags), code=code)


# Two epochs of three steps on `photos` or `labelled`, each of which is saved.
SMALL = "--batch_size 8 --epochs 2 --warmup_epochs 1 --num_workers 0 --print_freq 1 --device cpu --save_steps 3"
pretrain = Program(main_pretrain, f"--model mae_vit_micro_patch4 {SMALL}")
finetune = Program(main_finetune, f"--model vit_micro_patch4 {SMALL} --lr 1e-3")


def evaluation(path, data_path, *flags) -> list[str]:
    """The flags that evaluate a classifier."""
    words = ["--eval", "--resume", path, "--data_path", data_path, "--device", "cpu", "--num_workers", "0", *flags]
    return [str(word) for word in words]


def evaluate(data_path, path, *flags) -> dict[str, Any]:
    return main_finetune.main(evaluation(path, data_path, *flags))


def info_of_run(step: int = 1, steps_per_epoch: int = 1, **parts) -> CheckpointInfo:
    """What the checkpoint of a run says. parts: of `CheckpointInfo` and of `RunInfo`, which win."""
    run = dict(
        program="main_pretrain.py",
        step=step,
        epoch=step / steps_per_epoch,
        world_size=1,
        data=DataInfo(24, "0123456789"),
        val_data=DataInfo(5, "abcdefghij"),
        torch=torch.__version__,
        optimizer="AdamW",
        origin=StartInfo("files 1", "main_pretrain.py", ["host"]),
        encoder=None,
        files={},
        val=None,
    )
    run |= {name: parts.pop(name) for name in [*parts] if name in run}
    parts = {"settings": {"epochs": 3, "total_batch_size": 8}, "pixels": "uint8", **parts}
    return CheckpointInfo(**parts, run=RunInfo(**run))


def contents(path) -> dict[str, Any]:
    """What a checkpoint of a run holds, with the JSON of `meta` decoded."""
    content = torch.load(path, weights_only=True, map_location="cpu")
    content["meta"] = json.loads(content["meta"])
    return content


def state(output_dir) -> dict[str, Any]:
    return contents(newest_checkpoint(output_dir)[0])


SHARES = ("data_share", "data_rank", "host_share")


def reports(output_dir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(output_dir) / "log.jsonl").read_text().splitlines()]


def reports_without_times(output_dir) -> list[dict[str, Any]]:
    """The reports without what depends on how fast the machine is."""
    kept = reports(output_dir)
    for report in kept:
        for name in ("seconds_per_step", "images_per_s", "knn_seconds", *SHARES):
            report.pop(name, None)
    return kept


def losses(output_dir) -> list[tuple[int, float]]:
    """[(step, loss)] of the log, which must hold each step once, in order."""
    found = [(report["step"], report["loss"]) for report in reports(output_dir)]
    steps = [step for step, _ in found]
    assert steps == list(range(1, len(found) + 1))
    return found


def assert_same_state(ours, theirs):
    """Bit for bit, of the runs that left these checkpoints."""
    for name, value in theirs["model"].items():
        assert torch.equal(ours["model"][name], value), name
    for index, moments in theirs["optimizer"]["state"].items():
        for name, value in moments.items():
            same = ours["optimizer"]["state"][index][name]
            assert torch.equal(torch.as_tensor(same), torch.as_tensor(value)), (index, name)
    assert ours["meta"]["step"] == theirs["meta"]["step"]
    assert ours["scaler"] == theirs["scaler"]


# ------------------------------------------------------------------------------------------- processes of their own

# Three epochs of 8 images a step, whatever the number of processes.
TINY = pretrain.flags.replace("--batch_size 8 --epochs 2", "--total_batch_size 8 --epochs 3")
tiny = Program(main_pretrain, f"{TINY} --save_every 1000 --picture_every 0")


def command(data_path, output_dir, *flags, program=tiny, fault=None, processes=2, restarts=0, options=()):
    """The arguments of `python` for a run. fault: (name, step, rank, marker) of tests/faults/faulty.py.

    options: further ones of torchrun.
    """
    name = program.module.__name__
    words = [ROOT / f"{name}.py"]
    if fault:
        words = [ROOT / "tests" / "faults" / "faulty.py", *fault, name]
    words += program.command(data_path, output_dir, *flags)
    if processes > 1 or restarts:
        return torchrun(*words, processes=processes, restarts=restarts, options=options)
    return words


def start(*args, **options):
    """Starts the run in a session of its own."""
    return Python(*command(*args, **options), env={"OMP_NUM_THREADS": "1"})


def finish(*args, code=0, **options):
    """Runs it to its end; -> its output. AssertionError unless it ends with that exit code."""
    process = start(*args, **options)
    try:
        out, _ = process.communicate(timeout=900)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
    assert process.returncode == code, (process.returncode, out[-3000:])
    return out


def wait_for_step(output_dir, step, process):
    """Until so many steps are in the run's log. The run must not end before: see the fault "hold"."""
    log = Path(output_dir) / "log.jsonl"

    def is_there():
        assert process.poll() is None, f"the run has ended: {process.text()[-3000:]}"
        return log.exists() and log.read_text().count("\n") >= step

    wait_until(is_there, process.text)


def steps_lost(text):
    """Steps that were run twice, by the log's `resuming` and the last step reported before it."""
    lost = []
    last_step = 0
    for line in text.splitlines():
        reported = re.search(r"step (\d+)/\d+: ", line)
        resumed = re.search(r"resuming .* at step (\d+)", line)
        if reported:
            last_step = int(reported[1])
        elif resumed:
            lost.append(last_step - int(resumed[1]))
    return lost


def children_of(pid):
    """Process ids, ascending, by Linux's /proc."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # a process that has ended meanwhile
            text = path.read_text()
            if int(text.rpartition(")")[2].split()[1]) == pid:
                children.append(int(text.split()[0]))
    return sorted(children)


def is_alive(pid):
    """Whether the process runs, by Linux's /proc. An orphan may stay there when it has ended."""
    with suppress(OSError):
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    return False
