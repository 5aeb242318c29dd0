"""Histograms of oriented gradients, as LocalMIM (Wang et al., CVPR 2023) predicts them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.no_grad()
def hog(
    imgs: Tensor,
    cells: Sequence[int],
    num_bins: int = 9,
    bias: Tensor | None = None,
) -> list[Tensor]:
    """Returns histograms [B, C * num_bins, H / cell, W / cell] of images [B, C, H, W] for each side in `cells`.

    Every colour channel has its own histogram of unsigned orientations. The whole gradient of a pixel goes to one bin.
    The mean over the cell is divided by its L2 norm. The angle is atan2(horizontal, vertical), so bin 0 is a gradient
    along y. Results are float32, or float64 for float64 images.

    cells: sides in pixels, increasing, each a multiple of the first, which divide the image. bias: [len(cells), 2],
    added to the two filter responses; the release's filters for ViT-L have one by accident.

    No matrix product occurs here, so autocast does not reduce the precision. Orientations close to a multiple of pi
    fall into the first or the last bin by rounding. For 8-bit images these are 0.4 to 3 % of the pixels, in any
    implementation.
    """
    smallest = cells[0]
    imgs = imgs.to(torch.promote_types(imgs.dtype, torch.float32))
    horizontal, vertical = _sobel(imgs)
    histograms = []
    if bias is None:
        finest = _histograms(horizontal, vertical, smallest, num_bins)
        for cell in cells:  # a larger cell's histogram is the mean of those of the smallest cells in it
            cell_means = F.avg_pool2d(finest, cell // smallest)
            histograms.append(_normalize_colors(cell_means, num_bins))
    else:
        for cell, (horizontal_bias, vertical_bias) in zip(cells, bias, strict=True):
            biased_horizontal = horizontal + horizontal_bias
            biased_vertical = vertical + vertical_bias
            cell_means = _histograms(biased_horizontal, biased_vertical, cell, num_bins)
            histograms.append(_normalize_colors(cell_means, num_bins))
    return histograms


def _normalize_colors(histograms: Tensor, num_bins: int) -> Tensor:
    """Divides the histogram of each colour in [B, C * num_bins, h, w] by its L2 norm."""
    by_color = histograms.unflatten(1, (-1, num_bins))  # [B, C, bins, h, w]
    by_color = F.normalize(by_color, dim=2, eps=1e-12)
    return by_color.flatten(1, 2)


def _sobel(imgs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Sobel's responses "left minus right" and "top minus bottom", mirrored at the border, [B, C, H, W] each.

    Differences are taken before sums, so that they are exactly zero at the border.
    """
    padded = F.pad(imgs, (1, 1, 1, 1), mode="reflect")
    across = padded[..., :, :-2] - padded[..., :, 2:]
    upper = across[..., :-2, :]
    middle = across[..., 1:-1, :]
    lower = across[..., 2:, :]
    horizontal = upper + 2 * middle + lower
    along = padded[..., :-2, :] - padded[..., 2:, :]
    left = along[..., :, :-2]
    centre = along[..., :, 1:-1]
    right = along[..., :, 2:]
    vertical = left + 2 * centre + right
    return horizontal, vertical


def _histograms(horizontal: Tensor, vertical: Tensor, cell: int, num_bins: int) -> Tensor:
    """Returns the mean magnitude of responses [B, C, H, W] per bin and cell, [B, C * num_bins, H / cell, W / cell]."""
    magnitude = (horizontal.square() + vertical.square()).sqrt()
    half_turns = torch.atan2(horizontal, vertical) / math.pi  # in [-1, 1]
    bins = (half_turns * num_bins).floor().remainder(num_bins)
    means = []
    # One bin at a time: no memory for a one-hot image, and a fixed order of summation, unlike a scatter on a GPU.
    for k in range(num_bins):
        in_bin = torch.where(bins == k, magnitude, 0.0)
        means.append(F.avg_pool2d(in_bin, cell))
    return torch.stack(means, dim=2).flatten(1, 2)


def orientation_colors(histograms: Tensor, num_bins: int) -> Tensor:
    """Turns histograms [B, C * num_bins, h, w] into images [B, 3, h, w] in [0, 1].

    The hue is the mean orientation over all colours, the brightness is its strength.
    """
    by_color = histograms.float().unflatten(1, (-1, num_bins))  # [B, C, bins, h, w]
    weights = by_color.mean(dim=1)
    bin_centers = torch.arange(num_bins, device=weights.device) + 0.5
    angles = 2 * math.pi / num_bins * bin_centers
    angles = angles.view(-1, 1, 1)
    x = (weights * angles.cos()).sum(dim=1)
    y = (weights * angles.sin()).sum(dim=1)
    hue = torch.atan2(y, x).unsqueeze(1)  # [B, 1, h, w]
    strength = (x.square() + y.square()).sqrt()
    brightness = strength.clamp(max=1).unsqueeze(1)
    third = 2 * math.pi / 3
    phases = hue.new_tensor([0.0, -third, third])  # of red, green and blue
    colors = (hue + phases.view(3, 1, 1)).cos()
    return brightness * (0.5 + 0.5 * colors)
