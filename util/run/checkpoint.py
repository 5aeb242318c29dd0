"""Checkpoints that survive: written atomically, verified by hash, read without executing anything.

A run's folder holds pairs `checkpoint-<step>.pth` (tensors, plain Python numbers and one JSON string `meta`) and
`checkpoint-<step>.json` (size and SHA-256 of the former, and the same meta). Each file is written under a temporary
name, synced and renamed, the `.json` last: a pair either exists whole or does not count. Which one is the newest is
computed from what is there, never stored in a link that could dangle.
"""

import argparse
import hashlib
import json
import os
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import safe_open
from torch.nn import functional as F

from util.key_names import encoder_names, swap_merging
from util.rel_pos import resize_bias_table


class CheckpointError(ValueError):
    """A checkpoint that cannot be used for what it was given for; the message is for the user."""


def save_checkpoint(output_dir: str | Path, step: int | str, state: dict, meta: dict, keep: bool = False) -> Path:
    """Writes `state` (a dict of tensors and plain values) and `meta` (JSON-able) as the checkpoint of `step`; its path.

    `keep` marks it in its record as one that is never pruned. `step` "best" is a name of its own, which never counts as
    a step. OSError (disk full, say) names the file, leaves no partial file and harms no older checkpoint.
    """
    path = Path(output_dir) / f"checkpoint-{step}.pth"

    def write(file):
        try:
            torch.save({**state, "meta": json.dumps(meta)}, file)
        except RuntimeError as error:  # how torch's zip writer reports some failed writes
            full = isinstance(error.__context__, OSError)  # what the writer met before it said that a position is off
            raise error.__context__ if full else OSError(f"torch.save failed: {error}") from error

    _write_atomically(path, write)
    record = {"size": path.stat().st_size, "sha256": sha256(path), "keep": keep, "meta": meta}
    try:
        _write_atomically(path.with_suffix(".json"), lambda file: file.write(json.dumps(record, indent=1).encode()))
    except OSError:
        path.unlink()
        raise
    return path


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Paths of all `checkpoint-<step>.pth`, oldest first, intact or not; files of other names are not ours to touch."""
    named = Path(output_dir).glob("checkpoint-*.pth")
    return sorted((path for path in named if re.fullmatch(r"checkpoint-\d+", path.stem)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("checkpoint-"))


def newest_checkpoint(output_dir):
    """-> (path of the newest intact checkpoint or None, [why each newer one was skipped])."""
    skipped = []
    for path in reversed(list_checkpoints(output_dir)):
        problem = _problem(path)
        if problem is None:
            return path, skipped
        skipped.append(f"{path.name}: {problem}")
    return None, skipped


def read_record(path: Path) -> dict | None:
    """The meta in the record beside a checkpoint, or None where either is missing or damaged; the checkpoint is not read."""
    record = _read_whole_record(path)
    return record["meta"] if record is not None and path.exists() else None


def _read_whole_record(path: Path) -> dict | None:
    """The record beside the checkpoint at `path`: size, sha256, keep, meta. None where it is missing or damaged."""
    try:
        record = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("meta"), dict) else None


def is_kept(record: dict) -> bool:
    """Whether a record marks its checkpoint as kept for good. Records without the mark follow their own --save_every."""
    if "keep" in record:
        return bool(record["keep"])
    meta = record["meta"]
    save_every = meta.get("settings", {}).get("save_every")
    return save_every is None or meta.get("epoch", 0) % save_every == 0


def find_checkpoint_file(path):
    """`path` itself, or the newest intact checkpoint where it is a run's folder."""
    path = Path(path)
    if not path.is_dir():
        return path
    found, skipped = newest_checkpoint(path)
    if found is None:
        raise CheckpointError(f"{str(path)!r} holds no intact checkpoint{': ' + '; '.join(skipped) if skipped else ''}")
    return found


