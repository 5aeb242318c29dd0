"""Pictures of images as a model sees them, and of the training samples of --check_data."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from util.data.datasets import AddressedDataset
from util.data.images import evenly_spaced
from util.data.transforms import Normalize
from util.pictures import PAPER, as_rgb, save, table, write_lines

PANEL = 384  # side of a panel in pixels
NUM_SAMPLES = 12
COLUMNS = 4


def panel(picture: np.ndarray) -> np.ndarray:
    """Fits uint8 [h, w, 3] into a white square of PANEL pixels, with its aspect ratio kept."""
    square = ImageOps.pad(
        Image.fromarray(picture), (PANEL, PANEL), Image.Resampling.NEAREST, color="white", centering=(0, 0)
    )
    return np.asarray(square)


def as_picture(img: torch.Tensor, normalize: Normalize) -> np.ndarray:
    """Returns uint8 [H, W, 3] of an image [C, H, W] as stored: one channel as grey, or else the first three.

    Pixels with an invalid channel among these are striped black and white, which no class is.
    """
    imgs = normalize(img[None].to(normalize.mean.device), fill=False)
    shown = as_rgb(normalize.undo(imgs))[0].cpu()
    picture = (shown.nan_to_num() * 255).round().byte().permute(1, 2, 0).numpy()
    is_invalid = shown.isnan().any(dim=0).numpy()
    rows, columns = is_invalid.nonzero()
    picture[is_invalid] = ((rows + columns) % 8 < 4)[:, None] * 255
    return picture


def write_samples(
    path: Path, dataset: AddressedDataset, normalize: Normalize, draw_target: Callable[..., np.ndarray] | None
) -> None:
    """Draws evenly spaced training samples as the model sees them in the first epoch.

    draw_target: `draw_target(picture uint8 [h, w, 3], sample)` returns a panel; None writes the name of the class.
    """
    images = dataset.images
    panels = []
    for i in evenly_spaced(len(images), NUM_SAMPLES).tolist():
        view, label, *_ = dataset[0, i]
        img = view if torch.is_tensor(view) else view[0]
        picture = as_picture(img, normalize)
        if draw_target is None:
            panels.append(write_lines(panel(picture), dict.fromkeys(images.classes[label : label + 1], PAPER)))
        else:
            panels.append(draw_target(picture, view))
    rows = [panels[first : first + COLUMNS] for first in range(0, len(panels), COLUMNS)]
    save(table(rows, ["training samples"]), path)
