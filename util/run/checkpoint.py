"""Checkpoint files: written atomically, verified by a hash, read without executing code.

The output folder of a run holds pairs of files. `checkpoint-<step>.pth` holds tensors, plain Python values and the
JSON string `meta`, which is a `CheckpointInfo`. `checkpoint-<step>.json`, its sidecar, holds the size and the SHA-256
of the former and the same meta. Both files are written under temporary names and synced before they are renamed, the
sidecar last. A checkpoint without a sidecar is not used, unless `adopt_checkpoint` can read it. The newest checkpoint
is computed from the files in the folder. No link points to it.

Weights of other key names or sizes are fitted into an encoder by `encoders.load`.
"""

import argparse
import hashlib
import io
import json
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from util.atomic import replaced_file, sync
from util.lazy import LazyModule
from util.pos_embed import list_empty_tables
from util.text import describe_owner, shorten

timm_data = LazyModule("timm.data")

# Weights in folders that are no runs: of scripts/export.py, timm and Transformers, whose large files are cut in shards.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "model-00001-of-*", "pytorch_model-00001-of-*")
# What scripts/export.py stores beside the weights: of the images, and of a classifier.
INVALID_SETTINGS = ("nodata", "mask_band", "bands")  # what marks invalid pixels
EXPORTED_SETTINGS = ("mean", "std", "input_size", "crop_pct", "optimizer", *INVALID_SETTINGS)
EXPORTED_FACTS = ("classes", "pixels", *EXPORTED_SETTINGS)
TRAINING_STATE = ("optimizer", "scaler", "meter")  # parts of a run's checkpoint, beside its weights


def without_marks(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings that say of no pixel that it is invalid."""
    return {name: value for name, value in settings.items() if name not in INVALID_SETTINGS}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used for its purpose. The message is meant for the user."""


# ---------------------------------------------------------------------------------------------------------------- types


@dataclass(frozen=True)
class DataInfo:
    """A data set of a run. fingerprint: hash of the images' names and labels."""

    num_images: int
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.num_images} images (names and labels {self.fingerprint[:8]})"


@dataclass(frozen=True)
class StartInfo:
    """The start of a run that wrote a checkpoint. started_from: the checkpoint of another folder where it began."""

    code: str
    command: str
    hosts: list[str] = field(default_factory=list)
    started_from: str | None = None


@dataclass(frozen=True)
class EncoderSource:
    """The checkpoint whose weights a run began with. step, epoch, epochs: how far its own training was, if known.

    optimizer: the class that trained it, if known.
    """

    path: str
    sha256: str
    step: int | None = None
    epoch: float | None = None
    epochs: float | None = None
    optimizer: str | None = None

    def is_newer_save_of(self, other: "EncoderSource") -> bool:
        """Whether this is a later checkpoint of the run that has saved `other`."""
        if Path(self.path).resolve().parent != Path(other.path).resolve().parent:
            return False
        if self.step is None or other.step is None:
            return False
        return other.step < self.step

    def warnings(self) -> list[str]:
        """Returns a warning if the training of the encoder has not reached its end."""
        if self.epoch is None or self.epochs is None or self.epoch >= self.epochs:
            return []
        progress = f"it is at step {self.step}, epoch {self.epoch:.4g} of {self.epochs}"
        return [f"warning: the training of {self.path} is not finished: {progress}"]

    def notes_on_optimizer(self, optimizer: str) -> list[str]:
        """Returns a note if Muon trained the weights, and AdamW goes on. optimizer: the class that trains them now."""
        if (self.optimizer, optimizer) != ("Muon", "AdamW"):
            return []
        return ["note: Muon has pre-trained the encoder; AdamW, which goes on here, may lose some accuracy"]


