"""Resuming: reads the checkpoint of a run, refuses what would change its results, restores its state.

Each flag says at its definition what it changes. One that changes results may not differ between two starts of a run,
unless --allow_changes is given. If others affect rounding or random draws, a note says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from util.lazy import LazyModule
from util.run import checkpoint
from util.run.cli import Change
from util.run.distributed import Process
from util.run.folder import Start

timm_layers = LazyModule("timm.layers")

Meta = Mapping[str, Any]
Changes = Mapping[str, Change]  # what each flag changes, by name


@dataclass
class RunRecord:
    """What the checkpoints of a run say about it, beside tensors."""

    program: str
    settings: dict[str, Any]  # all flags, resolved
    data: dict[str, Any]  # see `data_facts`
    val_data: dict[str, Any] | None
    pixels: str  # their type in the images
    steps_per_epoch: int
    process: Process
    optimizer: str  # class whose state the checkpoints hold
    origin: dict[str, Any]  # code version, command line, hosts
    encoder: dict[str, Any] | None = None  # identity of the weights that the run began with
    classes: list[str] | None = None
    class_colors: list[list[int]] | None = None
    files: dict[str, str] = field(default_factory=dict)  # {flag: fingerprint} of files that the model reads

    def meta(self, step: int) -> dict[str, Any]:
        """Returns the JSON-able description of the checkpoint after `step` optimizer steps.

        Names that a user chooses, such as flags, are keys of dicts of their own.
        """
        return {
            "program": self.program,
            "step": step,
            "epoch": step / self.steps_per_epoch,
            "world_size": self.process.world_size,
            "settings": self.settings,
            "data": self.data,
            "val_data": self.val_data,
            "pixels": self.pixels,
            "torch": torch.__version__,
            "optimizer": self.optimizer,
            "origin": self.origin,
            "encoder": self.encoder,
            "classes": self.classes,
            "class_colors": self.class_colors,
            "files": self.files,
        }


def json_settings(*parts: dict[str, Any]) -> dict[str, Any]:
    """Merges dicts of settings. Later dicts override earlier ones. Tuples become lists, as after reading JSON."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = list(value) if isinstance(value, tuple) else value
    return merged


def data_facts(images: Any) -> dict[str, Any]:
    """Returns what the checkpoints say about a data set: the number of images, and a hash of names and labels."""
    return {"num_images": len(images), "fingerprint": images.fingerprint()}


def read_run(start: Start, total_batch_size: int) -> dict[str, Any] | None:
    """Returns the content of the checkpoint to resume, or None for a new run.

    ValueError if it belongs to another program, or if its steps had another total batch. CheckpointError if the file
    cannot be resumed at all.
    """
    if start.resume_path is None:
        return None
    is_verified = start.process.is_main and not start.began_elsewhere  # as rank 0 has chosen it from its folder
    content = checkpoint.read_checkpoint(start.resume_path, is_verified)
    path = str(start.resume_path)
    if "optimizer" not in content or not isinstance(content.get("meta"), dict):
        raise checkpoint.CheckpointError(
            f"{path!r} holds weights but no run to resume; --resume takes a checkpoint of this program"
        )
    meta = content["meta"]
    program = meta["program"]
    if program != start.program:
        raise ValueError(other_program(program, start))
    total_before = meta["settings"]["total_batch_size"]
    if total_before != total_batch_size:
        raise ValueError(
            f"the run's total batch was {total_before} and now is {total_batch_size}, but the schedule counts steps: "
            f"give --total_batch_size {total_before}"
        )
    return content


def other_program(program: str, start: Start) -> str:
    """Returns the error that the checkpoint belongs to a run of another program."""
    if not start.began_elsewhere:
        return f"{str(start.output_dir)!r} holds a run of {program}; choose another --output_dir"
    message = f"--resume {start.resume_path} is a run of {program}, not of {start.program}"
    if program == "main_pretrain.py":
        message += "; to fine-tune it, give it as --finetune"
    return message


