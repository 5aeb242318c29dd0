"""Keeps a step that was not finite, for `scripts/replay_step.py`: the weights before it, and the run's settings.

Nothing else is needed, since images, crops, masks and random draws are functions of the step.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

import torch

from util.atomic import replaced_file
from util.collectives import run_on_rank0
from util.run.train.saving import CheckpointSaver

PROGRAM = "main_pretrain.py"  # whose steps can be repeated


def save_bad_step(saver: CheckpointSaver) -> bool:
    """Writes bad-step-<n>.pth if the steps from step n on were not finite. Returns whether it did.

    All ranks must call it. A write that fails costs a warning.
    """
    step = saver.step_of_weights()
    if step == saver.loop.step or saver.start.program != PROGRAM:
        return False
    saver.finish()  # the write before it reads the memory of the copy
    state = {"model": saver.model.state_dict(), "scaler": saver.loop.precision.scaler.state_dict()}
    copy = saver.copies.take(state, keep=saver.start.process.is_main)
    run_on_rank0(lambda: write_bad_step(saver, step, copy))
    return True


def write_bad_step(saver: CheckpointSaver, step: int, state: Mapping[str, Any]) -> None:
    """Writes the file, and says how to repeat the step. For rank 0."""
    path = saver.output_dir / f"bad-step-{step}.pth"
    info = saver.info.at_step(step, saver.schedule.steps_per_epoch)
    try:
        with replaced_file(path) as temporary:
            torch.save({**state, "meta": json.dumps(info.to_json())}, temporary)
    except (OSError, RuntimeError) as error:  # torch raises either if the disk is full
        saver.loop.log.info(f"warning: {path.name} could not be written ({error})")
        return
    command = f"scripts/replay_step.py {shlex.quote(str(path))}"
    saver.loop.log.info(f"step {step + 1} was not finite: {command} repeats it and names what was not")
