"""Resuming: finds the checkpoint, refuses what would change the results of a run, and restores its state.

Each flag says at its definition what it changes. One that changes results may not differ between two starts of a run,
unless --allow_changes is given. If others affect rounding or random draws, a note says so.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from util.data.datasets import steps_per_epoch
from util.flag import Change
from util.run.errors import CheckpointError
from util.run.files import checkpoint
from util.run.files.record import CheckpointInfo
from util.run.start.plan import learning_rates

Settings = Mapping[str, Any]
Changes = Mapping[str, Change]  # what each flag changes, by name
# Flags that change nothing of a step but its learning rate, or with --repeat_aug its crops.
SCHEDULE_FLAGS = frozenset(
    ("epochs", "warmup_epochs", "decay_epochs", "lr_schedule", "lr_steps", "lr", "blr", "min_lr", "warmup_lr")
)


def find_checkpoint(output_dir: str | Path, resume: str) -> tuple[Path | None, list[str]]:
    """Returns the checkpoint to resume from, or None for a new run, and remarks for the log.

    A folder with checkpoints resumes from its newest good one, whatever `resume` says, so that the same command can be
    started again at any time. `resume` says where a run starts whose folder is empty: the path of a checkpoint, the
    folder of a run (its newest good checkpoint), or "auto" or "none" for a run from scratch. Raises CheckpointError if
    the folder holds finished checkpoints but no good one.
    """
    path, skipped = checkpoint.newest_checkpoint(output_dir)
    remarks = [f"skipped a checkpoint, {reason}" for reason in skipped]
    named = None if resume in ("auto", "none") else Path(resume).resolve()
    if path is not None:
        info = checkpoint.read_info(path)
        began_at = None if info.run is None else info.run.origin.started_from
        known = [path.resolve(), Path(output_dir).resolve()]
        if began_at:
            known += [Path(began_at).resolve(), Path(began_at).resolve().parent]
        if resume != "auto" and named not in known:
            remarks.append(
                f"warning: --resume {resume} is not used, because {str(output_dir)!r} holds a run, which is resumed; "
                f"to start anew or from another checkpoint, choose another --output_dir"
            )
        return path, remarks
    if checkpoint.list_finished(output_dir):
        raise CheckpointError(
            f"no checkpoint in {str(output_dir)!r} is intact ({'; '.join(skipped)}); remove them to start over"
        )
    if named in (None, Path(output_dir).resolve()):
        if skipped:
            remarks.append("warning: the run starts from step 0")
        return None, remarks
    path = checkpoint.find_checkpoint_file(resume)
    checkpoint.refuse_damage(path)
    return path, remarks


def read_resumed(path: Path | None, program: str, total_batch_size: int) -> CheckpointInfo | None:
    """Returns what the checkpoint to resume says, or None for a new run.

    ValueError if it belongs to another program than `program`, or if its steps had another total batch. CheckpointError
    if the file cannot be resumed at all.
    """
    if path is None:
        return None
    info = checkpoint.read_info(path)
    if info.run is None or info.run.is_best:
        raise CheckpointError(
            f"{str(path)!r} holds weights but no run to resume; --resume takes a checkpoint of this program"
        )
    if info.run.program != program:
        raise ValueError(f"{str(path)!r} is a run of {info.run.program}, not of {program}")
    total_before = info.settings["total_batch_size"]
    if total_before != total_batch_size:
        raise ValueError(
            f"the run's total batch was {total_before} and now is {total_batch_size}, but the schedule counts steps: "
            f"give --total_batch_size {total_before}"
        )
    return info


def restore(path: Path, is_verified: bool, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Loads weights and optimizer state from the checkpoint at `path`. Returns the rest of its state of training.

    The state of an optimizer of another class is not loaded: this one starts without any, as in a new run.
    is_verified: its hash has just been compared.
    """
    content = checkpoint.read_checkpoint(path, is_verified)
    assert content.info.run is not None
    try:
        model.load_state_dict(content.weights)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit these settings: {error}") from error
    moments = content.training.pop("optimizer")
    if content.info.run.optimizer == type(optimizer).__name__:
        load_optimizer(optimizer, moments)
    return content.training


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads the moments. Hyper-parameters such as the weight decay stay as they are set now."""
    settings_now = []
    for group in optimizer.param_groups:
        settings_now.append({name: value for name, value in group.items() if name != "params"})
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint's optimizer does not fit these settings ({error})") from error
    for group, settings in zip(optimizer.param_groups, settings_now, strict=True):
        group.update(settings)


# ---------------------------------------------------------------------------------------------------------------- rules


def find_changes(
    before: CheckpointInfo, now: CheckpointInfo, flag_changes: Changes, chosen: Collection[str] = ()
) -> list[str]:
    """Returns a sentence for each difference between a checkpoint and this start that changes results.

    A setting of which `flag_changes` says nothing changes results. chosen: names of the flags that this command or its
    recipe sets. The checkpoint may be older than a flag: to set it is a change, and to leave it out is none, since the
    default of a new flag keeps the former behaviour.
    """
    assert before.run is not None
    assert now.run is not None
    names = changed_names("results", flag_changes, before.settings, now.settings)
    if SCHEDULE_FLAGS.intersection(names) and begin_alike(before, now):
        names = [name for name in names if name not in SCHEDULE_FLAGS]
    changes = [f"--{describe_change(name, before.settings, now.settings)}" for name in names]
    for name in sorted(chosen):
        if name not in before.settings and flag_changes.get(name, "results") == "results":
            changes.append(f"--{name} is unknown to the checkpoint and now is {now.settings.get(name)}")
    changes += find_data_changes(before, now)
    if before.run.optimizer != now.run.optimizer:
        difference = f"was {before.run.optimizer} and now is {now.run.optimizer}"
        changes.append(f"the optimizer {difference}: it starts without the state of the former one")
    for flag, fingerprint in now.run.files.items():
        if before.run.files.get(flag) != fingerprint:
            changes.append(f"the {flag}'s weights have changed")
    return changes


def begin_alike(before: CheckpointInfo, now: CheckpointInfo) -> bool:
    """Whether the steps that the checkpoint has made are the same with both values of SCHEDULE_FLAGS.

    Then they have the same learning rates, and the same crops of --repeat_aug. When maps of --sampling attention are
    made depends on the number of epochs, so runs that draw by them count as different.
    """
    assert before.run is not None
    old = before.settings
    new = now.settings
    if "lr_schedule" not in old or old.get("sampling") == "attention":
        return False
    num_steps = before.run.step
    steps = steps_per_epoch(before.run.data.num_images, old["total_batch_size"])
    old_rate = learning_rates(old, steps)
    new_rate = learning_rates(new, steps)
    for step in range(num_steps):
        for lr_scale in (0.0, 1.0):  # rates are linear in it
            if old_rate(step, lr_scale) != new_rate(step, lr_scale):
                return False
    from util.data.repeats import epoch_groups

    begun = math.ceil(num_steps / steps)
    old_groups = epoch_groups(range(old["epochs"]), old["repeat_aug"])
    new_groups = epoch_groups(range(new["epochs"]), new["repeat_aug"])
    return all(ours == theirs for ours, theirs in zip(old_groups[:begun], new_groups[:begun], strict=False))


def find_data_changes(before: CheckpointInfo, now: CheckpointInfo) -> list[str]:
    """Returns a sentence for each difference between the images of a checkpoint and of this start."""
    assert before.run is not None
    assert now.run is not None
    old_path = before.settings.get("data_path")
    new_path = now.settings.get("data_path")
    moved = ""
    if old_path != new_path:
        moved = f" (--data_path was {old_path} and now is {new_path})"
    changes = []
    if before.run.data != now.run.data:
        difference = f"had {before.run.data} and now has {now.run.data}"
        changes.append(f"the data {difference}: the images would come in another order{moved}")
    if before.run.val_data != now.run.val_data:
        difference = f"had {before.run.val_data} and now has {now.run.val_data}"
        changes.append(f"the validation data {difference}: the accuracies would not be comparable{moved}")
    if before.pixels != now.pixels:
        changes.append(f"the images had pixels of {before.pixels} and now have {now.pixels}")
    return changes


def changed_names(change: Change, flag_changes: Changes, before: Settings, now: Settings) -> list[str]:
    """Returns the sorted names of settings with another value, of those that change `change`."""
    names = []
    for name in sorted(before.keys() & now.keys()):
        if flag_changes.get(name, "results") == change and before[name] != now[name]:
            names.append(name)
    return names


def describe_change(name: str, before: Settings, now: Settings) -> str:
    return f"{name} was {before[name]} and now is {now[name]}"


def find_notes(before: CheckpointInfo, now: CheckpointInfo, flag_changes: Changes) -> list[str]:
    """Returns a note for each difference that is allowed and may affect rounding, random draws or the code."""
    assert before.run is not None
    assert now.run is not None
    notes = []
    effects: dict[Change, str] = {
        "split": "each step has the same images, but random draws and statistics within a step may differ",
        "rounding": "results agree to rounding; compiled code draws other random numbers",
    }
    for change, effect in effects.items():
        for name in changed_names(change, flag_changes, before.settings, now.settings):
            notes.append(f"note: --{describe_change(name, before.settings, now.settings)}: {effect}")
    if before.run.world_size != now.run.world_size:
        processes = f"world_size was {before.run.world_size} and now is {now.run.world_size}"
        notes.append(f"note: {processes}: {effects['split']}")
    # A commit may change other files than those of the code, whose hash is compared.
    if before.run.origin.code.rpartition("files ")[2] != now.run.origin.code.rpartition("files ")[2]:
        versions = f"{before.run.origin.code} then, {now.run.origin.code} now"
        notes.append(f"note: the code has changed since this checkpoint was written: {versions}")
    if before.run.torch != now.run.torch:
        notes.append(f"note: torch was {before.run.torch} and now is {now.run.torch}: the last bits may differ")
    return notes