def restore(
    content: dict[str, Any],
    start: Start,
    record: RunRecord,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    flag_changes: Changes,
    allow_changes: bool,
    split_changes_draws: bool,
) -> list[str]:
    """Loads weights and optimizer state. Returns remarks on what differs from the run so far.

    The state of an optimizer of another class is not loaded: this one starts without any, as in a new run.

    split_changes_draws: see `find_notes`. ValueError if settings or data have changed in a way that changes results,
    unless `allow_changes`.
    """
    meta = content["meta"]
    now = record.meta(meta["step"])
    changes = find_changes(meta, now, flag_changes)
    notes = find_notes(meta, now, flag_changes, has_drop_path(model), split_changes_draws)
    record.origin["started_from"] = meta["origin"].get("started_from")
    if start.began_elsewhere:
        record.origin["started_from"] = str(start.resume_path)
    if changes and not allow_changes:
        raise ValueError(
            f"{str(start.resume_path)!r} cannot be resumed without changing its results: {'; '.join(changes)}. "
            "Undo that, choose another --output_dir, or accept it by --allow_changes"
        )
    checkpoint.load_strict(model, content["model"], "the checkpoint's weights")
    if meta["optimizer"] == record.optimizer:
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
    return any(isinstance(module, timm_layers.DropPath) and module.drop_prob for module in model.modules())


# ---------------------------------------------------------------------------------------------------------------- rules


def find_changes(before: Meta, now: Meta, flag_changes: Changes) -> list[str]:
    """Returns a sentence for each difference between a checkpoint's meta and this start's that changes results.

    A setting that only one of the two has is no change: the default of a new flag keeps the former behaviour. A setting
    of which nothing is said changes results.
    """
    was = before["settings"]
    settings = now["settings"]
    names = changed_names("results", flag_changes, was, settings)
    changes = [f"--{describe_change(name, was, settings)}" for name in names]
    moved = ""
    if was.get("data_path") != settings.get("data_path"):
        moved = f" (--data_path was {was.get('data_path')} and now is {settings.get('data_path')})"
    if before["data"] != now["data"]:
        difference = f"had {describe_data(before['data'])} and now has {describe_data(now['data'])}"
        changes.append(f"the data {difference}: the images would come in another order{moved}")
    if before["val_data"] != now["val_data"]:
        difference = f"had {describe_data(before['val_data'])} and now has {describe_data(now['val_data'])}"
        changes.append(f"the validation data {difference}: the accuracies would not be comparable{moved}")
    if before["pixels"] != now["pixels"]:
        changes.append(f"the images had pixels of {before['pixels']} and now have {now['pixels']}")
    if before["optimizer"] != now["optimizer"]:
        difference = f"was {before['optimizer']} and now is {now['optimizer']}"
        changes.append(f"the optimizer {difference}: it starts without the state of the former one")
    for flag, fingerprint in now["files"].items():
        if before["files"].get(flag) != fingerprint:
            changes.append(f"the {flag}'s weights have changed")
    return changes


def describe_data(facts: Mapping[str, Any]) -> str:
    """Returns, for example, "24 images (names and labels 01234567)"."""
    return f"{facts['num_images']} images (names and labels {facts['fingerprint'][:8]})"


def changed_names(change: Change, flag_changes: Changes, was: Meta, settings: Meta) -> list[str]:
    """Returns the sorted names of settings with another value, of those that change `change`."""
    names = []
    for name in sorted(was.keys() & settings.keys()):
        if flag_changes.get(name, "results") == change and was[name] != settings[name]:
            names.append(name)
    return names


def describe_change(name: str, was: Meta, settings: Meta) -> str:
    return f"{name} was {was[name]} and now is {settings[name]}"


def find_notes(
    before: Meta, now: Meta, flag_changes: Changes, has_dropout: bool, split_changes_draws: bool
) -> list[str]:
    """Returns a note for each difference that is allowed and may affect rounding, random draws or the code.

    has_dropout: whether the model draws random numbers in its forward pass. split_changes_draws: whether random draws
    or statistics depend on how the total batch is split.
    """
    was = before["settings"]
    settings = now["settings"]
    notes = []
    names = changed_names("split", flag_changes, was, settings)
    split = [describe_change(name, was, settings) for name in names]
    if before["world_size"] != now["world_size"]:
        split.append(describe_change("world_size", before, now))
    if split:
        note = f"note: each step has the same images, but is split otherwise ({', '.join(split)})"
        if split_changes_draws:
            note += "; random draws and statistics within a step differ"
        notes.append(note)
    names = changed_names("rounding", flag_changes, was, settings)
    rounding = [f"--{describe_change(name, was, settings)}" for name in names]
    if rounding:
        note = f"note: {', '.join(rounding)}: results agree to rounding, not to the last bit"
        if has_dropout and was.get("compile") != settings.get("compile"):
            note += "; compiled code draws other random numbers, so drop path differs"
        notes.append(note)
    # Only the hash of the files is compared: a commit may change other files.
    was_code, is_code = before["origin"]["code"], now["origin"]["code"]
    if was_code.rpartition("files ")[2] != is_code.rpartition("files ")[2]:
        versions = f"{was_code} then, {is_code} now"
        notes.append(f"note: the code has changed since this checkpoint was written: {versions}")
    return notes


