"""Checkpoint files: written atomically, verified by a hash, read without executing code.

The output folder of a run holds pairs of files. `checkpoint-<step>.pth` holds tensors, plain Python values and the
JSON string `meta`, which is a `CheckpointInfo`. `checkpoint-<step>.json`, its sidecar, holds the size and the SHA-256
of the former and the same meta. Both files are written under temporary names and synced before they are renamed, the
sidecar last. A checkpoint without a sidecar is not used. The newest checkpoint is computed from the files in the
folder. No link points to it.

Weights of other key names or sizes are fitted into an encoder by `encoders.load`.
"""

import argparse
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from util.atomic import replaced_file, sync
from util.run.errors import CheckpointError
from util.run.files.record import Checkpoint, CheckpointInfo

TRAINING_STATE = ("optimizer", "scaler", "meter")  # parts of a run's checkpoint, beside its weights
# Weights in folders that are no runs: of scripts/export.py, timm and Transformers
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def file_name(step: int | str) -> str:
    """Returns the name of a checkpoint in the folder of its run."""
    return f"checkpoint-{step}.pth"


def save_checkpoint(
    output_dir: str | Path,
    step: int | str,
    state: Mapping[str, Any],
    meta: Mapping[str, Any],
    keep: bool = False,
) -> Path:
    """Writes the checkpoint of `step` and its sidecar, and returns the checkpoint's path.

    state: tensors and plain values. meta: `CheckpointInfo.to_json()`. keep: mark the checkpoint in its sidecar, so that
    it is never pruned. step: or a name, which no run resumes from.

    Raises OSError, which names the file, if a write fails, for example on a full disk. Then no partial file is left and
    older checkpoints are unchanged.
    """
    path = Path(output_dir) / file_name(step)
    with replaced_file(path.with_suffix(".json"), durable=True) as sidecar:
        with replaced_file(path, durable=True) as weights:  # the inner one is renamed first
            with HashedFile(weights) as file:
                _write_weights(file, {**state, "meta": json.dumps(meta)})
            size = weights.stat().st_size
            record = {"size": size, "sha256": file.digest.hexdigest(), "keep": keep, "meta": meta}
            sidecar.write_text(json.dumps(record, indent=1))
            sync(sidecar)  # now both are complete
    return path


class HashedFile(io.BufferedWriter):
    """A new file that computes the SHA-256 of what is written to it, from the first byte to the last."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Both hashing and writing release the GIL."""
        self.digest.update(data)
        return super().write(data)


def _write_weights(file: HashedFile, content: Mapping[str, Any]) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:  # torch's zip writer reports some failed writes this way
        if isinstance(error.__context__, OSError):  # the failed write, before the writer noticed a wrong position
            raise error.__context__ from error
        raise OSError(f"torch.save failed: {error}") from error


def prune_checkpoints(output_dir: str | Path, good_steps: Sequence[int]) -> None:
    """Deletes older checkpoints that are no longer needed. To be called after a save.

    good_steps: steps of the checkpoints that are known to be good and are kept; the last one was just saved. Also kept
    are checkpoints that are marked as kept, that have no readable sidecar, or that belong to a later step.
    """
    for path in list_finished(output_dir):
        step = step_of(path)
        if step >= good_steps[-1] or step in good_steps:
            continue
        sidecar = read_sidecar_file(path)
        if sidecar is not None and not sidecar["keep"]:
            path.unlink()
            path.with_suffix(".json").unlink()  # last: weights without it would be taken for an interrupted save


def read_checkpoint(path: str | Path, is_verified: bool = False, mmap: bool = False) -> Checkpoint:
    """Reads a file of `torch.save`: a checkpoint of a run, weights of others.

    No code in the file is executed. Besides tensors and plain values only `argparse.Namespace` is accepted, which MAE's
    releases contain. Raises ValueError if there is no file, CheckpointError if it is damaged or of another kind, and
    OSError if the storage fails. is_verified: its hash has just been compared with its sidecar, for example by
    `newest_checkpoint`. mmap: map the tensors, so that each is read from the file when it is used.
    """
    path = Path(path)
    with reading(path):
        if not is_verified:
            refuse_damage(path)
        can_map = mmap and zipfile.is_zipfile(path)  # files of torch 1.5 and older are none
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(path)!r} holds a {type(content).__name__}, not a dict of weights")
    meta = content.get("meta")
    if isinstance(meta, str):
        with suppress(ValueError):  # of a foreign file, which says nothing here
            meta = json.loads(meta)
    info = CheckpointInfo.from_json(meta if isinstance(meta, dict) else {}, path)
    training = {name: content[name] for name in TRAINING_STATE if name in content}
    return Checkpoint(path, find_weights(content, path), info, training)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises the errors of `read_checkpoint` in place of those of libraries that read the file."""
    if not path.is_file():
        raise ValueError(f"no checkpoint at {str(path)!r}: give the path of a .pth or .safetensors file")
    try:
        yield
    except (OSError, MemoryError, CheckpointError):
        raise
    except Exception as error:  # torch raises many types for files that it has not written
        sha256(path)  # OSError if the storage fails, in whose place torch may raise another type
        reason = str(error).strip().partition(". ")[0]  # torch's next sentence advises to load files that may run code
        raise CheckpointError(f"{str(path)!r} cannot be read as a checkpoint of tensors: {reason}") from error


def refuse_damage(path: Path) -> None:
    """Raises CheckpointError if the checkpoint at `path` is not what its sidecar says, if it has one."""
    if read_sidecar_file(path) is None:
        return
    damage = find_damage(path)
    if damage is not None:
        raise CheckpointError(f"checkpoint {str(path)!r} is damaged: {damage}")


def read_info(path: str | Path) -> CheckpointInfo:
    """Returns what a checkpoint says, from its sidecar if there is one."""
    return read_sidecar(Path(path)) or read_checkpoint(path).info


def find_weights(content: Mapping[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors in a file's content. CheckpointError if there are none with names.

    They lie under `model` (this project, MAE), `state_dict` (iBOT's backbones, mmpretrain) or `student` (training
    checkpoints of iBOT and DINO), or are the content itself (timm).
    """
    weights = content.get("model", content.get("state_dict", content.get("student", content)))
    if isinstance(weights, dict) and all(isinstance(key, str) for key in weights):
        tensors = {key: value for key, value in weights.items() if torch.is_tensor(value)}
        if tensors:
            return tensors
    raise CheckpointError(
        f"{str(path)!r} holds no weights by their names, not in `model`, `state_dict` or `student` either"
    )