def prune_checkpoints(output_dir: str | Path, good_steps: Sequence[int]) -> None:
    """After a save: deletes the checkpoints before it that nothing needs any more.

    good_steps: of the checkpoints that are known to be good and stay; the last one was just saved. Those stay, too, that
    are marked to be kept, whose record cannot be read, or that are of a later step. Files that a killed process left
    half-written before that step are deleted.
    """
    present = [path for path in list_checkpoints(output_dir) if _step_of(path) <= good_steps[-1]]
    finished = [path for path in present if path.with_suffix(".json").exists()]
    for path in finished:
        record = _read_whole_record(path)
        if _step_of(path) not in good_steps and record is not None and not is_kept(record):
            path.with_suffix(".json").unlink()
            path.unlink()
    leftovers = [path for path in present[: present.index(finished[-1])] if path not in finished] if finished else []
    for path in [*leftovers, *Path(output_dir).glob(".checkpoint-*.tmp-*")]:
        path.unlink()


def read_checkpoint(path):
    """The content of a `.pth` or `.safetensors` file, on the CPU, with `meta` decoded. Nothing in the file can run code.

    Besides tensors and plain values one class is let through: the `argparse.Namespace` inside MAE's releases.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no checkpoint at {str(path)!r}: give the path of a .pth or .safetensors file")
    record = path.with_suffix(".json")
    if record.exists() and "sha256" in record.read_text() and (problem := _problem(path)):
        raise CheckpointError(f"checkpoint {str(path)!r} is damaged: {problem}")
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types for files that are not its own
        raise CheckpointError(f"{str(path)!r} cannot be read as a checkpoint of tensors: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(path)!r} holds a {type(content).__name__}, not a dict of weights")
    if isinstance(content.get("meta"), str):
        content["meta"] = json.loads(content["meta"])
    return content


def _reason(error: Exception) -> str:
    """What torch.load or safetensors says is wrong, without torch's advice to load files that may run code."""
    if isinstance(error, pickle.UnpicklingError):
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it holds {found[1]}" if found else "it holds more than tensors, or is damaged"
        return f"{what}; files whose reading could run code are refused"
    if isinstance(error, EOFError):
        return "it ends too early"
    return str(error).strip().partition(". ")[0]