@dataclass(frozen=True)
class RunInfo:
    """The run that has written a checkpoint, when it did."""

    program: str
    step: int
    epoch: float
    world_size: int
    data: DataInfo
    val_data: DataInfo | None
    torch: str
    optimizer: str  # class whose state the checkpoint holds
    origin: StartInfo
    encoder: EncoderSource | None
    files: dict[str, str]  # {flag: fingerprint} of files that the model reads
    val: dict[str, Any] | None = None  # the scores of the best weights

    @property
    def is_best(self) -> bool:
        """Whether the checkpoint holds the best weights, which are saved alone: no run resumes with it."""
        return self.val is not None


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says beside tensors. Files of other projects say little or nothing.

    settings: all flags of the run, resolved; of exported files and of Transformers' only those of the model. pixels:
    type of the images, uint8, uint16 or float32. run: None unless the training of this project has written the file.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    pixels: str | None = None
    classes: list[str] | None = None
    class_colors: list[list[int]] | None = None
    run: RunInfo | None = None

    @property
    def step(self) -> int | None:
        return None if self.run is None else self.run.step

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached the end of its schedule."""
        return self.run is not None and self.run.epoch >= self.settings["epochs"]

    @property
    def pixel_settings(self) -> dict[str, Any]:
        """The type of the pixels, and mean and std of each channel. What is unknown is None.

        Of INVALID_SETTINGS it has those that the run was given.
        """
        known = {"pixels": self.pixels, "mean": self.settings.get("mean"), "std": self.settings.get("std")}
        for name in INVALID_SETTINGS:
            if self.settings.get(name) is not None:
                known[name] = self.settings[name]
        return known

    def at_step(self, step: int, steps_per_epoch: int, scores: dict[str, Any] | None = None) -> "CheckpointInfo":
        """Returns what a checkpoint of the same start says after `step` steps. scores: of the best weights."""
        assert self.run is not None
        return replace(self, run=replace(self.run, step=step, epoch=step / steps_per_epoch, val=scores))

    def to_json(self) -> dict[str, Any]:
        """Returns the values in one dict. Names that a user chooses, such as flags, are keys of dicts of their own."""
        values = asdict(self)
        run = values.pop("run") or {}
        if run and run["val"] is None:
            del run["val"]
        return {**run, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], path: str | Path) -> "CheckpointInfo":
        """Reads what `to_json` has returned. CheckpointError if another version of this code has written it."""
        run = None
        if "program" in values:
            try:
                run = _read_run_info(values)
            except (KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{str(path)!r} was written by another version of this code, whose checkpoints this one cannot "
                    f"read ({error}): use that version"
                ) from error
        return cls(
            settings=values.get("settings") or {},
            pixels=values.get("pixels"),
            classes=values.get("classes"),
            class_colors=values.get("class_colors"),
            run=run,
        )


def _read_run_info(values: Mapping[str, Any]) -> RunInfo:
    """Raises KeyError or TypeError if names are missing or unknown."""
    return RunInfo(
        program=values["program"],
        step=values["step"],
        epoch=values["epoch"],
        world_size=values["world_size"],
        data=DataInfo(**values["data"]),
        val_data=DataInfo(**values["val_data"]) if values["val_data"] else None,
        torch=values["torch"],
        optimizer=values["optimizer"],
        origin=StartInfo(**values["origin"]),
        encoder=EncoderSource(**values["encoder"]) if values["encoder"] else None,
        files=values["files"],
        val=values.get("val"),
    )


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file. weights: on the CPU, under the file's own names.

    training: what a run resumes with: optimizer, scaler, meter. Empty if the file holds weights alone.
    """

    path: Path
    weights: dict[str, torch.Tensor]
    info: CheckpointInfo
    training: dict[str, Any]


# ------------------------------------------------------------------------------------------------------ write and prune


def file_name(step: int | Literal["best"]) -> str:
    """Returns the name of a checkpoint in the folder of its run."""
    return f"checkpoint-{step}.pth"


def save_checkpoint(
    output_dir: str | Path,
    step: int | Literal["best"],
    state: Mapping[str, Any],
    meta: Mapping[str, Any],
    keep: bool = False,
    on_write: Callable[[], None] | None = None,
) -> Path:
    """Writes the checkpoint of `step` and its sidecar, and returns the checkpoint's path.

    state: tensors and plain values. meta: `CheckpointInfo.to_json()`. keep: mark the checkpoint in its sidecar, so that
    it is never pruned. A `step` "best" is a name of its own, which is never counted as a step. on_write: called after
    each piece that is written.

    Raises OSError, which names the file, if a write fails, for example on a full disk. Then no partial file is left and
    older checkpoints are unchanged.
    """
    path = Path(output_dir) / file_name(step)
    with replaced_file(path.with_suffix(".json"), durable=True) as sidecar:
        with replaced_file(path, durable=True) as weights:  # the inner one is renamed first
            with HashedFile(weights, on_write) as file:
                _write_weights(file, {**state, "meta": json.dumps(meta)})
            _write_sidecar(sidecar, file.size, file.digest.hexdigest(), meta, keep)
            sync(sidecar)  # now both are complete
    return path


