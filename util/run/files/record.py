"""What a checkpoint says about its run, and what it holds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from util.run.errors import CheckpointError

if TYPE_CHECKING:
    import torch

INVALID_SETTINGS = ("nodata", "mask_band", "bands")  # what marks invalid pixels


def without_marks(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings that say of no pixel that it is invalid."""
    return {name: value for name, value in settings.items() if name not in INVALID_SETTINGS}


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
    """The checkpoint whose weights a run began with. step, epoch, epochs: how far its own training was, if known."""

    path: str
    sha256: str
    step: int | None = None
    epoch: float | None = None
    epochs: float | None = None

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
    weights: "dict[str, torch.Tensor]"
    info: CheckpointInfo
    training: dict[str, Any]
