"""A trained model as a program of torch.export, which runs without this project, and the check of its file."""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encoders.trained import Trained
from scripts.parts.export_facts import facts_of_program, pixels_of
from scripts.parts.timm_models import TOLERANCE
from util.data.invalid_pixels import InvalidPixels
from util.data.pixel_format import PixelFormat
from util.data.statistics import normalizer
from util.data.transforms import Normalize

ROOT = Path(__file__).resolve().parents[2]
FACTS = "facts.json"  # the name in the file
EXAMPLES = 2  # images of the batch that is traced; torch.export takes 1 for a constant
CHECKED = (1, 3)  # images of the batches that are compared
SHARE_OF_HOLES = 0.1  # of the pixels in the check, if some may be invalid

# The check of a file, in a process that knows torch alone.
RUN_FILE = """
import sys
import torch

file, inputs, outputs = sys.argv[1:]
program = torch.export.load(file).module()
with torch.inference_mode():
    torch.save([program(imgs) for imgs in torch.load(inputs)], outputs)
"""


class Program(nn.Module):
    """Computes the outputs of a model from pixels as files hold them.

    network: returns logits [B, K], tokens [B, N, D], or {"decode": logits [B, K, h, w]}, which are resized to the
    images. nodata: value of invalid pixels beside NaN, None if there is no other one.
    """

    def __init__(self, network: nn.Module, normalize: Normalize, nodata: float | None) -> None:
        super().__init__()
        self.network = network
        self.normalize = normalize
        self.nodata = nodata
        self.requires_grad_(False).eval()

    def forward(self, imgs: Tensor) -> Tensor:
        """imgs: [B, C, H, W] of the type `PixelFormat.batch_dtype`, in the unit of the files."""
        if self.nodata is not None:
            imgs = torch.where(imgs == self.nodata, torch.nan, imgs)
        outputs = self.network(self.normalize(imgs))
        if isinstance(outputs, Mapping):
            logits = outputs["decode"].float()
            return F.interpolate(logits, size=imgs.shape[-2:], mode="bilinear", align_corners=False)
        return outputs


def program_of(trained: Trained) -> tuple[Program, dict[str, Any]]:
    """Returns (program, facts), see `facts_of_program`. ValueError for detectors: their outputs have no fixed shape."""
    if trained.task == "detection":
        raise ValueError("--format torch takes no detector: torch.hub's 'detector' loads it, --format timm its encoder")
    network = trained.model
    if trained.task == "encoder":
        network.forward = network.forward_features  # an encoder alone has no other output
    facts = facts_of_program(trained.encoder, trained.weights.info)
    normalize = normalizer(facts, pixels_of(trained.encoder, facts))
    return Program(network, normalize, InvalidPixels.from_settings(facts).nodata), facts


def random_pixels(count: int, size: tuple[int, int], pixels: PixelFormat, program: Program) -> Tensor:
    """Returns images of noise as files hold them, [count, C, *size], with holes if pixels may be invalid."""
    generator = torch.Generator().manual_seed(count)
    noise = torch.rand(count, pixels.channels, *size, generator=generator)
    if pixels.is_float:
        values = program.normalize.mean + program.normalize.std * (4 * noise - 2)
    else:
        values = (noise * pixels.full_range).round()
    imgs = values.to(getattr(torch, pixels.batch_dtype))
    if pixels.has_invalid:
        holes = torch.rand(imgs.shape, generator=generator) < SHARE_OF_HOLES
        imgs[holes] = torch.nan
        if program.nodata is not None:
            imgs[:, :, 0] = program.nodata
    return imgs


def write_program(path: Path, program: Program, example: Tensor, facts: Mapping[str, Any]) -> None:
    """Writes the program for batches of any size. ValueError if torch.export cannot record it.

    torch.export would report a full disk by an error of its own, so it writes to memory.
    """
    batch = torch.export.Dim("batch", min=1)
    try:
        with torch.no_grad():
            exported = torch.export.export(program, (example,), dynamic_shapes={"imgs": {0: batch}}, strict=False)
    except Exception as error:  # of many types
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"torch.export of torch {torch.__version__} cannot record a {type(program.network).__name__}: {reason}; "
            "load the model by torch.hub, or export it with --format timm"
        ) from error
    buffer = io.BytesIO()
    torch.export.save(exported, buffer, extra_files={FACTS: json.dumps(facts)})
    path.write_bytes(buffer.getbuffer())


def check_program(path: Path, program: Program, batches: Sequence[Tensor]) -> str:
    """Runs the file in a process without this project. Returns the largest difference from the run's model, as text.

    ValueError if it does not run, or if outputs differ by more than rounding. FloatingPointError if some are not
    finite.
    """
    with torch.inference_mode():
        expected = [program(imgs) for imgs in batches]
    if not all(outputs.isfinite().all() for outputs in expected):
        raise FloatingPointError("the outputs of the model for random images are not finite; nothing is written")
    differences = []
    for outputs, ours in zip(run_alone(path, batches), expected, strict=True):
        difference = (outputs - ours).abs().max().item()
        tolerance = TOLERANCE * max(1.0, ours.abs().max().item())
        if not difference <= tolerance:
            raise ValueError(
                f"the outputs of the program differ from those of the run's model by up to {difference:.1e}, more than "
                f"{tolerance:.1e}; nothing is written"
            )
        differences.append(difference)
    return f"{max(differences):.1e}"


def run_alone(path: Path, batches: Sequence[Tensor]) -> list[Tensor]:
    """Returns the outputs of the program in a file, in a new process that cannot import this project."""
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [place for place in places if place and Path(place).resolve() != ROOT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(others)}
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder, "inputs.pt")
        outputs = Path(folder, "outputs.pt")
        torch.save(list(batches), inputs)
        command = [sys.executable, "-c", RUN_FILE, str(path.resolve()), str(inputs), str(outputs)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise ValueError(f"the program does not run without this project, nothing is written: {lines[-1]}")
        return torch.load(outputs)