class HashedFile(io.FileIO):
    """A new file that computes size and SHA-256 of what is written to it, from the first byte to the last."""

    def __init__(self, path: Path, on_write: Callable[[], None] | None = None) -> None:
        super().__init__(path, "w")
        self.on_write = on_write
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Writes all of `data`, which FileIO does not promise. Both hashing and writing release the GIL."""
        rest = memoryview(data)
        self.digest.update(rest)
        self.size += len(rest)
        while rest:
            rest = rest[super().write(rest) :]
        if self.on_write is not None:
            self.on_write()
        return len(data)


def _write_weights(file: HashedFile, content: Mapping[str, Any]) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:  # torch's zip writer reports some failed writes this way
        if isinstance(error.__context__, OSError):  # the failed write, before the writer noticed a wrong position
            raise error.__context__ from error
        raise OSError(f"torch.save failed: {error}") from error


def adopt_checkpoint(path: Path) -> str | None:
    """Writes the sidecar of a checkpoint that has none, if it can be read. Returns why not, or None.

    Its save was interrupted, or it was copied without its sidecar. It is marked as kept, as it may be the only copy.
    """
    try:
        checkpoint = read_checkpoint(path)
    except ValueError as error:
        return str(error)
    if not checkpoint.training or checkpoint.info.step != step_of(path):
        return f"{str(path)!r} does not hold step {step_of(path)} of a run"
    with replaced_file(path.with_suffix(".json"), durable=True) as sidecar:
        _write_sidecar(sidecar, path.stat().st_size, sha256(path), checkpoint.info.to_json(), keep=True)
    return None


def prune_checkpoints(output_dir: str | Path, good_steps: Sequence[int]) -> None:
    """Deletes older checkpoints that are no longer needed. To be called after a save.

    good_steps: steps of the checkpoints that are known to be good and are kept; the last one was just saved. Also kept
    are checkpoints that are marked as kept, that have no readable sidecar, or that belong to a later step.
    """
    for path in list_finished(output_dir):
        step = step_of(path)
        if step >= good_steps[-1] or step in good_steps:
            continue
        sidecar = _read_sidecar_file(path)
        if sidecar is not None and not sidecar.get("keep", True):
            path.unlink()
            path.with_suffix(".json").unlink()  # last: weights without it would be taken for an interrupted save


def _write_sidecar(sidecar: Path, size: int, digest: str, meta: Mapping[str, Any], keep: bool) -> None:
    sidecar.write_text(json.dumps({"size": size, "sha256": digest, "keep": keep, "meta": meta}, indent=1))


# ------------------------------------------------------------------------------------------------------ find and verify


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
    sidecar = _read_sidecar_file(path)
    if sidecar is None or not path.exists():
        return None
    return CheckpointInfo.from_json(sidecar["meta"], path)


def _read_sidecar_file(path: Path) -> dict[str, Any] | None:
    """Returns the sidecar of the checkpoint at `path` (size, sha256, keep, meta); None if it is missing or damaged."""
    try:
        sidecar = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return None
    if isinstance(sidecar, dict) and isinstance(sidecar.get("meta"), dict):
        return sidecar
    return None


def _find_damage(path: Path) -> str | None:
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
    return None


def recorded_sha256(path: Path) -> str:
    """Returns the SHA-256 of a checkpoint from its sidecar. Computes it if there is none."""
    sidecar = _read_sidecar_file(path)
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


# ----------------------------------------------------------------------------------------------------------------- read


def read_checkpoint(path: str | Path, is_verified: bool = False, mmap: bool = False) -> Checkpoint:
    """Reads a `.pth` or `.safetensors` file, or a `.bin` of Transformers.

    No code in the file is executed. Besides tensors and plain values only `argparse.Namespace` is accepted, which MAE's
    releases contain. Raises ValueError if there is no file, CheckpointError if it is damaged or of another kind, and
    OSError if the storage fails. is_verified: its hash has just been compared with its sidecar, for example by
    `newest_checkpoint`. mmap: tensors are views of the file, whose pages the processes of a node share. If the storage
    fails later, SIGBUS ends the process.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no checkpoint at {str(path)!r}: give the path of a .pth or .safetensors file")
    if not is_verified:
        refuse_damage(path)
    content = _read_content(path, mmap)
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(path)!r} holds a {type(content).__name__}, not a dict of weights")
    meta = content.get("meta")
    if isinstance(meta, str):
        meta = json.loads(meta)
    info = CheckpointInfo.from_json(meta if isinstance(meta, dict) else {}, path)
    if path.suffix in (".safetensors", ".bin"):
        info = _add_config(info, path)
    training = {name: content[name] for name in TRAINING_STATE if name in content}
    return Checkpoint(path, _find_weights(content, path), info, training)


