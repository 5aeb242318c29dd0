"""Checkpoint files: written atomically, verified by a hash, read without executing code.

The output folder of a run holds pairs of files. `checkpoint-<step>.pth` holds tensors, plain Python values and the
JSON string `meta`. `checkpoint-<step>.json`, its record, holds the size and the SHA-256 of the former and the same
meta. Both files are written under temporary names and synced before they are renamed, the record last. A checkpoint
without a record is not used, unless `adopt_checkpoint` can read it. The newest checkpoint is computed from the files in
the folder. No link points to it.

Weights of other key names or sizes are fitted into an encoder by `encoders.load`.
"""

import argparse
import hashlib
import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from util.atomic import replaced_file, sync
from util.lazy import LazyModule
from util.pos_embed import list_empty_tables
from util.text import shorten

timm_data = LazyModule("timm.data")

# Weights in folders that are no runs: of scripts/export.py, timm and Transformers, whose large files are cut in shards.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "model-00001-of-*", "pytorch_model-00001-of-*")
# What scripts/export.py stores beside the weights: of the images, and of a classifier.
EXPORTED_SETTINGS = ("mean", "std", "input_size", "crop_pct")
EXPORTED_FACTS = ("classes", "pixels", *EXPORTED_SETTINGS)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used for its purpose. The message is meant for the user."""


# ------------------------------------------------------------------------------------------------------ write and prune


def save_checkpoint(
    output_dir: str | Path, step: int | str, state: Mapping[str, Any], meta: Mapping[str, Any], keep: bool = False
) -> Path:
    """Writes the checkpoint of `step` and its record, and returns the checkpoint's path.

    state: tensors and plain values. meta: values that JSON can hold. keep: mark the checkpoint in its record, so that
    it is never pruned. A `step` "best" is a name of its own, which is never counted as a step.

    Raises OSError, which names the file, if a write fails, for example on a full disk. Then no partial file is left and
    older checkpoints are unchanged.
    """
    path = Path(output_dir) / f"checkpoint-{step}.pth"
    with replaced_file(path.with_suffix(".json"), durable=True) as record, replaced_file(path, durable=True) as weights:
        with HashedFile(weights) as file:
            _write_weights(file, {**state, "meta": json.dumps(meta)})
        _write_record(record, file.size, file.digest.hexdigest(), meta, keep)
        sync(record)  # now both are complete, and the weights are moved first
    return path


class HashedFile(io.FileIO):
    """A new file that computes size and SHA-256 of what is written to it, from the first byte to the last."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self.size, self.digest = 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        """Writes all of `data`, which FileIO does not promise. Both hashing and writing release the GIL."""
        rest = memoryview(data)
        self.digest.update(rest)
        self.size += len(rest)
        while rest:
            rest = rest[super().write(rest) :]
        return len(data)


def _write_weights(file: HashedFile, content: Mapping[str, Any]) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:  # torch's zip writer reports some failed writes this way
        if isinstance(error.__context__, OSError):  # the failed write, before the writer noticed a wrong position
            raise error.__context__ from error
        raise OSError(f"torch.save failed: {error}") from error


def adopt_checkpoint(path: Path) -> str | None:
    """Writes the record of a checkpoint that has none, if it can be read. Returns why not, or None.

    Its save was interrupted, or it was copied without its record. It is marked as kept, as it may be the only copy.
    """
    try:
        content = read_checkpoint(path)
    except ValueError as error:
        return str(error)
    meta = meta_of(content)
    if "optimizer" not in content or meta.get("step") != step_of(path):
        return f"{str(path)!r} does not hold step {step_of(path)} of a run"
    with replaced_file(path.with_suffix(".json"), durable=True) as record:
        _write_record(record, path.stat().st_size, sha256(path), meta, keep=True)
    return None


def prune_checkpoints(output_dir: str | Path, good_steps: Sequence[int]) -> None:
    """Deletes older checkpoints that are no longer needed. To be called after a save.

    good_steps: steps of the checkpoints that are known to be good and are kept; the last one was just saved. Also kept
    are checkpoints that are marked as kept, that have no readable record, or that belong to a later step.
    """
    for path in list_finished(output_dir):
        record, is_older = _read_whole_record(path), step_of(path) < good_steps[-1]
        if is_older and step_of(path) not in good_steps and record is not None and not record.get("keep", True):
            path.unlink()
            path.with_suffix(".json").unlink()  # last: weights without a record would be taken for an interrupted save


def _write_record(record: Path, size: int, digest: str, meta: Mapping[str, Any], keep: bool) -> None:
    record.write_text(json.dumps({"size": size, "sha256": digest, "keep": keep, "meta": meta}, indent=1))


# ------------------------------------------------------------------------------------------------------ find and verify


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Returns the paths of all `checkpoint-<step>.pth`, oldest step first, intact or not. Other names are ignored."""
    named = Path(output_dir).glob("checkpoint-*.pth")
    return sorted((path for path in named if re.fullmatch(r"checkpoint-\d+", path.stem)), key=step_of)