def _read_safetensors(path):
    """Weights and, where the file was written by scripts/export.py, what they were trained with."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts = {name: json.loads(metadata[name]) for name in ("classes", "mean", "std") if name in metadata}
    return {"model": weights, "meta": {"classes": facts.pop("classes", None), "settings": facts}}


def weights_of(content):
    """The state dict in a checkpoint's content: under `model` (ours, MAE's), `state_dict` (iBOT's), or the content itself
    (timm's); of iBOT's and DINO's whole runs the student's backbone."""
    weights = content.get("model", content.get("state_dict", content.get("student", content)))
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise CheckpointError("the file holds no weights by their names: they may lie under `model`, `state_dict` or `student`")
    wrapped = "module.backbone."
    backbone = {name.removeprefix(wrapped): value for name, value in weights.items() if name.startswith(wrapped)}
    return backbone or weights


def load_strict(model, state_dict, what, optional=None):
    """Loads `state_dict` into `model`; ValueError names every key that is missing, unexpected or of another shape.

    Keys of the model that contain `optional` may be missing and then keep their values.
    """
    own = model.state_dict()
    missing = [k for k in own if k not in state_dict and not (optional and optional in k)]
    unexpected = [k for k in state_dict if k not in own]
    misshaped = [
        f"{k} is {list(v.shape)}, the model's {list(own[k].shape)}"
        for k, v in state_dict.items()
        if k in own and v.shape != own[k].shape
    ]
    problems = [("missing", missing), ("unexpected", unexpected), ("of another shape", misshaped)]
    if any(keys for _, keys in problems):
        text = "; ".join(f"{len(keys)} {kind}: {_shorten(keys)}" for kind, keys in problems if keys)
        raise CheckpointError(f"{what} do not fit this {type(model).__name__}: {text}")
    model.load_state_dict(state_dict, strict=False)


def is_whole_run(content):
    """Whether a checkpoint's content is that of a whole run of iBOT or DINO, where `weights_of` takes the student."""
    return "student" in content and not {"model", "state_dict"} & content.keys()


def encoder_weights_of(content):
    """The state dict in a checkpoint's content, with the encoder under our names whatever release it is of."""
    return encoder_names(weights_of(content))


# What belongs to an encoder: a key of that kind which a ViT here lacks is another network.
_ENCODER_KEYS = ("cls_token", "pos_embed", "patch_embed.", "blocks.", "norm.", "norm_pre.", "reg_token", "rel_pos_bias.")


def refuse_foreign(model, weights, what):
    """ValueError if the weights hold a part of an encoder that `model` has not: without it they compute something else."""
    foreign = [k for k in weights if k.startswith(_ENCODER_KEYS) and k not in model.state_dict()]
    if foreign:
        raise CheckpointError(f"{what} holds another kind of encoder: this ViT has no {_shorten(foreign)}")


class LoadReport(NamedTuple):
    """What `load_encoder` did, as lists of keys."""

    loaded: list[str]
    resized: list[str]
    missing: list[str]
    unexpected: list[str]

    def __str__(self) -> str:
        """Of unexpected keys the modules that they belong to: the decoder of a pre-trained model is one of them."""
        unused = list(dict.fromkeys(name.partition(".")[0] for name in self.unexpected))
        parts = (("loaded", self.loaded, []), ("resized", self.resized, self.resized), ("missing", self.missing, self.missing))
        counts = [*parts, ("not used", self.unexpected, unused)]
        return "; ".join(f"{len(keys)} {what}" + (f" ({_shorten(names)})" if names else "") for what, keys, names in counts)


def load_encoder(
    model: torch.nn.Module, path: str | Path, first_release_merging: bool = False, classes: list[str] | None = None
) -> LoadReport:
    """Loads a pre-trained encoder into a fine-tune model; -> LoadReport.

    Takes this project's checkpoints, timm's files, and the releases of MAE, MFF, SimMIM, LocalMIM, TEC and GreenMIM (the
    weights may lie under `model` or `state_dict`). The MLP on TEC's class token is folded into the token;
    first_release_merging re-indexes GreenMIM's public files. Position tables of another grid are resized (bicubic, class row
    kept), and so are tables of relative-position biases; a table that all blocks shared is copied into each. A head is
    loaded if it has the size of the model's and, where the file names its classes, if they are `classes`, the model's, in
    that order. Only the head and the pooling norm may be missing; anything else missing or mis-shaped raises ValueError.
    """
    return fit_encoder(model, read_checkpoint(path), repr(str(path)), first_release_merging, classes)


def fit_encoder(
    model: torch.nn.Module,
    content: dict,
    what: str,
    first_release_merging: bool = False,
    classes: list[str] | None = None,
) -> LoadReport:
    """`load_encoder` for the content of a file that was read already, or for a state dict; `what` names it in errors."""
    weights = encoder_weights_of(content)
    weights = swap_merging(weights) if first_release_merging else weights
    own = model.state_dict()
    shared = weights.get("rel_pos_bias.relative_position_bias_table")
    if shared is not None:
        weights = {k: v for k, v in weights.items() if k != "rel_pos_bias.relative_position_bias_table"}
        weights = weights | {k: shared for k in own if k.endswith("attn.relative_position_bias_table") and k not in weights}
    found = {k: v for k, v in weights.items() if k in own and torch.is_tensor(v)}
    meta = content["meta"] if isinstance(content.get("meta"), dict) else {}
    # A head made for other classes is left out, as MAE's fine-tuning does.
    other_classes = classes is not None and meta.get("classes") not in (None, list(classes))
    found = {k: v for k, v in found.items() if not (k.startswith("head.") and (other_classes or v.shape != own[k].shape))}
    made = meta.get("settings", {}).get("model")
    made = f" (it was made as {made})" if made else ""
    kernel, own_kernel = (tensors.get("patch_embed.proj.weight") for tensors in (found, own))
    if kernel is not None and own_kernel is not None and len(kernel) != len(own_kernel):
        raise CheckpointError(
            f"{what}{made} holds an encoder of width {len(kernel)}, this {type(model).__name__} has width "
            f"{len(own_kernel)}: choose the --model of its size"
        )
    resized = []
    if "pos_embed" in found and _grid_of(content, found["pos_embed"]) != tuple(model.grid_size):
        grid = _grid_of(content, found["pos_embed"])
        found["pos_embed"] = _resize_pos_embed(found["pos_embed"], grid, model.grid_size, own["pos_embed"].shape)
        resized = ["pos_embed"]
    for name, table in found.items():
        if name.endswith("relative_position_bias_table"):
            found[name] = _fit_bias_table(table, content, own[name], model)
            resized += [name] if found[name] is not table else []
    missing = [k for k in own if k not in found]
    needed = [k for k in missing if not k.startswith(("head.", "fc_norm."))]
    misshaped = [f"{k} is {list(v.shape)}, the model's {list(own[k].shape)}" for k, v in found.items() if v.shape != own[k].shape]
    if needed or misshaped:
        text = "; ".join([f"missing: {_shorten(needed)}"] * bool(needed) + [_shorten(misshaped)] * bool(misshaped))
        raise CheckpointError(f"{what}{made} does not hold the encoder of this {type(model).__name__}: {text}")
    model.load_state_dict(found, strict=False)
    return LoadReport(list(found), resized, missing, [k for k in weights if k not in found])


def _settings_grid(content):
    """(rows, columns) of the tokens by the settings of our checkpoints; None without settings."""
    settings = content["meta"].get("settings", {}) if isinstance(content.get("meta"), dict) else {}
    size, patch_size = settings.get("input_size"), settings.get("patch_size")
    if not (size and patch_size):
        return None
    rows, *columns = (side // patch_size for side in ([size] if isinstance(size, int) else size))
    return rows, *(columns or [rows])


def _grid_of(content, table):
    """(rows, columns) of a position table: from the settings of our checkpoints, else square, else None."""
    if grid := _settings_grid(content):
        return grid
    side = round((table.shape[1] - 1) ** 0.5)
    return (side, side) if side * side == table.shape[1] - 1 else None


def _resize_pos_embed(table, source, target, shape):
    """[1, 1 + n, D] of the grid `source` -> [1, 1 + m, D] of `target`: the class row stays, the grid is interpolated."""
    if source is None or table.shape[2] != shape[2]:
        raise CheckpointError(
            f"pos_embed {list(table.shape)} cannot be resized to {list(shape)}: a square grid plus a class row is needed"
        )
    grid = table[:, 1:].float().unflatten(1, source).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=tuple(target), mode="bicubic", align_corners=False)
    return torch.cat([table[:, :1].float(), grid.flatten(2).transpose(1, 2)], dim=1)


def _fit_bias_table(table, content, own, model):
    """A table of relative-position biases, resized where it is of another window (Swin) or grid than the model's `own`.

    A grid's table has three rows more, the class token's.
    """
    if table.shape[1] != own.shape[1]:
        raise CheckpointError(f"a bias table of {table.shape[1]} heads cannot become one of {own.shape[1]}")
    if hasattr(model, "cls_token"):
        square = round(((len(table) - 3) ** 0.5 + 1) / 2)
        source, target, extra = _settings_grid(content) or (square, square), tuple(model.grid_size), 3
    else:
        sides = ((round(len(t) ** 0.5) + 1) // 2 for t in (table, own))
        (source, target), extra = ((side, side) for side in sides), 0
    return table if source == target else resize_bias_table(table, source, target, extra)


def _write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # a failed write does not say which file it was
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)  # the rename itself must reach the disk, too
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _problem(path):
    """Why the checkpoint cannot be trusted, or None."""
    try:
        record = json.loads(path.with_suffix(".json").read_text())
    except FileNotFoundError:
        return "its .json is missing, so it was never finished"
    except ValueError:
        return "its .json is not readable"
    if not isinstance(record, dict) or not {"size", "sha256"} <= record.keys():
        return "its .json is not a checkpoint's record"
    if path.stat().st_size != record["size"]:
        return f"{path.stat().st_size} bytes instead of {record['size']}"
    return None if sha256(path) == record["sha256"] else "its SHA-256 is not the recorded one"


def recorded_sha256(path: Path) -> str:
    """The SHA-256 of a checkpoint: as its record says, else computed."""
    record = _read_whole_record(path)
    return record["sha256"] if record is not None and "sha256" in record else sha256(path)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _shorten(keys, most=6):
    return ", ".join(keys[:most]) + (f", ... ({len(keys) - most} more)" if len(keys) > most else "")