# -------------------------------------------------------------------------------------------------------- first weights


def find_encoder(given: str | None, is_resumed: bool, flag: str = "finetune") -> dict[str, Any] | None:
    """Returns the identity of the checkpoint that is `given` by a flag, or None.

    A resumed run no longer needs the file: the result is None if it is gone. ValueError if a new run does not find it.
    """
    if given is None or (is_resumed and not Path(given).exists()):
        return None
    try:
        path = checkpoint.find_checkpoint_file(given)
    except checkpoint.CheckpointError:  # an empty folder
        if is_resumed:
            return None
        raise
    if not path.is_file():
        raise ValueError(f"--{flag} {given!r} does not exist: give a checkpoint, or the folder of a run")
    return identify_encoder(path, checkpoint.read_meta(path))


def identify_encoder(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Returns path, SHA-256 and progress of the checkpoint at `path`, whose meta is given."""
    named = path.parent.resolve() / path.name  # the file itself may be a link to a name that tells nothing
    encoder = {"path": str(named), "sha256": checkpoint.recorded_sha256(path), "step": meta.get("step")}
    if meta.get("settings", {}).get("epochs") and "epoch" in meta:
        encoder |= {"epoch": meta["epoch"], "epochs": meta["settings"]["epochs"]}
    return encoder


def warn_if_unfinished(encoder: dict[str, Any]) -> list[str]:
    """Returns a warning if the pre-training of the encoder has not reached its end."""
    if encoder.get("epochs") is None or encoder["epoch"] >= encoder["epochs"]:
        return []
    progress = f"it is at step {encoder['step']}, epoch {encoder['epoch']:.4g} of {encoder['epochs']}"
    return [f"warning: the training of {encoder['path']} is not finished: {progress}"]


def resume_encoder(
    meta: dict[str, Any], now: dict[str, Any] | None, start: Start, flag: str = "finetune"
) -> tuple[dict[str, Any] | None, list[str]]:
    """Returns (the encoder that a resumed run began with, remarks).

    meta: of the run's checkpoint. now: what `flag` means now. ValueError if that is another encoder.

    If the pre-training run has saved newer checkpoints since, an unfinished fine-tuning run keeps its first encoder and
    ignores them. A finished run is refused instead, because its results would look like those of the newer checkpoint.
    """
    first = meta["encoder"]
    if first is not None and first["path"] is None:
        first = None
    if now is None or (first is not None and now["sha256"] == first["sha256"]):
        return first, []
    is_over = meta["epoch"] >= meta["settings"]["epochs"]
    if first is not None and not is_over and is_newer_save(now, first):
        old = Path(first["path"]).resolve()
        new = Path(now["path"]).resolve()
        return first, [f"warning: this run continues from {old}; {new}, which is newer, is ignored"]
    raise ValueError(other_encoder(first, now, is_over, start, flag))


def is_newer_save(now: dict[str, Any], first: dict[str, Any]) -> bool:
    """Whether the encoder `now` is a later checkpoint of the run that has saved `first`."""
    if Path(now["path"]).resolve().parent != Path(first["path"]).resolve().parent:
        return False
    if now.get("step") is None or first.get("step") is None:
        return False
    return first["step"] < now["step"]


def other_encoder(first: dict[str, Any] | None, now: dict[str, Any], is_over: bool, start: Start, flag: str) -> str:
    """Returns the error that a run began with the encoder `first`, and not with the one that `flag` names `now`."""
    new = Path(now["path"]).resolve()
    if first is None:
        began_with = f"training from scratch, not of {str(new)!r}"
    elif Path(first["path"]).resolve() == new:
        began_with = f"an earlier {str(new)!r}, which has changed since"
    else:
        began_with = f"{str(Path(first['path']).resolve())!r}, not of {str(new)!r}"
    holder = repr(str(start.output_dir))
    advice = "choose another --output_dir"
    if start.began_elsewhere:
        holder = f"--resume {str(start.resume_path)!r}"
        advice = f"--resume and --{flag} exclude each other unless the run began with that encoder: leave one out"
    held = "the results" if is_over else "a run"
    return f"{holder} holds {held} of {began_with}; {advice}"