def list_finished(output_dir: str | Path) -> list[Path]:
    """Returns the paths of `list_checkpoints` that have a record. Their hashes are not computed."""
    return [path for path in list_checkpoints(output_dir) if path.with_suffix(".json").exists()]


def step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint."""
    return int(path.stem.removeprefix("checkpoint-"))


def newest_checkpoint(output_dir: str | Path) -> tuple[Path | None, list[str]]:
    """Returns (path of the newest intact checkpoint or None, reasons why newer ones were skipped)."""
    skipped: list[str] = []
    for path in reversed(list_checkpoints(output_dir)):
        damage = _find_damage(path)
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


def read_record(path: Path) -> dict[str, Any] | None:
    """Returns the meta in the record of the checkpoint at `path`, without reading the checkpoint.

    Returns None if the checkpoint or its record is missing, or if the record is damaged.
    """
    record = _read_whole_record(path)
    return record["meta"] if record is not None and path.exists() else None


def _read_whole_record(path: Path) -> dict[str, Any] | None:
    """Returns the record of the checkpoint at `path` (size, sha256, keep, meta); None if it is missing or damaged."""
    try:
        record = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("meta"), dict) else None


def _find_damage(path: Path) -> str | None:
    """Returns why the checkpoint at `path` must not be used, or None if it is intact."""
    try:
        record = json.loads(path.with_suffix(".json").read_text())
    except FileNotFoundError:
        return "its .json is missing: the save was interrupted, or the file was copied without it"
    except ValueError:
        return "its .json is not readable"
    if not isinstance(record, dict) or not {"size", "sha256"} <= record.keys():
        return "its .json is not the record of a checkpoint"
    if path.stat().st_size != record["size"]:
        return f"{path.stat().st_size} bytes instead of {record['size']}"
    return None if sha256(path) == record["sha256"] else "its SHA-256 is not the recorded one"


def recorded_sha256(path: Path) -> str:
    """Returns the SHA-256 of a checkpoint from its record. Computes it if there is no record."""
    record = _read_whole_record(path)
    return record["sha256"] if record is not None and "sha256" in record else sha256(path)


def sha256(path: str | Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------- read


def read_checkpoint(path: str | Path, is_verified: bool = False) -> dict[str, Any]:
    """Returns the content of a `.pth` or `.safetensors` file on the CPU, with `meta` decoded.

    No code in the file is executed. Besides tensors and plain values only `argparse.Namespace` is accepted, which MAE's
    releases contain. Raises ValueError if there is no file, CheckpointError if it is damaged or of another kind, and
    OSError if the storage fails. is_verified: its hash has just been compared with its record, for example by
    `newest_checkpoint`.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no checkpoint at {str(path)!r}: give the path of a .pth or .safetensors file")
    record = path.with_suffix(".json")
    if not is_verified and record.exists() and "sha256" in record.read_text() and (damage := _find_damage(path)):
        raise CheckpointError(f"checkpoint {str(path)!r} is damaged: {damage}")
    try:
        if path.suffix == ".safetensors":
            return _add_config(_read_safetensors(path), path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch raises many types for files that it has not written
        sha256(path)  # OSError if the storage fails, in whose place torch may raise another type
        raise CheckpointError(f"{str(path)!r} cannot be read as a checkpoint of tensors: {_describe(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(path)!r} holds a {type(content).__name__}, not a dict of weights")
    if isinstance(content.get("meta"), str):
        content["meta"] = json.loads(content["meta"])
    return _add_config(content, path) if path.suffix == ".bin" else content


def read_meta(path: str | Path) -> dict[str, Any]:
    """Returns the meta of a checkpoint, from its record if there is one."""
    return read_record(Path(path)) or meta_of(read_checkpoint(path))


def meta_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the meta in a checkpoint's content (settings, step, classes, ...), or {} for files of other projects.

    Files of Transformers have settings (input_size, num_heads, norm_eps, mean, std), classes and the type of pixels.
    """
    meta = content.get("meta")
    return meta if isinstance(meta, dict) else {}


def meta_of_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the meta of an exported file. facts: those of EXPORTED_FACTS that are known."""
    settings = {name: facts[name] for name in EXPORTED_SETTINGS if name in facts}
    return {"settings": settings} | {name: facts[name] for name in ("classes", "pixels") if name in facts}


def pixel_settings(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the meta of a checkpoint says about the images of its model. What is unknown is None.

    pixels: their type, uint8, uint16 or float32. Runs that did not store it had uint8. mean, std: of each channel.
    """
    settings = meta.get("settings", {})
    pixels = meta.get("pixels", "uint8" if "model" in settings else None)
    return {"pixels": pixels, "mean": settings.get("mean"), "std": settings.get("std")}


def _describe(error: Exception) -> str:
    """Returns the error of torch.load or safetensors in short, without the advice to load files that may run code."""
    if isinstance(error, pickle.UnpicklingError):
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it holds {found[1]}" if found else "it holds more than tensors, or is damaged"
        return f"{what}; files whose reading could run code are refused"
    if isinstance(error, EOFError):
        return "it ends too early"
    return str(error).strip().partition(". ")[0]


def _read_safetensors(path: Path) -> dict[str, Any]:
    """Returns the weights, and the meta that scripts/export.py has stored in the file's metadata."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts = {name: json.loads(metadata[name]) for name in EXPORTED_FACTS if name in metadata}
    return {"model": weights, "meta": meta_of_facts(facts)}


def _add_config(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the content of a file of Transformers with what its config says as meta; that of others unchanged.

    What scripts/export.py has stored in the file wins.
    """
    config = _read_json(path.with_name("config.json"))
    if config.get("model_type") not in ("vit", "vit_mae"):
        return content
    if config.get("hidden_act", "gelu") != "gelu":
        raise CheckpointError(
            f"the config of {str(path)!r} has the activation {config['hidden_act']!r}; the encoders here have gelu"
        )
    images = _read_json(path.with_name("preprocessor_config.json"))
    factors = {1 / 255: "uint8", 1 / 65535: "uint16"}
    pixels = factors.get(images.get("rescale_factor", 0)) if images.get("do_rescale", True) else "float32"
    settings = {
        "input_size": config["image_size"],
        "num_heads": config["num_attention_heads"],
        "norm_eps": config.get("layer_norm_eps", 1e-12),  # the default of ViTConfig
    }
    if images.get("do_normalize", bool(images)):
        settings |= {"mean": images.get("image_mean"), "std": images.get("image_std")}
    stored = meta_of(content)
    settings |= stored.get("settings", {})
    return content | {"meta": {"pixels": pixels, "classes": _class_names(config), **stored, "settings": settings}}


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _class_names(config: Mapping[str, Any]) -> list[str] | None:
    """Returns the classes in a config of Transformers; None if there is no classifier, or if they have no names."""
    if not any(name.endswith("ForImageClassification") for name in config.get("architectures") or ()):
        return None
    labels = config.get("id2label", {})
    classes = [labels[str(i)] for i in range(len(labels))]

    imagenet = timm_data.ImageNetInfo()
    if classes == [imagenet.index_to_description(i) for i in range(imagenet.num_classes())]:
        return imagenet.label_names()  # the names of ImageNet's folders
    return None if classes == [f"LABEL_{i}" for i in range(len(classes))] else classes


# ----------------------------------------------------------------------------------------------------------------- load


def load_strict(
    model: torch.nn.Module, state_dict: Mapping[str, torch.Tensor], what: str, optional: str | None = None
) -> None:
    """Loads `state_dict` into `model`. Raises CheckpointError if any key is missing, unexpected or of another shape.

    For values that cannot be used: the errors of `check_values`.

    what: the weights' name in the error, in the plural. optional: keys of the model that contain this text may be
    missing; they then keep their values.
    """
    own = model.state_dict()
    missing = [key for key in own if key not in state_dict and not (optional and optional in key)]
    unexpected = [key for key in state_dict if key not in own]
    misshaped = list_misshaped(state_dict, own)
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": misshaped}
    texts = [f"{len(keys)} {kind}: {shorten(keys, most=6)}" for kind, keys in problems.items() if keys]
    if texts:
        raise CheckpointError(f"{what} do not fit this {type(model).__name__}: {'; '.join(texts)}")
    check_values(state_dict, what)
    model.load_state_dict(state_dict, strict=False)


def check_values(weights: Mapping[str, torch.Tensor], what: str) -> None:
    """Checks weights that are about to be loaded. what: their name in the errors, in the plural.

    FloatingPointError if a value is not finite. CheckpointError if a position table is zero everywhere, unless the
    positions are biases.
    """
    bad = [name for name, value in weights.items() if not (value.is_meta or value.isfinite().all())]
    if bad:
        raise FloatingPointError(f"{what} are not finite: {shorten(bad, most=6)}")
    if empty := list_empty_tables(weights):
        raise CheckpointError(
            f"{what} hold no positions: all values of {', '.join(empty)} are zero, so they were trained without "
            "positions, or never trained. ViTMAEForPreTraining(config) of Transformers 5.24 makes such models. Give "
            "weights that were trained with positions, or train from scratch"
        )


def list_misshaped(weights: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns a description of each key of `weights` whose tensor has another shape in the model's state dict `own`."""
    return [
        f"{key} is {list(value.shape)}, the model's {list(own[key].shape)}"
        for key, value in weights.items()
        if key in own and value.shape != own[key].shape
    ]
