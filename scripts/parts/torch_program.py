"""A trained model as a program of torch.export, which runs without this project, and the check of its file."""

import io
import json
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

FACTS = "facts.json"  # the name in the file
EXAMPLES = 2  # images of the batch that is traced; torch.export takes 1 for a constant
CHECKED = (1, 3)  # images of the batches that are compared
SHARE_OF_HOLES = 0.1  # of the pixels in the check, if some may be invalid


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
    facts = facts_of_program(trained)
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
    """Writes the program for batches of any size.

    torch.export would report a full disk by an error of its own, so it writes to memory.
    """
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        exported = torch.export.export(program, (example,), dynamic_shapes={"imgs": {0: batch}}, strict=False)
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
        expected = program(imgs)
        difference = (written(imgs) - expected).abs().max().item()
        tolerance = TOLERANCE * max(1.0, expected.abs().max().item())
        if not difference <= tolerance:
            raise ValueError(f"the program differs from the run's model by {difference:.1e}: nothing is written")
        largest = max(largest, difference)
    return largest
