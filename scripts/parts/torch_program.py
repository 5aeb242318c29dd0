"""A trained model as a program of torch.export, which runs without this project, and the check of its file."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from downstream.detection.fixed_shapes import FixedShapes
from encoders.trained import Task, Trained
from scripts.parts.export_facts import facts_of_program, pixels_of
from scripts.parts.timm_models import TOLERANCE
from util.data.invalid_pixels import InvalidPixels
from util.data.pixel_format import PixelFormat
from util.data.statistics import normalizer
from util.data.transforms import Normalize

FACTS = "facts.json"  # the name in the file


class Program(nn.Module):
    """Computes the outputs of a model from pixels as files hold them.

    They are logits [B, K], tokens [B, N, D] of an encoder, logits of the size of the images for segmentation, or the
    results of `FixedShapes` for detection. task: see `Trained`. nodata: value of invalid pixels beside NaN, None if
    there is no other one.
    """

    def __init__(self, network: nn.Module, task: Task, normalize: Normalize, nodata: float | None) -> None:
        super().__init__()
        self.network = network
        self.task = task
        self.normalize = normalize
        self.nodata = nodata
        self.requires_grad_(False).eval()

    def forward(self, imgs: Tensor) -> Tensor | dict[str, Tensor]:
        """imgs: [B, C, H, W] of the type `PixelFormat.batch_dtype`, in the unit of the files."""
        if self.nodata is not None:
            imgs = torch.where(imgs == self.nodata, torch.nan, imgs)
        normalized = self.normalize(imgs)
        if self.task == "encoder":
            return self.network.forward_features(normalized)
        outputs = self.network(normalized)
        if self.task == "segmentation":
            logits = outputs["decode"].float()
            return F.interpolate(logits, size=imgs.shape[-2:], mode="bilinear", align_corners=False)
        return outputs


def program_of(trained: Trained) -> tuple[Program, dict[str, Any]]:
    """Returns (program, facts), see `facts_of_program`."""
    network = trained.model
    if trained.task == "detection":
        network = FixedShapes(network)
    facts = facts_of_program(trained)
    normalize = normalizer(facts, pixels_of(trained.encoder, facts))
    return Program(network, trained.task, normalize, InvalidPixels.from_settings(facts).nodata), facts


def random_pixels(count: int, size: tuple[int, int], pixels: PixelFormat, program: Program) -> Tensor:
    """Returns images of noise as files hold them, [count, C, *size]. If pixels may be invalid, the first row is."""
    generator = torch.Generator().manual_seed(count)
    noise = torch.rand(count, pixels.channels, *size, generator=generator)
    if pixels.is_float:
        values = program.normalize.mean + program.normalize.std * (4 * noise - 2)
    else:
        values = (noise * pixels.full_range).round()
    imgs = values.to(getattr(torch, pixels.batch_dtype))
    if pixels.has_invalid:
        imgs[:, :, 0] = torch.nan if program.nodata is None else program.nodata
    return imgs


def noise_images(program: Program, size: tuple[int, int], pixels: PixelFormat) -> list[Tensor]:
    """Returns images to trace, then those to compare. torch.export takes a size 1 for a constant."""
    height, width = size
    shapes = [(2, height, width), (1, height, width), (3, height, width)]
    if isinstance(program.network, FixedShapes):  # takes one image of many sizes
        shapes = [(1, height // 2, width), (1, height, width), (1, height, width // 3)]
    return [random_pixels(count, (rows, columns), pixels, program) for count, rows, columns in shapes]


def write_program(path: Path, program: Program, example: Tensor, facts: Mapping[str, Any]) -> None:
    """Writes the program for batches of any size, or for an image of any size up to that of a detector.

    torch.export would report a full disk by an error of its own, so it writes to memory.
    """
    dynamic = {0: torch.export.Dim("batch", min=1)}
    if isinstance(program.network, FixedShapes):
        height, width = facts["input_size"]
        dynamic = {2: torch.export.Dim("height", max=height), 3: torch.export.Dim("width", max=width)}
    with torch.no_grad():
        exported = torch.export.export(program, (example,), dynamic_shapes={"imgs": dynamic}, strict=False)
    buffer = io.BytesIO()
    torch.export.save(exported, buffer, extra_files={FACTS: json.dumps(facts)})
    path.write_bytes(buffer.getbuffer())


@torch.inference_mode()
def check_program(path: Path, program: Program, batches: Sequence[Tensor]) -> float:
    """Returns the largest difference of the outputs of the program in a file from those of the run's model.

    ValueError if it is more than rounding, or if outputs are not finite.
    """
    written = torch.export.load(path).module()
    largest = 0.0
    for imgs in batches:
        found = tree_leaves(written(imgs))
        for values, expected in zip(found, tree_leaves(program(imgs)), strict=True):
            difference = (values - expected).abs().max().item()
            tolerance = TOLERANCE * max(1.0, expected.abs().max().item())
            if not difference <= tolerance:
                raise ValueError(f"the program differs from the run's model by {difference:.1e}: nothing is written")
            largest = max(largest, difference)
    return largest
