"""Runs as processes of their own, with faults or without, and what they leave."""

import os
import re
import time
from pathlib import Path

from tests.test_main_pretrain import SMALL, reports
from tests.warm import Python, torchrun
from util.run.checkpoint import newest_checkpoint, read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
# Three epochs of 8 images a step, whatever the number of processes.
TINY = [*SMALL.replace("--batch_size 8 --epochs 2", "--total_batch_size 8 --epochs 3").split()]
TINY += ["--save_every", "1000", "--picture_every", "0"]


def command(data, output_dir, *flags, fault=None, processes=2, restarts=0, options=()):
    """The arguments of `python` for a run. fault: (name, step, rank, marker) of tests/faults/faulty.py.

    options: further ones of torchrun.
    """
    program = [ROOT / "main_pretrain.py"]
    if fault:
        program = [ROOT / "tests" / "faults" / "faulty.py", *fault, "main_pretrain"]
    program += [*TINY, "--data_path", data, "--output_dir", output_dir, *flags]
    if processes > 1 or restarts:
        return torchrun(*program, processes=processes, restarts=restarts, options=options)
    return program


def start(*args, **options):
    """Starts the run in a session of its own."""
    return Python(*command(*args, **options), env={"OMP_NUM_THREADS": "1"})


def finish(*args, code=0, **options):
    """Runs it to its end; -> its output. AssertionError unless it ends with that exit code."""
    process = start(*args, **options)
    try:
        out, _ = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
    assert process.returncode == code, (process.returncode, out[-3000:])
    return out


def state(output_dir):
    return read_checkpoint(newest_checkpoint(output_dir)[0])


def wait_for_step(output_dir, step, process=None, seconds=60):
    """Until so many steps are in the run's log."""
    log, end = Path(output_dir) / "log.jsonl", time.monotonic() + seconds
    while not log.exists() or log.read_text().count("\n") < step:
        assert time.monotonic() < end and (process is None or process.poll() is None), "the run did not get there"
        time.sleep(0.02)


def steps_lost(text):
    """Steps that were run twice, by the log's `resuming` and the last step reported before it."""
    lost, last = [], 0
    for line in text.splitlines():
        if found := re.search(r"step (\d+)/\d+: ", line):
            last = int(found[1])
        elif found := re.search(r"resuming .* at step (\d+)", line):
            lost.append(last - int(found[1]))
    return lost


def losses(output_dir):
    """[(step, loss)] of the log, which must hold each step once, in order."""
    found = [(r["step"], r["loss"]) for r in reports(output_dir)]
    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    return found
