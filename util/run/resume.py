"""Resuming: reads the checkpoint of a run, refuses what would change its results, restores its state."""

from dataclasses import dataclass, field
from typing import Any

import torch
from timm.layers import DropPath

from util.run import checkpoint
from util.run.distributed import Process
from util.run.resume_rules import find_changes, find_notes
from util.run.start import Start
from util.text import count_of


@dataclass
class RunRecord:
    """What the checkpoints of a run say about it, beside tensors."""

    program: str
    settings: dict[str, Any]  # all flags, resolved
    data: dict[str, Any]  # counts and fingerprints of the images
    steps_per_epoch: int
    process: Process
    origin: dict[str, Any]  # code version, command line, hosts
    extra: dict[str, Any] = field(default_factory=dict)  # of one main, for example the classes
    files: dict[str, str] = field(default_factory=dict)  # {flag: fingerprint} of files that the model reads

    def meta(self, step: int) -> dict[str, Any]:
        """Returns the JSON-able description of the checkpoint after `step` optimizer steps."""
        return {
            "program": self.program,
            "step": step,
            "epoch": step / self.steps_per_epoch,
            "world_size": self.process.world_size,
            "settings": self.settings,
            **self.data,
            "torch": torch.__version__,
            **self.origin,
            **self.extra,
            **self.files,
        }


def json_settings(*parts: dict[str, Any]) -> dict[str, Any]:
    """Merges dicts of settings. Later dicts override earlier ones. Tuples become lists, as after reading JSON."""
    merged = {name: value for part in parts for name, value in part.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in merged.items()}


def data_facts(images: Any, val_images: Any) -> dict[str, Any]:
    """Returns what the checkpoints say about the data: counts, fingerprints, and the type of the pixels."""
    facts = {"num_images": len(images), "data": images.fingerprint(), "pixels": images.pixel_format.dtype}
    if val_images is not None:
        facts |= {"num_val_images": len(val_images), "val_data": val_images.fingerprint()}
    return facts


def read_run(start: Start, total_batch_size: int) -> dict[str, Any] | None:
    """Returns the content of the checkpoint to resume, or None for a new run.

    ValueError if it belongs to another program, or if its steps had another total batch. CheckpointError if the file
    cannot be resumed at all.
    """
    if start.resume_path is None:
        return None
    content = checkpoint.read_checkpoint(start.resume_path)
    path = str(start.resume_path)
    if "optimizer" not in content or not isinstance(content.get("meta"), dict):
        raise checkpoint.CheckpointError(
            f"{path!r} holds weights but no run to resume; --resume takes a checkpoint of this program"
        )
    meta = content["meta"]
    theirs = meta.get("program", start.program)
    if theirs != start.program and start.began_elsewhere:
        hint = "; to fine-tune it, give it as --finetune" if theirs == "main_pretrain.py" else ""
        raise ValueError(f"--resume {path} is a run of {theirs}, not of {start.program}{hint}")
    if theirs != start.program:
        raise ValueError(f"{str(start.output_dir)!r} holds a run of {theirs}; choose another --output_dir")
    before = meta["settings"]["total_batch_size"]
    if before != total_batch_size:
        raise ValueError(
            f"the run's total batch was {before} and now is {total_batch_size}, but the schedule counts steps of "
            f"{count_of(before, 'image')}: give --total_batch_size {before}"
        )
    return content


def restore(
    content: dict[str, Any],
    start: Start,
    record: RunRecord,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    machine_flags: frozenset[str],
    allow_changes: bool,
    split_changes_draws: bool,
    fixed_flags: frozenset[str] = frozenset(),
) -> list[str]:
    """Loads weights and optimizer state. Returns remarks on what differs from the run so far.

    split_changes_draws: see `find_notes`. fixed_flags: see `find_changes`. ValueError if settings or data have changed
    in a way that changes results, unless `allow_changes`.
    """
    meta = content["meta"]
    now = record.meta(meta["step"])
    changes = find_changes(meta, now, machine_flags, fixed_flags, record.files)
    notes = find_notes(meta, now, has_drop_path(model), split_changes_draws)
    record.origin["started_from"] = str(start.resume_path) if start.began_elsewhere else meta.get("started_from")
    if changes and not allow_changes:
        raise ValueError(
            f"{str(start.resume_path)!r} cannot be resumed without changing its results: {'; '.join(changes)}. "
            f"Undo that, choose another --output_dir, or accept it by --allow_changes. If a newer recipe changed a "
            f"flag, give its former value"
        )
    checkpoint.load_strict(model, content["model"], "the checkpoint's weights")
    load_optimizer(optimizer, content["optimizer"])
    warnings = [f"warning: {change}" for change in changes]
    return [*warnings, *notes, f"resuming {start.resume_path} at step {meta['step']}"]


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads the moments. Hyper-parameters such as the weight decay stay as they are set now."""
    now = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        raise checkpoint.CheckpointError(f"the checkpoint's optimizer does not fit these settings ({error})") from error
    for group, settings in zip(optimizer.param_groups, now, strict=True):
        group.update(settings)


def has_drop_path(model: torch.nn.Module) -> bool:
    """Whether the model draws random numbers in its forward pass."""
    return any(isinstance(module, DropPath) and module.drop_prob for module in model.modules())