def refuse_damage(path: Path) -> None:
    """Raises CheckpointError if the checkpoint at `path` is not what its sidecar says, if it has one."""
    sidecar = path.with_suffix(".json")
    if not sidecar.exists() or "sha256" not in sidecar.read_text():
        return
    damage = _find_damage(path)
    if damage is not None:
        raise CheckpointError(f"checkpoint {str(path)!r} is damaged: {damage}")


def read_info(path: str | Path) -> CheckpointInfo:
    """Returns what a checkpoint says, from its sidecar if there is one."""
    return read_sidecar(Path(path)) or read_checkpoint(path).info


def _read_content(path: Path, mmap: bool) -> Any:
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except PermissionError as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read: {error.strerror} ({describe_owner(str(path))})"
        ) from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch raises many types for files that it has not written
        sha256(path)  # OSError if the storage fails, in whose place torch may raise another type
        raise CheckpointError(f"{str(path)!r} cannot be read as a checkpoint of tensors: {_describe(error)}") from error


def _find_weights(content: Mapping[str, Any], path: Path) -> dict[str, torch.Tensor]:
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


def _describe(error: Exception) -> str:
    """Returns the error of torch.load or safetensors in short, without the advice to load files that may run code."""
    if isinstance(error, pickle.UnpicklingError):
        contents = "it holds more than tensors, or is damaged"
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        if named:
            contents = f"it holds {named[1]}, which may be of another version of the code that has written it"
        return f"{contents}; files whose reading could run code are refused: save the tensors of a state_dict alone"
    if isinstance(error, EOFError):
        return "it ends too early"
    return str(error).strip().partition(". ")[0]


def _read_safetensors(path: Path) -> dict[str, Any]:
    """Returns the weights, and the meta that scripts/export.py has stored in the file's metadata."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts = {name: json.loads(metadata[name]) for name in EXPORTED_FACTS if name in metadata}
    return {"model": weights, "meta": exported_info(facts).to_json()}


def exported_info(facts: Mapping[str, Any]) -> CheckpointInfo:
    """Returns what an exported file says. facts: those of EXPORTED_FACTS that are known."""
    settings = {name: facts[name] for name in EXPORTED_SETTINGS if name in facts}
    return CheckpointInfo(settings, pixels=facts.get("pixels"), classes=facts.get("classes"))


def _add_config(info: CheckpointInfo, path: Path) -> CheckpointInfo:
    """Adds what the config of a folder of timm or Transformers says, whatever the file itself does not say.

    Files of others are left as they are.
    """
    config = _read_json(path.with_name("config.json"))
    if "pretrained_cfg" in config:
        images = config["pretrained_cfg"]
        view = {name: images[name] for name in ("mean", "std", "crop_pct") if images.get(name) is not None}
        classes = info.classes
        if classes is None and isinstance(config.get("label_names"), list):
            classes = config["label_names"]
        return replace(info, settings={**view, **info.settings}, pixels=info.pixels or "uint8", classes=classes)
    if config.get("model_type") not in ("vit", "vit_mae"):
        return info
    if config.get("hidden_act", "gelu") != "gelu":
        raise CheckpointError(
            f"the config of {str(path)!r} has the activation {config['hidden_act']!r}; the encoders here have gelu"
        )
    settings = {
        "input_size": config["image_size"],
        "num_heads": config["num_attention_heads"],
        "norm_eps": config.get("layer_norm_eps", 1e-12),  # the default of ViTConfig
    }
    images = _read_json(path.with_name("preprocessor_config.json"))
    if images.get("do_normalize", bool(images)):
        settings["mean"] = images.get("image_mean")
        settings["std"] = images.get("image_std")
    pixels: str | None = "float32"
    if images.get("do_rescale", True):
        factors = {1 / 255: "uint8", 1 / 65535: "uint16"}
        pixels = factors.get(images.get("rescale_factor", 0))
    return replace(
        info,
        settings={**settings, **info.settings},
        pixels=info.pixels or pixels,
        classes=info.classes or _class_names(config),
    )


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
    of_model = model.state_dict()
    missing = [key for key in of_model if key not in state_dict and not (optional and optional in key)]
    unexpected = [key for key in state_dict if key not in of_model]
    misshaped = list_misshaped(state_dict, of_model)
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
    empty = list_empty_tables(weights)
    if empty:
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