# ---------------------------------------------------------------------------------------------------------------- find


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Returns the paths of all `checkpoint-<step>.pth`, oldest step first, intact or not. Other names are ignored."""
    named = Path(output_dir).glob("checkpoint-*.pth")
    return sorted((path for path in named if re.fullmatch(r"checkpoint-\d+", path.stem)), key=step_of)


def list_finished(output_dir: str | Path) -> list[Path]:
    """Returns the paths of `list_checkpoints` that have a sidecar. Their hashes are not computed."""
    return [path for path in list_checkpoints(output_dir) if path.with_suffix(".json").exists()]


def step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint."""
    return int(path.stem.removeprefix("checkpoint-"))


def newest_checkpoint(output_dir: str | Path) -> tuple[Path | None, list[str]]:
    """Returns (path of the newest intact checkpoint or None, reasons why newer ones were skipped)."""
    skipped: list[str] = []
    for path in reversed(list_checkpoints(output_dir)):
        damage = find_damage(path)
        if damage is None:
            return path, skipped
        skipped.append(f"{path.name}: {damage}")
    return None, skipped


def find_checkpoint_file(path: str | Path) -> Path:
    """Returns `path` itself, the newest intact checkpoint of a run's folder, or the first of WEIGHT_FILES in another.

    A sidecar stands for its checkpoint. CheckpointError for a folder without any.
    """
    path = Path(path)
    if path.suffix == ".json":
        return path.with_suffix(".pth")
    if not path.is_dir():
        return path
    os.listdir(path)  # PermissionError: `glob` finds nothing in a folder that cannot be read
    found, skipped = newest_checkpoint(path)
    if found is not None:
        return found
    exported = [file for name in WEIGHT_FILES for file in path.glob(name)]
    if exported and not skipped:
        return exported[0]
    reason = "; ".join(skipped) or "give the folder of a run, or a checkpoint"
    raise CheckpointError(f"{str(path)!r} holds no intact checkpoint: {reason}")


def read_sidecar(path: Path) -> CheckpointInfo | None:
    """Returns what the sidecar of the checkpoint at `path` says, or None if it is missing or damaged."""
    sidecar = read_sidecar_file(path)
    if sidecar is None:
        return None
    return CheckpointInfo.from_json(sidecar["meta"], path)


def read_sidecar_file(path: Path) -> dict[str, Any] | None:
    """Returns the sidecar of the checkpoint at `path` (size, sha256, keep, meta); None if it is missing or damaged.

    OSError if the storage fails: an older checkpoint must not take the place of one that may be there.
    """
    try:
        sidecar = json.loads(path.with_suffix(".json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    if isinstance(sidecar, dict) and {"size", "sha256", "keep", "meta"} <= sidecar.keys():
        return sidecar
    return None


def find_damage(path: Path) -> str | None:
    """Returns why the checkpoint at `path` must not be used, or None if it is intact."""
    sidecar = read_sidecar_file(path)
    if sidecar is None:
        return "its .json is missing or damaged: the save was interrupted, or the file was copied without it"
    size = path.stat().st_size
    if size != sidecar["size"]:
        return f"{size} bytes instead of {sidecar['size']}"
    if sha256(path) != sidecar["sha256"]:
        return "its SHA-256 is not the recorded one"
    return None


def recorded_sha256(path: Path) -> str:
    """Returns the SHA-256 of a checkpoint from its sidecar. Computes it if there is none."""
    sidecar = read_sidecar_file(path)
    if sidecar is None:
        return sha256(path)
    return sidecar["sha256"]


def sha256(path: str | Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
