"""Finds the checkpoints of a folder, and verifies them by size and hash."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from util.run.errors import CheckpointError
from util.run.files.record import CheckpointInfo
from util.text import shorten

# Weights in folders that are no runs: of scripts/export.py, timm and Transformers, whose large files are cut in shards.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "model-00001-of-*", "pytorch_model-00001-of-*")


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

    Raises CheckpointError for a folder without an intact checkpoint and for other files of a run, such as log.jsonl.
    The message names the path that was probably meant.
    """
    path = Path(path)
    if path.is_file() and path.suffix in (".json", ".jsonl", ".txt"):
        beside = path.with_suffix(".pth")
        advice = f"the checkpoint is {str(beside)!r}" if beside.is_file() else f"give the folder {str(path.parent)!r}"
        raise CheckpointError(f"{str(path)!r} is a record of a run and holds no weights: {advice}")
    if not path.is_dir():
        return path
    os.listdir(path)  # PermissionError: `glob` finds nothing in a folder that cannot be read
    found, skipped = newest_checkpoint(path)
    if found is not None:
        return found
    exported = [file for name in WEIGHT_FILES for file in path.glob(name)]
    if exported and not skipped:
        return exported[0]
    runs = sorted({str(checkpoint.parent) for checkpoint in path.glob("*/checkpoint-*.pth")})
    if skipped:
        reason = "; ".join(skipped)
    elif runs:
        reason = f"it holds the runs {shorten(runs)}"
    else:
        reason = "give the folder of a run, or a checkpoint"
    raise CheckpointError(f"{str(path)!r} holds no intact checkpoint: {reason}")


def list_shards(path: Path) -> list[Path]:
    """Returns the paths of all shards if `path` is one of several, such as model-00001-of-00002.safetensors."""
    match = re.fullmatch(r"(.+-)\d{5}-of-(\d{5})(\..+)", path.name)
    if match is None:
        return [path]
    name, number, suffix = match.groups()
    return [path.with_name(f"{name}{i:05}-of-{number}{suffix}") for i in range(1, int(number) + 1)]


def read_sidecar(path: Path) -> CheckpointInfo | None:
    """Returns what the sidecar of the checkpoint at `path` says, without reading the checkpoint.

    Returns None if the checkpoint or its sidecar is missing, or if the sidecar is damaged.
    """
    sidecar = read_sidecar_file(path)
    if sidecar is None or not path.exists():
        return None
    return CheckpointInfo.from_json(sidecar["meta"], path)


def read_sidecar_file(path: Path) -> dict[str, Any] | None:
    """Returns the sidecar of the checkpoint at `path` (size, sha256, keep, meta); None if it is missing or damaged."""
    try:
        sidecar = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return None
    if isinstance(sidecar, dict) and isinstance(sidecar.get("meta"), dict):
        return sidecar
    return None


def find_damage(path: Path) -> str | None:
    """Returns why the checkpoint at `path` must not be used, or None if it is intact."""
    try:
        sidecar = json.loads(path.with_suffix(".json").read_text())
    except FileNotFoundError:
        return "its .json is missing: the save was interrupted, or the file was copied without it"
    except ValueError:
        return "its .json is not readable"
    if not isinstance(sidecar, dict) or not {"size", "sha256"} <= sidecar.keys():
        return "its .json is not the record of a checkpoint"
    size = path.stat().st_size
    if size != sidecar["size"]:
        return f"{size} bytes instead of {sidecar['size']}"
    if sha256(path) != sidecar["sha256"]:
        return "its SHA-256 is not the recorded one"
    try:
        CheckpointInfo.from_json(sidecar["meta"], path)
    except (CheckpointError, KeyError, AttributeError, TypeError) as error:
        return f"its .json does not describe a run: {error}"
    return None


def recorded_sha256(path: Path) -> str:
    """Returns the SHA-256 of a checkpoint from its sidecar. Computes it if there is none."""
    sidecar = read_sidecar_file(path)
    if sidecar is not None and "sha256" in sidecar:
        return sidecar["sha256"]
    return sha256(path)


def sha256(path: str | Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
